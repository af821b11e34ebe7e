"""A group of production machines over a toy device, in one process and in virtual time, for tests of replica and planner.

The device keeps, for each position of each page, a checksum of all tokens up to it, and refuses a row that would read anything
else: so a page that is handed out too early, found too early or restored wrongly is seen at the row that reads it. A token is
a function of all tokens before it, so one wrong token changes all that follow.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any
from zlib import crc32

import numpy as np

from slipstream.log.batch import Batch, DeviceOp, InitSlot, Offload, Outcome, Restore, SetState
from slipstream.log.caches import Limits, one_table
from slipstream.log.replica import Replica
from slipstream.log.request import Request, SamplingParams
from slipstream.log.state import ENDED, FREE, PREEMPTED, RUNNING
from slipstream.log.tables import PageTable
from slipstream.process.protocol import Abort, Finished, Refused, Started, Submit, Tokens
from slipstream.rank.effects import Interpreter
from slipstream.rank.events import (
    Arrived,
    DeviceEffect,
    Launch,
    LaunchForward,
    LaunchSample,
    Poison,
    Prepare,
    Send,
    SendReply,
    SendToFront,
    Span,
    Tick,
    Wake,
)
from slipstream.rank.leader import Leader
from slipstream.rank.loop import Rank
from slipstream.schedule.budget import Budget
from slipstream.schedule.planner import Planner

VOCAB = 97


def request(
    id: int, prompt: Iterable[int], max_tokens: int = 8, priority: int = 0, salt: bytes = b"", **sampling: Any
) -> Request:
    tokens = np.array(list(prompt), "<i4").tobytes()
    return Request(id, tokens, max_tokens, SamplingParams(temperature=0.0, **sampling), priority, salt)


def expected(r: Request) -> list[int]:
    """What the toy device answers, computed plainly."""
    crc, out = crc32(r.prompt), []
    while len(out) < r.max_tokens:
        out.append(crc % VOCAB)
        if out[-1] in r.sampling.stop_ids:
            break
        crc = crc32(np.int32(out[-1]).tobytes(), crc)
    return out


class ToyDevice:
    """Refuses a row that would read a page or a state whose contents are not those of its own tokens."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.page_size = limits.page_size
        self.page_tables: list[dict[int, dict[int, int]]] = [{} for _ in limits.tables]  # of each table: slot -> column -> page
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, int] = {}  # slot -> the request's limit
        self.sums: dict[int, list[int]] = {}  # by slot and position: checksum of the tokens through it
        self.kv: list[dict[tuple[int, int], int]] = [{} for _ in limits.tables]  # (page, offset) -> checksum
        self.host: list[dict[tuple[int, int], int | None]] = [{} for _ in limits.tables]
        self.state: dict[int, int] = {}  # slot -> checksum of the tokens that its state stands for
        self.snapshots = {0: 0}
        self.computed = 0  # tokens of prompts and answers that went through the model

    def queue(self, op: DeviceOp) -> None:
        """Carries out what commands ask for, in the order of the stream."""
        match op:
            case InitSlot(slot, r):
                self.tokens[slot] = np.frombuffer(r.prompt, "<i4").tolist()
                self.ends[slot] = r.prompt_len + r.max_tokens
                self.state[slot] = 0
                for table in self.page_tables:
                    table[slot] = {}
                sums, crc = [], 0
                for token in self.tokens[slot]:
                    crc = crc32(np.int32(token).tobytes(), crc)
                    sums.append(crc)
                self.sums[slot] = sums
            case SetState(slot, snapshot):
                self.state[slot] = self.snapshots[snapshot]
            case Offload(t, pages, host):
                for page, h in zip(pages, host, strict=True):
                    self.host[t].update({(h, i): self.kv[t].get((page, i)) for i in range(self.page_size)})
            case Restore(t, host, pages):
                for page, h in zip(pages, host, strict=True):
                    kept = ((i, self.host[t].get((h, i))) for i in range(self.page_size))
                    self.kv[t].update({(page, i): value for i, value in kept if value is not None})

    def run(self, batch: Batch) -> Outcome:
        for t, slot, column, page in batch.pages.tolist():
            assert page > 0, "the null page was handed out"
            self.page_tables[t][slot][column] = page
        columns = (batch.slots, batch.starts, batch.counts, batch.sampled)
        rows = list(zip(*(c.tolist() for c in columns), strict=True))
        assert len({r[0] for r in rows}) == len(rows), "two rows of one slot in a step"
        # a decode row begins at the device's own length: its entry names the most that this can be
        rows = [(s, len(self.tokens[s]) - 1 if i < batch.decodes else a, n, w) for i, (s, a, n, w) in enumerate(rows)]
        for slot, start, count, _ in rows:
            self._check_reads(slot, start, count)
        written: set[tuple[int, int, int]] = set()
        n = len(batch.judged)
        outcome = Outcome(batch.seq, np.full((n, max(batch.width, 1)), -1, np.int32), np.ones(n, np.int32))
        judged = 0
        for slot, start, count, sampled in rows:
            values = self._values(slot, start, count)
            for at, value in enumerate(values, start):
                if at < self.ends[slot]:
                    self._write(slot, at, value, written)
            self.computed += count
            if sampled:
                given = self._judge(slot, start + count - sampled, sampled)
                outcome.tokens[judged, : len(given)] = given
                outcome.accepted[judged] = len(given)
                judged += 1
            last = len(self.tokens[slot]) - 2 if sampled else start + count - 1
            self.state[slot] = self.sums[slot][last]
        self.snapshots.update((snapshot, self.state[slot]) for slot, snapshot in batch.saves)
        return outcome

    def _check_reads(self, slot: int, start: int, count: int) -> None:
        for t, (table, limits) in enumerate(zip(self.page_tables, self.limits.tables, strict=True)):
            first = max(0, start - limits.window + 1) if limits.window else 0
            for at in range(first, start):
                found = self.kv[t].get((table[slot][at // self.page_size], at % self.page_size))
                assert found == self.sums[slot][at], f"slot {slot} would read what is not there at position {at} of {start}"
        if self.limits.snapshot_tokens:
            want = self.sums[slot][start - 1] if start else 0
            assert self.state[slot] == want, f"slot {slot} has not the state of its first {start} tokens"

    def _write(self, slot: int, at: int, value: int, written: set[tuple[int, int, int]]) -> None:
        for t, table in enumerate(self.page_tables):
            place = (t, table[slot][at // self.page_size], at % self.page_size)
            assert place not in written, "two rows of one step write the same place"
            written.add(place)
            self.kv[t][place[1:]] = value

    def _values(self, slot: int, start: int, count: int) -> list[int]:
        """What a row leaves in its pages: the checksum of each position; of a wrong draft, and from there on, another value."""
        known = self.sums[slot][start : start + count]
        return known + [self._draft_sum(slot, start + i) for i in range(len(known), count)]

    def _draft_sum(self, slot: int, at: int) -> int:
        crc = self.sums[slot][-1]
        for _ in range(len(self.sums[slot]), at + 1):
            crc = crc32(np.int32(crc % VOCAB).tobytes(), crc) ^ (0 if _right(crc) else 1)
        return crc

    def _judge(self, slot: int, start: int, sampled: int) -> list[int]:
        """The tokens that a row gives, from position start + 1 on: as many drafts as are right, and the one after."""
        del self.tokens[slot][start + 1 :], self.sums[slot][start + 1 :]
        given: list[int] = []
        while len(given) < max(1, min(sampled, self.ends[slot] - start - 1)):
            crc = self.sums[slot][-1]
            given.append(crc % VOCAB)
            self.tokens[slot].append(crc % VOCAB)
            self.sums[slot].append(crc32(np.int32(crc % VOCAB).tobytes(), crc))
            if not _right(crc):
                break
        return given


def _right(crc: int) -> bool:
    """Whether the draft after the tokens with this checksum is the token that follows."""
    return crc32(crc.to_bytes(4, "little")) % 3 != 0


class ToyGroup(Interpreter):
    def __init__(
        self,
        size: int = 1,
        asynchronous: bool = True,
        pages: int = 64,
        slots: int = 8,
        max_len: int = 256,
        page_size: int = 4,
        cap: int = 64,
        target: float | None = None,
        max_queue: int = 1000,
        caching: bool = True,
        host_pages: int = 0,
        limits: Limits | None = None,
    ):
        limits = limits or one_table(pages, slots, max_len, page_size, caching, host_pages)
        self.replica = Replica(limits)
        self.planner = Planner(self.replica, Budget(cap, target), max_queue)
        self.leader = Leader(self.replica, self.planner, size, asynchronous)
        self.ranks: list[Rank] = [self.leader, *(Rank(i, Replica(limits)) for i in range(1, size))]
        self.devices = [ToyDevice(limits) for _ in self.ranks]
        self.queues: list[deque] = [deque() for _ in self.ranks]
        self.mail: deque[tuple[int, Any]] = deque()
        self.now = 0.0
        self.acting = 0  # the rank whose effects are carried out
        self.batches: list[Batch] = []  # as the leader launched them
        self.entries: list[Any] = []
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, str] = {}
        self.refused: dict[int, Refused] = {}
        self.cached: dict[int, int] = {}
        self.sent: dict[int, Request] = {}

    # --- what comes in

    def submit(self, *requests: Request) -> None:
        for r in requests:
            self.sent[r.id] = r
            self.tokens[r.id] = []
            self._on(0, Submit(r))

    def abort(self, id: int, kept: int = -1) -> None:
        self._on(0, Abort(id, kept))

    def turn(self) -> None:
        """One step ends on every rank; or, where none runs, time passes."""
        self.now += 1e-3
        if not any(self.queues):
            self.now += 1.0
            self._on(0, Tick())
            return
        for rank, queue in enumerate(self.queues):
            while queue:
                what = queue.popleft()
                device = self.devices[rank]
                if isinstance(what, Batch):
                    self._on(rank, Arrived(device.run(what)))
                    break
                device.queue(what)
        self._on(0, Tick())
        for rank in self.ranks:
            check(rank.replica)

    def run(self, turns: int = 5000) -> None:
        """Until every request has ended; AssertionError when that does not come."""
        for _ in range(turns):
            if len(self.ends) + len(self.refused) == len(self.sent):
                return
            self.turn()
        raise AssertionError(f"no end after {turns} turns: {self.tokens.keys() - self.ends.keys()}")

    # --- effects

    def _on(self, rank: int, event: Any) -> None:
        self.mail.append((rank, event))
        while self.mail:
            to, what = self.mail.popleft()
            self.acting = to
            self.perform(self.ranks[to].on(what, self.now))

    def device(self, effect: DeviceEffect) -> None:
        if isinstance(effect, Launch):
            self.queues[self.acting].append(effect.batch)
            if not self.acting:
                self.batches.append(effect.batch)
        else:
            assert not isinstance(effect, LaunchForward | LaunchSample), "this group has no grammars"
            self.queues[self.acting].append(effect)

    def send(self, effect: Send) -> None:
        self.entries.append(effect.message)
        self.mail.extend((i, effect.message) for i in range(1, len(self.ranks)))

    def reply(self, effect: SendReply) -> None:
        if self.acting:
            self.mail.append((0, effect.reply))

    def send_to_front(self, effect: SendToFront) -> None:
        self._receive(effect.message)

    def poison(self, effect: Poison) -> None:
        raise AssertionError(effect.reason)

    def prepare(self, effect: Prepare) -> None:
        raise AssertionError("this group has no grammars")

    def wake(self, effect: Wake) -> None:
        """A turn of the group is a tick anyway."""

    def span(self, effect: Span) -> None:
        """Nobody times this group."""

    def _receive(self, m: Any) -> None:
        if isinstance(m, Tokens):
            for id, token in zip(np.frombuffer(m.ids, "<i8").tolist(), np.frombuffer(m.tokens, "<i4").tolist(), strict=True):
                assert id not in self.ends, f"a token of request {id} after its end"
                self.tokens[id].append(token)
        elif isinstance(m, Finished):
            assert m.id not in self.ends, f"request {m.id} ended twice"
            self.ends[m.id] = m.reason
        elif isinstance(m, Refused):
            self.refused[m.id] = m
        elif isinstance(m, Started):
            self.cached[m.id] = m.cached_tokens

    # --- what must hold

    def assert_right(self) -> None:
        """Every request that was not aborted has exactly the tokens that it should have, and nothing is held any more."""
        for id, r in self.sent.items():
            if id in self.refused:
                continue
            want = expected(r)
            if self.ends[id] == "abort":
                assert self.tokens[id] == want[: len(self.tokens[id])]
            else:
                assert self.tokens[id] == want
                assert self.ends[id] == ("stop" if want[-1] in r.sampling.stop_ids else "length")
        for _ in range(5):
            self.turn()
        for rank in self.ranks:
            replica = rank.replica
            assert replica.cache.held == 0 and not replica.requests and not replica.flights and not replica.unpublished
            assert replica.cache.snapshots.held == 0 and not replica.drafts
            assert len(replica.free_slots) == replica.limits.slots
            for table, limits in zip(replica.cache.tables, replica.limits.tables, strict=True):
                assert len(table.free_host) == limits.host_pages
            assert replica.digest == self.replica.digest


def check(replica: Replica) -> None:
    """The invariants of a replica, at any time between two events."""
    for table in replica.cache.tables:
        check_table(replica, table)
    check_pages(replica.cache.snapshots)
    for slot, phase in enumerate(replica.phase.tolist()):
        held = int(replica.held[slot])
        computed, committed, sure, bound, limit = (
            int(c[slot]) for c in (replica.computed, replica.committed, replica.sure, replica.bound, replica.limit)
        )
        assert (phase == FREE) == (slot in replica.free_slots) == (slot not in replica.requests)
        if phase == FREE:
            assert not held
            continue
        assert computed <= bound and committed <= sure <= bound and committed <= limit
        if replica.limits.width == 1:
            assert sure == bound <= limit
        assert held * replica.limits.page_size >= min(computed, limit) or phase == PREEMPTED
        assert (slot in replica.decoding) + (slot in replica.prefilling) <= (phase == RUNNING)
        if phase == PREEMPTED:
            assert not held and not computed
        if phase == ENDED:
            assert any(e.slot == slot for e in replica.ended)


def check_table(replica: Replica, table: PageTable) -> None:
    """Every page is referenced as often as the rows of slots name it."""
    refs = [0] * (table.pages.total + 1)
    for slot in range(replica.limits.slots):
        for page in table.rows[slot, table.first[slot] : replica.held[slot]].tolist():
            assert page > 0
            refs[page] += 1
    assert refs == table.pages.refs, "page tables and reference counts differ"
    check_pages(table.pages)


def check_pages(pages: Any) -> None:
    """Each page is in one state, and the index and its inverse agree."""
    held = [p for p in range(1, pages.total + 1) if pages.refs[p]]
    states = [*pages.free, *pages.idle, *held]
    assert sorted(states) == list(range(1, pages.total + 1)), "a page is in two states, or in none"
    assert all(p not in pages.keys for p in pages.free), "a free page is indexed"
    assert all(p in pages.keys for p in pages.idle), "an idle page is not indexed"
    assert {k: p for p, k in pages.keys.items()} == pages.index
    assert pages.available + pages.held == pages.total
