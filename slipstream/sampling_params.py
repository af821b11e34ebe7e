"""`slipstream.SamplingParams`: how a caller of `LLM` or `AsyncLLM` wants tokens to be chosen.

Names and values are those of the HTTP API, and are checked as the fields of a body. What the ranks get is made of them for
each request: the other `SamplingParams`, of `log/request.py`. There every field has a value, the seed is drawn, and there are
no stop strings, since the front end looks for them.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from slipstream.errors import BadRequest
from slipstream.serve.errors import to_bad_request
from slipstream.serve.openai.bodies import CompletionBody


class SamplingParams(msgspec.Struct, kw_only=True, frozen=True):
    """Raises BadRequest, a ValueError, naming a field whose value is out of range. None stands for the API's default.

    >>> SamplingParams(temperature=0.8, top_p=0.95, max_tokens=64, stop=["\\n"])
    """

    n: int | None = None  # answers to each prompt
    max_tokens: int | None = None  # 16 of a completion, the rest of the model's length of a chat
    min_tokens: int | None = None
    temperature: float | None = None  # 1.0; 0 takes the likeliest token each time
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    bad_words: list[str] | None = None
    logprobs: int | None = None  # so many alternatives to each token of an answer, with log probabilities
    prompt_logprobs: int | None = None  # the same for each token of the prompt but the first
    skip_special_tokens: bool | None = None
    structured_outputs: dict[str, Any] | None = None  # one of json, regex, choice, grammar, json_object
    priority: int | None = None
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        try:
            msgspec.convert({**self.of_completion(), "prompt": "x"}, CompletionBody)
        except msgspec.ValidationError as e:
            raise to_bad_request(e) from None

    def of_completion(self) -> dict[str, Any]:
        """The fields that have a value, as /v1/completions takes them."""
        out = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}
        if self.logit_bias is not None:
            out["logit_bias"] = {str(id): bias for id, bias in self.logit_bias.items()}
        return out

    def of_chat(self) -> dict[str, Any]:
        """The same, as /v1/chat/completions takes them."""
        out = self.of_completion()
        return out if self.logprobs is None else {**out, "logprobs": True, "top_logprobs": self.logprobs}


Params = SamplingParams | Sequence[SamplingParams] | None


def paired(items: list[Any], params: Params, name: str) -> list[tuple[SamplingParams, list[Any]]]:
    """Parameters and the items that they are for: all of them, or one each. Raises BadRequest."""
    if params is None or isinstance(params, SamplingParams):
        return [(params or SamplingParams(), items)]
    if not isinstance(params, list | tuple) or not all(isinstance(own, SamplingParams) for own in params):
        raise BadRequest("sampling_params: expected SamplingParams, or a list of them", "sampling_params")
    if len(params) != len(items):
        raise BadRequest(
            f"sampling_params: {len(params)} for {len(items)} {name}; give one, or one for each", "sampling_params"
        )
    return [(own, [item]) for own, item in zip(params, items, strict=True)]
