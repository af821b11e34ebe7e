"""Streams: what arrives, in which order, and how they end when something goes wrong."""

import json
import socket

import pytest

from slipstream.process.protocol import Refused
from tests.serve.fake import EOS, WORDS, Script, wait_for

W = {w: 258 + i for i, w in enumerate(WORDS)}
MESSAGES = [{"role": "user", "content": "x"}]


def complete(front, **body):
    return front.events("/v1/completions", **{"prompt": "hi", **body})


def chat(front, **body):
    return front.events("/v1/chat/completions", **{"messages": MESSAGES, **body})


def send_raw(sock, body: bytes) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)


def text_of(events) -> str:
    choices = [c for e in events if e != "[DONE]" for c in e["choices"]]
    return "".join(c["delta"].get("content") or "" if "delta" in c else c["text"] for c in choices)


def test_a_stream_says_what_the_whole_says(front):
    for run, key in ((chat, "delta"), (complete, "text")):
        events = run(front, stream_options={"include_usage": True})
        assert events[-1] == "[DONE]" and events[-2]["choices"] == [] and text_of(events) == "hello"
        assert events[-2]["usage"]["completion_tokens"] == 6 and key in events[0]["choices"][0]
        assert all(e["usage"] is None for e in events[:-2]), "OpenAI's chunks have it, as null"
        ends = [c["finish_reason"] for e in events[:-2] for c in e["choices"] if c["finish_reason"]]
        assert ends == ["stop"] and len({e["id"] for e in events[:-1]}) == 1
    assert chat(front)[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_usage_goes_along_when_asked(front):
    events = complete(front, max_tokens=3, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [e["usage"]["completion_tokens"] for e in events[:-1]]
    assert counts == sorted(counts) and counts[-1] == 3 and all(e["usage"]["prompt_tokens"] == 2 for e in events[:-1])
    assert all("usage" not in e for e in complete(front)[:-1])


def test_ff82_a_character_is_never_split_between_events(front):
    text = "aé漢字👩‍👩‍👧z"
    front.script = Script([*text.encode(), EOS])
    for run in (chat, complete):
        events = run(front, max_tokens=100)
        assert text_of(events) == text and "\ufffd" not in json.dumps(events, ensure_ascii=False)
    front.script = Script([*"漢".encode()[:2], EOS])  # an answer that ends inside one
    assert text_of(complete(front)) == "\ufffd"


def test_a_stop_string_never_leaks_a_character(front):
    front.script = Script([*b"one ST", *b"ill ", W["ST"], W["OP"], *b"never", EOS], late_tokens=2)
    events = complete(front, stop=["STOP"], max_tokens=100)
    assert text_of(events) == "one STill " and events[-2]["choices"][0]["stop_reason"] == "STOP"
    texts = [c["text"] for e in events[:-1] for c in e["choices"]]
    assert "STi" in texts and not any(t.endswith(("S", "ST")) for t in texts if t)


def test_ff43_streamed_ids_and_log_probabilities_stay_aligned_at_a_stop(front):
    front.script = Script([*b"ab", W["ST"], W["OP"], *b"never"], late_tokens=5)
    events = complete(front, stop=["STOP"], logprobs=1, return_token_ids=True)
    choices = [c for e in events[:-1] for c in e["choices"]]
    ids = [i for c in choices for i in c["token_ids"]]
    tokens = [t for c in choices if c["logprobs"] for t in c["logprobs"]["tokens"]]
    offsets = [o for c in choices if c["logprobs"] for o in c["logprobs"]["text_offset"]]
    assert ids == [*b"ab", W["ST"], W["OP"]] and tokens == ["a", "b", "ST", "OP"] and offsets == [0, 1, 2, 4]
    assert choices[0]["prompt_token_ids"] == list(b"hi") and text_of(events) == "ab"


def test_echo_streams_the_prompt_first(front):
    events = complete(front, prompt="abc", echo=True, logprobs=0, max_tokens=2)
    first = events[0]["choices"][0]
    assert first["text"] == "abc" and first["logprobs"]["token_logprobs"] == [None, -0.098, -0.099]
    assert events[1]["choices"][0]["logprobs"]["text_offset"] == [3] and text_of(events) == "abche"
    assert text_of(complete(front, prompt="abc", echo=True, max_tokens=0)) == "abc"


def test_choices_are_interleaved_and_each_ends_once(front):
    front.script = lambda r: Script([48 + r.sampling.choice] * (r.sampling.choice + 1) + [EOS])
    events = complete(front, prompt=["a", "b"], n=2)
    choices = [c for e in events[:-1] for c in e["choices"]]
    texts = ["".join(c["text"] for c in choices if c["index"] == i) for i in range(4)]
    assert texts == ["0", "11", "0", "11"]
    assert sorted(c["index"] for c in choices if c["finish_reason"]) == [0, 1, 2, 3]


def test_tokens_that_come_together_go_out_together(front):
    front.script = Script([*b"hello world", EOS], per_step=4)
    texts = [c["text"] for e in complete(front)[:-1] for c in e["choices"]]
    assert texts[0] == "hell" and len(texts) <= 4


def test_a_refusal_before_the_first_token_is_a_status(front):
    front.script = Script([], refuse=Refused(0, 503, "draining"))
    r = front.complete(stream=True)
    assert r.status_code == 503 and r.headers["content-type"] == "application/json"


def test_an_error_after_a_stream_began_is_one_event_and_the_end(front):
    front.script = Script([*b"abc"], reason="error", error="grammar dead end")
    events = complete(front)
    assert text_of(events[:-1]) == "abc"
    assert events[-1]["error"]["message"] == "grammar dead end" and sum("error" in e for e in events) == 1


def test_a_lost_leader_is_one_error_event_each_and_503_until_the_next(own_front):
    front = own_front()
    front.script = Script(list(b"abc"))
    with front.client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as r:
        lines = r.iter_lines()
        while '"c"' not in next(lines):
            pass
        front.down("rank 1 died")
        rest = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert len(rest) == 1 and "rank 1 died" in rest[0]["error"]["message"] and rest[0]["error"]["code"] == "engine_down"
    r = front.complete()
    assert r.status_code == 503 and r.headers["retry-after"] and "rank 1 died" in r.text
    assert front.client.get("/health").status_code == 503
    front.restart_leader()
    front.script = Script([*b"again", EOS])
    assert front.complete().json()["choices"][0]["text"] == "again" and front.client.get("/health").status_code == 200


def test_a_lost_leader_ends_a_whole_answer_with_500(own_front):
    import threading

    front = own_front()
    front.script = Script(list(b"abc"))
    got = []
    thread = threading.Thread(target=lambda: got.append(front.complete()))
    thread.start()
    wait_for(lambda: bool(front.leader.requests))
    front.leader.kill()
    thread.join(10)
    assert got[0].status_code == 500 and got[0].json()["error"]["type"] == "server_error"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_is_dropped_at_once(front, stream):
    front.script = Script(list(b"abc"))
    body = json.dumps({"prompt": "x", "stream": stream}).encode()
    sock = socket.create_connection(("127.0.0.1", front.port))
    send_raw(sock, body)
    wait_for(lambda: bool(front.leader.requests))
    sock.close()
    wait_for(lambda: bool(front.leader.aborts))
    assert front.leader.aborts[0].id == front.leader.requests[0].id
    wait_for(lambda: not front.front.open and front.front.engine.live == 0)  # FF-84: nothing is kept of it


def test_a_client_that_does_not_read_is_cut_off(own_front):
    front = own_front(max_len=1 << 22, pages=1 << 20)
    front.front.slow_reader_seconds = 0.5
    front.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # connections inherit it
    front.script = Script([W[" hello"]] * 400_000, per_step=50)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", front.port))
    body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 400_000, "return_token_ids": True}).encode()
    send_raw(sock, body)
    wait_for(lambda: bool(front.leader.requests))
    wait_for(lambda: not front.front.open, 15)
    assert front.front.engine.live == 0
    wait_for(lambda: bool(front.leader.aborts), 15)
    sock.close()


def test_draining_lets_running_answers_end_and_refuses_new_ones(own_front):
    front = own_front()
    front.script = Script([*b"abc", EOS])
    front.leader.hold.set()
    with front.client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as r:
        front.call(front.front.engine.drain)
        refused = front.complete()
        assert refused.status_code == 503 and "shutting down" in refused.text
        front.leader.hold.clear()
        lines = [line for line in r.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
