"""How the memory of the caches is divided: state, then snapshots, then pages of each table."""

from itertools import pairwise

import pytest
import torch

from slipstream.device.memory import MAX_PAGES, CacheNeeds
from slipstream.log.caches import Latent, Paged, PerSlot, StateArray, Window

PAGED = Paged(heads=2, head_dim=8)  # 32 values a token
WINDOW = Window(heads=1, head_dim=8, size=40)  # 16 values a token
STATE = PerSlot((StateArray((4, 4), "float32"), StateArray((3,), "bfloat16")))  # 70 bytes, each array rounded up to 16


def needs(*layouts, dtype=torch.float32, slots: int = 4, max_len: int = 160) -> CacheNeeds:
    return CacheNeeds(layouts, dtype, 16, slots, max_len)


def test_pages_of_one_table_take_all_that_is_given():
    n = needs(PAGED, None, PAGED)
    page = 2 * 16 * 32 * 4
    assert n.page_bytes == [page] and n.least_bytes == page
    limits = n.limits(10 * page + page - 1, MAX_PAGES, True, None)
    assert limits.tables == ((10, 0, 2),) and limits.max_len == 160 and limits.page_size == 16
    assert limits.snapshots == limits.snapshot_tokens == 0 and limits.width == 1
    assert n.limits(10 * page, 7, True, 3 * page).tables == ((7, 0, 3),)
    assert n.limits(2 * page, MAX_PAGES, True, 0).max_len == 32


def test_the_dtype_of_the_cache_decides_how_many_pages_fit():
    assert needs(PAGED, dtype=torch.bfloat16).page_bytes == [needs(PAGED).page_bytes[0] // 2]


def test_a_latent_cache_is_counted_by_its_width():
    assert needs(Latent(576)).page_bytes == [16 * 576 * 4]


def test_a_windows_table_holds_every_slots_window_and_one_longest_prompt_at_most():
    n = needs(PAGED, WINDOW)
    unlimited, windowed = 16 * 32 * 4, 16 * 16 * 4
    assert n.windows == (0, 40) and n.page_bytes == [unlimited, windowed]
    most = 4 * (3 + 1) + 10  # 40 tokens lie in at most 4 pages of 16
    rich = n.limits(100 * unlimited + most * windowed, MAX_PAGES, True, None)
    assert [t.pages for t in rich.tables] == [100, most] and [t.window for t in rich.tables] == [0, 40]
    assert [t.host_pages for t in rich.tables] == [25, most // 4]
    poor = n.limits(9 * (unlimited + windowed), MAX_PAGES, True, None)
    assert [t.pages for t in poor.tables] == [9, 9] and poor.max_len == 9 * 16


def test_more_memory_never_gives_less():
    n = needs(PAGED, WINDOW, STATE)
    found = [n.limits(n.least_bytes + 1000 * i, MAX_PAGES, True, None) for i in range(200)]
    for a, b in pairwise(found):
        assert all(x.pages <= y.pages for x, y in zip(a.tables, b.tables, strict=True)) and a.snapshots <= b.snapshots


def test_state_comes_first_then_snapshots_then_pages():
    n = needs(PAGED, STATE)
    page, state = 16 * 32 * 4, 80
    assert n.state_bytes == 6 * state  # 4 slots, nobody's, and the zeros
    limits = n.limits(n.state_bytes + 8 * state + 20 * page, MAX_PAGES, True, None)
    assert (limits.snapshots, limits.tables[0].pages) == (8, 20)
    assert limits.snapshot_tokens % 16 == 0 and limits.snapshot_tokens >= 256
    assert n.limits(10**6, MAX_PAGES, False, None).snapshots == 0, "nothing can be found again by content"


def test_the_least_that_is_asked_for_holds_a_page():
    n = needs(PAGED, WINDOW, STATE)
    assert all(t.pages == 1 for t in n.limits(n.least_bytes, MAX_PAGES, True, None).tables)


def test_a_model_without_pages_has_no_table_and_its_own_length():
    limits = needs(STATE, None).limits(10**6, MAX_PAGES, True, None)
    assert limits.tables == () and limits.max_len == 160 and limits.snapshots == 8


@pytest.mark.parametrize(("host_bytes", "host"), [(None, 25), (0, 0), (10**6, 100)])
def test_a_rank_without_heads_leaves_the_bound_to_the_others(host_bytes, host: int):
    limits = needs(Paged(0, 8)).limits(0, 100, True, host_bytes)
    assert limits.tables == ((100, 0, host),) and limits.max_len == 160


def test_host_memory_holds_pages_of_all_tables_in_one_proportion():
    n = needs(PAGED, WINDOW)
    limits = n.limits(10**6, 40, True, sum(p * s for p, s in zip((40, 26), n.page_bytes, strict=True)) // 2)
    assert [t.host_pages for t in limits.tables] == [20, 13]
