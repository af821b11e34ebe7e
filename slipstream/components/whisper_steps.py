"""Whisper as two components: the encoder, one window a step, and the decoder, autoregressive over rows of many requests."""

import math
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from tokenizers import Tokenizer

from slipstream.components.sentences import split
from slipstream.components.whisper import RATE, WINDOW, Slot, Whisper, log_mel
from slipstream.components.whisper_text import MAX_NEW_TOKENS, MAX_NO_SPEECH, Ids, Window
from slipstream.components.whisper_words import FRAME_S, Word, begins, words
from slipstream.errors import BadRequest
from slipstream.graph.rows import Result, Row

_FRAME = RATE // 50  # samples that loudness is measured over
PROMPT_START_S, PROMPT_CHAR_S, PROMPT_PAUSE_S = 0.32, 0.07, 0.8  # the time given to a prompt's sentences
_SILENCE = 5e-4  # root mean square of a window's loudest frame; below it there is no speech, and Whisper would invent words


def windows(audio: np.ndarray) -> list[tuple[int, int]]:
    """[start, stop) samples of at most 30 s each, cut where it is quietest in the last 5 s of a window."""
    out, start = [], 0
    while len(audio) - start > WINDOW:
        tail = audio[start + WINDOW - 5 * RATE : start + WINDOW]
        loud = np.convolve((tail.reshape(-1, _FRAME) ** 2).mean(axis=1), np.ones(10), "same")
        stop = start + WINDOW - 5 * RATE + int(loud.argmin()) * _FRAME + _FRAME // 2
        out.append((start, stop))
        start = stop
    return [*out, (start, len(audio))]


def silent(audio: np.ndarray) -> bool:
    frames = np.pad(audio, (0, -len(audio) % _FRAME)).reshape(-1, _FRAME)
    return float(np.sqrt((frames**2).mean(axis=1).max(initial=0.0))) < _SILENCE


class EncoderStep:
    """audio float32 [n] at 16 kHz, whole -> per window: features [1, up to 1500, width] and its span [1, 2] in seconds.

    Silent windows are skipped. `margin`: seconds of silence after a short window's end that the encoder still sees; None:
    it always sees 30 s. (Over the 50 sentences of `slipstream bench voice`, 2 and 4 s heard the same words as 30 s at a fifth
    of the time; with 1 s the decoder repeats itself.)
    """

    def __init__(self, folder: str, margin: float | None = None):
        self.margin = margin
        self.encoder = Whisper.load(folder).encoder

    def __call__(self, rows: Sequence[Row]) -> list[Result]:
        return [self._row(row) for row in rows]

    def _row(self, row: Row) -> Result:
        if row.branches[0] is None:
            audio = np.array(row.inputs["audio"].data, np.float32).reshape(-1)
            left = [(start, stop) for start, stop in windows(audio) if not silent(audio[start:stop])]
        else:
            audio, left = row.branches[0]
        if not left:
            return Result()
        start, stop = left[0]
        context = None if self.margin is None else math.ceil(50 * ((stop - start) / RATE + self.margin))
        features = self.encoder.forward(log_mel(audio[start:stop], self.encoder.filters), context)
        span = np.array([[start / RATE, stop / RATE]])
        return Result({"features": features.numpy()[None], "spans": span}, state=(audio, left[1:]), again=len(left) > 1)


@dataclass(eq=False)
class _State:
    """One request's state in the decoder."""

    window: Window | None = None
    slot: Slot | None = None
    new: list[int] = field(default_factory=list)  # tokens of the next step
    sent: int = 0  # letters of the window's text that were sent
    segments: list[dict] = field(default_factory=list)
    previous: list[int] = field(default_factory=list)  # tokens before this window, timestamps included


class DecoderStep:
    """features and spans, one window each -> text in pieces, and at the end all segments.

    Parameters of a request: `language`, `prompt`, `temperature`, `timestamps`, and `words`: whether segments carry word times.
    """

    def __init__(self, folder: str):
        whisper = Whisper.load(folder)
        self.decoder = whisper.decoder
        self.tokenizer = Tokenizer.from_file(str(pathlib.Path(folder) / "tokenizer.json"))
        self.ids = Ids.read(self.tokenizer.token_to_id, english_only=self.decoder.vocab < 51865)
        self.suppress = np.array([i for i in whisper.suppress if i != self.ids.end], np.int64)
        self.suppress_first = np.array(whisper.suppress_first, np.int64)
        self.following = whisper.following

    def __call__(self, rows: Sequence[Row]) -> list[Result]:
        results: list[Result | None] = [None] * len(rows)
        states = [row.branches[0] or _State() for row in rows]
        for i, (row, state) in enumerate(zip(rows, states, strict=True)):
            try:
                results[i] = self._begin(row, state) if state.window is None else None
            except BadRequest as e:
                results[i] = Result(error=str(e), refused=True, param=e.param)
        stepping = [i for i, r in enumerate(results) if r is None and states[i].window is not None]
        if stepping:
            slots = [s for i in stepping if (s := states[i].slot)]
            logits = self.decoder.forward([states[i].new for i in stepping], slots).numpy()
            for i, row_logits in zip(stepping, logits, strict=True):
                results[i] = self._advance(states[i], row_logits, rows[i])
        return [r or Result(state=s) for r, s in zip(results, states, strict=True)]

    def _begin(self, row: Row, state: _State) -> Result | None:
        """Starts a window, or closes the request if no window is left. None: the row has a step to run."""
        if "features" not in row.inputs:
            return Result({"segments": state.segments}, state=state)
        p = row.params
        if p.get("words") and not self.following:
            raise BadRequest("timestamp_granularities: this model does not support word", "timestamp_granularities[]")
        start, stop = map(float, row.inputs["spans"].data[0])
        timestamps = bool(p.get("timestamps", True))
        if not state.segments and not state.previous:
            state.previous = self._prompt(p, timestamps)
        before = [self.ids.previous, *state.previous[-(MAX_NEW_TOKENS - 1) :]] if state.previous else []
        prompt = [*before, self.ids.start, *self._task(p), *([] if timestamps else [self.ids.no_timestamps])]
        state.window = Window(
            self.ids,
            start,
            stop,
            prompt,
            timestamps,
            float(p.get("temperature") or 0.0),
            self.suppress,
            self.suppress_first,
        )
        features = torch.from_numpy(np.array(row.inputs["features"].data[0], np.float32))
        state.slot = self.decoder.slot(features)
        at = len(before)
        if len(prompt) > 1:  # all but the last token now, so that every row of the step has one
            logits = self.decoder.forward([prompt[:-1]], [state.slot], every=True)
            if at < len(logits):
                state.window.no_speech = self._no_speech(logits[at].numpy())
        state.new, state.sent = prompt[-1:], 0
        return None

    def _prompt(self, params: dict, timestamps: bool) -> list[int]:
        """The client's prompt in the form of a transcript: the model writes timestamps only after it has seen some."""
        out, at = [], PROMPT_START_S
        for sentence in filter(str.strip, split(params.get("prompt") or "", True)[0]):
            tokens = self.tokenizer.encode(" " + sentence.strip(), add_special_tokens=False).ids
            end = at + PROMPT_CHAR_S * len(sentence)
            out += [self.ids.at(at), *tokens, self.ids.at(end)] if timestamps else tokens
            at = end + PROMPT_PAUSE_S
        return out

    def _task(self, params: dict) -> list[int]:
        language = params.get("language")
        if not self.ids.languages:
            if language and language not in ("en", "english"):
                raise BadRequest(f"language {language!r}: this model transcribes English only", "language")
            return []
        language = language or "en"
        if language not in self.ids.languages:
            raise BadRequest(f"language {language!r} is not one of {', '.join(self.ids.languages)}", "language")
        return [self.ids.languages[language], self.ids.transcribe]

    def _text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode([t for t in tokens if t < self.ids.end])

    def _advance(self, state: _State, logits: np.ndarray, row: Row) -> Result:
        window = state.window
        assert window and state.slot
        if not window.tokens and window.prompt[-1] == self.ids.start:
            window.no_speech = self._no_speech(logits)
        token = window.choose(np.array(logits))
        ended = token == self.ids.end or window.full
        text = self._text(window.tokens)
        if not ended:
            state.new = [token]
            return Result({"text": self._fresh(state, text, False)}, state=state, again=True)
        silence = window.is_silence(text)
        piece = None if silence and not state.sent else self._fresh(state, text, True)
        if not silence:
            words = self._words(window, state.slot) if row.params.get("words") else None
            state.segments += window.segments(self._text, words)
            state.previous = window.tokens
        state.window = state.slot = None
        return Result({"text": piece, "segments": state.segments if row.last else None}, state=state)

    def _words(self, window: Window, slot: Slot) -> list[Word]:
        tokens = [t for t in window.tokens if t < self.ids.end]
        task = [t for t in window.prompt[window.prompt.index(self.ids.start) :] if t < self.ids.time]
        before = [*task, *([] if self.ids.no_timestamps in task else [self.ids.no_timestamps])]
        frames = math.ceil((window.stop - window.start) / FRAME_S)
        attention = self.decoder.attention([*before, *tokens, self.ids.end], slot, self.following, frames)
        return words(tokens, begins(attention.numpy(), len(before) - 1), self._text)

    def _no_speech(self, logits: np.ndarray) -> float:
        """Its probability, from the logits after the start token."""
        likely = np.exp(logits - logits.max())
        return float(likely[self.ids.no_speech] / likely.sum())

    def _fresh(self, state: _State, text: str, final: bool) -> str | None:
        """The text that may be sent: no incomplete character, and nothing until the window is known not to be silent."""
        window = state.window
        assert window
        if not final and (text.endswith("\ufffd") or window.no_speech > MAX_NO_SPEECH):
            return None
        piece, state.sent = text[state.sent :], len(text)
        return piece or None
