"""How many tokens a decode row may give (`--speculative-tokens auto`): measured, since it depends on the text and the device.

For each number of rows (in powers of two) and each width, the leader knows how many tokens a second such steps gave lately, and
takes the best width. From time to time it tries another one for a few steps, since texts change.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from slipstream.log.batch import Outcome
from slipstream.log.settling import Settled

KEPT_SHARE = 0.9  # of what was measured before, at each step
PROBE_INTERVAL_STEPS = 64  # from one trial of another width to the next
PROBE_STEPS = 2  # steps of a trial


@dataclass
class Rate:
    """Tokens and seconds of the latest steps; older steps count less."""

    tokens: float = 0.0
    seconds: float = 0.0
    steps: int = 0

    def add(self, tokens: int, seconds: float) -> None:
        self.tokens = KEPT_SHARE * self.tokens + tokens
        self.seconds = KEPT_SHARE * self.seconds + seconds
        self.steps += 1

    @property
    def per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass
class Trials:
    """What was measured with one number of rows, by width."""

    rates: dict[int, Rate] = field(default_factory=dict[int, Rate])
    planned: int = 0  # steps planned so far


class AutoWidth:
    """Chooses the width of the next step's decode rows."""

    def __init__(self, most: int):
        """`most`: the largest width."""
        self.widths = sorted({1, *(w for w in (2, 4) if w < most), most})
        self._trials: dict[int, Trials] = {}  # by bit length of the number of rows

    def choose(self, rows: int) -> int:
        """The width for a step of that many decode rows."""
        trials = self._of(rows)
        rates = trials.rates
        trials.planned += 1
        for width in self.widths:
            if width not in rates or rates[width].steps < PROBE_STEPS:
                return width
        best = max(self.widths, key=lambda width: rates[width].per_second)
        turn, step = divmod(trials.planned, PROBE_INTERVAL_STEPS)
        if step < PROBE_STEPS:
            others = [width for width in self.widths if width != best]
            return others[turn % len(others)]
        return best

    def observe(self, rows: int, width: int, tokens: int, seconds: float) -> None:
        """Learns from a step of decode rows alone that gave so many tokens."""
        if seconds > 0:
            self._of(rows).rates.setdefault(width, Rate()).add(tokens, seconds)

    def _of(self, rows: int) -> Trials:
        return self._trials.setdefault(rows.bit_length(), Trials())


@dataclass
class DraftCounts:
    """Counts of verified drafts since the start. Drafts behind the end of an answer do not count."""

    rows: int = 0  # rows that had drafts
    drafts: int = 0
    accepted: int = 0
    accepted_at: list[int] = field(default_factory=list[int])  # accepted drafts by their position in the row

    def copy(self) -> "DraftCounts":
        return replace(self, accepted_at=self.accepted_at.copy())

    def add(self, outcome: Outcome, settled: Settled) -> dict[int, tuple[int, int]]:
        """Counts a settle's rows. Returns, by request id, how many drafts the row had and how many were accepted."""
        found: dict[int, tuple[int, int]] = {}
        if outcome.verified is None or not len(settled.tokens):
            return found
        rows = np.arange(len(settled.tokens)) if settled.rows is None else settled.rows
        for row, first, given in zip(
            *(a.tolist() for a in np.unique(rows, return_index=True, return_counts=True)), strict=True
        ):
            drafts, whole = int(outcome.verified[row]), given == int(outcome.accepted[row])
            if not drafts:
                continue
            accepted = given - 1 if whole else given  # the token after the drafts lies behind an end
            drafts = drafts if whole else given
            found[int(settled.ids[first])] = drafts, accepted
            self.rows += 1
            self.drafts += drafts
            self.accepted += accepted
            self.accepted_at += [0] * (drafts - len(self.accepted_at))
            for position in range(accepted):
                self.accepted_at[position] += 1
        return found
