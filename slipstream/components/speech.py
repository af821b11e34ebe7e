"""Speech from text: the voice "heart" of the package hibari-tts (Apache-2.0), an ONNX network and a pronunciation lexicon.

Only the voice inside the package is offered; others would be downloaded. One sentence a call, on one thread.
"""

import re
import unicodedata
from collections.abc import Sequence

import numpy as np

from slipstream.errors import BadRequest, ModelError
from slipstream.graph.rows import Result, Row

RATE = 24_000
VOICES = ("heart",)
# OpenAI's names of voices, which clients send by default. Each stands for the one voice here.
ALIASES = ("alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx", "sage", "shimmer", "verse")
MIN_SPEED, MAX_SPEED = 0.5, 2.0
_LONG_NUMBER = re.compile(
    r"\d[\d,]{15,}"
)  # the lexicon has words for numbers of up to 36 digits; longer ones than this are hard to follow


def check_sayable(text: str, param: str) -> None:
    """Raises BadRequest naming the first word that an English voice cannot pronounce, or if no word can be pronounced."""
    for word in text.split():
        if not all(map(_has_sound, unicodedata.normalize("NFKC", word))):
            raise BadRequest(f"{param}: this voice speaks English and cannot say {word[:50]!r}", param)
    if not any(c.isalnum() for c in text):
        raise BadRequest(f"{param}: must hold a word that this voice can say", param)


def _has_sound(c: str) -> bool:
    """Letters must be Latin, or Greek as in formulas. Other characters are read or skipped, as people do."""
    return not c.isalpha() or unicodedata.name(c, "").startswith(("LATIN", "GREEK", "MODIFIER"))


def spell_long_numbers(text: str) -> str:
    """Numbers of more than 15 digits become single digits, in groups of ten."""
    return _LONG_NUMBER.sub(lambda m: _spelled(m.group().replace(",", "")), text)


def _spelled(digits: str) -> str:
    return ", ".join(" ".join(digits[i : i + 10]) for i in range(0, len(digits), 10))


class SpeechStep:
    """text, one sentence a chunk -> audio int16 [n] at 24 kHz. Parameters of a request: `speed`."""

    def __init__(self, voice: str = VOICES[0]):
        try:
            from hibari import Hibari
        except ImportError:
            raise ModelError("speech needs the package hibari-tts: pip install 'slipstream[voice]'") from None
        if voice not in VOICES:
            raise ModelError(f"voice {voice!r} is not one of {', '.join(VOICES)}")
        self.voice = Hibari(voice=voice, threads=1)
        self.voice("Ready.")  # loads the lexicon, so that the first request does not wait for it

    def __call__(self, rows: Sequence[Row]) -> list[Result]:
        return [self._row(row.inputs["text"].data, row.params) for row in rows]

    def _row(self, text: str, params: dict) -> Result:
        try:
            return Result({"audio": self.speak(text, params)})
        except BadRequest as e:
            return Result(error=str(e), refused=True)

    def speak(self, text: str, params: dict) -> np.ndarray | None:
        """int16 samples; None for a text without words. The noise is seeded, so a text always sounds the same.

        Raises BadRequest for a text on which the package's pronunciation rules fail, so only this request ends.
        """
        try:
            phonemes = self.voice.phonemize(spell_long_numbers(text))
        except Exception as e:
            raise BadRequest(f"this voice cannot read {text[:50]!r} aloud ({type(e).__name__})") from e
        rng, speed = np.random.default_rng(0), float(params.get("speed") or 1.0)
        parts = [self.voice.from_ids(self.voice.ids(p), speed, rng) for p in phonemes]
        audio = np.concatenate([np.zeros(0, np.float32), *parts])
        return (np.clip(audio, -1, 1) * 32767).round().astype(np.int16) if len(audio) else None
