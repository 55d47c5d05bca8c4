"""Layers that stay exact: those that `--kv-cache-dtype-skip-layers` names."""

from collections.abc import Sequence

from vllm_antkv.config import AntKVConfig
from vllm_antkv.errors import SettingsError

#: What vLLM calls all layers with a sliding window.
_WINDOWS = "sliding_window"


def read_skipped(
    words: Sequence[str], layers: Sequence[int], settings: AntKVConfig
) -> tuple[tuple[int, ...], AntKVConfig]:
    """The layers that are named by their index, and the settings that keep those exact which are named by their kind.

    Args:
        words: values of `--kv-cache-dtype-skip-layers`.
        layers: indices of the decoder layers that attend.
        settings: of the user.

    Raises:
        SettingsError: a word names no layer, or all layers are named.
    """
    for word in words:
        if word != _WINDOWS and word not in map(str, layers):
            raise SettingsError(
                f"--kv-cache-dtype-skip-layers names {word!r}, which is neither a layer of this model that "
                f"attends ({layers[0]} to {layers[-1]}) nor {_WINDOWS}: leave it out."
            )
    skipped = tuple(sorted({int(word) for word in words if word != _WINDOWS}))
    if len(skipped) == len(layers):
        raise SettingsError("--kv-cache-dtype-skip-layers names all layers: use --kv-cache-dtype auto.")
    if _WINDOWS in words:
        # Few rows of a window are needed at a time: recency pages hold them in less memory than pages of all tokens.
        settings = settings.model_copy(update={"windows": "exact"})
    return skipped, settings
