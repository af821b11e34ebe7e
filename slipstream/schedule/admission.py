"""Who joins: which waiting request gets a slot next. The leader's alone.

A request joins when its whole prompt has pages. Where the device is behind with long prompts, only short ones join.
"""

from collections.abc import Iterator

from slipstream.log.replica import Replica
from slipstream.log.request import Request
from slipstream.log.tables import Hit
from slipstream.schedule.prefill_order import PendingPrefill, PrefillOrder
from slipstream.schedule.queue import Queue, Waiting

LOOKAHEAD = 8  # waiting requests that are looked at, the head included, for one that fits
BYPASSES = 64  # how often a head may be passed before everybody waits for it
SHORT = 1024  # tokens to compute of a prompt that need not wait for long ones
LONG_UNDER_WAY = 8  # long prompts that are computed at a time, where a step has no room for all; with short ones twice as many
HASHED = 2048  # pages of prompts after which a plan hashes no other prompt: a burst must not stop the loop
ASKED = 64  # waiting long prompts that a look asks whether the cache has made them short


class Admission:
    """Looks at the queue for the planner. `short` and `long_under_way` are SHORT and LONG_UNDER_WAY but in tests."""

    def __init__(self, replica: Replica, queue: Queue):
        self.replica = replica
        self.queue = queue
        self.short = SHORT
        self.long_under_way = LONG_UNDER_WAY
        self._hashed = 0  # pages, by this plan
        self._full_at: tuple[int, int] | None = None  # (available pages, free slots) when all lacked pages

    def begin(self) -> None:
        """A new plan."""
        self._hashed = 0

    def reopen(self) -> None:
        """Something has changed for those that could not be admitted, beside more pages or slots."""
        self._full_at = None
        self.queue.ask_all()

    @property
    def closed(self) -> bool:
        """Whether nobody can join, as was found before."""
        if not len(self.queue) or not self.replica.free_slots:
            return True
        at = self._full_at
        return at is not None and self.replica.cache.available <= at[0] and len(self.replica.free_slots) <= at[1]

    def push(self, request: Request, now: float) -> None:
        self.queue.push(request, now, request.prompt_len <= self.short)
        self.reopen()

    def choose(self, prefills: PrefillOrder, crowded: bool, before: tuple[float, int] | None) -> Waiting | None:
        """The first waiting request that fits, unless the head has been passed too often. None: nothing can join now.

        The head is here the first that was looked at and lacks pages. `prefills`: the prompts under way. `crowded`: only short
        prompts may join. `before`: only those that come before this place in the queue, where a preempted request stands.
        """
        head: Waiting | None = None
        for_pages = not crowded  # whether everybody waits for pages alone
        for waiting in self._candidates(crowded):
            if waiting.keys is None and self._hashed >= HASHED:
                for_pages = False
                break
            if (before is not None and waiting.arrival > before) or self._computed_soon(waiting, prefills):
                for_pages = False
                continue
            if self.fits(waiting.request, waiting.request.prompt_len, self.keys(waiting)):
                if head is not None:
                    head.passed += 1
                return waiting
            head = head or waiting
            if head.passed >= BYPASSES:
                break
        if for_pages and not self.queue.unasked:
            self._full_at = (self.replica.cache.available, len(self.replica.free_slots))
        return None

    def _candidates(self, crowded: bool) -> Iterator[Waiting]:
        """Who is looked at: unless `crowded` the first in the queue; then, or only, short ones as urgent as the very first.

        Before these are looked at, some long prompts are asked whether they have become short, and short ones whether they
        still are. The queue may change between two of them, so nobody is to be removed while it runs.
        """
        queue = self.queue
        first = queue.first(LOOKAHEAD)
        most = first[0].request.priority
        if not crowded:
            yield from first
        for _ in range(ASKED):
            asked = queue.next_long() if queue.unasked and self._hashed < HASHED else None
            if asked is None:
                break
            queue.set_short(asked, self._is_short(asked))
        short = queue.first(LOOKAHEAD, short=True)
        while not all([self._still_short(waiting) for waiting in short]):
            short = queue.first(LOOKAHEAD, short=True)
        seen = [] if crowded else [*first]
        for waiting in (*first, *short):  # of the first ones those that are short: more urgent ones may hide them among these
            if waiting not in seen and self._still_short(waiting) and waiting.request.priority <= most:
                seen.append(waiting)
                yield waiting

    def _still_short(self, waiting: Waiting) -> bool:
        if waiting.short and not self._is_short(waiting):
            self.queue.set_short(waiting, False)  # its pages were evicted
        return waiting.short

    def _is_short(self, waiting: Waiting) -> bool:
        """Whether at most `short` tokens of the prompt have to be computed, as of the next turn of a chat.

        The page before these is in the cache then, and all before that one.
        """
        request = waiting.request
        if request.prompt_len <= self.short:
            return True
        page = -(-(request.prompt_len - self.short) // self.replica.limits.page_size) - 1
        keys = self.keys(waiting) if request.sampling.prompt_logprobs < 0 else []
        cache = self.replica.cache
        return page < len(keys) and cache.known(keys[page]) and self._cached(request, request.prompt_len, keys).columns > page

    def keys(self, waiting: Waiting) -> list[bytes]:
        """The content keys of its prompt's pages, hashed when it is first looked at."""
        if waiting.keys is None:
            waiting.keys = self.replica.prompt_keys(waiting.request)
            self._hashed += len(waiting.keys)
        return waiting.keys

    def _cached(self, request: Request, known: int, keys: list[bytes]) -> Hit:
        """What it may use of the cache for its first `known` tokens, of which one is always computed."""
        most = (known - 1) // self.replica.limits.page_size if request.sampling.prompt_logprobs < 0 else 0
        return self.replica.cache.find(keys[:most])

    def _computed_soon(self, waiting: Waiting, prefills: PrefillOrder) -> bool:
        """Whether pages that this prompt misses are computed for another one, before this one's turn would come.

        It waits for the last of them. Once found, asking again costs a few look-ups.
        """
        replica, request = self.replica, waiting.request
        if waiting.awaits is not None:
            id, key, left = waiting.awaits
            if not replica.cache.known(key) and prefills.goes_before(id, pending_prefill(waiting, left)):
                return True
            waiting.awaits = None
        if not replica.prefilling:
            return False
        page_size = replica.limits.page_size
        keys = self.keys(waiting)[: (request.prompt_len - 1) // page_size]
        found = self._cached(request, request.prompt_len, keys).columns
        if found == len(keys) or request.sampling.prompt_logprobs >= 0:
            return False
        for slot in replica.prefilling:
            own = replica.keys[slot]
            most = min(int(replica.bound[slot]) // page_size, len(own), len(keys))
            if int(replica.computed[slot]) // page_size <= found < most and own[found] == keys[found]:
                common = next((i for i in range(found, most) if own[i] != keys[i]), most)
                # what both have counts twice: were this one to go first, both would compute it
                left = request.prompt_len + (common - 2 * found) * page_size
                if prefills.goes_before(id := int(replica.ids[slot]), pending_prefill(waiting, left)):
                    waiting.awaits = (id, keys[common - 1], left)
                    return True
        return False

    def fits(self, request: Request, known: int, keys: list[bytes]) -> bool:
        """Whether `known` tokens get their pages now, and decoding rows keep some room to grow."""
        replica = self.replica
        cache, columns = replica.cache, replica.limits.pages_of(known)
        lacking = cache.lacking(self._cached(request, known, keys), columns)
        running = len(replica.decoding) + len(replica.prefilling)
        return all(
            need + (min(running, t.pages.total // 50 + 1) if running else 0) <= t.pages.available
            for need, t in zip(lacking, cache.tables, strict=True)
        )

    def copy(self, replica: Replica, queue: Queue) -> "Admission":
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.replica, other.queue = replica, queue
        return other

    def state(self) -> tuple[object, ...]:
        """A hashable value of what the next look depends on, the queue included."""
        return self.queue.state(), self._full_at


def pending_prefill(waiting: Waiting, left: int) -> PendingPrefill:
    """A waiting prompt as one of those under way, with `left` tokens to compute."""
    return PendingPrefill(-1, waiting.request.id, left, waiting.arrival, waiting.request.priority)
