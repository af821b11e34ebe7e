"""Cuts a stream of text into sentences that can be spoken, each as soon as it is complete. Pure; standard library only."""

import re
from collections.abc import Sequence

from slipstream.graph.rows import Result, Row

MAX_SENTENCE = 240  # characters; longer ones are cut at a clause, else at a space, else hard
MIN_CLAUSE_CHARS = 30  # characters of a first sentence's first clause, for it to be spoken by itself
_END = re.compile(r"""[.!?…]+["'”’)\]]*(?=\s)|[。！？]+["'”’」』)\]]*|\n+""")
_CLAUSE = re.compile(r"[,;:—–]\s")
_ABBREVIATIONS = frozenset(
    re.split(
        " ",
        "mr mrs ms dr prof sr jr st vs etc e.g i.e cf al fig no vol pp inc ltd co corp dept approx est gen col sgt capt rev "
        "hon gov sen rep jan feb mar apr jun jul aug sep sept oct nov dec mon tue wed thu fri sat sun u.s u.k a.m p.m ph.d",
    )
)
_MARKS = re.compile(r"[*`#]+")
_BARS = re.compile(r"[_>|~]+")


def _ends(text: str, start: int, match: re.Match) -> bool:
    """Whether a mark ends the sentence from `start` on, given the text before and after it."""
    mark = match.group()
    if "\n" in mark or not mark.startswith(".") or mark.startswith(".."):
        return True
    word = re.split(r"[\s(\"“‘\[]", text[start : match.start()])[-1].lower()
    if word in _ABBREVIATIONS or re.fullmatch(r"([a-z]\.)*[a-z]", word):
        return False
    if word.isdigit() and not text[start : match.start() - len(word)].strip():
        return False  # "1." at the start is the number of a list item
    follows = text[match.end() :].lstrip()
    return not (follows and follows[0].islower())


def _bound(sentence: str) -> tuple[str, str]:
    """The part of a long text to speak now, and the rest."""
    head = sentence[:MAX_SENTENCE]
    clauses = [m.end() for m in _CLAUSE.finditer(head)]
    cut = clauses[-1] if clauses and clauses[-1] > MAX_SENTENCE // 4 else head.rfind(" ") + 1
    cut = cut or MAX_SENTENCE
    return sentence[:cut], sentence[cut:]


def split(text: str, final: bool) -> tuple[list[str], str]:
    """The complete sentences of `text`, and the rest. `final`: no text follows, so the rest is a sentence too.

    A mark at the very end may still turn out to be part of a number or an abbreviation, so it ends a sentence only when white
    space has followed, or at the end. Joined, sentences and rest are the text.
    """
    out, start = [], 0
    for match in _END.finditer(text):
        if _ends(text, start, match):
            out.append(text[start : match.end()])
            start = match.end()
    rest = text[start:]
    if final and rest:
        out, rest = [*out, rest], ""
    bounded = []
    for sentence in out:
        while len(sentence) > MAX_SENTENCE:
            head, sentence = _bound(sentence)
            bounded.append(head)
        bounded.append(sentence)
    while len(rest) > MAX_SENTENCE:
        head, rest = _bound(rest)
        bounded.append(head)
    return bounded, rest


def speakable(sentence: str) -> str:
    """The sentence without formatting marks; "" if nothing in it can be spoken."""
    text = " ".join(_BARS.sub(" ", _MARKS.sub("", sentence)).split())
    return text if any(c.isalnum() for c in text) else ""


def first_clause(text: str) -> tuple[str | None, str]:
    """A clause to begin speaking with, while the first sentence is still being written, and the rest."""
    ends = [m.end() for m in _CLAUSE.finditer(text) if m.end() >= MIN_CLAUSE_CHARS]
    return (text[: ends[0]], text[ends[0] :]) if ends else (None, text)


class SentenceStep:
    """Takes text in pieces, returns one sentence a step. A long first sentence is split after a clause, to speak soon."""

    def __call__(self, rows: Sequence[Row]) -> list[Result]:
        return [self._row(row) for row in rows]

    def _row(self, row: Row) -> Result:
        waiting, rest, begun = row.branches[0] or ([], "", False)
        if "text" in row.inputs:
            rest += row.inputs["text"].data
        if not waiting:
            found, rest = split(rest, row.last)
            waiting = [s for s in map(speakable, found) if s]
            if not waiting and not begun:
                clause, rest = first_clause(rest)
                waiting = [speakable(clause)] if clause else []
        sentence, waiting = (waiting[0], waiting[1:]) if waiting else (None, [])
        more = bool(waiting) or (row.last and bool(rest))
        return Result({"sentence": sentence}, state=(waiting, rest, begun or sentence is not None), again=more)
