"""Stop strings over a growing text. Pure.

Each string is followed by its Knuth-Morris-Pratt automaton, character by character: the result does not depend on how the text
was cut into tokens, and what is held back is exactly the longest end of the text that could still become a stop string.
"""

import functools


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
        """Takes one character; whether the text now ends with the whole word."""
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
    """Lets text through except what is, or could become, a stop string.

    The stop that ends first wins; of those that end at the same character, the longest. With `include` the stop string goes
    out too, and nothing after it.
    """

    def __init__(self, stops: tuple[str, ...], include: bool = False):
        self._automata = [_Automaton(s) for s in stops]
        self._include = include
        self._held = ""

    def push(self, delta: str, armed: bool = True) -> tuple[str, str | None]:
        """(text that may go out, the stop string found or None). Unarmed, complete stop strings are ordinary text."""
        for i, char in enumerate(delta):
            found = ""
            for a in self._automata:
                if a.step(char) and armed and len(a.word) > len(found):
                    found = a.word
            if found:
                text = self._held + delta[: i + 1]
                self._held = ""
                return (text if self._include else text[: len(text) - len(found)]), found
        text = self._held + delta
        keep = max(a.pending for a in self._automata)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def flush(self) -> str:
        """What was held back, once no more text can come."""
        text, self._held = self._held, ""
        return text
