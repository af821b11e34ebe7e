"""Whether a client's grammar can be used, decided before any rank sees it and away from the event loop.

Grammars are tried in processes with limits of their own (`grammar_worker.py`), at most two at once, so that one which takes all
of its time does not keep another one waiting. Verdicts are remembered: the same schema comes again and again.
"""

import asyncio
import signal
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, LifoQueue

import msgspec

from slipstream.errors import BadRequest, EngineDown, Overloaded
from slipstream.grammar.matcher import Bound, Vocabulary
from slipstream.grammar.worker import Setup
from slipstream.serve.text.structured import Structure
from slipstream.system.limited_process import LimitedProcess
from slipstream.tokenize.tokenizer import Tokenizer

SECONDS = 2.0  # of computing, for one grammar
WORKERS = 2
MAX_WAITING = 256  # grammars that wait to be tried
_PATIENCE = 30.0  # seconds of wall time that a loaded machine may need for SECONDS of computing, or to start
_VERDICTS = 1024
_LIMITS = (signal.SIGPROF, signal.SIGABRT, signal.SIGSEGV)  # end a process at its limit of computing, of memory, of stack
_OPTION = "are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf"  # the library's, not a client's
_ONE_OF = "whose branches overlap are not supported; say anyOf; where the field has it, strict: false takes oneOf as anyOf"
TOO_LONG = f"it did not compile within {SECONDS:g} s of computing and the memory that one grammar may use"


class GrammarCheck:
    """`check` runs on the event loop; one for each front end."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._setup = b""
        self._threads = ThreadPoolExecutor(WORKERS, "grammars")
        self._idle: LifoQueue[LimitedProcess] = LifoQueue()
        self._verdicts: OrderedDict[str, str] = OrderedDict()
        self._trying: dict[str, asyncio.Future[str]] = {}

    async def check(self, wanted: Structure) -> None:
        """Raises BadRequest naming the field of a grammar that cannot be used, Overloaded when too many wait to be tried."""
        verdict = self._verdicts.get(wanted.text)
        if verdict is None:
            verdict = await self._try(wanted.text)
        if verdict:
            raise BadRequest(f"{wanted.param}: {verdict.replace(_OPTION, _ONE_OF)}", wanted.param)

    async def _try(self, text: str) -> str:
        """One trial for all who ask for the same grammar meanwhile; it goes on if they leave."""
        trial = self._trying.get(text)
        if trial is None:
            if len(self._trying) >= MAX_WAITING:
                raise Overloaded("too many grammars are being compiled; try again later")
            work = asyncio.get_running_loop().run_in_executor(self._threads, self._ask, text)
            trial = self._trying[text] = asyncio.ensure_future(work)
            trial.add_done_callback(lambda done: self._note(text, done))
        return await asyncio.shield(trial)

    def _note(self, text: str, done: "asyncio.Future[str]") -> None:
        del self._trying[text]
        if not done.cancelled() and done.exception() is None:
            self._verdicts[text] = done.result()
            if len(self._verdicts) > _VERDICTS:
                self._verdicts.popitem(last=False)

    # On one of the threads.

    def _ask(self, text: str) -> str:
        """The verdict. Raises EngineDown where the process was stopped or killed: that says nothing of the grammar."""
        worker = self._worker()
        answer = worker.ask(Bound(text).encode())
        if answer is not None:
            self._idle.put(worker)
            return answer.decode()
        status = worker.ended()
        worker.close()
        if status is not None and (status > 0 or -status in _LIMITS):
            return TOO_LONG
        raise EngineDown("the process that compiles grammars was lost; try again")

    def _worker(self) -> LimitedProcess:
        """An idle process, or a new one that has read the vocabulary."""
        while True:
            try:
                worker = self._idle.get_nowait()
            except Empty:
                break
            if worker.alive:
                return worker
            worker.close()
        if not self._setup:
            v = Vocabulary.of(self._tokenizer, tokenize=False)
            self._setup = msgspec.msgpack.encode(Setup(SECONDS, v.tokens, v.special_ids, v.end_ids))
        # numpy's threads would each reserve address space, of which this process has little
        worker = LimitedProcess("-m", "slipstream.grammar.worker", patience=_PATIENCE, env={"OPENBLAS_NUM_THREADS": "1"})
        if worker.ask(self._setup) is None:
            worker.close()
            raise EngineDown("the process that compiles grammars did not start")
        return worker

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        while not self._idle.empty():
            self._idle.get().close()
