"""The contents of pages, states and snapshots in the checker's model: the tokens behind each, written in the order of the log.

It is small and exact, where `memory` is fast. A free page is blanked at once, so a row that reads a page which was handed out
again, or is not yet written, finds a blank.
"""

from slipstream.log.batch import Batch, DeviceOp, InitSlot, Offload, Restore, SetState
from slipstream.log.replica import Replica
from slipstream.verify.check.cases import Case
from slipstream.verify.check.device import Device
from slipstream.verify.common.memory import Violation

BLANK, EMPTY = -1, -2  # a place that no row may read; the state before the first token


class Ghost:
    """Contents are names of token sequences; equal sequences have equal names."""

    def __init__(self, case: Case):
        self.case, self.limits = case, case.limits
        self.names: dict[tuple[object, ...], int] = {}
        size, tables = case.limits.page_size, case.limits.tables
        self.pages = [[[BLANK] * size for _ in range(table.pages + 1)] for table in tables]
        self.host: list[dict[int, list[int]]] = [{} for _ in tables]
        self.rows: dict[tuple[int, int, int], int] = {}  # the device's page tables: (table, slot, column) -> page
        self.states: dict[int, int] = {}  # by slot
        self.snapshots: dict[int, int] = {}

    def copy(self) -> "Ghost":
        other = Ghost.__new__(Ghost)
        other.__dict__.update(self.__dict__)
        other.pages = [[page.copy() for page in table] for table in self.pages]
        other.host = [host.copy() for host in self.host]
        other.rows, other.states, other.snapshots = self.rows.copy(), self.states.copy(), self.snapshots.copy()
        return other

    def state(self) -> tuple[object, ...]:
        pages = tuple(tuple(map(tuple, table)) for table in self.pages)
        host = tuple(tuple((h, tuple(p)) for h, p in sorted(table.items())) for table in self.host)
        slots = tuple(sorted(self.rows.items())), tuple(sorted(self.states.items()))
        return pages, host, slots, tuple(sorted(self.snapshots.items()))

    def queue(self, op: DeviceOp) -> None:
        match op:
            case InitSlot(slot, _):
                self.states[slot] = EMPTY
            case SetState(slot, snapshot):
                self.states[slot] = self.snapshots[snapshot] if snapshot else EMPTY
            case Offload(t, pages, host):
                self.host[t].update((h, self.pages[t][page].copy()) for page, h in zip(pages, host, strict=True))
            case Restore(t, host, pages):
                for h, page in zip(host, pages, strict=True):
                    self.pages[t][page] = self.host[t][h].copy()

    def run(self, batch: Batch, device: Device) -> list[int]:
        """One step: reads of earlier positions, then writes. Returns the pages of the first table that are written."""
        for t, slot, column, page in batch.pages.tolist():
            self.rows[t, slot, column] = page
        rows = list(zip(batch.slots.tolist(), device.starts(batch), batch.counts.tolist(), strict=True))
        for i, (slot, start, count) in enumerate(rows):
            if i >= batch.decodes and start + count > device.length[slot]:
                raise Violation(
                    f"entry {batch.seq}: slot {slot} computes up to {start + count}; {device.length[slot]} are known"
                )
            if self.limits.snapshot_tokens:
                self._move_state(batch, device, slot, start, count)
        for t in range(len(self.limits.tables)):
            for slot, start, _ in rows:
                self._read(batch.seq, device, t, slot, start)
        written = [self._write(batch.seq, device, t, rows) for t in range(len(self.limits.tables))]
        return sorted({page for page, _ in written[0]})

    def _name(self, device: Device, slot: int, end: int) -> int:
        """Names the first `end` tokens of a slot, drafts taken for right."""
        id = device.owner[slot]
        text = (self.case.requests[id].salt, *device.text(id, device.length[slot], end))
        return self.names.setdefault(text, len(self.names)) if end else EMPTY

    def _move_state(self, batch: Batch, device: Device, slot: int, start: int, count: int) -> None:
        """A chunk moves a state to its end; how far a row with drafts moves it, its sampling decides."""
        if self.states[slot] != self._name(device, slot, start):
            raise Violation(f"entry {batch.seq}: the state of slot {slot} is not that of its first {start} tokens")
        self.states[slot] = self._name(device, slot, start + count)

    def _read(self, seq: int, device: Device, t: int, slot: int, start: int) -> None:
        size, window = self.limits.page_size, self.limits.tables[t].window
        for p in range(max(0, start - window + 1) if window else 0, start):
            page = self.rows.get((t, slot, p // size), 0)
            if self.pages[t][page][p % size] != self._name(device, slot, p + 1):
                where = f"request {device.owner[slot]} reads position {p} in page {page} of table {t}"
                raise Violation(f"entry {seq}: {where}, where its tokens do not lie")

    def _write(self, seq: int, device: Device, t: int, rows: list[tuple[int, int, int]]) -> dict[tuple[int, int], int]:
        """What the rows write, by (page, place); what lies beyond a request's limit goes to the null page."""
        size = self.limits.page_size
        written: dict[tuple[int, int], int] = {}
        for slot, start, count in rows:
            for p in range(start, min(start + count, len(device.known[device.owner[slot]]))):
                place = (self.rows.get((t, slot, p // size), 0), p % size)
                if place[0] == 0 or place in written:
                    raise Violation(f"entry {seq}: two rows write to page {place[0]} of table {t}, or one to the null page")
                written[place] = self._name(device, slot, p + 1)
        for (page, at), name in written.items():
            self.pages[t][page][at] = name
        return written

    def sampled(self, batch: Batch, device: Device) -> None:
        """States stand before the last token that rows have given; then those that the step saves are saved."""
        if self.limits.snapshot_tokens:
            for slot in batch.slots[batch.judged].tolist():
                self.states[slot] = self._name(device, slot, device.length[slot] - 1)
            for slot, snapshot in batch.saves:
                self.snapshots[snapshot] = self.states[slot]

    def forget(self, replica: Replica) -> None:
        """Blanks the places that no row may read again."""
        for t, table in enumerate(replica.cache.tables):
            for page in table.pages.free:
                self.pages[t][page] = [BLANK] * self.limits.page_size
            for host in table.free_host:
                self.host[t].pop(host, None)
        for snapshot in replica.cache.snapshots.free:
            self.snapshots.pop(snapshot, None)
        self.states = {slot: state for slot, state in self.states.items() if slot in replica.requests}
        first, held = [table.first for table in replica.cache.tables], replica.held
        self.rows = {
            (t, slot, column): page
            for (t, slot, column), page in self.rows.items()
            if slot in replica.requests and first[t][slot] <= column < held[slot]
        }
