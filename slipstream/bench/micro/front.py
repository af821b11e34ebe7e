"""The front end's cost of a token: CPU time of its process, with paced streams and a leader that only counts.

    python -m slipstream.bench.micro.front --streams 64 --itl-ms 10 --tokens 400

Plays supervisor, leader and clients around the real process; needs no model. The figure is CPU time (user and system) of the
front end between the first and the last token, divided by the tokens; a second run without tokens is not needed, since an idle
front end uses next to none.
"""

import argparse
import contextlib
import json
import os
import pathlib
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from array import array

import msgspec

from slipstream import config
from slipstream.process.board import Board
from slipstream.process.protocol import Attach, Finished, Hello, Started, Submit, Tokens, ToLeader
from slipstream.system.framing import Frames, frame


class Leader:
    """Sends one token to every stream each `itl` seconds, in one message, as a group's leader does."""

    def __init__(self, sock: socket.socket, streams: int, tokens: int, itl: float):
        self._sock, self._streams, self._tokens, self._itl = sock, streams, tokens, itl
        self.begun = threading.Event()
        self.done = threading.Event()

    def run(self) -> None:
        ids = self._admit()
        packed = array("q", ids).tobytes()
        self.begun.set()
        at = time.monotonic()
        for i in range(self._tokens):
            column = array("i", [1000 + (i * 7 + k * 131) % 20000 for k in range(len(ids))])
            self._send(Tokens(packed, column.tobytes()))
            at += self._itl
            time.sleep(max(0.0, at - time.monotonic()))
        self.done.set()
        self._send(*(Finished(id, "length") for id in ids))

    def _admit(self) -> list[int]:
        decode, frames, ids = msgspec.msgpack.Decoder(ToLeader).decode, Frames(), []
        while len(ids) < self._streams:
            data = self._sock.recv(1 << 20)
            if not data:
                raise SystemExit("the front end closed the connection")
            for message in map(decode, frames.feed(data)):
                if isinstance(message, Submit):
                    ids.append(message.request.id)
                    self._send(Started(message.request.id, 0))
        return ids

    def _send(self, *messages) -> None:
        self._sock.sendall(b"".join(frame(msgspec.msgpack.encode(m)) for m in messages))


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def front_end(engine: config.EngineConfig, server: config.ServerConfig, model_path: str):
    """A front-end process that listens. Yields (pid, port, control socket)."""
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    board = Board.create(1)
    command = [sys.executable, "-m", "slipstream.serve.main", "--control-fd", str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    try:
        theirs.close()
        hello = msgspec.msgpack.encode(Hello(config.to_json(engine), config.to_json(server), model_path))
        socket.send_fds(control, [hello], [listener.fileno(), board.fd])
        control.settimeout(30)
        control.recv(1024)
        yield process.pid, listener.getsockname()[1], control
    finally:
        control.close()
        process.kill()
        process.wait()


def open_streams(port: int, count: int, body: dict) -> list[socket.socket]:
    """Sends `count` requests, each on its own connection."""
    data = json.dumps({**body, "stream": True}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    out = []
    for _ in range(count):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(head.encode() + data)
        out.append(sock)
    return out


def drain(socks: list[socket.socket], stop: threading.Event) -> tuple[int, bytes]:
    """Reads everything until `stop`. Returns the bytes read and the first stream's text."""
    total, first = 0, b""
    while not stop.is_set():
        for sock in select.select(socks, [], [], 0.1)[0]:
            data = sock.recv(1 << 16)
            total += len(data)
            if sock is socks[0]:
                first += data
            if not data:
                raise SystemExit(f"a stream ended early: {first[-500:]!r}")
    return total, first


def measure(streams: int, tokens: int, itl: float) -> dict:
    """CPU microseconds per token, and the parameters of the figure."""
    engine = config.EngineConfig(model="bench", device="sim")
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 32000}))
        with front_end(engine, config.ServerConfig(log_level="warning"), folder) as (pid, port, control):
            return _measure(streams, tokens, itl, pid, port, control)


def _measure(streams: int, tokens: int, itl: float, pid: int, port: int, control: socket.socket) -> dict:
    ours, theirs = socket.socketpair()
    attach = Attach(group=0, incarnation=0, pages=1 << 20, slots=streams, max_len=1 << 16)
    socket.send_fds(control, [msgspec.msgpack.encode(attach)], [theirs.fileno()])
    theirs.close()
    leader = Leader(ours, streams, tokens, itl)
    time.sleep(1.0)  # the tokenizer loads
    thread = threading.Thread(target=leader.run, daemon=True)
    thread.start()
    socks = open_streams(port, streams, {"messages": [{"role": "user", "content": "hello"}], "max_tokens": tokens})
    if not leader.begun.wait(30):
        raise SystemExit("the streams were not admitted")
    before, begun = cpu_seconds(pid), time.monotonic()
    total, _ = drain(socks, leader.done)
    cpu, wall = cpu_seconds(pid) - before, time.monotonic() - begun
    for sock in socks:
        sock.close()
    count = streams * tokens
    per_token = cpu / count * 1e6
    return {
        "streams": streams,
        "tokens": count,
        "itl_ms": itl * 1e3,
        "wall_s": wall,
        "bytes": total,
        "cpu_us_per_token": per_token,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m slipstream.bench.micro.front", description="CPU time a token of the front end"
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=300, help="per stream")
    parser.add_argument("--itl-ms", type=float, default=10.0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure(args.streams, args.tokens, args.itl_ms / 1e3)
    if args.json:
        print(json.dumps(result))
    else:
        print("{streams} streams, {itl_ms:g} ms between tokens, {tokens} tokens in {wall_s:.1f} s".format(**result))
        print(f"front end: {result['cpu_us_per_token']:.1f} us of CPU time a token (target: 60 or less)")


if __name__ == "__main__":
    main()
