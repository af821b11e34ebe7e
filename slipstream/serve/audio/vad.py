"""Finds where speech begins and ends in a stream of samples, by loudness relative to the background. numpy only."""

from dataclasses import dataclass

import numpy as np

FRAME_MS = 20


@dataclass(frozen=True)
class Turns:
    """The thresholds of a turn's beginning and end (OpenAI's `server_vad`)."""

    threshold: float = 0.5  # 0 detects a whisper, 1 only a shout
    prefix_padding_ms: int = 300  # kept before the first loud frame
    silence_duration_ms: int = 500  # of quiet that end a turn
    begin_ms: int = 80  # of loudness that begin a turn


class Detector:
    """Takes samples and reports when speech has begun and when it has ended. Times are in samples since the start."""

    def __init__(self, rate: int, turns: Turns):
        self.turns = turns
        self.frame = rate * FRAME_MS // 1000
        self.speaking = False
        self._rest = np.zeros(0, np.float32)
        self._at = 0  # samples classified
        self._noise = 1e-3  # running estimate of the background's rms
        self._loud = 0  # ms of loudness, or of quiet while speaking, in a row

    def feed(self, samples: np.ndarray) -> list[tuple[str, int]]:
        """("started", sample) and ("stopped", sample) events, in order."""
        data = np.concatenate([self._rest, samples])
        count = len(data) // self.frame
        self._rest = data[count * self.frame :]
        out = []
        for frame in data[: count * self.frame].reshape(count, self.frame):
            self._at += self.frame
            if event := self._judge(float(np.sqrt(np.mean(frame * frame)))):
                out.append((event, self._at))
        return out

    def _judge(self, rms: float) -> str | None:
        floor = 0.002 + 0.04 * self.turns.threshold
        loud = rms > max(floor, 3 * self._noise)
        if not loud:
            self._noise = min(0.05, 0.95 * self._noise + 0.05 * rms)
        changed = loud != self.speaking
        self._loud = self._loud + FRAME_MS if changed else 0
        need = self.turns.silence_duration_ms if self.speaking else self.turns.begin_ms
        if self._loud < need:
            return None
        self.speaking, self._loud = loud, 0
        return "started" if loud else "stopped"
