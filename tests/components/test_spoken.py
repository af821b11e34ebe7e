import pytest

from slipstream.bench.load.spoken import SENTENCES, distance, error_rate, in_words, words


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("It's 21 degrees.", "its twenty one degrees"),
        ("1,250 people paid $9.99", "one thousand two hundred fifty people paid dollars nine point nine nine"),
        ("On the 3rd, 20th and 112th", "on the third twentieth and one hundred twelfth"),
        ("well-known; 100%", "well known one hundred percent"),
        ("007", "seven"),
    ],
)
def test_numbers_are_written_out_and_marks_removed(text, want):
    assert " ".join(words(text)) == want


def test_numbers_in_words():
    assert in_words(0) == "zero" and in_words(1_000_000) == "one million" and in_words(40_013) == "forty thousand thirteen"


def test_the_error_rate_counts_words_to_change():
    assert distance(["a", "b", "c"], ["a", "x", "c", "d"]) == 2 and distance([], ["a"]) == 1
    assert error_rate([("One two three four.", "one two 3 for"), ("yes", "yes")]) == 1 / 5
    assert len(SENTENCES) == len(set(SENTENCES)) == 50
