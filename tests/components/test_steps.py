"""The voice's components as the work drives them, without a server."""

import itertools

import numpy as np
import pytest

from slipstream.bench.load.spoken import SENTENCES, words
from slipstream.components.speech import SpeechStep
from slipstream.components.voice import VOICE, PromptStep
from slipstream.components.whisper_steps import DecoderStep, EncoderStep, silent, windows
from slipstream.components.whisper_text import Ids, Window
from slipstream.graph.messages import Failed, Feed, Open, Piece, Took
from slipstream.graph.work import Work
from slipstream.serve.audio.audio_file import Resampler

RATE = 16_000


@pytest.fixture(scope="module")
def steps(whisper_folder):
    return {"encoder": EncoderStep(str(whisper_folder)), "decoder": DecoderStep(str(whisper_folder))}


def hear(steps, *audios, **params):
    """Transcribes all of them together; (text, segments) of each, or the failure."""
    work = Work(VOICE, ("encoder", "decoder"), steps)
    for id, audio in enumerate(audios):
        work.on(Open(id, "transcribe", ("heard", "segments"), params))
        work.on(Feed(id, 0, audio, True))
        work.on(Took(id, 3, 1000))  # a client that reads
    while taken := work.take():
        name, rows = taken
        work.settle(rows, work.run(name, rows))
    out = []
    for id in range(len(audios)):
        mine = [e for e in work.effects if e.id == id]
        failed = [e for e in mine if isinstance(e, Failed)]
        if failed:
            out.append(failed[0])
            continue
        text = "".join(e.value for e in mine if isinstance(e, Piece) and isinstance(e.value, str))
        out.append((text.strip(), next((e.value for e in mine if isinstance(e, Piece) and isinstance(e.value, list)), [])))
    return out


def test_rows_that_decode_together_hear_what_they_hear_alone(steps, question):
    ((alone, segments),) = hear(steps, question)
    assert words(alone) == words("What is the capital of France?") and segments[0]["text"].strip() == alone
    louder = question * 0.5
    assert [t for t, _ in hear(steps, question, louder, question)] == [alone] * 3
    ((plain, no_times),) = hear(steps, question, timestamps=False)
    assert plain == alone and len(no_times) == 1


def test_a_short_window_is_heard_as_a_whole_one(steps, question, whisper_folder):
    short = {**steps, "encoder": EncoderStep(str(whisper_folder), margin=4.0)}
    ((text, segments),) = hear(short, question)
    assert words(text) == words("What is the capital of France?") and segments[0]["end"] <= 2.16


def test_silence_is_no_speech_and_unknown_languages_are_refused(steps, question):
    assert hear(steps, np.zeros(RATE, np.float32)) == [("", [])]
    (failed,) = hear(steps, question, language="de")
    assert failed.component == "decoder" and failed.status == 400 and "English only" in failed.message


def test_a_prompt_comes_before_what_is_heard(steps, question):
    """It shows how names are spelled."""
    ((text, _),) = hear(steps, question, prompt="what is the kapital of frantz")
    assert "frantz" in text.lower()


@pytest.fixture(scope="module")
def talk():
    """Eight spoken sentences with pauses between them, about 36 s: float32 at 16 kHz, and [start, stop) seconds of each."""
    voice, pieces, times, at = SpeechStep(), [], [], 0.0
    for sentence in SENTENCES[:8]:
        said = voice.speak(sentence, {"speed": 0.8})
        times.append((at, at + len(said) / 24_000))
        at = times[-1][1] + 0.9
        pieces += [said, np.zeros(round(0.9 * 24_000), np.int16)]
    samples = np.concatenate(pieces).astype(np.float32) / 32768
    return Resampler(24_000, RATE).feed(samples, last=True), times


def test_every_sentence_has_its_own_times_in_every_window(steps, talk):
    audio, times = talk
    ((_, segments),) = hear(steps, audio)
    assert [words(s["text"]) for s in segments] == [words(s) for s in SENTENCES[:8]]
    assert all(
        abs(s["start"] - start) < 1.5 and abs(s["end"] - stop) < 1.5 for s, (start, stop) in zip(segments, times, strict=True)
    )
    assert all(0.3 < s["compression_ratio"] < 2.4 for s in segments)


def test_words_have_their_own_times(steps, question):
    ((text, segments),) = hear(steps, question, words=True)
    found = [w for s in segments for w in s["words"]]
    assert [w["word"] for w in found] == text.rstrip("?").split()
    assert all(a["start"] <= a["end"] <= b["start"] + 0.01 for a, b in itertools.pairwise(found)), "one after the other"
    loud = np.abs(question.reshape(-1, 160)).max(axis=1) > 0.05
    first, last = np.flatnonzero(loud)[[0, -1]] * 0.01
    assert abs(found[0]["start"] - first) < 0.5 and abs(found[-1]["end"] - last) < 0.5
    assert abs(found[2]["start"] - 0.64) < 0.2 and abs(found[5]["start"] - 1.30) < 0.2, "the, France: read off the waveform"


def test_sentences_have_their_own_times_after_a_prompt_of_plain_text(steps, talk):
    audio, times = talk
    ((_, segments),) = hear(steps, audio[: int(RATE * times[2][1])], prompt="Kubernetes, SmolLM2. The lazy dog!")
    assert [words(s["text"]) for s in segments] == [words(s) for s in SENTENCES[:3]]


def test_noise_is_no_speech(steps):
    noise = np.random.default_rng(0).standard_normal(RATE * 30).astype(np.float32)
    assert hear(steps, noise * 1e-3) == [("", [])]


def test_windows_cover_the_audio_and_are_cut_where_it_is_quiet():
    rng = np.random.default_rng(0)
    audio = rng.standard_normal(RATE * 70).astype(np.float32) * 0.1
    audio[RATE * 27 : RATE * 28] = 0
    spans = windows(audio)
    assert spans[0][0] == 0 and spans[-1][1] == len(audio) and all(a[1] == b[0] for a, b in zip(spans, spans[1:], strict=False))
    assert all(b - a <= 30 * RATE for a, b in spans) and 27 * RATE <= spans[0][1] <= 28 * RATE
    assert silent(audio[RATE * 27 : RATE * 28]) and not silent(audio[:RATE])


IDS = Ids(end=100, start=101, previous=102, no_speech=103, no_timestamps=104, transcribe=105, languages={})


def window(tokens=(), **kw):
    none = np.array([], np.int64)
    w = Window(IDS, 10.0, 40.0, [101], kw.get("timestamps", True), 0.0, none, none)
    w.tokens = list(tokens)
    return w


def choose(w, **logits):
    x = np.full(105 + 1501, -10.0, np.float32)
    for token, value in logits.items():
        x[int(token[1:])] = value
    return w.choose(x)


def test_timestamps_come_in_pairs_never_decrease_and_win_together():
    assert choose(window(), t5=9, t130=5, t200=8) == 130, "the first is a time of at most one second"
    assert choose(window([105, 7]), t5=9, t120=2) == 5
    assert choose(window([105, 7, 130]), t5=9, t120=8, t131=3) == 131, "a single time is followed by its pair, or the end"
    assert choose(window([105, 7, 130, 130]), t5=1, t140=9) == 5, "a pair is followed by text"
    assert choose(window([105, 7, 130, 130, 8]), t5=1, t120=9, t150=0.5, t151=0.5) == 150, "times together outweigh the text"
    assert choose(window(timestamps=False), t5=1, t120=9) == 5


@pytest.mark.parametrize(
    ("text", "no_speech", "silence"),
    [
        (" . . . . . . .", 0.9, True),
        (" you you you you you you you you you you you you you you you you", 0.9, True),
        (" Thank you very much.", 0.9, False),
        (" . . . . . . .", 0.1, False),
    ],
)
def test_what_may_be_no_speech_and_has_no_words_or_repeats_itself_is_silence(text, no_speech, silence):
    w = window([105, 7])
    w.no_speech = no_speech
    assert w.is_silence(text) is silence


def test_segments_have_the_times_of_the_whole_audio():
    w = window([105, 7, 8, 155, 155, 9, 255, 255, 6])
    assert [(s["start"], s["end"], s["tokens"]) for s in w.segments(lambda t: " x" * len(t))] == [
        (10.0, 11.0, [7, 8]),
        (11.0, 13.0, [9]),
        (13.0, 40.0, [6]),
    ]


def test_what_was_heard_takes_its_place_in_the_conversation():
    step = PromptStep()
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ["Listen:", None]}]
    assert step._row("hello", messages).outputs["messages"][1]["content"] == "Listen:\nhello"
    assert step._row("hello", None).outputs["messages"] == [{"role": "user", "content": "hello"}]
    assert step._row("", messages).refused
