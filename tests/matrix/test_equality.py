"""No way of scheduling changes an answer: chunks, cached prefixes, preemption, ranks, overlap, arrivals and aborts.

`pytest` runs a set of settings in which every two values meet; `make matrix` runs them all.
"""

import re

import pytest

from tests.helpers.checkpoints import tiny_gemma3, tiny_llama, tiny_qwen3_5, tiny_qwen3_moe
from tests.helpers.server import Server
from tests.matrix.requests import ARRIVALS, VOCABULARY, answer_of, differences, make_requests
from tests.matrix.settings import ALL, DRAFTED, ODD, PLAINEST, Setting, pairwise


class Reference:
    """The plainest setting: its server, the requests made from its answers, and each one's answer when it runs alone."""

    def __init__(self, server: Server, model: str):
        self.server, self.model = server, model
        self.bodies = make_requests(self.ask)
        self.answers = {name: answer_of(self.ask(body)) for name, body in self.bodies.items()}

    def ask(self, body: dict) -> dict:
        answer = self.server.post("/v1/completions", body)
        assert answer.status == 200, answer
        return answer.body


@pytest.fixture(scope="module")
def reference():
    model = str(tiny_llama(vocab_size=VOCABULARY))
    with Server(*PLAINEST.flags(), model=model) as server:
        yield Reference(server, model)


@pytest.fixture(scope="module")
def windowed():
    """Half of the layers have a window that every prompt fills; their pages are as large as those of `reference`."""
    model = str(tiny_gemma3(vocab_size=VOCABULARY))
    with Server(*PLAINEST.flags(), model=model) as server:
        yield Reference(server, model)


@pytest.fixture(scope="module")
def expert():
    """A mixture of experts in every layer; its pages are as large as those of `reference`."""
    model = str(tiny_qwen3_moe(vocab_size=VOCABULARY))
    with Server(*PLAINEST.flags(), model=model) as server:
        yield Reference(server, model)


@pytest.fixture(scope="module")
def hybrid():
    """Three of four layers keep state by slot."""
    model = str(tiny_qwen3_5(vocab_size=VOCABULARY))
    with Server(*PLAINEST.flags(), model=model) as server:
        yield Reference(server, model)


FEW = [*pairwise(ALL), ODD, *DRAFTED]
EXPERT = [Setting(2, "64", "cached", "scarce", "async")]
WINDOWED = [Setting(2, "16", "cached", "scarce", "async")]
HYBRID = [Setting(2, "16", "uncached", "plenty", "async")]
# scarce memory is counted in pages of a model without state, and these prompts are shorter than one step of snapshots
STATEFUL = [s for s in ALL if s.pages == "plenty" and s.cache == "uncached"]


@pytest.mark.parametrize("setting", [*FEW, *(pytest.param(s, marks=pytest.mark.slow) for s in ALL if s not in FEW)], ids=str)
def test_no_way_of_scheduling_changes_an_answer(reference: Reference, setting: Setting, record_property):
    """Also FF-20, FF-21, FF-22, FF-24, FF-29, FF-30, FF-31: what they garbled shows in tokens or log probabilities here.

    And FF-43: stop strings end inside of accepted drafts.
    """
    judge(reference, setting, record_property)


@pytest.mark.parametrize(
    "setting", [*WINDOWED, *(pytest.param(s, marks=pytest.mark.slow) for s in ALL if s not in WINDOWED)], ids=str
)
def test_no_way_of_scheduling_changes_a_windowed_models_answer(windowed: Reference, setting: Setting, record_property):
    judge(windowed, setting, record_property)


@pytest.mark.parametrize(
    "setting", [*EXPERT, *(pytest.param(s, marks=pytest.mark.slow) for s in ALL if s not in EXPERT)], ids=str
)
def test_no_way_of_scheduling_changes_an_expert_models_answer(expert: Reference, setting: Setting, record_property):
    judge(expert, setting, record_property)


@pytest.mark.parametrize(
    "setting", [*HYBRID, *(pytest.param(s, marks=pytest.mark.slow) for s in STATEFUL if s not in HYBRID)], ids=str
)
def test_no_way_of_scheduling_changes_a_hybrids_answer(hybrid: Reference, setting: Setting, record_property):
    judge(hybrid, setting, record_property)


def judge(reference: Reference, setting: Setting, record_property) -> None:
    with Server(*setting.flags(), model=reference.model) as server:
        flips = 0
        for name, arrive in ARRIVALS.items():
            wrong, flipped = differences(reference.answers, arrive(server, reference.bodies), reference.bodies, reference.ask)
            assert not wrong, f"{name}: " + "\n".join(wrong)
            flips += flipped
        record_property("near_ties", flips)
        assert flips <= 2, f"{flips} of {3 * len(reference.bodies)} answers took the other side of a near-tie"
        if setting.pages == "scarce":
            assert server.metric("slipstream:num_preemptions_total") > 0, "pages were not scarce"
        if setting.cache == "cached":
            assert server.metric("slipstream:prefix_cache_hits_total") > 0
        server.until(lambda: server.metric("slipstream:kv_cache_usage_perc") == 0, "the pages of all requests")


def test_the_requests_do_what_they_are_there_for(reference: Reference):
    bodies, answers = reference.bodies, reference.answers
    assert answers["stop strings"].finish == "stop" and len(answers["stop strings"].ids) < 40
    assert answers["min_tokens"].finish == "stop" and 25 <= len(answers["min_tokens"].ids) <= 40
    banned = bodies["bad words"]["bad_words"]
    assert len(banned) == 3 and not any(word in answers["bad words"].text for word in banned)
    assert len(answers["logprobs top-5"].names[0]) >= 5
    assert len(answers["prompt scored"].names) == 48 + 40
    assert re.fullmatch(r"[a-z]{3}( [a-z0-9]{0,9}){1,8}", answers["grammar"].text)
    assert all(len(set(a.ids)) > 5 for a in answers.values()), "an answer that repeats itself shows little"


def test_every_pair_of_values_meets_in_the_few(record_property):
    pairs = {(i, s[i], j, s[j]) for s in FEW for i in range(5) for j in range(i)}
    assert pairs == {(i, s[i], j, s[j]) for s in ALL for i in range(5) for j in range(i)}
    record_property("settings", [str(s) for s in FEW])
