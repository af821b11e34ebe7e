import io
import struct
import wave

import numpy as np
import pytest

from slipstream.errors import BadRequest
from slipstream.serve.audio.audio_file import (
    FORMATS,
    MAX_BYTES,
    Resampler,
    decode,
    decode_pcm16,
    encode,
    pcm16,
    resample,
    unavailable,
    wav_header,
)

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


@pytest.mark.parametrize("format", ["wav", "flac", "opus", "mp3"])
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


def test_pcm16_is_checked():
    assert np.allclose(decode_pcm16(pcm16(TONE), RATE, RATE), TONE, atol=1e-4)
    for bad in (b"", b"abc"):
        with pytest.raises(BadRequest):
            decode_pcm16(bad, RATE, 16_000)
    with pytest.raises(BadRequest, match="longer"):
        decode_pcm16(bytes(2 * RATE * 3), RATE, 16_000, max_seconds=2)


@pytest.mark.parametrize(
    ("source", "target"), [(24_000, 16_000), (8_000, 16_000), (44_100, 16_000), (48_000, 24_000), (16_000, 24_000)]
)
def test_resampling_keeps_pitch_and_removes_what_would_fold(source, target):
    t = np.arange(source) / source
    x = np.sin(2 * np.pi * 1000 * t).astype(np.float32)
    y = resample(x, source, target)
    assert len(y) == target
    want = np.sin(2 * np.pi * 1000 * np.arange(target) / target)
    assert np.abs(y - want)[200:-200].max() < 0.01
    if target < source:
        high = np.sin(2 * np.pi * (target * 0.5 + source * 0.5) / 2 * t).astype(np.float32)
        assert np.abs(resample(high, source, target))[200:-200].max() < 0.02


def test_formats_that_are_not_known_are_named():
    assert "not one of wav" in unavailable("aac") and all(len(v) == 3 for v in FORMATS.values())


@pytest.mark.parametrize(("source", "target"), [(24_000, 16_000), (16_000, 24_000), (44_100, 16_000), (16_000, 16_000)])
def test_a_stream_is_resampled_as_the_whole_is(source, target):
    rng = np.random.default_rng(1)
    x = rng.standard_normal(source // 2).astype(np.float32)
    stream, out, at = Resampler(source, target), [], 0
    while at < len(x):
        n = int(rng.integers(0, 3000))
        out.append(stream.feed(x[at : at + n]))
        at += n
    out.append(stream.feed(x[:0], last=True))
    np.testing.assert_allclose(np.concatenate(out), resample(x, source, target), atol=1e-5)
