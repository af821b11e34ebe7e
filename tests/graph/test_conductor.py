import asyncio
import contextlib
import os
import select
import socket
import time

import msgspec
import numpy as np
import pytest

from slipstream.config import EngineConfig
from slipstream.errors import BadRequest, EngineDown
from slipstream.graph.chunks import Fixed
from slipstream.graph.conductor import Conductor, RequestFailed
from slipstream.graph.groups import LocalGroup, ProcessGroup, TaskGroup
from slipstream.graph.model import Edge, Model, Stream, Walk, check
from slipstream.graph.rows import Result
from slipstream.graph.work import Work
from slipstream.graph.worker import WorkerSpec, build_steps
from slipstream.process.board import Board
from slipstream.process.group import Group as RankGroup
from slipstream.process.group import Spec, State
from slipstream.transport.arena import Arena

from .toys import TOY, component

BIG = {"tone": {"size": 50_000}}


def started(model, components, peer, fd, settings=BIG):
    """A worker group as the supervisor starts it, ready or failed, and our socket to it."""
    spec = WorkerSpec(f"tests.graph.toys:{model}", components, settings, peer, {"tone": 1, "sum": 2})
    role = msgspec.json.encode(spec).decode()
    group = RankGroup(Spec(peer, EngineConfig(), "", 1, 0, "slipstream.graph.worker", role, (fd,)), Board.create(1))
    group.start()
    while group.state is State.STARTING:
        assert select.select([group.members[0].control], [], [], 30)[0]
        group.on_message(group.members[0])
    ours, theirs = socket.socketpair()
    group.give_front(theirs.fileno())
    theirs.close()
    return group, ours


class System:
    """The toy model over this process and two workers."""

    def __init__(self):
        self.fd = Arena.create(3, 4 << 20)
        self.arena = Arena(self.fd, 0)
        self.local = LocalGroup(Work(TOY, ("words",), build_steps(TOY, ("words",), {})))
        self.groups = {"tone": ProcessGroup(("tone",), 1, self.arena), "sum": ProcessGroup(("sum",), 2, self.arena)}
        self.conductor = Conductor(TOY, [self.local, *self.groups.values()], self.arena)
        self.procs, self.tasks = {}, {}

    async def start(self, name):
        group = self.groups[name]
        self.procs[name], sock = await asyncio.to_thread(started, "TOY", (name,), group.peer, self.fd)
        self.tasks[name] = asyncio.get_running_loop().create_task(group.serve(sock))
        while not group.up:
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def system():
    s = System()
    try:
        await asyncio.gather(s.start("tone"), s.start("sum"))
        yield s
    finally:
        for proc in s.procs.values():
            proc.kill()
        await asyncio.gather(*s.tasks.values())
        os.close(s.fd)


async def say(conductor, *texts, walk="say", **kw):
    """Runs one request; (port, value) of each output."""
    run = conductor.open(walk, **kw)
    out = []

    async def feed():
        with contextlib.suppress(RequestFailed, EngineDown):
            for i, text in enumerate(texts):
                await run.feed("text", text, i == len(texts) - 1)

    task = asyncio.get_running_loop().create_task(feed())
    try:
        async for o in run:
            if o.value is not None:
                out.append((o.port, o.value))
    finally:
        await asyncio.wait_for(task, 10)
    return out


async def drain(run):
    return [o async for o in run]


async def settled(s):
    """Waits until nothing of any request is left anywhere."""
    for _ in range(200):
        if not s.conductor.runs and not s.arena.live:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"left: {s.conductor.runs}, {s.arena.live} tensors")


def test_pieces_stream_between_processes_and_back():
    async def main():
        async with system() as s:
            texts = [f"word{'x' * i}" for i in range(12)]
            many = await asyncio.gather(*(say(s.conductor, *texts) for _ in range(4)), say(s.conductor, *texts, walk="add"))
            for out in many[:4]:
                assert [v for p, v in out if p == "text"] == [t.upper() for t in texts]
                audio = [v for p, v in out if p == "audio"]
                assert [len(a) for a in audio] == [50_000] * 12 and [a[-1] for a in audio] == [len(t) for t in texts]
            assert many[4][0][0] == "sum" and many[4][0][1][0] == 50_000 * sum(map(len, texts))
            await settled(s)

    asyncio.run(main())


def test_a_client_that_does_not_read_holds_back_its_producers_and_nobody_else():
    async def main():
        async with system() as s:
            run = s.conductor.open("say", wanted=("audio",))

            async def feed():
                for i in range(100):
                    await run.feed("text", f"w{i}", i == 99)

            task = asyncio.get_running_loop().create_task(feed())
            await asyncio.sleep(0.3)
            assert not task.done() and len(run._queue) <= 4
            assert len(await say(s.conductor, "other", wanted=("audio",))) == 1
            got = [o async for o in run if o.value is not None]
            assert len(got) == 100 and task.done()
            await settled(s)

    asyncio.run(main())


def test_ff66_aborts_at_any_point_leave_nothing_behind():
    async def main():
        async with system() as s:
            runs = []
            for i in range(40):
                run = s.conductor.open(("say", "add")[i % 2])
                for k in range(3):
                    await run.feed("text", f"{'slow' if i == 5 else 'w'}{k}", k == 2)
                runs.append(run)
                await asyncio.sleep(0.003 * (i % 4))
                run.abort()
                run.abort()
            await settled(s)
            for run in runs:
                assert [o async for o in run] == []
            assert len(await say(s.conductor, "still", wanted=("audio",))) == 1

    asyncio.run(main())


def test_ff61_a_stop_ends_one_component_and_the_rest_end_in_good_order():
    async def main():
        async with system() as s:
            run = s.conductor.open("say")
            await run.feed("text", "one")
            got = [await anext(run), await anext(run)]
            run.stop("tone")

            async def feed():
                for i in range(20):
                    await run.feed("text", f"w{i}", i == 19)

            got += (await asyncio.gather(drain(run), feed()))[0]
            assert sum(o.port == "text" and o.value is not None for o in got) == 21
            assert sum(o.port == "audio" and o.value is not None for o in got) == 1
            await settled(s)

    asyncio.run(main())


def test_ff72_a_component_that_fails_ends_its_request_by_name_and_no_other():
    async def main():
        async with system() as s:
            good = asyncio.get_running_loop().create_task(say(s.conductor, *["fine"] * 8, wanted=("audio",)))
            run = s.conductor.open("say", wanted=("audio",))
            await run.feed("text", "fine")
            assert (await anext(run)).value is not None
            await run.feed("text", "bad")
            with pytest.raises(RequestFailed, match="tone: not a text to say") as e:
                while True:
                    await anext(run)
            assert e.value.component == "tone" and e.value.status == 400
            with pytest.raises(RequestFailed, match="tone: RuntimeError: no tone for this") as e:
                await say(s.conductor, "raise")
            assert e.value.status == 500 and len(await good) == 8
            await settled(s)

    asyncio.run(main())


def test_a_killed_worker_ends_its_requests_with_one_error_each_and_serves_again():
    async def main():
        async with system() as s:
            runs = [s.conductor.open("say", wanted=("audio",)) for _ in range(5)]
            for run in runs:
                await run.feed("text", "slow")
            await asyncio.sleep(0.05)
            s.procs["tone"].kill()
            for run in runs:
                with pytest.raises(RequestFailed, match="tone: its process ended"):
                    async for _ in run:
                        pass
            with pytest.raises(EngineDown, match="tone"):
                s.conductor.open("say")
            other = s.conductor.open("say", wanted=("text",))
            assert other.plan.components == ("words",)
            other.abort()
            assert not [r for r in s.conductor.runs.values() if s.groups["tone"] in r._open]
            await s.start("tone")
            assert len(await say(s.conductor, "again", wanted=("audio",))) == 1
            await settled(s)

    asyncio.run(main())


def test_a_worker_that_cannot_load_says_why():
    async def main():
        fd = Arena.create(2, 1 << 20)
        group, _ = started("UNREADY", ("broken",), 1, fd)
        assert group.state is State.POISONED and "FileNotFoundError: no weights here" in group.failure
        group.kill()
        os.close(fd)

    asyncio.run(main())


def test_what_can_never_fit_ends_its_request_visibly():
    async def main():
        async with system() as s:
            with pytest.raises(RequestFailed, match="tone: a tensor of 6000000 bytes is larger than a segment"):
                await say(s.conductor, *["w"] * 30, walk="add")
            run = s.conductor.open("say")
            with pytest.raises(BadRequest, match="no input x"):
                await run.feed("x", "?")
            run.abort()
            await settled(s)

    asyncio.run(main())


def stalling(steps):
    """A model that the check cannot know to stall: of two streams of one producer, one is used four times as fast."""
    make = component("make", {"n": "array"}, {"a": "array", "b": "array"}, role="autoregressive")
    eat = component("eat", {"a": "array/partial", "b": "array/chunks"}, {"y": "array"})
    streams = (Stream("make.a", "eat.a"), Stream("make.b", "eat.b", Fixed(4)))
    m = Model("m", (make, eat), (Walk("w", (Edge("in.n", "make.n"), *streams, Stream("eat.y", "out.y"))),))
    check(m)
    return Conductor(m, [LocalGroup(Work(m, ("make",), steps)), LocalGroup(Work(m, ("eat",), steps))], step_timeout=0.2)


def make_pieces(rows):
    one = np.zeros(1)
    return [Result({"a": one, "b": one}, state=(r.branches[0] or 0) + 1, again=(r.branches[0] or 0) < 30) for r in rows]


def eat_pieces(rows):
    return [Result({"y": np.zeros(1)}) for _ in rows]


def test_a_request_in_which_nothing_can_move_ends_with_the_component_s_name():
    async def main():
        conductor = stalling({"make": make_pieces, "eat": eat_pieces})
        run = conductor.open("w")
        await run.feed("n", np.zeros(1), True)
        said = r"make: .* no progress for 0.2 s .*: make waits for room in the stream make.a -> eat.a; eat .* its input b"
        with pytest.raises(RequestFailed, match=said):
            await asyncio.wait_for(drain(run), 30)
        assert not conductor.runs

    asyncio.run(main())


def test_a_blocked_input_is_a_stall_and_a_silent_client_is_none():
    async def main():
        keep = component("keep", {"x": "array/chunks"}, {"y": "array"})
        m = Model("m", (keep,), (Walk("w", (Stream("in.x", "keep.x", Fixed(9), window=4), Stream("keep.y", "out.y"))),))
        conductor = Conductor(m, [LocalGroup(Work(m, ("keep",), {"keep": eat_pieces}))], step_timeout=0.1)
        silent, full = conductor.open("w"), conductor.open("w")
        for _ in range(3):
            await silent.feed("x", np.zeros(1))
        with pytest.raises(RequestFailed, match="keep: .*keep waits for its input x"):
            for _ in range(9):
                await asyncio.wait_for(full.feed("x", np.zeros(1)), 30)
        assert silent.failure is None and len(conductor.runs) == 1
        await silent.feed("x", np.zeros(1), True)
        assert len(await asyncio.wait_for(drain(silent), 30)) == 2

    asyncio.run(main())


def test_a_request_that_waits_for_its_turn_or_for_its_reader_has_not_stalled():
    async def main():
        slow = component("slow", {"x": "array"}, {"y": "array"}, max_rows=1)
        m = Model("m", (slow,), (Walk("w", (Edge("in.x", "slow.x"), Edge("slow.y", "out.y"))),))

        def step(rows):
            time.sleep(0.1)
            return eat_pieces(rows)

        conductor = Conductor(m, [LocalGroup(Work(m, ("slow",), {"slow": step}))], step_timeout=0.05)
        runs = [conductor.open("w") for _ in range(6)]
        for run in runs:
            await run.feed("x", np.zeros(1), True)
        assert [len(out) for out in await asyncio.gather(*map(drain, runs))] == [1] * 6
        unread = conductor.open("w")
        await unread.feed("x", np.zeros(1), True)
        await asyncio.sleep(0.5)
        assert len(await drain(unread)) == 1

    asyncio.run(main())


CHAT_LINKS = (
    Edge("in.prompt", "lm.prompt"),
    Stream("lm.text", "words.text"),
    Stream("words.word", "out.text"),
    Edge("lm.finish", "out.finish"),
)
LM = component("lm", {"prompt": "value"}, {"text": "text", "finish": "value"}, role="language_model", step="")
CHAT = Model("chat", (LM, *TOY.components), (Walk("chat", CHAT_LINKS),))


def test_a_language_model_joins_a_walk_as_a_coroutine():
    closed = []

    async def serve(params, prompt):
        try:
            for word in prompt["text"].split():
                if word == "refuse":
                    raise BadRequest("too long", "messages")
                await asyncio.sleep(0)
                yield "text", word
            yield "finish", {"reason": "stop", "tokens": params["n"]}
        finally:
            closed.append(prompt["text"])

    async def main():
        local = LocalGroup(Work(CHAT, ("words",), build_steps(CHAT, ("words",), {})))
        conductor = Conductor(CHAT, [TaskGroup(CHAT, "lm", serve), local])

        async def ask(text):
            run = conductor.open("chat", params={"n": 3})
            await run.feed("prompt", {"text": text}, True)
            return [(o.port, o.value) async for o in run if o.value is not None]

        out = await ask("a b")
        assert [v for p, v in out if p == "text"] == ["A", "B"]
        assert [v for p, v in out if p == "finish"] == [{"reason": "stop", "tokens": 3}]
        with pytest.raises(RequestFailed, match="lm: too long"):
            await ask("a refuse b")
        run = conductor.open("chat", params={"n": 1})
        await run.feed("prompt", {"text": "x " * 1000}, True)
        await anext(run)
        run.abort()
        await asyncio.sleep(0.05)
        assert len(closed) == 3 and not conductor.runs

    asyncio.run(main())
