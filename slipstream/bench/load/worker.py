"""One of the client's processes: sends its part of a workload and records when each chunk came.

The processes share a few counters: which job is next, how many are done, how many streams decode, when the burst starts.
"""

import asyncio
import contextlib
import gc
import time
import typing
from collections.abc import Callable

import msgspec

from slipstream.bench.load.records import Conversation, Job, Record, prompt_ids
from slipstream.client.http import Client, Event, ServerError


class Target(msgspec.Struct, frozen=True):
    """The server and its properties."""

    base_url: str
    model: str
    key: str | None
    vocab: int
    max_len: int | None
    token_ids: bool  # whether it supports return_token_ids
    timeout: float = 600.0


class Task(msgspec.Struct, frozen=True):
    """A workload for all processes; `drive` names how its jobs are sent."""

    target: Target
    drive: str  # "closed", "timed", "burst", "turns"
    seed: int
    concurrency: int
    jobs: list[Job] = []
    conversations: list[Conversation] = []
    burst_delay: float = 2.0  # seconds from the last stream's first token to the burst
    keep_ids: bool = False  # whether records carry the answers' token ids


class Shared(typing.NamedTuple):
    """Shared values of multiprocessing."""

    next: typing.Any  # int: the next job to take
    done: typing.Any  # int: requests ended, for the progress bar
    decoding: typing.Any  # int: streams that have a token (or failed)
    burst_at: typing.Any  # float: when the burst starts, 0 while unknown
    start_at: typing.Any  # float: the time zero of arrivals
    barrier: typing.Any


def main(task: bytes, shared: Shared, part: int, parts: int, pipe: typing.Any) -> None:
    """A process's entry point: sends back its records as msgpack."""
    with contextlib.suppress(KeyboardInterrupt):
        worker = Worker(msgspec.msgpack.decode(task, type=Task), shared, part, parts)
        gc.collect()
        gc.freeze()  # walking what is loaded takes up to 80 ms, which would be a gap in every stream of this process
        records = asyncio.run(worker.run())
        pipe.send_bytes(msgspec.msgpack.encode(records))
        pipe.close()


class Worker:
    def __init__(self, task: Task, shared: Shared, part: int, parts: int):
        self.task, self.shared, self.part, self.parts = task, shared, part, parts
        target = task.target
        self.client = Client(target.base_url, target.key, target.timeout)
        self.records: list[Record] = []

    async def run(self) -> list[Record]:
        drive = getattr(self, "_" + self.task.drive)
        await asyncio.to_thread(self.shared.barrier.wait, 60)
        try:
            await drive()
        finally:
            self.client.close()
        return self.records

    def _take(self, count: int) -> int | None:
        """The next index that no process has taken, or None."""
        with self.shared.next.get_lock():
            index = self.shared.next.value
            if index >= count:
                return None
            self.shared.next.value = index + 1
            return index

    def _slots(self) -> int:
        """This process's share of the requests in flight."""
        return len(range(self.part, self.task.concurrency, self.parts))

    async def _closed(self) -> None:
        async def slot() -> None:
            while (index := self._take(len(self.task.jobs))) is not None:
                await self._send(self.task.jobs[index])

        await asyncio.gather(*(slot() for _ in range(self._slots())))

    async def _timed(self) -> None:
        async def one(job: Job) -> None:
            await _sleep_until(self.shared.start_at.value + job.at)
            await self._send(job)

        await asyncio.gather(*(one(j) for j in self.task.jobs[self.part :: self.parts]))

    async def _burst(self) -> None:
        streams = sum(j.kind == "stream" for j in self.task.jobs)

        async def stream(job: Job) -> None:
            counted = False

            def first() -> None:
                nonlocal counted
                if not counted:
                    counted = True
                    _add(self.shared.decoding)

            await self._send(job, on_token=first)
            first()  # a failed one must not hold back the burst

        async def one(job: Job) -> None:
            body = msgspec.Raw(msgspec.json.encode(self._body(job)))  # now, since encoding it later would delay the streams
            while not self.shared.burst_at.value:
                await asyncio.sleep(0.005)
                with self.shared.burst_at.get_lock():
                    if self.shared.decoding.value >= streams and not self.shared.burst_at.value:
                        self.shared.burst_at.value = time.monotonic() + self.task.burst_delay
            await _sleep_until(self.shared.burst_at.value)
            await self._send(job, body=body)

        jobs = self.task.jobs[self.part :: self.parts]
        await asyncio.gather(*(stream(j) if j.kind == "stream" else one(j) for j in jobs))

    async def _turns(self) -> None:
        async def slot() -> None:
            while (index := self._take(len(self.task.conversations))) is not None:
                await self._converse(self.task.conversations[index])

        await asyncio.gather(*(slot() for _ in range(self._slots())))

    async def _converse(self, conversation: Conversation) -> None:
        """Each turn carries the real history: all prompts so far and the answers' own tokens."""
        history: list[int] = []
        for i, turn in enumerate(conversation.turns):
            seed = conversation.index * 16 + i
            history += prompt_ids(self.task.seed, seed, turn.new_len, self.task.target.vocab)
            job = Job(conversation.index, "turn", len(history), turn.output_len)
            body = completion(self.task.target, history, job)
            record = await self._send(job, body=body, leave_after=turn.leave_after, turn=i)
            if not record.ok:
                return
            history += record.token_ids

    def _body(self, job: Job) -> dict[str, typing.Any]:
        target = self.task.target
        return completion(target, prompt_ids(self.task.seed, job.index, job.prompt_len, target.vocab), job)

    async def _send(
        self,
        job: Job,
        *,
        body: typing.Any = None,
        on_token: Callable[[], None] | None = None,
        leave_after: int | None = None,
        turn: int = 0,
    ) -> Record:
        """Sends one request and reads it to its end. Its result is in the record, also if it failed."""
        body = body or self._body(job)
        record = Record(job.index, job.kind, job.prompt_len, job.output_len, time.monotonic(), turn=turn)
        self.records.append(record)
        ids_come, keep = self.task.target.token_ids, self.task.keep_ids
        try:
            async with contextlib.aclosing(self.client.stream("/v1/completions", body)) as chunks:
                async for at, event in chunks:
                    count = _note(record, at, event, ids_come, keep)
                    if count and on_token:
                        on_token()
                    if leave_after is not None and record.tokens >= leave_after:
                        record.left = True
                        break
            if not record.left and record.tokens != job.output_len:
                record.error = f"{record.tokens} of {job.output_len} tokens received (finish reason {record.finish})"
        except ServerError as e:
            record.error = str(e)
        _add(self.shared.done)
        return record


def completion(target: Target, ids: list[int], job: Job) -> dict[str, typing.Any]:
    """The body of a streamed completion that runs to its full length."""
    body: dict[str, typing.Any] = {
        "model": target.model,
        "prompt": ids,
        "max_tokens": job.output_len,
        "temperature": 0 if job.seed is None else 1,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if job.seed is not None:
        body["seed"] = job.seed
    if target.token_ids:
        body["return_token_ids"] = True
    return body


def _note(record: Record, at: float, event: Event, ids_come: bool, keep: bool) -> int:
    """Adds an event to the record; returns how many tokens it brought.

    Without token ids, a chunk counts as one token; the usage at the end corrects the sum.
    """
    count = 0
    for choice in event.choices:
        if ids_come:
            count += len(choice.token_ids or ())
            if keep:
                record.token_ids += choice.token_ids or ()
        elif choice.text:
            count += 1
        record.finish = choice.finish_reason or record.finish
    if count:
        record.times.append(at)
        record.counts.append(count)
    if event.usage is not None:
        if not ids_come and record.counts and event.usage.completion_tokens > record.tokens:
            record.counts[-1] += event.usage.completion_tokens - record.tokens
        if event.usage.prompt_tokens_details is not None:
            record.cached_tokens = event.usage.prompt_tokens_details.cached_tokens
    return count


async def _sleep_until(at: float) -> None:
    delay = at - time.monotonic()
    if delay > 0:
        await asyncio.sleep(delay)


def _add(value: typing.Any) -> None:
    with value.get_lock():
        value.value += 1
