"""State that the routes share: the engine, the tokenizer, the metrics and the settings of one front-end process."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from slipstream.config import EngineConfig, ServerConfig, served_names
from slipstream.embed.kinds import EncoderSpec
from slipstream.errors import BadRequest, EngineDown
from slipstream.process.board import Board
from slipstream.serve.budget import Budget
from slipstream.serve.delivery import Deliveries
from slipstream.serve.embed.engine import EncoderEngine
from slipstream.serve.engine.engine import Engine
from slipstream.serve.engine.generation import Generation
from slipstream.serve.engine.progress import Progress
from slipstream.serve.jobs import Desk, check_model
from slipstream.serve.observe.metrics import Metrics
from slipstream.serve.observe.shared_counters import SharedCounters
from slipstream.serve.observe.telemetry import open_telemetry
from slipstream.serve.openai.response_store import ResponseStore
from slipstream.serve.text.dialect import PLAIN, detect
from slipstream.serve.text.grammar_check import GrammarCheck
from slipstream.serve.text.logprobs import TokenNames
from slipstream.tokenize.tokenizer import Tokenizer

if TYPE_CHECKING:
    from slipstream.serve.engine.composite import Composite
    from slipstream.serve.openai.event_log import EventLog
    from slipstream.serve.preparing import LargeBodies

SLOW_READER_SECONDS = 20.0


@dataclass
class Front:
    """One front end. `tokenizer` is None until it is loaded; until then generating routes answer 503."""

    engine_config: EngineConfig
    server_config: ServerConfig
    board: Board | None = None
    tokenizer: Tokenizer | None = None
    names: TokenNames | None = None
    grammars: GrammarCheck | None = None
    shared_counters: SharedCounters = field(
        default_factory=SharedCounters
    )  # shared with other front ends if there are any, as the response store is
    response_store: ResponseStore = field(default_factory=ResponseStore)
    created: int = field(default_factory=lambda: int(time.time()))
    slow_reader_seconds: float = SLOW_READER_SECONDS
    large: "LargeBodies | None" = None  # None: large bodies are prepared in this process too
    composite: "Composite | None" = None  # None: a plain language model
    encoder: EncoderSpec | None = None  # None: a model that generates

    def __post_init__(self):
        self.models = served_names(self.engine_config, self.server_config)
        self.model = self.models[0]
        self.bodies = Budget(self.server_config.body_memory_bytes)
        self.deliveries: Deliveries | None = None  # set with the application
        self.metrics = Metrics(self.model, self.shared_counters)
        made = EncoderEngine(self.encoder, self.metrics.on_load) if self.encoder else None
        self.engine = made or Engine(self.metrics.on_load)
        self.progress = Progress(self.board, self.engine_config.step_timeout)
        self.dialect = PLAIN
        endpoint = self.server_config.otlp_traces_endpoint
        self.telemetry = open_telemetry(self.model, endpoint) if endpoint else None
        self.event_logs: dict[str, EventLog] = {}  # of streamed background responses that run here, by key
        self.open: dict[Generation, object] = {}  # generations in progress, each with the call that cuts its connection

    def set_tokenizer(self, tokenizer: Tokenizer) -> None:
        self.names = TokenNames(tokenizer)
        self.grammars = GrammarCheck(tokenizer)
        self.dialect = detect(tokenizer, self.server_config)
        self.tokenizer = tokenizer

    def ready_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise EngineDown("the tokenizer is loading")
        return self.tokenizer

    def check_generates(self) -> None:
        """Raises BadRequest on a server whose model gives vectors or scores."""
        if self.encoder is not None:
            raise BadRequest(f"this server's model {self.encoder.does}; it does not generate text")

    def check_model(self, name: str | None) -> None:
        check_model(name, self.models)

    def desk(self, generates: bool) -> Desk:
        """The inputs for preparing a request. Raises EngineDown or Failed (503) while one of them is missing."""
        tokenizer = self.ready_tokenizer()
        assert self.names is not None
        limits = self.engine.check_ready() if generates else self.engine.limits
        return Desk(self.models, tokenizer, self.names, self.dialect, limits)

    def unhealthy(self) -> str | None:
        """The reason why a new request cannot be served now; None if it can."""
        if self.engine.state != "ready":
            return f"{self.engine.state}: {self.engine.reason}"
        if self.tokenizer is None:
            return "starting: the tokenizer is loading"
        return (self.composite and self.composite.unhealthy()) or self.progress.stalled()

    async def watch(self) -> None:
        """Checks the ranks' progress once a second, and cuts off clients that do not read. Never returns."""
        while True:
            await asyncio.sleep(1.0)
            self.progress.look()
            if self.deliveries is not None:
                self.deliveries.cut(self.slow_reader_seconds)
