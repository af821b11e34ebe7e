"""The replica: what an entry's commands and steps do to the state that every rank holds (`log/state.py`).

It changes by the log's commands and steps and by settled outcomes, and by nothing else; two replicas at the same entry are
equal. No I/O, no clock, no iteration over sets. The leader's planner reads it and changes it only through the same methods
that followers call.
"""

import numpy as np

from slipstream.log.batch import Batch, InitSlot, Offload, Outcome, Restore
from slipstream.log.entries import Step
from slipstream.log.grammar import Matcher
from slipstream.log.pages import page_keys
from slipstream.log.request import Request
from slipstream.log.settling import Settled, settle
from slipstream.log.state import FREE, I32, PREEMPTED, RUNNING, InFlightStep, ReplicaState

NO_PAGES = np.zeros((0, 3), I32)


class Replica(ReplicaState):
    """The one way to change a rank's state. An entry settles, then gives commands, then launches one step at most."""

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
            self._init_slot(slot, request, keys, matcher)
        known = int(self.target[slot])
        page_size = self.limits.page_size
        cached: list[int] = []
        if request.sampling.prompt_logprobs < 0:
            cached = self.pages.find(keys[: (known - 1) // page_size])
        for page in cached:
            self.pages.share(page)
        row = self.page_table[slot]
        need = -(-known // page_size)
        for column in range(need):
            page = cached[column] if column < len(cached) else self.pages.take()
            row[column] = page
            self.fresh_pages.append((slot, column, page))
        self.held[slot] = need
        self.launched[slot] = max(len(cached) * page_size, self._restore(slot, len(cached)))
        self.phase[slot] = RUNNING
        self.prefilling.append(slot)
        self.changes.append(b"A%d,%d,%d;" % (slot, request.id, len(cached)) + row[:need].tobytes())
        return len(cached) * page_size

    def _init_slot(self, slot: int, request: Request, keys: list[bytes], matcher: Matcher | None) -> None:
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
        self.calls.append(InitSlot(slot, request))

    def _restore(self, slot: int, cached: int) -> int:
        """Brings back what a preemption copied to the host, from column `cached` on; returns how many tokens are there."""
        tokens, host = self.offloaded.pop(slot, (0, ()))
        if len(host) > cached:
            pages = self.page_table[slot, cached : len(host)].tolist()
            self.calls.append(Restore(host[cached:], tuple(pages)))
            keys = self.keys[slot]
            for column in range(cached, min(tokens // self.limits.page_size, len(keys))):
                self.pages.publish(int(self.page_table[slot, column]), keys[column])
        self.free_host.extend(host)
        return tokens

    def drop(self, slot: int, id: int, kept: int = -1) -> bool:
        """Frees slot and pages of request `id`; False, and nothing changes, when it is not there.

        Rows of it that are in flight run and are thrown away (their epoch has passed).
        """
        request = self.requests.get(slot)
        if request is None or request.id != id:
            self.changes.append(b"D?%d,%d;" % (slot, id))
            return False
        if kept >= 0:
            for column in range((request.prompt_len + kept) // self.limits.page_size, int(self.held[slot])):
                self.pages.forget(int(self.page_table[slot, column]))
        self._release_pages(slot)
        self.leave(slot)
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
        self.changes.append(b"D%d,%d,%d;" % (slot, id, kept))
        return True

    def preempt(self, slot: int, keep: bool) -> None:
        """Takes the pages of a running request, after copying them to the host if `keep` (which the caller has made sure fits).

        A row of it in flight still commits; it publishes no page. The copy needs no lease: it is queued on the stream that
        orders all writes of pages.
        """
        assert self.phase[slot] == RUNNING
        if keep:
            pages = self.page_table[slot, : -(-int(self.launched[slot]) // self.limits.page_size)].tolist()
            host = tuple(self.free_host.pop() for _ in pages)
            self.offloaded[slot] = (int(self.launched[slot]), host)
            self.calls.append(Offload(tuple(pages), host))
        self._release_pages(slot)
        self.leave(slot)
        self.phase[slot] = PREEMPTED
        self.launched[slot] = 0
        self.changes.append(b"P%d,%d;" % (slot, keep))

    def _release_pages(self, slot: int) -> None:
        for column in range(int(self.held[slot]) - 1, -1, -1):
            self.pages.release(int(self.page_table[slot, column]))
        self.held[slot] = 0
        if self.fresh_pages:
            self.fresh_pages = [t for t in self.fresh_pages if t[0] != slot]

    # --- steps

    def prompt_keys(self, request: Request) -> list[bytes]:
        """Content keys of the prompt's full pages; none where pages cannot be found again."""
        return page_keys(request.prompt, self.limits.page_size, request.salt) if self.limits.caching else []

    def masked(self, batch: Batch) -> bool:
        """Whether a sampling row of the batch is bound by a grammar."""
        return bool(self.matchers) and any(s in self.matchers for s in batch.slots[batch.samples].tolist())

    def pages_wanted(self, slots: np.ndarray) -> np.ndarray:
        """Which of these decoding slots need a page for their next row, as a bool column."""
        return self.launched[slots] == self.held[slots] * self.limits.page_size

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
        self.flights.append(InFlightStep(seq, sampling, self.epoch[sampling], scored))
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
        self.flights.append(InFlightStep(seq, slots, self.epoch[slots], ()))
        return self._batch(seq, packed, starts, self._ones[:n], self._trues[:n], n)

    def _batch(
        self, seq: int, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, samples: np.ndarray, decodes: int
    ) -> Batch:
        pages = NO_PAGES
        if self.fresh_pages:
            pages = np.array(self.fresh_pages, I32)
            self.fresh_pages = []
        self.changes += (slots.tobytes(), starts.tobytes(), counts.tobytes(), pages.tobytes())
        return Batch(seq, slots, starts, counts, samples, decodes, pages)

    def _grow(self, decoding: np.ndarray) -> None:
        """Gives a page to each decode row that begins one."""
        wanted = self.pages_wanted(decoding)
        if not np.count_nonzero(wanted):
            return
        for slot in decoding[wanted].tolist():
            page = self.pages.take()
            column = int(self.held[slot])
            self.page_table[slot, column] = page
            self.held[slot] = column + 1
            self.fresh_pages.append((slot, column, page))

    def _publish_prompt(self, slot: int, start: int, end: int) -> None:
        """Indexes the known pages that a chunk completes. Sound before it has run: later readers are later in the stream."""
        keys = self.keys[slot]
        page_size = self.limits.page_size
        for column in range(start // page_size, min(end // page_size, len(keys))):
            page = int(self.page_table[slot, column])
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
        """Applies the outcome of the oldest unsettled step. Raises ValueError when its tokens are not one for each row."""
        return settle(self, outcome)
