"""The two generating routes: all is checked and tokenized before anything is submitted, then answered whole or streamed."""

import time
from collections.abc import Callable

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from slipstream.errors import BadRequest
from slipstream.log.request import Request
from slipstream.serve.engine.generation import Generation
from slipstream.serve.errors import Failed
from slipstream.serve.front import Front
from slipstream.serve.openai.bodies import ChatBody, CompletionBody
from slipstream.serve.openai.chat import plan_chat
from slipstream.serve.openai.read_writer import ReadWriter
from slipstream.serve.openai.writers import ChatWriter, CompletionWriter, Shape
from slipstream.serve.request_body import read
from slipstream.serve.text.choice import Choice
from slipstream.serve.text.logprobs import TokenNames
from slipstream.serve.text.params import GenerationParams, make_plan
from slipstream.serve.text.prompts import Prompt, completion_prompts, prepare, size_of

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def chat_completions(http: HttpRequest) -> Response:
    """POST /v1/chat/completions."""
    front: Front = http.app.state.front
    born = time.monotonic()
    return await answer_chat(http, front, await read(http, ChatBody), born)


async def answer_chat(http: HttpRequest, front: Front, body: ChatBody, born: float) -> Response:
    """A conversation in text."""
    front.check_model(body.model)
    tokenizer, limits = front.ready_tokenizer(), front.engine.check_ready()
    plan, prompts = await prepare(None, lambda: plan_chat(body, front.dialect, tokenizer, limits))
    form = ChatWriter if plan.reading is None else ReadWriter
    return await answer(http, front, plan, prompts, form, "chatcmpl-" + http.scope["slipstream.id"], born)


async def completions(http: HttpRequest) -> Response:
    """POST /v1/completions."""
    front: Front = http.app.state.front
    born = time.monotonic()
    body = await read(http, CompletionBody)
    front.check_model(body.model)
    tokenizer, limits = front.ready_tokenizer(), front.engine.check_ready()

    def work() -> tuple[GenerationParams, list[Prompt]]:
        plan = make_plan(body, tokenizer)
        return plan, completion_prompts(body, plan, tokenizer, limits)

    # a grammar's text may take its time
    bound = body.response_format is not None or body.structured_outputs is not None or body.regex is not None
    only_ids = isinstance(body.prompt, list) and isinstance(body.prompt[0], int) and not (body.echo or body.bad_words)
    plan, prompts = await prepare(None if bound else size_of(body), work, only_ids)
    return await answer(http, front, plan, prompts, CompletionWriter, "cmpl-" + http.scope["slipstream.id"], born)


def requests_of(front: Front, plan: GenerationParams, prompts: list[Prompt]) -> list[tuple[Prompt, Request]]:
    """One engine request per choice, in the order of choice indices. Choice k draws from (seed, k).

    Raises BadRequest for more than can ever run and wait together: they would be refused later just the same.
    """
    count, config = plan.n * len(prompts), front.engine_config
    if count > config.max_queue + config.max_num_seqs:
        what, param = (f"n: {plan.n} choices", "n") if plan.n > 1 else (f"prompt: {count} prompts", "prompt")
        most = f"{config.max_num_seqs} (--max-num-seqs) run and {config.max_queue} (--max-queue) wait at a time"
        raise BadRequest(f"{what} make {count} requests, of which {most}; send fewer together", param)
    samplings = [msgspec.structs.replace(plan.sampling, choice=k) for k in range(plan.n)]
    grammar, out = plan.grammar, []
    for prompt in prompts:
        packed = prompt.ids.tobytes()
        for sampling in samplings:
            id = front.engine.next_id()
            out.append((prompt, Request(id, packed, prompt.max_tokens, sampling, plan.priority, plan.salt, grammar)))
    return out


MakeForm = Callable[
    [str, int, str, GenerationParams, TokenNames, list[Choice]], Shape
]  # id, created, model, plan, names, answers


async def answer(
    http: HttpRequest, front: Front, plan: GenerationParams, prompts: list[Prompt], shape: MakeForm, id: str, born: float
) -> Response:
    """Generates, and answers whole or as a stream."""
    assert front.tokenizer is not None and front.names is not None and front.grammars is not None
    if plan.structure is not None:
        await front.grammars.check(plan.structure)
    generation = Generation(front.engine)
    answers = [
        Choice(i, prompt, request, plan, front.tokenizer, front.engine, front.metrics, generation.notify, born)
        for i, (prompt, request) in enumerate(requests_of(front, plan, prompts))
    ]
    form = shape(id, int(time.time()), front.model, plan, front.names, answers)
    front.open[generation] = http.scope.get("slipstream.cut")
    if (telemetry := front.telemetry) is not None:
        parent = telemetry.parent(http.headers)
        generation.on_close = lambda ended: telemetry.record(ended, id, parent)
    streaming = False
    try:
        generation.start(answers, http.receive)
        if plan.stream:
            await generation.begun()
            if not generation.gone:
                streaming = True
                return Stream(front, generation, form)
        else:
            await generation.done()
        if generation.gone:
            return Response(status_code=499)
        return Response(form.whole(), media_type="application/json")
    finally:
        if not streaming:
            generation.close()
            front.open.pop(generation, None)


class Stream(Response):
    """Server-sent events. What arrived in one turn of the loop goes out in one write."""

    def __init__(self, front: Front, generation: Generation, form: Shape):
        super().__init__()
        self._front = front
        self._generation = generation
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation, form = self._generation, self._form
        try:
            await send({"type": "http.response.start", "status": 200, "headers": list(_STREAM_HEADERS)})
            if beginning := form.beginning():
                await generation.write(send, beginning, True)
            while news := await generation.changed():
                data = b"".join([form.events(answer) for answer in news])
                if data:
                    await generation.write(send, data, True)
            if not generation.gone:
                await generation.write(send, form.closing(), False)
        except Failed as e:
            await generation.write(send, form.failed(e.failure), False)
        finally:
            generation.close()
            self._front.open.pop(generation, None)
