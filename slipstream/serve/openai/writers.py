"""Writes answers: chat and text completions, whole and as server-sent events. Pure; msgspec makes the bytes.

An event with text only, which is nearly every one, is three byte strings joined.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from slipstream.serve.errors import Failure
from slipstream.serve.text.choice import Choice, Piece
from slipstream.serve.text.logprobs import TokenNames, chat_pieces, completion_pieces, prompt_pieces
from slipstream.serve.text.params import GenerationParams

encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"


HOLE = msgspec.Raw(b"\0")  # marks the place of pieces in a value; JSON never holds this byte


def sse(value: dict) -> bytes:
    return b"data: " + encode(value) + b"\n\n"


def filled(value: dict, fillings: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """`value` as JSON in pieces, with each HOLE filled by the next of `fillings`. Each piece takes a short time."""
    head, *tails = encode(value).split(b"\0")
    yield head
    for filling, tail in zip(fillings, tails, strict=True):
        yield from filling
        yield tail


def sse_pieces(value: dict, fillings: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    yield b"data: "
    yield from filled(value, fillings)
    yield b"\n\n"


def listed(items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """A JSON list of items that are given in pieces."""
    yield b"["
    for i, item in enumerate(items):
        if i:
            yield b","
        yield from item
    yield b"]"


def usage(answers: Sequence[Choice], n: int) -> dict:
    """Prompts are counted once, however many choices they have."""
    firsts = answers[::n]
    prompt = sum(len(a.prompt.ids) for a in firsts)
    completion = sum(len(a.ids) for a in answers)
    out = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(a.cached_tokens for a in firsts)},
    }
    reading = answers[0].plan.reading if answers else None
    details: dict[str, int] = {}
    if reading is not None and reading.thinking != "none":
        details["reasoning_tokens"] = sum(a.reasoning_tokens for a in answers)
    verified = sum(a.drafts_verified for a in answers)
    if verified or (answers and answers[0].plan.prediction):
        accepted = sum(a.drafts_accepted for a in answers)
        details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": verified - accepted}
    if details:
        out["completion_tokens_details"] = details
    return out


class Shape(Protocol):
    """Writes the answers to one HTTP request in the form of a route; `ResponseWriter` documents the methods.

    Long results come in pieces that each take a short time (`exclusive.run_sliced`).
    """

    def beginning(self) -> bytes: ...

    def events(self, answer: Choice) -> Iterator[bytes]: ...

    def closing(self) -> bytes: ...

    def failed(self, failure: Failure) -> bytes: ...

    def whole(self) -> Iterator[bytes]: ...


class ResponseWriter:
    """Writes one response. `answers` are ordered by index."""

    object = ""
    chunk_object = ""

    def __init__(self, id: str, created: int, model: str, plan: GenerationParams, names: TokenNames, answers: Sequence[Choice]):
        self._head = {"id": id, "object": self.object, "created": created, "model": model}
        self._chunk = {**self._head, "object": self.chunk_object, **({"usage": None} if plan.include_usage else {})}
        self._plan = plan
        self._names = names
        self._answers = answers
        self._fast = [self._halves(a.index) for a in answers] if plan.plain_text else []

    def _halves(self, index: int) -> tuple[bytes, bytes]:
        """An event with text only, split at the place of the text's JSON."""
        mark = "\x00"
        choice = {"index": index, **self._payload(mark), "logprobs": None, "finish_reason": None}
        head, _, tail = sse({**self._chunk, "choices": [choice]}).partition(encode(mark))
        return head, tail

    def _payload(self, text: str) -> dict:
        raise NotImplementedError

    def _logprobs(self, piece: Piece) -> Iterator[bytes]:
        raise NotImplementedError

    def opening(self, answer: Choice) -> Iterable[bytes]:
        """The event before an answer's first text."""
        raise NotImplementedError

    def _opened(self, answer: Choice) -> Iterable[bytes]:
        """The opening, when it is due and has not been sent."""
        if answer.opened or not (answer.ids or answer.ended):
            return ()
        answer.opened = True
        return self.opening(answer)

    def events(self, answer: Choice) -> Iterator[bytes]:
        """What is new of one answer, as events; nothing where nothing would be said."""
        yield from self._opened(answer)
        piece = answer.take()
        if answer.finish_reason is not None:
            yield from self._event(answer, self._payload(piece.text), piece, True)
        elif self._fast:
            if piece.text:
                head, tail = self._fast[answer.index]
                yield head + encode(piece.text) + tail
        elif piece.text or piece.ids:
            yield from self._event(answer, self._payload(piece.text), piece, False)

    def _event(self, answer: Choice, payload: dict[str, Any], piece: Piece | None, last: bool) -> Iterator[bytes]:
        """One event with `payload`; `piece` is the piece whose tokens it carries, or None."""
        choice = {"index": answer.index, **payload, "logprobs": None, "finish_reason": None}
        fillings = []
        if piece is not None and piece.ids and self._plan.logprobs >= 0:
            choice["logprobs"] = HOLE
            fillings.append(self._logprobs(piece))
        if last:
            choice["finish_reason"], choice["stop_reason"] = answer.finish_reason, answer.stop_reason
        if self._plan.return_token_ids:
            choice["token_ids"] = piece.ids if piece is not None else []
        return sse_pieces(self._with_usage({**self._chunk, "choices": [choice]}), fillings)

    def _with_usage(self, event: dict) -> dict:
        if self._plan.continuous_usage:
            event["usage"] = usage(self._answers, self._plan.n)
        return event

    def beginning(self) -> bytes:
        """The events of a stream before its first token."""
        return b""

    def failed(self, failure: Failure) -> bytes:
        """The last event of a stream that failed."""
        return b"data: " + failure.body() + b"\n\n"

    def whole(self) -> Iterator[bytes]:
        """The answer that is not streamed, once every choice has ended."""
        raise NotImplementedError

    def closing(self) -> bytes:
        """The events after the last answer's end."""
        if self._plan.include_usage:
            return sse({**self._chunk, "choices": [], "usage": usage(self._answers, self._plan.n)}) + DONE
        return DONE

    def _prompt_logprobs(self, answer: Choice) -> Iterator[bytes]:
        return prompt_pieces(self._names, answer.prompt.ids, prompt_rows(answer), self._plan.prompt_logprobs)


def prompt_rows(answer: Choice) -> list:
    return answer.prompt_rows or [None] * len(answer.prompt.ids)


class ChatWriter(ResponseWriter):
    """POST /v1/chat/completions. One prompt, so prompt fields are next to the choices, as in vLLM."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _payload(self, text: str) -> dict:
        return {"delta": {"content": text} if text else {}}

    def _logprobs(self, piece: Piece) -> Iterator[bytes]:
        return chat_pieces(self._names, piece.ids, piece.logprobs, self._plan.logprobs)

    def opening(self, answer: Choice) -> Iterable[bytes]:
        choice = {"index": answer.index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        event = {**self._chunk, "choices": [choice]}
        if self._plan.return_token_ids:
            event["prompt_token_ids"] = answer.prompt.ids.tolist()
        return (sse(self._with_usage(event)),)

    def _message(self, piece: Piece) -> dict[str, Any]:
        """The message of a whole answer."""
        return {"role": "assistant", "content": piece.text}

    def whole(self) -> Iterator[bytes]:
        body = {**self._head, "choices": HOLE, "usage": usage(self._answers, self._plan.n)}
        fillings: list[Iterator[bytes]] = [listed(map(self._choice, self._answers))]
        if self._plan.return_token_ids:
            body["prompt_token_ids"] = self._answers[0].prompt.ids.tolist()
        if self._plan.prompt_logprobs >= 0:
            body["prompt_logprobs"] = HOLE
            fillings.append(self._prompt_logprobs(self._answers[0]))
        return filled(body, fillings)

    def _choice(self, a: Choice) -> Iterator[bytes]:
        piece = a.take()
        shown = self._plan.logprobs >= 0
        choice = {
            "index": a.index,
            "message": self._message(piece),
            "logprobs": HOLE if shown else None,
            "finish_reason": a.finish_reason,
            "stop_reason": a.stop_reason,
        }
        if self._plan.return_token_ids:
            choice["token_ids"] = piece.ids
        return filled(choice, [self._logprobs(piece)] if shown else [])


class CompletionWriter(ResponseWriter):
    """POST /v1/completions. Prompt fields are in each choice. With `echo` the prompt precedes the answer in every field."""

    object = "text_completion"
    chunk_object = "text_completion"

    def _payload(self, text: str) -> dict:
        return {"text": text}

    def _logprobs(self, piece: Piece) -> Iterator[bytes]:
        return completion_pieces(self._names, piece.ids, piece.logprobs, piece.offsets, self._plan.logprobs)

    def _echoed(self, answer: Choice, piece: Piece) -> Piece:
        """The piece with the prompt before it."""
        if not self._plan.echo:
            return piece
        prompt = answer.prompt
        if self._plan.logprobs < 0:
            return piece._replace(text=prompt.text + piece.text)
        ids, rows = prompt.ids.tolist() + piece.ids, prompt_rows(answer) + piece.logprobs
        return Piece(prompt.text + piece.text, ids, rows, prompt.offsets + piece.offsets)

    def opening(self, answer: Choice) -> Iterable[bytes]:
        plan = self._plan
        if not plan.echo and not plan.return_token_ids:
            return ()
        fillings = []
        piece = self._echoed(answer, Piece("", [], [], []))
        choice = {"index": answer.index, "text": piece.text, "logprobs": None, "finish_reason": None}
        if plan.echo and plan.logprobs >= 0:
            choice["logprobs"] = HOLE
            fillings.append(self._logprobs(piece))
        if plan.return_token_ids:
            choice["token_ids"] = []
            choice["prompt_token_ids"] = answer.prompt.ids.tolist()
        return sse_pieces(self._with_usage({**self._chunk, "choices": [choice]}), fillings)

    def whole(self) -> Iterator[bytes]:
        body = {**self._head, "choices": HOLE, "usage": usage(self._answers, self._plan.n)}
        return filled(body, [listed(map(self._choice, self._answers))])

    def _choice(self, a: Choice) -> Iterator[bytes]:
        own = a.take()
        piece = self._echoed(a, own)
        choice = {
            "index": a.index,
            "text": piece.text,
            "logprobs": HOLE if self._plan.logprobs >= 0 else None,
            "finish_reason": a.finish_reason,
            "stop_reason": a.stop_reason,
        }
        fillings = [self._logprobs(piece)] if self._plan.logprobs >= 0 else []
        if self._plan.return_token_ids:
            choice["token_ids"], choice["prompt_token_ids"] = own.ids, a.prompt.ids.tolist()
        if self._plan.prompt_logprobs >= 0:
            choice["prompt_logprobs"] = HOLE
            fillings.append(self._prompt_logprobs(a))
        return filled(choice, fillings)
