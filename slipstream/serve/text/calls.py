"""Finds tool calls in an answer's text, piece by piece. Pure.

A call is reported once it is whole and its arguments are a JSON object, so a client always gets valid JSON. Text that only
looks like a call stays text. A call that `max_tokens` cut is neither a call nor text. Where a grammar binds the answer
(`BoundCalls`), arguments go out as they come.
"""

import json
import re
import secrets
from typing import Any, NamedTuple

from slipstream.serve.text.thinking import could_become

_PLAIN = frozenset("{}[],:+-. \t\r\n")  # outside JSON's strings, besides letters and digits


class Part(NamedTuple):
    """A piece of an answer.

    `kind` is "content", "reasoning", "call" (a call begins), "arguments" (more of its arguments), "custom" (a call of a custom
    tool) or "input" (its whole input).
    """

    kind: str
    text: str = ""  # the tool's name, for a call
    call: int = -1  # the call's place in the answer
    id: str = ""  # of a call


class ToolCallFormat(NamedTuple):
    """How a family of models writes calls: JSON after `start`, up to `end`; with `bare`, also JSON that begins the answer."""

    start: str
    end: str
    key: str  # the key under which the prompt asks for the arguments; either key is read
    bare: bool
    between: str  # separates two calls


HERMES = ToolCallFormat("<tool_call>", "</tool_call>", "arguments", False, "\n")
LLAMA3 = ToolCallFormat("<|python_tag|>", "", "parameters", True, "; ")
FORMS = {"hermes": HERMES, "llama3": LLAMA3}


class Scan:
    """Finds where a JSON object or list ends while its text grows."""

    def __init__(self) -> None:
        self._at = self._depth = 0
        self._text = self._escaped = False

    def feed(self, held: str) -> int:
        """The end's index in `held` (which only grows); 0 if more text is needed, -1 if it cannot be JSON."""
        for i in range(self._at, len(held)):
            c = held[i]
            if self._text:
                if self._escaped:
                    self._escaped = False
                elif c == "\\":
                    self._escaped = True
                elif c == '"':
                    self._text = False
            elif c == '"':
                self._text = True
            elif c in "{[":
                self._depth += 1
            elif c in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return i + 1
            elif c not in _PLAIN and not c.isalnum():
                return -1
            if not self._depth and not c.isspace():
                return -1
        self._at = len(held)
        return 0


def _refuse(constant: str) -> Any:
    raise ValueError(constant)


def read_calls(text: str, functions: frozenset[str]) -> list[tuple[str, str]] | None:
    """(function, arguments as JSON) of each call in a JSON object or list; None unless all are calls of these functions."""
    try:
        value = json.loads(text, strict=False, parse_constant=_refuse)
        out = [_read_call(item, functions) for item in (value if isinstance(value, list) else [value])]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return out or None


def _read_call(item: Any, functions: frozenset[str]) -> tuple[str, str]:
    item = item["function"] if isinstance(item.get("function"), dict) else item
    name, arguments = item["name"], next((item[k] for k in ("arguments", "parameters") if k in item), {})
    if isinstance(arguments, str):
        arguments = json.loads(arguments, parse_constant=_refuse)
    if name not in functions or not isinstance(arguments, dict):
        raise ValueError(name)
    return name, dump(arguments)


def dump(value: Any) -> str:
    """JSON that people can read. Lone surrogates are escaped. Raises ValueError for values that JSON does not have."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if text.isascii() or _is_text(text) else json.dumps(value, allow_nan=False)


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Calls:
    """Finds calls in free text, in the form of a model's family."""

    def __init__(self, form: ToolCallFormat, functions: frozenset[str]):
        self.count = 0
        self._form, self._functions = form, functions
        self._held = ""
        self._step = self._text
        self._scan = Scan()
        self._gap = ""  # text before a possible call; it is reported if that is not a call
        self._fresh = True  # only white space since the beginning, or since a call
        self._cut = False
        self._named = re.compile(rf'"name"\s*:\s*"({"|".join(map(re.escape, functions))})"')

    def push(self, text: str, last: bool = False, cut: bool = False) -> list[Part]:
        """cut: the answer ends because of max_tokens, so an unfinished call is neither a call nor content."""
        self._held += text
        self._cut = cut
        out: list[Part] = []
        while self._step(out, last):
            pass
        return out

    def _say(self, out: list[Part], text: str) -> None:
        if text:
            out.append(Part("content", text))
            self._fresh = False

    def _text(self, out: list[Part], last: bool) -> bool:
        """Text, up to where a call may begin."""
        held, form = self._held, self._form
        bare = held.lstrip(" \t\r\n;,") if self.count and form.bare else held.lstrip()
        if self._fresh and not bare:
            if last and not self.count:
                self._say(out, held)
            return False
        if self._fresh and form.bare and bare[0] in "{[":
            return self._begin(held[: len(held) - len(bare)], bare)
        held = bare if self._fresh and self.count else held
        at = held.find(form.start)
        if at >= 0:
            text = held[:at].rstrip()
            if text:
                self._say(out, text)
            return self._begin(held[len(text) : at + len(form.start)], held[at + len(form.start) :])
        kept = could_become(held, form.start)
        kept = 0 if last else len(held) - len(held[: len(held) - kept].rstrip())
        self._say(out, held[: len(held) - kept])
        self._held = held[len(held) - kept :] if kept else ""
        return False

    def _begin(self, gap: str, held: str) -> bool:
        self._gap, self._held, self._scan, self._step = gap, held, Scan(), self._json
        return True

    def _json(self, out: list[Part], last: bool) -> bool:
        """Reads on after a start: a call, or text after all."""
        end = self._scan.feed(self._held)
        if not end and not last:
            return False
        if not end and self._cut and (self._form.start in self._gap or self._named.search(self._held)):
            self._held, self._step = "", self._text
            return False
        calls = read_calls(self._held[:end], self._functions) if end > 0 else None
        if calls is None:
            self._say(out, self._gap if not last or end else self._gap + self._held)
            self._held = self._held if not last or end else ""
            self._fresh, self._step = False, self._text
            return True
        for name, arguments in calls:
            out += call_parts(self.count, name, arguments)
            self.count += 1
        self._held, self._step, self._fresh = self._held[end:], self._close, True
        return True

    def _close(self, out: list[Part], last: bool) -> bool:
        """After a call: its end marker, which some models forget."""
        bare, end = self._held.lstrip(), self._form.end
        if end and not last and end.startswith(bare) and bare != end:
            return False
        self._held = bare.removeprefix(end) if end else self._held
        self._step = self._text
        return True


def call_parts(index: int, name: str, arguments: str) -> list[Part]:
    return [Part("call", name, index, new_id()), Part("arguments", arguments, index)]


def new_id() -> str:
    return "call_" + secrets.token_hex(12)


_HEAD = re.compile(r'[\s,\[}]*\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


class BoundCalls:
    """Finds calls that a grammar has bound: {"name", "arguments"}, or a list of such objects. Arguments go out as they come."""

    def __init__(self, functions: frozenset[str]):
        self.count = 0
        self._functions = functions
        self._held = ""
        self._scan: Scan | None = None  # of the call whose arguments are coming
        self._told = 0  # characters of them that went out
        self._lost = False  # it is not a call

    def push(self, text: str, last: bool = False, cut: bool = False) -> list[Part]:
        """cut: the answer ends because of max_tokens; the text of an unfinished call is not content."""
        self._held += text
        out: list[Part] = []
        while self._scan is not None or self._head(out):
            if not self._more(out):
                return out
        if last or self._lost:
            rest = self._held
            self._held = ""
            if rest and not self.count and not cut:
                out.append(Part("content", rest))
        return out

    def _head(self, out: list[Part]) -> bool:
        found = _HEAD.match(self._held)
        if not found:
            return False
        try:
            name = json.loads(f'"{found[1]}"')
        except ValueError:
            name = ""
        if name not in self._functions:
            self._lost = True
            return False
        out.append(Part("call", name, self.count, new_id()))
        self.count += 1
        self._held, self._scan, self._told = self._held[found.end() :], Scan(), 0
        return True

    def _more(self, out: list[Part]) -> bool:
        """Reports more of the arguments; returns whether they are complete."""
        assert self._scan is not None
        end = self._scan.feed(self._held)
        upto = end if end > 0 else len(self._held)
        if upto > self._told:
            out.append(Part("arguments", self._held[self._told : upto], self.count - 1))
            self._told = upto
        if end <= 0:
            return False
        self._held, self._scan = self._held[end:], None
        return True
