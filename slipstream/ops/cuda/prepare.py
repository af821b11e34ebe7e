# pyright: basic, reportMissingImports=false, reportInvalidTypeForm=false, reportAttributeAccessIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
"""Kernels around a forward: block-table writes, the step's ids and positions from the slot tables, the rows that sample."""

from slipstream.ops.cuda.launch import jit, tl


@jit(do_not_specialize=["count"])
def pages_kernel(triples, tables, count, stride, B: tl.constexpr):
    """tables[slot, column] = page for each of `count` triples int32 (slot, column, page)."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    live = i < count
    slot = tl.load(triples + 3 * i, mask=live, other=0).to(tl.int64)
    column = tl.load(triples + 3 * i + 1, mask=live, other=0)
    tl.store(tables + slot * stride + column, tl.load(triples + 3 * i + 2, mask=live, other=0), mask=live)


@jit(do_not_specialize=["rows"])
def decode_prepare_kernel(
    slots, next, tokens, ids, positions, sample_token, sample_slot, sample_position, rows, stride, B: tl.constexpr
):  # fmt: skip
    """A decode step from the tables alone: row i computes position next[slots[i]], whose token the tables hold, and samples."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    live = i < rows
    slot = tl.load(slots + i, mask=live, other=0)
    position = tl.load(next + slot, mask=live, other=0)
    tl.store(ids + i, tl.load(tokens + slot.to(tl.int64) * stride + position, mask=live, other=0), mask=live)
    tl.store(positions + i, position, mask=live)
    tl.store(sample_token + i, i, mask=live)
    tl.store(sample_slot + i, slot, mask=live)
    tl.store(sample_position + i, position + 1, mask=live)


@jit(do_not_specialize=["count"])
def ids_kernel(slots, positions, tokens, ids, count, stride, B: tl.constexpr):
    """ids[t] = tokens[slots[t], positions[t]] for a step whose slots and positions were uploaded."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    live = i < count
    slot = tl.load(slots + i, mask=live, other=0).to(tl.int64)
    position = tl.load(positions + i, mask=live, other=0)
    tl.store(ids + i, tl.load(tokens + slot * stride + position, mask=live, other=0), mask=live)


@jit
def gather_kernel(hidden, index, out, H: tl.constexpr, B: tl.constexpr):
    """out[i] = hidden[index[i]]."""
    i, h = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    row = tl.load(index + i).to(tl.int64)
    tl.store(out + i * H + h, tl.load(hidden + row * H + h, mask=h < H), mask=h < H)
