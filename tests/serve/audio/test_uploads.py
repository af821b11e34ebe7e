import asyncio
import gc
import os
import tempfile
from types import SimpleNamespace

import pytest
from starlette.requests import Request

from slipstream.errors import BadRequest
from slipstream.serve.audio import audio
from slipstream.serve.budget import Budget
from slipstream.serve.errors import Failed
from slipstream.serve.request_body import INLINE_BYTES


def read(body, kind="multipart/form-data; boundary=x", piece=60_000, budget=None):
    """The form, and the bytes that counted while it was in use."""
    budget = budget or Budget(1 << 30)
    pieces = [body[i : i + piece] for i in range(0, len(body), piece)] or [b""]

    async def receive():
        data = pieces.pop(0)
        return {"type": "http.request", "body": data, "more_body": bool(pieces)}

    app = SimpleNamespace(state=SimpleNamespace(front=SimpleNamespace(bodies=budget)))
    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", kind.encode())], "app": app}

    async def use():
        async with audio.form_of(Request(scope, receive)) as form:
            return form, budget.held

    try:
        return asyncio.run(use())
    finally:
        assert not budget.held


def part(name, data, file=False):
    extra = b'; filename="a.wav"' if file else b""
    return b'--x\r\nContent-Disposition: form-data; name="' + name.encode() + b'"' + extra + b"\r\n\r\n" + data + b"\r\n"


def test_ff73_an_upload_never_touches_the_disk_and_is_gone_with_its_request(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gc.collect()  # what earlier tests left, or it goes in the midst of this one
    before = len(os.listdir("/proc/self/fd"))
    sound = os.urandom(8 << 20)
    monkeypatch.setattr(tempfile.SpooledTemporaryFile, "rollover", lambda self: pytest.fail("written to disk"))
    fields = part("model", b"voice") + part("tags[]", b"a") + part("tags[]", b"b")
    form, _ = read(part("file", sound, True) + fields + b"--x--\r\n")
    assert form == {"file": sound, "model": "voice", "tags[]": ["a", "b"]}
    gc.collect()
    assert not os.listdir(tmp_path) and len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize(
    ("body", "kind", "error"),
    [
        (b"hello", "text/plain", Failed),
        (b"hello", "multipart/form-data", BadRequest),
        (b"--x\r\nnonsense", "multipart/form-data; boundary=x", BadRequest),
        (part("a", b"1", True) + part("b", b"2", True) + b"--x--\r\n", "multipart/form-data; boundary=x", BadRequest),
        (part("a", bytes(70_000)) + b"--x--\r\n", "multipart/form-data; boundary=x", BadRequest),
        (part("file", bytes(26 << 20), True) + b"--x--\r\n", "multipart/form-data; boundary=x", Failed),
    ],
    ids=["type", "boundary", "cut", "two files", "long field", "bytes"],
)
def test_forms_that_cannot_be_taken_are_refused(body, kind, error):
    with pytest.raises(error):
        form, _ = read(body, kind)
        audio._transcription(form)


def test_uploads_count_against_the_budget_of_bodies_while_they_are_in_use():
    body = part("file", bytes(1 << 20), True) + b"--x--\r\n"
    _, held = read(body)
    assert held == len(body) - INLINE_BYTES
    with pytest.raises(Failed) as e:
        read(body, budget=Budget(1 << 19))
    assert e.value.failure.status == 503 and "--body-memory-bytes" in e.value.failure.message
    assert read(part("file", b"small", True) + b"--x--\r\n", budget=Budget(1))[1] == 0
