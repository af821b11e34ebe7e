"""Batches of texts: turns between requests, bounds by ids and texts, and requests that leave."""

import numpy as np

from slipstream.embed.messages import Encode
from slipstream.embed.queue import Queue


def asked(id: int, *lengths: int) -> Encode:
    return Encode(id, tuple(np.full(n, id, np.int32).tobytes() for n in lengths))


def taken(queue: Queue) -> list[tuple]:
    return [(text.key, len(text.ids)) for text in queue.take()]


def test_a_batch_counts_its_padding_and_always_has_one_text():
    queue = Queue(width=1, max_tokens=20, max_texts=8)
    queue.add(1, asked(1, 3, 9, 10, 2, 50))
    assert taken(queue) == [(1, 50)]
    assert taken(queue) == [(1, 10), (1, 9)]
    assert taken(queue) == [(1, 3), (1, 2)]
    assert taken(queue) == [] and queue.texts == 0


def test_a_batch_has_at_most_so_many_texts():
    queue = Queue(width=1, max_tokens=1000, max_texts=3)
    queue.add(1, asked(1, *[1] * 5))
    assert [len(taken(queue)) for _ in range(3)] == [3, 2, 0]


def test_a_large_request_does_not_keep_a_small_one_waiting():
    queue = Queue(width=1, max_tokens=10, max_texts=8)
    queue.add(1, asked(1, *[10] * 100))
    assert taken(queue) == [(1, 10)]
    queue.add(2, asked(2, 4))
    assert [(2, 4)] in (taken(queue), taken(queue))


def test_rows_come_back_in_the_order_of_the_request():
    queue = Queue(width=2, max_tokens=10, max_texts=8)
    queue.add(1, asked(1, 5, 9, 2), owner="front")
    done = []
    while batch := queue.take():
        done += queue.settle(batch, np.array([[len(text.ids), text.at] for text in batch], np.float32))
    ((key, waiting),) = done
    assert (key, waiting.owner, waiting.results.tolist()) == (1, "front", [[5, 0], [9, 1], [2, 2]])
    assert not len(queue) and queue.bytes == 0


def test_a_request_that_has_left_is_neither_computed_nor_answered():
    queue = Queue(width=1, max_tokens=10, max_texts=8)
    queue.add(1, asked(1, 10, 10), owner="a")
    queue.add(2, asked(2, 3), owner="b")
    batch = queue.take()
    queue.drop(1)
    assert list(queue.settle(batch, np.zeros((1, 1)))) == []
    assert taken(queue) == [(2, 3)]
    queue.drop_of("b")
    assert not len(queue) and queue.texts == queue.bytes == 0
