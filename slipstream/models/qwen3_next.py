"""Qwen3-Next: Qwen3.5-MoE that stores rows of gated delta nets by key head, and may have layers without experts."""

from slipstream.models.qwen3_5_moe import Qwen35Moe
from slipstream.weights.parts import Part


class Qwen3Next(Qwen35Moe):
    """Follows the `qwen3_next` code of transformers."""

    defaults = {**Qwen35Moe.defaults, "num_experts": 512, "num_experts_per_tok": 10, "intermediate_size": 5632}

    def delta_rows(self) -> list[tuple[str, int, Part]]:
        """`in_proj_qkvz` has of each key head its query, key, value heads and their gates; `in_proj_ba` their b and a."""
        d, heads = self.delta, self.delta_heads
        share = d.value_heads // d.key_heads
        size, values = 2 * d.key_dim + 2 * share * d.value_dim, range(heads.q_start, heads.q_stop)

        def keys(at: int) -> list[tuple[str, int, Part]]:
            starts = [h * size + at for h in range(heads.kv_start, heads.kv_stop)]
            return [("in_proj_qkvz", d.key_heads * size, (start, start + d.key_dim)) for start in starts]

        def of_values(at: int) -> list[tuple[str, int, Part]]:
            starts = [h // share * size + at + h % share * d.value_dim for h in values]
            return [("in_proj_qkvz", d.key_heads * size, (start, start + d.value_dim)) for start in starts]

        def scalars(at: int) -> list[tuple[str, int, Part]]:
            starts = [h // share * 2 * share + at + h % share for h in values]
            return [("in_proj_ba", 2 * d.value_heads, (start, start + 1)) for start in starts]

        value, gate = 2 * d.key_dim, 2 * d.key_dim + share * d.value_dim
        return [*keys(0), *keys(d.key_dim), *of_values(value), *of_values(gate), *scalars(0), *scalars(share)]
