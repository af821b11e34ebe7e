"""Responses that run without a client. A client that asked for a stream may watch. When it leaves, the response goes on."""

import asyncio
from collections.abc import Callable

from starlette.responses import Response

from slipstream.errors import BadRequest, Overloaded
from slipstream.serve.engine.exclusive import run_sliced
from slipstream.serve.engine.generation import Generation
from slipstream.serve.errors import Failed
from slipstream.serve.front import Front
from slipstream.serve.info import as_json
from slipstream.serve.openai.event_log import EventLog, key_of_events
from slipstream.serve.openai.generate import requests_of
from slipstream.serve.openai.response_store import RECORD_BYTES
from slipstream.serve.openai.responses_writer import ResponsesWriter
from slipstream.serve.openai.writers import encode
from slipstream.serve.text.choice import Choice
from slipstream.serve.text.params import GenerationParams
from slipstream.serve.text.prompts import Prompt

MAX_BACKGROUND = 256  # responses that run at a time
CANCEL_SECONDS = 0.1  # between checks whether a response was cancelled

_tasks: set[asyncio.Task] = set()


async def begin(
    front: Front,
    plan: GenerationParams,
    prompts: list[Prompt],
    form: ResponsesWriter,
    key: str,
    born: float,
    cut: Callable[[], None] | None,
) -> Response:
    """Starts a response. Answers with its present state, or with a stream of it. cut: drops the client's connection."""
    if len(_tasks) >= MAX_BACKGROUND:
        raise Overloaded(f"{MAX_BACKGROUND} responses run in the background; try again later")
    record = encode({"response": form.value, "streamed": plan.stream})
    if len(record) > RECORD_BYTES:
        raise BadRequest(f"background: the request has {len(record)} bytes; at most {RECORD_BYTES} are stored", "background")
    assert front.tokenizer is not None and front.names is not None and front.grammars is not None
    if plan.structure is not None:
        await front.grammars.check(plan.structure)
    generation = Generation(front.engine)
    ((prompt, request),) = requests_of(front, plan, prompts)
    one = Choice(0, prompt, request, plan, front.tokenizer, front.engine, front.metrics, generation.notify, born)
    form.bind("", 0, front.model, plan, front.names, [one])
    generation.start([one], _never)
    front.open[generation] = None
    front.response_store.put(key, record)
    events = EventLog(kept=plan.stream)
    answer = events.watch(-1, cut) if plan.stream else as_json(form.value)
    if plan.stream:
        front.event_logs[key] = events
    task = asyncio.get_running_loop().create_task(_run(front, generation, form, key, record, events))
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return answer


async def _run(front: Front, generation: Generation, form: ResponsesWriter, key: str, record: bytes, events: EventLog) -> None:
    orders = asyncio.get_running_loop().create_task(_obey(front, generation, key, record))
    try:
        events.tell(form.beginning())
        while news := await generation.changed():
            events.tell(b"".join(await run_sliced(piece for answer in news for piece in form.events(answer))))
        if generation.gone:
            form.cancel()
        else:
            events.tell(form.closing())
    except Failed as e:
        events.tell(form.failed(e.failure))
    finally:
        orders.cancel()
        events.end()
        generation.close()
        front.open.pop(generation, None)
        if front.event_logs.pop(key, None) is not None and events.kept and front.response_store.state(key) != "removed":
            front.response_store.put(key_of_events(key), events.after(-1))


async def _obey(front: Front, generation: Generation, key: str, record: bytes) -> None:
    """Ends the response once any front end has cancelled or deleted it. Keeps its record in the store until then."""
    store = front.response_store
    while (state := store.state(key)) in ("kept", "lost"):
        if state == "lost":  # newer records have pushed it out
            store.put(key, record)
        await asyncio.sleep(CANCEL_SECONDS)
    generation.leave()


async def _never() -> dict:
    await asyncio.get_running_loop().create_future()
    raise AssertionError
