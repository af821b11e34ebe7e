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
def add_norm_kernel(
    x, residual, weight, post, out, eps, post_eps, H: tl.constexpr, HP: tl.constexpr, POST: tl.constexpr
):  # fmt: skip
    """residual[row] += x[row], or with POST the RMSNorm of x[row] by `post`; out[row] = RMSNorm(residual[row])."""
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, HP)
    inside = h < H
    a = tl.load(x + row * H + h, mask=inside, other=0.0).to(tl.float32)
    r = tl.load(residual + row * H + h, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + h, mask=inside, other=0.0).to(tl.float32)
    if POST:
        p = tl.load(post + h, mask=inside, other=0.0).to(tl.float32)
        a = norm_row(a, p, post_eps, H, out.dtype.element_ty).to(tl.float32)
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
def softcap_kernel(x, cap, WIDTH: tl.constexpr, B: tl.constexpr):
    """x float32 [T, WIDTH] = cap * tanh(x / cap)."""
    c = tl.program_id(1) * B + tl.arange(0, B)
    at = x + tl.program_id(0).to(tl.int64) * WIDTH + c
    y = tl.load(at, mask=c < WIDTH, other=0.0) * (2.0 / cap)
    tl.store(at, cap * (1.0 - 2.0 / (1.0 + tl.exp(y))), mask=c < WIDTH)


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
def embed_kernel(table, ids, out, first, rows, scale, H: tl.constexpr, B: tl.constexpr):
    """out[t] = scale * table[ids[t] - first], or zeros where another rank holds the id."""
    t, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    at = tl.load(ids + t) - first
    mine = (at >= 0) & (at < rows)
    value = tl.load(table + tl.where(mine, at, 0).to(tl.int64) * H + c, mask=mine & (c < H), other=0.0)
    tl.store(out + t * H + c, (value.to(tl.float32) * scale).to(out.dtype.element_ty), mask=c < H)


@jit
def rotary_write_kernel(
    qkv, q_norm, k_norm, rotary, keys, values, tables, slots, positions, stride, table_stride, eps,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, TURNED: tl.constexpr, HALF: tl.constexpr,
    REST: tl.constexpr, PAGE_SIZE: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """One (token, key head): norms and rotates its query heads in place, and its key, which goes with its value into the cache.

    qkv rows are HEADS * GROUP query heads, HEADS key heads, HEADS value heads of D, of which the first TURNED elements are
    rotated; HALF is TURNED / 2, REST the other elements (0 for none) and GP is GROUP + 2, rounded up to powers of two.
    Lane g < GROUP is a query, lane GROUP the key, lane GROUP + 1 the value.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    g = tl.arange(0, GP)
    live = (g < GROUP + 2)[:, None]
    is_query = (g < GROUP)[:, None]
    is_key, is_value = (g == GROUP)[:, None], (g == GROUP + 1)[:, None]
    column = tl.where(g < GROUP, head * GROUP + g, HEADS * GROUP + (g - GROUP) * HEADS + head)
    own = qkv + token * stride + column[:, None] * D
    position = tl.load(positions + token)
    slot = tl.load(slots + token).to(tl.int64)
    page = tl.load(tables + slot * table_stride + position // PAGE_SIZE).to(tl.int64)
    into = ((page * HEADS + head) * PAGE_SIZE + position % PAGE_SIZE) * D + (g[:, None] * 0)
    length = tl.zeros([GP], tl.float32)
    if HALF:
        d = tl.arange(0, HALF)[None, :]
        pair = live & (d < TURNED // 2)
        low = tl.load(own + d, mask=pair, other=0.0)
        high = tl.load(own + d + TURNED // 2, mask=pair, other=0.0)
        a, b = low.to(tl.float32), high.to(tl.float32)
        length += tl.sum(a * a, 1) + tl.sum(b * b, 1)
    if REST:
        r = TURNED + tl.arange(0, REST)[None, :]
        other = live & (r < D)
        kept = tl.load(own + r, mask=other, other=0.0)
        length += tl.sum(kept.to(tl.float32) * kept.to(tl.float32), 1)
    scale = tl.rsqrt(length / D + eps)[:, None]
    norm = tl.where(is_query, q_norm + (g[:, None] * 0), k_norm + (g[:, None] * 0))
    if HALF:
        if NORM:
            a = _scaled(a, scale, norm + d, pair, low.dtype)
            b = _scaled(b, scale, norm + d + TURNED // 2, pair, low.dtype)
        turn = rotary + position.to(tl.int64) * TURNED + d
        cos = tl.load(turn, mask=d < TURNED // 2, other=0.0)
        sin = tl.load(turn + TURNED // 2, mask=d < TURNED // 2, other=0.0)
        new_low = (a * cos - b * sin).to(low.dtype)
        new_high = (b * cos + a * sin).to(low.dtype)
        tl.store(own + d, new_low, mask=is_query & pair)
        tl.store(own + d + TURNED // 2, new_high, mask=is_query & pair)
        tl.store(keys + into + d, new_low, mask=is_key & pair)
        tl.store(keys + into + d + TURNED // 2, new_high, mask=is_key & pair)
        tl.store(values + into + d, low, mask=is_value & pair)
        tl.store(values + into + d + TURNED // 2, high, mask=is_value & pair)
    if REST:
        new = kept
        if NORM:
            new = _scaled(kept.to(tl.float32), scale, norm + r, other, kept.dtype).to(kept.dtype)
            tl.store(own + r, new, mask=is_query & other)
        tl.store(keys + into + r, new, mask=is_key & other)
        tl.store(values + into + r, kept, mask=is_value & other)


@jit
def _scaled(x, scale, weight, mask, DTYPE: tl.constexpr):
    """x times scale, rounded to DTYPE, times weight, rounded again, in float32."""
    w = tl.load(weight, mask=mask, other=0.0).to(tl.float32)
    return ((x * scale).to(DTYPE).to(tl.float32) * w).to(DTYPE).to(tl.float32)
