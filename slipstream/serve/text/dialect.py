"""How a model writes reasoning and tool calls: set by flags, or recognized in its chat template."""

from dataclasses import dataclass
from typing import Any

from slipstream.config import ServerConfig
from slipstream.errors import BadRequest
from slipstream.serve.text.calls import FORMS
from slipstream.serve.text.thinking import END, START
from slipstream.tokenize.tokenizer import Tokenizer

_MARKERS = frozenset({START, END, *(m for f in FORMS.values() for m in (f.start, f.end) if m)})
_TAIL = 32  # tokens at a prompt's end that are searched for markers


@dataclass(frozen=True)
class Dialect:
    """One model's notation of reasoning and tool calls."""

    calls: str = "none"  # a form of `calls.FORMS`, "none" if switched off, "unknown" if the template has another
    thinking: str = "none"  # as `Reading.thinking`
    template_tools: bool = False  # whether the template itself shows tools and calls to the model
    keep: frozenset[int] = frozenset()  # special tokens that are markers
    marks: frozenset[str] = frozenset()  # their texts
    template: str = ""

    @property
    def grades_effort(self) -> bool:
        """Whether the template has a setting for how long to think, not only for whether to think."""
        return "reasoning_effort" in self.template

    def effort(self, effort: str | None, param: str) -> dict[str, Any]:
        """Template variables that set how long to think. Raises BadRequest naming `param` if the template has none."""
        if effort is None:
            return {}
        if self.grades_effort:
            return {"reasoning_effort": effort}
        if "enable_thinking" in self.template:
            return {"enable_thinking": effort != "none"}
        if effort == "none" and self.thinking == "none":
            return {}
        raise BadRequest(f"{param}: this model's chat template has no setting for it; leave it out", param)


PLAIN = Dialect()


def detect(tokenizer: Tokenizer, config: ServerConfig) -> Dialect:
    """The dialect of a model's template. A template without tools gets the Hermes form (`tool_prompt`)."""
    template = getattr(tokenizer, "template", None)
    source = template.source if template is not None else ""
    shows_tools = "tools" in source
    calls = config.tool_call_parser
    if calls == "auto":
        if "<tool_call>" in source or not shows_tools:
            calls = "hermes"
        elif "<|python_tag|>" in source or "ipython" in source:
            calls = "llama3"
        else:
            calls = "unknown"
    thinking = config.reasoning_parser
    if thinking == "auto":
        thinking = "qwen3" if END in source else "none"
    keep = frozenset(i for i in tokenizer.special_ids if tokenizer.token_text(i) in _MARKERS)
    marks = frozenset(map(tokenizer.token_text, keep))
    return Dialect(calls, thinking, shows_tools, keep, marks, source)


def left_by_prompt(ids: list[int], tokenizer: Tokenizer, begun: str = "") -> str:
    """Whether the reasoning is "open" or "closed" where a prompt ends; "" where it has not begun.

    begun: the part of the answer that the prompt already holds. It is searched as well as the template's text before it.
    """
    begun = begun.strip()
    tail = tokenizer.decode(list(ids[-_TAIL - len(begun.encode()) :]), skip_special_tokens=False)
    before = tail[: tail.rfind(begun)].rstrip() if begun and begun in tail else tail.rstrip()
    if END in begun or (not begun and before.endswith(END)):
        return "closed"
    if before.endswith(START) or begun.startswith(START):
        return "open"
    return "closed" if begun else ""
