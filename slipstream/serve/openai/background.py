"""Responses that run without a client. A client that asked for a stream may watch. When it leaves, the response goes on."""

import asyncio
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from slipstream.errors import BadRequest, Overloaded
from slipstream.serve.engine.exclusive import run_sliced
from slipstream.serve.engine.generation import Generation
from slipstream.serve.errors import Failed
from slipstream.serve.front import Front
from slipstream.serve.info import as_json
from slipstream.serve.openai.generate import EVENT_HEADERS, requests_of
from slipstream.serve.openai.response_store import RECORD_BYTES
from slipstream.serve.openai.responses_writer import ResponsesWriter
from slipstream.serve.openai.writers import encode
from slipstream.serve.text.choice import Choice
from slipstream.serve.text.params import GenerationParams
from slipstream.serve.text.prompts import Prompt

MAX_BACKGROUND = 256  # responses that run at a time
CANCEL_SECONDS = 0.1  # between checks whether a response was cancelled
MAX_UNREAD_BYTES = 1 << 20  # of events that wait for a client; a client with more is cut off

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
    record = encode({"response": form.value})
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
    watcher = Watcher(cut) if plan.stream else None
    answer = watcher or as_json(form.value)
    task = asyncio.get_running_loop().create_task(_run(front, generation, form, key, record, watcher or _Nobody()))
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)
    return answer


async def _run(
    front: Front, generation: Generation, form: ResponsesWriter, key: str, record: bytes, watcher: "Watcher | _Nobody"
) -> None:
    orders = asyncio.get_running_loop().create_task(_obey(front, generation, key, record))
    try:
        watcher.tell(form.beginning())
        while news := await generation.changed():
            watcher.tell(b"".join(await run_sliced(piece for answer in news for piece in form.events(answer))))
        if generation.gone:
            form.cancel()
        else:
            watcher.tell(form.closing())
    except Failed as e:
        watcher.tell(form.failed(e.failure))
    finally:
        orders.cancel()
        watcher.end()
        generation.close()
        front.open.pop(generation, None)


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


class _Nobody:
    def tell(self, data: bytes) -> None: ...

    def end(self) -> None: ...


class Watcher(Response):
    """The events of a background response on their way to one client. It cannot slow the response down."""

    def __init__(self, cut: Callable[[], None] | None):
        super().__init__()
        self._cut = cut
        self._unread: list[bytes] = []
        self._size = 0
        self._ended = False
        self._news = asyncio.Event()

    def tell(self, data: bytes) -> None:
        if self._ended:
            return
        self._unread.append(data)
        self._size += len(data)
        self._news.set()
        if self._size > MAX_UNREAD_BYTES:
            self.end()
            if self._cut is not None:
                self._cut()

    def end(self) -> None:
        self._ended = True
        self._news.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": list(EVENT_HEADERS)})
        while self._unread or not self._ended:
            data = b"".join(self._unread)
            self._unread.clear()
            self._size = 0
            self._news.clear()
            await send({"type": "http.response.body", "body": data, "more_body": True})
            if not self._unread and not self._ended:
                await self._news.wait()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
