import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.serve.audio.vad import Detector, Turns

RATE = 24_000


def noise(seconds, level, seed=0):
    return (np.random.default_rng(seed).standard_normal(int(seconds * RATE)) * level).astype(np.float32)


def events(samples, piece=2400, turns=Turns()):  # noqa: B008
    detector, out = Detector(RATE, turns), []
    for i in range(0, len(samples), piece):
        out += detector.feed(samples[i : i + piece])
    return [(what, at / RATE) for what, at in out]


def test_a_turn_begins_soon_and_ends_after_silence():
    (a, begun), (b, ended) = events(np.concatenate([noise(1, 0.001), noise(1.5, 0.2), noise(1, 0.001)]))
    assert (a, b) == ("started", "stopped") and 1.0 < begun <= 1.2 and 3.0 <= ended <= 3.1


def test_pauses_shorter_than_the_silence_asked_for_do_not_end_a_turn():
    parts = [noise(0.5, 0.2), noise(0.3, 0.0), noise(0.5, 0.2), noise(0.8, 0.0)]
    assert [e for e, _ in events(np.concatenate(parts))] == ["started", "stopped"]
    short = Turns(silence_duration_ms=200)
    assert len(events(np.concatenate(parts), turns=short)) == 4


def test_steady_noise_and_clicks_are_no_speech():
    clicks = np.zeros(RATE, np.float32)
    clicks[::4000] = 0.9
    assert events(noise(3, 0.01)) == [] and events(clicks) == []


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=40))
@settings(max_examples=20, deadline=None)
def test_what_is_found_does_not_depend_on_how_the_samples_came(sizes):
    samples = np.concatenate([noise(0.2, 0.0), noise(0.6, 0.3), noise(0.7, 0.0)])
    detector, out, at = Detector(RATE, Turns()), [], 0
    for size in [*sizes, len(samples)]:
        out += detector.feed(samples[at : at + size])
        at += size
    assert [e for e, _ in out] == [e for e, _ in events(samples)]
