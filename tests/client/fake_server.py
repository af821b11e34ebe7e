"""A small server with OpenAI's completions API for tests of the load generator; tokens depend on prompt and position."""

import asyncio
import contextlib
import hashlib
import json
import threading
import typing

VOCAB = 500
MAX_LEN = 4096


def token(prompt: list[int], position: int, seed: int | None) -> int:
    data = repr((prompt[-8:], len(prompt), position, seed)).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "little") % VOCAB


class FakeServer:
    """Runs in a thread. `pieces` is how many bytes go into one HTTP chunk; `faults` picks what goes wrong."""

    def __init__(
        self,
        *,
        delay: float = 0.001,  # seconds a token
        pieces: int = 0,
        faults: typing.Callable[[dict], str | None] = lambda body: None,
        skew: typing.Callable[[list[int], int], int] = lambda prompt, position: 0,  # added to the token
        gap: float = 1.0,  # between log probabilities of even and odd tokens
        ids: bool = True,  # whether return_token_ids is honoured
    ):
        self.delay, self.pieces, self.faults, self.skew, self.gap, self.ids = delay, pieces, faults, skew, gap, ids
        self.bodies: list[dict] = []
        self.connections = 0
        self.closed_early = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._ready = threading.Event()

    def __enter__(self) -> "FakeServer":
        self._thread.start()
        self._ready.wait(10)
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._main())

    async def _main(self) -> None:
        self._stop = asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                method, path, _ = head.split("\r\n")[0].split()
                length = next((int(h.split(":")[1]) for h in head.split("\r\n") if h.lower().startswith("content-length:")), 0)
                body = json.loads(await reader.readexactly(length)) if length else {}
                self.authorization = next(
                    (h.split(":")[1].strip() for h in head.split("\r\n") if h.startswith("Authorization:")), None
                )
                if not await self._answer(writer, method, path, body):
                    break
        writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, method: str, path: str, body: dict) -> bool:
        if path == "/v1/models":
            self._json(writer, 200, {"data": [{"id": "fake", "max_model_len": MAX_LEN}]})
            return True
        if path != "/v1/completions":
            self._json(writer, 404, {"error": {"message": "no such route"}})
            return True
        self.bodies.append(body)
        if any(t >= VOCAB for t in body["prompt"] if isinstance(t, int)):
            self._json(writer, 400, {"error": {"message": "token id out of range", "param": "prompt"}})
            return True
        if body.get("stream"):
            return await self._stream(writer, body)
        choice = {"text": "x", "token_ids": [1] if self.ids else None}
        if body.get("echo"):
            last = body["prompt"][-1]
            own = -1.0 - self.gap * (last % 2)
            before = [None] * (len(body["prompt"]) - 1)
            choice["logprobs"] = {"token_logprobs": [*before, own, -1.0], "top_logprobs": [*before, {"x": -1.0}, {"x": -1.0}]}
        self._json(writer, 200, {"choices": [choice]})
        return True

    def _json(self, writer: asyncio.StreamWriter, status: int, value: typing.Any) -> None:
        data = json.dumps(value).encode()
        writer.write(
            f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
        )

    def _chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        step = self.pieces or len(data)
        for i in range(0, len(data), step):
            part = data[i : i + step]
            writer.write(f"{len(part):x};ext=1\r\n".encode() + part + b"\r\n")

    async def _stream(self, writer: asyncio.StreamWriter, body: dict) -> bool:
        fault = self.faults(body)
        if fault == "busy":
            self._json(writer, 429, {"error": {"message": "the queue is full"}})
            return True
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        count = body["max_tokens"] - (1 if fault == "short" else 0)
        for i in range(count):
            await asyncio.sleep(self.delay)
            if writer.transport.is_closing():
                self.closed_early += 1
                return False
            if fault == "break" and i == 2:
                writer.transport.abort()
                return False
            if fault == "error" and i == 2:
                self._chunk(writer, b'data: {"error": {"message": "the group is gone"}}\n\n')
                break
            t = (token(body["prompt"], i, body.get("seed")) + self.skew(body["prompt"], i)) % VOCAB
            choice: dict = {"index": 0, "text": "a", "finish_reason": "length" if i == count - 1 else None}
            if self.ids:
                choice["token_ids"] = [t]
            self._chunk(writer, b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        if fault != "error":
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
            self._chunk(writer, b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
            self._chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True
