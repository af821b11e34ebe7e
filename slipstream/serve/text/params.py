"""From a body's fields to sampling parameters and the answer's constraints. Raises before anything runs."""

import secrets
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from slipstream.errors import BadRequest
from slipstream.grammar.matcher import Bound
from slipstream.log.request import SamplingParams
from slipstream.serve.openai.bodies import ChatBody, CompletionBody, Generate
from slipstream.serve.text.reader import Reading
from slipstream.serve.text.structured import Structure, structure_of
from slipstream.tokenize.tokenizer import Tokenizer

SEED_MASK = 2**63 - 1
GREEDY_BELOW = 1e-5  # logits divided by a smaller temperature overflow; the best token always wins there


@dataclass(frozen=True)
class GenerationParams:
    """One HTTP request's parameters after validation, the same for all of its prompts and choices."""

    sampling: SamplingParams  # of choice 0
    n: int = 1
    max_tokens: int | None = None  # None: the rest of the context
    max_tokens_param: str = "max_tokens"  # as the client wrote it
    default_max_tokens: int | None = None  # used if the client gave none; cut to the context
    stops: tuple[str, ...] = ()
    stop_names: dict[int, str] = field(default_factory=dict)  # special tokens that are not shown, but occur in a stop string
    include_stop: bool = False
    min_tokens: int = 0
    ignore_end: bool = False  # the model's end tokens do not end the answer
    end_ids: frozenset[int] = frozenset()  # the model's end tokens
    skip_special: bool = True
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    logprobs: int = -1  # alternatives shown per token, -1: no log probabilities
    prompt_logprobs: int = -1  # in vLLM's form
    echo: bool = False
    discard: bool = False  # max_tokens is 0: the generated token is not shown
    priority: int = 0
    salt: bytes = b""
    structure: Structure | None = None  # the grammar that binds the answer
    reading: Reading | None = None  # set if the answer may hold reasoning or tool calls
    most_drafts: int = -1  # for `Request.most_drafts`
    prediction: bytes = b""  # for `Request.prediction`, not yet cut to the model's length

    @property
    def grammar(self) -> bytes:
        """For `Request.grammar`. The grammar forbids end tokens until it allows them, or until nothing else may follow."""
        if self.structure is None:
            return b""
        others = tuple(id for id in self.sampling.stop_ids if id not in self.end_ids)
        return Bound(self.structure.text, self.min_tokens, others, self.ignore_end).encode()

    @property
    def plain_text(self) -> bool:
        """Whether a stream's events carry nothing but text."""
        return self.logprobs < 0 and not self.return_token_ids and not self.continuous_usage


def make_plan(
    body: ChatBody | CompletionBody, tokenizer: Tokenizer, reading: Reading | None = None, bound: Structure | None = None
) -> GenerationParams:
    """Raises BadRequest naming the field. Limits that depend on a prompt's length are checked with the prompt."""
    structure = bound or structure_of(body)
    if reading is None and isinstance(body, ChatBody) and body.tools and body.tool_choice != "none":
        raise BadRequest("tools: not supported by the class LLM; use the HTTP server (slipstream serve)", "tools")
    max_tokens, param = body.max_completion_tokens, "max_completion_tokens"
    if max_tokens is None:
        max_tokens, param = body.max_tokens, "max_tokens"
    if isinstance(body, ChatBody):
        logprobs, echo, default = _chat_logprobs(body), False, None
    else:
        logprobs, echo, default = -1 if body.logprobs is None else body.logprobs, bool(body.echo), 16
        if max_tokens == 0 and not echo:
            raise BadRequest("max_tokens: must be at least 1, not 0; only echo=true allows 0", "max_tokens")
        if body.best_of not in (None, body.n or 1):
            raise BadRequest(f"best_of: must equal n, which is {body.n or 1}, not {body.best_of}", "best_of")
    stream = bool(body.stream)
    if body.stream_options is not None and not stream:
        raise BadRequest("stream_options: needs stream=true", "stream_options")
    if stream and body.prompt_logprobs is not None:
        raise BadRequest("prompt_logprobs: not supported with stream=true; send stream=false", "prompt_logprobs")
    min_tokens = body.min_tokens or 0
    limit = max_tokens if max_tokens is not None else default
    if limit is not None and min_tokens > limit:
        raise BadRequest(f"min_tokens: must be at most max_tokens, {limit}, not {min_tokens}", "min_tokens")
    options = body.stream_options
    end_ids = frozenset(tokenizer.eos_ids)
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    skip_special = body.skip_special_tokens is not False
    hidden = tokenizer.special_ids - (reading.keep if reading else frozenset()) if stops and skip_special else ()
    return GenerationParams(
        sampling=_sampling(body, tokenizer, end_ids, logprobs, echo, structure is not None),
        n=body.n or 1,
        max_tokens=max_tokens,
        max_tokens_param=param,
        default_max_tokens=default,
        stops=stops,
        stop_names=_stop_names(stops, hidden, tokenizer),
        include_stop=bool(body.include_stop_str_in_output),
        min_tokens=min_tokens,
        ignore_end=bool(body.ignore_eos),
        end_ids=end_ids,
        skip_special=skip_special,
        stream=stream,
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        return_token_ids=bool(body.return_token_ids),
        logprobs=logprobs,
        prompt_logprobs=-1 if body.prompt_logprobs is None else body.prompt_logprobs,
        echo=echo,
        discard=max_tokens == 0,
        priority=body.priority or 0,
        salt=(body.cache_salt or "").encode(),
        structure=structure,
        reading=reading,
        most_drafts=-1 if body.speculative_tokens is None else body.speculative_tokens,
        prediction=_prediction(body, tokenizer),
    )


def _prediction(body: ChatBody | CompletionBody, tokenizer: Tokenizer) -> bytes:
    if not isinstance(body, ChatBody) or body.prediction is None:
        return b""
    return array("i", tokenizer.encode(body.prediction.text, add_special_tokens=False)).tobytes()


def _stop_names(stops: tuple[str, ...], hidden: Iterable[int], tokenizer: Tokenizer) -> dict[int, str]:
    names = {id: tokenizer.token_text(id) for id in hidden}
    return {id: name for id, name in names.items() if name and any(name in stop for stop in stops)}


def _chat_logprobs(body: ChatBody) -> int:
    if not body.logprobs:
        if body.top_logprobs:
            raise BadRequest("top_logprobs: needs logprobs=true", "top_logprobs")
        return -1
    return body.top_logprobs or 0


def _sampling(
    body: Generate, tokenizer: Tokenizer, end_ids: frozenset[int], logprobs: int, echo: bool, bound: bool
) -> SamplingParams:
    """bound: a grammar binds the answer and decides where it may end (`GenerationParams.grammar`)."""
    vocab = tokenizer.vocab_size
    for i, id in enumerate(body.stop_token_ids or ()):
        if id >= vocab:
            raise BadRequest(f"stop_token_ids[{i}]: must be below {vocab}, the vocabulary's size, not {id}", "stop_token_ids")
    stop_ids = set(body.stop_token_ids or ())
    if bound or not body.ignore_eos:
        stop_ids |= end_ids
    prompt_logprobs = -1 if body.prompt_logprobs is None else body.prompt_logprobs
    if echo:
        prompt_logprobs = max(prompt_logprobs, logprobs)

    def number(value: float | None, default: float) -> float:
        return default if value is None else float(value)

    temperature, top_k = number(body.temperature, 1.0), body.top_k or 0
    return SamplingParams(
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_p=number(body.top_p, 1.0),
        top_k=top_k if 0 < top_k < vocab else 0,
        min_p=number(body.min_p, 0.0),
        seed=secrets.randbits(63) if body.seed is None else body.seed & SEED_MASK,
        presence_penalty=number(body.presence_penalty, 0.0),
        frequency_penalty=number(body.frequency_penalty, 0.0),
        repetition_penalty=number(body.repetition_penalty, 1.0),
        logit_bias=_logit_bias(body, vocab),
        bad_words=_bad_words(body, tokenizer),
        min_tokens=0 if bound else body.min_tokens or 0,
        stop_ids=tuple(sorted(stop_ids)),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _logit_bias(body: Generate, vocab: int) -> tuple[tuple[int, float], ...]:
    out = {}
    for key, bias in (body.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 12 and int(key) < vocab):
            raise BadRequest(f"logit_bias: keys must be token ids from 0 to {vocab - 1}, not {key[:20]!r}", "logit_bias")
        out[int(key)] = float(bias)
    return tuple(sorted(out.items()))


def _bad_words(body: Generate, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word's tokens at a text's start and after a space, as in vLLM."""
    out: list[tuple[int, ...]] = []
    for i, word in enumerate(body.bad_words or ()):
        bare = tuple(tokenizer.encode(word.lstrip() or word, add_special_tokens=False))
        if not bare:
            raise BadRequest(f"bad_words[{i}]: must encode to at least one token, and {word[:100]!r} does not", "bad_words")
        out.append(bare)
        spaced = tuple(tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
        if spaced and spaced[0] != bare[0] and len(spaced) == len(bare):
            out.append(spaced)
    return tuple(dict.fromkeys(out))
