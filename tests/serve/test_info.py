"""Models, tokens, health, metrics, and what --enable-debug shows."""

import asyncio
import os
import re
import time

import anthropic
import pytest

from slipstream.process.board import PHASE_ID, Board
from slipstream.serve.engine.progress import Progress
from tests.serve.fake import EOS, Script, wait_for


def test_models(front):
    b = front.client.get("/v1/models").json()
    assert b["data"][0]["id"] == "fake" and b["data"][0]["max_model_len"] == 512
    assert front.client.get("/v1/models/fake").json()["id"] == "fake"
    assert front.client.get("/v1/models/a/b").status_code == 404


def test_anthropic_s_client_lists_the_models(front):
    with anthropic.Anthropic(base_url=front.url, api_key="none", max_retries=0) as client:
        (model,) = client.models.list()
        assert (model.id, model.type, model.display_name) == ("fake", "model", "fake")
        assert int(model.created_at.timestamp()) == front.front.created
        assert client.models.retrieve("fake").max_input_tokens == 512
        with pytest.raises(anthropic.NotFoundError):
            client.models.retrieve("other")


def test_every_name_that_the_model_is_served_under_is_taken(own_front):
    front = own_front(served_model_name=["gpt-4o", "org/m"])
    assert [m["id"] for m in front.client.get("/v1/models").json()["data"]] == ["gpt-4o", "org/m"]
    assert front.client.get("/v1/models/org/m").json()["id"] == "org/m"
    for name, status in (("gpt-4o", 200), ("org/m", 200), ("fake", 404)):
        assert front.client.post("/tokenize", json={"model": name, "prompt": "a"}).status_code == status


def test_tokenize_and_back(front):
    b = front.client.post("/tokenize", json={"prompt": "aé", "return_token_strs": True}).json()
    assert b["tokens"] == list("aé".encode()) and b["count"] == 3 and b["max_model_len"] == 512
    assert b["token_strs"] == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert front.client.post("/detokenize", json={"tokens": b["tokens"]}).json() == {"prompt": "aé"}
    b = front.client.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()
    assert b["count"] == len("?user\nx??assistant\n")
    for body, param in (
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": "a", "messages": []}, "m"),
    ):
        r = front.client.post("/tokenize", json=body)
        assert r.status_code == 400 and r.json()["error"]["param"].startswith(param)
    assert front.client.post("/detokenize", json={"tokens": [9999]}).status_code == 400


def test_the_tokenizer_is_described(front):
    b = front.client.get("/tokenizer_info").json()
    assert (b["vocab_size"], b["model_max_length"], b["bos_token"], b["eos_token"]) == (
        front.tokenizer.vocab_size,
        512,
        "<|start|>",
        "<|end|>",
    )
    assert b["added_tokens_decoder"][str(EOS)] == {"content": "<|end|>", "special": True} and b["chat_template"] is None


def test_health_says_what_is_missing(own_front):
    front = own_front(attach=False)
    r = front.client.get("/health")
    assert r.status_code == 503 and "loading" in r.json()["reason"] and front.complete().status_code == 503
    front.restart_leader()
    assert front.client.get("/health").json() == {"status": "ok"}
    front.call(front.front.engine.drain)
    assert "shutting down" in front.client.get("/health").json()["reason"]


def test_ff08_health_follows_progress_not_life(monkeypatch):
    monkeypatch.setattr("slipstream.serve.engine.progress.BEAT_SECONDS", 0.2)
    board = Board.create(2)
    pens = [board.writer(i) for i in range(2)]
    for i, pen in enumerate(pens):
        pen.set("pid", os.getpid())
        pen.set("rank", i)
    progress = Progress(board, 0.6)

    def run(seconds, beating, working):
        end, n = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            n += 1
            for i, pen in enumerate(pens):
                if i in beating:
                    pen.set("beat_ns", time.monotonic_ns())
                if i in working:
                    pen.set("applied", time.monotonic_ns())
            progress.look()
            time.sleep(0.01)
        return progress.stalled()

    assert run(0.4, {0, 1}, {0, 1}) is None
    assert "rank 1" in (run(0.4, {0}, {0}) or "")  # stopped
    assert run(0.1, {0, 1}, {0, 1}) is None
    assert "no progress" in (run(0.8, {0, 1}, set()) or "")  # turns its loop and does nothing


def test_metrics_have_vllm_s_names_and_add_up(own_front):
    front = own_front()
    front.script = Script([*b"abc", EOS])
    front.complete(prompt="12345")
    front.complete(max_tokens=2)
    front.leader.load(running=2, waiting=1, pages_used=25, steps={"overlap": 7}, host_seconds={"plan": 0.5}, step_tokens=[3, 9],
                      eager_steps={"sampling": 3}, pages_copied={"offload": 5, "restore": 4})  # fmt: skip
    text = ""

    def arrived():
        nonlocal text
        text = front.client.get("/metrics").text
        return 'kv_pages_used{model_name="fake"} 25.0' in text

    wait_for(arrived)
    for line in (
        'slipstream:num_requests_running{model_name="fake"} 2.0',
        'slipstream:num_requests_waiting{model_name="fake"} 1.0',
        'slipstream:kv_cache_usage_perc{model_name="fake"} 0.25',
        'slipstream:prompt_tokens_total{model_name="fake"} 7.0',
        'slipstream:generation_tokens_total{model_name="fake"} 6.0',
        'slipstream:request_success_total{finished_reason="stop",model_name="fake"} 1.0',
        'slipstream:request_success_total{finished_reason="length",model_name="fake"} 1.0',
        'slipstream:time_to_first_token_seconds_count{model_name="fake"} 2.0',
        'slipstream:inter_token_latency_seconds_count{model_name="fake"} 4.0',
        'slipstream:e2e_request_latency_seconds_count{model_name="fake"} 2.0',
        'slipstream:iteration_tokens_total_sum{model_name="fake"} 12.0',
        'slipstream:prefix_cache_queries_total{model_name="fake"} 0.0',
        'slipstream:prefix_cache_hits_total{model_name="fake"} 0.0',
        'slipstream:steps_total{model_name="fake",order="overlap"} 7.0',
        'slipstream:eager_steps_total{model_name="fake",reason="sampling"} 3.0',
        'slipstream:kv_pages_copied_total{copy="offload",model_name="fake"} 5.0',
        'slipstream:kv_pages_copied_total{copy="restore",model_name="fake"} 4.0',
        'slipstream:step_host_seconds_total{model_name="fake",phase="plan"} 0.5',
    ):
        assert line in text, line
    front.leader.load(steps={"overlap": 9})
    wait_for(lambda: 'order="overlap"} 9.0' in front.client.get("/metrics").text)
    front.down("gone")
    front.restart_leader()  # whose own count begins at 0
    front.leader.load(steps={"overlap": 1})
    wait_for(lambda: 'order="overlap"} 10.0' in front.client.get("/metrics").text)


def test_the_ranks_timeline_is_a_chrome_trace(own_front):
    board = Board.create(2)
    for rank in range(2):
        pen = board.writer(rank)
        for name, value in (
            ("pid", 100 + rank),
            ("rank", rank),
            ("state", 2),
            ("weight_bytes", 5),
            ("launched", 3),
            ("settled", 2),
        ):
            pen.set(name, value)
        now = time.monotonic_ns()
        pen.span(PHASE_ID["plan"], now, now + 1000, 1)
        pen.device_span(now + 1000, now + 5000, 1, 2)
    front = own_front(board=board, enable_debug=True)
    ranks = front.client.get("/debug/ranks").json()
    keys = ("group", "rank", "pid", "weight_bytes", "launched", "settled", "state")
    assert [tuple(r[k] for k in keys) for r in ranks] == [(0, 0, 100, 5, 3, 2, "ready"), (0, 1, 101, 5, 3, 2, "ready")]
    events = front.client.get("/debug/timeline?seconds=60").json()["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert [(e["name"], e["pid"], e["dur"]) for e in spans] == [
        ("plan", 0, 1),
        ("device", 0, 4),
        ("plan", 1, 1),
        ("device", 1, 4),
    ]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {names[e["pid"], e["tid"]] for e in spans} == {"loop", "device"}
    for bad in ("x", "0", "-1", "nan", "inf", "1e9"):
        assert front.client.get(f"/debug/timeline?seconds={bad}").status_code == 400


@pytest.mark.parametrize("path", ["/debug/ranks", "/debug/timeline"])
def test_debug_routes_are_off_unless_asked_for(own_front, path):
    assert own_front().client.get(path).status_code == 404


def test_ready_says_whether_a_new_request_would_be_served(own_front):
    front = own_front(attach=False)
    r = front.client.get("/ready")
    assert r.status_code == 503 and r.json() == {"ready": False, "reason": "starting: the model is loading"}
    asyncio.run_coroutine_threadsafe(front._attach(), front.loop).result(5)
    assert front.client.get("/ready").json() == {"ready": True}
    front.call(front.front.engine.drain)
    assert front.client.get("/ready").status_code == 503


@pytest.mark.parametrize("path", ["/v2/embed", "/v1/moderations", "/v1/images/generations", "/v1/load_lora_adapter"])
def test_what_is_not_supported_says_so(front, path):
    r = front.client.post(path, json={"input": "x"})
    error = r.json()["error"]
    assert r.status_code == 501 and error["code"] == "not_supported" and "not supported" in error["message"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/v2/rerank"])
def test_a_server_that_generates_says_so_where_a_client_asks_for_vectors_or_scores(front, path):
    r = front.client.post(path, json={"input": "x"})
    error = r.json()["error"]
    assert r.status_code == 400 and error["code"] == "not_supported" and "generates text" in error["message"]


def test_a_model_s_card_shows_its_limits(front):
    card = front.client.get("/v1/models/fake").json()
    assert card["id"] == "fake" and card["max_model_len"] == 512 and card["vocab_size"] == front.tokenizer.vocab_size
    assert front.client.get("/v1/models").json()["data"] == [card]
    assert front.client.get("/v1/models/other").status_code == 404


def test_answers_are_counted_by_route_and_status_with_bounded_labels(own_front):
    front = own_front(api_key="sesame")
    head = {"authorization": "Bearer sesame"}
    front.client.get("/v1/models")
    for name in ("fake", "a", "b"):
        front.client.get(f"/v1/models/{name}", headers=head)
    for path in ("/nope", "/wp-login.php", "/v1/chat"):
        front.client.get(path, headers=head)
    front.client.get("/v1/completions", headers=head)

    def counts() -> dict[tuple[str, str], float]:
        text = front.client.get("/metrics", headers=head).text
        found = re.findall(r'^slipstream:http_responses_total\{.*route="(.*?)",status="(.*?)"\} (.*)$', text, re.M)
        return {(route, status): float(count) for route, status, count in found}

    assert counts() == {
        ("/v1/models", "401"): 1,
        ("/v1/models/{id:path}", "200"): 1,
        ("/v1/models/{id:path}", "404"): 2,
        ("other", "404"): 3,
        ("/v1/completions", "405"): 1,
    }
    assert counts()["/metrics", "200"] == 1
