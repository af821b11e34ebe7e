import asyncio
import gc
import os
import tempfile

import pytest
from starlette.requests import Request

from slipstream.errors import BadRequest
from slipstream.serve.audio import audio
from slipstream.serve.errors import Failed


def read(body, kind="multipart/form-data; boundary=x", piece=60_000):
    pieces = [body[i : i + piece] for i in range(0, len(body), piece)] or [b""]

    async def receive():
        data = pieces.pop(0)
        return {"type": "http.request", "body": data, "more_body": bool(pieces)}

    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", kind.encode())]}
    return asyncio.run(audio.form_of(Request(scope, receive)))


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
    form = read(part("file", sound, True) + fields + b"--x--\r\n")
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
        form = read(body, kind)
        audio._transcription(form)
