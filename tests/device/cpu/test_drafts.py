"""Drafts on the CPU device: no answer changes with them, whatever they are and wherever they are wrong."""

import msgspec
import numpy as np
import pytest

from slipstream.device.cpu.drafts import NgramProposer, last_match
from slipstream.device.cpu.tables import SlotTables
from slipstream.log.caches import one_table
from slipstream.log.request import Request, SamplingParams
from tests.device.groups import Group
from tests.device.led import Answered, Led
from tests.helpers.checkpoints import tiny, tiny_llama, tiny_qwen3_5
from tests.models.test_recurrent import NEMOTRON

RNG = np.random.default_rng(8)
BEGINNING = RNG.integers(3, 250, 36).tolist()
PROMPTS = [
    BEGINNING + RNG.integers(3, 250, 5).tolist(),
    [*RNG.integers(3, 250, 6).tolist()] * 4,
    [9],
    BEGINNING + RNG.integers(3, 250, 28).tolist(),
    RNG.integers(3, 250, 30).tolist(),
    BEGINNING,
]
HEAVY = {"presence_penalty": 0.5, "frequency_penalty": 0.4, "repetition_penalty": 1.2}
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7, seed=5, top_p=0.9, top_k=40, logprobs=2),
    SamplingParams(temperature=0.9, seed=6, **HEAVY),
    SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=1, bad_words=((17,), (4, 5))),
    SamplingParams(temperature=0.8, seed=7, min_tokens=9, stop_ids=tuple(range(20, 120)), logit_bias=((30, 2.0), (130, 2.5))),
    SamplingParams(temperature=0.6, seed=8, min_p=0.05),
]
COUNT = 26  # tokens of an answer at most
REQUESTS = [
    Request(i, np.array(p, "<i4").tobytes(), COUNT - i, s) for i, (p, s) in enumerate(zip(PROMPTS, PARAMS, strict=True))
]
DRAFTS = 3


class Scripted:
    """Drafts that are right but for one position in each row, and as many as the row may have."""

    def __init__(self, tables: SlotTables, answers: dict[bytes, list[int]], wrong: int):
        """`wrong`: the position of the wrong draft; DRAFTS: all are right."""
        self.tables, self.answers, self.wrong = tables, answers, wrong

    def propose(self, slots: list[int]) -> None:
        tables = self.tables
        for slot in slots:
            n = int(tables.prompt_len[slot])
            answer = self.answers.get(tables.tokens[slot, :n].tobytes(), [])
            at = int(tables.length[slot]) - n
            drafts = np.array([*answer[at:], *[1] * DRAFTS], np.int32)[:DRAFTS]
            drafts[self.wrong : self.wrong + 1] = (drafts[self.wrong : self.wrong + 1] + 1) % 256
            tables.drafts[slot], tables.drafted[slot] = drafts, DRAFTS


def group(drafts: int, size: int = 1, pages: int = 0, make=tiny_llama, **more) -> Group:
    return Group(make(), size, slots=6, max_len=128, width=1 + drafts, pages=pages, **more)


def scripted(g: Group, answers: dict[int, Answered], wrong: int, requests: list[Request] = REQUESTS) -> Group:
    by_prompt = {r.prompt: answers[r.id].tokens for r in requests}
    for rank in g.ranks:
        rank.proposer = Scripted(rank.tables, by_prompt, wrong)
    return g


def same(got: dict[int, Answered], expected: dict[int, Answered]) -> None:
    for id, a in expected.items():
        b = got[id]
        assert (b.tokens, b.reason, b.error) == (a.tokens, a.reason, a.error), f"request {id}"
        for x, y in ((a.logprobs, b.logprobs), (a.prompt, b.prompt)):
            assert [t.top_ids for t in x] == [t.top_ids for t in y] and [t.rank for t in x] == [t.rank for t in y]
            assert np.allclose([t.logprob for t in x], [t.logprob for t in y], atol=1e-4)


@pytest.fixture(scope="module")
def expected() -> dict[int, Answered]:
    with group(0) as g:
        answers = Led(g, False).run(REQUESTS)
    assert {a.reason for a in answers.values()} == {"stop", "length"}
    return answers


@pytest.mark.parametrize("size, asynchronous, drafts", [(1, False, 1), (1, True, 3), (2, True, 3)])
def test_n_grams_change_no_answer(expected, size, asynchronous, drafts):
    """FF-05 and FF-44: sampled rows and several ranks give what they give without drafts."""
    with group(drafts, size) as g:
        same(Led(g, asynchronous).run(REQUESTS), expected)


@pytest.mark.parametrize("wrong", range(DRAFTS + 1))
def test_a_draft_wrong_at_any_position_changes_no_answer(expected, wrong):
    with scripted(group(DRAFTS), expected, wrong) as g:
        led = Led(g, True)
        same(led.run(REQUESTS), expected)
    rows = sum(batch.decodes for batch in led.batches)
    given = sum(len(a.tokens) for a in expected.values())
    assert rows < 1.3 * given / (wrong + 1) + 2 * len(REQUESTS), "drafts were not accepted"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_chunks_preemption_and_shared_prefixes_change_no_answer_with_drafts(expected, asynchronous):
    """FF-45 and FF-46: pages run short, rows begin late, and answers end at their limits inside of drafts."""
    with scripted(group(DRAFTS, pages=13), expected, 2) as g:
        led = Led(g, asynchronous, cap=16)
        same(led.run(REQUESTS), expected)
        assert led.leader.planner.counters.preemptions and led.leader.planner.counters.prefix_hits


def test_clients_that_leave_in_the_middle_of_drafts_change_no_other_answer(expected):
    others = [msgspec.structs.replace(REQUESTS[i], id=10 + i) for i in (0, 3)]
    with scripted(group(DRAFTS), expected, DRAFTS) as g:
        got = Led(g, True).run(REQUESTS[:4] + others, leaving={10: 3, 13: 1})
        same({id: got[id] for id in range(4)}, {id: expected[id] for id in range(4)})
        assert got[10].reason == "abort" and len(got[10].tokens) < len(expected[0].tokens)


def tiny_nemotron_h():
    return tiny("nemotron_h", **NEMOTRON)


HYBRIDS = [tiny_qwen3_5, tiny_nemotron_h]


@pytest.mark.parametrize("make", HYBRIDS)
def test_ff40_recurrent_state_goes_back_by_each_requests_own_count(make):
    """Drafts wrong at each position, in batches, chunks and on two ranks, with preemption and saved states."""
    with group(0, make=make, snapshots=6) as g:
        plain = Led(g, False).run(REQUESTS)
    for wrong, size, pages, cap in ((0, 1, 0, 2048), (1, 2, 0, 2048), (2, 1, 13, 16), (DRAFTS, 1, 0, 2048)):
        with scripted(group(DRAFTS, size, pages, make, snapshots=6), plain, wrong) as g:
            led = Led(g, True, cap=cap)
            same(led.run(REQUESTS), plain)
            assert not pages or led.leader.planner.counters.preemptions


class Alternating:
    """Widths that change from step to step, as `--speculative-tokens auto` may choose them."""

    def __init__(self):
        self.steps = 0

    def choose(self, rows: int) -> int:
        self.steps += 1
        return (1 + DRAFTS, 1, 1, 2)[self.steps % 4]

    def observe(self, rows: int, width: int, tokens: int, seconds: float) -> None:
        """The widths are given."""


def test_ff41_states_saved_between_rows_with_drafts_are_those_of_their_boundaries():
    """A row of one token may follow a row whose drafts are in flight: its place is not known, so its state is not saved."""

    def turns(led: Led) -> dict[int, Answered]:
        first = led.run(REQUESTS)
        longer = [r.prompt + np.array([*first[r.id].tokens, 5], "<i4").tobytes() for r in REQUESTS]
        return led.run([Request(20 + i, prompt, 4, PARAMS[0]) for i, prompt in enumerate(longer)])

    with group(0, make=tiny_qwen3_5) as g:
        g.limits = g.limits._replace(caching=False)
        plain = turns(Led(g, False))
    with group(DRAFTS, make=tiny_qwen3_5, snapshots=20) as g:
        g.ranks[0].proposer = Scripted(g.ranks[0].tables, {r.prompt: plain[r.id].tokens for r in REQUESTS}, 2)
        led = Led(g, True)
        led.leader.planner.auto = Alternating()
        same(turns(led), plain)
        assert led.leader.planner.counters.prefix_hits


class EveryThird:
    """A matcher after whose n-th token only ids that leave n % 3 when divided by 3 may follow."""

    def __init__(self, n: int = 0):
        self.n = n

    def accept(self, token: int) -> None:
        assert token % 3 == self.n % 3
        self.n += 1

    def rollback(self, count: int) -> None:
        self.n -= count

    def mask(self) -> np.ndarray:
        bits = np.zeros(320, np.uint8)
        bits[self.n % 3 :: 3] = 1
        return np.packbits(bits, bitorder="little").view("<u4")

    def copy(self) -> "EveryThird":
        return EveryThird(self.n)


@pytest.mark.parametrize("asynchronous, wrong", [(False, 3), (True, 1), (True, 3)])
def test_a_grammar_masks_each_position_of_its_drafts(asynchronous, wrong):
    bound = [msgspec.structs.replace(r, grammar=b"x") if r.id in (0, 1) else r for r in REQUESTS]
    with group(0) as g:
        plain = Led(g, False, make=lambda _: EveryThird()).run(bound)
    with scripted(group(DRAFTS), plain, wrong, bound) as g:
        led = Led(g, asynchronous, make=lambda _: EveryThird())
        same(led.run(bound), plain)
    assert all(t % 3 == i % 3 for i, t in enumerate(plain[0].tokens))
    assert sum(batch.decodes for batch in led.batches) < 0.9 * sum(len(a.tokens) for a in plain.values())


class Ending(EveryThird):
    """A matcher that allows nothing after six tokens."""

    def mask(self) -> np.ndarray:
        return super().mask() * (self.n < 6)

    def copy(self) -> "Ending":
        return Ending(self.n)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_dead_end_behind_right_drafts_ends_the_request_where_it_would_without(asynchronous):
    bound = [msgspec.structs.replace(REQUESTS[0], grammar=b"x"), REQUESTS[1]]
    with group(0) as g:
        plain = Led(g, False, make=lambda _: Ending()).run(bound)
    assert len(plain[0].tokens) == 6 and plain[0].reason == "error"
    with scripted(group(DRAFTS), plain, DRAFTS, bound) as g:
        same(Led(g, asynchronous, make=lambda _: Ending()).run(bound), plain)


def test_ff46_drafts_stop_at_the_models_length():
    """The answer ends with the last token that the slot has room for, in the middle of a row's drafts."""
    long = [msgspec.structs.replace(REQUESTS[i], max_tokens=128 - len(PROMPTS[i])) for i in (0, 2)]
    with group(0) as g:
        plain = Led(g, False).run(long)
    assert [len(a.tokens) + len(PROMPTS[i]) for i, a in plain.items()] == [128, 128]
    for wrong in (DRAFTS, 1):
        with scripted(group(DRAFTS), plain, wrong, long) as g:
            same(Led(g, True).run(long), plain)


def test_a_request_may_have_fewer_drafts_or_none(expected):
    few = [msgspec.structs.replace(r, most_drafts=k) for r, k in zip(REQUESTS, (0, 1, 2, 3, 8, 0), strict=True)]
    with group(DRAFTS) as g:
        same(Led(g, True).run(few), expected)
        assert g.ranks[0].tables.most_drafts.tolist().count(0) == 2


class Constant:
    """The same draft for every row."""

    def __init__(self, tables: SlotTables, draft: int):
        self.tables, self.draft = tables, draft

    def propose(self, slots: list[int]) -> None:
        self.tables.drafts[slots], self.tables.drafted[slots] = self.draft, 1


@pytest.mark.parametrize("rounds", [6, pytest.param(40, marks=pytest.mark.slow)])
def test_ff44_sampling_keeps_its_distribution_with_drafts(rounds):
    """Chi-square of 3,000 (slow: 20,000) draws over 50 tokens, each with a draft that is often right."""
    slots, vocab = 500, 50
    model = tiny_llama(vocab_size=vocab, num_hidden_layers=1)
    prompt, sampling = [7, 8, 9], SamplingParams(temperature=1.0)
    with Group(model, slots=slots, max_len=16, width=2) as g:
        rank = g.ranks[0]
        prompts = [prompt, *[[*prompt, x] for x in range(vocab)]]  # the first token's probabilities, and those after each
        scored = msgspec.structs.replace(sampling, logprobs=vocab)
        asked = [Request(i, np.array(p, "<i4").tobytes(), 1, scored) for i, p in enumerate(prompts)]
        tops = [a.logprobs[0] for _, a in sorted(Led(g, False).run(asked).items())]
        shares = np.array([[p for _, p in sorted(zip(t.top_ids, np.exp(t.top_logprobs), strict=True))] for t in tops])
        share = shares[0] @ shares[1:]  # of the second token
        rank.proposer = Constant(rank.tables, int(share.argmax()))
        counts = np.zeros(vocab)
        for k in range(rounds):
            several = [
                Request(i, np.array(prompt, "<i4").tobytes(), 3, msgspec.structs.replace(sampling, seed=k * slots + i))
                for i in range(slots)
            ]
            np.add.at(counts, [a.tokens[1] for a in Led(g, True).run(several).values()], 1)
    assert counts.sum() == slots * rounds
    expected = share * counts.sum()
    likely = expected >= 5
    chi_square = (((counts - expected) ** 2) / expected)[likely].sum()
    assert chi_square < 95, "the 0.9999 quantile with 49 degrees of freedom"
    assert counts[share.argmax()] > counts.sum() / 20, "few drafts were right"


def test_a_look_up_finds_the_longest_and_latest_match():
    text = np.array([1, 2, 3, 9, 2, 3, 8, 7, 2, 3], np.int32)
    assert last_match(text[:-1], text, 2) == 5  # 2 3, the latest; 1 2 3 does not end the text
    assert last_match(np.array([5, 1, 2, 3, 4, 2, 3], np.int32), np.array([1, 2, 3], np.int32), 2) == 3
    assert last_match(text[:-1], np.array([4, 3], np.int32), 2) == -1
    assert last_match(text, np.array([4, 3], np.int32), 1) == 9


def proposed(prompt: list[int], answer: list[int], prediction: tuple[int, ...] = (), most: int = 4) -> list[int]:
    tables = SlotTables(one_table(4, 1, 64), most)
    packed = np.array(prompt, "<i4").tobytes()
    tables.init_slot(0, Request(0, packed, 40, prediction=np.array(prediction, "<i4").tobytes()))
    first = np.array([len(prompt)])
    tables.commit(np.array([0]), first, np.array([answer], np.int32), np.array([len(answer)]))
    NgramProposer(tables).propose([0])
    return tables.drafts[0, : tables.drafted[0]].tolist()


def test_drafts_are_what_followed_before():
    assert proposed([4, 5, 6, 7, 8, 9], [5, 6]) == [7, 8, 9, 5]
    assert proposed([4, 5], [4, 5, 4, 5]) == [4, 5, 4, 5], "text that repeats itself goes on"
    assert proposed([1, 2, 3, 4], [9]) == []


def test_a_prediction_is_followed_and_found_again():
    assert proposed([1, 2], [30, 31], (30, 31, 32, 33)) == [32, 33]
    assert proposed([1, 2], [30, 99, 32], (30, 31, 32, 33, 34)) == [33, 34]
    assert proposed([1, 2, 3, 4], [1, 2], (50, 51)) == [3, 4, 1, 2], "the request's own tokens serve where it does not fit"
