"""The activations of MLPs, with and without a gate, in plain PyTorch."""

import torch.nn.functional as F
from torch import Tensor

from slipstream.ops.layers import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation, Gate


def gated(both: Tensor, gate: Gate) -> Tensor:
    """[T, 2 * width], gates and then what they multiply, to [T, width]. May overwrite its argument."""
    g, u = both.chunk(2, -1)
    if gate == "silu":
        return F.silu(g).mul_(u)
    if gate == "gelu_tanh":
        return F.gelu(g, approximate="tanh").mul_(u)
    g, u = g.clamp(max=SWIGLU_LIMIT), u.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (g * SWIGLU_ALPHA).sigmoid_().mul_(g).mul_(u + 1)


def activated(x: Tensor, activation: Activation) -> Tensor:
    """[T, width] to the same."""
    if activation == "silu":
        return F.silu(x)
    if activation == "relu2":
        return F.relu(x).square_()
    if activation == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
