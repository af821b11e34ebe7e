"""Settling: what a step's outcome changes in the state that launched it.

A function of the two alone, like all that changes a replica. No I/O, no clock.
"""

from typing import NamedTuple

import numpy as np

from slipstream.errors import BadEntry
from slipstream.log.batch import Outcome
from slipstream.log.pages import page_keys
from slipstream.log.state import ENDED, PREEMPTED, RUNNING, Ended, InFlightStep, ReplicaState


class Settled(NamedTuple):
    """What one settle committed: tokens[i] is the next token of request ids[i]. A request's tokens stand together, in order."""

    slots: np.ndarray  # intp
    ids: np.ndarray  # int64
    tokens: np.ndarray  # int32
    rows: np.ndarray | None  # the tokens' rows in the outcome, None where all rows gave one token each
    columns: np.ndarray | None  # and their columns, None where all are the first
    ended: list[Ended]
    scored: tuple[tuple[int, int], ...]  # (slot, request id) of chunks with prompt log probabilities

    def places(self) -> list[tuple[int, int]]:
        """Where each token stands in the outcome: its row and column."""
        n = len(self.tokens)
        rows = range(n) if self.rows is None else self.rows.tolist()
        columns = [0] * n if self.columns is None else self.columns.tolist()
        return list(zip(rows, columns, strict=True))


def settle(state: ReplicaState, outcome: Outcome) -> Settled:
    """Applies the outcome of the oldest unsettled step: tokens are committed, full pages published, requests ended.

    Rows of requests that have ended or left since the launch are thrown away. Of a row's accepted tokens those count that come
    no later than a stop token or the request's limit. Raises BadEntry, with nothing changed, when the outcome is not the
    step's, or has not a possible count of tokens for each judged row.
    """
    step = state.flights[0]
    _check(step, outcome)
    state.flights.popleft()
    state.settled_to = step.seq
    slots, sampled, rows = step.slots, step.sampled, None
    alive = (state.epoch[slots] == step.epochs) & (state.phase[slots] != ENDED)
    if outcome.errors:
        alive, ended = _end_failed(state, outcome, slots, alive)
    else:
        ended = []
    if np.count_nonzero(alive) < len(slots):
        rows = np.flatnonzero(alive)
        slots, sampled = slots[rows], sampled[rows]
    if outcome.tokens.shape[1] == 1:
        settled = _commit_one(state, outcome, slots, rows, step, ended)
    else:
        settled = _commit_many(state, outcome, slots, sampled, rows, step, ended)
    if state.matchers:
        for slot, token in zip(settled.slots.tolist(), settled.tokens.tolist(), strict=True):
            if slot in state.matchers:
                state.matchers[slot].accept(token)
        state.drafts.update((slot, d) for slot, d in outcome.drafts.items() if slot in state.matchers and slot in slots)
    return settled


def _check(step: InFlightStep, outcome: Outcome) -> None:
    n, (rows, width) = len(step.slots), outcome.tokens.shape
    if step.seq != outcome.seq or n != rows or n != len(outcome.accepted):
        raise BadEntry(f"entry {step.seq}: {n} rows sampled, {rows} came back as entry {outcome.seq}")
    if width > 1 and not ((outcome.accepted >= 1) & (outcome.accepted <= np.minimum(step.sampled, width))).all():
        raise BadEntry(f"entry {step.seq}: rows of {step.sampled.tolist()} tokens gave {outcome.accepted.tolist()}")


def _end_failed(state: ReplicaState, outcome: Outcome, slots: np.ndarray, alive: np.ndarray) -> tuple[np.ndarray, list[Ended]]:
    """Ends the requests whose rows failed by themselves; returns which rows are left, and the requests that ended."""
    bad = [row for row in sorted(outcome.errors) if alive[row]]
    ended = [Ended(int(slots[row]), int(state.ids[slots[row]]), "error", outcome.errors[row]) for row in bad]
    _end(state, ended)
    alive = alive.copy()
    alive[bad] = False
    state.changes.append(b"E%r" % [(e.slot, e.error) for e in ended])
    return alive, ended


def _commit_one(
    state: ReplicaState, outcome: Outcome, slots: np.ndarray, rows: np.ndarray | None, step: InFlightStep, ended: list[Ended]
) -> Settled:
    """Commits one token for each row: a few numpy calls, whatever their number."""
    tokens = outcome.tokens[:, 0] if rows is None else outcome.tokens[rows, 0]
    at = state.committed[slots]
    after = at + 1
    state.tokens[slots, at] = tokens
    state.committed[slots] = after
    if state.limits.width > 1:
        _take_back(state, slots, step.sampled if rows is None else step.sampled[rows], np.ones(len(slots), np.int32))
    if state.limits.caching:
        inside = at % state.limits.page_size
        if np.count_nonzero(inside) < len(slots):
            _publish_generated(state, slots[inside == 0].tolist())
    ends = after >= state.limit[slots]
    if state.stop_ids and not state.stop_ids.keys().isdisjoint(tokens.tolist()):
        for stop in state.stop_ids:
            ends |= tokens == stop
    if np.count_nonzero(ends):
        _finish(state, slots[ends].tolist(), tokens[ends].tolist(), ended)
    state.changes.append(tokens.tobytes())
    return Settled(slots, state.ids[slots], tokens, rows, None, ended, step.scored)


def _commit_many(
    state: ReplicaState, outcome: Outcome, slots: np.ndarray, sampled: np.ndarray, rows: np.ndarray | None,
    step: InFlightStep, ended: list[Ended],
) -> Settled:  # fmt: skip
    """Commits the accepted tokens of each row, up to the one that ends its request."""
    rows = np.arange(len(slots)) if rows is None else rows
    tokens = outcome.tokens[rows]
    at = state.committed[slots]
    counts = np.minimum(outcome.accepted[rows], state.limit[slots] - at)
    places = np.fromiter(range(tokens.shape[1]), np.intp)
    if state.stop_ids:
        stops = np.isin(tokens, list(state.stop_ids)) & (places < counts[:, None])
        for i in np.flatnonzero(np.any(stops, axis=1)).tolist():
            own = state.requests[int(slots[i])].sampling.stop_ids
            counts[i] = next((j + 1 for j in np.flatnonzero(stops[i]).tolist() if int(tokens[i, j]) in own), counts[i])
    taken = places < counts[:, None]
    flat, columns = tokens[taken], np.broadcast_to(places, taken.shape)[taken]
    owners = np.repeat(slots, counts)
    state.tokens[owners, np.repeat(at, counts) + columns] = flat
    after = at + counts
    state.committed[slots] = after
    _take_back(state, slots, sampled, counts)
    if state.limits.caching:
        page_size = state.limits.page_size
        _publish_generated(state, slots[(after - 1) // page_size > (at - 1) // page_size].tolist())
    last = tokens[np.arange(len(slots)), counts - 1]
    ends = (after >= state.limit[slots]) | np.isin(last, list(state.stop_ids))
    _finish(state, slots[ends].tolist(), last[ends].tolist(), ended)
    state.changes += (flat.tobytes(), counts.tobytes())
    return Settled(owners, state.ids[owners], flat, np.repeat(rows, counts), columns, ended, step.scored)


def _take_back(state: ReplicaState, slots: np.ndarray, sampled: np.ndarray, counts: np.ndarray) -> None:
    """Corrects what was thought of rows that could have given more tokens, or surely gave one only."""
    state.sure[slots] += counts - 1
    state.bound[slots] -= sampled - counts
    running = state.phase[slots] == RUNNING
    state.computed[slots[running]] -= (sampled - counts)[running]
    through = slots[state.sure[slots] >= state.limit[slots]]
    if len(through):
        state.decoding = state.decoding[~np.isin(state.decoding, through)]


def _finish(state: ReplicaState, slots: list[int], tokens: list[int], ended: list[Ended]) -> None:
    """Ends those of the slots whose latest token is the last."""
    finished: list[Ended] = []
    for slot, token in zip(slots, tokens, strict=True):
        request = state.requests[slot]
        if token in request.sampling.stop_ids:
            finished.append(Ended(slot, request.id, "stop"))
        elif state.committed[slot] >= state.limit[slot]:
            finished.append(Ended(slot, request.id, "length"))
        # else it is another slot's stop token
    _end(state, finished)
    ended += finished


def _end(state: ReplicaState, ended: list[Ended]) -> None:
    for e in ended:
        state.leave(e.slot)
        state.phase[e.slot] = ENDED
    state.ended += ended


def _publish_generated(state: ReplicaState, slots: list[int]) -> None:
    """Indexes the pages that committed tokens have filled, and the states that were saved at their ends.

    The row that wrote a page's last token has settled when the token after it is known, which is when this is called.
    """
    page_size = state.limits.page_size
    for slot in slots:
        keys = state.keys[slot]
        full = (int(state.committed[slot]) - 1) // page_size
        first = len(keys)
        if first < full:
            text = state.tokens[slot, first * page_size : full * page_size].tobytes()
            keys += page_keys(text, page_size, state.requests[slot].salt, keys[-1] if keys else b"")
            if state.phase[slot] != PREEMPTED:  # else its pages are no longer its own
                state.publish(slot, range(first, full))
        if slot in state.unpublished:
            _publish_states(state, slot, full)


def _publish_states(state: ReplicaState, slot: int, full: int) -> None:
    """Makes the saved states of committed tokens findable."""
    snapshots = state.cache.snapshots
    waiting: list[tuple[int, int]] = []
    for column, snapshot in state.unpublished.pop(slot):
        if column < full:
            snapshots.publish(snapshot, state.keys[slot][column])
            snapshots.release(snapshot)
        else:
            waiting.append((column, snapshot))
    if waiting:
        state.unpublished[slot] = waiting
