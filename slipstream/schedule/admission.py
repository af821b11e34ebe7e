"""Admission: which waiting request gets a slot next. Only the leader decides this.

A request joins when its whole prompt has pages. While many long prompts are under way, only short ones join.
"""

from collections.abc import Iterator

from slipstream.log.replica import Replica
from slipstream.log.request import Request
from slipstream.log.tables import Hit
from slipstream.schedule.prefill_order import PendingPrefill, PrefillOrder
from slipstream.schedule.queue import Queue, Waiting

LOOKAHEAD_REQUESTS = 8  # waiting requests that are examined, the head included, to find one that fits
MAX_BYPASSES = 64  # how often the head may be passed before all other requests wait for it
SHORT_PROMPT_TOKENS = 1024  # a prompt with at most so many tokens to compute may pass long ones
MAX_LONG_PREFILLS = 8  # long prompts under way where a step has no room for all; short and long together: twice as many
MAX_HASHED_PAGES = 2048  # after so many pages, a plan hashes no further prompt: a burst must not stop the loop
MAX_RECHECKED_PROMPTS = 64  # waiting long prompts that one search checks: the cache may have made them short


class Admission:
    """Chooses waiting requests for the planner. Only tests and simulations change `short` and `max_long_prefills`."""

    def __init__(self, replica: Replica, queue: Queue):
        self.replica = replica
        self.queue = queue
        self.short = SHORT_PROMPT_TOKENS
        self.max_long_prefills = MAX_LONG_PREFILLS
        self._hashed = 0  # pages that this plan has hashed
        self._full_at: tuple[int, int] | None = None  # (available pages, free slots) when no request fitted

    def begin(self) -> None:
        """Starts a new plan."""
        self._hashed = 0

    def reopen(self) -> None:
        """Lets requests be examined again after a change other than more pages or slots."""
        self._full_at = None
        self.queue.recheck_all()

    @property
    def closed(self) -> bool:
        """Whether no request can join, as the last search found."""
        if not len(self.queue) or not self.replica.free_slots:
            return True
        at = self._full_at
        return at is not None and self.replica.cache.available <= at[0] and len(self.replica.free_slots) <= at[1]

    def push(self, request: Request, now: float) -> None:
        self.queue.push(request, now, request.prompt_len <= self.short)
        self.reopen()

    def choose(self, prefills: PrefillOrder, crowded: bool, before: tuple[float, int] | None) -> Waiting | None:
        """The first waiting request that fits; None where no request can join now.

        The head is the first examined request that lacks pages. Once it has been passed too often, no other request joins.
        `prefills`: the prompts under way. `crowded`: only short prompts may join. `before`: the place in the queue of a
        preempted request; only requests that stand before it may join.
        """
        head: Waiting | None = None
        only_pages_missing = not crowded  # whether every waiting request lacks only pages
        for waiting in self._candidates(crowded):
            if waiting.keys is None and self._hashed >= MAX_HASHED_PAGES:
                only_pages_missing = False
                break
            if (before is not None and waiting.arrival > before) or self._computed_soon(waiting, prefills):
                only_pages_missing = False
                continue
            if self.fits(waiting.request, waiting.request.prompt_len, self.keys(waiting)):
                if head is not None:
                    head.passed += 1
                return waiting
            head = head or waiting
            if head.passed >= MAX_BYPASSES:
                break
        if only_pages_missing and not self.queue.unchecked:
            self._full_at = (self.replica.cache.available, len(self.replica.free_slots))
        return None

    def _candidates(self, crowded: bool) -> Iterator[Waiting]:
        """The requests to examine: the first ones in the queue, then short prompts as urgent as the first request.

        Where the device is `crowded`, only the short prompts are examined. Before them, some long prompts are checked, which
        may have become short, and so are short ones, which may have become long. This moves requests within the queue, so
        the caller must not remove one while it iterates.
        """
        queue = self.queue
        first = queue.first(LOOKAHEAD_REQUESTS)
        most = first[0].request.priority
        if not crowded:
            yield from first
        for _ in range(MAX_RECHECKED_PROMPTS):
            long = queue.next_long() if queue.unchecked and self._hashed < MAX_HASHED_PAGES else None
            if long is None:
                break
            queue.set_short(long, self._is_short(long))
        short = queue.first(LOOKAHEAD_REQUESTS, short=True)
        while not all([self._still_short(waiting) for waiting in short]):
            short = queue.first(LOOKAHEAD_REQUESTS, short=True)
        seen = [] if crowded else [*first]
        # `first` is here for its short prompts: more urgent ones may have kept them out of `short`
        for waiting in (*first, *short):
            if waiting not in seen and self._still_short(waiting) and waiting.request.priority <= most:
                seen.append(waiting)
                yield waiting

    def _still_short(self, waiting: Waiting) -> bool:
        if waiting.short and not self._is_short(waiting):
            self.queue.set_short(waiting, False)  # its pages were evicted
        return waiting.short

    def _is_short(self, waiting: Waiting) -> bool:
        """Whether at most `short` tokens of the prompt are not in the cache, as in the next turn of a chat.

        The cache then has the page before these tokens and all earlier pages.
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
        """The cached pages that a request may use for its first `known` tokens. One token is always computed."""
        most = (known - 1) // self.replica.limits.page_size if request.sampling.prompt_logprobs < 0 else 0
        return self.replica.cache.find(keys[:most])

    def _computed_soon(self, waiting: Waiting, prefills: PrefillOrder) -> bool:
        """Whether another request computes pages that this prompt lacks, before this prompt's turn would come.

        The prompt then waits for the last of these pages. Later calls cost a few look-ups.
        """
        replica, request = self.replica, waiting.request
        if waiting.awaits is not None:
            id, key, left = waiting.awaits
            if not replica.cache.known(key) and prefills.goes_before(id, pending_prefill(waiting, left)):
                return True
            waiting.awaits = None
        if not replica.prefilling or (replica.limits.snapshot_tokens and not replica.limits.snapshots):
            return False
        page_size = replica.limits.page_size
        keys = self.keys(waiting)[: (request.prompt_len - 1) // page_size]
        found = self._cached(request, request.prompt_len, keys).columns
        if found == len(keys) or request.sampling.prompt_logprobs >= 0:
            return False
        every = replica.limits.snapshot_tokens // page_size or 1  # pages to the next place where a hit can end
        for slot in replica.prefilling:
            own = replica.keys[slot]
            most = min(int(replica.bound[slot]) // page_size, len(own), len(keys))
            usable = int(replica.computed[slot]) // page_size // every * every
            if usable <= found < most and own[found] == keys[found]:
                common = next((i for i in range(found, most) if own[i] != keys[i]), most) // every * every
                # the common pages count twice: if this one went first, both would compute them
                left = request.prompt_len + (common - 2 * found) * page_size
                if common > found and prefills.goes_before(id := int(replica.ids[slot]), pending_prefill(waiting, left)):
                    waiting.awaits = (id, keys[common - 1], left)
                    return True
        return False

    def fits(self, request: Request, known: int, keys: list[bytes]) -> bool:
        """Whether there are pages for `known` tokens now, and some left for the decoding rows to grow into."""
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
        """A hashable value of all that the next search depends on, the queue included."""
        return self.queue.state(), self._full_at


def pending_prefill(waiting: Waiting, left: int) -> PendingPrefill:
    """A waiting prompt with `left` tokens to compute, in the form of a prompt under way, to compare it with those."""
    return PendingPrefill(-1, waiting.request.id, left, waiting.arrival, waiting.request.priority)
