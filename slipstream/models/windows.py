"""Which layers of a decoder read a window of the latest tokens, from a Hugging Face config."""

from collections.abc import Callable

from slipstream.errors import ModelError

FULL, SLIDING = "full_attention", "sliding_attention"


def layer_windows(config: dict, slides: Callable[[int], bool]) -> tuple[int, ...]:
    """The window of each layer in tokens (`sliding_window`), 0 where the layer reads all tokens.

    slides: whether layer i has a window, where the config has no `layer_types`. Raises ModelError for a type that is neither of
    the two, for another number of types than of layers, and for a window without a size.
    """
    count, size = config["num_hidden_layers"], config.get("sliding_window")
    types = config.get("layer_types") or [SLIDING if slides(i) else FULL for i in range(count)]
    if len(types) != count:
        raise ModelError(f"layer_types names {len(types)} layers, and num_hidden_layers is {count}")
    for i, kind in enumerate(types):
        if kind not in (FULL, SLIDING):
            raise ModelError(f"layer_types: {kind!r} of layer {i} is not supported; {FULL} and {SLIDING} are")
    if SLIDING not in types:
        return (0,) * count
    if not isinstance(size, int) or size < 1:
        raise ModelError(f"sliding_window is {size!r}; layers of {SLIDING} need a number of tokens")
    return tuple(size if kind == SLIDING else 0 for kind in types)
