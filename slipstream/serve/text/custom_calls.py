"""Calls of custom tools, whose input is one text. Pure.

The model sees a custom tool as a function with the argument `input`. A call is reported once its input is whole.
"""

import json
from typing import Protocol

from slipstream.serve.text.calls import Part, new_id


class Finder(Protocol):
    """`Calls` or `BoundCalls`."""

    def push(self, text: str, last: bool = False, cut: bool = False) -> list[Part]: ...


class CustomCalls:
    """Turns a finder's calls of custom tools into "custom" and "input" parts. All other parts pass through."""

    def __init__(self, finder: Finder, names: frozenset[str]):
        self._finder = finder
        self._names = names
        self._call: Part | None = None  # a call whose arguments are coming
        self._arguments: list[str] = []

    def push(self, text: str, last: bool = False, cut: bool = False) -> list[Part]:
        out: list[Part] = []
        for part in self._finder.push(text, last, cut):
            if part.kind == "call" and part.text in self._names:
                self._call, self._arguments = part, []
            elif self._call is not None and part.kind == "arguments" and part.call == self._call.call:
                self._arguments.append(part.text)
                if part.text.rstrip().endswith("}"):
                    out += self._whole(self._call)
            else:
                out.append(part)
        return out

    def _whole(self, call: Part) -> list[Part]:
        """The call, if its arguments are whole: a brace may be a character of the input."""
        text = "".join(self._arguments)
        try:
            arguments = json.loads(text)
        except ValueError:
            return []
        self._call = None
        given = arguments.get("input")
        return [call._replace(kind="custom"), Part("input", given if isinstance(given, str) else text, call.call)]


class InputOnly:
    """An answer that is nothing but the input of a call of one tool: a grammar binds it."""

    def __init__(self, name: str):
        self._name = name
        self._texts: list[str] = []

    def push(self, text: str, last: bool = False, cut: bool = False) -> list[Part]:
        self._texts.append(text)
        if not last or cut:
            return []
        return [Part("custom", self._name, 0, new_id()), Part("input", "".join(self._texts), 0)]
