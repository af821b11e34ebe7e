import pytest

from slipstream.components.speech import MAX_SPEED, RATE, SpeechStep, check_sayable, spell_long_numbers
from slipstream.errors import BadRequest


@pytest.fixture(scope="module")
def speech():
    return SpeechStep()


@pytest.mark.parametrize("text", ["1" * 240, "1,234" * 40, "£" + "9" * 50])
def test_numbers_without_words_are_spelled_digit_by_digit(speech, text):
    """The lexicon has no word for 10**36."""
    audio = speech.speak(text[:60], {"speed": MAX_SPEED})
    assert audio is not None and len(audio) > 5 * RATE


def test_only_long_numbers_are_spelled():
    assert spell_long_numbers("123456789012345 apples, 3.14 and 1,000") == "123456789012345 apples, 3.14 and 1,000"
    assert spell_long_numbers("No. 12345678901234567.5") == "No. 1 2 3 4 5 6 7 8 9 0, 1 2 3 4 5 6 7.5"


def test_a_text_that_the_voice_fails_at_ends_its_own_request_alone(speech, monkeypatch):
    plain = speech.voice.phonemize
    monkeypatch.setattr(speech.voice, "phonemize", lambda text: plain(text) if text == "Yes." else [][0])
    failed, good = speech._row("Odd.", {}), speech._row("Yes.", {})
    assert failed.refused and "'Odd.'" in failed.error and good.error is None and len(good.outputs["audio"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("日本語", "日本語"),
        ("Say привет, please", "привет,"),
        ("مرحبا", "مرحبا"),
        ("…!", "must hold a word"),
        ("🙂", "must hold a word"),
        (" ", "must hold a word"),
    ],
)
def test_what_the_voice_cannot_say_is_refused_by_name(text, says):
    with pytest.raises(BadRequest, match=says) as e:
        check_sayable(text, "input")
    assert e.value.param == "input"


def test_english_with_names_signs_and_formulas_can_be_said():
    check_sayable("Señor Müller's café, Łódź & ﬁne: π ≈ 3.14, 5 µm, x² 🙂 — ½ ① “quoted”… 25 °C", "input")
