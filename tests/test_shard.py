"""How heads, columns and vocabulary rows are split over ranks."""

import pytest

from slipstream.shard import Heads, Shard, split_evenly, split_heads


def test_nine_query_and_three_key_heads_go_on_two_three_and_four_ranks():
    assert split_heads(9, 3, 2) == [Heads(0, 6, 0, 2), Heads(6, 9, 2, 3)]
    assert split_heads(9, 3, 3) == [Heads(0, 3, 0, 1), Heads(3, 6, 1, 2), Heads(6, 9, 2, 3)]
    assert split_heads(9, 3, 4) == [Heads(0, 2, 0, 1), Heads(2, 3, 0, 1), Heads(3, 6, 1, 2), Heads(6, 9, 2, 3)]


@pytest.mark.parametrize("num_q_heads, num_kv_heads", [(9, 3), (32, 8), (6, 6), (4, 1), (12, 2)])
@pytest.mark.parametrize("size", range(1, 17))
def test_every_query_head_is_held_once_beside_its_key_head(num_q_heads, num_kv_heads, size):
    heads = split_heads(num_q_heads, num_kv_heads, size)
    assert len(heads) == size
    assert [q for h in heads for q in range(h.q_start, h.q_stop)] == list(range(num_q_heads))
    for h in heads:
        assert bool(h.num_q_heads) == bool(h.num_kv_heads)
        if h.num_q_heads:
            assert h.num_q_heads % h.num_kv_heads == 0
            local = [h.kv_start + i // (h.num_q_heads // h.num_kv_heads) for i in range(h.num_q_heads)]
            assert local == [q // (num_q_heads // num_kv_heads) for q in range(h.q_start, h.q_stop)]


def test_an_even_split_covers_everything_and_differs_by_one_at_most():
    for total in (0, 1, 7, 49152, 151936):
        for size in range(1, 9):
            parts = split_evenly(total, size)
            assert parts[0][0] == 0 and parts[-1][1] == total
            assert all(a[1] == b[0] for a, b in zip(parts, parts[1:], strict=False))
            sizes = [b - a for a, b in parts]
            assert max(sizes) - min(sizes) <= 1
    assert Shard(1, 3).even(10) == (4, 7)
