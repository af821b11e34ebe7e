"""From a body's text, ids or conversation to token ids. Blocking: large ones run on a worker thread (see `prepare`)."""

import asyncio
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from slipstream.errors import BadRequest
from slipstream.serve.engine.engine import RequestLimits
from slipstream.serve.engine.exclusive import run_exclusive
from slipstream.serve.openai.bodies import MAX_CHOICES, MAX_PROMPTS, ChatBody, CompletionBody, Message, TokenizeBody
from slipstream.serve.text.dialect import PLAIN, Dialect, left_by_prompt
from slipstream.serve.text.params import GenerationParams
from slipstream.serve.text.tool_prompt import call_for_template, in_plain_text
from slipstream.tokenize.tokenizer import Tokenizer

INLINE_CHARS = 4096  # below this, tokenizing costs less than going to another thread
TURN_IDS = 1 << 16  # token ids of one prompt that are checked in one turn of the loop
LONGEST_TOKEN_CHARS = 256  # characters a token; a text longer than this times the model's length cannot fit
RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template"}

_threads = ThreadPoolExecutor(2, "prompts")
T = TypeVar("T")


@dataclass(frozen=True)
class Prompt:
    """One prompt of a request."""

    ids: array  # of int32
    max_tokens: int  # the most tokens to generate
    text: str = ""  # for `echo` only
    offsets: list[int] = field(default_factory=list)  # where each token begins in `text`; for `echo` with log probabilities
    thinking: str = ""  # "open" or "closed": the state of the model's reasoning at its end


async def prepare(size: int | None, work: Callable[[], T], only_ids: bool = False) -> T:
    """Runs `work` here when it is small (`size` in characters or tokens), else, or with None, on a worker thread.

    Work that only checks token ids stays here up to TURN_IDS: it holds the interpreter all the time (see `exclusive`), and a
    tokenizer does not.
    """
    if size is not None and size <= INLINE_CHARS:
        return work()
    if size is not None and only_ids and size <= TURN_IDS:
        return await run_exclusive(work)
    return await asyncio.get_running_loop().run_in_executor(_threads, work)


def size_of(body: CompletionBody | TokenizeBody) -> int:
    """The approximate number of characters or tokens to work through."""
    size = sum(map(len, getattr(body, "bad_words", None) or ()))
    size += 4 * len(getattr(body, "logit_bias", None) or ())
    prompt = body.prompt or ""
    if len(prompt) > INLINE_CHARS:  # a text, or very many ids: too slow to count one by one here
        return size + len(prompt)
    return size + (len(prompt) if isinstance(prompt, str) else sum(1 if isinstance(p, int) else len(p) for p in prompt))


def completion_prompts(
    body: CompletionBody, plan: GenerationParams, tokenizer: Tokenizer, limits: RequestLimits
) -> list[Prompt]:
    """The prompts of one HTTP request. Raises BadRequest (prompt, n) for too many, and as `all_prompts` does."""
    count = len(items_of(body.prompt, "prompt"))
    if count > MAX_PROMPTS:
        raise BadRequest(f"prompt: at most {MAX_PROMPTS} prompts in one request, not {count}", "prompt")
    if count * plan.n > MAX_PROMPTS + MAX_CHOICES:
        raise BadRequest(f"n: at most {MAX_PROMPTS + MAX_CHOICES} choices in one request, not {count * plan.n}", "n")
    return all_prompts(body, plan, tokenizer, limits)


def all_prompts(body: CompletionBody, plan: GenerationParams, tokenizer: Tokenizer, limits: RequestLimits) -> list[Prompt]:
    """Raises BadRequest (prompt, max_tokens, min_tokens) unless every prompt fits."""
    items = items_of(body.prompt, "prompt")
    out = []
    for i, item in enumerate(items):
        name = "prompt" if isinstance(body.prompt, str) or len(items) == 1 else f"prompt[{i}]"
        if isinstance(item, str):
            ids = encode(item, tokenizer, limits, body.add_special_tokens is not False, name)
        else:
            ids = item
            if ids and max(ids) >= tokenizer.vocab_size:
                raise BadRequest(
                    f"{name}: token ids must be below {tokenizer.vocab_size} (the vocabulary), not {max(ids)}", "prompt"
                )
        out.append(_fit(ids, plan, limits, name, item if isinstance(item, str) else None, tokenizer))
    return out


def items_of(given: str | list, param: str) -> list[str] | list[list[int]]:
    """The four forms of a field, as a list of texts or of id lists."""
    if isinstance(given, str):
        return [given]
    kinds = {type(each) for each in given}
    if kinds == {int}:
        return [given]
    if kinds in ({str}, {list}):
        return given
    raise BadRequest(f"{param}: expected a text, a list of texts, a list of token ids, or a list of lists of token ids", param)


def encode(text: str, tokenizer: Tokenizer, limits: RequestLimits | None, special: bool, name: str) -> list[int]:
    check_text(text, limits, name)
    return tokenizer.encode(text, add_special_tokens=special, param=name.partition("[")[0])


def check_text(text: str, limits: RequestLimits | None, name: str) -> None:
    """Raises BadRequest for an empty text, and for one that cannot fit, before it is tokenized."""
    if not text:
        raise BadRequest(f"{name}: must not be empty", name.partition("[")[0])
    if limits is not None and len(text) > limits.max_len * LONGEST_TOKEN_CHARS:
        raise BadRequest(f"{name}: must fit in the model's {limits.max_len} tokens; it is longer", name.partition("[")[0])


def _fit(
    ids: list[int], plan: GenerationParams, limits: RequestLimits, name: str, text: str | None, tokenizer: Tokenizer
) -> Prompt:
    param, room = name.partition("[")[0], limits.max_len - len(ids)
    if not ids:
        raise BadRequest(f"{name}: must hold at least one token", param)
    if room < (0 if plan.discard else 1):
        raise BadRequest(f"{name}: has {len(ids)} tokens; prompt and answer together must have at most {limits.max_len}", param)
    if plan.max_tokens is not None:
        max_tokens = max(1, plan.max_tokens)
        if plan.max_tokens > room:
            what = (
                f"{plan.max_tokens_param}: {max_tokens} and the prompt's {len(ids)} tokens exceed the model's {limits.max_len}"
            )
            raise BadRequest(what, plan.max_tokens_param)
    else:
        max_tokens = room if plan.default_max_tokens is None else min(room, plan.default_max_tokens)
    if plan.min_tokens > max_tokens:
        raise BadRequest(f"min_tokens: must be at most {max_tokens}, the number of tokens that can be generated", "min_tokens")
    offsets: list[int] = []
    if plan.echo:
        whole, offsets = _walk(ids, tokenizer, plan.skip_special)
        text = whole if text is None else text
        offsets = [min(o, len(text)) for o in offsets] if plan.logprobs >= 0 else []
    return Prompt(array("i", ids), max_tokens, text or "", offsets)


def _walk(ids: list[int], tokenizer: Tokenizer, skip_special: bool) -> tuple[str, list[int]]:
    """The prompt's text, and where each of its tokens begins in it."""
    stream, parts, offsets, at = tokenizer.stream(skip_special_tokens=skip_special), [], [], 0
    for id in ids:
        offsets.append(at)
        parts.append(stream.push(id))
        at += len(parts[-1])
    parts.append(stream.flush())
    return "".join(parts), offsets


def chat_prompt(
    body: ChatBody,
    plan: GenerationParams,
    tokenizer: Tokenizer,
    limits: RequestLimits,
    tools: list[dict] | None = None,
    dialect: Dialect = PLAIN,
) -> Prompt:
    """Raises BadRequest for a conversation that the template refuses or that does not fit."""
    ids = templated(body, tokenizer, limits, tools, dialect)
    begun = _plain(0, body.messages[-1])["content"] if body.continue_final_message else ""
    thinking = left_by_prompt(ids, tokenizer, begun) if dialect.thinking != "none" else ""
    return replace(_fit(ids, plan, limits, "messages", None, tokenizer), thinking=thinking)


def templated(
    body: ChatBody | TokenizeBody,
    tokenizer: Tokenizer,
    limits: RequestLimits | None,
    tools: list[dict] | None = None,
    dialect: Dialect = PLAIN,
) -> list[int]:
    """The conversation's token ids."""
    messages = body.messages or []
    going_on = bool(body.continue_final_message)
    if going_on and body.add_generation_prompt:
        raise BadRequest(
            "continue_final_message: needs add_generation_prompt=false",
            "continue_final_message",
        )
    if going_on and messages[-1].role != "assistant":
        raise BadRequest("continue_final_message: the last message must have the role assistant", "continue_final_message")
    extra = body.chat_template_kwargs or {}
    for key in extra:
        if key in RESERVED or not key.isidentifier():
            raise BadRequest(f"chat_template_kwargs: {key[:100]!r} is set by the server; leave it out", "chat_template_kwargs")
    generation = not going_on if body.add_generation_prompt is None else body.add_generation_prompt
    if isinstance(body, ChatBody):
        extra = {**dialect.effort(body.reasoning_effort, "reasoning_effort"), **extra}
    plain = [_plain(i, m) for i, m in enumerate(messages)]
    param = "tools" if tools else "chat_template_kwargs"
    try:
        if not dialect.template_tools:
            plain, tools = in_plain_text(plain, tools), None
        return tokenizer.apply_chat(
            plain,
            max_chars=limits and limits.max_len * LONGEST_TOKEN_CHARS,
            add_generation_prompt=generation,
            continue_final_message=going_on,
            tools=tools,
            **extra,
        )
    except RecursionError:
        raise BadRequest(f"{param}: nested too deeply", param) from None


def _plain(index: int, message: Message) -> dict:
    """A message as templates expect it: text parts joined by newlines, `developer` as `system`."""
    content = message.content
    if content is None:
        if message.role != "assistant":
            where = f"messages[{index}].content"
            raise BadRequest(f"{where}: must be a text or a list of text parts", where)
        content = ""
    elif not isinstance(content, str):
        content = "\n".join(part.text for part in content)
    out: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": content}
    if message.name is not None:
        out["name"] = message.name
    if message.tool_call_id is not None:
        out["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        if message.role != "assistant":
            raise BadRequest("tool_calls: allowed only in messages with the role assistant", f"messages[{index}].tool_calls")
        out["tool_calls"] = [call_for_template(call) for call in message.tool_calls]
    if message.role == "assistant" and (reasoning := message.reasoning_content or message.reasoning):
        out["reasoning_content"] = reasoning
    return out
