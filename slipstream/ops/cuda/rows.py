# pyright: basic, reportMissingImports=false, reportInvalidTypeForm=false, reportAttributeAccessIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false, reportOperatorIssue=false
"""Row-wise kernels in Triton: norms, rotation with the cache write, SwiGLU, embedding rows. Statistics and sums are float32."""

from slipstream.ops.cuda.launch import jit, tl
from slipstream.ops.layers import SWIGLU_ALPHA as _ALPHA
from slipstream.ops.layers import SWIGLU_LIMIT as _LIMIT

SWIGLU_ALPHA, SWIGLU_LIMIT = tl.constexpr(_ALPHA), tl.constexpr(_LIMIT)


@jit
def norm_row(x, weight, eps, H: tl.constexpr, DTYPE: tl.constexpr):
    """RMSNorm of one row in float32 (zeros beyond H), rounded to DTYPE before the weight, as the checkpoints' code does."""
    scale = tl.rsqrt(tl.sum(x * x, 0) / H + eps)
    return ((x * scale).to(DTYPE).to(tl.float32) * weight).to(DTYPE)


@jit
def norm_kernel(x, weight, out, eps, H: tl.constexpr, HP: tl.constexpr):
    """out[row] = RMSNorm(x[row])."""
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HP)
    inside = h < H
    a = tl.load(x + row * H + h, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + h, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * H + h, norm_row(a, w, eps, H, out.dtype.element_ty), mask=inside)


@jit
def add_norm_kernel(x, residual, weight, out, eps, H: tl.constexpr, HP: tl.constexpr):
    """residual[row] += x[row]; out[row] = RMSNorm(residual[row])."""
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HP)
    inside = h < H
    a = tl.load(x + row * H + h, mask=inside, other=0.0).to(tl.float32)
    r = tl.load(residual + row * H + h, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + h, mask=inside, other=0.0).to(tl.float32)
    a = (a + r).to(residual.dtype.element_ty)
    tl.store(residual + row * H + h, a, mask=inside)
    tl.store(out + row * H + h, norm_row(a.to(tl.float32), w, eps, H, out.dtype.element_ty), mask=inside)


@jit
def act(x, KIND: tl.constexpr):
    """An activation of `ops.layers` on float32."""
    if KIND == "silu":
        return x / (1.0 + tl.exp(-x))
    if KIND == "relu":
        return tl.maximum(x, 0.0)
    if KIND == "relu2":
        return tl.maximum(x, 0.0) * tl.maximum(x, 0.0)
    if KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp(-2.0 * inner))  # gelu_tanh: 0.5 (1 + tanh y) = sigmoid(2 y)


@jit
def gate_product(gate, up, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """A gate of `ops.layers` times what it multiplies, float32, rounding the gate to DTYPE as the plain code does."""
    if KIND == "swigluoai":
        gate = tl.minimum(gate, SWIGLU_LIMIT)
        up = tl.minimum(tl.maximum(up, -SWIGLU_LIMIT), SWIGLU_LIMIT)
        return gate / (1.0 + tl.exp(-SWIGLU_ALPHA * gate)) * (up + 1.0)
    return act(gate, KIND).to(DTYPE).to(tl.float32) * up


@jit
def gated_kernel(x, out, WIDTH: tl.constexpr, KIND: tl.constexpr, B: tl.constexpr):
    """x [T, 2 WIDTH] holds gates, then what they multiply."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * B + tl.arange(0, B)
    inside = c < WIDTH
    gate = tl.load(x + row * 2 * WIDTH + c, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * WIDTH + WIDTH + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + c, gate_product(gate, up, KIND, out.dtype.element_ty).to(out.dtype.element_ty), mask=inside)


@jit
def activated_kernel(x, WIDTH: tl.constexpr, KIND: tl.constexpr, B: tl.constexpr):
    """x [T, WIDTH] = act(x)."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * B + tl.arange(0, B)
    a = tl.load(x + row * WIDTH + c, mask=c < WIDTH, other=0.0).to(tl.float32)
    tl.store(x + row * WIDTH + c, act(a, KIND).to(x.dtype.element_ty), mask=c < WIDTH)


@jit(do_not_specialize=["stride"])
def gate_kernel(x, gate, stride, WIDTH: tl.constexpr, B: tl.constexpr):
    """x [T, WIDTH] *= sigmoid(gate), whose rows are `stride` apart."""
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * B + tl.arange(0, B)
    inside = c < WIDTH
    a = tl.load(x + row * WIDTH + c, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * stride + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(x + row * WIDTH + c, (a / (1.0 + tl.exp(-g))).to(x.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["first", "rows"])
def embed_kernel(table, ids, out, first, rows, H: tl.constexpr, B: tl.constexpr):
    """out[t] = table[ids[t] - first], or zeros where another rank holds the id."""
    t, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    at = tl.load(ids + t) - first
    mine = (at >= 0) & (at < rows)
    value = tl.load(table + tl.where(mine, at, 0).to(tl.int64) * H + c, mask=mine & (c < H), other=0.0)
    tl.store(out + t * H + c, value, mask=c < H)


@jit
def rotary_write_kernel(
    qkv, q_norm, k_norm, rotary, keys, values, tables, slots, positions, stride, table_stride, eps,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, PAGE_SIZE: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """One (token, key head): norms and rotates its query heads in place, and its key, which goes with its value into the cache.

    qkv rows are HEADS * GROUP query heads, HEADS key heads, HEADS value heads of D; HALF is D / 2 and GP is GROUP + 2, rounded
    up to powers of two. Lane g < GROUP is a query, lane GROUP the key, lane GROUP + 1 the value.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    g = tl.arange(0, GP)
    d = tl.arange(0, HALF)
    inside = (d < D // 2)[None, :]
    is_query = (g < GROUP)[:, None]
    column = tl.where(g < GROUP, head * GROUP + g, HEADS * GROUP + (g - GROUP) * HEADS + head)
    at = qkv + token * stride + column[:, None] * D + d[None, :]
    live = (g < GROUP + 2)[:, None] & inside
    low = tl.load(at, mask=live, other=0.0)
    high = tl.load(at + D // 2, mask=live, other=0.0)
    a, b = low.to(tl.float32), high.to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + eps)[:, None]
        pick = q_norm + (g[:, None] * 0) + d[None, :]
        other = k_norm + (g[:, None] * 0) + d[None, :]
        w_low = tl.load(tl.where(is_query, pick, other), mask=live, other=0.0).to(tl.float32)
        w_high = tl.load(tl.where(is_query, pick, other) + D // 2, mask=live, other=0.0).to(tl.float32)
        a = ((a * scale).to(low.dtype).to(tl.float32) * w_low).to(low.dtype).to(tl.float32)
        b = ((b * scale).to(low.dtype).to(tl.float32) * w_high).to(low.dtype).to(tl.float32)
    position = tl.load(positions + token)
    turn = rotary + position.to(tl.int64) * D + d
    cos = tl.load(turn, mask=d < D // 2, other=0.0)[None, :]
    sin = tl.load(turn + D // 2, mask=d < D // 2, other=0.0)[None, :]
    new_low = (a * cos - b * sin).to(low.dtype)
    new_high = (b * cos + a * sin).to(low.dtype)
    tl.store(at, new_low, mask=is_query & live)
    tl.store(at + D // 2, new_high, mask=is_query & live)
    slot = tl.load(slots + token).to(tl.int64)
    page = tl.load(tables + slot * table_stride + position // PAGE_SIZE).to(tl.int64)
    into = ((page * HEADS + head) * PAGE_SIZE + position % PAGE_SIZE) * D + d[None, :] + (g[:, None] * 0)
    is_key = (g == GROUP)[:, None] & inside
    is_value = (g == GROUP + 1)[:, None] & inside
    tl.store(keys + into, new_low, mask=is_key)
    tl.store(keys + into + D // 2, new_high, mask=is_key)
    tl.store(values + into, low, mask=is_value)
    tl.store(values + into + D // 2, high, mask=is_value)
