"""Finds out by small forwards how a transformers model attends, and whether it can be served at all.

The first forward records each call of attention and the mask that came with it. The second one replaces attention by a function
of each token alone, and checks that a token's result does not depend on the other tokens of the step: a model with a recurrent
state, a convolution, a position that it counts itself, or a rotation that follows the longest request fails there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models.foreign.attention import CHUNKED, NOT_CAUSAL, Call, Run

_NEAR = 0.05  # of a token's result; the same arithmetic in another row of a batch differs by far less
_TOKENS = 3


@dataclass(frozen=True, eq=False)
class ProbeStep:
    """The fields of a step that operations without a cache may read."""

    ids: Tensor
    positions: Tensor
    slots: Tensor


Forward = Callable[[Tensor, Tensor], Tensor]  # ids and positions [1, T] to hidden states [T, hidden]


def record(forward: Forward, run: Run, device: torch.device) -> list[tuple[Call, int]]:
    """The attention calls of a forward in order, each with its window (0: none).

    Raises ModelError for what cannot be served.
    """
    calls: list[tuple[Call, int]] = []

    def attend(call: Call) -> Tensor:
        calls.append((call, _window(call, calls)))
        return _alone(call)

    _run(forward, run, attend, device, [1, 2, 3], [0, 1, 2])
    if not calls:
        raise ModelError("no layer of it calls transformers' attention interface")
    return calls


def check_tokens_alone(forward: Forward, run: Run, device: torch.device, max_len: int) -> Tensor:
    """Raises ModelError unless a token's result depends on itself and its position alone, attention left out; else a result."""
    at, last = max_len // 2, max_len - 1
    one = _run(forward, run, _alone, device, [5, 7, 9], [at, 3, 1])
    other = _run(forward, run, _alone, device, [4, 2, 5], [1, last, at])
    if (one[0] - other[2]).float().norm() > _NEAR * one[0].float().norm():
        raise ModelError(
            "it carries something from token to token besides attention's keys and values (a recurrent state, a convolution), "
            "or does not take positions from outside"
        )
    return one


def _run(forward: Forward, run: Run, attend: Callable[[Call], Tensor], device, ids: list[int], at: list[int]) -> Tensor:
    tokens, positions = torch.tensor(ids, device=device), torch.tensor(at, device=device)
    run.attend, run.step = attend, ProbeStep(tokens, positions, torch.zeros_like(tokens))
    return forward(tokens[None], positions[None])


def _window(call: Call, before: list[tuple[Call, int]]) -> int:
    kind = type(call.module).__name__
    if not call.causal:
        raise ModelError(f"{kind} attends to later tokens (bidirectional), which cannot be served token by token")
    if call.key.shape[1] != _TOKENS:
        keys = call.key.shape[1]
        raise ModelError(f"{kind} attends to {keys} keys of {_TOKENS} tokens (cross attention or a cache of its own)")
    if call.value.shape[-1] > call.query.shape[-1]:
        raise ModelError(f"{kind} has values of {call.value.shape[-1]}, wider than its keys of {call.query.shape[-1]}")
    if len(call.query) % len(call.key):
        raise ModelError(f"{kind} has {len(call.query)} query heads, not a multiple of its {len(call.key)} key heads")
    if any(call.module is other.module for other, _ in before):
        raise ModelError(f"{kind} attends twice in one forward")
    if call.mask is None:
        raise ModelError(f"{kind} gets no mask from transformers' masking functions, so what it sees is not known")
    window = int(call.mask.flatten()[0])
    if (call.mask != window).any():
        raise ModelError(f"{kind} adds a bias to the mask (position biases such as alibi), which is not supported")
    if window == NOT_CAUSAL:
        raise ModelError(f"the mask of {kind} is neither causal nor a causal window (bidirectional or by blocks)")
    if window == CHUNKED:
        raise ModelError(f"{kind} attends within fixed chunks of the sequence, which is not supported")
    return window


def _alone(call: Call) -> Tensor:
    """A function of each token alone that depends on everything attention does: on rotated queries and keys, and on values."""
    share = len(call.query) // len(call.key)
    key, value = (each.repeat_interleave(share, 0) for each in (call.key, call.value))
    out: Any = value + (call.query + key).to(value.dtype).mean(-1, keepdim=True)
    return out.transpose(0, 1).contiguous()
