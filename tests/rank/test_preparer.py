"""The thread that compiles grammars, and the loop that takes what it has done, at their worst moment."""

import threading

from slipstream.log.grammar import Matcher
from slipstream.log.request import Resource
from slipstream.rank.preparer import Preparer
from slipstream.system.bell import Bell
from tests.helpers.poll import wait_for


def refuse(grammar: bytes) -> Matcher:
    raise ValueError(grammar.decode())


def test_what_is_taken_before_its_bell_rings_is_taken_once_and_leaves_no_ring(monkeypatch):
    """The loop may look between the thread's putting a grammar down and its ring: that killed a rank under load once."""
    put, seen = threading.Event(), threading.Event()
    ring = Bell.ring

    def late(bell: Bell) -> None:
        put.set()
        assert seen.wait(10)
        ring(bell)

    monkeypatch.setattr(Bell, "ring", late)
    preparer = Preparer(lambda: {"grammar": refuse})
    preparer.open()
    preparer.prepare(7, (Resource("grammar", b"no such rule"),))
    assert put.wait(10)
    assert [(done.id, done.made, done.error) for done in preparer.take()] == [(7, {}, "no such rule")]
    seen.set()
    assert wait_for(preparer.fileno(), timeout=10)
    assert preparer.take() == []
    assert not wait_for(preparer.fileno(), timeout=0), "the loop would turn without a rest"


def test_rings_before_a_look_are_one():
    bell = Bell()
    bell.clear()
    assert not wait_for(bell.fileno(), timeout=0)
    bell.ring()
    bell.ring()
    assert wait_for(bell.fileno(), timeout=0)
    bell.clear()
    assert not wait_for(bell.fileno(), timeout=0)
    bell.close()
