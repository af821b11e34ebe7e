"""The parameters of layers that operations compute: plain values, made by a model, read by every device's kernels.

Sizes are this rank's unless said otherwise. Weights named here are prepared by `Ops`.
"""

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from slipstream.shard import Heads

# silu(g) * u; gelu(g) * u in the tanh form; gpt-oss's g * sigmoid(ALPHA g) * (u + 1), with g and u limited to LIMIT
Gate = Literal["silu", "gelu_tanh", "swigluoai"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]  # of an MLP without a gate; relu2 is the square of relu

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0


@dataclass(frozen=True, eq=False)
class Attention:
    """One layer's attention over keys and values.

    `q_norm`, `k_norm` are prepared RMSNorm weights [head_dim] applied to each head before rotation (Qwen3), or None.
    `rotary` [max_len, width] float32: cosines of a position in the first half, sines in the second; rotation pairs
    element i with i + width / 2 (the "rotate half" form of the Hugging Face checkpoints). Elements from `width` on are not
    turned. None: queries and keys are used as they come.
    """

    cache: int  # index into the model's `caches`, and so into the step's
    table: int  # the page table of that cache: index into `log.caches.windows` of the model's `caches`
    heads: Heads
    head_dim: int
    scale: float
    rotary: Tensor | None
    q_norm: Any = None
    k_norm: Any = None
    sinks: Tensor | None = (
        None  # float32 [query heads]: a logit of each head that takes its share of the softmax and adds nothing
    )
    softcap: float = 0.0  # scores become softcap * tanh(scores / softcap) before the softmax; 0: they do not


@dataclass(frozen=True, eq=False)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): all heads read one vector a token.

    The cache keeps [latent_dim normed values | rope_dim rotated values] of each token. A head's keys are key_up @ latent beside
    the rotated values; its values are value_up @ latent.
    """

    cache: int
    table: int
    num_heads: int
    latent_dim: int
    nope_dim: int  # of a query: values that are not rotated, before the rope_dim values that are
    rope_dim: int
    value_dim: int
    scale: float
    rotary: Tensor  # as in `Attention`, of width rope_dim
    norm: Any  # of the latent values
    key_up: Tensor  # [num_heads, nope_dim, latent_dim]
    value_up: Tensor  # [num_heads, value_dim, latent_dim]


@dataclass(frozen=True, eq=False)
class GatedDelta:
    """A gated delta net (arXiv:2412.06464) as Qwen3-Next and Qwen3.5 have it: a causal convolution, then a recurrent state.

    Its cache is PerSlot: convolution columns [kernel - 1, channels] of the activations' dtype, the oldest first, and the state
    float32 [value heads, key_dim, value_dim]. Channels are queries, keys and values, in this order. The input has these, then
    the output's gate [value heads * value_dim], then b and a [value heads] each.
    For each token: beta = sigmoid(b), decay = exp(-rate * softplus(a + dt_bias)), and with queries and keys of length 1,
    state = decay * state + k (beta * (v - k^T (decay * state)))^T, out = q^T state / sqrt(key_dim).
    """

    cache: int
    heads: Heads  # num_q_heads: value heads, num_kv_heads: key heads
    key_dim: int
    value_dim: int
    conv: Tensor  # float32 [kernel, channels]
    rate: Tensor  # float32 [value heads]: exp(A_log)
    dt_bias: Tensor  # float32 [value heads]
    norm: Any  # RMSNorm [value_dim] of each head's output, before silu(gate) multiplies it

    @property
    def channels(self) -> int:
        return 2 * self.heads.num_kv_heads * self.key_dim + self.heads.num_q_heads * self.value_dim


@dataclass(frozen=True, eq=False)
class Mamba2:
    """A Mamba-2 mixer (arXiv:2405.21060): a causal convolution, then a state that each token decays and adds to.

    Its cache is PerSlot: convolution columns [kernel - 1, channels] of the activations' dtype, the oldest first, and the state
    float32 [heads, head_dim, state_dim]. Channels are x [heads * head_dim], B and C [groups * state_dim] each. The input has
    the output's gate [heads * head_dim], then the channels, then dt [heads].
    For each token: dt = clamp(softplus(dt + dt_bias), dt_limits), state = exp(-rate * dt) * state + dt * x B^T,
    out = state C + skip * x.
    """

    cache: int
    num_heads: int
    head_dim: int
    groups: int  # heads of a group share B and C
    state_dim: int
    conv: Tensor  # float32 [kernel, channels]
    conv_bias: Tensor | None  # float32 [channels]
    rate: Tensor  # float32 [heads]: exp(A_log)
    dt_bias: Tensor  # float32 [heads]
    skip: Tensor  # float32 [heads]
    dt_limits: tuple[float, float]
    norm: Any  # RMSNorm [heads * head_dim] by group, or None: the gate alone multiplies the output
    norm_before_gate: bool = False

    @property
    def channels(self) -> int:
        return self.num_heads * self.head_dim + 2 * self.groups * self.state_dim


@dataclass(frozen=True, eq=False)
class Routing:
    """How a token chooses its experts and weighs them. The same on every rank.

    Scores come from float32 router logits. `softmax` and `sigmoid` score every expert, then the best are chosen;
    `softmax_of_chosen` chooses by logit and then takes the softmax of the chosen ones.
    """

    router: Tensor  # [experts, hidden]
    top_k: int
    score: Literal["softmax", "sigmoid", "softmax_of_chosen"]
    bias: Tensor | None = None  # float32 [experts], added to the logits
    choice_bias: Tensor | None = None  # float32 [experts], added to the scores for the choice alone (DeepSeek-V3)
    normed: bool = False  # the weights of the chosen are divided by their sum
    scale: float = 1.0  # of the weights at last
    groups: int = 1  # experts stand in groups of equal size, of which the `top_groups` best, by the sum of their `group_best`
    top_groups: int = 1  # best scores, can be chosen from
    group_best: int = 2  # how many of a group's best scores its own is the sum of: 1 in DeepSeek-V2


@dataclass(frozen=True, eq=False)
class Experts:
    """A mixture of gated MLPs. Every rank holds a part of the inner columns of each expert."""

    routing: Routing
    gate_up: Any  # prepared by `Ops.expert_weight`: [experts, 2 * inner, hidden], gate then up
    down: Any  # [experts, hidden, inner]
    gate: Gate | Activation  # an `Activation` where experts have no gate: gate_up is [experts, inner, hidden]
    shared: tuple[Any, Any] | None = None  # gate_up and down of an expert that every token takes, prepared by `Ops.weight`
    shared_gate: Any = None  # prepared [1, hidden]: its sigmoid multiplies the shared expert's output; None: nothing does
