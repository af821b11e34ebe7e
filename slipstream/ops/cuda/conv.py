# pyright: basic, reportMissingImports=false, reportInvalidTypeForm=false, reportAttributeAccessIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
"""The causal convolution in front of a recurrent state: a few columns of the past are kept by slot.

Token t of a row reads the tokens before it from the step while they are the row's, and from its slot's columns before these.
"""

from torch import Tensor

from slipstream.ops.cuda.launch import cdiv, jit, tl

BLOCK = 256  # channels of a program
TOKENS = 16  # of a program, where there are many
ROWS = 8  # programs that take a step's prompt rows in turns


@jit
def conv_kernel(
    x, slots, decodes, weight, bias, state, out, tokens, stride, state_stride,
    CHANNELS: tl.constexpr, KERNEL: tl.constexpr, BIAS: tl.constexpr, T: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """out[t] = silu(sum of weight[KERNEL - 1 - j] * the input j tokens before t). Decode rows move their columns on as well.

    x rows are `stride` apart; state [*, KERNEL - 1, CHANNELS], the oldest column first, whose slots are `state_stride` apart.
    """
    t, c = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1) * B + tl.arange(0, B)
    live, inside = t < tokens, (c < CHANNELS)[None, :]
    slot = tl.load(slots + t, mask=live, other=-1)
    keep = live[:, None] & inside
    at = state + tl.maximum(slot, 0).to(tl.int64)[:, None] * state_stride + c[None, :]
    x_at = x + t.to(tl.int64)[:, None] * stride + c[None, :]
    next = tl.load(x_at, mask=keep, other=0.0)  # of the input j: what takes the place of its column
    total = next.to(tl.float32) * tl.load(weight + (KERNEL - 1) * CHANNELS + c, mask=c < CHANNELS, other=0.0)[None, :]
    if BIAS:
        total += tl.load(bias + c, mask=c < CHANNELS, other=0.0)[None, :]
    moves = keep & (t < tl.load(decodes))[:, None]
    behind = tl.zeros([T], tl.int32)  # tokens of this row before t in the step, as far as they were looked for
    for j in tl.static_range(1, KERNEL):
        same = live & (t >= j) & (behind == j - 1)
        same = same & (tl.load(slots + t - j, mask=same, other=-1) == slot)
        behind += same.to(tl.int32)
        old = tl.load(x_at - j * stride, mask=keep & same[:, None], other=0.0)
        first = live & (j > behind)
        if tl.max(first.to(tl.int32), 0) > 0:  # most programs have no row's first tokens
            old += tl.load(
                at + ((KERNEL - 1 - j + behind) * CHANNELS)[:, None], mask=keep & first[:, None], other=0.0
            )  # to zeros
            tl.store(at + (KERNEL - 1 - j) * CHANNELS, next, mask=moves)
        next = old
        total += next.to(tl.float32) * tl.load(weight + (KERNEL - 1 - j) * CHANNELS + c, mask=c < CHANNELS, other=0.0)[None, :]
    into = out + t.to(tl.int64)[:, None] * CHANNELS + c[None, :]
    tl.store(into, (total / (1.0 + tl.exp(-total))).to(out.dtype.element_ty), mask=keep)


@jit
def conv_save_kernel(
    x, rows, count, state, stride, state_stride, CHANNELS: tl.constexpr, KERNEL: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    """The columns of prompt rows after their tokens, in turns; rows int32 [*, 4]: slot, first token, tokens, first chunk."""
    c = tl.program_id(1) * B + tl.arange(0, B)
    inside = c < CHANNELS
    for turn in range(tl.cdiv(tl.load(count) - tl.program_id(0), tl.num_programs(0))):
        row = tl.program_id(0) + turn * tl.num_programs(0)
        slot, first, tokens = tl.load(rows + row * 4), tl.load(rows + row * 4 + 1), tl.load(rows + row * 4 + 2)
        at = state + slot.to(tl.int64) * state_stride + c
        for i in tl.static_range(KERNEL - 1):  # an old column is read before the store that takes its place: i grows
            token = tokens - (KERNEL - 1) + i
            here = tl.load(x + (first + token).to(tl.int64) * stride + c, mask=inside & (token >= 0), other=0.0)
            kept = tl.load(at + (KERNEL - 1 + token) * CHANNELS, mask=inside & (token < 0), other=0.0)
            tl.store(at + i * CHANNELS, here + kept, mask=inside)


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, step) -> Tensor:
    """x [T, at least channels] to silu of the convolution [T, channels]; moves the slots' columns past the step's tokens."""
    kernel, channels = weight.shape
    rows = x.shape[0]
    out = x.new_empty((rows, channels))
    blocks, t = cdiv(channels, BLOCK), TOKENS if rows > 256 else 1
    conv_kernel[(cdiv(rows, t), blocks)](
        x, step.slots, step.decodes, weight, weight if bias is None else bias, state, out, rows, x.stride(0), state.stride(0),
        CHANNELS=channels, KERNEL=kernel, BIAS=bias is not None, T=t, B=BLOCK, num_warps=4 if t > 1 else 2,
    )  # fmt: skip
    if step.prompts:
        conv_save_kernel[(min(ROWS, step.rows.shape[0]), blocks)](
            x, step.rows, step.row_counts, state, x.stride(0), state.stride(0), CHANNELS=channels, KERNEL=kernel, B=BLOCK,
            num_warps=2,
        )  # fmt: skip
    return out
