"""POST /v1/messages in Anthropic's form: the body, and its conversion to a chat conversation. Pure."""

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from slipstream.errors import BadRequest
from slipstream.serve.errors import Failed, Failure, to_bad_request
from slipstream.serve.ignored import Absent, Ignored
from slipstream.serve.openai.bodies import ChatBody, FunctionName, Positive, StopString

NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "reasoning_effort": "thinking",
    "response_format": "output_config.format",
    "response_format.json_schema.schema": "output_config.format.schema",
    "tools[].function.parameters": "tools[].input_schema",
    "tools[].function": "tools[]",
}


class TextBlock(msgspec.Struct, tag_field="type", tag="text", kw_only=True, forbid_unknown_fields=True):
    text: str
    cache_control: dict[str, Any] | None = None  # prefixes are cached without a request for it
    citations: list[Any] | None = None


class OnlyText(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A text block, where other kinds are not allowed."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = None
    citations: list[Any] | None = None


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking", kw_only=True, forbid_unknown_fields=True):
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking", forbid_unknown_fields=True):
    data: str  # encrypted by another server: no model here can read it


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use", kw_only=True, forbid_unknown_fields=True):
    id: str
    name: str
    input: dict[str, Any] | str  # a string if max_tokens cut the call
    cache_control: dict[str, Any] | None = None
    # further fields of an answer that a client sends back
    caller: dict[str, Any] | None = None
    toolset_name: None = None


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result", kw_only=True, forbid_unknown_fields=True):
    tool_use_id: str
    content: str | list[OnlyText] | None = None
    is_error: bool | None = None
    cache_control: dict[str, Any] | None = None


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class TurnMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]
    clear_at: Literal["next_user_message", "never"] | None = None  # of a system message: until when the model sees it


class ClientTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: FunctionName
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    input_examples: list[Any] | None = None
    allowed_callers: list[str] | None = None
    # how a tool is loaded and its input sent; no answer depends on these
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None


class ToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None  # for templates with a setting for it


class CountTokensBody(Ignored, kw_only=True):
    """POST /v1/messages/count_tokens."""

    messages: Annotated[list[TurnMessage], Meta(min_length=1, max_length=4096)]
    model: str | None = None
    system: str | list[OnlyText] | None = None
    tools: Annotated[list[ClientTool], Meta(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    thread: dict[str, Any] | None = None  # see `check_thread`
    # Anthropic's features that are not supported
    mcp_servers: Absent = None
    compaction: None = None


class MessagesBody(CountTokensBody, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Positive
    stop_sequences: Annotated[list[StopString], Meta(max_length=16)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    stream: bool | None = None
    container: None = None  # not supported


def check_thread(body: CountTokensBody) -> None:
    """Raises Failed in a form that makes Anthropic's SDK go on without a thread."""
    if body.thread is not None:
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        text = "thread: conversations are not stored here; send the full conversation without it"
        raise Failed(Failure(400, text, "thread", details=details))


def chat_body(body: CountTokensBody, grades_effort: bool = False) -> ChatBody:
    """The same request as a chat body. grades_effort: the template has a setting for it. Raises BadRequest naming the field."""
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system)})
    last_user = max((i for i, message in enumerate(body.messages) if message.role == "user"), default=-1)
    for i, message in enumerate(body.messages):
        if message.role != "system":
            messages += _user(message) if message.role == "user" else [_assistant(message)]
        elif message.clear_at != "next_user_message" or i > last_user:
            messages.append(_system(message, f"messages[{i}]"))
    out: dict[str, Any] = {"messages": messages}
    if messages[-1]["role"] == "assistant":  # the answer begins with the last message's text
        if messages[-1].get("tool_calls"):
            raise BadRequest("messages: the last message holds tool_use; a tool_result must follow it", "messages")
        out |= {"continue_final_message": True, "add_generation_prompt": False}
    if isinstance(body, MessagesBody):
        same = ("temperature", "top_p", "top_k", "stream")
        out |= {name: getattr(body, name) for name in same}
        out |= {"max_completion_tokens": body.max_tokens, "stop": body.stop_sequences}
    if body.thinking is not None and body.thinking.type == "disabled":
        out["reasoning_effort"] = "none"
    elif grades_effort and body.output_config is not None and body.output_config.effort is not None:
        effort = body.output_config.effort
        out["reasoning_effort"] = "high" if effort in ("xhigh", "max") else effort
    if body.output_config is not None and body.output_config.format is not None:
        form = {"name": "answer", "schema": body.output_config.format.schema}
        out["response_format"] = {"type": "json_schema", "json_schema": form}
    if body.tools:
        out["tools"] = [{"type": "function", "function": _function(tool)} for tool in body.tools]
    if body.tool_choice is not None:
        out |= _choice(body.tool_choice)
    try:
        return msgspec.convert(out, ChatBody)
    except msgspec.ValidationError as e:
        raise to_bad_request(e) from None


def _function(tool: ClientTool) -> dict[str, Any]:
    if tool.allowed_callers is not None and "direct" not in tool.allowed_callers:
        raise BadRequest('tools.allowed_callers: must hold "direct"; only the model calls tools here', "tools")
    out: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        out["description"] = tool.description
    return {**out, "strict": tool.strict} if tool.strict is not None else out


def _choice(choice: ToolChoice) -> dict[str, Any]:
    out: dict[str, Any] = {"parallel_tool_calls": not choice.disable_parallel_tool_use}
    if choice.type == "tool":
        if choice.name is None:
            raise BadRequest("tool_choice.name: is required with type tool", "tool_choice.name")
        return {**out, "tool_choice": {"type": "function", "function": {"name": choice.name}}}
    return {**out, "tool_choice": "required" if choice.type == "any" else choice.type}


def _text(content: str | list[OnlyText] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.text for block in content)


def _blocks(message: TurnMessage) -> list[Block]:
    return [TextBlock(text=message.content)] if isinstance(message.content, str) else message.content


def _system(message: TurnMessage, where: str) -> dict[str, Any]:
    blocks = _blocks(message)
    if not all(isinstance(block, TextBlock) for block in blocks):
        raise BadRequest(f"{where}.content: a system message may hold text blocks only", f"{where}.content")
    return {"role": "system", "content": "\n".join(block.text for block in blocks if isinstance(block, TextBlock))}


def _user(message: TurnMessage) -> list[dict[str, Any]]:
    """Tool results become messages of their own, before the user's other content."""
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    for block in _blocks(message):
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ToolResultBlock):
            text = _text(block.content)
            text = f"Error: {text}" if block.is_error else text
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
        else:
            raise BadRequest("messages: thinking and tool_use are allowed only in messages with the role assistant", "messages")
    return results + ([{"role": "user", "content": "\n".join(texts)}] if texts or not results else [])


def _assistant(message: TurnMessage) -> dict[str, Any]:
    out: dict[str, Any] = {"role": "assistant", "content": ""}
    texts, calls, thoughts = [], [], []
    for block in _blocks(message):
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, RedactedThinkingBlock):
            continue
        elif isinstance(block, ToolUseBlock):
            arguments = block.input if isinstance(block.input, str) else json.dumps(block.input)
            function = {"name": block.name, "arguments": arguments}
            calls.append({"id": block.id, "type": "function", "function": function})
        else:
            raise BadRequest("messages: tool_result is allowed only in messages with the role user", "messages")
    out["content"] = "\n".join(texts)
    if calls:
        out["tool_calls"] = calls
    if thoughts:
        out["reasoning_content"] = "\n".join(thoughts)
    return out
