"""Which decoder layers attend, and how far they see, as a Hugging Face config tells. Pure Python."""

from typing import Any

#: Kinds of decoder layers that keep no K and V.
_NO_ATTENTION = {"linear_attention", "mamba", "conv", "moe", "mlp"}
#: Kinds that keep a state; "hybrid" attends too.
_WITH_STATE = {"linear_attention", "mamba", "conv", "hybrid"}


def attention_layers(config: Any) -> tuple[int, ...] | None:
    """Indices of the decoder layers that attend, beside others that keep a state or nothing; None: all attend.

    Args:
        config: of the text model.
    """
    kinds = layer_kinds(config)
    layers = tuple(index for index, kind in enumerate(kinds) if kind not in _NO_ATTENTION)
    return None if len(layers) == len(kinds) else layers


def layer_kinds(config: Any) -> list[str]:
    """The kind of each decoder layer, in the words of the config; empty where it does not tell."""
    return list(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())


def num_state_layers(config: Any) -> int:
    """Decoder layers that keep a state. config: of the text model."""
    return sum(kind in _WITH_STATE for kind in layer_kinds(config))


def has_gated_delta_nets(config: Any) -> bool:
    """Whether the layers with a state are linear attention. config: of the text model."""
    return "linear_attention" in layer_kinds(config)


def states_per_request(config: Any) -> int:
    """States of a layer that a request holds at most while prefixes are cached: before its step and behind it.

    Mamba-2 has one more, from within the prompt. config: of the text model.
    """
    return 3 if has_mamba2(config) else 2


def has_mamba2(config: Any) -> bool:
    """Whether the layers with a state are state spaces with heads. config: of the text model."""
    return any(hasattr(config, name) for name in ("mamba_n_heads", "mamba_num_heads"))


def layer_windows(config: Any, longest: int | None = None) -> list[int | None]:
    """Tokens that a query sees in each layer that attends, itself included; None where it sees all before it.

    Where the config does not tell kinds of layers apart, all of them have its window, if it has one, as in vLLM.

    Args:
        config: of the text model.
        longest: tokens of a sequence, at most; a window that none outgrows is none.
    """
    window = getattr(config, "sliding_window", None) or None
    if window and longest and window >= longest:
        window = None
    kinds = layer_kinds(config) or ["sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds if kind not in _NO_ATTENTION]
