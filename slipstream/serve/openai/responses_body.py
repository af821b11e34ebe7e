"""POST /v1/responses: the body, and its conversion to a chat conversation. Pure."""

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from slipstream.errors import BadRequest
from slipstream.serve.errors import to_bad_request
from slipstream.serve.ignored import Ignored
from slipstream.serve.openai.bodies import (
    MAX_STOPS,
    ChatBody,
    Count,
    FunctionName,
    InputGrammar,
    Metadata,
    Penalty,
    Positive,
    StopString,
    TextInput,
    TokenId,
    Verbosity,
)

# fields with another name in the chat body, whose checks name them
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
    "reasoning_effort": "reasoning.effort",
    "tools[].function": "tools[]",
    "tools[].custom": "tools[]",
    "tools[].custom.format.grammar": "tools[].format",
    "tool_choice.function": "tool_choice",
    "tool_choice.custom": "tool_choice",
}
_SAME = (
    "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "parallel_tool_calls", "priority", "cache_salt",
    "chat_template_kwargs", "stream",
)  # fmt: skip

_ITEM = re.compile(r"\[\d+\]")


class FunctionTool(msgspec.Struct, tag_field="type", tag="function", kw_only=True, forbid_unknown_fields=True):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class GrammarFormat(InputGrammar, tag_field="type", tag="grammar", forbid_unknown_fields=True):
    """A grammar that binds a tool's input."""


class CustomToolItem(msgspec.Struct, tag_field="type", tag="custom", kw_only=True, forbid_unknown_fields=True):
    name: FunctionName
    description: str | None = None
    format: TextInput | GrammarFormat | None = None


class ChosenFunction(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    name: str


class ChosenCustom(msgspec.Struct, tag_field="type", tag="custom", forbid_unknown_fields=True):
    name: str


class ChosenTools(msgspec.Struct, tag_field="type", tag="allowed_tools", forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenFunction | ChosenCustom], Meta(min_length=1)]


class TextFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Verbosity | None = None


class ReasoningOptions(msgspec.Struct, forbid_unknown_fields=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto"] | None = None  # the reasoning itself is returned


class ResponsesStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None
    include_usage: bool | None = None  # chat's; the last event of a response always has the usage


class ResponsesBody(Ignored, kw_only=True):
    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=4096)]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: Annotated[list[FunctionTool | CustomToolItem], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | ChosenCustom | ChosenTools | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_output_tokens: Positive | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=0)] | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    background: bool | None = None
    store: bool | None = None
    metadata: Metadata | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None  # reasoning items hold plain text, not encrypted
    truncation: Literal["disabled"] | None = None
    # beyond OpenAI's, as in chat
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100.0, le=100.0)]] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # OpenAI's features that are not supported
    conversation: None = None
    prompt: None = None
    max_tool_calls: None = None


class InputTokensBody(ResponsesBody, kw_only=True):
    """POST /v1/responses/input_tokens: a response's body, without generation."""

    input: str | Annotated[list[dict[str, Any]], Meta(max_length=4096)] = ""


class TextContent(msgspec.Struct, kw_only=True):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal"]
    text: str | None = None
    refusal: str | None = None  # replaces `text`, depending on the type

    def __post_init__(self) -> None:
        field = "refusal" if self.type == "refusal" else "text"
        if getattr(self, field) is None:
            raise ValueError(f"Object missing required field `{field}`")


class MessageItem(msgspec.Struct, kw_only=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextContent]


class CallItem(msgspec.Struct, kw_only=True):
    call_id: str
    name: str
    arguments: str


class CustomCallItem(msgspec.Struct, kw_only=True):
    call_id: str
    name: str
    input: str


class OutputItem(msgspec.Struct, kw_only=True):
    call_id: str
    output: str | list[TextContent]


class ReasoningItem(msgspec.Struct, kw_only=True):
    content: list[TextContent] | None = None
    summary: list[TextContent] | None = None


_ITEMS: dict[str, type] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": OutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": OutputItem,
    "reasoning": ReasoningItem,
}


def conversation(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The input as chat messages. Raises BadRequest naming the item."""
    if isinstance(given, str):
        if not given:
            raise BadRequest("input: must hold at least one item", "input")
        return [{"role": "user", "content": given}]
    out: list[dict[str, Any]] = []
    for i, raw in enumerate(given):
        kind = raw.get("type", "message")
        schema = _ITEMS.get(kind) if isinstance(kind, str) else None
        if schema is None:
            raise BadRequest(f"input[{i}].type: expected one of {', '.join(_ITEMS)}", f"input[{i}].type")
        try:
            item = msgspec.convert(raw, schema)
        except msgspec.ValidationError as e:
            error = to_bad_request(e)
            where = f"input[{i}].{error.param}" if error.param else f"input[{i}]"
            raise BadRequest(f"{where}: {str(error).partition(': ')[2] or 'is not valid'}", where) from None
        _add(out, item)
    return [m for m in out if m["role"] != "assistant" or m.get("content") or m.get("tool_calls")]


def input_items(given: str | list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """The input as OpenAI lists it: each item with an id, its type and, in messages, a list of parts."""
    out: list[dict[str, Any]] = []
    for i, own in enumerate([{"role": "user", "content": given}] if isinstance(given, str) else given):
        item: dict[str, Any] = {"id": f"item_{key}_{i}", "type": "message", "status": "completed", **own}
        if isinstance(item.get("content"), str):
            kind = "output_text" if item.get("role") == "assistant" else "input_text"
            item["content"] = [{"type": kind, "text": item["content"]}]
        out.append(item)
    return out


def _add(out: list[dict[str, Any]], item: Any) -> None:
    if isinstance(item, MessageItem) and item.role != "assistant":
        out.append({"role": item.role, "content": _text(item.content)})
        return
    if isinstance(item, OutputItem):
        out.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        return
    last: dict[str, Any] | None = out[-1] if out and out[-1]["role"] == "assistant" else None
    if last is None or (isinstance(item, ReasoningItem | MessageItem) and ("content" in last or "tool_calls" in last)):
        last = {"role": "assistant"}
        out.append(last)
    if isinstance(item, MessageItem):
        last["content"] = _text(item.content)
    elif isinstance(item, CallItem):
        call = {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
        last.setdefault("tool_calls", []).append(call)
    elif isinstance(item, CustomCallItem):
        call = {"id": item.call_id, "type": "custom", "custom": {"name": item.name, "input": item.input}}
        last.setdefault("tool_calls", []).append(call)
    elif isinstance(item, ReasoningItem):
        last["reasoning_content"] = _text(item.content or item.summary or "")


def _text(content: str | list[TextContent]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text or part.refusal or "" for part in content)


def chat_body(body: ResponsesBody, messages: list[dict[str, Any]]) -> ChatBody:
    """The same request as a chat body; `messages` is the whole conversation without the instructions."""
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    out: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    out |= {"messages": [*system, *messages], "max_completion_tokens": body.max_output_tokens}
    if body.tools:
        out["tools"] = [_tool(tool) for tool in body.tools]
    out["tool_choice"] = _choice(body.tool_choice)
    if body.text and body.text.format:
        out["response_format"] = _format(body.text.format)
    if body.reasoning:
        out["reasoning_effort"] = body.reasoning.effort
    try:
        return msgspec.convert(out, ChatBody)
    except msgspec.ValidationError as e:
        raise renamed(to_bad_request(e), NAMES) from None


def _choice(choice: str | ChosenFunction | ChosenCustom | ChosenTools | None) -> Any:
    """In chat's form."""
    if isinstance(choice, ChosenFunction | ChosenCustom):
        kind = "custom" if isinstance(choice, ChosenCustom) else "function"
        return {"type": kind, kind: {"name": choice.name}}
    if isinstance(choice, ChosenTools):
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": [_choice(t) for t in choice.tools]}}
    return choice


def _tool(tool: FunctionTool | CustomToolItem) -> dict[str, Any]:
    """In chat's form."""
    fields = {k: v for k, v in msgspec.structs.asdict(tool).items() if v is not None}
    if isinstance(tool, FunctionTool):
        return {"type": "function", "function": fields}
    if isinstance(tool.format, GrammarFormat):
        fields["format"] = {"type": "grammar", "grammar": msgspec.structs.asdict(tool.format)}
    elif tool.format is not None:
        fields["format"] = {"type": "text"}
    return {"type": "custom", "custom": fields}


def shown_tool(tool: FunctionTool | CustomToolItem) -> dict[str, Any]:
    """As the response object repeats it."""
    shown = msgspec.to_builtins(tool)
    if isinstance(tool, FunctionTool):
        return {**shown, "strict": bool(tool.strict)}
    return {**shown, "format": shown["format"] or {"type": "text"}}


def _format(format: TextFormat) -> dict[str, Any]:
    if format.type != "json_schema":
        return {"type": format.type}
    if format.schema is None:
        raise BadRequest("text.format.schema: is required with type json_schema", "text.format.schema")
    form = {"name": format.name or "answer", "schema": format.schema, "strict": format.strict}
    return {"type": "json_schema", "json_schema": form}


def renamed(error: BadRequest, names: dict[str, str]) -> BadRequest:
    """The error with the parameter's name on this route; `[]` in a name stands for one item of a list."""
    param, message = error.param or "", str(error)
    item = _ITEM.search(param)
    for old in sorted(names, key=len, reverse=True):
        name, new = (n.replace("[]", item[0] if item else "[]") for n in (old, names[old]))
        if param == name or param.startswith((name + ".", name + "[")):
            new += param[len(name) :]
            message = new + message[len(param) :] if message.startswith(param) else f"{new}: {message}"
            return BadRequest(message, new, error.status)
    return error
