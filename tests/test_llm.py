"""`LLM`, `AsyncLLM` and `SamplingParams`, on the simulated device."""

import asyncio
import pathlib

import pytest

from slipstream import LLM, AsyncLLM, SamplingParams
from slipstream.errors import BadRequest, Overloaded
from tests.serve.fake import wait_for

TINY = str(pathlib.Path(__file__).parent / "data" / "tiny")
SIM = {"device": "sim", "load_format": "dummy", "sim_step_us": 200, "sim_token_us": 1}
GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def llm():
    with LLM(TINY, **SIM) as made:
        yield made


@pytest.fixture(scope="module")
def patient():
    made = AsyncLLM(TINY, **SIM)
    yield made
    made.close()


def test_prompts_are_completed_in_order(llm):
    outputs = llm.generate(["a", "bc"], GREEDY)
    assert [o.prompt for o in outputs] == ["a", "bc"] and [len(o.prompt_token_ids) for o in outputs] == [1, 2]
    assert all(len(o.outputs[0].token_ids) == 4 and o.outputs[0].finish_reason == "length" for o in outputs)
    (again,) = llm.generate("a", GREEDY)
    assert again.outputs[0].text == outputs[0].outputs[0].text
    (by_ids,) = llm.generate([outputs[1].prompt_token_ids], sampling_params=GREEDY)
    assert by_ids.prompt is None and by_ids.outputs[0].token_ids == outputs[1].outputs[0].token_ids
    assert len(llm.generate("a")[0].outputs[0].token_ids) <= 16


def test_each_prompt_may_have_parameters_of_its_own(llm):
    params = [SamplingParams(max_tokens=k, ignore_eos=True) for k in (1, 5, 3)]
    assert [len(o.outputs[0].token_ids) for o in llm.generate(["a", "b", "c"], params)] == [1, 5, 3]
    assert [len(o.outputs[0].token_ids) for o in llm.chat([HI, HI, HI], params)] == [1, 5, 3]


def test_several_answers_and_log_probabilities_are_shown(llm):
    params = SamplingParams(n=3, max_tokens=4, logprobs=2, prompt_logprobs=0, stop_token_ids=[7], seed=1)
    for output, _ in (llm.generate(["ab", "cd"], params), llm.chat([HI, HI], params)):
        assert [c.index for c in output.outputs] == [0, 1, 2]
        for c in output.outputs:
            assert c.logprobs is not None and len(c.logprobs) == len(c.token_ids)
            for id, row in zip(c.token_ids, c.logprobs, strict=True):
                assert row is not None and row[id].logprob <= 0 and len(row) in (2, 3)
    assert llm.generate("ab", GREEDY)[0].outputs[0].logprobs is None


def test_a_stop_string_and_a_structure_bind_an_answer(llm):
    (free,) = llm.generate("a", GREEDY)
    stop = free.outputs[0].text[1:3]
    (cut,) = llm.generate("a", SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, stop=stop))
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    assert cut.outputs[0].text == free.outputs[0].text[:1]


def test_conversations_are_answered_one_or_several_whole_or_in_pieces(llm):
    (one,) = llm.chat(HI, GREEDY)
    assert one.prompt is None and len(one.outputs[0].token_ids) == 4
    assert [o.outputs[0].text for o in llm.chat([HI, HI], GREEDY)] == [one.outputs[0].text] * 2
    assert "".join(llm.stream(HI, GREEDY)) == one.outputs[0].text
    begun = [*HI, {"role": "assistant", "content": "so "}]
    (more,) = llm.chat(begun, GREEDY, continue_final_message=True)
    assert len(more.prompt_token_ids) != len(llm.chat(begun, GREEDY)[0].prompt_token_ids)


@pytest.mark.parametrize(
    "given,param",
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {5: 101}}, "logit_bias"),
        ({"logprobs": 99}, "logprobs"),
        ({"structured_outputs": {"shape": 1}}, "structured_outputs.shape"),
    ],
)
def test_a_parameter_out_of_range_is_named_before_anything_runs(given, param):
    with pytest.raises(BadRequest) as e:
        SamplingParams(**given)
    assert (e.value.param or "").startswith(param) and isinstance(e.value, ValueError)


def test_a_wrong_argument_is_named(llm):
    for call, param in (
        (lambda: llm.generate([]), "prompts"),
        (lambda: llm.generate([1, 2]), "prompts"),
        (lambda: llm.generate(["a", [1]]), "prompt"),
        (lambda: llm.generate("a", SamplingParams(stop_token_ids=[10**6])), "stop_token_ids"),
        (lambda: llm.generate("a", {"max_tokens": 3}), "sampling_params"),
        (lambda: llm.generate(["a", "b"], [GREEDY]), "sampling_params"),
        (lambda: llm.chat([], GREEDY), "messages"),
        (lambda: llm.chat([{"role": "wizard", "content": "x"}]), "messages"),
        (lambda: llm.chat(HI, GREEDY, tools=[]), "tools"),
        (lambda: list(llm.stream(HI, SamplingParams(n=2))), "n"),
    ):
        with pytest.raises(BadRequest) as e:
            call()
        assert (e.value.param or "").startswith(param), e.value


def test_calls_of_an_event_loop_run_side_by_side(patient):
    async def pieces():
        return "".join([piece async for piece in patient.stream(HI, GREEDY)])

    async def main():
        return await asyncio.gather(*(patient.generate(f"p{i}", GREEDY) for i in range(20)), patient.chat(HI, GREEDY), pieces())

    *completed, (chat,), streamed = asyncio.run(main())
    assert [o.prompt for (o,) in completed] == [f"p{i}" for i in range(20)] and chat.outputs[0].text == streamed
    with pytest.raises(BadRequest, match="messages"):
        asyncio.run(patient.chat([{"role": "wizard", "content": "x"}]))


def test_a_call_that_is_cancelled_ends_its_answers(patient):
    forever = SamplingParams(max_tokens=8000, ignore_eos=True)
    engine = patient._front.engine

    async def main():
        task = asyncio.create_task(patient.generate(["a", "b"], forever))
        stream = patient.stream(HI, forever)
        await anext(stream)
        assert engine.live == 3
        task.cancel()
        await stream.aclose()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    wait_for(lambda: engine.live == 0)


def test_calls_beyond_the_queue_are_overload_and_not_the_caller_s_mistake():
    async def main():
        async with await asyncio.to_thread(AsyncLLM, TINY, **SIM, max_num_seqs=1, max_queue=2) as llm:
            many = [llm.generate("a", SamplingParams(max_tokens=200, ignore_eos=True)) for _ in range(8)]
            return await asyncio.gather(*many, return_exceptions=True)

    found = asyncio.run(main())
    failed = [f for f in found if isinstance(f, BaseException)]
    assert failed and len(failed) < 8 and all(isinstance(f, Overloaded) for f in failed), found


def test_an_engine_that_is_closed_leaves_an_event_loop_free():
    async def main():
        async with await asyncio.to_thread(AsyncLLM, TINY, **SIM) as llm:
            return (await llm.generate("a", GREEDY))[0].outputs[0].finish_reason

    assert asyncio.run(main()) == "length"
