"""The width that `--speculative-tokens auto` chooses, and the counts of drafts."""

import numpy as np

from slipstream.log.batch import Outcome
from slipstream.log.settling import Settled
from slipstream.schedule.speculation import PROBE_INTERVAL_STEPS, PROBE_STEPS, AutoWidth, DraftCounts


def chosen(auto: AutoWidth, rows: int, steps: int, tokens, seconds) -> list[int]:
    """The widths of so many steps that give tokens(width) for each row and take seconds(width)."""
    widths = []
    for _ in range(steps):
        width = auto.choose(rows)
        auto.observe(rows, width, rows * tokens(width), seconds(rows, width))
        widths.append(width)
    return widths


def test_many_drafts_are_taken_where_they_are_right():
    widths = chosen(AutoWidth(9), 1, 300, lambda w: w, lambda n, w: 1 + 0.05 * w)
    assert widths.count(9) > 280


def test_text_without_repetition_loses_little():
    """A wrong draft costs a fifth of a step here: no more than a twentieth of the speed may be lost."""
    auto = AutoWidth(9)
    cost = lambda n, w: 1 + 0.2 * (w - 1)  # noqa: E731
    chosen(auto, 1, 20, lambda w: 1, cost)  # each width is measured first
    widths = chosen(auto, 1, 2000, lambda w: 1, cost)
    assert sum(cost(1, w) for w in widths) < len(widths) / 0.95


def test_the_width_falls_with_the_number_of_rows():
    auto = AutoWidth(9)
    tokens, seconds = (lambda w: min(w, 3)), (lambda n, w: 1 + max(0, n * w - 8) / 8)  # noqa: E731
    assert np.median(chosen(auto, 2, 200, tokens, seconds)) == 4
    assert np.median(chosen(auto, 64, 200, tokens, seconds)) < 4
    assert np.median(chosen(auto, 64, 200, lambda w: 1, seconds)) == 1


def test_a_change_of_the_text_is_noticed():
    auto = AutoWidth(5)
    chosen(auto, 1, 500, lambda w: 1, lambda n, w: 1 + 0.1 * w)
    widths = chosen(auto, 1, 6 * PROBE_INTERVAL_STEPS, lambda w: w, lambda n, w: 1 + 0.1 * w)
    assert widths[-PROBE_INTERVAL_STEPS:].count(5) >= PROBE_INTERVAL_STEPS - 2 * PROBE_STEPS


def test_drafts_behind_an_end_do_not_count():
    counts = DraftCounts()
    tokens = np.zeros((3, 4), np.int32)
    outcome = Outcome(0, tokens, np.array([3, 4, 1], np.int32), verified=np.array([3, 3, 0], np.int32))
    # row 0 gave two drafts and the token after them; row 1 ended after the first of three right drafts; row 2 had none
    rows = np.array([0, 0, 0, 1, 2])
    ids = np.array([7, 7, 7, 8, 9])
    settled = Settled(rows, ids, np.zeros(5, np.int32), rows, np.array([0, 1, 2, 0, 0]), [], ())
    assert counts.add(outcome, settled) == {7: (3, 2), 8: (1, 1)}
    assert (counts.rows, counts.drafts, counts.accepted, counts.accepted_at) == (2, 4, 3, [2, 1, 0])
