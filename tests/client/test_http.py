"""The client's HTTP: bodies cut anywhere, kept and broken connections, refusals and errors in mid-stream."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.client.http import Client
from slipstream.client.wire import Events, Response, ServerError
from slipstream.errors import ConfigError
from tests.client.fake_server import FakeServer

CHUNKED = (
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n"
    b"5\r\nhello\r\nb;name=value\r\n to \r\n\r\nyou\r\n1\r\n!\r\n0\r\nTrailer: x\r\n\r\n"
)


@given(st.lists(st.integers(0, len(CHUNKED)), max_size=8))
def test_a_chunked_body_is_the_same_however_its_bytes_are_cut(cuts):
    edges = [0, *sorted(cuts), len(CHUNKED)]
    r = Response()
    body = b"".join(r.feed(CHUNKED[a:b]) for a, b in zip(edges, edges[1:], strict=False))
    assert body == b"hello to \r\n\r\nyou!"
    assert r.done and r.keep and r.status == 200


def test_bodies_by_length_and_until_the_end():
    r = Response()
    assert r.feed(b"HTTP/1.1 200 OK\nContent-Length: 3\n\nab") == b"ab" and not r.done
    assert r.feed(b"c") == b"c" and r.done and r.keep
    r = Response()
    assert r.feed(b"HTTP/1.1 200 OK\r\n\r\nab") == b"ab"
    r.feed_eof()
    assert r.done and not r.keep
    r = Response()
    r.feed(b"HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n")
    assert r.done and not r.keep


@pytest.mark.parametrize("data", [b"SSH-2.0-x\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"])
def test_what_is_no_http_is_named(data):
    with pytest.raises(ServerError):
        Response().feed(data)


def test_a_chunk_longer_than_its_size_is_an_error():
    r = Response()
    with pytest.raises(ServerError, match="longer"):
        r.feed(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n")


@given(st.lists(st.integers(0, 60), max_size=6))
def test_events_are_the_same_however_they_are_cut(cuts):
    data = b': comment\n\ndata: {"a": 1}\r\n\r\nevent: x\ndata:one\ndata: two\n\ndata: [DONE]\n\n'
    edges = [0, *sorted(cuts), len(data)]
    e = Events()
    got = [x for a, b in zip(edges, edges[1:], strict=False) for x in e.feed(data[a:b])]
    assert got == [b'{"a": 1}', b"one\ntwo", b"[DONE]"]


BODY = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": 6, "stream": True}


def stream(server, body=BODY, times=1, **more):
    async def run():
        async with Client(server.url, **more) as client:
            out = []
            for _ in range(times):
                out.append([c async for c in client.stream("/v1/completions", body)])
            return out

    return asyncio.run(run())


@pytest.mark.parametrize("pieces", [1, 7, 0])
def test_a_stream_gives_its_tokens_whatever_the_chunks_are(pieces):
    with FakeServer(pieces=pieces) as server:
        first, second = stream(server, times=2)
        tokens = [t for c in first for choice in c.event.choices for t in choice.token_ids or []]
        assert len(tokens) == 6
        assert [c.at for c in first] == sorted(c.at for c in first)
        assert first[-1].event.usage is not None and first[-1].event.usage.completion_tokens == 6
        assert server.connections == 1  # kept alive
        assert len(second) == len(first)


@pytest.mark.parametrize(
    ("fault", "message"),
    [("busy", "HTTP 429: the queue is full"), ("error", "the group is gone"), ("break", "connection|closed")],
)
def test_failures_are_raised_with_their_reason(fault, message):
    with FakeServer(faults=lambda body: fault) as server, pytest.raises(ServerError, match=message):
        stream(server)


def test_a_kept_connection_that_the_server_has_closed_is_replaced():
    async def run():
        answers = 0

        async def serve(reader, writer):
            nonlocal answers
            await reader.readuntil(b"\r\n\r\n")
            answers += 1
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with Client(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
            for _ in range(3):
                assert await client.request("GET", "/health") == {}
                await asyncio.sleep(0.02)
        server.close()
        return answers

    assert asyncio.run(run()) == 3


def test_a_client_that_leaves_closes_its_connection():
    with FakeServer(delay=0.005) as server:

        async def leave():
            async with Client(server.url) as client:
                chunks = client.stream("/v1/completions", {**BODY, "max_tokens": 500})
                await anext(chunks)
                await chunks.aclose()
                await asyncio.sleep(0.1)

        asyncio.run(leave())
        assert server.closed_early == 1


def test_silence_is_an_error_after_the_timeout():
    with FakeServer(delay=5.0) as server, pytest.raises(ServerError, match="no byte received for 0.1 s"):
        stream(server, timeout=0.1)


def test_the_key_goes_in_the_header_and_bad_addresses_are_named():
    with FakeServer() as server:
        stream(server, key="s3cret")
        assert server.authorization == "Bearer s3cret"
    with pytest.raises(ConfigError, match="--base-url"):
        Client("ftp://x")
    with pytest.raises(ServerError, match="cannot connect"):
        asyncio.run(Client("http://127.0.0.1:1").models())
