"""Messages survive a stream however it is cut, and one that is too long is refused before it is waited for."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.system.framing import BadFrame, Frames, frame, read_frame, write_frame


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 50))
def test_messages_come_whole_and_in_order_however_the_stream_is_cut(bodies, cut):
    stream = b"".join(map(frame, bodies))
    frames, got = Frames(), []
    for at in range(0, len(stream), cut):
        got += [bytes(body) for body in frames.feed(stream[at : at + cut])]
    assert got == bodies


def test_a_message_that_is_too_long_is_refused_by_its_length_alone():
    with pytest.raises(BadFrame, match="a message of 11 bytes; at most 10"):
        list(Frames(most=10).feed(frame(b"x" * 11)[:4]))


def test_a_pipe_gives_messages_and_then_its_end():
    pipe = io.BytesIO()
    write_frame(pipe, b"one")
    write_frame(pipe, b"")
    pipe.seek(0)
    assert [read_frame(pipe) for _ in range(3)] == [b"one", b"", None]
