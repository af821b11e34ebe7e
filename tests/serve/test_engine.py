"""The promise of the engine: every accepted request hears exactly one end, whatever happens."""

import asyncio
import socket
import time
from array import array

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.log.request import Request
from slipstream.process.protocol import Abort, Attach, Down, Finished, Load, Refused, Started, Submit, Tokens, ToLeader
from slipstream.serve.engine.engine import Engine
from slipstream.serve.errors import Failed, Failure
from slipstream.serve.observe.metrics import Metrics
from slipstream.system.framing import Frames, frame


class Ear:
    """A sink that writes down what it hears, and may leave by itself after some tokens, or be broken."""

    def __init__(self, engine, id, leave_after=None, broken=False):
        self.engine, self.id, self.leave_after, self.broken = engine, id, leave_after, broken
        self.tokens, self.ends, self.left = [], [], False

    def started(self, cached_tokens):
        self._open()

    def drafted(self, verified, accepted):
        self._open()

    def prompt_logprobs(self, start, rows):
        self._open()

    def token(self, token, logprobs, now):
        self._open()
        if self.broken:
            raise RuntimeError("a fault of the sink")
        self.tokens.append(token)
        if self.leave_after is not None and len(self.tokens) >= self.leave_after:
            self.left = True
            self.engine.abort(self.id, len(self.tokens))

    def finish(self, reason):
        self._open()
        self.ends.append(reason)

    def fail(self, failure):
        self._open()
        self.ends.append(failure)

    def flush(self):
        self._open()

    def _open(self):
        assert not self.ends and not self.left, "something came after the end"


def frames(*messages) -> bytes:
    return b"".join(frame(msgspec.msgpack.encode(m)) for m in messages)


def columns(ids, token=7) -> Tokens:
    return Tokens(array("q", ids).tobytes(), array("i", [token] * len(ids)).tobytes())


ids = st.integers(1, 5)
events = st.one_of(
    st.tuples(st.just("tokens"), st.lists(ids, min_size=1, max_size=6)),
    st.tuples(st.just("started"), ids),
    st.tuples(st.just("finished"), ids, st.sampled_from(["stop", "length", "abort", "error"])),
    st.tuples(st.just("refused"), ids, st.sampled_from([400, 429, 503])),
    st.tuples(st.just("abort"), ids),
    st.tuples(st.just("down")),
    st.tuples(st.just("eof")),
    st.tuples(st.just("garbage")),
)


@settings(max_examples=120, deadline=None)
@given(
    st.lists(events, max_size=14),
    st.lists(st.one_of(st.none(), st.integers(1, 3)), min_size=5, max_size=5),
    st.booleans(),
    st.integers(1, 40),
)
def test_exactly_one_end_whatever_comes(script, leaving, one_is_broken, cut):
    asyncio.run(_play(script, leaving, one_is_broken, cut))


async def _play(script, leaving, one_is_broken, cut):
    engine = Engine()
    ours, theirs = socket.socketpair()
    await engine.attach(Attach(0, 1, 100, 8, 512), theirs)
    ears = {}
    for id in range(1, 6):
        ears[id] = Ear(engine, id, leaving[id - 1], one_is_broken and id == 3)
        engine.submit(Request(id, b"\0" * 4, 8), ears[id])
    for name, *args in script:
        if name == "tokens":
            data = frames(columns(args[0]))
        elif name == "started":
            data = frames(Started(args[0], 0))
        elif name == "finished":
            data = frames(Finished(args[0], args[1], "why"))
        elif name == "refused":
            data = frames(Refused(args[0], args[1], "no"))
        elif name == "garbage":
            data = frame(b"\xc1\xc1\xc1")
        else:
            data = b""
            if name == "abort" and not ears[args[0]].ends and not ears[args[0]].left:
                ears[args[0]].left = True
                engine.abort(args[0])
            elif name == "down":
                engine.down(Down(0, 1, "a rank died", 1.0))
            elif name == "eof":
                ours.shutdown(socket.SHUT_RDWR)
        for i in range(0, len(data), cut):  # frames cut anywhere
            try:
                ours.send(data[i : i + cut])
            except OSError:
                break
        for _ in range(3):
            await asyncio.sleep(0)
    engine.down(Down(0, 1, "the end", 1.0))
    await asyncio.sleep(0)
    for ear in ears.values():
        assert len(ear.ends) == (0 if ear.left else 1)
    assert engine.live == 0
    ours.close()


def test_ff84_nothing_is_kept_of_an_aborted_request():
    async def main():
        engine = Engine()
        ours, theirs = socket.socketpair()
        await engine.attach(Attach(0, 1, 100, 8, 512), theirs)
        ear = Ear(engine, 1)
        engine.submit(Request(1, b"\0" * 4, 8), ear)
        engine.abort(1, 0)
        assert engine.live == 0
        ours.sendall(frames(columns([1, 1, 1]), Finished(1, "abort")))  # late, and nobody's
        await asyncio.sleep(0.01)
        assert not ear.tokens and not ear.ends
        submit, abort = map(msgspec.msgpack.Decoder(ToLeader).decode, Frames().feed(ours.recv(1 << 16)))
        assert isinstance(submit, Submit) and abort == Abort(1, 0)
        engine.down(Down(0, 1, "done", 1.0))
        ours.close()

    asyncio.run(main())


def test_a_new_leader_serves_after_the_old_one_was_lost():
    async def main():
        engine = Engine()
        assert engine.state == "starting"
        ours, theirs = socket.socketpair()
        await engine.attach(Attach(0, 1, 4, 8, 64), theirs)
        assert engine.limits is not None and engine.limits.max_len == 64
        ear = Ear(engine, 1)
        engine.submit(Request(1, b"\0" * 4, 8), ear)
        ours.close()
        await asyncio.sleep(0.01)
        assert engine.state == "failed" and len(ear.ends) == 1 and ear.ends[0].status == 500
        with pytest.raises(Failed):
            engine.submit(Request(2, b"\0" * 4, 8), Ear(engine, 2))
        ours, theirs = socket.socketpair()
        await engine.attach(Attach(0, 2, 100, 8, 512), theirs)
        engine.down(Down(0, 1, "stale: the incarnation before", 1.0))
        assert engine.state == "ready"
        engine.drain()
        with pytest.raises(Failed):
            engine.check_ready()
        engine.fail_all(Failure(503, "over"))
        ours.close()
        await asyncio.sleep(0.01)

    asyncio.run(main())


def test_a_link_that_breaks_by_itself_is_told_to_the_supervisor_and_one_that_it_ended_is_not():
    async def main():
        engine, lost = Engine(), []
        engine.on_lost = lost.append
        ours, theirs = socket.socketpair()
        await engine.attach(Attach(0, 3, 4, 8, 64), theirs)
        ears = [Ear(engine, id) for id in (1, 2)]
        for ear in ears:
            engine.submit(Request(ear.id, b"\0" * 4, 8), ear)
        ours.close()
        await asyncio.sleep(0.01)
        assert lost == [3] and [ear.ends[0].status for ear in ears] == [500, 500]
        ours, theirs = socket.socketpair()
        await engine.attach(Attach(0, 3, 4, 8, 64), theirs)  # the same leader again
        assert engine.state == "ready"
        engine.down(Down(0, 3, "a rank died", 1.0))
        ours.close()
        await asyncio.sleep(0.01)
        assert lost == [3]

    asyncio.run(main())


def test_a_leader_s_counters_are_counted_once_when_its_link_is_renewed():
    async def main():
        metrics = Metrics("m")
        engine = Engine(metrics.on_load)
        load = Load(0, 0, 0, 100, {"overlap": 10}, {}, [], 50, 20, 1, {"sampling": 4}, {})
        for hits in (20, 30):
            ours, theirs = socket.socketpair()
            await engine.attach(Attach(0, 1, 4, 8, 64), theirs)
            ours.sendall(frames(msgspec.structs.replace(load, prefix_hits=hits)))
            await asyncio.sleep(0.01)
            ours.close()
            await asyncio.sleep(0.01)
        assert metrics.steps["overlap"] == 10 and metrics.eager_steps == {"sampling": 4} and metrics.prefix_hits == 30

    asyncio.run(main())


def test_a_burst_of_messages_leaves_the_loop_to_others_in_between():
    """What one read brings may be tens of thousands of tokens; a client's socket must not wait for all of them."""

    class Slow(Ear):
        def token(self, token, logprobs, now):
            super().token(token, logprobs, now)
            time.sleep(0.002)

    async def main():
        engine = Engine()
        ours, theirs = socket.socketpair()
        await engine.attach(Attach(0, 1, 4, 8, 64), theirs)
        ear = Slow(engine, 1)
        engine.submit(Request(1, b"\0" * 4, 64), ear)
        ours.sendall(frames(*[columns([1])] * 40, Finished(1, "length")))
        most = seen = 0
        while not ear.ends:
            await asyncio.sleep(0)
            most, seen = max(most, len(ear.tokens) - seen), len(ear.tokens)
        assert len(ear.tokens) == 40 and most < 20
        ours.close()
        await asyncio.sleep(0.01)

    asyncio.run(main())
