"""Transcripts in the response formats of /v1/audio/transcriptions. Pure; standard library and msgspec."""

from collections.abc import Collection

import msgspec

FORMATS = ("json", "text", "verbose_json", "srt", "vtt")


def _clock(seconds: float, comma: str) -> str:
    ms = round(seconds * 1000)
    return f"{ms // 3_600_000:02}:{ms // 60_000 % 60:02}:{ms // 1000 % 60:02}{comma}{ms % 1000:03}"


def render(
    format: str, text: str, segments: list[dict], seconds: float, language: str, granularities: Collection[str] = ("segment",)
) -> tuple[str, bytes]:
    """(content type, body). Times of segments are in seconds; `granularities`: the times that verbose_json holds."""
    if format == "text":
        return "text/plain; charset=utf-8", (text + "\n").encode()
    if format == "srt":
        parts = [
            f"{i}\n{_clock(s['start'], ',')} --> {_clock(s['end'], ',')}\n{s['text'].strip()}\n"
            for i, s in enumerate(segments, 1)
        ]
        return "application/x-subrip; charset=utf-8", "\n".join(parts).encode()
    if format == "vtt":
        parts = [f"{_clock(s['start'], '.')} --> {_clock(s['end'], '.')}\n{s['text'].strip()}\n" for s in segments]
        return "text/vtt; charset=utf-8", "\n".join(["WEBVTT\n", *parts]).encode()
    usage = {"type": "duration", "seconds": round(seconds)}
    if format == "json":
        return "application/json", msgspec.json.encode({"text": text, "usage": usage})
    timed: dict[str, list[dict]] = {}
    if "segment" in granularities:
        timed["segments"] = [
            {"id": i, "seek": 0, **{k: v for k, v in s.items() if k != "words"}} for i, s in enumerate(segments)
        ]
    if "word" in granularities:
        timed["words"] = [word for s in segments for word in s["words"]]
    body = {"task": "transcribe", "language": "english" if language == "en" else language, "duration": round(seconds, 3)}
    return "application/json", msgspec.json.encode({**body, "text": text, **timed, "usage": usage})
