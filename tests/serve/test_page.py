"""The page in headless Chromium: a chat that streams, figures that move, the timeline, the key."""

import time

import pytest

from slipstream.process.board import PHASE_ID, Board
from tests.serve import browser
from tests.serve.fake import EOS, Script

pytestmark = pytest.mark.skipif(browser.find() is None, reason="needs chromium (apt-get install chromium)")

ANSWER = "The capital of France is Paris. It lies on the Seine, and has done so for some time."


@pytest.fixture
def page():
    b = browser.Browser()
    yield b
    b.close()


LOOP = {"plan": 300_000, "publish": 150_000, "launch": 900_000, "settle": 700_000, "wait": 7_000_000}  # ns of a step


def fill(board: Board, seconds: float = 1.5) -> None:
    """Steps of 10 ms on two ranks: the loop plans and settles beside a device that idles a tenth of the time."""
    now = time.monotonic_ns()
    for rank in range(2):
        pen = board.writer(rank)
        for name, value in (("pid", 100 + rank), ("rank", rank), ("state", 2)):
            pen.set(name, value)
        at = now - int(seconds * 1e9)
        for entry in range(int(seconds * 100)):
            span = at
            for phase, took in LOOP.items():
                pen.span(PHASE_ID[phase], span, span + took, entry)
                span += took
            pen.device_span(at + 500_000, at + 9_500_000, entry)
            at += 10_000_000


def ask(page: browser.Browser, text: str) -> None:
    page.run(f"document.getElementById('prompt').value = {text!r}; document.getElementById('send').click()")


def test_a_chat_streams_and_the_figures_move(own_front, page):
    board = Board.create(2)
    front = own_front(board=board, enable_debug=True)
    fill(board)
    front.script = Script([*ANSWER.encode(), EOS])
    front.leader.step = 0.004
    front.leader.load(running=1, pages_used=30, steps={"overlap": 95, "no_overlap": 5})
    page.open(front.url)
    page.wait("document.getElementById('model').textContent == 'fake'")
    ask(page, "What is the capital of France?")
    page.wait("document.querySelector('.turn.assistant.open')?.textContent.length > 5")  # while it streams
    page.wait("document.querySelector('.turn.assistant footer') != null")
    assert ANSWER in page.run("document.querySelector('.turn.assistant').textContent")
    for figure in ("ttft", "itl", "itl99", "rate"):
        assert float(page.run(f"document.getElementById('{figure}').textContent")) > 0
    page.wait("document.getElementById('overlap').textContent == '95 %'")
    page.wait("document.getElementById('state').textContent == 'ready'")
    page.wait("document.getElementById('timeline-note').textContent.includes('Device idle')")
    idle = page.run("document.getElementById('timeline-note').textContent.match(/rank 1 ([0-9.]+) %/)[1]")
    assert 9 < float(idle) < 11
    assert page.run("document.getElementById('timeline').height") > 100
    ask(page, "And then?")
    page.wait("document.querySelectorAll('.turn.assistant footer').length == 2")
    assert front.leader.requests[-1].prompt_len > front.leader.requests[0].prompt_len  # the history went along
    assert not page.errors


def test_an_error_shows_and_the_chat_goes_on(own_front, page):
    front = own_front()
    front.script = Script([*b"half"], reason="error", error="the device is gone")
    page.open(front.url)
    page.wait("document.getElementById('model').textContent == 'fake'")
    page.wait("document.getElementById('timeline-note').textContent.includes('--enable-debug')")
    ask(page, "x")
    page.wait("document.querySelector('.turn.error')?.textContent == 'the device is gone'")
    front.script = Script([*b"fine", EOS])
    ask(page, "y")
    page.wait("[...document.querySelectorAll('.turn.assistant')].some(t => t.textContent.startsWith('fine'))")


def test_the_page_asks_for_the_key_and_keeps_it_in_the_tab(own_front, page):
    front = own_front(api_key="sesame")
    page.open(front.url)
    page.wait("!document.getElementById('key-form').hidden")
    page.run("document.getElementById('key').value = 'wrong'; document.querySelector('#key-form button').click()")
    page.wait("document.getElementById('key-note').textContent.includes('not right')")
    page.run("document.getElementById('key').value = 'sesame'; document.querySelector('#key-form button').click()")
    page.wait("document.getElementById('model').textContent == 'fake'")
    assert page.run("document.getElementById('key-form').hidden && sessionStorage.getItem('slipstream-key')") == "sesame"
    assert page.run("localStorage.length + document.cookie.length") == 0
    ask(page, "x")
    page.wait("document.querySelector('.turn.assistant footer') != null")
