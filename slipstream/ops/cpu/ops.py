"""The operations in plain PyTorch: the CPU's own, and the reference that other devices' kernels are tested against.

Linear layers are packed once for oneDNN where it has kernels for the type (twice as fast as `F.linear` at few rows). The
residual is float32 whatever the type of the weights.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.ops.collective import Collective, Solo
from slipstream.ops.cpu.activations import activated, gated
from slipstream.ops.cpu.experts import ExpertLinear, experts
from slipstream.ops.cpu.gated_delta import gated_delta
from slipstream.ops.cpu.latent import latent_attention
from slipstream.ops.cpu.mamba2 import mamba2
from slipstream.ops.cpu.paged import PagedStep, padded_rows, paged_attention
from slipstream.ops.cpu.rewind import by_token
from slipstream.ops.interface import Step
from slipstream.ops.layers import Activation, Attention, Experts, Gate, GatedDelta, LatentAttention, Mamba2
from slipstream.shard import Shard
from slipstream.weights.packed import Packed, dense, join

_ROW_BYTES = 1 << 30  # dense copies kept for steps of one row at most: 15 % faster than packed in bfloat16
_NEAR = 2.0**-6  # of a row's best logit: two steps of bfloat16
_MOST_NEAR = 64  # candidates a row on average; with more, the best ones are not computed again
_WINDOW = 256  # logits that are looked at one by one only where the best of them is near
_use_onednn = torch._C._set_mkldnn_enabled
_linear = torch.ops.mkldnn._linear_pointwise.default


class Linear(NamedTuple):
    """A linear layer's part. `packed` is in oneDNN's own layout, or None; `dense` is kept where it is used too."""

    packed: Tensor | None
    dense: Tensor | None
    bias: Tensor | None


class Norm(NamedTuple):
    """x / hypot(|x|, floor) * scale is the RMSNorm of x: scale is weight * sqrt(width), floor is sqrt(eps * width)."""

    scale: Tensor  # float32 [width]
    floor: Tensor  # float32 []


def packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN has packed linear layers for this type on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32


def _one_row(x: Tensor, dense: Tensor, bias: Tensor | None) -> Tensor:
    """One row through PyTorch's own product of a matrix and a vector, which it takes only while oneDNN is switched off."""
    _use_onednn(False)
    y = F.linear(x, dense, bias)
    _use_onednn(True)
    return y


class PlainOps:
    """An `ops.interface.Ops` on the CPU. `weight_bytes` counts what the prepared weights take."""

    device = torch.device("cpu")

    def __init__(self, dtype: torch.dtype, shard: Shard | None = None, collective: Collective | None = None):
        self.dtype = dtype
        self.shard = shard or Shard()
        self.collective = collective or Solo()
        self.packs = packs(dtype)
        self.weight_bytes = 0
        self._row_bytes = 0  # of dense copies
        self._kept: set[int] = set()  # addresses of tensors that are held dense anyway

    def weight(self, parts: list[Packed], bias: Tensor | None = None) -> Linear:
        tensor = join(parts).data
        self.weight_bytes += tensor.nbytes + (bias.nbytes if bias is not None else 0)
        if not (self.packs and tensor.numel()):
            return Linear(None, tensor, bias)
        packed = torch.ops.mkldnn._reorder_linear_weight(tensor, None)
        if self.dtype != torch.bfloat16:
            return Linear(packed, None, bias)
        if tensor.data_ptr() not in self._kept:
            if self._row_bytes + tensor.nbytes > _ROW_BYTES:
                return Linear(packed, None, bias)
            self._row_bytes += tensor.nbytes
            self.weight_bytes += tensor.nbytes
        return Linear(packed, tensor, bias)

    def expert_weight(self, weight: Packed, bias: Tensor | None = None) -> ExpertLinear:
        """Each expert's layer is prepared by itself, from a copy, so that none keeps the memory of all."""
        stacked = weight.data
        layers = [self.weight([dense(w.clone())], None if bias is None else bias[e]) for e, w in enumerate(stacked)]
        return ExpertLinear(layers, stacked.shape[1], stacked.shape[2])

    def norm_weight(self, tensor: Tensor, eps: float) -> Norm:
        width = tensor.numel()
        self.weight_bytes += 4 * width
        return Norm(tensor.float() * math.sqrt(width), torch.tensor(math.sqrt(eps * width)))

    def tensor(self, tensor: Tensor) -> Tensor:
        self.weight_bytes += tensor.nbytes
        self._kept.add(tensor.data_ptr())
        return tensor

    def embed(self, table: Tensor, first: int, step: PagedStep, scale: float = 1.0) -> Tensor:
        if self.shard.size == 1:
            return table.index_select(0, step.ids).float().mul_(scale)
        local = step.ids - first
        elsewhere = (local < 0) | (local >= table.shape[0])
        rows = F.embedding(local.masked_fill(elsewhere, 0), table).masked_fill_(elsewhere[:, None], 0)
        return self.collective.all_reduce_sum(rows).float().mul_(scale)

    def norm(self, x: Tensor, weight: Norm, step: Step) -> Tensor:
        length = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32)
        out = torch.empty(x.shape, dtype=self.dtype)
        return torch.mul(x / torch.hypot(length, weight.floor), weight.scale, out=out)

    def linear(self, x: Tensor, weight: Linear, step: Step) -> Tensor:
        if weight.packed is not None:
            if weight.dense is not None and x.shape[0] == 1:
                return _one_row(x, weight.dense, weight.bias)
            rows = x.shape[0]
            padding = padded_rows(rows) - rows
            if padding:
                x = torch.cat([x, x[:padding]])  # any rows will do; zeros would be one more pass
            y = _linear(x, weight.packed, weight.bias, "none", [], "")
            return y[:rows] if padding else y
        return F.linear(x, weight.dense, weight.bias)  # type: ignore[arg-type]

    def attention(self, qkv: Tensor, spec: Attention, step: PagedStep) -> Tensor:
        heads, dim = spec.heads, spec.head_dim
        if not heads.num_q_heads:
            return qkv
        x = qkv[:, : (heads.num_q_heads + 2 * heads.num_kv_heads) * dim].view(qkv.shape[0], -1, dim)
        turned = heads.num_q_heads + heads.num_kv_heads
        if spec.q_norm is not None:
            x[:, : heads.num_q_heads] = self.norm(x[:, : heads.num_q_heads], spec.q_norm, step)
            x[:, heads.num_q_heads : turned] = self.norm(x[:, heads.num_q_heads : turned], spec.k_norm, step)
        if spec.rotary is not None:
            self._rotate(x[:, :turned], spec.rotary, step)
        return paged_attention(x, spec, step)

    def latent_attention(self, q: Tensor, kv: Tensor, spec: LatentAttention, step: PagedStep) -> Tensor:
        if not spec.num_heads:
            return q
        x, latent = q.view(len(q), spec.num_heads, -1), kv[:, : spec.latent_dim]
        latent.copy_(self.norm(latent, spec.norm, step))
        self._rotate(x[..., spec.nope_dim :], spec.rotary, step)
        self._rotate(kv[:, None, spec.latent_dim :], spec.rotary, step)
        return latent_attention(x, kv, spec, step)

    def _rotate(self, x: Tensor, rotary: Tensor, step: PagedStep) -> None:
        """Turns the first elements of each head of x [T, heads, head_dim] in place."""
        cos, sin = self._rotation(rotary, step)
        half = rotary.shape[1] // 2
        halves = x.as_strided((*x.shape[:2], 2, half), (*x.stride()[:2], half, 1))
        torch.addcmul(halves * cos, halves.flip(2), sin, out=halves)

    def _rotation(self, rotary: Tensor, step: PagedStep) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [T, 1, 2, width / 2] for x * cos + swapped halves of x * sin; made once a step."""
        found = step.rotations.get(id(rotary))
        if found is None:
            cos, sin = rotary.index_select(0, step.positions).to(self.dtype).chunk(2, -1)
            found = torch.stack([cos, cos], 1).unsqueeze(1), torch.stack([-sin, sin], 1).unsqueeze(1)
            step.rotations[id(rotary)] = found
        return found

    def gated_delta(self, x: Tensor, spec: GatedDelta, step: PagedStep) -> Tensor:
        if not spec.heads.num_q_heads:
            return x
        out, gate = by_token(gated_delta, x, spec, spec.cache, step)
        return self.norm(out, spec.norm, step).float().mul_(F.silu(gate.float())).to(self.dtype).flatten(1)

    def mamba2(self, x: Tensor, spec: Mamba2, step: PagedStep) -> Tensor:
        if not spec.num_heads:
            return x
        out, gate = by_token(mamba2, x, spec, spec.cache, step)
        gate = F.silu(gate.float())
        if spec.norm is None:
            return out.mul_(gate).to(self.dtype)
        if not spec.norm_before_gate:
            out.mul_(gate)
        weight, by_group = spec.norm, out.view(len(out), spec.groups, -1)
        length = torch.linalg.vector_norm(by_group, 2, -1, True)
        share = spec.groups**-0.5  # the weight was prepared for one norm over all groups
        by_group.div_(torch.hypot(length, weight.floor * share))
        out.mul_(weight.scale * share)
        if spec.norm_before_gate:
            out.mul_(gate)
        return out.to(self.dtype)

    def gate(self, x: Tensor, gate: Tensor, step: Step) -> Tensor:
        return x.mul_(torch.sigmoid(gate))

    def gated(self, x: Tensor, weight: Linear, gate: Gate, step: Step) -> Tensor:
        return gated(self.linear(x, weight, step), gate)

    def activated(self, x: Tensor, weight: Linear, activation: Activation, step: Step) -> Tensor:
        return activated(self.linear(x, weight, step), activation)

    def experts(self, x: Tensor, spec: Experts, step: Step) -> Tensor:
        return experts(x, spec, lambda rows, weight: self.linear(rows, weight, step))

    def partial(self, x: Tensor, weight: Linear, step: Step) -> Tensor:
        return self.linear(x, weight, step)

    def all_reduce(self, x: Tensor, step: Step) -> Tensor:
        return self.collective.all_reduce_sum(x.contiguous())

    def reduce_add_norm(
        self, partial: Tensor, residual: Tensor, norm: Norm, step: Step, post_norm: Norm | None = None
    ) -> tuple[Tensor, Tensor]:
        """The residual stays in float32: its roundings would add up over the layers, and close candidates would change places
        with the rows that share a step.
        """
        if self.shard.size > 1:
            self.collective.all_reduce_sum(partial)
        residual = residual + (partial if post_norm is None else self.norm(partial, post_norm, step))
        return residual, self.norm(residual, norm, step)

    def logits(self, hidden: Tensor, head: Linear, step: Step, softcap: float = 0.0) -> Tensor:
        out = self.linear(hidden, head, step).float()
        if self.dtype != torch.float32 and head.dense is not None and out.numel():
            _sharpen(out, hidden, head.dense)
        return out.div_(softcap).tanh_().mul_(softcap) if softcap else out


def _sharpen(logits: Tensor, hidden: Tensor, weight: Tensor) -> None:
    """Computes the logits next to each row's best again in float32, in place.

    Rounded to bfloat16, logits around 20 differ by at least 0.125, so close candidates tie and the lower id would win.
    """
    rows, columns = _nearest(logits)
    if len(rows) <= _MOST_NEAR * len(logits):
        logits[rows, columns] = (hidden[rows].float() * weight[columns].float()).sum(1)


def _nearest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns of the logits next to their row's best; some perhaps twice. Five times as fast as looking at each."""
    count, width = logits.shape
    window = min(_WINDOW, width)
    whole = width // window
    bests = logits[:, : whole * window].view(count, whole, window).amax(2)
    firsts = torch.arange(whole) * window
    if width % window:  # the last window reaches back into the one before
        bests = torch.cat([bests, logits[:, -window:].amax(1, keepdim=True)], 1)
        firsts = torch.cat([firsts, torch.tensor([width - window])])
    best = bests.amax(1, keepdim=True)
    least = best - best.abs() * _NEAR
    rows, windows = torch.nonzero(bests >= least, as_tuple=True)
    columns = firsts[windows, None] + torch.arange(window)
    picked, offsets = torch.nonzero(logits[rows[:, None], columns] >= least[rows], as_tuple=True)
    return rows[picked], columns[picked, offsets]
