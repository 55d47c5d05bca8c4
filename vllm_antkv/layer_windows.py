"""Sliding windows of a model's layers, as its Hugging Face config tells them. Pure Python."""

from typing import Any


def layer_windows(config: Any) -> list[int | None]:
    """Tokens that a query sees in each layer, itself included; None where it sees all before it.

    Where the config does not tell kinds of layers apart, all of them have its window, if it has one, as in vLLM.

    Args:
        config: of the text model.
    """
    window = getattr(config, "sliding_window", None) or None
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]
