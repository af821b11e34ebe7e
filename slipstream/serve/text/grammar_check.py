"""Whether a client's grammar can be used, decided before any rank sees it and away from the event loop.

Grammars are tried in processes with limits of their own (`grammar.worker`), at most two at once, so that a slow one
does not make another wait. Verdicts are kept, since clients send the same schema again and again.
"""

import asyncio
import hashlib
from collections import OrderedDict

import msgspec

from slipstream.errors import BadRequest, EngineDown, Overloaded
from slipstream.grammar.matcher import NO_TEXTS, Bound, Vocabulary
from slipstream.grammar.worker import Setup
from slipstream.serve.text.structured import Structure
from slipstream.system.limited_process import LimitedProcess, Lost, Overrun, Pool
from slipstream.tokenize.tokenizer import Tokenizer

SECONDS = 2.0  # of CPU time, for one grammar
WORKERS = 2
MAX_WAITING = 256  # grammars that may wait to be tried
PATIENCE_SECONDS = 15.0  # seconds of wall time that a loaded machine may need for SECONDS of CPU time, or to start
_VERDICTS = 1024
_OPTION = "are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf"  # not an option that clients have
_ONE_OF = (
    "whose branches overlap are not supported; use anyOf, or where the field has it strict: false, which takes it as anyOf"
)
TOO_LONG = f"it did not compile within {SECONDS:g} s of CPU time and the memory that one grammar may use; simplify it"


class GrammarCheck:
    """`check` runs on the event loop; one for each front end."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._setup = b""
        self._pool = Pool("grammars", WORKERS, self._start)
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()  # by digest: texts are large
        self._trying: dict[bytes, asyncio.Future[str]] = {}

    async def check(self, wanted: Structure) -> None:
        """Raises BadRequest naming the field of a grammar that cannot be used, Overloaded when too many wait to be tried.

        Raises EngineDown where the process that tried it was stopped from outside, which says nothing about the grammar.
        """
        if not self._tokenizer.spells:
            raise BadRequest(f"{wanted.param}: {NO_TEXTS}", wanted.param)
        key = hashlib.blake2b(wanted.text.encode(), digest_size=16).digest()
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = await self._try(key, wanted.text)
        if verdict:
            raise BadRequest(f"{wanted.param}: {verdict.replace(_OPTION, _ONE_OF)}", wanted.param)

    async def _try(self, key: bytes, text: str) -> str:
        """One trial for all requests with the same grammar; it goes on if their clients leave."""
        trial = self._trying.get(key)
        if trial is None:
            if len(self._trying) >= MAX_WAITING:
                raise Overloaded("too many grammars are being compiled; try again later")
            trial = self._trying[key] = asyncio.ensure_future(self._ask(text))
            trial.add_done_callback(lambda done: self._note(key, done))
        return await asyncio.shield(trial)

    def _note(self, key: bytes, done: "asyncio.Future[str]") -> None:
        del self._trying[key]
        if not done.cancelled() and done.exception() is None:
            self._verdicts[key] = done.result()
            if len(self._verdicts) > _VERDICTS:
                self._verdicts.popitem(last=False)

    async def _ask(self, text: str) -> str:
        try:
            return (await self._pool.ask(Bound(text).encode())).decode()
        except Overrun:
            return TOO_LONG
        except Lost as e:
            raise EngineDown(f"the process that tries grammars was lost: {e}; try again") from None

    def _start(self) -> LimitedProcess:
        """A process that has read the vocabulary."""
        if not self._setup:
            v = Vocabulary.of(self._tokenizer, tokenize=False)
            self._setup = msgspec.msgpack.encode(Setup(SECONDS, v.tokens, v.special_ids, v.end_ids))
        # numpy's threads would each reserve address space, of which this process has little
        worker = LimitedProcess("-m", "slipstream.grammar.worker", patience=PATIENCE_SECONDS, env={"OPENBLAS_NUM_THREADS": "1"})
        try:
            worker.ask(self._setup)
        except Overrun:
            raise Lost("it did not start") from None
        return worker

    def close(self) -> None:
        self._pool.close()
