"""Nothing of a checkpoint is ignored in silence: what no code has read, a key of the config or a tensor, is refused by name."""

from typing import Any

from slipstream.errors import ModelError

# What a text decoder's answers do not depend on.
_NO_EFFECT = frozenset(
    # who wrote the file, and for which code
    ("architectures", "auto_map", "model_type", "transformers_version", "torch_dtype", "dtype")
    + ("unsloth_fixed", "unsloth_version", "attn_implementation", "cache_implementation")
    + ("use_cache", "return_dict", "output_attentions", "output_hidden_states")
    + ("quantization_config",)  # for the checkpoint to read or to refuse
    # training
    + ("initializer_range", "initializer_factor", "pretraining_tp", "router_aux_loss_coef", "output_router_logits")
    + ("aux_loss_alpha", "seq_aux", "ep_size", "router_jitter_noise")
    + ("gradient_checkpointing", "embd_pdrop", "resid_pdrop", "attn_pdrop")
    # how to sample unless a request says so; classes of classifiers
    + ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "max_length", "id2label", "label2id")
    # other parts of composite models
    + ("vision_config", "audio_config", "mm_tokens_per_image")
)
_NO_EFFECT_ENDS = ("_token_id", "_token_index", "_token_ids", "_dropout")
# Tensors of other parts of composite models, of heads that draft tokens, and buffers that older files store.
_OTHER_PARTS = ("vision_tower.", "visual.", "multi_modal_projector.", "audio_tower.", "embed_vision.", "embed_audio.", "mtp.")
_BUFFERS = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")


class ReadConfig(dict):
    """A config that notes which of its keys were read. A missing key is a ModelError that names it."""

    def __init__(self, config: dict, seen: set[str] | None = None):
        super().__init__(config)
        self.seen: set[str] = set() if seen is None else seen
        text = super().get("text_config")
        if isinstance(text, dict) and not isinstance(text, ReadConfig):
            self["text_config"] = ReadConfig(text)

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        if not super().__contains__(key):
            raise ModelError(f"the config lacks {key}")
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.seen.add(str(key))
        return super().__contains__(key)

    def unread(self) -> dict[str, Any]:
        """Keys that were not read, and may change what the model answers, with their values."""
        found = {k: v for k, v in self.items() if v and k not in self.seen and not _without_effect(k)}
        text = super().get("text_config")
        if isinstance(text, ReadConfig):
            found.pop("text_config", None)
            found |= {f"text_config.{k}": v for k, v in text.unread().items()}
        return found


def _without_effect(key: str) -> bool:
    return key in _NO_EFFECT or key.endswith(_NO_EFFECT_ENDS) or key.startswith("_")  # transformers' notes to itself


def derived(config: dict, values: dict[str, Any]) -> dict:
    """`values` in the place of a config that they were made from: reads of them count as reads of it."""
    return ReadConfig(values, config.seen if isinstance(config, ReadConfig) else None)


def with_defaults(config: dict, defaults: dict[str, Any]) -> dict:
    """The config with values for keys that it may lack."""
    return derived(config, defaults | config)


def refuse_unread_keys(config: ReadConfig, architecture: str) -> None:
    unread = config.unread()
    if unread:
        shown = "; ".join(f"{key}: {value!r}" for key, value in unread.items())
        raise ModelError(
            f"the config has settings that {architecture} is not known to have, and that may change its answers: {shown[:500]} "
            "(if they do not, take them out of config.json)"
        )


def refuse_unread_tensors(names: list[str], unused: tuple[str, ...]) -> None:
    """`names`: tensors that the model did not read. `unused`: beginnings of names that it has no use for."""
    left = [n for n in names if not n.removeprefix("model.").startswith((*_OTHER_PARTS, *unused)) and not n.endswith(_BUFFERS)]
    if left:
        more = f" and {len(left) - 5} more" if len(left) > 5 else ""
        raise ModelError(
            f"the file has tensors that nothing reads, so the config does not fit the weights: {', '.join(left[:5])}{more}"
        )
