"""Checks a request's tools, and makes the reading that finds calls and the grammar that binds forced calls."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from slipstream.errors import BadRequest
from slipstream.grammar.schema import Simplifier
from slipstream.serve.openai.bodies import AllowedChoice, ChatBody, CustomTool, NamedChoice, NamedCustom, Tool
from slipstream.serve.text.calls import FORMS, ToolCallFormat
from slipstream.serve.text.dialect import Dialect
from slipstream.serve.text.reader import Reading
from slipstream.serve.text.structured import of_grammar, of_regex, of_simplified

MAX_TOOLS = 128
MAX_CALLS = 16  # in one forced answer; a small model may not stop by itself


class ToolChoiceRule(NamedTuple):
    """`tools` go to the template. With a grammar `calls`, the whole answer must be calls; `either` allows an alternative."""

    tools: list[dict[str, Any]] | None
    reading: Reading | None
    calls: str = ""
    param: str = "tools"  # the field that `calls` is from
    either: str = ""  # Lark of an answer that is either calls (each is @call, the grammar) or the other bound answer (@answer)


def choose(body: ChatBody, dialect: Dialect) -> ToolChoiceRule:
    """Raises BadRequest naming the field."""
    tools = for_template(body.tools)
    _check(body)
    choice = body.tool_choice if body.tool_choice is not None else "auto"
    if isinstance(choice, AllowedChoice):  # the model does not see the other tools
        tools, choice = _allowed(tools, choice), choice.allowed_tools.mode
    named = choice.function.name if isinstance(choice, NamedChoice | NamedCustom) else None
    names = [t["function"]["name"] for t in tools]
    if (named or choice == "required") and not tools:
        raise BadRequest("tool_choice: needs tools; send tools, or leave it out", "tool_choice")
    if named and named not in names:
        kind = "custom" if isinstance(choice, NamedCustom) else "function"
        raise BadRequest(f"tool_choice: {named[:100]} is not among the tools", f"tool_choice.{kind}.name")
    bound = (body.response_format or {}).get("type", "text") != "text" or bool(body.structured_outputs or body.regex)
    if not tools or choice == "none":
        # with "none" the model does not see the tools, as in vLLM; a bound answer does not begin with reasoning
        thinks = dialect.thinking != "none" and not bound
        return ToolChoiceRule(None, Reading(dialect.thinking, keep=dialect.keep) if thinks else None)
    if dialect.calls not in FORMS and choice == "auto":
        why = "is switched off (--tool-call-parser none)" if dialect.calls == "none" else "has a form that is not known"
        raise BadRequest(
            f"tools: reading this model's tool calls {why}; start with --tool-call-parser hermes or llama3", "tools"
        )
    open_to = [(i, tool) for i, tool in enumerate(body.tools or ()) if tool.function.name in ([named] if named else names)]
    if any(isinstance(tool, CustomTool) and tool.grammar for _, tool in open_to):
        return _bound_input(tools, open_to, choice)
    parallel = body.parallel_tool_calls is not False
    custom = frozenset(tool.custom.name for tool in body.tools or () if isinstance(tool, CustomTool))
    if choice == "auto" and not bound:
        return ToolChoiceRule(tools, Reading(dialect.thinking, dialect.calls, frozenset(names), parallel, dialect.keep, custom))
    key = FORMS[dialect.calls].key if dialect.calls in FORMS else "arguments"
    several = choice != "auto" and parallel and named is None
    wanted = [t["function"] for t in tools if named in (None, t["function"]["name"])]
    places = {tool.function.name: f"tools[{i}].function.parameters" for i, tool in enumerate(body.tools or ())}
    calls = calls_grammar(wanted, key, several, places)
    if choice == "auto":
        reading = Reading("none", dialect.calls, frozenset(names), parallel, dialect.keep, custom)
        return ToolChoiceRule(tools, reading, calls, either=either(FORMS[dialect.calls], dialect.marks, parallel))
    reading = Reading("none", "bound", frozenset(f["name"] for f in wanted), parallel, custom=custom)
    return ToolChoiceRule(tools, reading, calls)


def _bound_input(tools: list[dict[str, Any]], open_to: list[tuple[int, Tool | CustomTool]], choice: Any) -> ToolChoiceRule:
    """The answer is the input of the only tool that may be called, bound by its grammar.

    Within a call's JSON its characters would be escaped, and a grammar in Lark describes them as they are.
    """
    i, tool = next((i, t) for i, t in open_to if isinstance(t, CustomTool) and t.grammar)
    where, grammar = f"tools[{i}].custom.format", tool.grammar
    assert grammar is not None
    if choice == "auto" or len(open_to) > 1:
        raise BadRequest(f"{where}: a grammar needs a tool_choice that names the tool; name it, or send format text", where)
    where += ".grammar.definition"
    text = (of_grammar if grammar.syntax == "lark" else of_regex)(grammar.definition, where)
    return ToolChoiceRule(tools, Reading("none", "input", frozenset([tool.custom.name])), text, where)


def _allowed(tools: list[dict[str, Any]], choice: AllowedChoice) -> list[dict[str, Any]]:
    names = {tool.function.name for tool in choice.allowed_tools.tools}
    unknown = names - {t["function"]["name"] for t in tools}
    if unknown:
        raise BadRequest(f"tool_choice: {min(unknown)} is not among the tools", "tool_choice.allowed_tools.tools")
    return [t for t in tools if t["function"]["name"] in names]


def for_template(tools: Sequence[Tool | CustomTool] | None) -> list[dict[str, Any]]:
    """Tools as templates show them: a field that the client left out is absent, not null."""
    functions = [msgspec.to_builtins(tool.function) for tool in tools or ()]
    return [{"type": "function", "function": {k: v for k, v in f.items() if v is not None}} for f in functions]


def _check(body: ChatBody) -> None:
    if len(body.tools or ()) > MAX_TOOLS:
        raise BadRequest(f"tools: at most {MAX_TOOLS} tools in one request, not {len(body.tools or ())}", "tools")
    seen = set()
    for i, tool in enumerate(body.tools or ()):
        where = f"tools[{i}].{'custom' if isinstance(tool, CustomTool) else 'function'}"
        if tool.function.name in seen:
            raise BadRequest(f"{where}.name: {tool.function.name[:100]} is an earlier tool's name too", f"{where}.name")
        seen.add(tool.function.name)
        check_parameters(tool.function.parameters, f"{where}.parameters")


def check_parameters(schema: dict[str, Any] | None, where: str) -> None:
    """Checks, without compiling it, that `schema` is a JSON schema of an object. Raises BadRequest."""
    if not schema:
        return
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if schema.get("type", "object") != "object":
        raise BadRequest(f"{where}.type: must be object", where)
    if not isinstance(properties, dict) or not all(isinstance(p, dict | bool) for p in properties.values()):
        raise BadRequest(f"{where}.properties: must be an object of schemas", where)
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise BadRequest(f"{where}.required: must be a list of names", where)


def either(form: ToolCallFormat, special: frozenset[str], several: bool) -> str:
    """Lark for @answer, or for calls in the form. special: markers that are special tokens, unquoted in Lark."""
    start, end = (mark if mark in special else json.dumps(mark) for mark in (form.start, form.end))
    one = f"({start})? @call" if form.bare else f'{start} ("\\n")? @call ("\\n")? {end}'
    more = f" ({json.dumps(form.between)} one){{0,{MAX_CALLS - 1}}}" if several else ""
    return f"start: @answer | one{more}\none: {one}\n"


def calls_grammar(functions: list[dict[str, Any]], key: str, several: bool, places: dict[str, str]) -> str:
    """Grammar of one call, or of a list of calls, with the arguments under `key`. places: the field of each function's schema.

    A keyword that cannot be enforced is left to the model, unless the function has strict: true. Raises BadRequest.
    """
    to, calls = Simplifier(), []
    for function in functions:
        own = {"type": "object", "properties": {}, **(function.get("parameters") or {})}
        arguments = to.add(own, places[function["name"]], lenient=not function.get("strict"))
        properties = {"name": {"const": function["name"]}, key: arguments}
        calls.append({"type": "object", "properties": properties, "required": ["name", key], "additionalProperties": False})
    one = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return of_simplified({"type": "array", "items": one, "minItems": 1, "maxItems": MAX_CALLS} if several else one, to, "tools")
