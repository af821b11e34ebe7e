"""`slipstream bench voice`: quality and latency of a voice server's transcription, answers and speech.

First the ceiling: the word error rate of the server's own speech in its own transcription. Then spoken questions, one at a
time and all at once: time to the first audio after the question's end, whether the audio has gaps, and whether the spoken
words match the transcript. Last, how soon a barge-in ends an answer, and the arena's throughput.
"""

import argparse
import base64
import http.client
import io
import json
import statistics
import threading
import time
import urllib.parse
import wave
from dataclasses import dataclass
from typing import Any

from slipstream.bench.load import report, server
from slipstream.bench.load.spoken import SENTENCES, error_rate
from slipstream.bench.micro import arena

RATE = 24_000
COUNTRIES = ("France", "Spain", "Italy", "Japan", "Germany", "Egypt", "Canada", "Greece")


@dataclass
class Voice:
    """The server's audio routes, each call on a connection of its own."""

    url: str
    key: str | None
    model: str
    timeout: float

    def post(self, path: str, body: bytes, kind: str = "application/json") -> tuple[http.client.HTTPConnection, Any]:
        place = urllib.parse.urlsplit(self.url)
        connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=self.timeout)
        headers = {"Content-Type": kind} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        if response.status != 200:
            raise server.NoServer(f"{path} answered {response.status}: {response.read()[:200].decode(errors='replace')}")
        return connection, response

    def speak(self, text: str) -> bytes:
        """The text as a wav file."""
        body = json.dumps({"model": self.model, "input": text, "response_format": "wav"}).encode()
        connection, response = self.post("/v1/audio/speech", body)
        data = response.read()
        connection.close()
        return data

    def hear(self, wav: bytes) -> str:
        mark = "slipstream-bench"
        head = f'--{mark}\r\nContent-Disposition: form-data; name="model"\r\n\r\n{self.model}\r\n--{mark}\r\n'
        head += 'Content-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'
        body = head.encode() + wav + f"\r\n--{mark}--\r\n".encode()
        connection, response = self.post("/v1/audio/transcriptions", body, f"multipart/form-data; boundary={mark}")
        text = json.loads(response.read())["text"]
        connection.close()
        return text

    def converse(self, wav: bytes, max_tokens: int) -> "Turn":
        """Streams a spoken question; returns the events and their times, in seconds from the question's end."""
        part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav).decode(), "format": "wav"}}
        body = {
            "model": self.model, "stream": True, "temperature": 0, "max_tokens": max_tokens, "modalities": ["text", "audio"],
            "audio": {"voice": "heart", "format": "pcm16"}, "messages": [{"role": "user", "content": [part]}],
        }  # fmt: skip
        data = json.dumps(body).encode()
        turn, start = Turn(), time.monotonic()
        connection, response = self.post("/v1/chat/completions", data)
        while line := response.readline():
            if line.startswith(b"data: [DONE]"):
                turn.done = True
            elif line.startswith(b"data: "):
                turn.take(json.loads(line[6:]), time.monotonic() - start)
        connection.close()
        return turn


class Turn:
    """One answer with its times."""

    def __init__(self) -> None:
        self.text, self.pcm, self.done, self.error = "", b"", False, None
        self.first_text: float | None = None
        self.first_audio: float | None = None
        self.dry = 0.0  # seconds that playback would have waited for audio after it began
        self._played_until = 0.0
        self.last_audio = 0.0

    def take(self, event: dict[str, Any], at: float) -> None:
        if "error" in event:
            self.error = event["error"]["message"]
            return
        for choice in event["choices"]:
            audio = choice["delta"].get("audio") or {}
            if audio.get("transcript"):
                self.text += audio["transcript"]
                self.first_text = at if self.first_text is None else self.first_text
            if audio.get("data"):
                self._hear(base64.b64decode(audio["data"]), at)

    def _hear(self, pcm: bytes, at: float) -> None:
        if self.first_audio is None:
            self.first_audio = self._played_until = at
        self.dry += max(0.0, at - self._played_until)
        self._played_until = max(self._played_until, at) + len(pcm) / 2 / RATE
        self.pcm += pcm
        self.last_audio = at

    @property
    def seconds(self) -> float:
        return len(self.pcm) / 2 / RATE

    @property
    def real_time_factor(self) -> float:
        """Time to make the audio that followed the first piece, over the time that all of it plays."""
        return (self.last_audio - (self.first_audio or 0.0)) / self.seconds if self.seconds else 0.0

    def wav(self) -> bytes:
        out = io.BytesIO()
        with wave.open(out, "wb") as w:
            w.setnchannels(1)
            w.setsampwidth(2)
            w.setframerate(RATE)
            w.writeframes(self.pcm)
        return out.getvalue()


def run(args: argparse.Namespace) -> int:
    """Exit status 0 if no request failed or got another's answer."""
    with server.chosen(args.base_url, args.serve) as url:
        target = server.target_of(args, url)
        voice = Voice(url, server.key_of(args), target.model, args.timeout)
        figures = measure(voice, args)
    figures |= arena_figures()
    report.table(f"voice · {target.model}", figures)
    if args.json:
        report.write_json(args.json, {"workload": "voice", "model": target.model, "figures": figures})
    return 1 if figures["errors"] or figures["wrong"] else 0


def measure(voice: Voice, args: argparse.Namespace) -> dict[str, Any]:
    chosen = SENTENCES[: args.sentences]
    with report.progress("ceiling", len(chosen)) as bar:
        pairs = []
        for i, sentence in enumerate(chosen):
            pairs.append((sentence, voice.hear(voice.speak(sentence))))
            bar(i + 1)
    figures: dict[str, Any] = {"sentences": len(pairs), "word_error_rate_ceiling": error_rate(pairs)}
    asked = [COUNTRIES[i % len(COUNTRIES)] for i in range(max(args.questions, args.at_once))]
    sounds = [voice.speak(f"Please tell me in one sentence, what is the capital of {c}?") for c in asked]
    voice.converse(sounds[0], 8)
    with report.progress("questions", args.questions) as bar:
        turns = []
        for i in range(args.questions):
            turns.append(voice.converse(sounds[i], args.max_tokens))
            bar(i + 1)
    figures |= _answers(turns)
    story = voice.converse(voice.speak("Please tell me a long story about a river and a boat."), 160)
    figures |= {"story_audio_s": story.seconds, "real_time_factor": story.real_time_factor, "ran_dry_s": story.dry}
    spoken = [(t.text, voice.hear(t.wav())) for t in turns if t.seconds]
    figures["word_error_rate_answers"] = error_rate(spoken)
    together = _together(voice, sounds[: args.at_once], args.max_tokens)
    alone = {i: t.text for i, t in enumerate(turns)}
    figures["at_once"] = len(together)
    figures["at_once_first_audio_p50_s"] = statistics.median(t.first_audio or 0.0 for t in together)
    everything = [*turns, story, *together]
    figures["wrong"] = sum(t.text != alone.get(i, t.text) for i, t in enumerate(together))
    figures["errors"] = sum(t.error is not None or not t.done or not t.seconds for t in everything)
    figures["barge_in_ms"] = barge_in(voice)
    return figures


def _answers(turns: list[Turn]) -> dict[str, Any]:
    first = sorted(t.first_audio or 0.0 for t in turns)
    return {
        "first_text_p50_s": statistics.median(t.first_text or 0.0 for t in turns),
        "first_audio_p50_s": statistics.median(first),
        "first_audio_worst_s": first[-1],
        "audio_s": statistics.mean(t.seconds for t in turns),
    }


def _together(voice: Voice, sounds: list[bytes], max_tokens: int) -> list[Turn]:
    turns = [Turn() for _ in sounds]

    def one(i: int) -> None:
        try:
            turns[i] = voice.converse(sounds[i], max_tokens)
        except Exception as e:
            turns[i].error = str(e)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(sounds))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return turns


def barge_in(voice: Voice) -> float | None:
    """Milliseconds from the sample with which speech is detected to the answer's end, over /v1/realtime. None without it."""
    try:
        from websockets.sync.client import connect
    except ImportError:
        return None
    place = urllib.parse.urlsplit(voice.url)
    headers = {"Authorization": f"Bearer {voice.key}"} if voice.key else {}
    with wave.open(io.BytesIO(voice.speak("Please count to twenty, slowly."))) as w:
        pcm = w.readframes(w.getnframes())
    with connect(f"ws://{place.netloc}/v1/realtime?model={voice.model}", max_size=None, additional_headers=headers) as ws:

        def say(data: bytes) -> None:
            for i in range(0, len(data), 4800):
                event = {"type": "input_audio_buffer.append", "audio": base64.b64encode(data[i : i + 4800]).decode()}
                ws.send(json.dumps(event))

        def until(kind: str) -> dict[str, Any]:
            while True:
                event = json.loads(ws.recv(timeout=voice.timeout))
                if event["type"] == kind:
                    return event

        say(pcm + bytes(RATE * 2))
        until("response.output_audio_transcript.delta")
        start = time.monotonic()
        say(pcm[RATE // 2 : 3 * RATE])  # more than a second, past the silence at the speech's beginning
        ended = until("response.done")
        took = (time.monotonic() - start) * 1000
    return took if ended["response"]["status"] == "cancelled" else None


def arena_figures() -> dict[str, Any]:
    rows = {r["bytes"]: r for r in arena.measure()}
    small, large = rows[4 << 10], rows[16 << 20]
    return {"arena_4_KB_us": small["move"] * 1e6, "arena_16_MB_share_of_memcpy": large["memcpy"] / large["move"]}
