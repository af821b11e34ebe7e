"""Llama and models of the same shape: SmolLM2, TinyLlama; the base of other dense decoders.

A model is a list of sublayers with prepared weights and one `forward` over an `Ops` namespace; it holds no per-request state.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.log.caches import CacheLayout, Paged, Window, window_of, windows
from slipstream.models.rotary import rotary_table
from slipstream.ops.interface import ForwardStep, Ops, Step
from slipstream.ops.layers import Attention, Gate, LatentAttention
from slipstream.weights.packed import Packed, dense
from slipstream.weights.parts import Part


@dataclass(frozen=True)
class DenseConfig:
    """The numbers of a dense decoder, from a Hugging Face config.json."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    max_len: int
    tied: bool
    attention_bias: bool  # on q, k, v (and o where `output_bias`)
    output_bias: bool
    mlp_bias: bool
    gate: Gate
    windows: tuple[int, ...] = ()  # of each layer, in tokens; 0, or none here: the layer reads all tokens
    embedding_scale: float = 1.0
    attention_scale: float = 0.0  # 0: 1 / sqrt(head_dim)
    attention_softcap: float = 0.0
    logits_softcap: float = 0.0

    @classmethod
    def read(cls, config: dict) -> "DenseConfig":
        """Raises ModelError for an activation that is not known, and for heads that cannot be shared evenly."""
        num_q_heads = config["num_attention_heads"]
        num_kv_heads = config.get("num_key_value_heads") or num_q_heads
        if num_q_heads % num_kv_heads:
            raise ModelError(f"num_attention_heads {num_q_heads} is not a multiple of num_key_value_heads {num_kv_heads}")
        return cls(
            vocab=config["vocab_size"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // num_q_heads,
            eps=config.get("rms_norm_eps", 1e-6),
            max_len=config["max_position_embeddings"],
            tied=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            output_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            gate=read_gate(config),
        )


_GATES: dict[str, Gate] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def read_gate(config: dict) -> Gate:
    """The activation of a gated MLP: `hidden_act`, or `hidden_activation` where there is one (Gemma)."""
    older, name = config.get("hidden_act"), config.get("hidden_activation")
    key, name = ("hidden_activation", name) if name else ("hidden_act", older or "silu")
    if name not in _GATES:
        raise ModelError(f"{key} {name!r} is not supported; known: {', '.join(_GATES)}")
    return _GATES[name]


Mixer = Callable[[Tensor, ForwardStep], Tensor]  # normed rows [T, hidden] to this rank's part of the sum of the same shape


@dataclass(frozen=True, eq=False, slots=True)
class SelfAttention:
    """Queries, keys and values as one product, attention, and the output's product.

    With `gated`, the first product has the output's gates as well, behind the values (Qwen3.5).
    """

    ops: Ops
    qkv: Any
    spec: Attention
    out: Any
    gated: bool = False

    def __call__(self, x: Tensor, step: ForwardStep) -> Tensor:
        ops = self.ops
        qkv = ops.linear(x, self.qkv, step)
        found = ops.attention(qkv, self.spec, step)
        if self.gated:
            found = ops.gate(found, qkv[:, qkv.shape[1] - found.shape[1] :], step)
        return ops.partial(found, self.out, step)


@dataclass(frozen=True, eq=False, slots=True)
class GatedMLP:
    """down(gate(x) * up(x))."""

    ops: Ops
    gate_up: Any
    down: Any
    gate: Gate = "silu"

    def __call__(self, x: Tensor, step: ForwardStep) -> Tensor:
        return self.ops.partial(self.ops.gated(x, self.gate_up, self.gate, step), self.down, step)


@dataclass(frozen=True, eq=False, slots=True)
class Sublayer:
    """residual += post_norm(mix(norm(residual))), summed over the ranks before `post_norm`, which most families do not have.

    A layer of most families is two of these: one that mixes tokens, and a feed-forward network.
    """

    norm: Any
    mix: Mixer
    post_norm: Any = None


class Llama:
    """A dense decoder on one rank (a `models.decoder.Decoder`), and the base of families that differ in parts of it.

    `vocab_part` is this rank's [start, stop) of the logits; `vocab` their full count.
    """

    prefix = "model."  # of the names of all weights but the output layer's
    last_norm = "norm.weight"
    embedding_name = "embed_tokens.weight"
    unused_weights: tuple[
        str, ...
    ] = ()  # beginnings of names, behind "model.", of stored tensors that this decoder does not need

    def __init__(self, config: dict, checkpoint: Any, ops: Ops, max_len: int | None = None):
        """Reads this rank's part of the weights. `max_len` bounds the rotary table (default: the config's own length)."""
        self.ops = ops
        self.config = c = self.read_config(config)
        self.checkpoint = checkpoint
        self.heads = ops.shard.heads(c.num_q_heads, c.num_kv_heads)
        self.vocab, self.hidden = c.vocab, c.hidden
        self.vocab_part = ops.shard.even(c.vocab)
        self.max_len = min(max_len or c.max_len, c.max_len)
        self.caches = self.cache_layouts()
        self.rotary = self.rotary_tables(config)
        self.sublayers = [s for i in range(c.layers) for s in self.layer(i, f"{self.prefix}layers.{i}.")]
        specs = [getattr(s.mix, "spec", None) for s in self.sublayers]
        self.attentions = tuple(spec for spec in specs if isinstance(spec, Attention | LatentAttention))
        self.norm = self.norm_weight(self.prefix + self.last_norm, c.hidden)
        self._next_norms = [*(s.norm for s in self.sublayers[1:]), self.norm]  # the norm after each sublayer
        shape = (c.vocab, c.hidden)
        self.embedding = ops.tensor(self._read(self.prefix + self.embedding_name, shape, self.vocab_part))
        self.head = ops.weight([self._tied_head(shape) if c.tied else self.linear("lm_head", shape, rows=self.vocab_part)])
        del self.checkpoint

    def read_config(self, config: dict) -> DenseConfig:
        return DenseConfig.read(config)

    def cache_layouts(self) -> tuple[CacheLayout, ...]:
        """The cache layout of each layer. A window that holds the longest request limits nothing."""
        heads, dim, sizes = self.heads.num_kv_heads, self.config.head_dim, self.config.windows or (0,) * self.config.layers
        return tuple(Window(heads, dim, n) if 0 < n < self.max_len else Paged(heads, dim) for n in sizes)

    def rotary_tables(self, config: dict) -> tuple[Tensor | None, ...]:
        """The rotary table of each layer (`Attention.rotary`); layers with the same positions share one."""
        return (self.ops.tensor(rotary_table(config, self.config.head_dim, self.max_len)),) * self.config.layers

    def qk_norms(self, prefix: str) -> tuple[Any, Any]:
        """Weights of the norms on each query and key head, for families that have them."""
        return None, None

    def forward(self, step: ForwardStep) -> Tensor:
        """[T, hidden] after the last norm; writes the step's keys and values into the cache."""
        ops = self.ops
        residual = ops.embed(self.embedding, self.vocab_part[0], step, self.config.embedding_scale)
        x = ops.norm(residual, self.sublayers[0].norm, step)
        for sublayer, next_norm in zip(self.sublayers, self._next_norms, strict=True):
            residual, x = ops.reduce_add_norm(sublayer.mix(x, step), residual, next_norm, step, sublayer.post_norm)
        return x

    def logits(self, hidden: Tensor, step: Step) -> Tensor:
        """[n, hidden] to float32 [n, this rank's part of the vocabulary]."""
        return self.ops.logits(hidden, self.head, step, self.config.logits_softcap)

    # --- reading this rank's part of the weights

    def layer(self, i: int, prefix: str) -> list[Sublayer]:
        """Layer i, whose weights' names begin with `prefix`."""
        hidden = self.config.hidden
        return [
            Sublayer(self.norm_weight(prefix + "input_layernorm.weight", hidden), self.attend(i, prefix + "self_attn.")),
            Sublayer(
                self.norm_weight(prefix + "post_attention_layernorm.weight", hidden), self.feed_forward(i, prefix + "mlp.")
            ),
        ]

    def attend(self, i: int, prefix: str) -> Mixer:
        """The sublayer of layer i that mixes tokens."""
        c, heads, d = self.config, self.heads, self.config.head_dim
        q, kv = (heads.q_start * d, heads.q_stop * d), (heads.kv_start * d, heads.kv_stop * d)
        rows = {"q_proj": (c.num_q_heads * d, q), "k_proj": (c.num_kv_heads * d, kv), "v_proj": (c.num_kv_heads * d, kv)}
        return SelfAttention(
            self.ops,
            self.column_parallel(prefix, rows, c.attention_bias),
            self.attention(i, prefix),
            self.row_parallel(prefix + "o_proj", c.num_q_heads * d, q, c.output_bias),
        )

    def attention(self, i: int, prefix: str) -> Attention:
        """What the operation needs to know about the attention of layer i."""
        c = self.config
        table = windows(self.caches).index(window_of(self.caches[i]))
        scale, norms = c.attention_scale or c.head_dim**-0.5, self.qk_norms(prefix)
        return Attention(
            i, table, self.heads, c.head_dim, scale, self.rotary[i], *norms, softcap=c.attention_softcap
        )  # fmt: skip

    def feed_forward(self, i: int, prefix: str) -> Mixer:
        return self.gated_mlp(prefix, self.config.intermediate)

    def gated_mlp(self, prefix: str, inner: int) -> GatedMLP:
        """A gated MLP of `inner` columns."""
        c = self.config
        # split evenly even where ranks hold unequal heads: they wait for each other after each sublayer
        part = self.ops.shard.even(inner)
        rows = {name: (inner, part) for name in ("gate_proj", "up_proj")}
        return GatedMLP(
            self.ops,
            self.column_parallel(prefix, rows, c.mlp_bias),
            self.row_parallel(prefix + "down_proj", inner, part, c.mlp_bias),
            c.gate,
        )

    def column_parallel(self, prefix: str, rows: dict[str, tuple[int, Part]], bias: bool) -> Any:
        """Layers that read the same input, as one: by name, how many outputs each has, and which of them are this rank's."""
        return self.joined(prefix, [(name, n, part) for name, (n, part) in rows.items()], bias)

    def joined(self, prefix: str, rows: list[tuple[str, int, Part]], bias: bool) -> Any:
        """Rows of layers that read the same input, as one layer: the layer's name, all its outputs, and those to take."""
        parts = [self.linear(prefix + name, (n, self.config.hidden), rows=part) for name, n, part in rows]
        biases = [self._read(f"{prefix}{name}.bias", (n,), part) for name, n, part in rows] if bias else []
        return self.ops.weight(parts, torch.cat(biases) if bias else None)

    def row_parallel(self, name: str, width: int, part: Part, bias: bool) -> Any:
        """A layer whose input is split: every rank holds all outputs, so only rank 0 carries the bias."""
        hidden = self.config.hidden
        b = self._read(name + ".bias", (hidden,)) if bias and self.ops.shard.rank == 0 else None
        return self.ops.weight([self.linear(name, (hidden, width), cols=part)], b)

    def linear(self, name: str, shape: tuple[int, int], rows: Part | None = None, cols: Part | None = None) -> Packed:
        """This rank's outputs `rows` and inputs `cols` of a linear layer of `shape`."""
        return self.checkpoint.linear(name, shape, rows=rows, cols=cols, dtype=self.ops.dtype)

    def _tied_head(self, shape: tuple[int, int]) -> Packed:
        """The embedding; a file may hold it a second time, and where that differs it is the output layer."""
        if "lm_head.weight" in self.checkpoint.names():
            stored = self.linear("lm_head", shape, rows=self.vocab_part)
            if not torch.equal(stored.data, self.embedding):
                return stored
        return dense(self.embedding)

    def norm_weight(self, name: str, size: int) -> Any:
        return self.ops.norm_weight(self._read(name, (size,)), self.config.eps)

    def _read(self, name: str, shape: tuple[int, ...], rows: Part | None = None) -> Tensor:
        return self.checkpoint.tensor(name, shape, rows=rows, dtype=self.ops.dtype)
