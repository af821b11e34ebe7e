"""The process that renders chat templates: `python -m slipstream.tokenize.template_worker`, started by `template.py`.

It imports jinja2, the standard library, `system.framing` and `system.own_limits` only.

A template is a program that came with a model. It runs in jinja2's sandbox, and the kernel enforces limits: CPU time for
each rendering (a timer whose signal ends the process, also from inside one long C call), memory, no new files. The parent sees
the end of the pipe and starts another.

Messages both ways are JSON, framed as `system.framing` says. First {"source", "seconds", "memory", "chars"}, then for each
rendering the template's variables; answers are {"text"} or {"error", "kind"} with kind `syntax`, `raised`, `failed` or `large`.
"""

import datetime
import json
import signal
import sys

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from slipstream.system.framing import read_frame, write_frame
from slipstream.system.own_limits import limit_this_process


class Raised(jinja2.TemplateError):
    """The template refused its input through raise_exception()."""


class GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks the assistant's own text for training; here its body is simply rendered."""

    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message):
    raise Raised(str(message))


def _strftime_now(format):
    return datetime.datetime.now().strftime(format)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    """json.dumps, without the HTML escapes of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def compile_template(source: str) -> jinja2.Template:
    """The template in an environment as Hugging Face's chat templates expect it. Raises jinja2.TemplateSyntaxError."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def render(template: jinja2.Template, variables: dict, max_chars: int) -> dict:
    """The answer to one request. Errors of the template are answers too, not exceptions."""
    pieces, size = [], 0
    try:
        for piece in template.generate(**variables):
            size += len(piece)
            if size > max_chars:
                return {"kind": "large", "error": f"its text has more than {max_chars} characters"}
            pieces.append(piece)
    except Raised as e:
        return {"kind": "raised", "error": e.message}
    except MemoryError:
        pieces.clear()
        return {"kind": "large", "error": "it needs too much memory"}
    except RecursionError:
        return {"kind": "failed", "error": "it recurses too deeply"}
    except Exception as e:
        return {"kind": "failed", "error": f"{type(e).__name__}: {e}"[:500]}
    return {"text": "".join(pieces)}


def _read(stream) -> dict | None:
    body = read_frame(stream)
    return None if body is None else json.loads(body)


def _write(stream, answer: dict) -> None:
    write_frame(stream, json.dumps(answer).encode())


def main() -> None:
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    setup = _read(requests)
    if setup is None:
        return
    limit_this_process(setup["memory"])
    signal.setitimer(signal.ITIMER_PROF, setup["seconds"])
    try:
        template = compile_template(setup["source"])
    except jinja2.TemplateSyntaxError as e:
        return _write(answers, {"kind": "syntax", "error": f"line {e.lineno}: {e.message}"})
    except (RecursionError, MemoryError, SyntaxError, ValueError) as e:
        return _write(answers, {"kind": "syntax", "error": f"it cannot be compiled ({type(e).__name__})"})
    signal.setitimer(signal.ITIMER_PROF, 0)
    _write(answers, {"text": ""})
    while (variables := _read(requests)) is not None:
        signal.setitimer(signal.ITIMER_PROF, setup["seconds"])
        answer = render(template, variables, setup["chars"])
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(answers, answer)


if __name__ == "__main__":
    main()
