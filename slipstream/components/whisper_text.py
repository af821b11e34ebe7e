"""From Whisper's logits to text: which tokens may come next, and segments with times. numpy only.

The rules are those of Whisper's own decoding: timestamps come in pairs and never decrease, the first is at most one second, and
a timestamp is chosen when all timestamps together are likelier than any text token.
"""

import zlib
from dataclasses import dataclass, field

import numpy as np

from slipstream.components.whisper_words import Word

STEP_SECONDS = 0.02  # seconds of one timestamp
LAST = 1500  # timestamp, so 30 s
MAX_INITIAL = 50  # timestamps, so 1 s
MAX_NEW_TOKENS = 224  # tokens of one window
MAX_NO_SPEECH = 0.6  # the no-speech token's probability above which a window may be silence or noise
MAX_COMPRESSION = 2.4  # of a text; above this ratio it repeats itself


@dataclass(frozen=True)
class Ids:
    """The special tokens of one vocabulary, by name."""

    end: int
    start: int
    previous: int
    no_speech: int
    no_timestamps: int
    transcribe: int
    languages: dict[str, int]  # empty for an English-only model

    @property
    def time(self) -> int:
        """The token of 0.00 s."""
        return self.no_timestamps + 1

    def at(self, seconds: float) -> int:
        """The timestamp token of a time; the last one for times after 30 s."""
        return self.time + min(round(seconds / STEP_SECONDS), LAST)

    @classmethod
    def read(cls, token_to_id, english_only: bool) -> "Ids":
        """From a tokenizer's `token_to_id`."""
        find = lambda *names: next(i for n in names if (i := token_to_id(f"<|{n}|>")) is not None)
        languages = {} if english_only else {n: i for n in LANGUAGES if (i := token_to_id(f"<|{n}|>")) is not None}
        return cls(
            find("endoftext"),
            find("startoftranscript"),
            find("startofprev"),
            find("nocaptions", "nospeech"),
            find("notimestamps"),
            find("transcribe"),
            languages,
        )


LANGUAGES = (
    "en",
    "de",
    "es",
    "fr",
    "it",
    "pt",
    "nl",
    "pl",
    "ru",
    "ja",
    "zh",
    "ko",
    "tr",
    "ar",
    "hi",
    "sv",
    "uk",
    "cs",
    "fi",
    "da",
)


def compression_ratio(text: str) -> float:
    """Bytes of a text over its compressed bytes: high if the text repeats itself."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))


@dataclass(eq=False)
class Window:
    """The decoding of one window: its prompt, the sampled tokens, and their likelihood."""

    ids: Ids
    start: float  # seconds of the audio before this window
    stop: float
    prompt: list[int]
    timestamps: bool
    temperature: float
    suppress: np.ndarray
    suppress_first: np.ndarray
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    tokens: list[int] = field(default_factory=list)
    logprob: float = 0.0
    no_speech: float = 0.0

    def choose(self, logits: np.ndarray) -> int:
        """The next token from float32 [vocab] logits, which are overwritten. Appends it unless it is the end."""
        self._mask(logits)
        logp = logits - logits.max()
        logp -= np.log(np.exp(logp).sum())
        if self.timestamps and self._time_is_due(logp):
            logp[: self.ids.time] = -np.inf
        if self.temperature > 0:
            token = int(np.argmax(logp / self.temperature + self.rng.gumbel(size=len(logp))))
        else:
            token = int(logp.argmax())
        self.logprob += float(logp[token])
        if token != self.ids.end:
            self.tokens.append(token)
        return token

    @property
    def full(self) -> bool:
        return len(self.tokens) >= MAX_NEW_TOKENS

    def _mask(self, logits: np.ndarray) -> None:
        logits[self.suppress] = -np.inf
        logits[self.ids.no_timestamps] = -np.inf
        if not self.tokens:
            logits[self.suppress_first] = -np.inf
        time = self.ids.time
        if not self.timestamps:
            logits[time:] = -np.inf
            return
        if not self.tokens:
            logits[:time] = -np.inf
            logits[time + MAX_INITIAL + 1 :] = -np.inf
            return
        last = self.tokens[-1] >= time
        before = len(self.tokens) < 2 or self.tokens[-2] >= time
        if last and before:
            logits[time:] = -np.inf
        elif last:
            logits[: self.ids.end] = -np.inf
        times = [t for t in self.tokens if t >= time]
        if times:
            floor = times[-1] + (0 if last and not before else 1)
            logits[time:floor] = -np.inf

    def _time_is_due(self, logp: np.ndarray) -> bool:
        times = logp[self.ids.time :]
        top = times.max()
        return bool(np.isfinite(top)) and top + np.log(np.exp(times - top).sum()) > logp[: self.ids.time].max()

    @property
    def average(self) -> float:
        return self.logprob / (len(self.tokens) + 1)

    def is_silence(self, text: str) -> bool:
        """Whether the text counts as silence or noise: it was unlikely, repeats itself, or has no word in it."""
        unlikely = self.average < -1.0 or compression_ratio(text) > MAX_COMPRESSION or not any(c.isalnum() for c in text)
        return self.no_speech > MAX_NO_SPEECH and unlikely

    def _word(self, word: Word, since: float, until: float) -> dict:
        """Within its segment: what follows the sound knows little of pauses."""
        start, end = (round(max(since, min(self.start + at, until)), 2) for at in (word.start, word.end))
        return {"word": word.text, "start": start, "end": end}

    def segments(self, text_of, words: list[Word] | None = None) -> list[dict]:
        """[{start, end, text, tokens, avg_logprob, compression_ratio, no_speech_prob, temperature}], in seconds of the whole
        audio. As in Whisper, the three measures are those of the window. With `words`: [{word, start, end}] too."""
        time, out, since, run = self.ids.time, [], self.start, []
        ratio = compression_ratio(text_of(self.tokens))
        read = 0  # text tokens before the run

        def close(end: float) -> None:
            nonlocal read
            text, first, read = text_of(run), read, read + len(run)
            until = max(since, min(end, self.stop))
            if text.strip():
                out.append(
                    {
                        "start": round(since, 2),
                        "end": round(until, 2),
                        "text": text,
                        "tokens": list(run),
                        "avg_logprob": self.average,
                        "compression_ratio": ratio,
                        "no_speech_prob": self.no_speech,
                        "temperature": self.temperature,
                    }
                )
                if words is not None:
                    own = [w for w in words if first <= w.first < read]
                    out[-1]["words"] = [self._word(w, since, until) for w in own]

        for token in self.tokens:
            if token < time:
                run.append(token)
                continue
            at = self.start + (token - time) * STEP_SECONDS
            if run:
                close(at)
                run = []
            since = at
        if run:
            close(self.stop)
        return out
