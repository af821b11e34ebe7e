"""A request as the log has it: plain values, equal on every rank.

Imports only the standard library and msgspec. Token ids travel as packed little-endian int32.
"""

from typing import NamedTuple

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the tokens of one request are chosen. All values are validated by the front end.

    A draw is a counter keyed by (seed, choice, position), so it depends on no batch, rank, order or mode.
    """

    temperature: float = 1.0  # 0 means greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    seed: int = 0  # 63 bits; the front end draws one when the client gives none
    choice: int = 0  # k of n
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be completed
    min_tokens: int = 0  # below this many generated tokens, `stop_ids` are masked out
    stop_ids: tuple[int, ...] = ()  # the model's end tokens (unless ignore_eos) and stop_token_ids
    logprobs: int = -1  # -1: none; k >= 0: the sampled token's and the k best, of the raw logits
    prompt_logprobs: int = -1  # the same for each prompt token after the first

    @property
    def plain(self) -> bool:
        """Whether a row needs nothing but its best (perturbed) logit, so ranks may exchange (value, id)."""
        return (
            self.top_p >= 1.0
            and self.top_k == 0
            and self.min_p == 0.0
            and self.presence_penalty == 0.0
            and self.frequency_penalty == 0.0
            and self.repetition_penalty == 1.0
            and not self.logit_bias
            and not self.bad_words
            and not (self.min_tokens and self.stop_ids)
            and self.logprobs < 0
        )


class Resource(NamedTuple):
    """A thing that a request needs on every rank besides a slot and pages: its kind, and the bytes that it is made from."""

    kind: str  # "grammar" is the only one so far
    spec: bytes


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """One sequence to generate. `n` choices are n requests that share a prompt."""

    id: int  # unique in a group's life; chosen by the front end
    prompt: bytes  # int32 little-endian token ids, at least one
    max_tokens: int  # generated tokens at most, at least one; prompt + max_tokens <= max_model_len
    sampling: SamplingParams = SamplingParams()
    priority: int = 0  # smaller runs earlier (as vLLM has it)
    salt: bytes = b""  # separates prefix-cache namespaces
    grammar: bytes = b""  # serialized grammar specification, b"" for none; see grammar/matcher.py
    most_drafts: int = -1  # drafts of a row at most; -1: as the server makes them
    prediction: bytes = b""  # int32 little-endian token ids that the answer may consist of: a source of drafts

    @property
    def resources(self) -> tuple[Resource, ...]:
        """The resources that every rank must have before the request may be admitted."""
        return (Resource("grammar", self.grammar),) if self.grammar else ()

    @property
    def prompt_len(self) -> int:
        return len(self.prompt) // 4


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probabilities (natural, float32, of the raw logits) of one position."""

    logprob: float  # of the token itself
    rank: int  # 1 = the most likely
    top_ids: list[int]
    top_logprobs: list[float]
