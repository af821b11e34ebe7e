import io
import os
import pathlib
import re
import signal
import struct
import subprocess
import sys
import threading
import wave

import numpy as np
import pytest

from slipstream.errors import BadRequest, EngineDown
from slipstream.serve.audio import audio_file
from slipstream.serve.audio.audio_file import (
    FORMATS,
    MAX_BYTES,
    Resampler,
    decode,
    encode,
    pcm16,
    unavailable,
    wav_header,
)

ROOT = pathlib.Path(__file__).parents[3]
RATE = 24_000
TONE = (0.5 * np.sin(2 * np.pi * 440 * np.arange(RATE * 2) / RATE)).astype(np.float32)


def wav(samples, rate=RATE, channels=1, width=2):
    out = io.BytesIO()
    with wave.open(out, "wb") as f:
        f.setnchannels(channels)
        f.setsampwidth(width)
        f.setframerate(rate)
        f.writeframes(samples)
    return out.getvalue()


def pitch(x, rate):
    return np.abs(np.fft.rfft(x)).argmax() * rate / len(x)


@pytest.mark.parametrize("format", ["wav", "flac", "opus", "mp3", "aac"])
def test_what_is_written_is_read_back(format):
    assert unavailable(format) is None
    data = encode(TONE, RATE, format)
    back = decode(data, RATE)
    assert abs(len(back) - len(TONE)) < 0.1 * RATE and abs(pitch(back, RATE) - 440) < 2
    assert abs(np.abs(back[4000:40000]).max() - 0.5) < 0.05


def test_a_wav_says_its_true_length():
    data = encode(TONE, RATE, "wav")
    with wave.open(io.BytesIO(data)) as w:
        assert (w.getnframes(), w.getframerate(), len(data)) == (len(TONE), RATE, 44 + 2 * len(TONE))
    assert struct.unpack_from("<I", wav_header(RATE, None), 40) == (0xFFFFFFFF,)
    assert encode(TONE, RATE, "pcm") == pcm16(TONE) == data[44:]


def test_eight_bit_stereo_is_taken_as_its_mean():
    left, right = (128 + 100 * np.sin(np.arange(8000) / 9)), np.full(8000, 128.0)
    data = wav(np.stack([left, right], 1).astype(np.uint8).tobytes(), 8000, 2, 1)
    x = decode(data, 16_000)
    assert len(x) == 16_000 and abs(np.abs(x).max() - 100 / 256) < 0.02


@pytest.mark.parametrize(
    ("data", "says", "status"),
    [
        (b"", "empty", 400),
        (b"hello", "not an audio file", 400),
        (encode(TONE, RATE, "wav")[:30], "not an audio file", 400),
        (encode(TONE, RATE, "flac")[:60], "audio", 400),
        (wav(b""), "no samples", 400),
        (wav(bytes(16_000 * 2 * 61), 16_000), "longer than 60 seconds", 413),
        (encode(np.zeros(8000 * 3600, np.int16), 8000, "flac"), "longer than 60 seconds", 413),
        (bytes(MAX_BYTES + 1), "bytes; at most", 413),
        (wav(bytes(4000), 1000), "1000 Hz", 400),
        (wav(bytes(4000), 16_000, 10), "10 channels", 400),
    ],
    ids=["empty", "text", "cut", "cut flac", "no samples", "long", "hour of silence, small file", "bytes", "rate", "channels"],
)
def test_what_cannot_be_taken_is_refused_by_name(data, says, status):
    with pytest.raises(BadRequest, match=says) as e:
        decode(data, 16_000, max_seconds=60)
    assert e.value.status == status and e.value.param == "file"


@pytest.mark.parametrize(("source", "target"), [(24_000, 16_000), (16_000, 24_000), (8_000, 24_000), (16_000, 16_000)])
def test_resampling_in_pieces_gives_what_the_whole_gives_and_keeps_pitch(source, target):
    x = np.sin(2 * np.pi * 1000 * np.arange(source) / source).astype(np.float32)
    rng, stream, out, at = np.random.default_rng(1), Resampler(source, target), [], 0
    while at < len(x):
        n = int(rng.integers(0, 3000))
        out.append(stream.feed(x[at : at + n]))
        at += n
    y = np.concatenate([*out, stream.feed(x[:0], last=True)])
    np.testing.assert_allclose(y, Resampler(source, target).feed(x, last=True), atol=1e-5)
    want = np.sin(2 * np.pi * 1000 * np.arange(target) / target)
    assert len(y) == target and np.abs(y - want)[200:-200].max() < 0.02


def test_resampling_removes_what_would_fold():
    high = np.sin(2 * np.pi * 10_000 * np.arange(24_000) / 24_000).astype(np.float32)
    assert np.abs(Resampler(24_000, 16_000).feed(high, last=True))[200:-200].max() < 0.02


def test_formats_that_are_not_known_are_named():
    assert "not one of mp3" in unavailable("amr") and all(len(v) == 3 for v in FORMATS.values())


def mux(container, codec, rate=48_000, seconds=2, layout="mono"):
    """Two seconds of the tone, in a container and a codec of FFmpeg's."""
    import av

    samples = np.sin(2 * np.pi * 440 * np.arange(rate * seconds) / rate)
    out = io.BytesIO()
    with av.open(out, "w", format=container) as file:
        stream = file.add_stream(codec, rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray((samples * 16_000).astype(np.int16)[None], format="s16", layout="mono")
        frame.sample_rate = rate
        file.mux([*stream.encode(frame), *stream.encode(None)])
    return out.getvalue()


@pytest.mark.parametrize(("container", "codec"), [("webm", "libopus"), ("ipod", "aac"), ("mp4", "aac"), ("ogg", "libopus")])
def test_what_browsers_and_phones_record_is_decoded(container, codec):
    x = decode(mux(container, codec), 16_000)
    assert abs(len(x) - 32_000) < 1600 and abs(pitch(x, 16_000) - 440) < 2


@pytest.mark.parametrize("container", ["aiff", "au", "caf", "w64", "voc", "mpegts", "sox"])
def test_only_the_formats_that_the_error_names_are_decoded(container):
    codec = {"aiff": "pcm_s16be", "au": "pcm_s16be", "mpegts": "mp2", "sox": "pcm_s32le"}.get(container, "pcm_s16le")
    with pytest.raises(BadRequest, match="wav, flac, ogg, mp3, aac, webm, m4a can"):
        decode(mux(container, codec), 16_000)


def test_a_codec_that_is_not_taken_is_refused_also_inside_a_format_that_is():
    with pytest.raises(BadRequest, match="codec 'ac3' is not one of aac"):
        decode(mux("matroska", "ac3"), 16_000)


def test_a_codec_that_nobody_knows_is_refused():
    data = bytearray(encode(TONE, RATE, "wav"))
    struct.pack_into("<H", data, 20, 0x1234)
    with pytest.raises(BadRequest, match="codec 'unknown' is not one of aac"):
        decode(bytes(data), 16_000)


def test_an_index_that_claims_gigabytes_is_refused_within_the_memory_limit():
    """FFmpeg builds 24 bytes for each sample that an mp4 claims: 720 MB for the 10 kB here, without a limit."""
    data = bytearray(mux("mp4", "aac", 44_100, 1))
    sizes, chunks = data.index(b"stsz"), data.index(b"stsc")
    struct.pack_into(">II", data, sizes + 8, 1, 30_000_000)
    struct.pack_into(">I", data, chunks + 8, 1)
    struct.pack_into(">I", data, chunks + 16, 30_000_000)
    with pytest.raises(BadRequest) as e:
        decode(bytes(data), 16_000)
    worker = audio_file._processes._idle.queue[-1]
    peak = re.search(r"VmHWM:\s+(\d+)", pathlib.Path(f"/proc/{worker.pid}/status").read_text())
    assert e.value.status == 400 and peak and int(peak.group(1)) < 200 << 10


GROWTH = """
import resource, numpy as np, io, av
from slipstream.serve.audio.audio_file import decode, encode
out = io.BytesIO()
with av.open(out, "w", format="flac") as file:
    stream = file.add_stream("flac", rate=192_000, layout="mono")
    for _ in range(60):
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 192_000), np.int16), format="s16", layout="mono")
        frame.sample_rate = 192_000
        file.mux(stream.encode(frame))
    file.mux(stream.encode(None))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert len(decode(out.getvalue(), 16_000)) == 60 * 16_000
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_small_file_of_many_samples_takes_little_memory():
    """16 kB of FLAC at 192 kHz. The process that decodes could not take more than 100 MB if it tried."""
    out = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True, cwd=ROOT, timeout=120)
    assert int(out.stdout) < 100 << 10


def test_a_file_that_takes_too_much_computing_is_refused(monkeypatch):
    monkeypatch.setattr(audio_file, "SECONDS", 0.01)
    with pytest.raises(BadRequest, match="0.01 s of CPU time") as e:
        decode(encode(np.zeros(16_000 * 500, np.int16), 16_000, "flac"), 16_000)
    assert e.value.status == 413


def test_a_killed_decoder_refuses_nothing_that_is_valid():
    decode(encode(TONE, RATE, "wav"), 16_000)
    worker = audio_file._processes._idle.queue[-1]
    os.kill(worker.pid, signal.SIGSTOP)
    threading.Timer(0.2, os.kill, (worker.pid, signal.SIGKILL)).start()
    with pytest.raises(EngineDown):
        decode(encode(TONE, RATE, "wav"), 16_000)
    assert len(decode(encode(TONE, RATE, "wav"), 16_000)) == 32_000
