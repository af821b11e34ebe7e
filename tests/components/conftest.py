import pathlib

import pytest

from slipstream.weights.packages import PACKAGES
from slipstream.weights.pull import resolve_package

DATA = pathlib.Path(__file__).parents[1] / "data"


@pytest.fixture(scope="session")
def whisper_folder():
    return resolve_package("whisper-tiny.en", PACKAGES["whisper-tiny.en"])


@pytest.fixture(scope="session")
def question():
    """The spoken question, float32 at 16 kHz."""
    from slipstream.serve.audio.audio_file import decode

    return decode((DATA / "question.wav").read_bytes(), 16_000, max_seconds=60)
