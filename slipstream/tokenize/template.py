"""Chat templates: messages in, the prompt's text out. A template runs in a limited process of its own (`template_worker.py`).

Why a process: a template can stay inside one call of C code for ever ('a' * 10**12, say), where no check of ours would run. A
limit of the kernel ends it there too. It costs about 0.1 ms a rendering. Imports neither torch nor jinja2.
"""

import json
import threading
from collections.abc import Callable

from slipstream.errors import BadRequest, EngineDown, ModelError
from slipstream.system.limited_process import LimitedProcess, Lost, Overrun

SECONDS = 2.0  # CPU time of one rendering
MEMORY_BYTES = 1 << 30  # bytes of address space
MAX_CHARS = 1 << 26  # of one rendering
PATIENCE_SECONDS = 15.0  # seconds of wall time that a loaded machine may need for SECONDS of CPU time
_MARKER = "\ue000continues here\ue001 "  # marks the end of a message's text; its final space shows whether the template trims


class ChatTemplate:
    """A compiled chat template. Thread-safe; renderings take turns in one worker, which starts with the first of them.

    `variables` are always given to the template (bos_token and the like). Raises BadRequest(param="messages") if the template
    refuses the messages, fails, takes too long, or does not compile (`start` raises ModelError for the last). Raises EngineDown
    if the worker was stopped from outside; the next rendering starts another.
    """

    def __init__(self, source: str, variables: dict[str, str] | None = None):
        self.source = source
        self.variables = dict(variables or {})
        self._lock = threading.Lock()
        self._worker: LimitedProcess | None = None

    def start(self) -> None:
        """Starts the worker and compiles the template, before the first rendering. Raises ModelError."""
        with self._lock:
            try:
                self._ready()
            except Lost as e:
                raise ModelError(f"the process that renders the chat template was lost: {e}") from None

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
        """The prompt's text; with `continue_final_message` it ends where the last message's text ends.

        `tools` are JSON schemas of functions, `kwargs` further variables of the template.
        """
        if continue_final_message and add_generation_prompt:
            raise BadRequest("it needs add_generation_prompt=false", param="continue_final_message")
        variables = {**self.variables, **kwargs, "tools": tools or None, "add_generation_prompt": add_generation_prompt}

        def text_of(messages: list[dict]) -> str:
            return self._answer({"documents": None, **variables, "messages": messages})

        return _continued(messages, text_of) if continue_final_message else text_of(messages)

    def close(self) -> None:
        with self._lock:
            self._stop()

    def _answer(self, variables: dict) -> str:
        request = json.dumps(variables).encode()
        with self._lock:
            try:
                found = self._ready().ask(request)
            except ModelError as e:
                raise BadRequest(str(e), param="messages") from None
            except Overrun:
                raise BadRequest(f"the chat template did not end within {SECONDS:g} s of CPU time", param="messages") from None
            except Lost as e:
                raise EngineDown(f"the process that renders the chat template was lost: {e}; try again") from None
            except BaseException:
                self._stop()
                raise
        answer = json.loads(found)
        if "text" in answer:
            return answer["text"]
        if answer["kind"] == "raised":
            raise BadRequest(answer["error"], param="messages")
        raise BadRequest(f"the chat template failed: {answer['error']}", param="messages")

    def _ready(self) -> LimitedProcess:
        """A worker that has compiled the template. The caller holds the lock."""
        if self._worker is not None and self._worker.alive:
            return self._worker
        self._stop()
        self._worker = LimitedProcess("-m", "slipstream.tokenize.template_worker", patience=PATIENCE_SECONDS)
        setup = {"source": self.source, "seconds": SECONDS, "memory": MEMORY_BYTES, "chars": MAX_CHARS}
        try:
            answer = json.loads(self._worker.ask(json.dumps(setup).encode()))
        except Overrun:
            answer = {"error": "compiling it did not end"}
        if "error" in answer:
            self._stop()
            raise ModelError(f"the chat template cannot be used: {answer['error']}")
        return self._worker

    def _stop(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def _continued(messages: list[dict], text_of: Callable[[list[dict]], str]) -> str:
    """The text up to the end of the last message's text, trimmed if the template trims."""
    text = _last_text(messages)
    kept, trims = _cut_at(text_of(_with_last_text(messages, text + _MARKER)))
    if not trims:
        return kept
    if text.strip():
        return kept.rstrip()
    return _cut_at(text_of(_with_last_text(messages, _MARKER)))[
        0
    ]  # nothing is left of it, and the text before it is another message's


def _last_text(messages: list[dict]) -> str:
    content = messages[-1].get("content") if messages else None
    if isinstance(content, list) and content and isinstance(content[-1], dict):
        content = content[-1].get("text")
    if not isinstance(content, str):
        raise BadRequest("the last message has no text to continue", param="continue_final_message")
    return content


def _with_last_text(messages: list[dict], text: str) -> list[dict]:
    content = messages[-1]["content"]
    changed = text if isinstance(content, str) else [*content[:-1], {**content[-1], "text": text}]
    return [*messages[:-1], {**messages[-1], "content": changed}]


def _cut_at(text: str) -> tuple[str, bool]:
    """The text before the marker, and whether the template has trimmed the marker's final space."""
    at = text.rfind(_MARKER[:-1])
    if at < 0:
        raise BadRequest("the chat template does not show the last message's text", param="continue_final_message")
    return text[:at], not text.startswith(_MARKER, at)
