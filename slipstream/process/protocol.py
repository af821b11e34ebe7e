"""Messages between processes, as msgpack: a front end's with a group's leader first, then the supervisor's with its children.

A front end and a leader share one stream socket, with a length before each message. The front end is the only sender of
terminal events to clients; it must end each request exactly once, by `Finished`, by `Refused`, or by itself when the
connection ends.
"""

from collections.abc import Iterator

import msgspec
from msgspec import structs

from slipstream.log.caches import Limits
from slipstream.log.request import Request, TokenLogprobs


class Submit(msgspec.Struct, frozen=True, tag=True):
    """A new request. The leader answers with tokens and one `Finished`, or with one `Refused`, for each of its choices."""

    request: Request
    more: tuple[int, ...] = ()  # ids of further choices: the same request with the next choice numbers

    def requests(self) -> Iterator[Request]:
        """A request for each choice. They share what is large: prompt, bias and grammar."""
        request = self.request
        yield request
        for k, id in enumerate(self.more, request.sampling.choice + 1):
            yield structs.replace(request, id=id, sampling=structs.replace(request.sampling, choice=k))


class Abort(msgspec.Struct, frozen=True, tag=True):
    """The client has left, or a stop string was found.

    `kept` is the count of generated tokens that remain part of the answer; pages beyond them are not cached. -1 keeps all.
    The leader still answers with `Finished(reason="abort")`.
    """

    id: int
    kept: int = -1


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """Committed tokens of one settle: column i is (ids[i], tokens[i]). A request may have several columns, in order."""

    ids: bytes  # int64 little-endian request ids
    tokens: bytes  # int32 little-endian token ids
    logprobs: dict[int, TokenLogprobs] | None = None  # by column
    drafts: dict[int, tuple[int, int]] | None = None  # by request id: drafts that were verified, and accepted of them


class Started(msgspec.Struct, frozen=True, tag=True):
    """The request was admitted. `cached_tokens` of its prompt came from the prefix cache."""

    id: int
    cached_tokens: int


class PromptLogprobs(msgspec.Struct, frozen=True, tag=True):
    """Log probabilities of prompt positions [start, start + len(rows)), sent before the first token. Position 0 has none."""

    id: int
    start: int
    rows: list[TokenLogprobs]


class Finished(msgspec.Struct, frozen=True, tag=True):
    """All ranks have dropped the request.

    reason: "stop" (an end or stop token; it is the last token sent), "length", "abort", "error".
    """

    id: int
    reason: str
    error: str = ""  # for reason "error"


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The request never entered the log. `status` is an HTTP status: 400 can never fit, 429 queue full, 503 draining."""

    id: int
    status: int
    message: str
    param: str | None = None


class Load(msgspec.Struct, frozen=True, tag=True):
    """Gauges and counters of the group, sent when they change and at most every 100 ms (and at once when it falls idle)."""

    running: int
    waiting: int
    pages_used: int  # referenced by requests (cached pages without a reference are not counted)
    pages_total: int
    steps: dict[str, int]  # launched steps by phase order: "no_overlap", "overlap", "late_sample"
    host_seconds: dict[str, float]  # by phase: "plan", "publish", "launch", "settle"
    step_tokens: list[int]  # tokens of each step since the last Load (for the iteration_tokens histogram)
    prefix_queries: int  # prompt tokens looked up in the prefix cache
    prefix_hits: int
    preemptions: int
    eager_steps: dict[str, int]  # of the leader's device: `Executor.eager_steps`
    pages_copied: dict[str, int]  # of preempted requests: to the host by "offload", back by "restore"
    drafts: dict[str, int] = {}  # "rows" that had drafts, "drafts" that were verified, and "accepted" of them
    drafts_accepted_at: dict[int, int] = {}  # accepted drafts by their position in the row


ToLeader = Submit | Abort
ToFront = Tokens | Started | PromptLogprobs | Finished | Refused | Load


# Between the supervisor and a front end: one SEQPACKET message each, msgpack, with its descriptors as SCM_RIGHTS.


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Supervisor -> front end, first.

    Descriptors: the listening socket, the board, the arena of a composite model, and with several front ends the memory of
    their counters and that of their stored responses.
    """

    engine: str  # EngineConfig as JSON
    server: str  # ServerConfig as JSON
    model_path: str  # where the model's files lie (a folder or a .gguf file)
    graph: str = ""  # of a composite model: `graph.launch.FrontGraph` as JSON
    encoder: str = ""  # of a model that embeds or scores: `embed.kinds.EncoderSpec` as JSON
    front: int = 0  # this one's place among
    fronts: int = 1


class Attach(msgspec.Struct, frozen=True, tag=True):
    """Supervisor -> front end: a group is ready. Descriptor: a stream socket to its leader."""

    group: int
    incarnation: int
    pages: int
    slots: int
    max_len: int


class Down(msgspec.Struct, frozen=True, tag=True):
    """Supervisor -> front end: a group is poisoned.

    Every unresolved request of it gets one terminal error (HTTP 500); new requests get 503 with Retry-After until the next
    Attach.
    """

    group: int
    incarnation: int
    reason: str
    retry_after: float


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Supervisor -> front end: refuse new requests (503), let running ones end within `timeout` seconds, then exit 0."""

    timeout: float


class Listening(msgspec.Struct, frozen=True, tag=True):
    """Front end -> supervisor: the HTTP side is up and the tokenizer is loaded."""


class Lost(msgspec.Struct, frozen=True, tag=True):
    """Front end -> supervisor: the stream to a group's leader has ended. If that leader runs on, another Attach follows."""

    group: int
    incarnation: int


ToFrontControl = Hello | Attach | Down | Drain
ToSupervisor = Listening | Lost


# Between the supervisor and a rank: one SEQPACKET message each, msgpack, with its descriptors.


class Setup(msgspec.Struct, frozen=True, tag=True):
    """Supervisor -> rank, first.

    Descriptors: the board, the collective's memory, the channel's (memory, event) pairs (on the leader out and back for each
    follower, on a follower in and back), then those of the group's `Spec`.
    """

    engine: str  # EngineConfig as JSON
    model_path: str
    group: int
    incarnation: int
    rank: int
    size: int
    block: int  # of the board
    role: str = ""  # what another process than a rank holds (`graph.worker.WorkerSpec` or `embed.kinds.EncoderSpec` as JSON)


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """Rank -> supervisor: weights are loaded, and this is what fits. `stamp` must be equal on all ranks."""

    limits: Limits
    weight_bytes: int
    stamp: str  # versions and configuration


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Supervisor -> rank: the minimum over the ranks. The rank allocates, warms up, then sends Ready."""

    limits: Limits


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Rank -> supervisor: the loop is running."""


class Front(msgspec.Struct, frozen=True, tag=True):
    """Supervisor -> leader: one more front end. Descriptor: the stream socket to it."""


class Fault(msgspec.Struct, frozen=True, tag=True):
    """Rank -> supervisor, last: this rank cannot go on, or has seen that another differs."""

    rank: int
    entry: int
    reason: str
    refusal: bool = False  # a mistake of the configuration: do not try again


ToRank = Setup | Begin | Front
FromRank = Loaded | Ready | Fault
