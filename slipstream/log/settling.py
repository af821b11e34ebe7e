"""Settling: what a step's outcome changes in the state that launched it.

A function of the two alone, like all that changes a replica. No I/O, no clock.
"""

from typing import NamedTuple

import numpy as np

from slipstream.log.batch import Outcome
from slipstream.log.pages import page_keys
from slipstream.log.state import ENDED, PREEMPTED, Ended, ReplicaState


class Settled(NamedTuple):
    """What one settle committed: column i is token tokens[i] of request ids[i]."""

    slots: np.ndarray  # intp
    ids: np.ndarray  # int64
    tokens: np.ndarray  # int32
    columns: np.ndarray | None  # positions of these rows in the outcome, None when all rows counted
    ended: list[Ended]
    scored: tuple[tuple[int, int], ...]  # (slot, request id) of chunks with prompt log probabilities


def settle(state: ReplicaState, outcome: Outcome) -> Settled:
    """Applies the outcome of the oldest unsettled step: tokens are committed, full pages published, requests ended.

    Rows of requests that have ended or left since the launch are thrown away. Raises ValueError when the outcome has not one
    token for each sampling row; its entry's number must be the step's.
    """
    flight = state.flights.popleft()
    assert flight.seq == outcome.seq, f"outcome of entry {outcome.seq} where {flight.seq} was due"
    if len(flight.slots) != len(outcome.tokens):
        raise ValueError(f"entry {flight.seq}: {len(flight.slots)} rows sampled, {len(outcome.tokens)} tokens came back")
    state.settled_to = flight.seq
    slots, tokens, columns = flight.slots, outcome.tokens, None
    alive = (state.epoch[slots] == flight.epochs) & (state.phase[slots] != ENDED)
    if np.count_nonzero(alive) < len(slots):
        columns = np.flatnonzero(alive)
        slots, tokens = slots[columns], tokens[columns]
    ended: list[Ended] = []
    if outcome.errors:
        slots, tokens, columns, ended = _set_failed_apart(state, outcome, slots, tokens, columns)
    at = state.committed[slots]
    after = at + 1
    state.tokens[slots, at] = tokens
    state.committed[slots] = after
    if state.limits.caching:
        inside = at % state.limits.page_size
        if np.count_nonzero(inside) < len(slots):
            _publish_generated(state, slots[inside == 0].tolist())
    if state.matchers:
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            if slot in state.matchers:
                state.matchers[slot].accept(token)
    ends = after >= state.limit[slots]
    if state.stop_ids and not state.stop_ids.keys().isdisjoint(tokens.tolist()):
        for stop in state.stop_ids:
            ends |= tokens == stop
    if np.count_nonzero(ends):
        finished = _finished(state, slots[ends].tolist(), tokens[ends].tolist())
        _end(state, finished)
        ended += finished
    state.changes.append(tokens.tobytes())
    return Settled(slots, state.ids[slots], tokens, columns, ended, flight.scored)


def _set_failed_apart(
    state: ReplicaState, outcome: Outcome, slots: np.ndarray, tokens: np.ndarray, columns: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[Ended]]:
    """Ends the requests whose rows failed by themselves; returns the other rows' slots, tokens and columns, and who ended."""
    columns = np.arange(len(slots)) if columns is None else columns
    bad = np.isin(columns, list(outcome.errors))
    ended = [
        Ended(s, int(state.ids[s]), "error", outcome.errors[c])
        for s, c in zip(slots[bad].tolist(), columns[bad].tolist(), strict=True)
    ]
    _end(state, ended)
    state.changes.append(b"E%r" % [(e.slot, e.error) for e in ended])
    return slots[~bad], tokens[~bad], columns[~bad], ended


def _finished(state: ReplicaState, slots: list[int], tokens: list[int]) -> list[Ended]:
    """Which of the slots end with the token that they have just got."""
    ended: list[Ended] = []
    for slot, token in zip(slots, tokens, strict=True):
        request = state.requests[slot]
        if token in request.sampling.stop_ids:
            ended.append(Ended(slot, request.id, "stop"))
        elif state.committed[slot] >= state.limit[slot]:
            ended.append(Ended(slot, request.id, "length"))
        # else it is another slot's stop token
    return ended


def _end(state: ReplicaState, ended: list[Ended]) -> None:
    for e in ended:
        state.leave(e.slot)
        state.phase[e.slot] = ENDED
    state.ended += ended


def _publish_generated(state: ReplicaState, slots: list[int]) -> None:
    """Indexes the pages that committed tokens have filled.

    The row that wrote a page's last token has settled when the token after it is known, which is when this is called.
    """
    page_size = state.limits.page_size
    for slot in slots:
        keys = state.keys[slot]
        full = (int(state.committed[slot]) - 1) // page_size
        if len(keys) < full:
            first = len(keys)
            text = state.tokens[slot, first * page_size : full * page_size].tobytes()
            keys += page_keys(text, page_size, state.requests[slot].salt, keys[-1] if keys else b"")
            if state.phase[slot] == PREEMPTED:
                continue  # its pages are gone
            for column in range(first, full):
                page = int(state.page_table[slot, column])
                if column < state.held[slot] and page not in state.pages.keys:
                    state.pages.publish(page, keys[column])
