"""A rank's machine by itself: what it makes of a message that is missing or comes twice."""

import numpy as np
import pytest

from slipstream.errors import Diverged
from slipstream.log.caches import one_table
from slipstream.log.entries import Entry, Forget, RequestBody
from slipstream.log.replica import Replica
from slipstream.log.request import Request, SamplingParams
from slipstream.rank.events import Prepare
from slipstream.rank.loop import Rank

BOUND = RequestBody(Request(7, np.arange(4, dtype="<i4").tobytes(), 8, SamplingParams(), grammar=b"a"))


@pytest.fixture
def follower() -> Rank:
    rank = Rank(3, Replica(one_table(pages=8, slots=2, max_len=32, page_size=4)))
    assert list(rank.on(Entry(0, -1)))
    return rank


@pytest.mark.parametrize("seq", [0, 2])
def test_an_entry_that_is_missing_or_comes_twice_is_named(follower: Rank, seq: int):
    with pytest.raises(Diverged, match=f"rank 3 was sent entry {seq} where 1 was due") as caught:
        list(follower.on(Entry(seq, -1)))
    assert caught.value.args[1:] == (3, seq)
    assert not follower.entries and follower.applied == 0


@pytest.mark.parametrize("lost", [BOUND, Forget(7)], ids=["body", "forget"])
def test_a_lost_body_is_noticed_at_the_next_entry_though_no_entry_admits_it(follower: Rank, lost):
    """Its request would be prepared for ever: the leader waits until every rank has compiled the grammar."""
    messages = [BOUND, Forget(7)]
    messages.remove(lost)
    for message in messages:
        list(follower.on(message))
    with pytest.raises(Diverged, match="2 bodies and forgets were sent before entry 1; rank 3 received 1 of them"):
        list(follower.on(Entry(1, -1, side_messages=2)))


def test_what_came_is_counted_anew_for_each_entry(follower: Rank):
    assert [type(e) for e in follower.on(BOUND)] == [Prepare]
    list(follower.on(Entry(1, -1, side_messages=1)))
    list(follower.on(Entry(2, -1)))
    assert follower.applied == 2
