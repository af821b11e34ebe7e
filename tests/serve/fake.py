"""A small tokenizer and a scripted leader, so that the front end is tested without a model."""

import codecs
import select
import socket
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from slipstream.errors import BadRequest
from slipstream.log.request import Request, TokenLogprobs
from slipstream.process.protocol import Abort, Finished, Load, PromptLogprobs, Refused, Started, Submit, Tokens, ToLeader
from slipstream.system.framing import Frames, frame

EOS, START = 256, 257
WORDS = [" hello", " world", "ab", "abc", "\n\n", "é", " 7", " 8,", "STOP", "ST", "OP"]


class FakeTokenizer:
    """Ids 0 to 255 are bytes, then two special tokens, then a few words that `encode` never makes."""

    def __init__(self):
        self.special = {EOS: "<|end|>", START: "<|start|>"}
        self.words = {258 + i: w for i, w in enumerate(WORDS)}
        self.ids = {w: i for i, w in self.words.items()}
        self.vocab_size = 258 + len(WORDS)
        self.eos_ids, self.bos_id, self.template = (EOS,), START, None
        self.special_ids = frozenset(self.special)
        self.spells = True
        self.streams = 0

    def encode(self, text: str, add_special_tokens: bool = True, *, param: str = "prompt") -> list[int]:
        return list(text.encode())

    def token_bytes(self, id: int) -> bytes:
        return bytes([id]) if id < 256 else (self.special.get(id) or self.words[id]).encode()

    def token_text(self, id: int) -> str:
        return self.token_bytes(id).decode(errors="replace")

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        raw = b"".join(self.token_bytes(i) for i in ids if not (skip_special_tokens and i in self.special))
        return raw.decode(errors="replace")

    def stream(self, skip_special_tokens: bool = True, *, continues: bool = False, keep: frozenset[int] = frozenset()):
        return FakeStream(self, skip_special_tokens)

    def apply_chat(self, messages, add_generation_prompt=True, continue_final_message=False, tools=None, **kwargs):
        if kwargs.get("explode"):
            raise BadRequest("the template refuses this", "messages")
        out = []
        for m in messages:
            out += [START, *f"{m['role']}\n{m['content']}".encode(), EOS]
        if continue_final_message:
            return out[:-1]
        return out + ([START, *b"assistant\n"] if add_generation_prompt else [])


class FakeStream:
    def __init__(self, tokenizer: FakeTokenizer, skip: bool):
        self._tokenizer, self._skip = tokenizer, skip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, id: int) -> str:
        if self._skip and id in self._tokenizer.special:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(id))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)


@dataclass
class Script:
    """What the leader answers to one request."""

    tokens: list[int]
    reason: str = "auto"  # of Finished; auto: stop at a stop id, else length at max_tokens, else hold on
    error: str = ""
    refuse: Refused | None = None
    cached: int = 0
    start: bool = True
    per_step: int = 1
    late_tokens: int = 0  # tokens still sent after an abort


@dataclass
class _Run:
    request: Request
    script: Script
    sent: int = 0
    aborted: bool = False
    late: int = 0


@dataclass
class FakeLeader:
    """Answers over its end of a socket pair, on a thread of its own. `answer` makes the script of each request."""

    answer: Callable[[Request], Script]
    step: float = 0.0005  # seconds
    settle: Callable[[], None] = lambda: None  # returns when the front end has written what it was sent
    requests: list[Request] = field(default_factory=list)
    aborts: list[Abort] = field(default_factory=list)

    def __post_init__(self):
        self.sock, self.front_sock = socket.socketpair()
        self.hold = threading.Event()  # set: no tokens
        self.gone = False
        self._frames = Frames()
        self._runs: dict[int, _Run] = {}
        self._decode = msgspec.msgpack.Decoder(ToLeader).decode
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def send(self, *messages) -> None:
        self.sock.sendall(b"".join(frame(msgspec.msgpack.encode(m)) for m in messages))

    def load(self, **changes) -> None:
        base = dict(running=0, waiting=0, pages_used=0, pages_total=100, steps={}, host_seconds={}, step_tokens=[])
        self.send(
            Load(
                **{
                    **base,
                    "prefix_queries": 0,
                    "prefix_hits": 0,
                    "preemptions": 0,
                    "eager_steps": {},
                    "pages_copied": {},
                    **changes,
                }
            )
        )

    def kill(self) -> None:
        self.gone = True
        self._thread.join(5)
        self.sock.close()

    def _loop(self) -> None:
        while not self.gone:
            busy = self._runs and not self.hold.is_set()
            ready, _, _ = select.select([self.sock], [], [], self.step if busy else 0.02)
            if ready:
                data = self.sock.recv(1 << 20)
                if not data:
                    return
                self._take(data)
            if busy:
                self.settle()  # or a busy machine would make one event of two steps
                try:
                    self._step()
                except OSError:
                    return

    def _take(self, data: bytes) -> None:
        for message in map(self._decode, self._frames.feed(data)):
            if isinstance(message, Submit):
                for request in message.requests():
                    self._admit(request)
            else:
                self.aborts.append(message)
                run = self._runs.get(message.id)
                if run:
                    run.aborted = True

    def _admit(self, request: Request) -> None:
        self.requests.append(request)
        script = self.answer(request)
        if script.refuse:
            self.send(msgspec.structs.replace(script.refuse, id=request.id))
            return
        self._runs[request.id] = _Run(request, script)
        if script.start:
            self.send(Started(request.id, script.cached))
        if request.sampling.prompt_logprobs >= 0:
            ids = array("i", request.prompt)
            for at in range(1, len(ids), 2048):  # a chunk at a time, as a leader does
                rows = [logprobs_of(t, request.sampling.prompt_logprobs) for t in ids[at : at + 2048]]
                self.send(PromptLogprobs(request.id, at, rows))

    def _step(self) -> None:
        ids, tokens, logprobs, ends = array("q"), array("i"), {}, []
        for run in list(self._runs.values()):
            if run.aborted and run.late >= run.script.late_tokens:
                ends.append(Finished(run.request.id, "abort"))
                del self._runs[run.request.id]
                continue
            for _ in range(run.script.per_step):
                end = self._one(run, ids, tokens, logprobs)
                if end:
                    ends.append(end)
                    del self._runs[run.request.id]
                    break
        if ids:
            self.send(Tokens(ids.tobytes(), tokens.tobytes(), logprobs or None), *ends)
        elif ends:
            self.send(*ends)

    def _one(self, run: _Run, ids, tokens, logprobs) -> Finished | None:
        request, script = run.request, run.script
        if run.sent < len(script.tokens) and run.sent < request.max_tokens:
            token = script.tokens[run.sent]
            if request.sampling.logprobs >= 0:
                logprobs[len(ids)] = logprobs_of(token, request.sampling.logprobs)
            ids.append(request.id)
            tokens.append(token)
            run.sent += 1
            run.late += run.aborted
            if token in request.sampling.stop_ids:
                return Finished(request.id, "stop")
            if run.sent == request.max_tokens:
                return Finished(request.id, "length")
            return None
        if script.reason != "auto":
            return Finished(request.id, script.reason, script.error)
        run.late = run.script.late_tokens
        return None


def logprobs_of(token: int, k: int) -> TokenLogprobs:
    """Made so that a test can tell whose they are: -token/1000 for the token itself."""
    top = [token, *(t for t in range(65, 65 + 26) if t != token)][:k]
    return TokenLogprobs(-token / 1000, 1, top, [-t / 1000 for t in top])


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError("the condition did not come true")
        time.sleep(0.005)
