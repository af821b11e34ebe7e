"""Pages and the prefix index: references, eviction order, content keys."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.log.pages import Pages, page_keys
from tests.helpers.toy_group import check_pages

tokens = st.lists(st.integers(0, 5), max_size=24).map(lambda x: np.array(x, "<i4").tobytes())


@given(tokens, tokens, st.integers(1, 5))
def test_two_keys_are_equal_exactly_where_all_tokens_through_the_page_are(a: bytes, b: bytes, page_size: int):
    ka, kb = page_keys(a, page_size), page_keys(b, page_size)
    assert len(ka) == len(a) // 4 // page_size
    for i, (x, y) in enumerate(zip(ka, kb, strict=False)):
        end = 4 * page_size * (i + 1)
        assert (x == y) == (a[:end] == b[:end])


@given(tokens, st.integers(1, 4), st.integers(0, 6))
def test_keys_can_be_continued_from_a_parent(text: bytes, page_size: int, first: int):
    keys = page_keys(text, page_size)
    first = min(first, len(keys))
    parent = keys[first - 1] if first else b""
    assert page_keys(text, page_size, parent=parent, first=first) == keys[first:]


@given(tokens)
def test_a_salt_separates_all_keys(text: bytes):
    assert not set(page_keys(text, 2, b"one")) & set(page_keys(text, 2, b"two"))
    assert not set(page_keys(text, 2, b"one")) & set(page_keys(text, 2))


def test_an_answer_is_not_found_under_another_position_of_the_same_tokens():
    one = np.array([1, 2, 1, 2], "<i4").tobytes()
    assert len(set(page_keys(one, 2))) == 2


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_sequence_of_calls_keeps_each_page_in_one_state(data: st.DataObject):
    pages = Pages(data.draw(st.integers(1, 6)))
    mine: list[int] = []  # one item per reference
    count = 0
    for _ in range(data.draw(st.integers(0, 40))):
        calls = [name for name, can in (("take", pages.available), ("release", mine), ("share", mine)) if can]
        calls += ["publish"] * bool(mine) + ["forget", "find"]
        call = data.draw(st.sampled_from(calls))
        if call == "take":
            page = pages.take()
            assert page not in mine
            mine.append(page)
        elif call == "find":
            for page in pages.find([key for key in pages.index][:1]):
                pages.share(page)
                mine.append(page)
        elif call == "publish":
            page = data.draw(st.sampled_from(mine))
            if page not in pages.keys:
                count += 1
                pages.publish(page, b"%d" % count)
        elif call == "forget":
            held = [p for p in pages.keys if pages.refs[p]]
            if held:
                pages.forget(data.draw(st.sampled_from(held)))
        else:
            page = data.draw(st.sampled_from(mine))
            if call == "share":
                pages.share(page)
                mine.append(page)
            else:
                pages.release(page)
                mine.remove(page)
        check_pages(pages)
        assert all(pages.refs[p] == mine.count(p) for p in range(1, pages.total + 1))
    copy = pages.copy()
    assert copy.state() == pages.state()


def chain(pages: Pages, length: int) -> list[int]:
    """Takes and publishes a chain of pages, parents first."""
    taken = [pages.take() for _ in range(length)]
    for i, page in enumerate(taken):
        pages.publish(page, b"key %d" % i)
    return taken


def test_leaves_are_evicted_before_their_parents():
    pages = Pages(4)
    taken = chain(pages, 4)
    for page in reversed(taken):  # as requests release: last page first
        pages.release(page)
    keys = [b"key %d" % i for i in range(4)]
    for left in (3, 2, 1, 0):
        pages.take()
        assert pages.find(keys) == taken[:left]


def test_the_least_recently_used_chain_goes_first():
    pages = Pages(4)
    a, b = pages.take(), pages.take()
    pages.publish(a, b"a")
    pages.publish(b, b"b")
    pages.release(a)
    pages.release(b)
    pages.share(a)  # used again
    pages.release(a)
    assert [pages.take() for _ in range(4)][-2:] == [b, a]


def test_a_page_in_use_is_never_evicted():
    pages = Pages(2)
    (page,) = chain(pages, 1)
    assert pages.take() != page
    assert not pages.available
    with pytest.raises((IndexError, StopIteration)):
        pages.take()
    assert pages.find([b"key 0"]) == [page]


def test_equal_content_is_indexed_once_and_the_other_page_just_becomes_free():
    pages = Pages(2)
    a, b = pages.take(), pages.take()
    pages.publish(a, b"same")
    pages.publish(b, b"same")
    assert pages.find([b"same"]) == [a]
    pages.release(b)
    assert b in pages.free
    check_pages(pages)


def test_a_page_released_twice_is_noticed():
    pages = Pages(1)
    page = pages.take()
    pages.release(page)
    with pytest.raises(AssertionError, match="released twice"):
        pages.release(page)
