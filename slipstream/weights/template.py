"""Chat templates: messages in, the prompt's text out. A template runs in a limited process of its own (`template_worker.py`).

Why a process: a template can stay inside one call of C code for ever ('a' * 10**12, say), where no check of ours would run;
a kernel's limit ends it wherever it is. It costs about 0.1 ms a rendering. Imports neither torch nor jinja2.
"""

import json
import os
import pathlib
import select
import subprocess
import sys
import threading
import time

from slipstream.errors import BadRequest, ModelError

SECONDS = 2.0  # CPU time of one rendering
MEMORY = 1 << 30  # bytes of address space
MAX_CHARS = 1 << 26  # of one rendering
_PATIENCE = 30.0  # seconds of wall time that a loaded machine may need for SECONDS of CPU time

# What Python needs to start, and what a date is written by; nothing secret.
_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_TIME", "TZ")
_WORKER = pathlib.Path(__file__).with_name("template_worker.py")


class ChatTemplate:
    """A compiled chat template. Thread-safe; renderings take turns in one worker, which starts with the first of them.

    `variables` are always given to the template (bos_token and the like). Raises BadRequest(param="messages") for what the
    template refuses, cannot do, or takes too long for, and when it does not compile (`start` raises ModelError for that).
    """

    def __init__(self, source: str, variables: dict[str, str] | None = None):
        self.source = source
        self.variables = dict(variables or {})
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the worker and compiles the template, which the first rendering would do otherwise. Raises ModelError."""
        with self._lock:
            self._ready()

    def render(
        self,
        messages: list[dict],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict] | None = None,
        **kwargs,
    ) -> str:
        """The prompt's text. With `continue_final_message` it ends where the last message's text ends."""
        if continue_final_message and add_generation_prompt:
            raise BadRequest("it excludes add_generation_prompt", param="continue_final_message")
        marker = None
        if continue_final_message:
            messages, marker = _mark_end(messages)
        variables = {**self.variables, **kwargs, "messages": messages, "tools": tools or None}
        text = self._answer({"documents": None, **variables, "add_generation_prompt": add_generation_prompt})
        return text if marker is None else _cut_at(text, marker)

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _answer(self, variables: dict) -> str:
        request = json.dumps(variables).encode()
        with self._lock:
            try:
                worker = self._ready()
                answer = self._exchange(worker, request)
            except ModelError as e:
                raise BadRequest(str(e), param="messages") from None
            except BaseException:
                self._stop()
                raise
            if answer is None:
                self._stop()
        if answer is None:
            raise BadRequest(f"the chat template did not end within {SECONDS:g} s of computing", param="messages")
        if "text" in answer:
            return answer["text"]
        if answer["kind"] == "raised":
            raise BadRequest(answer["error"], param="messages")
        raise BadRequest(f"the chat template failed: {answer['error']}", param="messages")

    def _ready(self) -> "subprocess.Popen[bytes]":
        """A worker that has compiled the template. The caller holds the lock."""
        if self._worker is not None and self._worker.poll() is None:
            return self._worker
        self._stop()
        environment = {k: os.environ[k] for k in _ENVIRONMENT if k in os.environ}
        # -P: the script's own folder is not a place to import from; it has files named like the standard library's.
        command = [sys.executable, "-P", str(_WORKER)]
        self._worker = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
        )
        setup = {"source": self.source, "seconds": SECONDS, "memory": MEMORY, "chars": MAX_CHARS}
        answer = self._exchange(self._worker, json.dumps(setup).encode())
        if answer is None or "error" in answer:
            self._stop()
            raise ModelError(f"the chat template cannot be used: {(answer or {}).get('error', 'compiling it did not end')}")
        return self._worker

    def _exchange(self, worker: "subprocess.Popen[bytes]", request: bytes) -> dict | None:
        """One message each way, or None where the worker ended or did not answer in time."""
        assert worker.stdin is not None and worker.stdout is not None
        deadline = time.monotonic() + _PATIENCE
        try:
            worker.stdin.write(len(request).to_bytes(8, "little") + request)
            worker.stdin.flush()
        except BrokenPipeError:
            return None
        head = _read(worker.stdout.fileno(), 8, deadline)
        body = _read(worker.stdout.fileno(), int.from_bytes(head, "little"), deadline) if head else None
        return json.loads(body) if body else None

    def _stop(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker.communicate()
            self._worker = None


def _read(fd: int, size: int, deadline: float) -> bytes | None:
    """Exactly `size` bytes, or None at the end of the pipe or the deadline."""
    data = bytearray()
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0 or not poller.poll(left * 1000):
            return None
        piece = os.read(fd, min(size - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return bytes(data)


def _mark_end(messages: list[dict]) -> tuple[list[dict], str]:
    """The messages with a marker behind the last one's text. Its final space shows whether ends are trimmed."""
    marker = "\ue000continues here\ue001 "
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        content = content + marker
    elif isinstance(content, list) and content and isinstance(content[-1], dict) and isinstance(content[-1].get("text"), str):
        content = [*content[:-1], {**content[-1], "text": content[-1]["text"] + marker}]
    else:
        raise BadRequest("the last message has no text that could be continued", param="continue_final_message")
    return [*messages[:-1], {**messages[-1], "content": content}], marker


def _cut_at(text: str, marker: str) -> str:
    at = text.rfind(marker[:-1])
    if at < 0:
        raise BadRequest("the chat template does not show the last message's text", param="continue_final_message")
    kept = text[:at]
    return kept if text.startswith(marker, at) else kept.rstrip()
