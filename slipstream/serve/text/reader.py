"""Splits an answer's text into reasoning, content and tool calls. Pure; a Reader serves one answer."""

from dataclasses import dataclass

from slipstream.serve.text.calls import FORMS, BoundCalls, Calls, Part
from slipstream.serve.text.custom_calls import CustomCalls, InputOnly
from slipstream.serve.text.thinking import Thinking


@dataclass(frozen=True)
class Reading:
    """The notations to look for in the answers of one HTTP request."""

    thinking: str = "none"  # "none", "qwen3" (where the model opens it), "deepseek_r1" (from the beginning)
    calls: str = "none"  # "none", a form of `calls.FORMS`; where a grammar binds the answer "bound" (calls only) or "input"
    functions: frozenset[str] = frozenset()
    parallel: bool = True  # whether more than one call may be made
    keep: frozenset[int] = frozenset()  # special tokens that are markers, so their text is needed
    custom: frozenset[str] = frozenset()  # those of the functions that are custom tools


class Reader:
    """`push` pieces of text, then `finish`; the parts come in order."""

    def __init__(self, reading: Reading, prompt: str = ""):
        """prompt: "open" or "closed" if the prompt's end has opened or ended the reasoning, else ""."""
        state = {"open": "inside", "closed": "after"}.get(prompt) or (
            "inside" if reading.thinking == "deepseek_r1" else "before"
        )
        self._thinking = Thinking(state) if reading.thinking != "none" else None
        self._parallel = reading.parallel
        self._calls: Calls | BoundCalls | CustomCalls | InputOnly | None = None
        self._ends = reading.calls in FORMS  # whether text may follow a call
        if reading.calls == "input":
            (name,) = reading.functions
            self._calls = InputOnly(name)
        elif reading.calls != "none":
            functions, bound = reading.functions, reading.calls == "bound"
            found = BoundCalls(functions) if bound else Calls(FORMS[reading.calls], functions)
            self._calls = CustomCalls(found, reading.custom) if reading.custom else found
        self.called = 0  # calls reported
        self.done = False  # the only call that is allowed is complete

    @property
    def thinks(self) -> bool:
        """Whether the text that comes now is reasoning."""
        return self._thinking is not None and self._thinking.inside

    def push(self, text: str) -> list[Part]:
        return self._read(text, False, False)

    def finish(self, cut: bool = False) -> list[Part]:
        """cut: the answer ends because of max_tokens."""
        return self._read("", True, cut)

    def _read(self, text: str, last: bool, cut: bool) -> list[Part]:
        pieces = self._thinking.push(text, last) if self._thinking else [(False, text)]
        out: list[Part] = []
        for reasoning, piece in pieces:
            out += [Part("reasoning", piece)] if reasoning else self._content(piece)
        if last:
            out += self._content("", True, cut)
        return [part for part in out if self._allowed(part)]

    def _content(self, text: str, last: bool = False, cut: bool = False) -> list[Part]:
        if self._calls is None:
            return [Part("content", text)] if text else []
        return self._calls.push(text, last, cut)

    def _allowed(self, part: Part) -> bool:
        """Counts calls; without parallel calls, nothing follows the first."""
        if part.kind in ("call", "custom") and (self._parallel or not self.called):
            self.called += 1
            return True
        if self._parallel or not self.called:
            return True
        if part.kind in ("arguments", "input") and part.call == 0:
            self.done = self.done or self._ends
            return True
        return False
