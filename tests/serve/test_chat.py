"""POST /v1/chat/completions, whole."""

from array import array

from tests.serve.fake import EOS, START, Script

CACHE = {"cache_control": {"type": "ephemeral"}}  # as clients write it that speak to Anthropic too


def prompt_of(front) -> str:
    return bytes(b if b < 256 else 124 for b in array("i", front.leader.requests[-1].prompt)).decode()


def test_a_conversation_is_answered(front):
    r = front.chat("what?", max_tokens=50)
    assert r.status_code == 200, r.text
    b = r.json()
    assert b["object"] == "chat.completion" and b["choices"][0]["message"] == {"role": "assistant", "content": "hello"}
    assert b["choices"][0]["finish_reason"] == "stop" and b["model"] == "fake"
    assert prompt_of(front) == "|user\nwhat?||assistant\n" and b["id"] == "chatcmpl-" + r.headers["x-request-id"]


def test_the_rest_of_the_context_is_the_default_length(front):
    front.chat("x")
    r = front.leader.requests[-1]
    assert r.max_tokens == 512 - r.prompt_len
    front.chat("x", max_tokens=9, max_completion_tokens=4)
    assert front.leader.requests[-1].max_tokens == 4


def test_parts_roles_and_templates(front):
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a", **CACHE}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "u", **CACHE},
        {"role": "assistant", "content": "so far", "refusal": None, "annotations": []},
    ]
    r = front.client.post("/v1/chat/completions", json={"messages": messages, "continue_final_message": True})
    assert r.status_code == 200, r.text
    assert prompt_of(front) == "|system\na\nb||user\nu||assistant\nso far"
    front.client.post("/v1/chat/completions", json={"messages": messages, "add_generation_prompt": False})
    assert prompt_of(front).endswith("so far|")
    r = front.chat("x", chat_template_kwargs={"explode": True})
    assert r.status_code == 400 and r.json()["error"]["param"] == "messages"
    r = front.chat("x", chat_template_kwargs={"messages": []})
    assert r.status_code == 400 and r.json()["error"]["param"] == "chat_template_kwargs"


def test_log_probabilities_in_chat_s_form(front):
    front.script = Script([*"é".encode(), EOS])
    content = front.chat("x", logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 3 and all(len(c["top_logprobs"]) == 2 for c in content)
    assert content[0]["bytes"] == [0xC3] and content[0]["logprob"] == -0.195
    assert bytes(b for c in content[:2] for b in c["bytes"]).decode() == "é"
    content = front.chat("x", logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert content[0]["top_logprobs"] == []


def test_token_ids_stand_beside_the_choices(front):
    b = front.chat("x", return_token_ids=True, prompt_logprobs=0).json()
    assert b["prompt_token_ids"][0] == START and b["choices"][0]["token_ids"] == [*b"hello", EOS]
    assert len(b["prompt_logprobs"]) == len(b["prompt_token_ids"])


def test_parameters_that_cannot_matter_are_accepted(front):
    r = front.chat(
        "x",
        user="u",
        store=False,
        metadata={"a": "b"},
        service_tier="auto",
        response_format={"type": "text"},
        modalities=["text"],
        verbosity="low",
        prompt_cache_retention="24h",
        client_metadata={"a": "b"},
        functions=[],
    )
    assert r.status_code == 200, r.text
    r = front.chat("x", tools=[], tool_choice="none", parallel_tool_calls=True)
    assert r.status_code == 200, r.text


def test_n_choices(front):
    front.script = lambda r: Script([48 + r.sampling.choice, EOS])
    b = front.chat("x", n=3).json()
    assert [c["message"]["content"] for c in b["choices"]] == ["0", "1", "2"] and b["usage"]["completion_tokens"] == 6
