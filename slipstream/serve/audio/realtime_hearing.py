"""One spoken turn of a realtime session: feeds its samples to a running `transcribe` request and collects the words."""

from collections.abc import AsyncIterator

import numpy as np

from slipstream.serve.audio.audio import HEARD_RATE
from slipstream.serve.audio.audio_file import Resampler
from slipstream.serve.engine.composite import Call


class Hearing:
    """`rate`: the sample rate of its input."""

    def __init__(self, call: Call, rate: int):
        self.call = call
        self.seconds = 0.0
        self._rate = rate
        self._resampler = Resampler(rate, HEARD_RATE)

    async def feed(self, samples: np.ndarray) -> None:
        self.seconds += len(samples) / self._rate
        await self.call.run.feed("audio", self._resampler.feed(samples))

    async def words(self) -> AsyncIterator[str]:
        """Ends the input and yields the transcript in pieces."""
        begun = False
        try:
            await self.call.run.feed("audio", self._resampler.feed(np.zeros(0, np.float32), last=True), True)
            async for output in self.call.run:
                if piece := (output.value or "") if begun else (output.value or "").lstrip():
                    begun = True
                    yield piece
        finally:
            self.call.close()
