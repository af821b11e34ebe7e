"""The samples of a realtime session on the wire: 16 bits at 24 kHz, or G.711 at 8 kHz, as in telephony."""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.serve.audio.audio_file import pcm16


@dataclass(frozen=True)
class WireFormat:
    """`type`: OpenAI's name; `codec`: FFmpeg's name, "" for plain samples."""

    type: str
    rate: int
    codec: str = ""

    def describe(self) -> dict[str, Any]:
        return {"type": self.type} if self.codec else {"type": self.type, "rate": self.rate}

    def decode(self, data: bytes) -> np.ndarray:
        """float32 samples at `rate`. Raises ValueError for half a sample."""
        samples = _levels(self.codec)[np.frombuffer(data, np.uint8)] if self.codec else np.frombuffer(data, "<i2")
        return samples.astype(np.float32) / 32768

    def encode(self, samples: np.ndarray) -> bytes:
        """int16 or float32 samples at `rate` as bytes; in G.711 each is the code of the nearest level."""
        data = pcm16(samples)
        if not self.codec:
            return data
        order = np.argsort(_levels(self.codec), kind="stable")
        levels = _levels(self.codec)[order].astype(np.float32)
        nearest = np.searchsorted((levels[1:] + levels[:-1]) / 2, np.frombuffer(data, "<i2"))
        return order[nearest].astype(np.uint8).tobytes()


PCM = WireFormat("audio/pcm", 24_000)
FORMATS = {f.type: f for f in (PCM, WireFormat("audio/pcmu", 8_000, "pcm_mulaw"), WireFormat("audio/pcma", 8_000, "pcm_alaw"))}


@functools.cache
def _levels(codec: str) -> np.ndarray:
    """int16 [256]: the level of each byte of a G.711 codec."""
    import av

    context = av.CodecContext.create(codec, "r")
    context.sample_rate, context.layout = 8_000, "mono"  # type: ignore[attr-defined]
    (frame,) = context.decode(av.Packet(bytes(range(256))))  # type: ignore[attr-defined]
    return frame.to_ndarray()[0]
