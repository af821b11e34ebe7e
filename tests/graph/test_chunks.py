import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.graph.chunks import Cutter, Fixed, LeftContext, SlidingWindow, Whole, faults, join

policies = st.one_of(
    st.just(Whole()),
    st.builds(Fixed, st.integers(1, 9), st.booleans()),
    st.integers(1, 9).flatmap(lambda w: st.builds(SlidingWindow, st.just(w), st.integers(1, w))),
    st.builds(LeftContext, st.integers(1, 9), st.integers(0, 12)),
)


def run(policy, sizes, end_with_last, pop_late):
    """Chunks of 0..n cut in pieces of `sizes`; the cutter after."""
    cutter, chunks, at = Cutter(policy), [], 0

    def drain():
        while (chunk := cutter.pop()) is not None:
            chunks.append(chunk)

    for i, size in enumerate(sizes):
        cutter.push(np.arange(at, at + size), tag=i)
        at += size
        if end_with_last and i == len(sizes) - 1:
            cutter.end()
        if not pop_late:
            drain()
    if not (end_with_last and sizes):
        cutter.end()
    drain()
    return chunks, cutter, at


@given(policies, st.lists(st.integers(0, 7), max_size=20), st.booleans(), st.booleans())
@settings(max_examples=400, deadline=None)
def test_chunks_rejoined_equal_the_whole_and_none_is_empty(policy, sizes, end_with_last, pop_late):
    chunks, cutter, total = run(policy, sizes, end_with_last, pop_late)
    fresh = [c.data[c.context :] for c in chunks]
    assert all(len(f) for f in fresh)
    assert np.array_equal(np.concatenate([np.arange(0), *fresh]), np.arange(total))
    assert cutter.exhausted and sorted(cutter.spent) == list(range(len(sizes))), "every piece is spent exactly once"
    assert not any(c.last for c in chunks[:-1])
    if chunks and (pop_late or (end_with_last and sizes[-1])):
        assert chunks[-1].last, "an end that is known when the last chunk is cut marks it"


@given(policies, st.lists(st.integers(0, 7), max_size=20))
@settings(max_examples=200, deadline=None)
def test_joined_chunks_do_not_depend_on_how_the_pieces_came(policy, sizes):
    if isinstance(policy, Fixed) and policy.allow_partial:
        return
    a, _, total = run(policy, sizes, True, True)
    b, _, _ = run(policy, [1] * total, True, False)
    assert [(c.data.tolist(), c.context) for c in a] == [(c.data.tolist(), c.context) for c in b]


@given(st.integers(1, 9), st.integers(0, 12), st.integers(0, 60))
def test_context_is_what_came_before(chunk, context, total):
    chunks, _, _ = run(LeftContext(chunk, context), [1] * total, True, False)
    for c in chunks:
        first = c.data[c.context]
        assert c.context == min(first, context) and len(c.data) - c.context <= chunk
        assert c.data.tolist() == list(range(first - c.context, c.data[-1] + 1))


@given(st.integers(1, 9).flatmap(lambda w: st.tuples(st.just(w), st.integers(1, w))), st.integers(0, 60))
def test_windows_start_every_stride(window_stride, total):
    window, stride = window_stride
    chunks, _, _ = run(SlidingWindow(window, stride), [1] * total, True, False)
    assert [c.data[0] for c in chunks] == [i * stride for i in range(len(chunks))]
    assert all(len(c.data) == window for c in chunks[:-1])


def test_partial_pieces_go_on_as_they_land_and_joined_ones_wait():
    partial, joined = Cutter(Fixed(4, allow_partial=True)), Cutter(Fixed(4))
    for cutter in (partial, joined):
        cutter.push(np.arange(3))
    assert partial.pop().data.tolist() == [0, 1, 2] and joined.pop() is None
    joined.push(np.arange(3, 9))
    assert joined.pop().data.tolist() == [0, 1, 2, 3] and joined.pop().data.tolist() == [4, 5, 6, 7] and joined.pop() is None
    joined.end()
    assert joined.pop() == ([8], 0, True)


def test_texts_are_units_and_join_in_order():
    cutter = Cutter(Fixed(1))
    for word in ("a ", "b ", ""):
        cutter.push(word)
    assert [cutter.pop().data, cutter.pop().data] == ["a ", "b "]
    assert join(["x", "y"]) == "xy" and join([{"a": 1}]) == {"a": 1}


@pytest.mark.parametrize("policy", [Fixed(0), SlidingWindow(4, 5), SlidingWindow(4, 0), LeftContext(0, 1), LeftContext(1, -1)])
def test_numbers_that_cannot_cut_are_named(policy):
    assert type(policy).__name__ in faults(policy)
    assert faults(Fixed(1)) is None
