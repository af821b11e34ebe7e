"""The two generating routes. A request is checked and tokenized before it is submitted, then answered whole or as a stream."""

import time
from array import array
from collections.abc import Callable

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from slipstream.errors import BadRequest
from slipstream.log.request import Request, SamplingParams
from slipstream.serve.delivery import LongResponse
from slipstream.serve.engine.exclusive import run_sliced
from slipstream.serve.engine.generation import Generation
from slipstream.serve.errors import Failed
from slipstream.serve.front import Front
from slipstream.serve.jobs import chat
from slipstream.serve.openai.bodies import ChatBody
from slipstream.serve.openai.read_writer import ReadWriter
from slipstream.serve.openai.writers import ChatWriter, CompletionWriter, Shape
from slipstream.serve.preparing import prepared
from slipstream.serve.text.choice import Choice
from slipstream.serve.text.logprobs import TokenNames
from slipstream.serve.text.params import GenerationParams
from slipstream.serve.text.prompts import Prompt, prepare

STREAM_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]  # of every stream
EVENT_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), *STREAM_HEADERS]


async def chat_completions(http: HttpRequest) -> Response:
    """POST /v1/chat/completions."""
    front: Front = http.app.state.front
    born = time.monotonic()
    found = await prepared(http, "chat")
    return await _answer_chat(http, front, found.plan, found.prompts, born)


async def answer_chat(http: HttpRequest, front: Front, body: ChatBody, born: float) -> Response:
    """Answers a conversation in text, for a route that has decoded its body itself."""
    desk = front.desk(True)
    found = await prepare(None, lambda: chat(body, desk, b""))
    return await _answer_chat(http, front, found.plan, found.prompts, born)


async def _answer_chat(
    http: HttpRequest, front: Front, plan: GenerationParams | None, prompts: list[Prompt], born: float
) -> Response:
    assert plan is not None
    form = ChatWriter if plan.reading is None else ReadWriter
    return await answer(http, front, plan, prompts, form, "chatcmpl-" + http.scope["slipstream.id"], born)


async def completions(http: HttpRequest) -> Response:
    """POST /v1/completions."""
    front: Front = http.app.state.front
    born = time.monotonic()
    found = await prepared(http, "completions")
    assert found.plan is not None
    return await answer(http, front, found.plan, found.prompts, CompletionWriter, "cmpl-" + http.scope["slipstream.id"], born)


def requests_of(front: Front, plan: GenerationParams, prompts: list[Prompt]) -> list[tuple[Prompt, Request]]:
    """One engine request per choice, in the order of choice indices. Choice k draws from (seed, k).

    Raises BadRequest for more requests than may wait. All wait at first, so even an idle server would refuse them.
    """
    count, most = plan.n * len(prompts), front.engine_config.max_queue
    if count > most:
        what, param = (f"n: {plan.n} choices", "n") if plan.n > 1 else (f"prompt: {count} prompts", "prompt")
        raise BadRequest(f"{what} make {count} requests, and at most {most} (--max-queue) can wait; send fewer together", param)
    replace, limits, out = msgspec.structs.replace, front.engine.limits, []
    prediction = plan.prediction[: 4 * limits.max_len] if limits is not None else b""
    ours = (plan.priority, plan.salt, plan.grammar, plan.most_drafts, prediction)
    for prompt in prompts:
        one = Request(0, prompt.ids.tobytes(), prompt.max_tokens, plan.sampling, *ours)
        one = _scored(one) if plan.discard else one
        for k in range(plan.n):  # the choices share what is large: prompt, bias and grammar
            choice = replace(one, id=front.engine.next_id(), sampling=replace(one.sampling, choice=k))
            out.append((prompt, choice))
    return out


def _scored(request: Request) -> Request:
    """A request without generated tokens. The engine generates at least one, so the prompt's last token is forced.

    Its log probabilities are those that it has in the prompt, and the prompt may be as long as the model allows. A prompt of
    one token has no log probabilities; the engine then generates a token that is not shown.
    """
    ids, sampling = request.prompt, request.sampling
    if request.prompt_len == 1:
        return request
    last, shown = array("i", ids[-4:])[0], sampling.prompt_logprobs
    forced = SamplingParams(0.0, seed=sampling.seed, logit_bias=((last, FORCING),), logprobs=shown, prompt_logprobs=shown)
    return msgspec.structs.replace(request, prompt=ids[:-4], sampling=forced, grammar=b"")


FORCING = 1e9  # a logit bias larger than any logit
MakeForm = Callable[
    [str, int, str, GenerationParams, TokenNames, list[Choice]], Shape
]  # id, created, model, plan, names, answers


async def answer(
    http: HttpRequest, front: Front, plan: GenerationParams, prompts: list[Prompt], shape: MakeForm, id: str, born: float
) -> Response:
    """Generates; answers whole or as a stream."""
    assert front.tokenizer is not None and front.names is not None and front.grammars is not None
    if plan.structure is not None:
        await front.grammars.check(plan.structure)
    generation = Generation(front.engine)
    answers = await run_sliced(
        Choice(i, prompt, request, plan, front.tokenizer, front.engine, front.metrics, generation.notify, born)
        for i, (prompt, request) in enumerate(requests_of(front, plan, prompts))
    )
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
        return LongResponse(await run_sliced(form.whole()))
    finally:
        if not streaming:
            generation.close()
            front.open.pop(generation, None)


class Stream(Response):
    """Server-sent events. The events of one turn of the loop go out in one write."""

    def __init__(self, front: Front, generation: Generation, form: Shape):
        super().__init__()
        self._front = front
        self._generation = generation
        self._form = form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation, form = self._generation, self._form

        async def write(data: bytes, more: bool) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            await send({"type": "http.response.start", "status": 200, "headers": list(EVENT_HEADERS)})
            if beginning := form.beginning():
                await write(beginning, True)
            while news := await generation.changed():
                data = b"".join(await run_sliced(piece for answer in news for piece in form.events(answer)))
                if data:
                    await write(data, True)
            if not generation.gone:
                await write(form.closing(), False)
        except Failed as e:
            await write(form.failed(e.failure), False)
        finally:
            generation.close()
            self._front.open.pop(generation, None)
