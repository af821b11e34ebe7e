"""A prompt cut into blocks of tokens, as the block forms of recurrent layers take it."""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64  # tokens: within a block all pairs are computed, between blocks only the state


def cut(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Each [tokens, heads, ...] to [heads, blocks, tokens of a block, ...]; zeros fill the last block."""
    out = []
    for tensor in tensors:
        tokens, heads, *rest = tensor.shape
        block = min(BLOCK, tokens)
        blocks = -(-tokens // block)
        padded = F.pad(tensor, (0, 0) * (len(rest) + 1) + (0, blocks * block - tokens))
        out.append(padded.view(blocks, block, heads, *rest).movedim(2, 0).contiguous())
    return out


def decays(log_decay: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From log_decay [heads, blocks, tokens], each token's own: how much is left of what went into the state.

    Returns what the state before the block keeps up to each token [..., tokens, 1]; what token j keeps up to token i
    [..., i, j], zero for j behind i; what each token keeps up to the block's end [..., tokens, 1]; what the state keeps over
    the block [..., 1, 1].
    """
    total = log_decay.cumsum(-1)
    later = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool).triu_(1)
    between = (total[..., :, None] - total[..., None, :]).masked_fill_(later, -torch.inf).exp_()
    end = total[..., -1:]
    return total.exp()[..., None], between, (end - total).exp_()[..., None], end.exp()[..., None]
