"""What pages hold in the checker's model: for each place, which tokens lie behind it; written in the order of the log.

Small and exact, where `memory` is fast. A free page is blanked at once, so whoever reads a page that was handed out again, or
not yet written, finds a blank.
"""

from slipstream.log.batch import Batch, Offload, Restore
from slipstream.log.replica import Replica
from slipstream.verify.check.cases import Case
from slipstream.verify.common.memory import Violation

BLANK = -1


class Ghost:
    """`tags[request][position]` names the tokens up to there; equal prefixes have equal names."""

    def __init__(self, case: Case, tokens: list[list[int]]):
        names: dict[tuple[object, ...], int] = {}
        self.tags = [
            [names.setdefault((r.salt, *known[: p + 1]), len(names)) for p in range(len(known))]
            for r, known in zip(case.requests, tokens, strict=True)
        ]
        self.page_size = case.limits.page_size
        self.pages = [[BLANK] * self.page_size for _ in range(case.limits.pages + 1)]
        self.host: dict[int, list[int]] = {}

    def copy(self) -> "Ghost":
        other = Ghost.__new__(Ghost)
        other.tags, other.page_size = self.tags, self.page_size
        other.pages = [page.copy() for page in self.pages]
        other.host = dict(self.host)
        return other

    def state(self) -> tuple[object, ...]:
        return tuple(map(tuple, self.pages)), tuple((h, tuple(p)) for h, p in sorted(self.host.items()))

    def run(self, batch: Batch, replica: Replica) -> list[int]:
        """One step: reads of earlier positions, then writes, then what was written. Returns the pages written."""
        rows = list(zip(batch.slots.tolist(), batch.starts.tolist(), batch.counts.tolist(), strict=True))
        for slot, start, _ in rows:
            for p in range(start):
                self._expect(replica, slot, p, batch.seq)
        written: dict[tuple[int, int], int] = {}
        for slot, start, count in rows:
            tags = self.tags[replica.requests[slot].id]
            for p in range(start, start + count):
                page = int(replica.page_table[slot, p // self.page_size])
                place = (page, p % self.page_size)
                if page == 0 or place in written:
                    raise Violation(f"entry {batch.seq}: two rows write to page {page}, or one to the null page")
                written[place] = tags[p]
        for (page, at), tag in written.items():
            self.pages[page][at] = tag
        return sorted({page for page, _ in written})

    def _expect(self, replica: Replica, slot: int, p: int, seq: int) -> None:
        page = int(replica.page_table[slot, p // self.page_size])
        id = replica.requests[slot].id
        if self.pages[page][p % self.page_size] != self.tags[id][p]:
            raise Violation(f"entry {seq}: request {id} reads position {p} in page {page}, where its tokens do not lie")

    def call(self, call: object) -> None:
        if isinstance(call, Offload):
            for page, host in zip(call.pages, call.host, strict=True):
                self.host[host] = self.pages[page].copy()
        elif isinstance(call, Restore):
            for host, page in zip(call.host, call.pages, strict=True):
                self.pages[page] = self.host[host].copy()

    def forget(self, replica: Replica) -> None:
        """Blanks what nobody may read again."""
        for page in replica.pages.free:
            self.pages[page] = [BLANK] * self.page_size
        for host in replica.free_host:
            self.host.pop(host, None)
