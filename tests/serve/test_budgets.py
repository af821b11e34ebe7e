"""What clients send slowly or do not read is bounded in bytes, and does not keep small requests out."""

import socket

import pytest

from slipstream.serve.budget import Budget
from slipstream.serve.engine.engine import RequestLimits
from slipstream.serve.openai.bodies import CompletionBody
from slipstream.serve.openai.generate import requests_of
from slipstream.serve.request_body import INLINE_BYTES, converted
from slipstream.serve.text.params import make_plan
from slipstream.serve.text.prompts import all_prompts
from tests.serve.fake import EOS, Script, wait_for


def test_a_budget_is_never_exceeded():
    budget = Budget(10)
    assert budget.take(6) and not budget.take(5) and budget.take(4) and not budget.take(1)
    budget.give(6)
    assert budget.take(6)


def stalled(port: int, size: int) -> socket.socket:
    """A client that has sent `size` bytes of a larger body and sends no more."""
    sock = socket.create_connection(("127.0.0.1", port))
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9999999\r\n\r\n"
    )
    sock.sendall(head + b'{"prompt": "' + b"x" * size)
    return sock


def test_stalled_bodies_are_bounded_and_small_requests_go_on(own_front):
    front = own_front()
    front.front.bodies = Budget(4 << 20)
    stuck = [stalled(front.port, 1 << 20) for _ in range(4)]
    wait_for(lambda: front.front.bodies.held > (3 << 20))
    refused = front.complete(user="x" * (1 << 20))
    assert refused.status_code == 503 and "--body-memory-bytes" in refused.text and refused.headers["retry-after"]
    assert front.complete().status_code == 200, "a small body is not counted"
    assert front.front.bodies.held <= 4 << 20
    for sock in stuck:
        sock.close()
    wait_for(lambda: front.front.bodies.held == 0)
    assert front.complete(user="x" * INLINE_BYTES).status_code == 200


@pytest.fixture
def unread(own_front):
    """A front end, and a function that opens a client which asks for a large answer and does not read it."""
    front = own_front(max_len=1 << 20, pages=1 << 20)
    front.front.slow_reader_seconds = 1e9
    front.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # connections inherit it
    front.script = Script([*b"hello "] * 100_000 + [EOS], per_step=5000)
    made = []

    def ask() -> None:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", front.port))
        body = b'{"prompt": "x", "max_tokens": 400000}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        sock.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        made.append(sock)

    yield front, ask
    for sock in made:
        sock.close()


def test_whole_answers_that_nobody_reads_are_bounded_and_cut_off(unread):
    front, ask = unread
    deliveries = front.front.deliveries
    deliveries._budget = Budget(1 << 20)
    for _ in range(2):
        ask()
        ask()
        wait_for(lambda: len(deliveries.waiting) == 2)
        assert 400_000 < deliveries._budget.held <= 1 << 20
        refused = front.complete(max_tokens=400_000)
        assert refused.status_code == 503 and "--answer-memory-bytes" in refused.text
        front.script, before = Script([*b"hello", EOS]), front.script
        assert front.complete().status_code == 200
        front.script = before
        front.front.slow_reader_seconds = 0.2
        wait_for(lambda: not deliveries.waiting and not deliveries._budget.held)
        front.front.slow_reader_seconds = 1e9


@pytest.mark.parametrize("more", [{"max_tokens": 5}, {"max_tokens": 0, "echo": True, "logprobs": 1}])
def test_the_choices_of_a_request_share_what_is_large(own_front, more):
    front = own_front(max_len=20_000, pages=1 << 12)
    tokenizer, found = front.tokenizer, {"prompt": [5] * 10_000, "n": 8, "logit_bias": {"1": 1.0}, **more}
    body = converted(found, CompletionBody)
    plan = make_plan(body, tokenizer)
    prompts = all_prompts(body, plan, tokenizer, RequestLimits(20_000, 1 << 12, 8))
    requests = [request for _, request in requests_of(front.front, plan, prompts)]
    assert len({request.id for request in requests}) == 8 and [r.sampling.choice for r in requests] == list(range(8))
    assert len({id(r.prompt) for r in requests}) == len({id(r.sampling.logit_bias) for r in requests}) == 1
