"""Compares spoken with intended text: sentences, text normalization, the word error rate. Standard library."""

import re
from collections.abc import Sequence

SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "It was a sunny day, and the children played in the garden.",
    "The capital of France is Paris.",
    "Water boils at one hundred degrees at sea level.",
    "She walked slowly along the river until it was dark.",
    "Please close the window before you leave the room.",
    "My brother bought a new bicycle last week.",
    "The train to London leaves at seven in the morning.",
    "I would like a cup of tea with milk and sugar.",
    "They have lived in this house for twenty years.",
    "The moon goes around the Earth in about a month.",
    "He forgot his umbrella and came home wet.",
    "There are seven days in a week and twelve months in a year.",
    "A good teacher listens more than she speaks.",
    "The library is open from Monday to Friday.",
    "We found an old map in the drawer of the desk.",
    "Plants need light, water and air to grow.",
    "The doctor told him to rest for a few days.",
    "Can you tell me the way to the station?",
    "The farmer sold his apples at the market.",
    "Rain fell all night, and the streets were full of water.",
    "Her voice was calm, but her hands were shaking.",
    "The ship crossed the ocean in ten days.",
    "Bread, cheese and fruit were on the table.",
    "You should never swim alone in cold water.",
    "The museum shows paintings from many countries.",
    "He reads the newspaper every morning at breakfast.",
    "The mountain is covered with snow in winter.",
    "A small bird was singing in the old tree.",
    "The meeting was moved to Thursday afternoon.",
    "Light travels faster than sound.",
    "She opened the letter and began to smile.",
    "The price of the house was higher than they thought.",
    "Our neighbors have two dogs and a cat.",
    "The engine stopped, and nobody knew why.",
    "Learning a language takes time and patience.",
    "The soup was too hot to eat at once.",
    "He wrote three books about the history of music.",
    "The road to the village is long and narrow.",
    "In spring the days become longer and warmer.",
    "The answer to your question is quite simple.",
    "Some people prefer coffee, others prefer tea.",
    "The baby slept through the whole concert.",
    "A computer can only do what it is told to do.",
    "They built a bridge across the wide river.",
    "The last bus leaves ten minutes before midnight.",
    "Every child in the class received a book.",
    "The wind blew the leaves across the yard.",
    "I have never seen such a beautiful sunset.",
    "Thank you very much for your help.",
)

_ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
    "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_ORDINALS = {
    "one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth", "twelve": "twelfth",
}  # fmt: skip
_NUMBER = re.compile(r"(\d[\d,]*)(\.\d+)?(st|nd|rd|th)?\b")


def in_words(n: int) -> str:
    """A whole number below 10**12 in English words."""
    if n < 20:
        return _ONES[n]
    if n < 100:
        return _TENS[n // 10] + (" " + _ONES[n % 10] if n % 10 else "")
    for size, name in ((10**9, "billion"), (10**6, "million"), (1000, "thousand"), (100, "hundred")):
        if n >= size:
            rest = n % size
            return f"{in_words(n // size)} {name}" + (" " + in_words(rest) if rest else "")
    raise AssertionError


def _spell(match: re.Match) -> str:
    whole, fraction, ordinal = match.groups()
    n = int(whole.replace(",", ""))
    if n >= 10**12:
        return " ".join(_ONES[int(d)] for d in str(n))
    words = in_words(n)
    if fraction:
        words += " point " + " ".join(_ONES[int(d)] for d in fraction[1:])
    if ordinal:
        head, _, last = words.rpartition(" ")
        last = _ORDINALS.get(last) or (last[:-1] + "ieth" if last.endswith("y") else last + "th")
        words = f"{head} {last}".strip()
    return f" {words} "


def words(text: str) -> list[str]:
    """The text in lower case, with numbers written out and marks removed, so that texts that sound the same are equal."""
    text = text.lower().replace("%", " percent ").replace("&", " and ").replace("$", " dollars ")
    text = _NUMBER.sub(_spell, text)
    return re.sub(r"[^a-z ]", "", re.sub(r"[-–—/\n]", " ", text)).split()


def distance(want: Sequence[str], got: Sequence[str]) -> int:
    """The number of words to insert, delete or replace to turn one text into the other."""
    row = list(range(len(got) + 1))
    for i, a in enumerate(want, 1):
        before, row[0] = row[0], i
        for j, b in enumerate(got, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (a != b))
    return row[-1]


def error_rate(pairs: Sequence[tuple[str, str]]) -> float:
    """Word error rate over (meant, heard) pairs together."""
    counted = [(words(meant), words(heard)) for meant, heard in pairs]
    return sum(distance(a, b) for a, b in counted) / max(1, sum(len(a) for a, _ in counted))
