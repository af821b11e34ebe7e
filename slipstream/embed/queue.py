"""Which texts are computed together. Pure: no I/O, no torch."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from slipstream.embed.messages import Encode


class Text(NamedTuple):
    """One text of a request."""

    key: Hashable  # of its request
    at: int  # its place in the request
    ids: np.ndarray  # int32
    first: int  # ids of the first part of a pair; -1 for a text alone


@dataclass
class Waiting:
    """A request that is not complete. `texts` has the longest last, so that neighbours are of similar length."""

    texts: list[Text]
    results: np.ndarray  # float32 [texts, width]
    missing: int
    bytes: int
    owner: Any = field(default=None)  # for its answer


class Queue:
    """Requests in turns: each batch begins with another request, so a large one does not keep small ones waiting.

    A batch has at most `max_tokens` ids, padding included, but always one text, and at most `max_texts` texts.
    """

    def __init__(self, width: int, max_tokens: int, max_texts: int):
        self._width, self._max_tokens, self._max_texts = width, max_tokens, max_texts
        self._requests: OrderedDict[Hashable, Waiting] = OrderedDict()
        self.texts = 0  # that wait, in all requests
        self.bytes = 0  # of all requests

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, key: Hashable, message: Encode, owner: Any = None) -> None:
        ids = [np.frombuffer(row, "<i4") for row in message.rows]
        firsts = message.firsts or (-1,) * len(ids)
        texts = [Text(key, at, row, first) for at, (row, first) in enumerate(zip(ids, firsts, strict=True))]
        texts.sort(key=lambda text: len(text.ids))
        size = 4 * sum(map(len, ids)) + 4 * self._width * len(ids)
        results = np.zeros((len(ids), self._width), np.float32)
        self._requests[key] = Waiting(texts, results, len(ids), size, owner)
        self.texts += len(ids)
        self.bytes += size

    def drop(self, key: Hashable) -> None:
        """Forgets a request; its texts that are being computed are computed for nothing."""
        waiting = self._requests.pop(key, None)
        if waiting is not None:
            self.texts -= len(waiting.texts)
            self.bytes -= waiting.bytes

    def drop_of(self, owner: Any) -> None:
        for key in [key for key, waiting in self._requests.items() if waiting.owner is owner]:
            self.drop(key)

    def take(self) -> list[Text]:
        """The next batch; [] when nothing waits."""
        batch: list[Text] = []
        longest = 0
        for waiting in list(self._requests.values()):
            while waiting.texts:
                longest_then = max(longest, len(waiting.texts[-1].ids))
                full = (len(batch) + 1) * longest_then > self._max_tokens or len(batch) == self._max_texts
                if batch and full:
                    break
                batch.append(waiting.texts.pop())
                longest = longest_then
        for key in {text.key: None for text in batch[:1]}:
            self._requests.move_to_end(key)
        self.texts -= len(batch)
        return batch

    def settle(self, batch: list[Text], results: np.ndarray) -> Iterator[tuple[Hashable, Waiting]]:
        """Stores a batch's rows; gives the requests that are complete now, which are then forgotten."""
        for text, row in zip(batch, results, strict=True):
            waiting = self._requests.get(text.key)
            if waiting is None:
                continue
            waiting.results[text.at] = row
            waiting.missing -= 1
            if not waiting.missing:
                self.drop(text.key)
                yield text.key, waiting

    def owner_of(self, key: Hashable) -> Any:
        """The owner of a request that is not complete, or None."""
        waiting = self._requests.get(key)
        return None if waiting is None else waiting.owner
