"""What a request says of tools: checked, and turned into what is looked for and into the schema that bounds forced calls."""

import json
from typing import Any, NamedTuple

import msgspec

from slipstream.errors import BadRequest
from slipstream.serve.openai.bodies import AllowedChoice, ChatBody, NamedChoice, Tool
from slipstream.serve.text.calls import FORMS, ToolCallFormat
from slipstream.serve.text.dialect import Dialect
from slipstream.serve.text.reader import Reading

MAX_TOOLS = 128
MAX_CALLS = 16  # of one forced answer; a small model may not stop by itself
_OPEN = {
    "additionalProperties",
    "patternProperties",
    "allOf",
    "anyOf",
    "oneOf",
    "if",
    "$ref",
}  # says itself what more there may be


class ToolChoiceRule(NamedTuple):
    """`tools` go to the template; with a `schema`, the answer must be calls that fit it: all of it, or by `either`."""

    tools: list[dict[str, Any]] | None
    reading: Reading | None
    schema: dict[str, Any] | None
    either: str = ""  # Lark of an answer that is calls (one is @call, which has the schema) or what else binds it (@answer)


def choose(body: ChatBody, dialect: Dialect) -> ToolChoiceRule:
    """Raises BadRequest naming the field."""
    tools = for_template(body.tools)
    _check(body)
    choice = body.tool_choice if body.tool_choice is not None else "auto"
    if isinstance(choice, AllowedChoice):  # the model does not hear of the others
        tools, choice = _allowed(tools, choice), choice.allowed_tools.mode
    named = choice.function.name if isinstance(choice, NamedChoice) else None
    names = [t["function"]["name"] for t in tools]
    if (named or choice == "required") and not tools:
        raise BadRequest("tool_choice: needs tools", "tool_choice")
    if named and named not in names:
        raise BadRequest("tool_choice: names a function that is not among the tools", "tool_choice.function.name")
    bound = (body.response_format or {}).get("type", "text") != "text" or body.structured_outputs is not None
    if not tools or choice == "none":
        # with "none" the model does not hear of tools, as in vLLM; a bound answer begins with what binds it, not with reasoning
        thinks = dialect.thinking != "none" and not bound
        return ToolChoiceRule(None, Reading(dialect.thinking, keep=dialect.keep) if thinks else None, None)
    if dialect.calls not in FORMS and choice == "auto":
        why = "is switched off (--tool-call-parser none)" if dialect.calls == "none" else "has a form that is not known"
        raise BadRequest(
            f"tools: reading this model's tool calls {why}; start with --tool-call-parser hermes or llama3", "tools"
        )
    parallel = body.parallel_tool_calls is not False
    if choice == "auto" and not bound:
        return ToolChoiceRule(tools, Reading(dialect.thinking, dialect.calls, frozenset(names), parallel, dialect.keep), None)
    key = FORMS[dialect.calls].key if dialect.calls in FORMS else "arguments"
    wanted = [t["function"] for t in tools if named in (None, t["function"]["name"])]
    if choice == "auto":
        reading = Reading("none", dialect.calls, frozenset(names), parallel, dialect.keep)
        return ToolChoiceRule(
            tools, reading, calls_schema(wanted, key, False), either(FORMS[dialect.calls], dialect.marks, parallel)
        )
    schema = calls_schema(wanted, key, parallel and named is None)
    return ToolChoiceRule(tools, Reading("none", "bound", frozenset(f["name"] for f in wanted), parallel), schema)


def _allowed(tools: list[dict[str, Any]], choice: AllowedChoice) -> list[dict[str, Any]]:
    names = {tool.function.name for tool in choice.allowed_tools.tools}
    unknown = names - {t["function"]["name"] for t in tools}
    if unknown:
        raise BadRequest(f"tool_choice: {min(unknown)} is allowed, but not among the tools", "tool_choice.allowed_tools.tools")
    return [t for t in tools if t["function"]["name"] in names]


def for_template(tools: list[Tool] | None) -> list[dict[str, Any]]:
    """Tools as templates show them: what the client did not say is not there, rather than null."""
    out = [msgspec.to_builtins(tool) for tool in tools or ()]
    return [{**tool, "function": {k: v for k, v in tool["function"].items() if v is not None}} for tool in out]


def _check(body: ChatBody) -> None:
    if len(body.tools or ()) > MAX_TOOLS:
        raise BadRequest(f"tools: at most {MAX_TOOLS}", "tools")
    seen = set()
    for i, tool in enumerate(body.tools or ()):
        where = f"tools[{i}].function"
        if tool.function.name in seen:
            raise BadRequest(f"{where}.name: stands twice", f"{where}.name")
        seen.add(tool.function.name)
        check_parameters(tool.function.parameters, f"{where}.parameters")


def check_parameters(schema: dict[str, Any] | None, where: str) -> None:
    """That it is a JSON schema of an object, as far as that can be seen without compiling it. Raises BadRequest."""
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
    """Lark for @answer, or for calls in the form. special: markers that are special tokens, which Lark names without quotes."""
    start, end = (mark if mark in special else json.dumps(mark) for mark in (form.start, form.end))
    one = f"({start})? @call" if form.bare else f'{start} ("\\n")? @call ("\\n")? {end}'
    more = f" ({json.dumps(form.between)} one){{0,{MAX_CALLS - 1}}}" if several else ""
    return f"start: @answer | one{more}\none: {one}\n"


def calls_schema(functions: list[dict[str, Any]], key: str, several: bool) -> dict[str, Any]:
    """JSON schema of one call, or of a list of calls; each function's own schema stands under $defs, where its refs point."""
    defs, calls = {}, []
    for i, function in enumerate(functions):
        own = {"type": "object", "properties": {}, **(function.get("parameters") or {})}
        if not _OPEN & own.keys():  # a function takes what it names; JSON schema alone would let a model invent more
            own["additionalProperties"] = False
        defs[f"f{i}"] = _moved(own, f"#/$defs/f{i}")
        properties = {"name": {"const": function["name"]}, key: {"$ref": f"#/$defs/f{i}"}}
        calls.append({"type": "object", "properties": properties, "required": ["name", key], "additionalProperties": False})
    one = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {**({"type": "array", "items": one, "minItems": 1, "maxItems": MAX_CALLS} if several else one), "$defs": defs}


def _moved(schema: Any, root: str) -> Any:
    """The schema with its references to itself pointing below `root`."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out = {k: _moved(v, root) for k, v in schema.items() if k not in ("$id", "$schema")}
    ref = out.get("$ref")
    if isinstance(ref, str) and ref.startswith("#"):
        out["$ref"] = root + ref[1:]
    return out
