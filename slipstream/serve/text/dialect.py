"""How a model writes reasoning and tool calls: told by flags, or seen in its chat template."""

from dataclasses import dataclass
from typing import Any

from slipstream.config import ServerConfig
from slipstream.errors import BadRequest
from slipstream.serve.text.calls import FORMS
from slipstream.serve.text.thinking import END, START
from slipstream.tokenize.tokenizer import Tokenizer

_MARKERS = frozenset({START, END, *(m for f in FORMS.values() for m in (f.start, f.end) if m)})
_TAIL = 32  # tokens at a prompt's end that are looked at


@dataclass(frozen=True)
class Dialect:
    """One model's habits."""

    calls: str = "none"  # a form of `calls.FORMS`, "none" where it is switched off, "unknown" where the template has another
    thinking: str = "none"  # as `Reading.thinking`
    template_tools: bool = False  # whether the template itself shows tools and calls to the model
    keep: frozenset[int] = frozenset()  # special tokens that are markers
    marks: frozenset[str] = frozenset()  # their texts
    template: str = ""

    @property
    def grades_effort(self) -> bool:
        """Whether the template can be told how hard to think, rather than only whether to."""
        return "reasoning_effort" in self.template

    def effort(self, effort: str | None, param: str) -> dict[str, Any]:
        """Variables that tell the template how hard to think. Raises BadRequest naming `param` where it has none."""
        if effort is None:
            return {}
        if self.grades_effort:
            return {"reasoning_effort": effort}
        if "enable_thinking" in self.template:
            return {"enable_thinking": effort != "none"}
        if effort == "none" and self.thinking == "none":
            return {}
        raise BadRequest(f"{param}: this model's chat template has no setting for it", param)


PLAIN = Dialect()


def detect(tokenizer: Tokenizer, config: ServerConfig) -> Dialect:
    """The dialect of a model's template. A template without tools is given them in the Hermes form (`tool_prompt`)."""
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

    begun: the part of the answer that the prompt already holds. It counts besides what the template wrote before it.
    """
    begun = begun.strip()
    tail = tokenizer.decode(list(ids[-_TAIL - len(begun.encode()) :]), skip_special_tokens=False)
    before = tail[: tail.rfind(begun)].rstrip() if begun and begun in tail else tail.rstrip()
    if END in begun or (not begun and before.endswith(END)):
        return "closed"
    if before.endswith(START) or begun.startswith(START):
        return "open"
    return "closed" if begun else ""
