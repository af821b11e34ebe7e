"""The work on a body before its request is submitted: one pure, blocking function for each route that needs it.

They run in the front end or, for large bodies, in a process of their own (`prepare_worker`). So their arguments and results
can be sent between processes. Each raises BadRequest or Failed.
"""

import secrets
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from slipstream.errors import BadRequest
from slipstream.serve.anthropic import messages_body
from slipstream.serve.anthropic.messages_body import CountTokensBody, MessagesBody
from slipstream.serve.embed.bodies import EmbeddingBody, RerankBody, ScoreBody
from slipstream.serve.embed.rows import (
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    rows_of_input,
    rows_of_pairs,
    rows_of_texts,
)
from slipstream.serve.embed.rows import size_of as rows_size
from slipstream.serve.engine.engine import RequestLimits
from slipstream.serve.errors import Failure
from slipstream.serve.openai import responses_body
from slipstream.serve.openai.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from slipstream.serve.openai.chat import plan_chat
from slipstream.serve.openai.responses_body import InputTokensBody, ResponsesBody, conversation, input_items, renamed
from slipstream.serve.openai.responses_writer import response_object
from slipstream.serve.request_body import check_pieces, decode
from slipstream.serve.text.dialect import Dialect
from slipstream.serve.text.logprobs import TokenNames
from slipstream.serve.text.params import GenerationParams, make_plan
from slipstream.serve.text.prompts import Prompt, completion_prompts, encode, size_of, templated
from slipstream.serve.text.reader import Reading
from slipstream.serve.text.tools import for_template
from slipstream.tokenize.tokenizer import Tokenizer


def check_model(name: str | None, models: list[str]) -> None:
    """Raises BadRequest (404) for a model that is not served here."""
    if name is not None and name not in models:
        here = ", ".join(map(repr, models))
        raise BadRequest(f"model: {name[:200]!r} is not served here; this server has {here}", "model", 404)


class Desk(NamedTuple):
    """The inputs of every job besides the body."""

    models: list[str]  # the names under which the model is served
    tokenizer: Tokenizer
    names: TokenNames
    dialect: Dialect
    limits: RequestLimits | None  # None: the engine is not ready, and only jobs that do not generate run

    @property
    def model(self) -> str:
        return self.models[0]

    def check_model(self, name: str | None) -> None:
        check_model(name, self.models)


class Prepared(msgspec.Struct):
    """A job's result: a plan with its prompts, or, from jobs that do not generate, an answer in `more`."""

    plan: GenerationParams | None = None
    prompts: list[Prompt] = []
    more: bytes = b""  # for /v1/responses a `ResponseStart`; for jobs that do not generate the answer's JSON
    wants: str | None = None  # the id of a stored response whose conversation (`earlier`) the job needs first


class Job(NamedTuple):
    schema: type
    work: Callable[[Any, Desk, bytes], Prepared]  # (body, desk, JSON of an earlier conversation or b"")
    size: Callable[[Any], int | None]  # as `prompts.prepare` takes it
    generates: bool = True
    only_ids: Callable[[Any], bool] = lambda body: False


def _limits(desk: Desk) -> RequestLimits:
    assert desk.limits is not None, "the front end has checked that the engine is ready"
    return desk.limits


def chat(body: ChatBody, desk: Desk, earlier: bytes) -> Prepared:
    desk.check_model(body.model)
    return Prepared(*plan_chat(body, desk.dialect, desk.tokenizer, _limits(desk)))


def completions(body: CompletionBody, desk: Desk, earlier: bytes) -> Prepared:
    desk.check_model(body.model)
    plan = make_plan(body, desk.tokenizer)
    return Prepared(plan, completion_prompts(body, plan, desk.tokenizer, _limits(desk)))


def _completion_size(body: CompletionBody) -> int | None:
    # a grammar's text may take its time
    bound = body.response_format is not None or body.structured_outputs is not None or body.regex is not None
    return None if bound else size_of(body)


def _only_ids(body: CompletionBody) -> bool:
    given = isinstance(body.prompt, list) and isinstance(body.prompt[0], int)
    return given and not (body.echo or body.bad_words or body.logit_bias)


def messages(body: CountTokensBody, desk: Desk, earlier: bytes) -> Prepared:
    desk.check_model(body.model)
    messages_body.check_thread(body)
    try:
        chat = messages_body.chat_body(body, desk.dialect.grades_effort)
        plan, prompts = plan_chat(chat, desk.dialect, desk.tokenizer, _limits(desk))
    except BadRequest as e:
        raise renamed(e, messages_body.NAMES) from None
    return Prepared(replace(plan, reading=plan.reading or Reading()), prompts)


def count_tokens(body: CountTokensBody, desk: Desk, earlier: bytes) -> Prepared:
    (prompt,) = messages(body, desk, earlier).prompts
    return Prepared(more=msgspec.json.encode({"input_tokens": len(prompt.ids)}))


class ResponseStart(msgspec.Struct):
    """A response before generation."""

    value: dict[str, Any]  # the response object; its id and time are set later
    conversation: bytes  # JSON of the messages so far, the earlier ones included
    items: bytes  # JSON of the input as it is listed


def responses(body: ResponsesBody, desk: Desk, earlier: bytes) -> Prepared:
    desk.check_model(body.model)
    if body.background and body.store is False:
        raise BadRequest("background: needs store=true, since the response is fetched later", "background")
    if body.previous_response_id is not None and not earlier:
        return Prepared(wants=body.previous_response_id)
    try:
        said = [*msgspec.json.decode(earlier or b"[]"), *conversation(body.input)]
        if not said:
            raise BadRequest("input: must hold at least one message to answer", "input")
        chat = responses_body.chat_body(body, said)
        plan, prompts = plan_chat(chat, desk.dialect, desk.tokenizer, _limits(desk))
    except BadRequest as e:
        raise renamed(e, responses_body.NAMES) from None
    items = input_items(body.input, secrets.token_hex(8))
    start = ResponseStart(response_object(body, desk.model), msgspec.json.encode(said), msgspec.json.encode(items))
    return Prepared(replace(plan, reading=plan.reading or Reading()), prompts, msgspec.msgpack.encode(start))


def input_tokens(body: InputTokensBody, desk: Desk, earlier: bytes) -> Prepared:
    found = responses(body, desk, earlier)
    if found.wants is not None:
        return found
    (prompt,) = found.prompts
    return Prepared(more=msgspec.json.encode({"object": "response.input_tokens", "input_tokens": len(prompt.ids)}))


def tokenize(body: TokenizeBody, desk: Desk, earlier: bytes) -> Prepared:
    desk.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("prompt: give either prompt or messages", "prompt")
    if body.messages is not None:
        ids = templated(body, desk.tokenizer, desk.limits, for_template(body.tools), desk.dialect)
    else:
        ids = encode(body.prompt or "", desk.tokenizer, desk.limits, body.add_special_tokens is not False, "prompt")
    texts = [desk.names(id)[0] for id in ids] if body.return_token_strs else None
    most = desk.limits.max_len if desk.limits else None
    answer = {"count": len(ids), "max_model_len": most, "tokens": ids, "token_strs": texts}
    return Prepared(more=msgspec.json.encode(answer))


def detokenize(body: DetokenizeBody, desk: Desk, earlier: bytes) -> Prepared:
    desk.check_model(body.model)
    if body.tokens and max(body.tokens) >= desk.tokenizer.vocab_size:
        raise BadRequest(f"tokens: must be below {desk.tokenizer.vocab_size}, the vocabulary's size", "tokens")
    text = desk.tokenizer.decode(body.tokens, skip_special_tokens=bool(body.skip_special_tokens))
    return Prepared(more=msgspec.json.encode({"prompt": text}))


def embeddings(body: EmbeddingBody, desk: Desk, earlier: bytes) -> Prepared:
    desk.check_model(body.model)
    rows = rows_of_input(body, desk.tokenizer, _limits(desk))
    return _packed(EmbeddingRequest(rows, body.dimensions, body.encoding_format == "base64"))


def rerank(body: RerankBody, desk: Desk, earlier: bytes) -> Prepared:
    desk.check_model(body.model)
    return _packed(RerankRequest(rows_of_texts(body, desk.tokenizer, _limits(desk)), body))


def rerank_pairs(body: RerankBody, desk: Desk, earlier: bytes) -> Prepared:
    desk.check_model(body.model)
    return _packed(RerankRequest(rows_of_pairs(body, desk.tokenizer, _limits(desk)), body))


def score(body: ScoreBody, desk: Desk, earlier: bytes) -> Prepared:
    desk.check_model(body.model)
    return _packed(ScoreRequest(rows_of_texts(body, desk.tokenizer, _limits(desk)), body))


def score_pairs(body: ScoreBody, desk: Desk, earlier: bytes) -> Prepared:
    desk.check_model(body.model)
    return _packed(ScoreRequest(rows_of_pairs(body, desk.tokenizer, _limits(desk)), body))


def _packed(request: msgspec.Struct) -> Prepared:
    return Prepared(more=msgspec.msgpack.encode(request))


def _thread(body: Any) -> None:
    """May block for seconds: the template is rendered in another process."""


JOBS: dict[str, Job] = {
    "chat": Job(ChatBody, chat, _thread),
    "completions": Job(CompletionBody, completions, _completion_size, only_ids=_only_ids),
    "messages": Job(MessagesBody, messages, _thread),
    "count_tokens": Job(CountTokensBody, count_tokens, _thread),
    "responses": Job(ResponsesBody, responses, _thread),
    "input_tokens": Job(InputTokensBody, input_tokens, _thread),
    "tokenize": Job(TokenizeBody, tokenize, lambda body: None if body.messages is not None else size_of(body), generates=False),
    "embeddings": Job(EmbeddingBody, embeddings, lambda body: rows_size(body.input)),
    **{name: Job(RerankBody, work, _thread) for name, work in (("rerank", rerank), ("rerank_pairs", rerank_pairs))},
    **{
        name: Job(ScoreBody, work, lambda body: rows_size(body.text_1, body.text_2))
        for name, work in (("score", score), ("score_pairs", score_pairs))
    },
    "detokenize": Job(DetokenizeBody, detokenize, lambda body: len(body.tokens), generates=False),
}


# --- as bytes


class Asked(msgspec.Struct):
    """One job for the process that prepares large bodies; the body itself and the earlier conversation come after it."""

    name: str
    limits: RequestLimits | None


class Answered(msgspec.Struct):
    """Its answer."""

    prepared: Prepared | None = None
    refused: tuple[str, str | None, int] | None = None  # a BadRequest: message, param, status
    failed: Failure | None = None


def _pack(value: Any) -> Any:
    if isinstance(value, array):
        return value.tobytes()
    raise NotImplementedError(type(value))


def _unpack(kind: type, value: Any) -> Any:
    if kind is array:
        return array("i", value)
    raise NotImplementedError(kind)


encode_answer = msgspec.msgpack.Encoder(enc_hook=_pack).encode
decode_answer = msgspec.msgpack.Decoder(Answered, dec_hook=_unpack).decode


def run(name: str, raw: bytes | bytearray, desk: Desk, earlier: bytes) -> Prepared:
    """Runs a whole job: decodes the body, then works on it."""
    job = JOBS[name]
    check_pieces(raw)
    return job.work(decode(raw, job.schema), desk, earlier)
