"""How prompts are cut for the prefill kernels: everything once, nothing too large, programs that end together."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from slipstream.ops.cuda.prompt_blocks import COLUMNS, PAIR, ROWS, SPARE, UNITS, Cutter

prompts = st.lists(st.tuples(st.integers(0, 30_000), st.integers(1, 2048)), min_size=1, max_size=12)


def cut(chunks: list[tuple[int, int]], num_q_heads: int = 16, programs: int = 132) -> tuple[list[list[int]], int]:
    """The parts, and how many of them have programs for themselves."""
    rows, index = [], 0
    for slot, (position, tokens) in enumerate(chunks):
        rows.append((slot, position, index, tokens))
        index += tokens
    blocks = sum(-(-tokens // ROWS) for _, tokens in chunks)
    out = np.full((blocks + SPARE, COLUMNS), -1, np.int32)
    n, own = Cutter(num_q_heads, programs).cut(rows, out)
    assert (out[n:] == -1).all() and own <= n and own * num_q_heads <= programs
    assert own == n or own * num_q_heads < programs
    return out[:n].tolist(), own


def turns(items: int, own: int, programs: int) -> list[list[int]]:
    """Which items each program takes, as the kernels have it."""
    taken: list[list[int]] = [[item] for item in range(own)]
    others = programs - own
    for place in range(others):
        mine = (own + i * others + (place if i % 2 == 0 else others - 1 - place) for i in range(-(-(items - own) // others)))
        taken.append([item for item in mine if item < items])
    return taken


@given(prompts, st.integers(1, 64), st.sampled_from([78, 132, 144]))
def test_the_parts_of_a_block_follow_one_another_from_its_first_token_to_its_last(chunks, num_q_heads: int, programs: int):
    found: dict[tuple[int, ...], list[list[int]]] = {}
    for *page_size, begin, end, parts, place, first in cut(chunks, num_q_heads, programs)[0]:
        found.setdefault(tuple(page_size), []).append([begin, end, parts, place, first])
    tokens = {slot: [] for slot in range(len(chunks))}
    places: list[int] = []
    for (slot, position, index, count), parts in found.items():
        tokens[slot].append((position, index, count))
        parts.sort()
        assert [p[0] for p in parts] == [0, *(p[1] for p in parts[:-1])]
        assert parts[-1][1] == -(-(position + count) // PAIR)
        assert all(begin < end and n == len(parts) for begin, end, n, _, _ in parts)
        if len(parts) > 1:
            assert [p[3] - p[4] for p in parts] == list(range(len(parts)))
            places += [p[3] for p in parts]
    assert len(places) == len(set(places)) and len(places) * num_q_heads <= UNITS
    index = 0
    for slot, (position, count) in enumerate(chunks):
        for at, place, n in sorted(tokens[slot]):
            assert (at, place) == (position, index) and n <= ROWS
            position, index = position + n, index + n
            count -= n
        assert count == 0


def test_a_step_without_prompts_has_no_parts():
    assert cut([]) == ([], 0)


@given(prompts, st.integers(1, 64), st.sampled_from([78, 132, 144]))
def test_every_item_is_taken_once(chunks, num_q_heads: int, programs: int):
    parts, own = cut(chunks, num_q_heads, programs)
    taken = turns(len(parts) * num_q_heads, own * num_q_heads, programs)
    assert sorted(sum(taken, [])) == list(range(len(parts) * num_q_heads))
    shared = [end - begin for *_, begin, end, _, _, _ in parts[own:]]
    assert shared == sorted(shared, reverse=True)


def test_programs_have_about_equally_much_to_do():
    """The program with most pairs of tiles against an even share, for chunks as a busy server has them."""
    for chunks, worst in (
        ([(12_000, 1008)], 1.1), ([(12_000, 880)], 1.1), ([(12_000, 752)], 1.1), ([(12_000, 624)], 1.15),
        ([(12_000, 496)], 1.1), ([(12_000, 368)], 1.15), ([(12_000, 240)], 1.1),
        ([(24_000, 880)], 1.1), ([(24_000, 624)], 1.15), ([(3000, 512), (9000, 512)], 1.2), ([(18_000, 400), (6000, 400)], 1.2),
        ([(0, 2048)], 1.1), ([(5000, 16)], 1.1),
    ):  # fmt: skip
        parts, own = cut(chunks)
        items = np.repeat([end - begin for *_, begin, end, _, _, _ in parts], 16)
        most = max(items[mine].sum() for mine in turns(len(items), own * 16, 132))
        assert most <= worst * items.sum() / 132, (chunks, most, items.sum() / 132)
