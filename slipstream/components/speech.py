"""Speech from text: the voice "heart" of the package hibari-tts (Apache-2.0), an ONNX network and a pronunciation lexicon.

Only the voice inside the package is offered, since others would be downloaded. One sentence a call, on one thread.
"""

from collections.abc import Sequence

import numpy as np

from slipstream.errors import ModelError
from slipstream.graph.rows import Result, Row

RATE = 24_000
VOICES = ("heart",)
MIN_SPEED, MAX_SPEED = 0.5, 2.0


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
        self.voice("Ready.")  # loads the lexicon, so that no request waits for it

    def __call__(self, rows: Sequence[Row]) -> list[Result]:
        return [Result({"audio": self.speak(row.inputs["text"].data, row.params)}) for row in rows]

    def speak(self, text: str, params: dict) -> np.ndarray | None:
        """int16 samples; None for a text without anything to say. Its noise is seeded: a text always sounds the same."""
        audio = self.voice(text, speed=float(params.get("speed") or 1.0), seed=0)
        if not len(audio):
            return None
        return (np.clip(audio, -1, 1) * 32767).round().astype(np.int16)
