"""The causal convolution in front of a recurrent layer: each channel's own, over the latest tokens of a request."""

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.ops.cpu.paged import PagedStep


def causal_conv(x: Tensor, columns: Tensor, weight: Tensor, bias: Tensor | None, step: PagedStep) -> Tensor:
    """silu of the convolution of x [T, channels], of the same shape and dtype; moves the rows' slots' columns on.

    columns [slots + 1, kernel - 1, channels]: inputs before the step, the oldest first; weight float32 [kernel, channels].
    """
    kept = weight.shape[0] - 1
    out = torch.empty(x.shape, dtype=torch.float32)
    at, slots = step.singles
    if len(at):
        whole = torch.cat([columns.index_select(0, slots), x.index_select(0, at)[:, None]], 1)
        columns.index_copy_(0, slots, whole[:, 1:])
        out.index_copy_(0, at, (whole * weight).sum(1))
    for slot, first, last in step.chunks:
        whole = torch.cat([columns[slot], x[first:last]])
        columns[slot] = whole[last - first :]
        whole = whole.float()
        part = torch.mul(whole[kept:], weight[kept], out=out[first:last])
        for i in range(kept):
            part.addcmul_(whole[i : i + last - first], weight[i])
    if bias is not None:
        out += bias
    return F.silu(out, inplace=True).to(x.dtype)
