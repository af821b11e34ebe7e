"""The bodies that clients send, as structs. The routes decode with them, and the OpenAPI document is made from them.

Ranges are part of the types, so a value out of range is refused with its field's path, and the document shows them. Structs
that share a place have the tag `type`. A struct alone has `type` as a field, since a missing tag would pass there. A JSON
null counts as absent. Imports only msgspec and `ignored`.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from slipstream.serve.ignored import Absent, Ignored

MAX_LOGPROBS = 20
MAX_DRAFTS = 8
MAX_CHOICES = 128
MAX_STOPS = 16
MAX_PROMPTS = 2048

Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Verbosity = Literal["low", "medium", "high"]  # a hint for which no chat template has a variable
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]  # OpenAI's bounds
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's constraints on an answer: exactly one of the first five."""

    json: dict[str, Any] | str | None = None  # a JSON schema
    regex: Annotated[str, Meta(min_length=1)] | None = None
    choice: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)] | None = None
    grammar: Annotated[str, Meta(min_length=1)] | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None  # false: objects are open, as JSON Schema defines them
    whitespace_pattern: Annotated[str, Meta(min_length=1, max_length=256)] | None = None


class Generate(Ignored, kw_only=True):
    """The fields that both generating routes share."""

    model: str | None = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None  # wins over max_tokens
    min_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=256)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    prompt_logprobs: TopLogprobs | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100.0, le=100.0)]] | None = None
    bad_words: Annotated[list[StopString], Meta(max_length=256)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    regex: Annotated[str, Meta(min_length=1)] | None = None  # SGLang's: `structured_outputs.regex`
    speculative_tokens: Annotated[int, Meta(ge=0, le=MAX_DRAFTS)] | None = None  # drafts a step at most, of the server's


class CompletionBody(Generate, kw_only=True):
    """POST /v1/completions."""

    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    max_tokens: Count | None = None  # 0 is for `echo`: only the prompt comes back
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None  # must equal `n`: every choice is returned
    suffix: None = None


class TextPart(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    text: str
    cache_control: dict[str, Any] | None = (
        None  # Anthropic's, sent by clients of many servers; equal prefixes are reused anyway
    )


class RefusalPart(msgspec.Struct, tag_field="type", tag="refusal", forbid_unknown_fields=True):
    """An assistant's earlier refusal, instead of a text."""

    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


FunctionName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.\-]{1,128}$")]


class FunctionDef(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema of an object
    strict: bool | None = None


class Tool(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    function: FunctionDef


class InputGrammar(msgspec.Struct, forbid_unknown_fields=True):
    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Meta(min_length=1)]


class TextInput(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Any text."""


class GrammarInput(msgspec.Struct, tag_field="type", tag="grammar", forbid_unknown_fields=True):
    grammar: InputGrammar


class CustomDef(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: FunctionName
    description: str | None = None
    format: TextInput | GrammarInput | None = None


_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


class CustomTool(msgspec.Struct, tag_field="type", tag="custom", forbid_unknown_fields=True):
    """A tool whose input is one text."""

    custom: CustomDef

    @property
    def grammar(self) -> InputGrammar | None:
        format = self.custom.format
        return format.grammar if isinstance(format, GrammarInput) else None

    @property
    def function(self) -> FunctionDef:
        """The tool as the model sees it: models are trained on functions only."""
        return FunctionDef(name=self.custom.name, description=self.custom.description, parameters=_INPUT)


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class NamedChoice(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    function: NamedFunction


class NamedCustom(msgspec.Struct, tag_field="type", tag="custom", forbid_unknown_fields=True):
    custom: NamedFunction

    @property
    def function(self) -> NamedFunction:
        return self.custom


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice | NamedCustom], Meta(min_length=1)]


class AllowedChoice(msgspec.Struct, tag_field="type", tag="allowed_tools", forbid_unknown_fields=True):
    """Allows only some of the tools."""

    allowed_tools: AllowedTools


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    arguments: str = ""  # JSON


class CalledCustom(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    input: str = ""


class ToolCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A call in an assistant's earlier message. It has the field that its type names."""

    function: CalledFunction | None = None
    custom: CalledCustom | None = None
    id: str | None = None
    type: Literal["function", "custom"] = "function"
    index: int | None = None  # present in messages assembled from a stream

    def __post_init__(self) -> None:
        if getattr(self, self.type) is None:
            raise ValueError(f"Object missing required field `{self.type}`")


class Message(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | RefusalPart] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=1024)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same under its other name
    tool_call_id: str | None = None
    cache_control: dict[str, Any] | None = None
    # further fields of an answer that a client sends back
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None


class PredictedPart(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class Prediction(msgspec.Struct, forbid_unknown_fields=True):
    """Text that the answer may consist of: a source of drafts. It changes no token."""

    type: Literal["content"]
    content: str | list[PredictedPart]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatBody(Generate, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    modalities: list[Literal["text"]] | None = None
    tools: list[Tool | CustomTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | NamedCustom | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    verbosity: Verbosity | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    prediction: Prediction | None = None
    # OpenAI's features that are not supported
    audio: None = None
    functions: Absent = None
    function_call: None = None
    web_search_options: None = None


class TokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: `prompt`, or `messages` through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, max_length=4096)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: list[Tool | CustomTool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None
    skip_special_tokens: bool | None = None
