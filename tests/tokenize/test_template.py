"""Chat templates: as transformers renders them, and what a hostile or broken one gets."""

import concurrent.futures
import json
import os
import pathlib
import signal

import pytest

from slipstream.errors import BadRequest, EngineDown, ModelError
from slipstream.tokenize import template as module
from slipstream.tokenize.template import ChatTemplate

DATA = pathlib.Path(__file__).parents[1] / "data"
CASES = json.loads((DATA / "chat_templates.json").read_text())["cases"]
HELLO = [{"role": "user", "content": "hello"}]


def render(source: str, messages=HELLO, **kwargs) -> str:
    template = ChatTemplate(source)
    try:
        return template.render(messages, **kwargs)
    finally:
        template.close()


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['name']}-{bool(c['tools'])}")
def test_templates_render_as_transformers_renders_them(case):
    template = ChatTemplate(case["template"], case["variables"])
    assert template.render(case["messages"], tools=case["tools"], **case["kwargs"]) == case["text"]
    template.close()


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10**11 }}",
        "{% set n = messages[0].content|length + 4 %}{{ n ** (n ** n) }}",
        "{{ 'a'.center(10**11) }}",
        "{{ '%100000000000d' % messages[0].content|length }}",
        "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(90) }}",
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].nothing.more }}",
        "{% if %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_hostile_or_broken_template_is_a_bad_request_and_the_next_one_works(source, monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 0.3)
    with pytest.raises(BadRequest) as caught:
        render(source)
    assert caught.value.param == "messages"
    assert render("{{ messages[0].content }}") == "hello"


def test_output_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "MAX_CHARS", 1000)
    with pytest.raises(BadRequest, match="more than 1000 characters"):
        render("{% for i in range(300) %}hello{% endfor %}")


def test_a_template_goes_on_after_one_rendering_took_too_long(monkeypatch):
    monkeypatch.setattr(module, "SECONDS", 0.3)
    template = ChatTemplate(
        "{% if stall %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}x"
    )
    for _ in range(2):
        with pytest.raises(BadRequest, match="did not end"):
            template.render(HELLO, stall=True)
        assert template.render(HELLO) == "x"
    template.close()


def test_a_killed_worker_is_replaced():
    template = ChatTemplate("x")
    assert template.render(HELLO) == "x"
    assert template._worker is not None
    os.kill(template._worker.pid, signal.SIGKILL)
    template._worker.wait()
    assert template.render(HELLO) == "x"
    template.close()


def test_a_worker_that_stands_still_beside_a_large_message_ends_one_rendering_and_not_all(monkeypatch):
    """The message does not fit into the pipe, so that writing it is what would wait for ever."""
    monkeypatch.setattr(module, "PATIENCE_SECONDS", 1.0)
    template = ChatTemplate("{{ messages[0].content }}")
    assert template.render(HELLO) == "hello"
    assert template._worker is not None
    os.kill(template._worker.pid, signal.SIGSTOP)
    with pytest.raises(EngineDown, match="did not answer within 1 s"):
        template.render([{"role": "user", "content": "x" * 200_000}])
    assert template.render(HELLO) == "hello"
    template.close()


def test_the_templates_own_refusal_is_the_messages_fault():
    with pytest.raises(BadRequest, match="^roles must alternate$") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"


def test_a_template_that_does_not_compile_stops_the_start():
    with pytest.raises(ModelError, match="line 2"):
        ChatTemplate("\n{% for %}").start()


def test_the_last_message_is_continued_where_its_text_ends():
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
    trimmed = source.replace("m.content", "m.content | trim")
    messages = [*HELLO, {"role": "assistant", "content": "Sure: "}]

    def go(source, messages):
        return render(source, messages, add_generation_prompt=False, continue_final_message=True)

    assert go(source, messages) == "[user]hello</s>[assistant]Sure: "
    assert go(trimmed, messages) == "[user]hello</s>[assistant]Sure:"
    parts = source.replace("{{ m.content }}", "{{ m.content[0].text if m.role == 'assistant' else m.content }}")
    assert go(parts, [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "Su"}]}]).endswith("[assistant]Su")
    with pytest.raises(BadRequest) as caught:
        go("{{ messages[0].content }}", messages)
    assert caught.value.param == "continue_final_message"
    with pytest.raises(BadRequest):
        go(source, [{"role": "assistant", "content": None}])
    with pytest.raises(BadRequest):
        render(source, messages, continue_final_message=True)


@pytest.mark.parametrize("blank", ["", " ", "\n", " \n\n"])
def test_a_blank_beginning_of_an_answer_leaves_the_turn_s_head_whole(blank):
    messages = [*HELLO, {"role": "assistant", "content": blank}]
    for shown, left in (
        ("m.content", blank),
        ("m.content | trim", ""),
        ("m.content.rstrip()", ""),
        ("m.content.lstrip()", ""),
        ("m.content.lstrip(' ')", blank.lstrip(" ")),
    ):
        source = "{% for m in messages %}<s>{{ m.role + '\n' + " + shown + " }}</s>{% endfor %}"
        text = render(source, messages, add_generation_prompt=False, continue_final_message=True)
        assert text == "<s>user\nhello</s><s>assistant\n" + left, shown


def test_threads_share_one_template():
    template = ChatTemplate("{{ messages[0].content }}")
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        texts = [str(i) * 1000 for i in range(100)]
        assert list(pool.map(lambda t: template.render([{"role": "user", "content": t}]), texts)) == texts
    template.close()


def test_extra_variables_reach_the_template_and_names_of_python_do_no_harm():
    assert render("{{ a.b[1] }}{{ tools is none }}", a={"b": [1, "é"]}) == "éTrue"
    with pytest.raises(BadRequest):
        render("x", **{"self": 1})


def test_the_servers_environment_is_not_the_workers(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hidden-key")
    template = ChatTemplate("x")
    template.start()
    assert template._worker is not None
    assert b"hidden-key" not in pathlib.Path(f"/proc/{template._worker.pid}/environ").read_bytes()
    template.close()
