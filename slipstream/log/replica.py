"""The replica: what an entry's commands and steps do to the state that every rank holds (`log/state.py`).

Only the log's commands and steps and settled outcomes change it, so two replicas at the same entry are equal. No I/O, no clock,
no iteration over sets. Only `apply`, `launch` and `settle` move it past an entry. The leader's planner calls the same methods
as a follower.
"""

from typing import assert_never, cast

import numpy as np

from slipstream.errors import BadEntry
from slipstream.log.batch import Batch, InitSlot, Offload, Outcome, Restore, SetState
from slipstream.log.entries import Admit, Command, Drop, Preempt, Step
from slipstream.log.grammar import Matcher
from slipstream.log.pages import page_keys
from slipstream.log.request import Request
from slipstream.log.settling import Settled, settle
from slipstream.log.state import FREE, PREEMPTED, RUNNING, Body, InFlightStep, Offloaded, ReplicaState
from slipstream.log.tables import I32, Hit

NO_PAGES = np.zeros((0, 4), I32)


class Replica(ReplicaState):
    """The state and its rules. An entry settles outcomes, then gives commands, then launches at most one step."""

    # --- messages that come ahead of an entry

    def receive(self, request: Request, keys: list[bytes] | None = None) -> None:
        """Receives a request that a later entry may admit. `keys`: content keys of its prompt's pages if they are hashed."""
        self.bodies[request.id] = Body(request, keys)

    def prepare(self, id: int, made: dict[str, Matcher]) -> None:
        """Receives the resources of a request, by kind."""
        if "grammar" in made:
            self.prepared[id] = made["grammar"]

    def forget(self, id: int) -> None:
        """Forgets a received request that will not be admitted."""
        self.bodies.pop(id, None)
        self.prepared.pop(id, None)

    # --- commands

    def apply(self, command: Command) -> int:
        """Applies one command to the state and queues its device operations in `ops`.

        Returns for an Admit the number of cached prompt tokens, and for a Drop 1 if the request was there, else 0. Raises
        BadEntry and changes nothing if the command does not fit the state. The leader has made sure that there are pages.
        """
        match command:
            case Admit():
                return self._admit(command.slot, command.id)
            case Drop():
                return int(self._drop(command.slot, command.id, command.kept))
            case Preempt():
                self._preempt(command.slot, command.keep)
                return 0
        assert_never(command)

    def _admit(self, slot: int, id: int) -> int:
        """Gives a request a slot and pages for all its known tokens. One token is always left to compute."""
        if self.phase[slot] == PREEMPTED and self.ids[slot] == id:
            if self.pending(slot):
                raise BadEntry(f"request {id} returns to slot {slot} while a row of it is in flight")
        elif slot in self.free_slots and id in self.bodies:
            self._init_slot(slot, id)
        else:
            raise BadEntry(f"request {id} is admitted to slot {slot}; the slot is taken or the request never came")
        request, keys, known = self.requests[slot], self.keys[slot], int(self.committed[slot])
        columns = self.limits.pages_of(known)
        lookup = keys[: (known - 1) // self.limits.page_size] if request.sampling.prompt_logprobs < 0 else []
        hit = self.cache.find(lookup)
        restored = self._restored(slot, known)
        if restored > hit.columns * self.limits.page_size:
            self._take_restored(slot, hit, columns, restored)
        else:
            self._take(slot, hit, columns)
            self._give_back_host(slot)
        self.held[slot] = columns
        self.phase[slot] = RUNNING
        self.prefilling.append(slot)
        self.changes.append(b"A%d,%d,%d,%d;" % (slot, id, self.computed[slot], hit.snapshot))
        self.changes += [t.rows[slot, t.first[slot] : columns].tobytes() for t in self.cache.tables]
        return int(self.computed[slot])

    def _init_slot(self, slot: int, id: int) -> None:
        body = self.bodies.pop(id)
        request = body.request
        prompt = np.frombuffer(request.prompt, I32)
        n = len(prompt)
        self.free_slots.remove(slot)
        self.requests[slot] = request
        self.keys[slot] = (self.prompt_keys(request) if body.keys is None else body.keys).copy()
        self.ids[slot] = id
        self.epoch[slot] += 1
        self.computed[slot] = 0
        self.committed[slot] = self.sure[slot] = self.bound[slot] = n
        self.limit[slot] = n + request.max_tokens
        self.last_row[slot] = -1
        self.tokens[slot, :n] = prompt
        for stop in request.sampling.stop_ids:
            self.stop_ids[stop] = self.stop_ids.get(stop, 0) + 1
        if id in self.prepared:
            self.matchers[slot] = self.prepared.pop(id)
        self.ops.append(InitSlot(slot, request))

    def _take(self, slot: int, hit: Hit, columns: int) -> None:
        """Shares the pages of a hit and takes new pages for the other columns."""
        for t, (table, shared) in enumerate(zip(self.cache.tables, hit.pages, strict=True)):
            first = hit.columns - len(shared)
            table.first[slot] = first
            for page in shared:
                table.pages.share(page)
            self._name(t, slot, first, [*shared, *(table.pages.take() for _ in range(hit.columns, columns))])
        self.computed[slot] = hit.columns * self.limits.page_size
        if self.limits.snapshot_tokens and (hit.snapshot or self.phase[slot] == PREEMPTED):
            self.ops.append(SetState(slot, hit.snapshot))  # a new owner's slot already begins with zeros

    def _restored(self, slot: int, known: int) -> int:
        """How many tokens a preemption has kept for this slot. Of drafts in flight then, only the right ones count."""
        kept = self.offloaded.get(slot)
        return min(kept.tokens, known - 1) if kept is not None else 0

    def _take_restored(self, slot: int, hit: Hit, columns: int, restored: int) -> None:
        """Restores the pages that a preemption copied to the host. Pages that are still in the cache are shared instead."""
        keys, full = self.keys[slot], restored // self.limits.page_size
        kept = self.offloaded[slot]
        for t, (table, (first, host)) in enumerate(zip(self.cache.tables, kept.tables, strict=True)):
            shared = [] if table.window else hit.pages[t]  # a window's pages may lie before those of the hit
            for page in shared:
                table.pages.share(page)
            begin = first + len(shared)
            table.first[slot] = first
            self._name(t, slot, first, [*shared, *(table.pages.take() for _ in range(begin, columns))])
            last = min(first + len(host), columns)
            if begin < last:
                pages = table.rows[slot, begin:last].tolist()
                self.ops.append(Restore(t, host[begin - first : last - first], tuple(pages)))
            for column in range(begin, min(full, last, len(keys))):
                table.pages.publish(int(table.rows[slot, column]), keys[column])
        self.computed[slot] = restored  # per-slot state has stayed in the slot
        self._give_back_host(slot)

    def _name(self, t: int, slot: int, first: int, pages: list[int]) -> None:
        """Writes pages into a row of a table, and into the next batch for the device."""
        self.cache.tables[t].rows[slot, first : first + len(pages)] = pages
        self.fresh_pages += [(t, slot, first + i, page) for i, page in enumerate(pages)]

    def _give_back_host(self, slot: int) -> None:
        kept = self.offloaded.pop(slot, None)
        if kept is not None:
            for table, (_, host) in zip(self.cache.tables, kept.tables, strict=True):
                table.free_host.extend(host)

    def _drop(self, slot: int, id: int, kept: int) -> bool:
        """Frees the slot and pages of request `id`. Returns False and changes nothing else if the request is not there.

        Its rows in flight still run. Their outcome is ignored because the slot's epoch has changed.
        """
        request = self.requests.get(slot)
        if request is None or request.id != id:
            self.changes.append(b"D?%d,%d;" % (slot, id))
            return False
        if kept >= 0:
            beyond = (request.prompt_len + kept) // self.limits.page_size
            for table in self.cache.tables:
                for column in range(max(beyond, int(table.first[slot])), int(self.held[slot])):
                    table.pages.forget(int(table.rows[slot, column]))
        self._release_pages(slot)
        self.leave(slot)
        self.ended = [e for e in self.ended if e.slot != slot]
        for stop in request.sampling.stop_ids:
            self.stop_ids[stop] -= 1
            if not self.stop_ids[stop]:
                del self.stop_ids[stop]
        del self.requests[slot], self.keys[slot]
        self.matchers.pop(slot, None)
        self.drafts.pop(slot, None)
        self._give_back_host(slot)
        self.phase[slot] = FREE
        self.epoch[slot] += 1
        self.ids[slot] = -1
        self.free_slots.append(slot)
        self.changes.append(b"D%d,%d,%d;" % (slot, id, kept))
        return True

    def _preempt(self, slot: int, keep: bool) -> None:
        """Takes the pages of a running request. With `keep`, they are copied to the host first, where `host_fits` must hold.

        A row in flight still commits, but does not publish a page. The copy needs no lease, because it is queued on the stream
        that orders all writes of pages. Per-slot state stays in the slot, which the request keeps.
        """
        if self.phase[slot] != RUNNING or (keep and not self.host_fits(slot)):
            raise BadEntry(f"slot {slot} cannot be preempted: it does not run, or its pages do not fit in host memory")
        if keep:
            self._offload(slot)
        self._release_pages(slot)
        self.leave(slot)
        self.phase[slot] = PREEMPTED
        self.computed[slot] = 0
        self.changes.append(b"P%d,%d;" % (slot, keep))

    def _columns_computed(self, slot: int) -> int:
        return min(self.limits.pages_of(int(self.computed[slot])), int(self.held[slot]))

    def host_fits(self, slot: int) -> bool:
        """Whether the host has room for the computed pages of a running request."""
        columns = self._columns_computed(slot)
        return all(columns - int(t.first[slot]) <= len(t.free_host) for t in self.cache.tables)

    def _offload(self, slot: int) -> None:
        columns = self._columns_computed(slot)
        kept: list[tuple[int, tuple[int, ...]]] = []
        for t, table in enumerate(self.cache.tables):
            first = int(table.first[slot])
            pages = tuple(table.rows[slot, first:columns].tolist())
            host = tuple(table.free_host.pop() for _ in pages)
            kept.append((first, host))
            if pages:
                self.ops.append(Offload(t, pages, host))
        self.offloaded[slot] = Offloaded(int(self.computed[slot]), tuple(kept))

    def _release_pages(self, slot: int) -> None:
        for table in self.cache.tables:
            for column in range(int(self.held[slot]) - 1, int(table.first[slot]) - 1, -1):
                table.pages.release(int(table.rows[slot, column]))
            table.first[slot] = 0
        self.held[slot] = 0
        for _, snapshot in self.unpublished.pop(slot, ()):
            self.cache.snapshots.release(snapshot)
        if self.fresh_pages:
            self.fresh_pages = [entry for entry in self.fresh_pages if entry[1] != slot]

    # --- steps

    def prompt_keys(self, request: Request) -> list[bytes]:
        """Content keys of the prompt's full pages; none where pages cannot be found again."""
        return page_keys(request.prompt, self.limits.page_size, request.salt) if self.limits.caching else []

    def masked(self, batch: Batch) -> bool:
        """Whether a judged row of the batch is bound by a grammar."""
        return bool(self.matchers) and any(s in self.matchers for s in batch.slots[batch.judged].tolist())

    def wants_pages(self, slots: np.ndarray, width: int) -> np.ndarray:
        """Which of these decoding slots need pages for a next row of this width, as a bool column."""
        return self._row_ends(slots, width) > self.held[slots] * self.limits.page_size

    def columns_wanted(self, slots: np.ndarray, width: int) -> int:
        """How many pages of each table these decoding slots need for their next rows."""
        wants = self.wants_pages(slots, width)
        if not np.count_nonzero(wants):
            return 0
        wanting = slots[wants]
        return int((-(-self._row_ends(wanting, width) // self.limits.page_size) - self.held[wanting]).sum())

    def _row_ends(self, slots: np.ndarray, width: int) -> np.ndarray:
        """The last position at which each next row can end. The device writes positions beyond a limit to the null page."""
        ends = self.computed[slots] + width
        return np.minimum(ends, self.limit[slots]) if width > 1 else ends

    def launch(self, seq: int, step: Step) -> Batch:
        """Moves the state past one step and returns its rows. The leader has made sure that there are pages.

        Raises BadEntry and changes nothing if a row does not begin at num_computed_tokens of its request, ends beyond its
        known tokens, or has an impossible width.
        """
        if not 0 <= step.decode <= self.limits.width:
            raise BadEntry(f"decode rows of width {step.decode}; 1 to {self.limits.width} are possible")
        if not step.rows:
            return self._launch_decode(seq, step.decode)
        slots, starts, counts, sampled = step.columns()
        slots = slots.astype(np.intp)
        self._check(step.decode, slots, starts, counts, sampled)
        decodes = int(np.count_nonzero(np.isin(slots, self.decoding)))
        if step.decode:
            own = self.decoding
            decodes = len(own)
            widths = self._widths[step.decode, :decodes]
            slots = np.concatenate((own, slots))
            starts = np.concatenate((self.computed[own], starts))
            counts, sampled = np.concatenate((widths, counts)), np.concatenate((widths, sampled))
        if decodes:
            self._grow(slots[:decodes], sampled[:decodes])
        judged = slots[sampled > 0]
        self.computed[slots] = starts + counts
        self.last_row[slots] = seq
        self.bound[slots] += sampled
        if self.limits.width > 1:
            self.sure[judged] += 1
        saves = self._publish_chunks(slots[decodes:], starts[decodes:])
        if self.limits.snapshots and decodes:
            saves += self._save_decodes(slots[:decodes], starts[:decodes])
        self._slide(slots[decodes:])
        chunks = ((s, self.requests[s]) for s in slots[decodes:].tolist())
        scored = tuple((s, r.id) for s, r in chunks if r.sampling.prompt_logprobs >= 0)
        self.flights.append(InFlightStep(seq, judged, self.epoch[judged], sampled[sampled > 0], scored))
        self._move_on(slots, sampled, decodes)
        width = int(sampled.max())
        return self._batch(seq, slots.astype(np.int32), starts, counts, sampled, width, decodes, saves)

    def _check(self, decode: int, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, sampled: np.ndarray) -> None:
        """Raises BadEntry for named rows that do not fit their requests."""
        if ((slots < 0) | (slots >= self.limits.slots)).any() or len(np.unique(slots)) < len(slots):
            raise BadEntry(f"rows of slots {slots.tolist()}; each must be one of {self.limits.slots} slots and appear once")
        decodes = np.isin(slots, self.decoding)
        ends = starts + counts
        chunk = (ends <= self.bound[slots]) & (sampled == (ends == self.bound[slots]))
        wide = (sampled == counts) & (sampled <= self.limits.width)
        fits = cast("np.ndarray", np.where(decodes, wide, chunk))
        first = np.zeros(len(slots), np.bool_)
        first[: np.count_nonzero(decodes)] = True
        conditions = (
            (self.phase[slots] == RUNNING) & (counts > 0) & (starts == self.computed[slots]),
            fits,
            decodes == first,  # decode rows stand first ...
            ~decodes if decode else decodes | True,  # ... and are named only if not every decoding slot has a row
        )
        right = cast("np.ndarray", np.logical_and.reduce(conditions))
        if not right.all():
            i = int(np.flatnonzero(~right)[0])
            s = int(slots[i])
            raise BadEntry(
                f"row of slot {s} computes {counts[i]} tokens from {starts[i]} and samples {sampled[i]}; "
                f"its request stands at {self.computed[s]} of {self.bound[s]}"
            )

    def _launch_decode(self, seq: int, width: int) -> Batch:
        """`launch` for the most frequent step: one row of each decoding slot. For these, computed + 1 == bound."""
        slots = self.decoding
        n = len(slots)
        if self._packed[0] is not slots:
            self._packed = (slots, slots.astype(np.int32))
        packed, widths = self._packed[1], self._widths[width, :n]
        self._grow(slots, widths)
        starts = self.computed[slots]
        ends = starts + width
        self.computed[slots] = ends
        sure = ends + 1
        self.bound[slots] = sure
        if self.limits.width > 1:
            sure = self.sure[slots] + 1
            self.sure[slots] = sure
        self.last_row[slots] = seq
        saves = self._save_decodes(slots, starts) if self.limits.snapshots else ()
        full = sure >= self.limit[slots]
        if np.count_nonzero(full):
            self.decoding = slots[~full]
        self.flights.append(InFlightStep(seq, slots, self.epoch[slots], widths, ()))
        return self._batch(seq, packed, starts, widths, widths, width, n, saves)

    def _batch(
        self, seq: int, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray, sampled: np.ndarray, width: int,
        decodes: int, saves: tuple[tuple[int, int], ...],
    ) -> Batch:  # fmt: skip
        pages = NO_PAGES
        if self.fresh_pages:
            pages = np.array(self.fresh_pages, I32)
            self.fresh_pages = []
        self.changes += (slots.tobytes(), starts.tobytes(), counts.tobytes(), pages.tobytes())
        if sampled is not counts:
            self.changes.append(sampled.tobytes())
        if saves:
            self.changes.append(b"S%r" % (saves,))
        return Batch(seq, slots, starts, counts, sampled, width, decodes, pages, saves)

    def _grow(self, slots: np.ndarray, widths: np.ndarray) -> None:
        """Gives pages to each decode row that reaches beyond the pages of its slot."""
        page_size = self.limits.page_size
        ends = self.computed[slots] + widths
        if self.limits.width > 1:
            ends = np.minimum(ends, self.limit[slots])
        wanted = ends > self.held[slots] * page_size
        if not np.count_nonzero(wanted):
            return
        growing = slots[wanted]
        columns = -(-ends[wanted] // page_size)
        for slot, first, last in zip(growing.tolist(), self.held[growing].tolist(), columns.tolist(), strict=True):
            for t, table in enumerate(self.cache.tables):
                for column in range(first, last):
                    page = table.pages.take()
                    table.rows[slot, column] = page
                    self.fresh_pages.append((t, slot, column, page))
        self.held[growing] = columns
        self._slide(growing)

    def _slide(self, slots: np.ndarray) -> None:
        """Releases pages that no later row of the slot reads. Queued rows that read them run before their next use."""
        for table in self.cache.tables:
            if not table.window:
                continue
            for slot in slots.tolist():
                first = table.first_column(min(int(self.committed[slot]) - 1, int(self.computed[slot])))
                for column in range(int(table.first[slot]), min(first, int(self.held[slot]))):
                    table.pages.release(int(table.rows[slot, column]))
                table.first[slot] = max(first, int(table.first[slot]))

    def _publish_chunks(self, slots: np.ndarray, starts: np.ndarray) -> tuple[tuple[int, int], ...]:
        """Indexes the pages and states that chunks complete; returns (slot, snapshot) of the states to save.

        This is safe before the chunks have run, because later readers are later in the stream.
        """
        page_size = self.limits.page_size
        saves: list[tuple[int, int]] = []
        for slot, start in zip(slots.tolist(), starts.tolist(), strict=True):
            keys, end = self.keys[slot], int(self.computed[slot])
            columns = range(start // page_size, min(end // page_size, len(keys)))
            self.publish(slot, columns)
            if columns and self.limits.snapshots and end % self.limits.snapshot_tokens == 0:
                key, snapshots = keys[columns[-1]], self.cache.snapshots
                if key not in snapshots.index and snapshots.available:
                    snapshot = snapshots.take()
                    snapshots.publish(snapshot, key)
                    snapshots.release(snapshot)
                    saves.append((slot, snapshot))
        return tuple(saves)

    def _save_decodes(self, slots: np.ndarray, starts: np.ndarray) -> tuple[tuple[int, int], ...]:
        """Saves the state of rows that compute the last token before a boundary. It is published when that token is committed.

        Rows that verify drafts are left out, and rows that follow such a row in flight: the position that they reach is not
        known yet.
        """
        ends = starts + 1
        saves: list[tuple[int, int]] = []
        exact = self.sure[slots] == self.bound[slots]
        at = np.flatnonzero(exact & (ends % self.limits.snapshot_tokens == 0))
        for slot, end in zip(slots[at].tolist(), ends[at].tolist(), strict=True):
            if self.cache.snapshots.available and self.limits.caching:
                snapshot = self.cache.snapshots.take()
                self.unpublished.setdefault(slot, []).append((end // self.limits.page_size - 1, snapshot))
                saves.append((slot, snapshot))
        return tuple(saves)

    def _move_on(self, slots: np.ndarray, sampled: np.ndarray, decodes: int) -> None:
        """Moves prompts that end here to `decoding`, and removes slots that need no further row."""
        full = self.sure[slots] >= self.limit[slots]
        if decodes < len(slots):
            joined = [int(s) for s, through in zip(slots[decodes:], sampled[decodes:], strict=True) if through]
            if joined:
                self.prefilling = [s for s in self.prefilling if s not in joined]
                staying = [s for s in joined if self.sure[s] < self.limit[s]]
                self.decoding = np.concatenate((self.decoding, np.array(staying, np.intp)))
        if decodes and full[:decodes].any():
            through = slots[:decodes][full[:decodes]]
            self.decoding = self.decoding[~np.isin(self.decoding, through)]

    # --- settling

    def settle(self, outcome: Outcome) -> Settled:
        """Applies the outcome of the oldest unsettled step. Raises BadEntry where it does not fit the step's rows."""
        return settle(self, outcome)
