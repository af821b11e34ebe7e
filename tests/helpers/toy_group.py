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

from slipstream.log.batch import Batch, InitSlot, Offload, Outcome, Restore
from slipstream.log.replica import Replica
from slipstream.log.request import Request, SamplingParams
from slipstream.log.state import ENDED, FREE, PREEMPTED, RUNNING, Limits
from slipstream.process.protocol import Finished, Refused, Started, Tokens
from slipstream.rank.events import (
    Aborted,
    Arrived,
    Effect,
    Launch,
    Poison,
    Send,
    SendReply,
    SendToFront,
    Submitted,
    Tick,
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
    def __init__(self, limits: Limits):
        self.page_size = limits.page_size
        self.page_table: dict[int, dict[int, int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.sums: dict[int, list[int]] = {}  # by slot and position: checksum of the tokens through it
        self.kv: dict[tuple[int, int], int] = {}  # (page, offset) -> checksum
        self.host: dict[tuple[int, int], int | None] = {}
        self.computed = 0  # tokens of prompts and answers that went through the model

    def seat(self, slot: int, r: Request) -> None:
        self.tokens[slot] = np.frombuffer(r.prompt, "<i4").tolist()
        self.page_table[slot] = {}
        sums, crc = [], 0
        for token in self.tokens[slot]:
            crc = crc32(np.int32(token).tobytes(), crc)
            sums.append(crc)
        self.sums[slot] = sums

    def copy(self, from_device: bool, pages: tuple[int, ...], host: tuple[int, ...]) -> None:
        for page, h in zip(pages, host, strict=True):
            for i in range(self.page_size):
                if from_device:
                    self.host[h, i] = self.kv.get((page, i))
                elif self.host.get((h, i)) is not None:
                    self.kv[page, i] = self.host[h, i]  # type: ignore[assignment]

    def run(self, batch: Batch) -> Outcome:
        for slot, column, page in batch.pages.tolist():
            assert page > 0, "the null page was handed out"
            self.page_table[slot][column] = page
        rows = list(
            zip(batch.slots.tolist(), batch.starts.tolist(), batch.counts.tolist(), batch.samples.tolist(), strict=True)
        )
        assert len({r[0] for r in rows}) == len(rows), "two rows of one slot in a step"
        for slot, start, _, _ in rows:
            for at in range(start):
                found = self.kv.get((self.page_table[slot][at // self.page_size], at % self.page_size))
                assert found == self.sums[slot][at], f"slot {slot} would read what is not there at position {at} of {start}"
        written: set[tuple[int, int]] = set()
        sampled = []
        for slot, start, count, samples in rows:
            for at in range(start, start + count):
                place = (self.page_table[slot][at // self.page_size], at % self.page_size)
                assert place not in written, "two rows of one step write the same place"
                written.add(place)
                self.kv[place] = self.sums[slot][at]
            self.computed += count
            if samples:
                end = start + count
                crc = self.sums[slot][end - 1]
                del self.tokens[slot][end:], self.sums[slot][end:]
                self.tokens[slot].append(crc % VOCAB)
                self.sums[slot].append(crc32(np.int32(crc % VOCAB).tobytes(), crc))
                sampled.append(crc % VOCAB)
        return Outcome(batch.seq, np.array(sampled, np.int32))


class ToyGroup:
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
    ):
        limits = Limits(pages, slots, max_len, page_size, caching, host_pages)
        self.replica = Replica(limits)
        self.planner = Planner(self.replica, Budget(cap, target), max_queue)
        self.leader = Leader(self.replica, self.planner, size, asynchronous)
        self.ranks: list[Rank] = [self.leader, *(Rank(i, Replica(limits)) for i in range(1, size))]
        self.devices = [ToyDevice(limits) for _ in self.ranks]
        self.queues: list[deque] = [deque() for _ in self.ranks]
        self.mail: deque[tuple[int, Any]] = deque()
        self.now = 0.0
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
            self._on(0, Submitted(r))

    def abort(self, id: int, kept: int = -1) -> None:
        self._on(0, Aborted(id, kept))

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
                if isinstance(what, InitSlot):
                    device.seat(what.slot, what.request)
                else:
                    device.copy(isinstance(what, Offload), what.pages, what.host)
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
            for effect in self.ranks[to].on(what, self.now):
                self._perform(to, effect)

    def _perform(self, rank: int, effect: Effect) -> None:
        if isinstance(effect, Launch):
            self.queues[rank].append(effect.batch)
            if not rank:
                self.batches.append(effect.batch)
        elif isinstance(effect, InitSlot | Offload | Restore):
            self.queues[rank].append(effect)
        elif isinstance(effect, Send):
            self.entries.append(effect.message)
            self.mail.extend((i, effect.message) for i in range(1, len(self.ranks)))
        elif isinstance(effect, SendReply):
            if rank:
                self.mail.append((0, effect.reply))
        elif isinstance(effect, SendToFront):
            self._tell(effect.message)
        elif isinstance(effect, Poison):
            raise AssertionError(effect.reason)

    def _tell(self, m: Any) -> None:
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
            assert rank.replica.pages.held == 0 and not rank.replica.requests and not rank.replica.flights
            assert len(rank.replica.free_slots) == rank.replica.limits.slots
            assert len(rank.replica.free_host) == rank.replica.limits.host_pages
            assert rank.replica.digest == self.replica.digest


def check(replica: Replica) -> None:
    """The invariants of a replica, at any time between two events."""
    pages, page_size = replica.pages, replica.limits.page_size
    refs = [0] * (pages.total + 1)
    for slot, phase in enumerate(replica.phase.tolist()):
        held = int(replica.held[slot])
        for page in replica.page_table[slot, :held].tolist():
            assert page > 0
            refs[page] += 1
        launched, target, limit, committed = (
            int(c[slot]) for c in (replica.launched, replica.target, replica.limit, replica.committed)
        )
        assert (phase == FREE) == (slot in replica.free_slots) == (slot not in replica.requests)
        if phase == FREE:
            assert not held
            continue
        assert launched <= target <= limit and committed <= target
        assert held * page_size >= launched or phase in (PREEMPTED,)
        assert (slot in replica.decoding) + (slot in replica.prefilling) <= (phase == RUNNING)
        if phase == PREEMPTED:
            assert not held and not launched
        if phase == ENDED:
            assert any(e.slot == slot for e in replica.ended)
    assert refs == pages.refs, "block tables and reference counts differ"
    check_pages(pages)


def check_pages(pages: Any) -> None:
    """Each page is in one state, and the index and its inverse agree."""
    held = [p for p in range(1, pages.total + 1) if pages.refs[p]]
    states = [*pages.free, *pages.idle, *held]
    assert sorted(states) == list(range(1, pages.total + 1)), "a page is in two states, or in none"
    assert all(p not in pages.keys for p in pages.free), "a free page is indexed"
    assert all(p in pages.keys for p in pages.idle), "an idle page is not indexed"
    assert {k: p for p, k in pages.keys.items()} == pages.index
    assert pages.available + pages.held == pages.total
