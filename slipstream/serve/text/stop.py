"""Stop strings over a growing text. Pure.

Each string is followed by its Knuth-Morris-Pratt automaton, character by character: the result does not depend on how the text
was cut into tokens, and the text held back is exactly the longest end that could still become a stop string.
"""

import functools
import itertools
from collections.abc import Collection


@functools.lru_cache(1024)
def _failures(word: str) -> tuple[int, ...]:
    """For each length of a prefix of `word`, the longest shorter prefix that it ends with."""
    fail, k = [0] * (len(word) + 1), 0
    for i in range(1, len(word)):
        while k and word[i] != word[k]:
            k = fail[k]
        if word[i] == word[k]:
            k += 1
        fail[i + 1] = k
    return tuple(fail)


class _Automaton:
    def __init__(self, word: str):
        self.word = word
        self.matched = 0  # length of the longest prefix of `word` that the text ends with
        self._fail = _failures(word)

    def step(self, char: str) -> bool:
        """Takes one character; returns whether the text now ends with the whole word."""
        k, word = self.matched, self.word
        if k == len(word):
            k = self._fail[k]
        while k and word[k] != char:
            k = self._fail[k]
        if word[k] == char:
            k += 1
        self.matched = k
        return k == len(word)

    @property
    def pending(self) -> int:
        """Characters at the text's end that could still become the word."""
        return self._fail[self.matched] if self.matched == len(self.word) else self.matched


class StopStrings:
    """Passes text through, except text that is, or could become, a stop string.

    The stop that ends first wins; of those that end at the same character, the longest. With `include` the stop string goes
    out too, and nothing after it.

    Hidden text is the names of special tokens; it never goes out. A stop string that contains such a name is matched against
    the text with the names, every other one against the text that the client sees.
    """

    def __init__(self, stops: tuple[str, ...], include: bool = False, names: Collection[str] = ()):
        """names: texts that may come as hidden text."""
        self._automata = [_Automaton(s) for s in stops]
        self._sighted = [any(name in s for name in names) for s in stops]  # whether it sees hidden text
        self._include = include
        self._held = ""
        self._shown = bytearray()  # for each character of `_held`, whether it may go out

    def push(self, delta: str, armed: bool = True, hidden: bool = False) -> tuple[str, str | None]:
        """(text that may go out, the stop string found or None). If not armed, complete stop strings are ordinary text."""
        for i, char in enumerate(delta):
            found, sighted = "", False
            for a, sees in zip(self._automata, self._sighted, strict=True):
                if (sees or not hidden) and a.step(char) and armed and len(a.word) > len(found):
                    found, sighted = a.word, sees
            if found:
                self._hold(delta[: i + 1], hidden)
                text = self._release(len(self._held) - self._back(len(found), sighted))
                self._held, self._shown = "", bytearray()
                return (text + found if self._include else text), found
        self._hold(delta, hidden)
        pending = zip(self._automata, self._sighted, strict=True)
        return self._release(len(self._held) - max(self._back(a.pending, sees) for a, sees in pending)), None

    def flush(self) -> str:
        """The text held back, for when no more text can come."""
        return self._release(len(self._held))

    def _hold(self, text: str, hidden: bool) -> None:
        self._held += text
        self._shown += (b"\0" if hidden else b"\1") * len(text)

    def _back(self, count: int, sees_hidden: bool) -> int:
        """The distance from the held text's end to the first of the last `count` characters that a stop string sees."""
        if sees_hidden or 0 not in self._shown:
            return count
        at = len(self._shown)
        while count:
            at -= 1
            count -= self._shown[at]
        return len(self._shown) - at

    def _release(self, count: int) -> str:
        """Removes `count` characters from the held text and returns those that may go out."""
        text, shown = self._held[:count], self._shown[:count]
        self._held = self._held[count:]
        del self._shown[:count]
        return text if 0 not in shown else "".join(itertools.compress(text, shown))
