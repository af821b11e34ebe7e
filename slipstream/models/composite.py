"""The text decoder of a composite checkpoint, whose config has that of the text under `text_config`."""

from slipstream.models.strict import derived


def text_of(config: dict) -> tuple[dict, bool]:
    """The config of the text, and whether the checkpoint is a composite one. `tie_word_embeddings` is the whole model's."""
    text = config.get("text_config")
    if text is None:
        return config, False
    tied = config.get("tie_word_embeddings")
    return (text if tied is None else derived(text, {**text, "tie_word_embeddings": tied})), True
