"""Audio files to samples and back, through FFmpeg's libraries (PyAV). The calls block: routes run them in a thread.

Nothing touches the disk. Uploads are decoded in a limited process (`decode_worker.py`). This server's speech is encoded here.
"""

import io
import struct
from typing import cast

import numpy as np

from slipstream.errors import BadRequest, EngineDown
from slipstream.system.limited_process import LimitedProcess, Lost, Overrun, Pool

MAX_BYTES = 25 << 20
MAX_SECONDS = 600
DECODERS = 2  # files that are decoded at the same time
SECONDS = 20.0  # of CPU time, for one file
HEAD = struct.Struct("<Idd")  # precedes a file on its way to the worker: rate, most seconds of sound, most seconds of CPU time
FORMATS = {  # response_format -> (content type, FFmpeg's container and codec)
    "mp3": ("audio/mpeg", "mp3", "libmp3lame"),
    "opus": ("audio/ogg", "ogg", "libopus"),
    "aac": ("audio/aac", "adts", "aac"),
    "flac": ("audio/flac", "flac", "flac"),
    "wav": ("audio/wav", "", ""),
    "pcm": ("audio/pcm", "", ""),
}
_PATIENCE_SECONDS = 120.0  # seconds of wall time that a loaded machine may need for one file


def decode(data: bytes, rate: int, max_seconds: float = MAX_SECONDS, param: str = "file") -> np.ndarray:
    """A file's bytes to float32 samples in [-1, 1] (of 16 bits, as Whisper reads files), one channel, at `rate` Hz.

    Raises BadRequest naming `param`: 413 for too many bytes or seconds, 400 for a file that cannot be decoded or is empty.
    Raises EngineDown if the decoding process was ended from outside.
    """
    if not data:
        raise BadRequest("the audio is empty", param)
    if len(data) > MAX_BYTES:
        raise BadRequest(f"the audio has {len(data)} bytes; at most {MAX_BYTES} are allowed", param, 413)
    try:
        answer = _processes.ask_now(HEAD.pack(rate, max_seconds, SECONDS) + data)
    except Overrun:
        text = f"decoding the audio takes more than {SECONDS:g} s of CPU time, or too much memory"
        raise BadRequest(text, param, 413) from None
    except Lost as e:
        raise EngineDown(f"the process that decodes audio has ended: {e}; try again") from None
    if status := int.from_bytes(answer[:2], "little"):
        raise BadRequest(answer[2:].decode(), param, status)
    samples = np.frombuffer(answer, "<i2", offset=2).astype(np.float32)
    samples /= 32768  # in place: ten minutes are 38 MB
    return samples


def _start() -> LimitedProcess:
    return LimitedProcess(
        "-m", "slipstream.serve.audio.decode_worker", patience=_PATIENCE_SECONDS, env={"OPENBLAS_NUM_THREADS": "1"}
    )


_processes = Pool("decode", DECODERS, _start)


class Resampler:
    """Resamples float32 [n] from `source` Hz to `target` Hz, piece by piece."""

    def __init__(self, source: int, target: int):
        from av.audio.resampler import AudioResampler

        self._source = source
        self._resampler = AudioResampler("flt", "mono", target)

    def feed(self, x: np.ndarray, last: bool = False) -> np.ndarray:
        """The samples that are ready after these; with `last`, all that are left."""
        import av

        frames = []
        if len(x):
            frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(x[None], np.float32), format="flt", layout="mono")
            frame.sample_rate = self._source
            frames += self._resampler.resample(frame)
        if last:
            frames += self._resampler.resample(None)
        return np.concatenate([np.zeros(0, np.float32), *(f.to_ndarray()[0] for f in frames)])


def pcm16(x: np.ndarray) -> bytes:
    """Samples to little-endian 16-bit: int16 as it is, float32 clipped to [-1, 1]."""
    if x.dtype == np.int16:
        return x.astype("<i2", copy=False).tobytes()
    return (np.clip(x, -1, 1) * 32767).round().astype("<i2").tobytes()


def wav_header(rate: int, data_bytes: int | None) -> bytes:
    """The 44 header bytes of 16-bit samples of one channel. None: the length is not known, as in a stream."""
    size = 0xFFFFFFFF if data_bytes is None else data_bytes
    riff = size if data_bytes is None else 36 + data_bytes
    word = lambda n, bytes=4: n.to_bytes(bytes, "little")
    form = word(16) + word(1, 2) + word(1, 2) + word(rate) + word(2 * rate) + word(2, 2) + word(16, 2)
    return b"RIFF" + word(riff) + b"WAVEfmt " + form + b"data" + word(size)


class Encoder:
    """Encodes samples of one channel, piece by piece, to one file of a `FORMATS` format.

    A streamed file is never rewound to its header, which then does not hold the length. `whole`: a buffer to write to instead,
    for a file with its length."""

    def __init__(self, rate: int, format: str, whole: io.BytesIO | None = None):
        self._rate, self._format = rate, format
        self._out = bytearray(wav_header(rate, None) if format == "wav" else b"")
        _, container, codec = FORMATS[format]
        self._file = None
        if codec:
            import av
            from av.audio import AudioStream

            options = {"write_xing": "0"} if format == "mp3" and whole is None else {}
            self._file = av.open(whole or self, "w", format=container, container_options=options)
            self._stream = cast(AudioStream, self._file.add_stream(codec, rate=rate, layout="mono"))

    def write(self, data: bytes) -> int:
        """The file object that the container writes to."""
        self._out += data
        return len(data)

    def feed(self, x: np.ndarray) -> bytes:
        """The bytes that are ready after these samples; b"" if none are."""
        if self._file is None:
            self._out += pcm16(x)
        elif len(x):
            import av

            frame = av.AudioFrame.from_ndarray(np.frombuffer(pcm16(x), "<i2")[None], format="s16", layout="mono")
            frame.sample_rate = self._rate
            self._file.mux(self._stream.encode(frame))
        return self._take()

    def end(self) -> bytes:
        """The rest of the file."""
        if self._file is not None:
            self._file.mux(self._stream.encode(None))
            self._file.close()
        return self._take()

    def _take(self) -> bytes:
        out, self._out = bytes(self._out), bytearray()
        return out


def encode(x: np.ndarray, rate: int, format: str) -> bytes:
    """Encodes samples to a whole file whose header holds its true length."""
    if format in ("wav", "pcm"):
        return (wav_header(rate, 2 * len(x)) if format == "wav" else b"") + pcm16(x)
    out = io.BytesIO()
    encoder = Encoder(rate, format, out)
    encoder.feed(x)
    encoder.end()
    return out.getvalue()


def unavailable(format: str) -> str | None:
    """The reason why this machine cannot write a format, or None."""
    if format not in FORMATS:
        return f"{format!r} is not one of {', '.join(FORMATS)}"
    import av

    codec = FORMATS[format][2]
    return (
        None
        if not codec or codec in av.codecs_available
        else f"{format} cannot be written: the FFmpeg of this server lacks {codec}"
    )
