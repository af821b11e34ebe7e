"""Llama and what shares its shape: SmolLM2, Mistral without a sliding window, TinyLlama; the base of other dense decoders.

A model is a list of layers with prepared weights and one `forward` over an `Ops` namespace; it holds no per-request state.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models.rotary import rotary_table
from slipstream.ops.interface import Attention, Ops, Step
from slipstream.shard import Heads

Part = tuple[int, int]  # [start, stop)


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

    @classmethod
    def read(cls, config: dict) -> "DenseConfig":
        """Raises ModelError where the config asks for something that would otherwise be ignored."""
        if config.get("hidden_act", "silu") not in ("silu", "swish"):
            raise ModelError(f"hidden_act {config['hidden_act']!r} is not supported; silu is")
        refuse_sliding_window(config)
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
        )


def refuse_sliding_window(config: dict) -> None:
    """A window that would bind is refused: attending to everything instead would change the model in silence."""
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False or window >= config["max_position_embeddings"]:
        return
    raise ModelError(
        f"sliding_window {window} is not supported; set max_position_embeddings to at most {window} in config.json"
    )


@dataclass(frozen=True, eq=False)
class Layer:
    """One decoder layer's prepared weights (this rank's part)."""

    norm: Any  # before attention
    qkv: Any
    attention: Attention
    out: Any
    mlp_norm: Any
    gate_up: Any
    down: Any


@dataclass(frozen=True)
class CacheShape:
    """The KV cache that a rank needs: per layer and for keys and values each, [pages + 1, block, heads, head_dim]."""

    layers: int
    heads: int
    head_dim: int


class Llama:
    """A dense decoder on one rank.

    `vocab_part` is this rank's [start, stop) of the logits; `vocab` their full count.
    """

    def __init__(self, config: dict, checkpoint: Any, ops: Ops, max_len: int | None = None):
        """Reads this rank's part of the weights. `max_len` bounds the rotary table (default: the config's own length)."""
        self.config = c = self.read_config(config)
        self.ops = ops
        self.checkpoint = checkpoint
        heads = ops.shard.heads(c.num_q_heads, c.num_kv_heads)
        self.vocab = c.vocab
        self.vocab_part = ops.shard.even(c.vocab)
        self.max_len = min(max_len or c.max_len, c.max_len)
        self.cache = CacheShape(c.layers, heads.num_kv_heads, c.head_dim)
        rotary = ops.tensor(rotary_table(config, c.head_dim, self.max_len))
        self.layers = [self._layer(i, heads, rotary) for i in range(c.layers)]
        self.norm = self.norm_weight("model.norm.weight", c.hidden)
        shape = (c.vocab, c.hidden)
        self.embedding = ops.tensor(self._read("model.embed_tokens.weight", shape, self.vocab_part))
        self.head = ops.weight(self.embedding if c.tied else self._read("lm_head.weight", shape, self.vocab_part))
        del self.checkpoint

    def read_config(self, config: dict) -> DenseConfig:
        return DenseConfig.read(config)

    def qk_norms(self, prefix: str) -> tuple[Any, Any]:
        """Weights of the norms on each query and key head, for families that have them."""
        return None, None

    def forward(self, step: Step) -> Tensor:
        """[T, hidden] after the last norm; writes the step's keys and values into the cache."""
        ops = self.ops
        residual = ops.embed(self.embedding, self.vocab_part[0], step)
        x = ops.norm(residual, self.layers[0].norm)
        for i, layer in enumerate(self.layers):
            x = ops.attention(ops.linear(x, layer.qkv), layer.attention, step)
            residual, x = ops.add_norm(x, layer.out, residual, layer.mlp_norm)
            x = ops.swiglu(x, layer.gate_up)
            after = self.layers[i + 1].norm if i + 1 < len(self.layers) else self.norm
            residual, x = ops.add_norm(x, layer.down, residual, after)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] to float32 [n, this rank's part of the vocabulary]."""
        return self.ops.logits(hidden, self.head)

    def _read(self, name: str, shape: tuple[int, ...], rows: Part | None = None, cols: Part | None = None) -> Tensor:
        """This rank's [rows, cols] of a tensor of `shape`; an empty part (a rank without heads) is read from nowhere."""
        asked = zip((rows, cols), shape, strict=False)
        part = [p[1] - p[0] if p else n for p, n in asked]
        if 0 in part:
            return torch.empty(part, dtype=self.ops.dtype)
        return self.checkpoint.tensor(name, shape, rows=rows, cols=cols, dtype=self.ops.dtype)

    def norm_weight(self, name: str, size: int) -> Any:
        return self.ops.norm_weight(self._read(name, (size,)), self.config.eps)

    def _layer(self, i: int, heads: Heads, rotary: Tensor) -> Layer:
        c, ops, prefix = self.config, self.ops, f"model.layers.{i}."
        d = c.head_dim
        q_norm, k_norm = self.qk_norms(prefix + "self_attn.")
        # even though ranks may hold unequal heads: they meet after each half of a layer, so each half is balanced by itself
        mlp = ops.shard.even(c.intermediate)
        q = (heads.q_start * d, heads.q_stop * d)
        return Layer(
            norm=self.norm_weight(prefix + "input_layernorm.weight", c.hidden),
            qkv=self._qkv(prefix + "self_attn.", heads),
            attention=Attention(i, heads, d, d**-0.5, rotary, q_norm, k_norm),
            out=self._row_parallel(prefix + "self_attn.o_proj", c.num_q_heads * d, q, c.output_bias),
            mlp_norm=self.norm_weight(prefix + "post_attention_layernorm.weight", c.hidden),
            gate_up=self._gate_up(prefix + "mlp.", mlp),
            down=self._row_parallel(prefix + "mlp.down_proj", c.intermediate, mlp, c.mlp_bias),
        )

    def _qkv(self, prefix: str, heads: Heads) -> Any:
        """Queries, keys and values of this rank's heads as one layer."""
        c = self.config
        q = (heads.q_start * c.head_dim, heads.q_stop * c.head_dim)
        kv = (heads.kv_start * c.head_dim, heads.kv_stop * c.head_dim)
        parts = [("q_proj", c.num_q_heads, q), ("k_proj", c.num_kv_heads, kv), ("v_proj", c.num_kv_heads, kv)]
        weight = torch.cat([self._read(f"{prefix}{name}.weight", (n * c.head_dim, c.hidden), part) for name, n, part in parts])
        if not c.attention_bias:
            return self.ops.weight(weight)
        return self.ops.weight(weight, torch.cat([self._read(f"{prefix}{n}.bias", (k * c.head_dim,), p) for n, k, p in parts]))

    def _gate_up(self, prefix: str, part: Part) -> Any:
        c, names = self.config, ("gate_proj", "up_proj")
        gate, up = (self._read(f"{prefix}{name}.weight", (c.intermediate, c.hidden), part) for name in names)
        if not c.mlp_bias:
            return self.ops.gated_weight(gate, up)
        gate_bias, up_bias = (self._read(f"{prefix}{name}.bias", (c.intermediate,), part) for name in names)
        return self.ops.gated_weight(gate, up, (gate_bias, up_bias))

    def _row_parallel(self, name: str, width: int, part: Part, bias: bool) -> Any:
        """A layer whose input is split: every rank holds all outputs, so only rank 0 carries the bias."""
        hidden = self.config.hidden
        b = self._read(name + ".bias", (hidden,)) if bias and self.ops.shard.rank == 0 else None
        return self.ops.weight(self._read(name + ".weight", (hidden, width), cols=part), b)
