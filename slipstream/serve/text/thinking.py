"""Splits an answer's text into the model's reasoning and the rest, piece by piece. Pure.

Reasoning stands between `<think>` and `</think>` at the answer's beginning; a template may have opened or closed it in the
prompt.
"""

START, END = "<think>", "</think>"


def could_become(text: str, marker: str) -> int:
    """The length of the longest end of `text` that is a beginning of `marker`, but not the whole marker."""
    for n in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:n]):
            return n
    return 0


class Thinking:
    """Call `push` with each piece, finally with `last=True`. No marker goes out, in whole or in part.

    White space around the reasoning is dropped. An end marker in the answer itself is dropped too. A start marker counts only
    at the answer's beginning.
    """

    def __init__(self, state: str):
        """state: "before" if the answer may begin with a marker, "inside" if the prompt has opened it, else "after"."""
        self.state = state
        self._held = ""
        self._fresh = True  # nothing of this part has gone out yet
        self._bare = state != "after"  # whether the white space at this part's beginning is left out

    @property
    def inside(self) -> bool:
        return self.state == "inside"

    def push(self, text: str, last: bool = False) -> list[tuple[bool, str]]:
        """(whether it is reasoning, text), in order; no empty texts."""
        self._held += text
        out: list[tuple[bool, str]] = []
        if self.state == "before":
            self._begin(last)
        if self.state == "inside":
            self._reason(out, last)
        if self.state == "after":
            self._answer(out, last)
        return out

    def _begin(self, last: bool) -> None:
        bare = self._held.lstrip()
        if bare.startswith(START):
            self.state, self._held = "inside", bare[len(START) :]
        elif last or not START.startswith(bare):
            self.state, self._bare = "after", False

    def _reason(self, out: list[tuple[bool, str]], last: bool) -> None:
        if self._fresh:
            self._held = self._held.lstrip()
            if not last and START.startswith(self._held):
                return
            self._held = self._held.removeprefix(START).lstrip()  # some models repeat what their prompt has opened
        at = self._held.find(END)
        if at >= 0:
            text, self._held = self._held[:at].rstrip(), self._held[at + len(END) :]
            self.state = "after"
        else:
            kept = could_become(self._held, END)
            text = self._held[: len(self._held) - kept]
            text = text if last else text.rstrip()
            self._held = "" if last else self._held[len(text) :]
        if text:
            out.append((True, text))
            self._fresh = False
        if self.state == "after":
            self._fresh = self._bare = True

    def _answer(self, out: list[tuple[bool, str]], last: bool) -> None:
        text = self._held.replace(END, "")
        if self._fresh and self._bare:
            text = text.lstrip()
        kept = 0 if last else could_become(text, END)
        self._held = text[len(text) - kept :] if kept else ""
        text = text[: len(text) - kept] if kept else text
        if text:
            out.append((False, text))
            self._fresh = False
