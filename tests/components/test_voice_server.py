"""The voice assistant as a process: real weights, real sockets. One server for all tests of this file."""

import asyncio
import base64
import concurrent.futures
import io
import json
import os
import signal
import time
import wave

import httpx
import numpy as np
import pytest

from slipstream.bench.load.spoken import words
from slipstream.serve.audio.audio_file import encode

from .conftest import DATA
from .server import VoiceServer, children

QUESTION = (DATA / "question.wav").read_bytes()
SPOKEN_QUESTION = base64.b64encode(QUESTION).decode()
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def server(whisper_folder):
    s = VoiceServer("--drain-timeout", "5")
    yield s
    pids = children(s.process.pid)
    code, _ = s.close()
    assert code == 0 and not [p for p in pids if os.path.exists(f"/proc/{p}")]


def transcribe(server, data, **fields):
    return server.http.post("/v1/audio/transcriptions", data={"model": "voice", **fields}, files={"file": ("a.wav", data)})


def speak(server, text, **fields):
    return server.http.post("/v1/audio/speech", json={"model": "voice", "input": text, "response_format": "wav", **fields})


def ask(data=SPOKEN_QUESTION, **fields):
    part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    return {"model": "voice", "temperature": 0, "max_tokens": 32, "messages": [{"role": "user", "content": [part]}], **fields}


SPOKEN = {"modalities": ["text", "audio"], "audio": {"voice": "heart", "format": "pcm16"}}


def events(server, path, body):
    out = []
    with server.http.stream("POST", path, json=body) as r:
        assert r.status_code == 200, r.read()
        for line in r.iter_lines():
            if line.startswith("data: "):
                out.append(line[6:])
    return out


def test_a_question_is_transcribed_in_every_format(server):
    text = transcribe(server, QUESTION).json()["text"]
    assert words(text) == words("What is the capital of France?")
    whole = transcribe(server, QUESTION, response_format="verbose_json").json()
    assert whole["duration"] == 2.15 and whole["language"] == "english" and whole["text"] == text
    (segment,) = whole["segments"]
    assert 0 <= segment["start"] < segment["end"] <= 2.16 and segment["text"].strip() == text
    assert transcribe(server, QUESTION, response_format="text").text == text + "\n"
    srt, vtt = (transcribe(server, QUESTION, response_format=f).text for f in ("srt", "vtt"))
    assert srt.startswith("1\n00:00:00,000 --> 00:00:02,") and vtt.startswith("WEBVTT\n\n00:00:00.000 --> ")
    done = server.http.post("/v1/audio/transcriptions", data={"stream": "true"}, files={"file": ("a.wav", QUESTION)}).text
    got = [json.loads(line[6:]) for line in done.splitlines() if line]
    assert "".join(e.get("delta", "") for e in got) == text == got[-1]["text"]


def test_what_is_spoken_is_understood_in_every_format(server):
    said = "The quick brown fox jumps over the lazy dog. It was a sunny day."
    for format in ("wav", "flac", "opus", "mp3", "aac"):
        r = speak(server, said, response_format=format)
        assert r.status_code == 200 and words(transcribe(server, r.content).json()["text"]) == words(said), format
    raw = speak(server, said, response_format="pcm").content
    with wave.open(io.BytesIO(speak(server, said).content)) as w:
        assert w.readframes(w.getnframes()) == raw and w.getframerate() == 24_000
    streamed = speak(server, said, stream_format="audio")
    assert streamed.content[44:] == raw
    deltas = [
        json.loads(e)
        for e in events(server, "/v1/audio/speech", {"input": said, "response_format": "pcm", "stream_format": "sse"})
    ]
    done = deltas.pop()
    assert done["type"] == "speech.audio.done" and len(deltas) == 2
    assert done["usage"]["output_tokens"] == -(-len(raw) * 10 // 24_000), "20 tokens a second"
    assert b"".join(base64.b64decode(d["audio"]) for d in deltas) == raw


def test_long_audio_is_heard_in_windows_with_times_of_the_whole(server):
    parts = [
        np.frombuffer(speak(server, f"{t}.", response_format="pcm").content, "<i2")
        for t in ("This is the first part", "And this is the second part")
    ]
    audio = np.concatenate([parts[0], np.zeros(24_000 * 28, np.int16), parts[1]])
    whole = transcribe(server, encode(audio, 24_000, "flac"), response_format="verbose_json").json()
    assert words(whole["text"])[:5] == words("This is the first part") and words(whole["text"])[-3:] == [
        "the",
        "second",
        "part",
    ]
    assert whole["segments"][-1]["start"] > 25 and whole["segments"][-1]["end"] <= whole["duration"] + 0.01


def test_a_spoken_question_gets_a_spoken_answer(server):
    whole = server.http.post(
        "/v1/chat/completions", json=ask(modalities=["text", "audio"], audio={"voice": "heart", "format": "wav"})
    ).json()
    message = whole["choices"][0]["message"]
    assert (
        message["audio"]["transcript"] == ANSWER
        and message["content"] is None
        and whole["choices"][0]["finish_reason"] == "stop"
    )
    assert whole["usage"]["completion_tokens"] > 0
    assert words(transcribe(server, base64.b64decode(message["audio"]["data"])).json()["text"]) == words(ANSWER)
    got = events(server, "/v1/chat/completions", ask(stream=True, stream_options={"include_usage": True}, **SPOKEN))
    assert got.pop() == "[DONE]"
    chunks = [json.loads(e) for e in got]
    assert chunks[-1]["usage"]["total_tokens"] > 0 and chunks[-2]["choices"][0]["finish_reason"] == "stop"
    audio = [c["choices"][0]["delta"].get("audio", {}) for c in chunks[:-1]]
    assert "".join(a.get("transcript", "") for a in audio) == ANSWER
    assert len(b"".join(base64.b64decode(a.get("data", "")) for a in audio)) > 48_000
    text = server.http.post("/v1/chat/completions", json=ask()).json()
    assert text["choices"][0]["message"]["content"] == ANSWER
    plain = {"model": "voice", "temperature": 0, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    assert server.http.post("/v1/chat/completions", json=plain).json()["choices"][0]["message"]["content"] == ANSWER
    spoken = server.http.post(
        "/v1/chat/completions", json={**plain, "modalities": ["text", "audio"], "audio": {"voice": "heart", "format": "flac"}}
    ).json()
    assert base64.b64decode(spoken["choices"][0]["message"]["audio"]["data"])[:4] == b"fLaC"


@pytest.mark.parametrize(
    ("data", "fields", "status", "param"),
    [
        (b"", {}, 400, "file"),
        (b"hello", {}, 400, "file"),
        (QUESTION[:30], {}, 400, "file"),
        (encode(np.zeros(8000 * 3600, np.int16), 8000, "flac"), {}, 413, "file"),
        (bytes(26 << 20), {}, 413, "file"),
        (QUESTION, {"model": "other"}, 404, "model"),
        (QUESTION, {"language": "de"}, 400, "language"),
        (QUESTION, {"response_format": "xml"}, 400, "response_format"),
        (QUESTION, {"temperature": "hot"}, 400, "temperature"),
        (QUESTION, {"timestamp_granularities[]": "letter"}, 400, "timestamp_granularities[]"),
        (QUESTION, {"timestamp_granularities[]": "word"}, 400, "timestamp_granularities[]"),
        (QUESTION, {"nonsense": "1"}, 400, "nonsense"),
    ],
    ids=["empty", "text", "cut", "hour", "bytes", "model", "language", "format", "temperature", "letter", "word", "unknown"],
)
def test_bad_audio_and_bad_fields_are_refused_by_name(server, data, fields, status, param):
    r = transcribe(server, data, **fields)
    assert r.status_code == status and r.json()["error"]["param"] == param, r.text


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/v1/audio/speech", {"input": "x", "voice": "adam"}, 400, "heart"),
        ("/v1/audio/speech", {"input": "日本語"}, 400, "日本語"),
        ("/v1/audio/speech", {"input": ""}, 400, "input"),
        ("/v1/audio/speech", {"input": "x" * 4097}, 400, "input"),
        ("/v1/audio/speech", {"input": "x", "speed": 3.5}, 400, "speed"),
        ("/v1/audio/speech", {"input": "x", "instructions": "whisper"}, 400, "instructions"),
        ("/v1/chat/completions", ask(n=2), 400, "n: must be 1"),
        ("/v1/chat/completions", ask(modalities=["text", "audio"]), 400, "audio"),
        ("/v1/chat/completions", ask(structured_outputs={"regex": "a"}), 400, "structured_outputs: not"),
        ("/v1/chat/completions", ask(prompt_logprobs=0), 400, "prompt_logprobs: not"),
        ("/v1/chat/completions", ask(stream_options={"include_usage": True}), 400, "stream_options: needs"),
        ("/v1/chat/completions", ask(stream=True, stream_options={"continuous_usage_stats": True}), 400, "continuous_usage"),
        ("/v1/chat/completions", ask(top_k=-5), 400, "top_k"),
        ("/v1/chat/completions", ask(stream=True, **{**SPOKEN, "audio": {"voice": "heart", "format": "wav"}}), 400, "pcm16"),
        ("/v1/chat/completions", ask("data:text/plain;base64,aGk="), 400, "data URL"),
        ("/v1/chat/completions", ask("aGVsbG8="), 400, "not an audio file"),
        ("/v1/chat/completions", ask("?"), 400, "must be valid base64"),
    ],
)  # fmt: skip
def test_bad_bodies_are_refused_by_name(server, path, body, status, says):
    r = server.http.post(path, json=body)
    assert r.status_code == status and says in r.json()["error"]["message"], r.text


def test_translation_and_silence_are_refused_by_name(server):
    r = server.http.post("/v1/audio/translations", data={"model": "voice"}, files={"file": ("a.wav", QUESTION)})
    assert r.status_code == 400 and "translate" in r.json()["error"]["message"]
    silence = base64.b64encode(encode(np.zeros(24_000, np.int16), 24_000, "wav")).decode()
    body = ask(silence)
    r = server.http.post("/v1/chat/completions", json=body)
    assert r.status_code == 400 and r.json()["error"]["message"] == "prompt: no speech was heard in the audio"
    got = events(server, "/v1/chat/completions", {**body, "stream": True, **SPOKEN})
    assert json.loads(got[-1])["error"]["message"].startswith("prompt: "), "FF-72: never a clean end"


def converse(server, sound):
    """One streamed conversation: the answer's text and its samples."""
    body = ask(base64.b64encode(sound).decode(), stream=True, **{**SPOKEN, "max_tokens": 16})
    with httpx.Client(base_url=server.url, timeout=200) as http:
        lines = [x[6:] for x in http.post("/v1/chat/completions", json=body).text.splitlines() if x.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    audio = [json.loads(x)["choices"][0]["delta"].get("audio", {}) for x in lines]
    return "".join(a.get("transcript", "") for a in audio), b"".join(base64.b64decode(a.get("data", "")) for a in audio)


def test_eight_conversations_at_once_are_not_mixed_up(server):
    sounds = [speak(server, f"What is the capital of {c}?").content for c in ("France", "Italy", "Japan", "Egypt")]
    alone = [converse(server, sound) for sound in sounds]
    assert len({text for text, _ in alone}) == 4
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda i: converse(server, sounds[i % 4]), range(8)))
    assert together == alone * 2


def test_a_client_that_leaves_takes_its_request_with_it(server):
    for _ in range(3):
        with server.http.stream(
            "POST", "/v1/chat/completions", json=ask(stream=True, max_tokens=500, ignore_eos=True, **SPOKEN)
        ) as r:
            next(r.iter_lines())
    end = time.monotonic() + 20
    while time.monotonic() < end and (running := metric(server, "slipstream:num_requests_running")):
        time.sleep(0.1)
    assert not running


def metric(server, name):
    lines = [x for x in server.http.get("/metrics").text.splitlines() if x.startswith(name)]
    return sum(float(x.rsplit(" ", 1)[1]) for x in lines)


async def connect(server):
    from websockets.asyncio.client import connect

    return await connect(f"ws://127.0.0.1:{server.port}/v1/realtime?model=voice", max_size=None)


async def until(ws, kind, seen=None, seconds=60):
    """Reads events until one of the kind, and returns it; `seen` collects all."""
    async with asyncio.timeout(seconds):
        while True:
            event = json.loads(await ws.recv())
            if seen is not None:
                seen.append(event)
            if event["type"] == kind:
                return event


def append(pcm):
    return json.dumps({"type": "input_audio_buffer.append", "audio": base64.b64encode(pcm).decode()})


PCM = QUESTION[44:]


def test_a_realtime_conversation_with_the_openai_client(server):
    from openai import AsyncOpenAI

    async def main():
        client = AsyncOpenAI(
            api_key="x", base_url=server.url + "/v1", websocket_base_url=server.url.replace("http", "ws") + "/v1"
        )
        async with client.realtime.connect(model="voice") as connection:
            await connection.session.update(
                session={"type": "realtime", "instructions": "You are helpful.", "audio": {"input": {"turn_detection": None}}}
            )
            for i in range(0, len(PCM), 9600):
                await connection.input_audio_buffer.append(audio=base64.b64encode(PCM[i : i + 9600]).decode())
            await connection.input_audio_buffer.commit()
            await connection.response.create()
            heard, said, sound = "", "", 0
            async with asyncio.timeout(60):
                async for event in connection:
                    if event.type == "conversation.item.input_audio_transcription.completed":
                        heard = event.transcript
                    elif event.type == "response.output_audio_transcript.delta":
                        said += event.delta
                    elif event.type == "response.output_audio.delta":
                        sound += len(base64.b64decode(event.delta))
                    elif event.type == "response.done":
                        assert event.response.status == "completed"
                        break
            assert words(heard) == words("What is the capital of France?") and "Paris" in said and sound > 48_000

    asyncio.run(main())


def test_speech_during_an_answer_ends_it_and_nothing_late_follows(server):
    async def main():
        ws = await connect(server)
        await until(ws, "session.created")
        for i in range(0, len(PCM), 9600):
            await ws.send(append(PCM[i : i + 9600]))
        await ws.send(append(bytes(48_000)))
        first = await until(ws, "response.output_audio_transcript.delta")
        t0, seen = time.monotonic(), []
        await ws.send(append(PCM[9600:24_000]))
        done = await until(ws, "response.done", seen)
        assert done["response"]["status"] == "cancelled" and done["response"]["status_details"]["reason"] == "turn_detected"
        assert time.monotonic() - t0 < 5, "the bound of 200 ms is for an idle machine; bench voice measures it"
        await ws.send(append(PCM[24_000:]))
        await ws.send(append(bytes(48_000)))
        seen = []
        await until(ws, "response.done", seen)
        assert not [e for e in seen if e.get("response_id") == first["response_id"]], "FF-65"
        await ws.close()

    asyncio.run(main())


def test_bad_events_get_an_error_event_and_the_session_goes_on(server):
    async def main():
        ws = await connect(server)
        await until(ws, "session.created")
        bad = [
            "not json", b"\x00not text", "[]", "{}", json.dumps({"type": "dance"}), append(b"abc"),
            json.dumps({"type": "input_audio_buffer.append", "audio": "?"}),
            json.dumps({"type": "input_audio_buffer.commit"}), json.dumps({"type": "response.cancel"}),
            json.dumps({"type": "session.update", "session": {"audio": {"output": {"voice": 5}}}}),
            json.dumps({"type": "session.update", "session": {"audio": {"input": {"format": {"type": "audio/opus"}}}}}),
            json.dumps({"type": "conversation.item.create", "item": {"type": "message", "role": "user", "content": []}}),
            json.dumps({"type": "conversation.item.delete", "item_id": "none", "event_id": "mine"}),
        ]  # fmt: skip
        for text in bad:
            await ws.send(text)
            error = (await until(ws, "error"))["error"]
            assert error["type"] == "invalid_request_error" and error["message"], text
        assert error["event_id"] == "mine"
        item = {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "What is the capital of France?"}],
        }
        await ws.send(json.dumps({"type": "conversation.item.create", "item": item}))
        await ws.send(json.dumps({"type": "response.create", "response": {"output_modalities": ["text"]}}))
        done = await until(ws, "response.done")
        assert "Paris" in done["response"]["output"][0]["content"][0]["text"]
        await ws.close()

    asyncio.run(main())


def test_a_killed_speech_process_ends_its_streams_with_one_error_each_and_serves_again(server):
    t0 = time.monotonic()
    pid = server.holder("onnxruntime")
    body = ask(stream=True, max_tokens=400, ignore_eos=True, **SPOKEN)
    with server.http.stream("POST", "/v1/chat/completions", json=body) as r:
        lines = r.iter_lines()
        next(lines)
        os.kill(pid, signal.SIGKILL)
        rest = [json.loads(x[6:]) for x in lines if x.startswith("data: ")]
    assert [e["error"]["code"] for e in rest if "error" in e] == ["component_failed"] and "speech" in rest[-1]["error"][
        "message"
    ]
    assert server.http.post("/v1/chat/completions", json=ask()).json()["choices"][0]["message"]["content"] == ANSWER, (
        "others go on"
    )
    server.wait(60)
    assert speak(server, "Here again.").status_code == 200 and time.monotonic() - t0 < 90
