"""Pieces of work on the event loop: one in a turn, whoever else is ready in between."""

import asyncio
from array import array

from slipstream.serve.engine.exclusive import run_exclusive
from slipstream.serve.request_body import INLINE_BYTES
from slipstream.serve.text.prompts import INLINE_CHARS, prepare


def test_others_run_between_two_pieces_of_work():
    async def story() -> list[str]:
        seen: list[str] = []

        async def stream() -> None:
            while seen.count("work") < 5:
                seen.append("token")
                await asyncio.sleep(0)

        works = [run_exclusive(lambda: seen.append("work")) for _ in range(5)]
        await asyncio.gather(stream(), *works)
        return seen

    for _ in range(2):  # a second loop of the same process has turns of its own
        seen = asyncio.run(story())
        assert seen.count("work") == 5
        assert all(a != b or a == "token" for a, b in zip(seen, seen[1:], strict=False))


def test_a_piece_that_fails_gives_its_turn_on():
    async def story() -> list[object]:
        return await asyncio.gather(run_exclusive(lambda: 1 // 0), run_exclusive(lambda: 7), return_exceptions=True)

    failed, value = asyncio.run(story())
    assert isinstance(failed, ZeroDivisionError) and value == 7


def test_many_ids_stay_on_the_loop_and_long_texts_do_not():
    import threading

    async def story() -> list[bool]:
        here = threading.get_ident()
        work = lambda: threading.get_ident() == here
        many = INLINE_CHARS + 1
        return [await prepare(many, work, only_ids=True), await prepare(many, work), await prepare(None, work)]

    assert asyncio.run(story()) == [True, False, False]


def test_a_large_body_of_ids_is_read_whole(front):
    ids = [i % 250 for i in range(40_000)]
    assert len(str(ids)) > INLINE_BYTES
    r = front.complete(prompt=ids, max_tokens=1)
    assert r.status_code == 400 and "40000 tokens" in r.text, "the limit is named, so all of them were counted"
    short = ids[:400]
    body = {"prompt": short, "max_tokens": 1, "user": "x" * INLINE_BYTES}
    r = front.complete(**body)
    assert r.status_code == 200, r.text
    assert array("i", front.leader.requests[-1].prompt).tolist() == short
