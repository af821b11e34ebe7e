"""The voice assistant as one value: speech in, speech out. Whisper transcribes, a language model answers, a voice speaks.

A model's author writes a file like this one; a placement says where the components run (see docs/composite.md). It loads no
weights and does not import torch, since the front end reads it too.
"""

from collections.abc import Sequence

from slipstream.components.sentences import SentenceStep
from slipstream.graph.chunks import Fixed
from slipstream.graph.model import Component, Edge, Model, Port, Stream, Walk
from slipstream.graph.rows import Result, Row


class PromptStep:
    """Puts the transcript into its place in the conversation.

    Parameter `messages`: each message's content is a text, or a list of texts to be joined by newlines, in which None stands
    for the transcript. Without the parameter, the transcript is the whole user message.
    """

    def __call__(self, rows: Sequence[Row]) -> list[Result]:
        return [self._row(row.inputs["heard"].data.strip(), row.params.get("messages")) for row in rows]

    def _row(self, heard: str, messages: list[dict] | None) -> Result:
        if not heard:
            return Result(error="no speech was heard in the audio", refused=True)
        placed = []
        for message in messages or [{"role": "user", "content": [None]}]:
            content = message["content"]
            if not isinstance(content, str):
                content = "\n".join(heard if part is None else part for part in content)
            placed.append({**message, "content": content})
        return Result({"messages": placed})


ENCODER = Component(
    "encoder",
    "encoder",
    inputs={"audio": Port("array")},  # float32 at 16 kHz
    outputs={"features": "array", "spans": "array"},  # one unit per window of 30 s
    step="slipstream.components.whisper_steps:EncoderStep",
    max_rows=1,
    step_ms=500,
)
DECODER = Component(
    "decoder",
    "autoregressive",
    inputs={"features": Port("array", "chunks"), "spans": Port("array", "chunks")},
    outputs={"text": "text", "segments": "value"},
    step="slipstream.components.whisper_steps:DecoderStep",
    closes=True,
)
PROMPT = Component(
    "prompt", "function", {"heard": Port("text")}, {"messages": "value"}, "slipstream.components.voice:PromptStep"
)
LLM = Component("llm", "language_model", {"messages": Port("value")}, {"text": "text", "finish": "value"})
SENTENCES = Component(
    "sentences",
    "function",
    {"text": Port("text", "partial")},
    {"sentence": "text"},
    "slipstream.components.voice:SentenceStep",
    closes=True,
)
SPEECH = Component(
    "speech",
    "codec",
    inputs={"text": Port("text", "chunks")},  # a sentence a chunk
    outputs={"audio": "array"},  # int16 at 24 kHz
    step="slipstream.components.speech:SpeechStep",
    max_rows=1,
    step_ms=1000,
)

HEAR = (
    Edge("in.audio", "encoder.audio"),
    Stream("encoder.features", "decoder.features", Fixed(1)),
    Stream("encoder.spans", "decoder.spans", Fixed(1)),
    Stream("decoder.text", "out.heard"),
)
SAY = (
    Stream("sentences.sentence", "speech.text", Fixed(1), window=2),
    Stream("speech.audio", "out.audio", window=8),
)
ANSWER = (
    Stream("llm.text", "out.text", window=1024),
    Edge("llm.finish", "out.finish"),
    Stream("llm.text", "sentences.text", window=1024),
    *SAY,
)

VOICE = Model(
    "voice",
    components=(ENCODER, DECODER, PROMPT, LLM, SENTENCES, SPEECH),
    walks=(
        Walk("transcribe", (*HEAR, Edge("decoder.segments", "out.segments"))),
        Walk("speak", (Stream("in.text", "sentences.text"), *SAY)),
        Walk("chat", (Edge("in.messages", "llm.messages"), *ANSWER)),
        Walk("converse", (*HEAR, Edge("decoder.text", "prompt.heard"), Edge("prompt.messages", "llm.messages"), *ANSWER)),
    ),
)

__all__ = ["VOICE", "PromptStep", "SentenceStep"]
