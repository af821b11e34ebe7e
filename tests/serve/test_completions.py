"""POST /v1/completions, whole: every parameter is honoured, and text, ids and log probabilities stay aligned."""

from array import array

import pytest

from tests.serve.fake import EOS, START, WORDS, Script, wait_for

W = {w: 258 + i for i, w in enumerate(WORDS)}


def one(front, **body):
    r = front.complete(**body)
    assert r.status_code == 200, r.text
    return r.json()


def test_ff80_finish_reason_and_usage_are_true(front):
    b = one(front, prompt="abc")
    assert b["choices"][0] == {"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    assert b["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9, "prompt_tokens_details": None,
    }  # fmt: skip
    b = one(front, prompt="abc", max_tokens=2)
    assert (b["choices"][0]["text"], b["choices"][0]["finish_reason"], b["usage"]["completion_tokens"]) == ("he", "length", 2)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_ff83_max_tokens_is_exact(front, n):
    b = one(front, max_tokens=n, return_token_ids=True)
    assert len(b["choices"][0]["token_ids"]) == b["usage"]["completion_tokens"] == n
    assert front.leader.requests[-1].max_tokens == n


def test_ff80_every_parameter_reaches_the_engine(front):
    one(
        front, prompt=[1, 2, 3], max_tokens=5, min_tokens=2, temperature=0.5, top_p=0.9, top_k=40, min_p=0.05, seed=7,
        presence_penalty=0.1, frequency_penalty=-0.2, repetition_penalty=1.3, logit_bias={"5": 2, "6": -100}, bad_words=["x"],
        stop_token_ids=[9], logprobs=2, priority=3, cache_salt="s", prompt_logprobs=1,
    )  # fmt: skip
    r = front.leader.requests[-1]
    s = r.sampling
    assert array("i", r.prompt).tolist() == [1, 2, 3] and (r.max_tokens, r.priority, r.salt) == (5, 3, b"s")
    assert (s.temperature, s.top_p, s.top_k, s.min_p, s.seed, s.min_tokens) == (0.5, 0.9, 40, 0.05, 7, 2)
    assert (s.presence_penalty, s.frequency_penalty, s.repetition_penalty) == (0.1, -0.2, 1.3)
    assert s.logit_bias == ((5, 2.0), (6, -100.0)) and s.stop_ids == (9, EOS) and (s.logprobs, s.prompt_logprobs) == (2, 1)
    assert s.bad_words == ((ord("x"),),)  # after a space it has two tokens here, and is found by its own
    one(front, ignore_eos=True, max_tokens=1)
    assert front.leader.requests[-1].sampling.stop_ids == ()


def test_several_prompts_and_choices_come_in_order_and_draw_from_seed_and_choice(front):
    front.script = lambda r: Script([*b"p", r.prompt[0], *str(r.sampling.choice).encode(), EOS])
    b = one(front, prompt=["a", "b"], n=2, seed=5)
    assert [c["index"] for c in b["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in b["choices"]] == ["pa0", "pa1", "pb0", "pb1"]
    assert {r.sampling.seed for r in front.leader.requests} == {5} and b["usage"]["prompt_tokens"] == 2
    assert len(one(front, n=2, best_of=2)["choices"]) == 2
    one(front, prompt="a")
    one(front, prompt="a")
    assert front.leader.requests[-1].sampling.seed != front.leader.requests[-2].sampling.seed


def test_prompts_are_texts_or_ids(front):
    front.script = lambda r: Script([*array("i", r.prompt), EOS])
    for prompt, texts in (("ab", ["ab"]), (["a", "b"], ["a", "b"]), ([97, 98], ["ab"]), ([[97], [98, 99]], ["a", "bc"])):
        assert [c["text"] for c in one(front, prompt=prompt)["choices"]] == texts


def test_ff43_a_stop_string_cuts_text_ids_and_log_probabilities_together(front):
    front.script = Script([*b"one ", W["ST"], W["OP"], *b"never", EOS], late_tokens=3)
    b = one(front, stop=["STOP"], logprobs=0, return_token_ids=True)
    c = b["choices"][0]
    assert (c["text"], c["finish_reason"], c["stop_reason"]) == ("one ", "stop", "STOP")
    assert c["token_ids"] == [*b"one ", W["ST"], W["OP"]] and b["usage"]["completion_tokens"] == 6
    assert c["logprobs"]["tokens"] == ["o", "n", "e", " ", "ST", "OP"] and c["logprobs"]["text_offset"] == [0, 1, 2, 3, 4, 6]
    assert len(c["logprobs"]["token_logprobs"]) == 6
    wait_for(lambda: front.leader.aborts)
    assert front.leader.aborts[-1].kept == 6


def test_a_stop_string_may_be_shown_and_waits_for_min_tokens(front):
    front.script = Script([*b"xSTOPySTOPz", EOS])
    assert one(front, stop="STOP", include_stop_str_in_output=True)["choices"][0]["text"] == "xSTOP"
    assert one(front, stop="STOP", min_tokens=7)["choices"][0]["text"] == "xSTOPy"
    assert one(front, stop=["ST", "OP", "never"])["choices"][0]["stop_reason"] == "ST"


def test_a_stop_string_may_name_a_special_token_that_is_not_shown(front):
    front.script = Script([*b"ab", START, *b"cd", EOS])
    for stop, text in (("<|start|>", "ab"), ("<|start|>c", "ab"), ("b<|start|>", "a"), ("bc", "a"), ("<|start|>d", "abcd")):
        c = one(front, stop=["never", stop], return_token_ids=True)["choices"][0]
        assert (c["text"], c["finish_reason"], c["stop_reason"]) == (text, "stop", None if text == "abcd" else stop)
    assert one(front, stop="<|start|>", skip_special_tokens=False)["choices"][0]["text"] == "ab"
    assert one(front, stop="<|start|>", include_stop_str_in_output=True)["choices"][0]["text"] == "ab<|start|>"
    assert one(front, stop="<|end|>", ignore_eos=True, max_tokens=9)["choices"][0]["stop_reason"] == "<|end|>"


def test_half_a_stop_string_at_the_end_is_text(front):
    front.script = Script([*b"a STO", EOS])
    assert one(front, stop=["STOP"])["choices"][0] | {"logprobs": 0} == {
        "index": 0, "text": "a STO", "logprobs": 0, "finish_reason": "stop", "stop_reason": None,
    }  # fmt: skip


def test_the_end_token_is_in_the_ids_and_never_in_the_text(front):
    for skip in (True, False):
        c = one(front, return_token_ids=True, skip_special_tokens=skip, logprobs=1)["choices"][0]
        assert c["text"] == "hello" and c["token_ids"] == [*b"hello", EOS] and c["prompt_token_ids"] == list(b"hi")
        assert c["logprobs"]["tokens"][-1] == "<|end|>" and len(c["logprobs"]["tokens"]) == 6


def test_special_tokens_in_the_middle_show_only_when_asked(front):
    front.script = Script([*b"a", EOS, *b"b"])
    assert one(front, ignore_eos=True, max_tokens=3)["choices"][0]["text"] == "ab"
    assert one(front, ignore_eos=True, max_tokens=3, skip_special_tokens=False)["choices"][0]["text"] == "a<|end|>b"


def test_stop_token_ids_name_themselves(front):
    c = one(front, stop_token_ids=[ord("l")], return_token_ids=True)["choices"][0]
    assert (c["text"], c["finish_reason"], c["stop_reason"], c["token_ids"]) == ("he", "stop", ord("l"), list(b"hel"))
    c = one(front, stop_token_ids=[ord("l")], include_stop_str_in_output=True)["choices"][0]
    assert c["text"] == "hel"


def test_log_probabilities_in_openai_s_form(front):
    lp = one(front, logprobs=3, max_tokens=2)["choices"][0]["logprobs"]
    assert lp["tokens"] == ["h", "e"] and lp["token_logprobs"] == [-0.104, -0.101] and lp["text_offset"] == [0, 1]
    assert lp["top_logprobs"][0] == {"h": -0.104, "A": -0.065, "B": -0.066}
    front.script = Script([*"é".encode(), EOS])
    lp = one(front, logprobs=0)["choices"][0]["logprobs"]
    assert lp["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "<|end|>"]  # halves of a character keep names of their own


def test_echo_with_log_probabilities_scores_a_prompt(front):
    """As lm_eval sends it: token ids, echo, logprobs=1, max_tokens=1."""
    b = one(front, prompt=[[97, 98, 99], [100]], echo=True, logprobs=1, max_tokens=1)
    lp = b["choices"][0]["logprobs"]
    assert b["choices"][0]["text"] == "abch" and lp["tokens"] == ["a", "b", "c", "h"] and lp["text_offset"] == [0, 1, 2, 3]
    assert lp["token_logprobs"] == [None, -0.098, -0.099, -0.104] and lp["top_logprobs"][0] is None
    assert b["choices"][1]["logprobs"]["token_logprobs"] == [None, -0.104] and b["usage"]["completion_tokens"] == 2


def test_echo_without_an_answer(front):
    b = one(front, prompt="abc", echo=True, max_tokens=0, logprobs=0)
    c = b["choices"][0]
    assert (c["text"], c["finish_reason"], b["usage"]["completion_tokens"]) == ("abc", "length", 0)
    assert c["logprobs"]["tokens"] == ["a", "b", "c"]


@pytest.mark.parametrize("length", [1, 2, 3, 512])
def test_a_prompt_of_the_model_s_whole_length_is_scored_without_an_answer(front, length):
    ids = [97 + i % 26 for i in range(length)]
    front.script = lambda r: Script([id for id, _ in r.sampling.logit_bias] or [EOS])
    b = one(front, prompt=ids, echo=True, max_tokens=0, logprobs=1, bad_words=["z"], n=2)
    for c in b["choices"]:
        assert c["text"] == bytes(ids).decode() and c["finish_reason"] == "length"
        assert c["logprobs"]["token_logprobs"] == [None, *(-id / 1000 for id in ids[1:])]
        assert c["logprobs"]["top_logprobs"][1:] == [{chr(id): -id / 1000} for id in ids[1:]]
    assert b["usage"]["prompt_tokens"] == length and b["usage"]["completion_tokens"] == 0
    r = front.leader.requests[-1]
    assert r.prompt_len + r.max_tokens == max(2, length)
    assert one(front, prompt=ids, echo=True, max_tokens=0)["choices"][0]["text"] == bytes(ids).decode()
    r = front.complete(prompt=ids, echo=True, max_tokens=1)
    assert r.status_code == (400 if length == 512 else 200)


def test_prompt_logprobs_in_vllm_s_form(front):
    c = one(front, prompt="abc", prompt_logprobs=1)["choices"][0]
    assert c["prompt_logprobs"][0] is None
    assert c["prompt_logprobs"][1] == {"98": {"logprob": -0.098, "rank": 1, "decoded_token": "b"}}


def test_cached_tokens_are_reported(front):
    front.script = Script([*b"x", EOS], cached=2)
    assert one(front, prompt="abc")["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_null_counts_as_absent(front):
    b = one(front, prompt="a", stop=None, n=None, temperature=None, logprobs=None, stream=None, stream_options=None, user=None)
    assert b["choices"][0]["text"] == "hello"
    assert front.leader.requests[-1].sampling.temperature == 1.0


def test_the_default_max_tokens_is_cut_to_the_context(front):
    one(front, prompt="a" * 500)
    assert front.leader.requests[-1].max_tokens == 12
    one(front, prompt="a")
    assert front.leader.requests[-1].max_tokens == 16
