# pyright: basic, reportMissingImports=false, reportInvalidTypeForm=false, reportAttributeAccessIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
"""Kernels around a forward: page-table writes, the step's ids and positions from the slot tables, the rows that sample."""

from slipstream.ops.cuda.launch import jit, tl


@jit(do_not_specialize=["count"])
def pages_kernel(places, tables, count, table_stride, stride, B: tl.constexpr):
    """tables[table, slot, column] = page for each of `count` places int32 (table, slot, column, page)."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    live = i < count
    table = tl.load(places + 4 * i, mask=live, other=0).to(tl.int64)
    slot = tl.load(places + 4 * i + 1, mask=live, other=0).to(tl.int64)
    column = tl.load(places + 4 * i + 2, mask=live, other=0)
    page = tl.load(places + 4 * i + 3, mask=live, other=0)
    tl.store(tables + table * table_stride + slot * stride + column, page, mask=live)


@jit(do_not_specialize=["rows", "nobody"])
def decode_prepare_kernel(
    row_slots, next, limits, tokens, slots, ids, positions, sample_token, sample_slot, sample_position, rows, stride, nobody,
    WIDTH: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """A decode step from the tables alone: row r computes WIDTH positions from next[row_slots[r]] on and judges each of them.

    They read the latest token and WIDTH - 1 drafts from tokens. A position whose judged token would lie at the request's limit
    or beyond it gets the slot `nobody`. slots [rows * WIDTH] are written where WIDTH > 1; else they are row_slots itself.
    """
    i = tl.program_id(0) * B + tl.arange(0, B)
    live = i < rows * WIDTH
    slot = tl.load(row_slots + i // WIDTH, mask=live, other=0)
    position = tl.load(next + slot, mask=live, other=0) + i % WIDTH
    if WIDTH > 1:
        past = position + 1 >= tl.load(limits + slot, mask=live, other=0)
        slot = tl.where(past, nobody, slot)
        position = tl.where(past, 0, position)
        tl.store(slots + i, slot, mask=live)
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
