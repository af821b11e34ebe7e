"""The replica: the deterministic state that every rank holds, as columns by slot.

It changes by the log's commands and steps and by settled outcomes, and by nothing else; two replicas at the same entry are
equal. No I/O, no clock, no iteration over sets. The leader's planner reads it and changes it only through the same methods
that followers call.

Tokens of a slot:
    [0, launched)          their keys and values are computed or queued
    [launched, target)     known, or in flight, and not yet queued
    [0, committed)         their ids are settled
A row that reaches `target` samples the token at position `target`, which then moves up by one.
"""

from collections import deque
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from slipstream.log.batch import Batch, Call, Offload, Outcome, Restore, Seat
from slipstream.log.entries import Step
from slipstream.log.grammar import Matcher
from slipstream.log.pages import Pages, page_keys
from slipstream.log.request import Request

I32 = np.dtype("<i4")
_COPIED = {np.ndarray, list, dict, deque, Pages}  # types of fields that a replica's copy must not share
NO_PAGES = np.zeros((0, 3), I32)

FREE, RUNNING, PREEMPTED, ENDED = 0, 1, 2, 3  # states of a slot


class Limits(NamedTuple):
    """What a group agreed to hold: the minimum over its ranks."""

    pages: int
    slots: int
    max_len: int  # tokens of one request, prompt and answer
    block: int = 16  # tokens of a page
    caching: bool = True  # whether pages can be found again by content
    host_pages: int = 0  # pages in host memory for requests that are preempted, numbered from 0


class Flight(NamedTuple):
    """A launched step that is not settled yet: its sampling rows."""

    seq: int
    slots: np.ndarray  # intp [sampling rows]
    epochs: np.ndarray  # int32 [sampling rows]
    scored: tuple[tuple[int, int], ...]  # (slot, request id) of chunks that return prompt log probabilities


class Ended(NamedTuple):
    """A request that a settle ended; its slot waits for the drop."""

    slot: int
    id: int
    reason: str
    error: str = ""


class Settled(NamedTuple):
    """What one settle committed: column i is token tokens[i] of request ids[i]."""

    slots: np.ndarray  # intp
    ids: np.ndarray  # int64
    tokens: np.ndarray  # int32
    columns: np.ndarray | None  # positions of these rows in the outcome, None when all rows counted
    ended: list[Ended]
    scored: tuple[tuple[int, int], ...]  # (slot, request id) of chunks with prompt log probabilities


class Replica:
    def __init__(self, limits: Limits):
        self.limits = limits
        slots = limits.slots
        self.width = -(-limits.max_len // limits.block)  # columns of a block table
        self.pages = Pages(limits.pages)
        self.free_slots = list(range(slots - 1, -1, -1))  # popped from the end
        self.requests: dict[int, Request] = {}  # slot -> request
        self.keys: dict[int, list[bytes]] = {}  # slot -> content keys of its full pages so far
        self.phase = np.zeros(slots, np.int8)
        self.epoch = np.zeros(slots, np.int32)  # how often the slot was handed out
        self.ids = np.full(slots, -1, np.int64)
        self.launched = np.zeros(slots, np.int32)
        self.target = np.zeros(slots, np.int32)
        self.committed = np.zeros(slots, np.int32)
        self.limit = np.zeros(slots, np.int32)
        self.held = np.zeros(slots, np.int32)  # pages in the block table
        self.last_row = np.full(slots, -1, np.int64)  # the entry of the slot's latest row
        self.tokens = np.zeros((slots, limits.max_len), I32)
        self.table = np.zeros((slots, self.width), I32)
        # slots with one row per step, in order of joining; replaced, never changed; intp, with which numpy indexes fastest
        self.decoding = np.zeros(0, np.intp)
        self._packed = (self.decoding, np.zeros(0, np.int32))  # `decoding` and the same as int32
        self.prefilling: list[int] = []  # slots with launched < target, in order of joining
        self.ended: list[Ended] = []  # in order of ending, not dropped yet
        self.flights: deque[Flight] = deque()
        self.settled_to = -1  # entries through this one are settled
        self.fresh_pages: list[tuple[int, int, int]] = []  # (slot, column, page) not yet in a batch
        self.free_host = list(range(limits.host_pages - 1, -1, -1))  # popped from the end
        self.offloaded: dict[int, tuple[int, tuple[int, ...]]] = {}  # slot -> (tokens, host pages)
        self.calls: list[Call] = []  # asked of the device by commands, in order, not yet taken
        self.stop_ids: dict[int, int] = {}  # stop token -> how many slots name it
        self.matchers: dict[int, Matcher] = {}  # slot -> its grammar's state
        self.digest = bytes(8)
        self._ones, self._trues = np.ones(slots, np.int32), np.ones(slots, np.bool_)  # columns of decode rows
        self._mix: list[bytes] = []  # what this entry adds to the digest

    # --- commands

    def admit(self, slot: int, request: Request, keys: list[bytes], matcher: Matcher | None = None) -> int:
        """Gives `request` the slot and pages for all its known tokens. Returns how many of them the prefix cache holds.

        `keys` are the content keys of the prompt's full pages, `matcher` its grammar's (both ignored on return from a
        preemption). One token is always left to compute. The caller has made sure that slot and pages are there.
        """
        if self.phase[slot] == PREEMPTED:
            keys = self.keys[slot]
        else:
            self.free_slots.remove(slot)
            self._seat(slot, request, keys, matcher)
        known = int(self.target[slot])
        block = self.limits.block
        cached: list[int] = []
        if request.sampling.prompt_logprobs < 0:
            cached = self.pages.find(keys[: (known - 1) // block])
        for page in cached:
            self.pages.share(page)
        row = self.table[slot]
        need = -(-known // block)
        for column in range(need):
            page = cached[column] if column < len(cached) else self.pages.take()
            row[column] = page
            self.fresh_pages.append((slot, column, page))
        self.held[slot] = need
        self.launched[slot] = max(len(cached) * block, self._restore(slot, len(cached)))
        self.phase[slot] = RUNNING
        self.prefilling.append(slot)
        self._mix.append(b"A%d,%d,%d;" % (slot, request.id, len(cached)) + row[:need].tobytes())
        return len(cached) * block

    def _seat(self, slot: int, request: Request, keys: list[bytes], matcher: Matcher | None) -> None:
        prompt = np.frombuffer(request.prompt, I32)
        n = len(prompt)
        self.requests[slot] = request
        self.keys[slot] = keys.copy()
        self.ids[slot] = request.id
        self.epoch[slot] += 1
        self.target[slot] = self.committed[slot] = n
        self.limit[slot] = n + request.max_tokens
        self.last_row[slot] = -1
        self.tokens[slot, :n] = prompt
        for stop in request.sampling.stop_ids:
            self.stop_ids[stop] = self.stop_ids.get(stop, 0) + 1
        if matcher is not None:
            self.matchers[slot] = matcher
        self.calls.append(Seat(slot, request))

    def _restore(self, slot: int, cached: int) -> int:
        """Brings back what a preemption copied to the host, from column `cached` on; returns how many tokens are there."""
        tokens, host = self.offloaded.pop(slot, (0, ()))
        if len(host) > cached:
            pages = self.table[slot, cached : len(host)].tolist()
            self.calls.append(Restore(host[cached:], tuple(pages)))
            keys = self.keys[slot]
            for column in range(cached, min(tokens // self.limits.block, len(keys))):
                self.pages.publish(int(self.table[slot, column]), keys[column])
        self.free_host.extend(host)
        return tokens

    def drop(self, slot: int, id: int, kept: int = -1) -> bool:
        """Frees slot and pages of request `id`; False, and nothing changes, when it is not there.

        Rows of it that are in flight run and are thrown away (their epoch has passed).
        """
        request = self.requests.get(slot)
        if request is None or request.id != id:
            self._mix.append(b"D?%d,%d;" % (slot, id))
            return False
        if kept >= 0:
            for column in range((request.prompt_len + kept) // self.limits.block, int(self.held[slot])):
                self.pages.forget(int(self.table[slot, column]))
        self._release_pages(slot)
        self._leave(slot)
        self.ended = [e for e in self.ended if e.slot != slot]
        for stop in request.sampling.stop_ids:
            self.stop_ids[stop] -= 1
            if not self.stop_ids[stop]:
                del self.stop_ids[stop]
        del self.requests[slot], self.keys[slot]
        self.matchers.pop(slot, None)
        self.free_host.extend(self.offloaded.pop(slot, (0, ()))[1])
        self.phase[slot] = FREE
        self.epoch[slot] += 1
        self.ids[slot] = -1
        self.free_slots.append(slot)
        self._mix.append(b"D%d,%d,%d;" % (slot, id, kept))
        return True

    def preempt(self, slot: int, keep: bool) -> None:
        """Takes the pages of a running request, after copying them to the host if `keep` (which the caller has made sure fits).

        A row of it in flight still commits; it publishes no page. The copy needs no lease: it is queued on the stream that
        orders all writes of pages.
        """
        assert self.phase[slot] == RUNNING
        if keep:
            pages = self.table[slot, : -(-int(self.launched[slot]) // self.limits.block)].tolist()
            host = tuple(self.free_host.pop() for _ in pages)
            self.offloaded[slot] = (int(self.launched[slot]), host)
            self.calls.append(Offload(tuple(pages), host))
        self._release_pages(slot)
        self._leave(slot)
        self.phase[slot] = PREEMPTED
        self.launched[slot] = 0
        self._mix.append(b"P%d,%d;" % (slot, keep))

    def _release_pages(self, slot: int) -> None:
        for column in range(int(self.held[slot]) - 1, -1, -1):
            self.pages.release(int(self.table[slot, column]))
        self.held[slot] = 0
        if self.fresh_pages:
            self.fresh_pages = [t for t in self.fresh_pages if t[0] != slot]

    def _leave(self, slot: int) -> None:
        """Takes the slot out of the sets that rows come from."""
        if slot in self.prefilling:
            self.prefilling.remove(slot)
        elif slot in self.decoding:
            self.decoding = self.decoding[self.decoding != slot]

    # --- steps

    def prompt_keys(self, request: Request) -> list[bytes]:
        """Content keys of the prompt's full pages; none where pages cannot be found again."""
        return page_keys(request.prompt, self.limits.block, request.salt) if self.limits.caching else []

    def masked(self, batch: Batch) -> bool:
        """Whether a sampling row of the batch is bound by a grammar."""
        return bool(self.matchers) and any(s in self.matchers for s in batch.slots[batch.samples].tolist())

    def pending(self, slot: int) -> bool:
        """Whether a token of the slot is in flight."""
        return bool(self.target[slot] > self.committed[slot])

    def pages_wanted(self, slots: np.ndarray) -> np.ndarray:
        """Which of these decoding slots need a page for their next row, as a bool column."""
        return self.launched[slots] == self.held[slots] * self.limits.block

    def launch(self, seq: int, step: Step) -> Batch:
        """Moves the state past one step and returns its rows. The caller has made sure that pages are there."""
        if step.decode and not step.slots:
            return self._launch_decode(seq)
        slots, starts, counts = step.columns()
        slots = slots.astype(np.intp)
        decodes = 0
        if step.decode:
            own = self.decoding
            decodes = len(own)
            if len(slots):
                slots = np.concatenate((own, slots))
                starts = np.concatenate((self.launched[own], starts))
                counts = np.concatenate((np.ones(decodes, np.int32), counts))
            else:
                slots, starts, counts = own, self.launched[own], np.ones(decodes, np.int32)
        else:
            while decodes < len(slots) and slots[decodes] in self.decoding:
                decodes += 1
        if decodes:
            self._grow(slots[:decodes])
        ends = starts + counts
        samples = ends == self.target[slots]
        self.launched[slots] = ends
        self.last_row[slots] = seq
        sampling = slots if samples.all() else slots[samples]
        self.target[sampling] += 1
        for i in range(decodes, len(slots)):
            self._publish_prompt(int(slots[i]), int(starts[i]), int(ends[i]))
        self._move_on(slots, samples, decodes)
        chunks = ((s, self.requests[s]) for s in slots[decodes:].tolist())
        scored = tuple((s, r.id) for s, r in chunks if r.sampling.prompt_logprobs >= 0)
        self.flights.append(Flight(seq, sampling, self.epoch[sampling], scored))
        return self._batch(seq, slots.astype(np.int32), starts, counts, samples, decodes)

    def _launch_decode(self, seq: int) -> Batch:
        """`launch` for the step that most are: one row of each decoding slot. launched + 1 == target holds for them."""
        slots = self.decoding
        n = len(slots)
        if self._packed[0] is not slots:
            self._packed = (slots, slots.astype(np.int32))
        packed = self._packed[1]
        self._grow(slots)
        starts = self.launched[slots]
        ends = starts + 1
        targets = ends + 1
        self.launched[slots] = ends
        self.target[slots] = targets
        self.last_row[slots] = seq
        full = targets >= self.limit[slots]
        if np.count_nonzero(full):
            self.decoding = slots[~full]
        self.flights.append(Flight(seq, slots, self.epoch[slots], ()))
        return self._batch(seq, packed, starts, self._ones[:n], self._trues[:n], n)

    def _batch(
        self, seq: int, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, samples: np.ndarray, decodes: int
    ) -> Batch:
        pages = NO_PAGES
        if self.fresh_pages:
            pages = np.array(self.fresh_pages, I32)
            self.fresh_pages = []
        self._mix += (slots.tobytes(), starts.tobytes(), counts.tobytes(), pages.tobytes())
        return Batch(seq, slots, starts, counts, samples, decodes, pages)

    def _grow(self, decoding: np.ndarray) -> None:
        """Gives a page to each decode row that begins one."""
        wanted = self.pages_wanted(decoding)
        if not np.count_nonzero(wanted):
            return
        for slot in decoding[wanted].tolist():
            page = self.pages.take()
            column = int(self.held[slot])
            self.table[slot, column] = page
            self.held[slot] = column + 1
            self.fresh_pages.append((slot, column, page))

    def _publish_prompt(self, slot: int, start: int, end: int) -> None:
        """Indexes the known pages that a chunk completes. Sound before it has run: later readers are later in the stream."""
        keys = self.keys[slot]
        block = self.limits.block
        for column in range(start // block, min(end // block, len(keys))):
            page = int(self.table[slot, column])
            if page not in self.pages.keys:
                self.pages.publish(page, keys[column])

    def _move_on(self, slots: np.ndarray, samples: np.ndarray, decodes: int) -> None:
        """Prompts that are through start to decode; rows that can grow no longer leave."""
        full = self.target[slots] >= self.limit[slots]
        if decodes < len(slots):
            joined = [int(s) for s, through in zip(slots[decodes:], samples[decodes:], strict=True) if through]
            if joined:
                self.prefilling = [s for s in self.prefilling if s not in joined]
                staying = [s for s in joined if self.target[s] < self.limit[s]]
                self.decoding = np.concatenate((self.decoding, np.array(staying, np.intp)))
        if decodes and full[:decodes].any():
            gone = slots[:decodes][full[:decodes]]
            self.decoding = self.decoding[~np.isin(self.decoding, gone)]

    # --- settling

    def settle(self, outcome: Outcome) -> Settled:
        """Applies the outcome of the oldest unsettled step."""
        flight = self.flights.popleft()
        assert flight.seq == outcome.seq, f"outcome of entry {outcome.seq} where {flight.seq} was due"
        if len(flight.slots) != len(outcome.tokens):
            raise ValueError(f"entry {flight.seq}: {len(flight.slots)} rows sampled, {len(outcome.tokens)} tokens came back")
        self.settled_to = flight.seq
        slots, tokens, columns = flight.slots, outcome.tokens, None
        alive = (self.epoch[slots] == flight.epochs) & (self.phase[slots] != ENDED)
        if np.count_nonzero(alive) < len(slots):
            columns = np.flatnonzero(alive)
            slots, tokens = slots[columns], tokens[columns]
        ended: list[Ended] = []
        if outcome.errors:
            slots, tokens, columns, ended = self._settle_errors(flight, outcome, slots, tokens, columns)
        at = self.committed[slots]
        after = at + 1
        self.tokens[slots, at] = tokens
        self.committed[slots] = after
        if self.limits.caching:
            inside = at % self.limits.block
            if np.count_nonzero(inside) < len(slots):
                self._publish_generated(slots[inside == 0].tolist())
        if self.matchers:
            for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
                if slot in self.matchers:
                    self.matchers[slot].accept(token)
        ends = after >= self.limit[slots]
        if self.stop_ids and not self.stop_ids.keys().isdisjoint(tokens.tolist()):
            for stop in self.stop_ids:
                ends |= tokens == stop
        if np.count_nonzero(ends):
            ended += self._end(slots[ends].tolist(), tokens[ends].tolist())
        self._mix.append(tokens.tobytes())
        return Settled(slots, self.ids[slots], tokens, columns, ended, flight.scored)

    def _settle_errors(
        self, flight: Flight, outcome: Outcome, slots: np.ndarray, tokens: np.ndarray, columns: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[Ended]]:
        """Ends the rows that failed by themselves and leaves the others."""
        columns = np.arange(len(slots)) if columns is None else columns
        bad = np.isin(columns, list(outcome.errors))
        ended = [
            Ended(s, int(self.ids[s]), "error", outcome.errors[c])
            for s, c in zip(slots[bad].tolist(), columns[bad].tolist(), strict=True)
        ]
        for e in ended:
            self._leave(e.slot)
            self.phase[e.slot] = ENDED
        self.ended += ended
        self._mix.append(b"E%r" % [(e.slot, e.error) for e in ended])
        return slots[~bad], tokens[~bad], columns[~bad], ended

    def _end(self, slots: list[int], tokens: list[int]) -> list[Ended]:
        ended: list[Ended] = []
        for slot, token in zip(slots, tokens, strict=True):
            request = self.requests[slot]
            if token in request.sampling.stop_ids:
                reason = "stop"
            elif self.committed[slot] >= self.limit[slot]:
                reason = "length"
            else:
                continue  # another slot's stop token
            self._leave(slot)
            self.phase[slot] = ENDED
            ended.append(Ended(slot, request.id, reason))
        self.ended += ended
        return ended

    def _publish_generated(self, slots: list[int]) -> None:
        """Indexes the pages that committed tokens have filled.

        The row that wrote a page's last token has settled when the token after it is known, which is when this is called.
        """
        block = self.limits.block
        for slot in slots:
            keys = self.keys[slot]
            full = (int(self.committed[slot]) - 1) // block
            if len(keys) < full:
                first = len(keys)
                text = self.tokens[slot, first * block : full * block].tobytes()
                keys += page_keys(text, block, self.requests[slot].salt, keys[-1] if keys else b"")
                if self.phase[slot] == PREEMPTED:
                    continue  # its pages are gone
                for column in range(first, full):
                    page = int(self.table[slot, column])
                    if column < self.held[slot] and page not in self.pages.keys:
                        self.pages.publish(page, keys[column])

    # --- the digest, and copies for the checker

    def seal(self) -> int:
        """Ends an entry: folds what it changed into the running digest and returns that as an unsigned 64-bit integer."""
        free = b"%d,%d" % (self.pages.available, len(self.decoding))
        self.digest = blake2b(b"".join((self.digest, *self._mix, free)), digest_size=8).digest()
        self._mix.clear()
        return int.from_bytes(self.digest, "little")

    def copy(self) -> "Replica":
        other = type(self).__new__(type(self))
        for name, value in self.__dict__.items():
            other.__dict__[name] = value.copy() if type(value) in _COPIED else value
        other.keys = {slot: keys.copy() for slot, keys in self.keys.items()}
        other.matchers = {slot: matcher.copy() for slot, matcher in self.matchers.items()}
        return other

    def state(self) -> tuple[object, ...]:
        """A hashable value that two equal replicas share. What the columns still hold of freed slots is left out."""
        live: list[tuple[object, ...]] = []
        for s in sorted(self.requests):
            numbers = (self.launched, self.target, self.committed, self.held, self.last_row)
            known = self.tokens[s, : self.committed[s]].tobytes()
            table = self.table[s, : self.held[s]].tobytes()
            live.append((s, self.requests[s].id, int(self.phase[s]), *(int(c[s]) for c in numbers), known, table))
        return (
            tuple(live),
            self.epoch.tobytes(),
            self.decoding.tobytes(),
            self.pages.state(),
            tuple(len(keys) for keys in self.keys.values()),
            tuple(self.prefilling),
            tuple(self.ended),
            tuple((f.seq, f.slots.tobytes(), f.epochs.tobytes()) for f in self.flights),
            tuple(self.fresh_pages),
            tuple(self.free_slots),
            tuple(self.free_host),
            tuple(self.offloaded.items()),
            self.settled_to,
        )
