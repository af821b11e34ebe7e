"""Structured output: from a body's fields to the grammar that its answer must follow.

`response_format` is OpenAI's, `structured_outputs` vLLM's, `regex` SGLang's. The grammar's text is
llguidance's; its makers here (`of_schema` and those after it) are for every feature that binds an answer. Nothing is
compiled here (see `grammar_check`).

A schema is followed exactly. A keyword that cannot be enforced is refused by its name. Only `strict: false` leaves such a
keyword to the model, and takes `oneOf` as `anyOf` (see `grammar.schema`).
"""

import json
import re
from typing import Annotated, Any, Literal, NamedTuple

import llguidance
import msgspec
from llguidance.gbnf_to_lark import gbnf_to_lark
from msgspec import Meta

from slipstream.errors import BadRequest
from slipstream.grammar.schema import Simplifier
from slipstream.serve.errors import to_bad_request
from slipstream.serve.openai.bodies import Generate, StructuredOutputs

MAX_TEXT_CHARS = 1 << 17  # characters; a grammar travels to every rank in one message
SPACES = r" |\n {0,64}"  # between JSON's tokens; without a limit, some models write spaces until max_tokens
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
KINDS = ("json", "regex", "choice", "grammar", "json_object")


class Structure(NamedTuple):
    """The grammar that binds an answer, and the body's field that it comes from."""

    text: str
    param: str


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    schema: dict[str, Any]
    name: Annotated[str, Meta(max_length=256)] | None = None
    description: str | None = None
    strict: bool | None = None


class Format(msgspec.Struct, forbid_unknown_fields=True):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


def structure_of(body: Generate) -> Structure | None:
    """The grammar that binds the answer, None if there is none. Raises BadRequest naming the field."""
    found = {
        "response_format": None if body.response_format is None else _of_format(body.response_format),
        "structured_outputs": None if body.structured_outputs is None else _of_outputs(body.structured_outputs),
        "regex": None if body.regex is None else Structure(of_regex(body.regex, "regex"), "regex"),
    }
    given = [name for name, structure in found.items() if structure is not None]
    if len(given) > 1:
        raise BadRequest(f"{given[1]}: cannot be combined with {given[0]}; send one of them", given[1])
    return found[given[0]] if given else None


def _of_format(given: dict[str, Any]) -> Structure | None:
    try:
        format = msgspec.convert(given, Format)
    except msgspec.ValidationError as e:
        error = to_bad_request(e)
        param = f"response_format.{error.param}" if error.param else "response_format"
        raise BadRequest(str(error).replace(error.param or "body", param, 1), param) from None
    if (format.json_schema is None) == (format.type == "json_schema"):
        what = "is missing" if format.json_schema is None else f"not with type {format.type}"
        raise BadRequest(f"response_format.json_schema: {what}", "response_format.json_schema")
    if format.json_schema is not None:
        param = "response_format.json_schema.schema"
        return Structure(of_schema(format.json_schema.schema, param, lenient=format.json_schema.strict is False), param)
    return Structure(of_schema({"type": "object"}, "response_format"), "response_format") if format.type != "text" else None


def _of_outputs(given: StructuredOutputs) -> Structure:
    kinds = [k for k in KINDS if getattr(given, k) not in (None, False)]
    if len(kinds) != 1:
        raise BadRequest(f"structured_outputs: give exactly one of {', '.join(KINDS)}", "structured_outputs")
    param = f"structured_outputs.{kinds[0]}"
    if given.regex is not None:
        return Structure(of_regex(given.regex, param), param)
    if given.choice is not None:
        return Structure(of_choice(given.choice, param), param)
    if given.grammar is not None:
        return Structure(of_grammar(given.grammar, param), param)
    spaces = "" if given.disable_any_whitespace else given.whitespace_pattern
    schema = {"type": "object"} if given.json is None else _loaded(given.json, param)
    return Structure(of_schema(schema, param, spaces=spaces, closed=given.disable_additional_properties is not False), param)


def _loaded(schema: dict[str, Any] | str, param: str) -> dict[str, Any]:
    if isinstance(schema, dict):
        return schema
    try:
        found = json.loads(schema, parse_constant=_no_number)
    except (ValueError, RecursionError) as e:
        raise BadRequest(f"{param}: must be JSON: {str(e)[:200]}", param) from None
    if not isinstance(found, dict):
        raise BadRequest(f"{param}: must be a JSON schema, which is an object", param)
    return found


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


# --- grammars by kind


def of_schema(
    schema: dict[str, Any], param: str, *, lenient: bool = False, spaces: str | None = None, closed: bool = True
) -> str:
    """JSON that fits the schema. lenient, closed: see `grammar.schema`. spaces: see `of_simplified`."""
    _check_size(dump(schema, param), param)
    to = Simplifier(closed)
    return of_simplified(to.add(schema, param, lenient), to, param, spaces)


def of_simplified(schema: Any, to: Simplifier, param: str, spaces: str | None = None) -> str:
    """JSON that fits what `to` gave. spaces: a pattern for what may stand between its tokens, "" for nothing; None: SPACES."""
    options: dict[str, Any] = {}
    if spaces == "":
        options["whitespace_flexible"] = False
    else:
        options["whitespace_pattern"] = f"({spaces or SPACES})"
    if to.open:  # the key \u0061 would be a second key a, so only characters that JSON requires to be escaped are escaped
        options["json_allowed_escapes"] = 'nrbtf\\"'
    schema = schema if isinstance(schema, dict) else {"allOf": [schema]}
    text = _check_size(dump({**schema, "$defs": to.defs}, param), param)
    try:
        return _check_size(llguidance.LLMatcher.grammar_from_json_schema(text, overrides=options), param)  # type: ignore[arg-type]
    except ValueError as e:
        raise BadRequest(f"{param}: {e}", param) from None


def dump(schema: Any, param: str) -> str:
    try:
        return json.dumps(schema)
    except RecursionError:
        raise BadRequest(f"{param}: nested too deeply", param) from None


def of_regex(pattern: str, param: str) -> str:
    """The whole answer matches the pattern (Rust's dialect: no look-around, no back references)."""
    return llguidance.LLMatcher.grammar_from_regex(_check_size(pattern, param))


def of_choice(choices: list[str], param: str) -> str:
    """One of the given texts."""
    return of_regex("|".join(map(_escaped, choices)), param)


def of_grammar(text: str, param: str) -> str:
    """A grammar in Lark's notation or in GBNF.

    Lark is llguidance's dialect: `start` is the start rule, <|name|> a special token, %json a schema in braces. In GBNF the
    start rule is `root`."""
    _check_size(text, param)
    try:
        lark = gbnf_to_lark(text) if _GBNF_RULE.search(text) else text
    except RecursionError:
        raise BadRequest(f"{param}: nested too deeply", param) from None
    except Exception as e:  # the library raises nothing narrower
        raise BadRequest(f"{param}: {str(e)[:300]}", param) from None
    return _check_size(json.dumps({"grammars": [{"lark_grammar": lark}]}), param)


def of_parts(lark: str, param: str, **parts: str) -> str:
    """A grammar in Lark's notation in which @name stands for the grammar `name`; each of those has one part, as made above."""
    named = [{**json.loads(text)["grammars"][0], "name": name} for name, text in parts.items()]
    return _check_size(json.dumps({"grammars": [{"lark_grammar": lark}, *named]}), param)


def _escaped(text: str) -> str:
    return re.sub(r"[^\w ]|_", lambda m: f"\\x{{{ord(m[0]):x}}}", text)


def _check_size(text: str, param: str) -> str:
    if len(text) > MAX_TEXT_CHARS:
        raise BadRequest(f"{param}: must have at most {MAX_TEXT_CHARS} characters", param)
    return text
