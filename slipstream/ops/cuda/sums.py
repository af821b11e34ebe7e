# pyright: basic, reportMissingImports=false, reportInvalidTypeForm=false, reportAttributeAccessIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
"""Sums over the ranks' symmetric memory, joined with what follows them, and the barrier of ranks that they need.

Each program of a kernel waits for the program of the same index on every other rank: it writes its count of barriers into
their flags and waits until theirs have reached it. What the kernels before wrote is then visible, since a rank's kernels run
one by one. The data buffers alternate, so that no second barrier is needed after reading: a rank that has passed barrier n
knows that all have left n - 1. A wait is bounded; past its bound it writes the fault word and every later wait passes at
once, so peers of a dead rank end.
"""

from slipstream.ops.cuda.launch import jit, tl
from slipstream.ops.cuda.rows import norm_row


@jit
def _now():
    """Nanoseconds of the device's global timer."""
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@jit
def _write_flag(address, value, ORDER: tl.constexpr):
    """Writes a flag by one thread. ORDER: "relaxed", or "release": its reader then sees all that this program wrote before."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred p; .reg .u32 t;
        mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;
        @p st.""" + ORDER + """.sys.global.u32 [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r", [address, value], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@jit
def _read_flag(address):
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.u32 $0, [$1];", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
    )


@jit
def barrier(
    flags, counts, fault, rank, bound, index, WORLD: tl.constexpr, PROGRAMS: tl.constexpr, RELEASE: tl.constexpr
):  # fmt: skip
    """Waits for the program `index` of all ranks. flags int64 [WORLD]: addresses of the ranks' flags int32 [WORLD, PROGRAMS].

    counts int32 [PROGRAMS] are this rank's barriers so far; `bound` nanoseconds are waited at most, none once `fault` is set.
    What earlier kernels wrote is complete when this one runs; RELEASE is for what this program itself has written.
    """
    count = tl.load(counts + index) + 1
    own = tl.load(flags + rank)
    broken = tl.load(fault, volatile=True)
    tl.debug_barrier()
    for r in tl.static_range(WORLD):
        if r != rank:
            theirs = tl.load(flags + r) + (rank * PROGRAMS + index) * 4
            _write_flag(theirs, count, "release" if RELEASE else "relaxed")
    tl.store(counts + index, count)
    start = _now()
    for r in tl.static_range(WORLD):
        if r != rank:
            here = own + (r * PROGRAMS + index) * 4
            seen = _read_flag(here)
            while (seen - count < 0) & (broken == 0):
                seen = _read_flag(here)
                if _now() - start > bound:
                    broken = 1
                    tl.store(fault, 1)
    tl.debug_barrier()


@jit(do_not_specialize=["rank", "rows"])
def sum_add_norm_kernel(
    buffers, flags, counts, fault, residual, weight, post, out, rank, rows, eps, post_eps, bound,
    H: tl.constexpr, HP: tl.constexpr, WORLD: tl.constexpr, PROGRAMS: tl.constexpr, NORM: tl.constexpr, POST: tl.constexpr,
    BARRIER: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """One row of H: its sum over the ranks' buffers (addresses int64 [WORLD]), added in rank order on every rank.

    With NORM, residual += sum, or with POST the RMSNorm of the sum by `post`, and out = RMSNorm(residual); else out = sum.
    BARRIER: each program waits for its peers; without it a barrier has run before (one barrier a program costs more than the
    start of one kernel where programs are many).
    """
    row = tl.program_id(0)
    h = tl.arange(0, HP)
    inside = h < H
    at = row.to(tl.int64) * H + h
    if NORM:
        w = tl.load(weight + h, mask=inside, other=0.0).to(tl.float32)
        old = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    if BARRIER:
        barrier(flags, counts, fault, rank, bound, row, WORLD, PROGRAMS, False)
    acc = tl.zeros([HP], tl.float32)
    for r in tl.static_range(WORLD):
        part = tl.load(buffers + r).to(tl.pointer_type(DTYPE))
        acc += tl.load(part + at, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        new = acc.to(DTYPE).to(tl.float32)
        if POST:
            p = tl.load(post + h, mask=inside, other=0.0).to(tl.float32)
            new = norm_row(new, p, post_eps, H, DTYPE).to(tl.float32)
        new = (new + old).to(DTYPE)
        tl.store(residual + at, new, mask=inside)
        tl.store(out + at, norm_row(new.to(tl.float32), w, eps, H, DTYPE), mask=inside)
    else:
        tl.store(out + at, acc.to(DTYPE), mask=inside)


@jit(do_not_specialize=["rank"])
def barrier_kernel(flags, counts, fault, rank, bound, WORLD: tl.constexpr, PROGRAMS: tl.constexpr):
    """A barrier and nothing else."""
    barrier(flags, counts, fault, rank, bound, tl.program_id(0), WORLD, PROGRAMS, True)
