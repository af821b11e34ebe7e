"""Drafts of the CPU device: what the next tokens of a slot may be, for its next row to verify.

A proposer runs on the device's thread after a step's commit, for the slots that sampled in it. It depends on nothing but the
committed tokens and the request, so all ranks of a group make the same drafts and none of them is exchanged.
"""

from typing import Protocol

import numpy as np

from slipstream.device.cpu.tables import SlotTables
from slipstream.errors import ConfigError

LONGEST_MATCH = 4  # tokens of a suffix that are looked up at most ...
SHORTEST_MATCH = 2  # ... and at least, in the slot's own tokens


class Proposer(Protocol):
    def propose(self, slots: list[int]) -> None:
        """Writes the next drafts of these slots into `SlotTables.drafts`, and how many there are into `drafted`."""
        ...


class NgramProposer:
    """Looks up the last tokens where they occurred before, and takes the tokens that followed.

    A request's prediction is searched first, by the tokens of the answer alone; then the slot's prompt and answer.
    """

    def __init__(self, tables: SlotTables):
        self.tables = tables

    def propose(self, slots: list[int]) -> None:
        tables = self.tables
        for slot in slots:
            most = int(tables.most_drafts[slot])
            found = self._next(slot, most) if most else tables.drafts[slot, :0]
            tables.drafts[slot, : len(found)] = found
            tables.drafted[slot] = len(found)

    def _next(self, slot: int, most: int) -> np.ndarray:
        tables = self.tables
        known = tables.tokens[slot, : tables.length[slot]]
        prediction = tables.prediction[slot]
        if len(prediction):
            answer = known[tables.prompt_len[slot] :]
            if np.array_equal(answer, prediction[: len(answer)]):
                return prediction[len(answer) : len(answer) + most]
            at = last_match(prediction, answer, 1)
            if at >= 0:
                return prediction[at + 1 : at + 1 + most]
        at = last_match(known[:-1], known, SHORTEST_MATCH)
        if at < 0:
            return known[:0]
        return known[at + 1 + np.arange(most) % (len(known) - 1 - at)]  # text that repeats itself goes on repeating


def last_match(text: np.ndarray, suffix: np.ndarray, least: int) -> int:
    """Where the longest end of `suffix` (`least` to LONGEST_MATCH tokens) that `text` has occurs last: its last token, or -1.

    Both int32. An occurrence that reaches over the beginning of `text` does not count.
    """
    found = -1
    places = np.flatnonzero(text == suffix[-1])
    for length in range(1, min(LONGEST_MATCH, len(suffix)) + 1):
        if length > 1:
            places = places[places >= length - 1]
            places = places[text[places - length + 1] == suffix[-length]]
        if not len(places):
            break
        if length >= least:
            found = int(places[-1])
    return found


def accept(tokens: np.ndarray, drafts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """How many tokens each row gives, int32 [rows]: the drafts that equal the drawn tokens, and the token after them.

    tokens [rows, width], -1 where there is none; drafts [rows, at least width - 1]; counts [rows]: the judged positions. Where
    no token may follow a right draft, the row ends with that draft, and the next row meets the dead end as its first token.
    """
    width = tokens.shape[1]
    right = (tokens[:, :-1] == drafts[:, : width - 1]) & (np.arange(width - 1) < counts[:, None] - 1)
    accepted = 1 + np.cumprod(right, axis=1).sum(axis=1)
    dead = (tokens[np.arange(len(tokens)), accepted - 1] < 0) & (accepted > 1)
    return (accepted - dead).astype(np.int32)


def make_proposer(method: str, tables: SlotTables) -> Proposer:
    """Raises ConfigError for a method that this device does not have."""
    if method == "ngram":
        return NgramProposer(tables)
    raise ConfigError(f"--speculative-method {method} is not supported with --device cpu; ngram is")
