"""POST /v1/messages in Anthropic's form: the body, and its way to a conversation as chat has it. Pure."""

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from slipstream.errors import BadRequest
from slipstream.serve.errors import to_bad_request
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
    cache_control: dict[str, Any] | None = None  # prefixes are cached without being asked
    citations: list[Any] | None = None


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking", kw_only=True, forbid_unknown_fields=True):
    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use", kw_only=True, forbid_unknown_fields=True):
    id: str
    name: str
    input: dict[str, Any] | str  # a text where max_tokens cut the call
    cache_control: dict[str, Any] | None = None
    # what a client's own copy of an answer carries besides
    caller: dict[str, Any] | None = None
    toolset_name: None = None


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result", kw_only=True, forbid_unknown_fields=True):
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: dict[str, Any] | None = None


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock


class TurnMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant"]
    content: str | list[Block]


class ClientTool(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: FunctionName
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    input_examples: list[Any] | None = None


class ToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    format: OutputFormat | None = None


class CountTokensBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/count_tokens."""

    messages: Annotated[list[TurnMessage], Meta(min_length=1, max_length=4096)]
    model: str | None = None
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[ClientTool], Meta(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None


class MessagesBody(CountTokensBody, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Positive
    stop_sequences: Annotated[list[StopString], Meta(max_length=16)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    stream: bool | None = None
    # accepted, because nothing here could depend on them
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    cache_control: dict[str, Any] | None = None
    # Anthropic's, not had here: null or absent
    container: None = None
    mcp_servers: None = None
    context_management: None = None


def chat_body(body: CountTokensBody) -> ChatBody:
    """The same request to chat. Raises BadRequest naming the field."""
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system)})
    for message in body.messages:
        messages += _user(message) if message.role == "user" else [_assistant(message)]
    out: dict[str, Any] = {"messages": messages}
    if messages[-1]["role"] == "assistant":  # the answer begins with the last message's text
        if messages[-1].get("tool_calls"):
            raise BadRequest("messages: the last one's tool_use has no tool_result", "messages")
        out |= {"continue_final_message": True, "add_generation_prompt": False}
    if isinstance(body, MessagesBody):
        same = ("temperature", "top_p", "top_k", "stream")
        out |= {name: getattr(body, name) for name in same}
        out |= {"max_completion_tokens": body.max_tokens, "stop": body.stop_sequences}
    if body.thinking is not None and body.thinking.type == "disabled":
        out["reasoning_effort"] = "none"
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
    out: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        out["description"] = tool.description
    return {**out, "strict": tool.strict} if tool.strict is not None else out


def _choice(choice: ToolChoice) -> dict[str, Any]:
    out: dict[str, Any] = {"parallel_tool_calls": not choice.disable_parallel_tool_use}
    if choice.type == "tool":
        if choice.name is None:
            raise BadRequest("tool_choice.name: is missing", "tool_choice.name")
        return {**out, "tool_choice": {"type": "function", "function": {"name": choice.name}}}
    return {**out, "tool_choice": "required" if choice.type == "any" else choice.type}


def _text(content: str | list[TextBlock] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.text for block in content)


def _blocks(message: TurnMessage) -> list[Block]:
    return [TextBlock(text=message.content)] if isinstance(message.content, str) else message.content


def _user(message: TurnMessage) -> list[dict[str, Any]]:
    """Tool results become messages of their own, before what else the user says."""
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
            raise BadRequest("messages: thinking and tool_use stand in the assistant's messages only", "messages")
    return results + ([{"role": "user", "content": "\n".join(texts)}] if texts or not results else [])


def _assistant(message: TurnMessage) -> dict[str, Any]:
    out: dict[str, Any] = {"role": "assistant", "content": ""}
    texts, calls, thoughts = [], [], []
    for block in _blocks(message):
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, ToolUseBlock):
            arguments = block.input if isinstance(block.input, str) else json.dumps(block.input)
            function = {"name": block.name, "arguments": arguments}
            calls.append({"id": block.id, "type": "function", "function": function})
        else:
            raise BadRequest("messages: tool_result stands in the user's messages only", "messages")
    out["content"] = "\n".join(texts)
    if calls:
        out["tool_calls"] = calls
    if thoughts:
        out["reasoning_content"] = "\n".join(thoughts)
    return out
