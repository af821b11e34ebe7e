"""Gemma 2 and Gemma 3, text: Llama with norms of 1 + w, also behind each sublayer, a scaled embedding, and windows."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slipstream.models.composite import text_of
from slipstream.models.llama import DenseConfig, Llama, Sublayer
from slipstream.models.rotary import rotary_table
from slipstream.models.strict import derived, with_defaults
from slipstream.models.windows import FULL, SLIDING, layer_windows
from slipstream.ops.interface import Ops

# what a config.json of either family may leave out, and then means
_DEFAULTS = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}


class Gemma2(Llama):
    """arXiv:2408.00118. Every second layer has a window; scores and logits are capped."""

    defaults = _DEFAULTS | {
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }

    def read_config(self, config: dict) -> DenseConfig:
        config = with_defaults(config, self.defaults)
        read = DenseConfig.read(config)
        scale = torch.tensor(read.hidden**0.5, dtype=self.ops.dtype)  # rounded, as the models were trained
        return replace(
            read,
            windows=layer_windows(config, self.slides(config)),
            embedding_scale=scale.item(),
            attention_scale=config["query_pre_attn_scalar"] ** -0.5,
            attention_softcap=config.get("attn_logit_softcapping") or 0.0,
            logits_softcap=config.get("final_logit_softcapping") or 0.0,
        )

    def slides(self, config: dict) -> Any:
        return lambda i: i % 2 == 0

    def norm_weight(self, name: str, size: int) -> Any:
        return self.ops.norm_weight(1 + self.checkpoint.tensor(name, (size,)).float(), self.config.eps)

    def layer(self, i: int, prefix: str) -> list[Sublayer]:
        def norm(name: str) -> Any:
            return self.norm_weight(f"{prefix}{name}_layernorm.weight", self.config.hidden)

        return [
            Sublayer(norm("input"), self.attend(i, prefix + "self_attn."), norm("post_attention")),
            Sublayer(norm("pre_feedforward"), self.feed_forward(i, prefix + "mlp."), norm("post_feedforward")),
        ]


class Gemma3(Gemma2):
    """arXiv:2503.19786. Of six layers, five have a window and a rotary base of their own; queries and keys are normed."""

    defaults = _DEFAULTS | {"vocab_size": 262_208, "max_position_embeddings": 131_072}

    def __init__(self, config: dict, checkpoint: Any, ops: Ops, max_len: int | None = None):
        config, composite = text_of(config)
        if composite:
            older = checkpoint.has("language_model.model.embed_tokens.weight")
            self.prefix = "language_model.model." if older else "model.language_model."
        super().__init__(config, checkpoint, ops, max_len)

    def slides(self, config: dict) -> Any:
        every = config.get("sliding_window_pattern") or 6
        return lambda i: (i + 1) % every > 0

    def rotary_tables(self, config: dict) -> tuple[Tensor | None, ...]:
        """Where a config gives one base for all layers, it is that of the layers without a window."""
        by_type = bool({FULL, SLIDING} & (config.get("rope_parameters") or {}).keys())
        full, local = config.get("rope_theta") or 1_000_000.0, config.get("rope_local_base_freq") or 10_000.0

        def table(kind: str, base: float) -> Tensor:
            whole = by_type or kind == FULL
            of_kind = derived(config, {**(config if whole else {}), "rope_theta": base})
            return self.ops.tensor(rotary_table(of_kind, self.config.head_dim, self.max_len, kind if by_type else None))

        whole, windowed = table(FULL, full), table(SLIDING, local)
        return tuple(windowed if size else whole for size in self.config.windows)

    def qk_norms(self, prefix: str) -> tuple[Any, Any]:
        d = self.config.head_dim
        return self.norm_weight(prefix + "q_norm.weight", d), self.norm_weight(prefix + "k_norm.weight", d)
