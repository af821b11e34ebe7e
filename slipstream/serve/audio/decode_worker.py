"""The process that decodes audio files: `python -m slipstream.serve.audio.decode_worker`, started by `audio_file.py`.

A file is a program for its decoder, and a few bytes may claim gigabytes. It is decoded here, block by block, with only the
formats and codecs named below. The kernel enforces limits: CPU time for each file, memory, no files.

Messages both ways are framed as `system.framing` says. A request is `HEAD` and the file. An answer is an HTTP
status in 2 bytes and the reason for the refusal, or 0 and little-endian 16-bit samples of one channel.
"""

import io
import os
import pathlib
import resource
import signal
import sys

import av
import numpy as np
from av.audio.resampler import AudioResampler
from av.error import FFmpegError

from slipstream.serve.audio.audio_file import HEAD, encode
from slipstream.system.framing import read_frame, write_frame

MEMORY_BYTES = 100 << 20  # bytes of address space beyond what the process starts with, the file included
MIN_RATE, MAX_RATE, MAX_CHANNELS = 4_000, 192_000, 8
FORMATS = {  # the name for clients -> FFmpeg's
    "wav": "wav",
    "flac": "flac",
    "ogg": "ogg",
    "mp3": "mp3",
    "aac": "aac",
    "webm": "matroska,webm",
    "m4a": "mov,mp4,m4a,3gp,3g2,mj2",
}
CODECS = {
    *("pcm_u8", "pcm_s16le", "pcm_s24le", "pcm_s32le", "pcm_f32le", "pcm_f64le", "pcm_alaw", "pcm_mulaw"),
    *("flac", "vorbis", "opus", "libopus", "mp3", "mp3float", "aac", "alac"),
}
NOT_AUDIO = f"not an audio file that can be decoded ({', '.join(FORMATS)} can)"


class Refused(Exception):
    """The file's fault, as a message to the client."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


def format_of(data: bytes) -> str | None:
    """The key of FORMATS that the first bytes identify."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return "wav"
    if data[4:8] == b"ftyp":
        return "m4a"
    marks = {b"fLaC": "flac", b"OggS": "ogg", b"\x1aE\xdf\xa3": "webm"}
    if data[:4] in marks:
        return marks[data[:4]]
    if data[:3] == b"ID3":
        return "mp3"
    if data[:1] != b"\xff" or data[1:2] < b"\xe0":
        return None
    return "mp3" if data[1] & 6 else "aac"  # the bits of the layer, which is 0 only in AAC


def decode(data: bytes, rate: int, max_seconds: float) -> list[bytes]:
    """The file's samples at `rate` Hz, in blocks. Raises Refused."""
    format = format_of(data)
    if format is None:
        raise Refused(NOT_AUDIO)
    try:
        allowed = {"codec_whitelist": ",".join(CODECS)}
        with av.open(io.BytesIO(data), format=FORMATS[format], options=allowed, metadata_errors="ignore") as container:
            return _blocks(container, rate, max_seconds)
    except MemoryError:  # FFmpeg's memory error is one too
        raise Refused(f"the audio takes more than {MEMORY_BYTES >> 20} MiB of memory to decode", 413) from None
    except (FFmpegError, ValueError, OverflowError):
        raise Refused(NOT_AUDIO) from None


def _blocks(container, rate: int, max_seconds: float) -> list[bytes]:
    if not container.streams.audio:
        raise Refused("the file has no audio stream")
    stream = container.streams.audio[0]
    codec = stream.codec_context
    name = codec.name if codec is not None else "unknown"
    if codec is None or name not in CODECS:
        raise Refused(f"the codec {name[:50]!r} is not one of {', '.join(sorted(CODECS))}")
    if not (MIN_RATE <= codec.sample_rate <= MAX_RATE and 1 <= codec.channels <= MAX_CHANNELS):
        raise Refused(
            f"{codec.sample_rate} Hz and {codec.channels} channels; a file must have {MIN_RATE} to {MAX_RATE} Hz and at most "
            f"{MAX_CHANNELS} channels"
        )
    codec.thread_count = 1
    resampler, out, seconds = AudioResampler("s16", "mono", rate), [], 0.0
    for frame in container.decode(stream):
        seconds += frame.samples / frame.sample_rate
        if seconds > max_seconds:
            raise Refused(f"the audio is longer than {max_seconds:g} seconds", 413)
        out += _samples(resampler, frame)
    if not seconds:
        raise Refused("the audio holds no samples")
    return out + _samples(resampler, None)


def _samples(resampler: AudioResampler, frame: av.AudioFrame | None) -> list[bytes]:
    """The resampler's output for a frame; for None, the samples that it still holds."""
    return [part.to_ndarray().astype("<i2", copy=False).tobytes() for part in resampler.resample(frame)]


def _limit() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the server, which closes the pipe when it ends
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    started_with = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (started_with + MEMORY_BYTES, started_with + MEMORY_BYTES))
    for what in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE, resource.RLIMIT_NOFILE):
        resource.setrlimit(what, (0, 0))


def main() -> None:
    decode(
        encode(np.zeros(1, np.int16), 16_000, "flac"), 16_000, 1.0
    )  # PyAV imports some modules late, and opening files is forbidden next
    _limit()
    while (request := read_frame(sys.stdin.buffer)) is not None:
        rate, seconds, computing = HEAD.unpack_from(request)
        signal.setitimer(signal.ITIMER_PROF, computing)
        try:
            status, parts = 0, decode(request[HEAD.size :], rate, seconds)
        except Refused as e:
            status, parts = e.status, [str(e).encode()]
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_frame(sys.stdout.buffer, b"".join([status.to_bytes(2, "little"), *parts]))


if __name__ == "__main__":
    main()
