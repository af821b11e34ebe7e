"""Audio as bytes to samples and back, through soundfile. Blocking calls: the routes run them in a thread.

Nothing touches the disk. What a file claims is checked before it is read, and no more than the limits is ever decoded.
"""

import io
from collections.abc import Iterator
from math import gcd

import numpy as np

from slipstream.errors import BadRequest

MAX_BYTES = 25 << 20
MAX_SECONDS = 600
MIN_RATE, MAX_RATE, MAX_CHANNELS = 4_000, 192_000, 8
FORMATS = {  # response_format -> (content type, soundfile's format and subtype)
    "wav": ("audio/wav", "WAV", "PCM_16"),
    "flac": ("audio/flac", "FLAC", "PCM_16"),
    "opus": ("audio/ogg", "OGG", "OPUS"),
    "mp3": ("audio/mpeg", "MP3", "MPEG_LAYER_III"),
    "pcm": ("audio/pcm", "", ""),
}


def decode(data: bytes, rate: int, max_seconds: float = MAX_SECONDS, param: str = "file") -> np.ndarray:
    """A file's bytes to float32 samples in [-1, 1], one channel (the mean), at `rate` Hz.

    Raises BadRequest naming `param`: 413 for too many bytes or seconds, 400 for what cannot be decoded or holds no samples.
    """
    import soundfile

    if not data:
        raise BadRequest("the audio is empty", param)
    if len(data) > MAX_BYTES:
        raise BadRequest(f"the audio has {len(data)} bytes; at most {MAX_BYTES} are taken", param, 413)
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            if not (MIN_RATE <= file.samplerate <= MAX_RATE and 1 <= file.channels <= MAX_CHANNELS):
                raise BadRequest(
                    f"{file.samplerate} Hz and {file.channels} channels: {MIN_RATE} to {MAX_RATE} Hz and at most "
                    f"{MAX_CHANNELS} channels are taken",
                    param,
                )
            limit = int(max_seconds * file.samplerate)
            samples = file.read(limit + 1, dtype="float32", always_2d=True)
            source = file.samplerate
    except (soundfile.SoundFileError, RuntimeError, ValueError, TypeError, OSError) as e:
        if isinstance(e, BadRequest):
            raise
        raise BadRequest("not an audio file that can be decoded (wav, flac, ogg and mp3 can)", param) from None
    if len(samples) > limit:
        raise BadRequest(f"the audio is longer than {max_seconds:g} seconds", param, 413)
    if not len(samples):
        raise BadRequest("the audio holds no samples", param)
    mono = np.nan_to_num(samples.mean(axis=1), nan=0.0, posinf=1.0, neginf=-1.0)
    return resample(mono, source, rate)


def decode_pcm16(data: bytes, source: int, rate: int, max_seconds: float = MAX_SECONDS, param: str = "data") -> np.ndarray:
    """Little-endian 16-bit samples of one channel to float32 at `rate` Hz."""
    if not data or len(data) % 2:
        raise BadRequest("pcm16 audio is empty or has half a sample", param)
    if len(data) > 2 * source * max_seconds:
        raise BadRequest(f"the audio is longer than {max_seconds:g} seconds", param, 413)
    return resample(np.frombuffer(data, "<i2").astype(np.float32) / 32768, source, rate)


def resample(x: np.ndarray, source: int, target: int) -> np.ndarray:
    """float32 [n] at `source` Hz to `target` Hz, by a windowed sinc (16 zero crossings each side, Kaiser 8.6)."""
    if source == target or not len(x):
        return x.astype(np.float32, copy=False)
    g = gcd(source, target)
    up, down = target // g, source // g
    cutoff = 0.95 * min(1.0, target / source)  # of the source's half rate
    half = int(np.ceil(16 / cutoff))
    taps = np.arange(-half, half + 1)
    count = (len(x) * up + down - 1) // down
    padded = np.pad(x.astype(np.float32, copy=False), (half, half + 1))
    view = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)
    out = np.empty(count, np.float32)
    for phase in range(min(up, count)):  # outputs whose distance to the source's grid is the same share one kernel
        at = np.arange(phase, count, up, dtype=np.int64) * down
        offset = (phase * down % up) / up
        t = taps - offset
        kernel = cutoff * np.sinc(cutoff * t) * np.i0(8.6 * np.sqrt(np.maximum(0, 1 - (t / (half + 1)) ** 2))) / np.i0(8.6)
        out[phase::up] = view[at // up] @ kernel.astype(np.float32)
    return out


class Resampler:
    """`resample` for a stream: the pieces it gives, joined, are what the whole would give."""

    def __init__(self, source: int, target: int):
        self.source, self.target = source, target
        g = gcd(source, target)
        self._up, self._down = target // g, source // g
        self._half = int(np.ceil(16 / (0.95 * min(1.0, target / source)))) + 1
        self._buffer = np.zeros(0, np.float32)
        self._base = 0  # source samples before the buffer, a multiple of `down`
        self._done = 0  # target samples given

    def feed(self, x: np.ndarray, last: bool = False) -> np.ndarray:
        if self.source == self.target:
            return x.astype(np.float32, copy=False)
        self._buffer = np.concatenate([self._buffer, x.astype(np.float32, copy=False)])
        have = self._base + len(self._buffer)
        stop = -(-(have if last else max(0, have - self._half)) * self._up // self._down)
        first = self._base // self._down * self._up
        out = resample(self._buffer, self.source, self.target)[self._done - first : max(self._done, stop) - first]
        self._done += len(out)
        keep = max(self._base, (self._done * self._down // self._up - self._half) // self._down * self._down)
        self._buffer, self._base = self._buffer[keep - self._base :], keep
        return out


def pcm16(x: np.ndarray) -> bytes:
    """Samples to little-endian 16-bit: int16 as it is, float32 clipped to [-1, 1]."""
    if x.dtype == np.int16:
        return x.astype("<i2", copy=False).tobytes()
    return (np.clip(x, -1, 1) * 32767).round().astype("<i2").tobytes()


def wav_header(rate: int, data_bytes: int | None) -> bytes:
    """The 44 bytes before 16-bit samples of one channel. None: the length is not known, as in a stream."""
    size = 0xFFFFFFFF if data_bytes is None else data_bytes
    riff = size if data_bytes is None else 36 + data_bytes
    word = lambda n, bytes=4: n.to_bytes(bytes, "little")
    form = word(16) + word(1, 2) + word(1, 2) + word(rate) + word(2 * rate) + word(2, 2) + word(16, 2)
    return b"RIFF" + word(riff) + b"WAVEfmt " + form + b"data" + word(size)


def encode(x: np.ndarray, rate: int, format: str) -> bytes:
    """Samples to a whole file of a `FORMATS` format; a wav's header has its true length."""
    if format in ("wav", "pcm"):
        data = pcm16(x)
        return data if format == "pcm" else wav_header(rate, len(data)) + data
    import soundfile

    _, container, subtype = FORMATS[format]
    out = io.BytesIO()
    with soundfile.SoundFile(out, "w", rate, 1, subtype, format=container) as file:
        for start in range(0, len(x), rate):  # in seconds: libsndfile's Opus encoder overflows its stack on long buffers
            file.write(x[start : start + rate])
    return out.getvalue()


def unavailable(format: str) -> str | None:
    """Why this machine cannot write a format, or None."""
    if format not in FORMATS:
        return f"{format!r} is not one of {', '.join(FORMATS)}"
    if format in ("wav", "pcm"):
        return None
    import soundfile

    _, container, subtype = FORMATS[format]
    known = container in soundfile.available_formats() and subtype in soundfile.available_subtypes(container)
    return None if known else f"{format} cannot be written: the libsndfile here lacks it"


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]
