"""The CUDA namespace of operations: the `Ops` of interface.py over cuBLAS and the Triton kernels.

Nothing here waits for the device or reads from it, so every method can be captured in a graph. Sums over ranks always go
through symmetric memory, captured or not: there is one path, and no launch that blocks the host.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.ops.cuda import latent
from slipstream.ops.cuda.attention import (
    TILE,
    decode_kernel,
    decode_parts_kernel,
    decode_tile,
    decode_tiles_kernel,
    prefill_kernel,
)
from slipstream.ops.cuda.experts import ExpertWeight, experts
from slipstream.ops.cuda.gated_delta import gated_delta
from slipstream.ops.cuda.latent import latent_attention
from slipstream.ops.cuda.launch import cdiv, power, tl
from slipstream.ops.cuda.mamba2 import mamba2
from slipstream.ops.cuda.prompt_blocks import ROWS, UNITS, Cutter
from slipstream.ops.cuda.rows import (
    activated_kernel,
    add_norm_kernel,
    embed_kernel,
    gate_kernel,
    gated_kernel,
    norm_kernel,
    rotary_write_kernel,
    softcap_kernel,
)
from slipstream.ops.cuda.sums import barrier_kernel, sum_add_norm_kernel
from slipstream.ops.cuda.symmetric import FAULT_NS, PROGRAMS, Region, Symmetric
from slipstream.ops.interface import Step
from slipstream.ops.layers import Activation, Attention, Experts, Gate, GatedDelta, LatentAttention, Mamba2
from slipstream.shard import Shard
from slipstream.weights.packed import Packed, join

LOG2E = 1.4426950408889634
TRITON_TYPE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
MOST_PARTS = 32  # the most parts of one decode row's cache
ROW_BARRIER_ROWS = 132  # up to so many rows, each row's program waits for its own peers


def row_warps(width: int) -> int:
    """Warps for a program that holds one row: 8 elements, one 16-byte access, a thread."""
    return max(1, min(16, power(width) // 256))


@dataclass(frozen=True, eq=False)
class Linear:
    """A layer's part, [out, in], and its bias [out] or None."""

    weight: Tensor
    bias: Tensor | None = None

    def apply(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        if x.shape[1] == 0:
            out = x.new_empty((x.shape[0], self.weight.shape[0])) if out is None else out
            return out.zero_() if self.bias is None else out.copy_(self.bias.expand_as(out))
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)


@dataclass(frozen=True, eq=False)
class Norm:
    """An RMSNorm's weight and epsilon."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, eq=False)
class Scratch:
    """Where the parts of split decode rows are joined; shared by all layers and graphs, since one stream orders them."""

    partial: Tensor  # float32
    stats: Tensor  # float32
    arrived: Tensor  # int32, zeros between kernels


@dataclass(frozen=True, eq=False)
class DecodeScratch(Scratch):
    """With the parts themselves, which `begin` cuts again for each step."""

    parts: Tensor  # int32 [*, 5], see `decode_parts_kernel`
    count: Tensor  # int32 [1]
    rows: int  # at most
    heads: int  # key heads, or what else has a program of its own for each part

    def most_parts(self, rows: int) -> int:
        """The most parts that the caches of up to `rows` decode rows are cut into; each is a program for every key head."""
        return decode_parts(rows, self.heads)


@dataclass(frozen=True, eq=False)
class Tiles:
    """One layer's (keys, values) as tensor descriptors of tiles [TILE, head_dim]: each kernel language has its own kind."""

    decode: tuple[Any, Any]  # Triton's
    prompt: tuple[Any, Any] | None  # Gluon's, where `hopper_prefill` runs


def decode_parts(rows: int, heads: int) -> int:
    """See `DecodeScratch.most_parts`."""
    return rows * max(1, min(MOST_PARTS, cdiv(1056, rows * heads)))


def tile_tokens(head_dim: int, itemsize: int) -> int:
    """Tokens of a tile, so that a program's tiles fit in shared memory."""
    return (TILE if itemsize == 2 else 32) // (1 if head_dim <= 128 else 2)


@dataclass(eq=False)
class CudaStep:
    """One step's inputs on the device. Tokens [0, decodes) are one row each, prompt tokens follow, then padding.

    `decode_rows` is a grid's size: an upper bound that a captured graph keeps; `decodes` int32 [1] says on the device how many
    are real. With `prompts`, so does `part_counts` int32 [2] of `parts`, which are those of `prefill_kernel`.
    """

    ids: Tensor  # int32 [T]
    positions: Tensor  # int32 [T]
    slots: Tensor  # int32 [T]
    tables: list[Tensor]  # by page table, int32 [slots + 1, columns]
    caches: list[tuple[Tensor, ...]]  # by layer: keys and values, or the arrays [slots + 1, ...] of its state
    tiles: list[Tiles | None]  # the same keys and values as descriptors of tiles, where `tiles_of` allows
    windows: tuple[int, ...]  # by page table, 0 for none
    scratch: dict[tuple[int, int], DecodeScratch]  # by number of key heads and window
    prompt_scratch: Scratch
    page_size: int
    nobody: int  # the slot of padding rows
    decode_rows: int
    decodes: Tensor
    prompts: bool = False
    parts: Tensor | None = None
    part_counts: Tensor | None = None
    rows: Tensor | None = None  # with state by slot and prompts: int32 [*, 4] of (slot, first token, tokens, first chunk) ...
    chunks: Tensor | None = None  # ... int32 [*, 2] of (first token, tokens), in the order of the rows ...
    row_counts: Tensor | None = None  # ... and int32 [2], how many of them are real
    turn: int = 0  # the symmetric buffer of the next partial sum; every forward begins with the same one


@dataclass(eq=False)
class CudaOps:
    """See `ops/interface.py` for what each method does; shapes are those of this rank."""

    dtype: torch.dtype
    device: torch.device
    shard: Shard
    symmetric: Symmetric

    def __post_init__(self) -> None:
        self.precision = "ieee" if self.dtype == torch.float32 else "tf32"
        self._side = torch.cuda.Stream(self.device)
        self.processors = torch.cuda.get_device_properties(self.device).multi_processor_count

    def weight(self, parts: list[Packed], bias: Tensor | None = None) -> Linear:
        return Linear(self.tensor(join(parts).data), None if bias is None else self.tensor(bias))

    def expert_weight(self, weight: Packed, bias: Tensor | None = None) -> ExpertWeight:
        return ExpertWeight(self.tensor(weight.data), None if bias is None else self.tensor(bias))

    def norm_weight(self, tensor: Tensor, eps: float) -> Norm:
        return Norm(self.tensor(tensor), eps)

    def tensor(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    def begin(self, step: CudaStep) -> None:
        """Called before each forward: cuts the decode rows' caches."""
        for (heads, window), s in step.scratch.items():
            decode_parts_kernel[(1,)](
                step.positions, step.decodes, s.parts, s.count, step.decode_rows, s.most_parts(step.decode_rows),
                HEADS=heads, MOST=MOST_PARTS, WINDOW=window, TILE=TILE, R=power(s.rows), num_warps=8,
            )  # fmt: skip

    def embed(self, table: Tensor, first: int, step: CudaStep, scale: float = 1.0) -> Tensor:
        rows, hidden = step.ids.shape[0], table.shape[1]
        alone = self.shard.size == 1
        out = torch.empty((rows, hidden), dtype=self.dtype, device=self.device)
        region = None if alone else self.symmetric.sums[2]
        part = out if region is None else region.local[:rows]
        embed_kernel[(rows, cdiv(hidden, 1024))](
            table, step.ids, part, first, table.shape[0], scale, H=hidden, B=1024
        )  # fmt: skip
        if region is not None:
            self._sum(region, out, None, out)
        return out

    def norm(self, x: Tensor, weight: Norm, step: Step) -> Tensor:
        out = torch.empty_like(x)
        rows, width = x.shape
        norm_kernel[(rows,)](x, weight.weight, out, weight.eps, H=width, HP=power(width), num_warps=row_warps(width))
        return out

    def linear(self, x: Tensor, weight: Linear, step: Step) -> Tensor:
        return weight.apply(x)

    def attention(self, qkv: Tensor, spec: Attention, step: CudaStep) -> Tensor:
        rows, d, heads = qkv.shape[0], spec.head_dim, spec.heads
        out = torch.empty((rows, heads.num_q_heads * d), dtype=self.dtype, device=self.device)
        if not heads.num_kv_heads:
            return out
        group = heads.num_q_heads // heads.num_kv_heads
        (keys, values), table = step.caches[spec.cache], step.tables[spec.table]
        none = Norm(qkv, 0.0)  # an address that is not read
        q_norm, k_norm = spec.q_norm or none, spec.k_norm or none
        turned = 0 if spec.rotary is None else spec.rotary.shape[1]
        rotary_write_kernel[(rows, heads.num_kv_heads)](
            qkv, q_norm.weight, k_norm.weight, qkv if spec.rotary is None else spec.rotary, keys, values, table, step.slots,
            step.positions, qkv.stride(0), table.stride(0), q_norm.eps, HEADS=heads.num_kv_heads, GROUP=group,
            GP=power(group + 2), D=d, TURNED=turned, HALF=power(turned // 2) if turned else 0,
            REST=power(d - turned) if turned < d else 0, PAGE_SIZE=step.page_size, NORM=spec.q_norm is not None, num_warps=4,
        )  # fmt: skip
        if not step.prompts:
            self._attend_decodes(qkv, out, spec, step)
            return out
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):  # decode rows wait for memory, prompt rows for arithmetic
            self._attend_decodes(qkv, out, spec, step)
        self._attend_prompts(qkv, out, spec, step)
        torch.cuda.current_stream().wait_stream(self._side)
        return out

    def _attend_decodes(self, qkv: Tensor, out: Tensor, spec: Attention, step: CudaStep) -> None:
        keys = spec.heads.num_kv_heads
        s, table = step.scratch[keys, step.windows[spec.table]], step.tables[spec.table]
        tiles = step.tiles[spec.cache] if self._plain(spec, step) else None
        arrays = table, step.slots, s.parts, s.count, s.partial, s.stats, s.arrived, out
        sizes = spec.scale * LOG2E, qkv.stride(0), table.stride(0)
        grid = s.most_parts(step.decode_rows), keys
        if tiles:
            decode_tiles_kernel[grid](qkv, *tiles.decode, *arrays, *sizes, num_warps=4, num_stages=2, **self._shape(spec, step))
            return
        options = self._any_shape(spec, step)
        decode_kernel[grid](
            qkv, *step.caches[spec.cache], *arrays, step.positions, qkv if spec.sinks is None else spec.sinks, *sizes,
            num_warps=4, num_stages=3 if options["N"] == TILE else 2, **options,
        )  # fmt: skip

    def _attend_prompts(self, qkv: Tensor, out: Tensor, spec: Attention, step: CudaStep) -> None:
        p, table = step.prompt_scratch, step.tables[spec.table]
        tiles = step.tiles[spec.cache] if self._plain(spec, step) else None
        arrays = table, step.parts, step.part_counts, p.partial, p.stats, p.arrived, out
        sizes = spec.scale * LOG2E, qkv.stride(0), table.stride(0)
        if tiles and tiles.prompt:
            from slipstream.ops.cuda.hopper_prefill import hopper_prefill_kernel

            h = spec.heads
            hopper_prefill_kernel[(self.processors,)](
                qkv, *tiles.prompt, *arrays, *sizes, HEADS=h.num_kv_heads, GROUP=h.num_q_heads // h.num_kv_heads,
                D=spec.head_dim, PAGE_SIZE=step.page_size, STAGES=2, num_warps=4, maxnreg=168,
            )  # fmt: skip
        else:
            options = self._any_shape(spec, step)
            prefill_kernel[(self.processors,)](
                qkv, *step.caches[spec.cache], *arrays, qkv if spec.sinks is None else spec.sinks, *sizes, M=ROWS, num_warps=8,
                num_stages=5 if options["N"] == TILE else 2, **options,
            )  # fmt: skip

    def _plain(self, spec: Attention, step: CudaStep) -> bool:
        """Whether the kernels that read tiles have all that this attention needs."""
        return not step.windows[spec.table] and spec.sinks is None and not spec.softcap

    def _shape(self, spec: Attention, step: CudaStep) -> dict[str, Any]:
        h, d = spec.heads, spec.head_dim
        n = tile_tokens(d, max(self.dtype.itemsize, step.caches[spec.cache][0].itemsize))
        return {
            "HEADS": h.num_kv_heads, "GROUP": h.num_q_heads // h.num_kv_heads, "D": d, "PAGE_SIZE": step.page_size, "N": n,
            "PRECISION": self.precision,
        }  # fmt: skip

    def _any_shape(self, spec: Attention, step: CudaStep) -> dict[str, Any]:
        return self._shape(spec, step) | {
            "DP": power(spec.head_dim), "WINDOW": step.windows[spec.table], "SINKS": spec.sinks is not None,
            "SOFTCAP": spec.softcap,
        }  # fmt: skip

    def tiles_of(self, cache: tuple[Tensor, ...], page_size: int) -> Tiles | None:
        """A layer's keys and values in tiles for the copy engine; None where kernels use addresses.

        Tiles need pages of a multiple of TILE tokens, 16-bit numbers of the activations' dtype, heads of 64, 128 or 256 and a
        Hopper GPU or a newer one. The prompts' kernel is for Hopper and heads up to 128 alone, so its language is imported for
        it alone.
        """
        generation = torch.cuda.get_device_capability(self.device)[0]
        keys, values = cache
        if page_size % TILE or self.dtype.itemsize != 2 or keys.dtype != self.dtype or generation < 9:
            return None
        dim = keys.shape[-1]
        if dim not in (64, 128, 256) or not keys.numel():
            return None
        tokens = tile_tokens(dim, keys.dtype.itemsize)
        decode = decode_tile(keys, tokens), decode_tile(values, tokens)
        if generation > 9 or dim > 128:
            return Tiles(decode, None)
        from slipstream.ops.cuda.hopper_prefill import prompt_tile

        return Tiles(decode, (prompt_tile(keys), prompt_tile(values)))

    def gate(self, x: Tensor, gate: Tensor, step: Step) -> Tensor:
        rows, width = x.shape
        if width:
            gate_kernel[(rows, cdiv(width, 1024))](x, gate, gate.stride(0), WIDTH=width, B=1024, num_warps=4)
        return x

    def gated(self, x: Tensor, weight: Linear, gate: Gate, step: Step) -> Tensor:
        both = weight.apply(x)
        width = both.shape[1] // 2
        out = torch.empty((x.shape[0], width), dtype=self.dtype, device=self.device)
        if width:
            gated_kernel[(x.shape[0], cdiv(width, 1024))](both, out, WIDTH=width, KIND=gate, B=1024, num_warps=4)
        return out

    def activated(self, x: Tensor, weight: Linear, activation: Activation, step: Step) -> Tensor:
        out = weight.apply(x)
        width = out.shape[1]
        if width:
            activated_kernel[(x.shape[0], cdiv(width, 1024))](out, WIDTH=width, KIND=activation, B=1024, num_warps=4)
        return out

    def partial(self, x: Tensor, weight: Linear, step: CudaStep) -> Tensor:
        """With several ranks the product is written where all of them can read it, in two buffers that take turns."""
        return weight.apply(x) if self.shard.size == 1 else weight.apply(x, self._room(x.shape[0], step))

    def all_reduce(self, x: Tensor, step: CudaStep) -> Tensor:
        """Through the buffers that `partial` uses, in pieces of their width.

        A forward may have an odd count of these sums: `embed` sums before those of the next one, so all ranks have read them.
        """
        if self.shard.size == 1:
            return x
        rows, pieces = x.shape[0], []
        for piece in x.split(self.symmetric.sums[0].local.shape[1], 1):
            region, step.turn = self.symmetric.sums[step.turn], 1 - step.turn
            region.local.view(-1)[: piece.numel()].view(rows, -1).copy_(piece)
            out = torch.empty((rows, piece.shape[1]), dtype=self.dtype, device=self.device)
            self._sum(region, out, None, out)
            pieces.append(out)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)

    def _room(self, rows: int, step: CudaStep) -> Tensor:
        """Where the next partial sum goes, of several ranks."""
        region, step.turn = self.symmetric.sums[step.turn], 1 - step.turn
        return region.local[:rows]

    def experts(self, x: Tensor, spec: Experts, step: CudaStep) -> Tensor:
        shared = gate = None
        if spec.shared is not None:
            up, down = spec.shared
            kind: Any = spec.gate  # a gate or an activation, as the sizes show
            is_gated = up.weight.shape[0] == 2 * down.weight.shape[1]
            inner = self.gated(x, up, kind, step) if is_gated else self.activated(x, up, kind, step)
            shared = down.apply(inner)
            gate = None if spec.shared_gate is None else spec.shared_gate.apply(x)
        out = torch.empty_like(x) if self.shard.size == 1 else self._room(x.shape[0], step)
        return experts(x, spec, shared, gate, out, step, self.precision)

    def gated_delta(self, x: Tensor, spec: GatedDelta, step: CudaStep) -> Tensor:
        return gated_delta(x, spec, step, self.processors, self._side, self.precision)

    def mamba2(self, x: Tensor, spec: Mamba2, step: CudaStep) -> Tensor:
        return mamba2(x, spec, step, self.processors, self.precision)

    def latent_attention(self, q: Tensor, kv: Tensor, spec: LatentAttention, step: CudaStep) -> Tensor:
        return latent_attention(q, kv, spec, step, self.processors, self.precision)

    def reduce_add_norm(
        self, partial: Tensor, residual: Tensor, norm: Norm, step: Step, post_norm: Norm | None = None
    ) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(residual)
        if self.shard.size == 1:
            rows, width = partial.shape
            post = post_norm or norm
            add_norm_kernel[(rows,)](
                partial, residual, norm.weight, post.weight, out, norm.eps, post.eps, H=width, HP=power(width),
                POST=post_norm is not None, num_warps=row_warps(width),
            )  # fmt: skip
        else:
            self._sum(self.symmetric.region_of(partial), residual, norm, out, post_norm)
        return residual, out

    def logits(self, hidden: Tensor, head: Linear, step: Step, softcap: float = 0.0) -> Tensor:
        if self.dtype == torch.float32:
            out = head.apply(hidden)
        else:
            out = torch.mm(hidden, head.weight.t(), out_dtype=torch.float32)
        if softcap:
            softcap_kernel[(out.shape[0], cdiv(out.shape[1], 1024))](out, softcap, WIDTH=out.shape[1], B=1024, num_warps=4)
        return out

    def _sum(self, region: Region, residual: Tensor, norm: Norm | None, out: Tensor, post: Norm | None = None) -> None:
        """out = the sum over ranks; with a norm, residual += that sum (its RMSNorm with `post`) and out = its RMSNorm."""
        rows, hidden = out.shape
        s = self.symmetric
        none = Norm(out, 0.0)  # an address that is not read
        by, first = norm or none, post or none
        many = rows > ROW_BARRIER_ROWS
        if many:
            self.barrier()
        most = row_warps(hidden)
        warps = most if many else max(1, most // (2 if rows <= 64 else 4))
        sum_add_norm_kernel[(rows,)](
            region.addresses, s.flags.addresses, s.counts, s.fault, residual, by.weight, first.weight, out, s.rank, rows,
            by.eps, first.eps, FAULT_NS, H=hidden, HP=power(hidden), WORLD=s.size, PROGRAMS=PROGRAMS, NORM=norm is not None,
            POST=post is not None, BARRIER=not many, DTYPE=TRITON_TYPE[self.dtype], num_warps=warps,
        )  # fmt: skip

    def barrier(self) -> None:
        """Makes the device wait until all ranks have reached this barrier."""
        s = self.symmetric
        barrier_kernel[(1,)](
            s.flags.addresses, s.counts, s.fault, s.rank, FAULT_NS, WORLD=s.size, PROGRAMS=PROGRAMS, num_warps=1
        )  # fmt: skip

    def cutter(self, num_q_heads: int) -> Cutter:
        """How a step's prompts are shared among this device's multiprocessors."""
        return Cutter(num_q_heads, self.processors)

    def prompt_scratch(self, head_dim: int) -> Scratch:
        """Room for the parts of prompt blocks; not the decode rows', which are computed at the same time."""
        options = {"dtype": torch.float32, "device": self.device}
        return Scratch(
            torch.empty(UNITS * ROWS * power(head_dim), **options),
            torch.empty(UNITS * ROWS * 2, **options),
            torch.zeros(2 * UNITS, dtype=torch.int32, device=self.device),
        )

    def scratch(self, most_rows: int, heads: int, head_dim: int) -> DecodeScratch:
        """Room for up to `most_rows` decode rows cut into parts."""
        heads = max(1, heads)
        parts = max(decode_parts(rows, heads) for rows in range(1, most_rows + 1))
        numbers = {"dtype": torch.float32, "device": self.device}
        counts = {"dtype": torch.int32, "device": self.device}
        return DecodeScratch(
            torch.empty(parts * heads * 16 * power(head_dim), **numbers),
            torch.empty(parts * heads * 32, **numbers),
            torch.zeros(most_rows * heads, **counts),
            torch.zeros((parts, 5), **counts),
            torch.zeros(1, **counts),
            most_rows,
            heads,
        )


def query_heads(spec: Attention | LatentAttention) -> int:
    """This rank's query heads."""
    return spec.heads.num_q_heads if isinstance(spec, Attention) else spec.num_heads


def scratch_heads(spec: Attention | LatentAttention) -> tuple[int, int]:
    """What has a program of its own for each part of a decode row, and the values of an output that it joins."""
    if isinstance(spec, Attention):
        return spec.heads.num_kv_heads, spec.head_dim
    return cdiv(spec.num_heads, latent.HEADS), spec.latent_dim


def check_attention(spec: Attention | LatentAttention) -> None:
    """Raises ModelError for attention that the kernels do not support."""
    if isinstance(spec, LatentAttention):
        if spec.rope_dim < 32 or spec.latent_dim > 512:
            raise ModelError(
                f"latent attention of {spec.latent_dim} latent and {spec.rope_dim} rotated values is not supported on CUDA; "
                "up to 512 and from 32 are"
            )
        return
    dim, heads = spec.head_dim, spec.heads
    if not 16 <= dim <= 256 or dim % 2:
        raise ModelError(f"head_dim {dim} is not supported on CUDA; even sizes from 16 to 256 are")
    if heads.num_kv_heads and heads.num_q_heads // heads.num_kv_heads > 16:
        raise ModelError(f"{heads.num_q_heads // heads.num_kv_heads} query heads share one key head; CUDA supports up to 16")
