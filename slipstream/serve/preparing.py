"""From an HTTP request to what is submitted: the body read, decoded and worked on, wherever that keeps nobody waiting.

Small bodies are worked on here, on the loop or on a thread (`prompts.prepare`). Large ones go to a process of their own:
whatever a client puts into one, the loop only moves its bytes.
"""

import os

import msgspec
from starlette.requests import Request as HttpRequest

from slipstream.errors import BadRequest, EngineDown
from slipstream.serve.engine.exclusive import run_exclusive
from slipstream.serve.errors import Failed, Failure
from slipstream.serve.front import Front
from slipstream.serve.jobs import JOBS, Asked, Desk, Prepared, decode_answer
from slipstream.serve.prepare_worker import MEMORY, SECONDS, Setup
from slipstream.serve.request_body import INLINE_BYTES, body_of, check_pieces, decode
from slipstream.serve.text.prompts import prepare
from slipstream.system.limited_process import LimitedProcess, Lost, Overrun, Pool

LARGE_BYTES = 1 << 18  # of a body; decoding so much takes some 5 ms, whatever it holds
WORKERS = 2
PATIENCE = 2 * SECONDS  # of wall time that a loaded machine may need
_HUB = ("HOME", "HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME", "SLIPSTREAM_CACHE")  # where the front end's tokenizer lies
_TOO_MUCH = f"the body takes more than {SECONDS:g} s of computing or {MEMORY >> 30} GiB; send less at once"


class LargeBodies:
    """Processes that prepare large bodies, started with the first of these."""

    def __init__(self, setup: Setup):
        self._setup = msgspec.msgpack.encode(setup)
        self._pool = Pool("bodies", WORKERS, self._start)

    def _start(self) -> LimitedProcess:
        env = {name: os.environ[name] for name in _HUB if name in os.environ}
        env |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1"}
        process = LimitedProcess("-m", "slipstream.serve.prepare_worker", patience=PATIENCE, env=env)
        try:
            process.ask(self._setup)
        except Overrun:
            raise Lost("it did not start") from None
        return process

    async def run(self, name: str, raw: bytearray, desk: Desk, earlier: bytes) -> Prepared:
        """`jobs.run` in one of the processes. Raises Failed (413) for what takes too much, EngineDown for a process lost."""
        try:
            found = await self._pool.ask(msgspec.msgpack.encode(Asked(name, desk.limits)), raw, earlier)
        except Overrun:
            raise Failed(Failure(413, _TOO_MUCH)) from None
        except Lost as e:
            raise EngineDown(f"the process that prepares large bodies was lost: {e}; try again") from None
        answered = decode_answer(found)
        if answered.refused is not None:
            message, param, status = answered.refused
            raise BadRequest(message, param, status)
        if answered.failed is not None:
            raise Failed(answered.failed)
        assert answered.prepared is not None
        return answered.prepared

    def close(self) -> None:
        self._pool.close()


async def prepared(http: HttpRequest, name: str, stored=None) -> Prepared:
    """Job `name` done with the request's body. `stored(id)` gives the conversation of a stored response as JSON."""
    front: Front = http.app.state.front
    async with body_of(http) as raw:
        found = await _run(front, name, raw, b"")
        if found.wants is None:
            return found
        assert stored is not None, "only responses name earlier ones"
        return await _run(front, name, raw, stored(found.wants))


async def _run(front: Front, name: str, raw: bytearray, earlier: bytes) -> Prepared:
    job = JOBS[name]
    if len(raw) > LARGE_BYTES and front.large is not None:
        return await front.large.run(name, raw, front.desk(job.generates), earlier)
    if len(raw) <= INLINE_BYTES:
        body = decode(raw, job.schema)
    else:
        check_pieces(raw)
        body = await run_exclusive(lambda: decode(raw, job.schema))
    desk = front.desk(job.generates)
    return await prepare(job.size(body), lambda: job.work(body, desk, earlier), job.only_ids(body))
