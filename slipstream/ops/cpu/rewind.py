"""Recurrent layers under drafts: the state after each token of a row is kept, so that wrong drafts can be taken back.

Pages are taken back by length alone. A recurrent state is not, so rows that verify drafts go through such a layer one token at
a time, as plain decoding does, and the state after each token is copied.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from slipstream.ops.cpu.paged import PagedStep

Spec = TypeVar("Spec")


class Kept(NamedTuple):
    """A layer's state of some slots after the token at one place of their rows."""

    cache: int
    place: int
    slots: list[int]
    arrays: list[Tensor]  # [slots, ...] each


def by_token(
    mix: Callable[[Tensor, Spec, PagedStep], tuple[Tensor, Tensor]], x: Tensor, spec: Spec, cache: int, step: PagedStep
) -> tuple[Tensor, Tensor]:
    """`mix` of x [T, ...]: results [T, ...]. Rows that verify drafts go by tokens; `step.kept` gets their states."""
    if not step.verifies:
        return mix(x, spec, step)
    out: list[Tensor] = []
    for place, (at, part) in enumerate(_parts(step), -1):
        found = mix(x.index_select(0, at), spec, part)
        out = out or [f.new_empty(len(x), *f.shape[1:]) for f in found]
        for whole, f in zip(out, found, strict=True):
            whole.index_copy_(0, at, f)
        if place >= 0:
            arrays = [array.index_select(0, part.slots) for array in step.caches[cache]]
            step.kept.append(Kept(cache, place, part.slots.tolist(), arrays))
    first, second = out
    return first, second


def _parts(step: PagedStep) -> list[tuple[Tensor, PagedStep]]:
    """The rows that verify nothing; then the first tokens of all other rows, their second tokens, and so on."""
    if not step.parts:
        rows = step.rows[: step.verifies]
        step.parts.append(_part(step, step.rows[step.verifies :]))
        for place in range(max(last - first for _, first, last in rows)):
            step.parts.append(_part(step, [(s, f + place, f + place + 1) for s, f, last in rows if f + place < last]))
    return step.parts


def _part(step: PagedStep, rows: list[tuple[int, int, int]]) -> tuple[Tensor, PagedStep]:
    at = torch.tensor([i for _, first, last in rows for i in range(first, last)], dtype=torch.int64)
    own, begin = [], 0
    for slot, first, last in rows:
        own.append((slot, begin, begin + last - first))
        begin += last - first
    slots, positions = step.slots.index_select(0, at), step.positions.index_select(0, at)
    return at, PagedStep(step.ids.index_select(0, at), positions, slots, own, step.caches, step.tables)


def rewind(step: PagedStep, accepted: dict[int, int]) -> None:
    """Sets the states of slots back to those after the tokens that their rows gave (`accepted`, by slot)."""
    for cache, place, slots, arrays in step.kept:
        back = [i for i, slot in enumerate(slots) if accepted[slot] == place + 1]
        if back:
            at, into = torch.tensor(back), torch.tensor([slots[i] for i in back])
            for array, kept in zip(step.caches[cache], arrays, strict=True):
                array.index_copy_(0, into, kept.index_select(0, at))
