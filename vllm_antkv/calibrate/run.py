"""`antkv calibrate`: from a model and text to codebook files (AnTKV sections 4.1 and 4.2, KVSink appendix G)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

#: How a token counts in k-means: by the norm of its gradient (AnTKV, equation 2), or every token alike.
Weights = Literal["grad", "none"]


def calibrate(
    model: str,
    presets: Sequence[str],
    texts: Sequence[str],
    out: Path,
    *,
    samples: int = 128,
    seq_len: int = 2048,
    weights: Weights = "grad",
    device: str = "auto",
    seed: int = 0,
) -> list[Path]:
    """Learn the centroids of one or more presets from calibration text and write one codebook file for each.

    The model runs once, however many presets are asked for. A killed run continues where it stopped when the same
    command is given again. The same command on the same machine writes the same bytes.

    Args:
        model: folder or Hugging Face name of a causal language model.
        presets: preset names; `all` stands for every preset.
        texts: plain text files, or names of Hugging Face data sets where `datasets` is installed.
        out: folder for the codebooks, made if it does not exist; files are `codebook_path(out, preset)`.
        samples: windows of text, at most; fewer when the text is shorter.
        seq_len: tokens per window, BOS included; clipped to the model's context.
        weights: `grad` or `none`.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        seed: chooses the text windows and seeds k-means.

    Returns:
        The files written, in the order of `presets`.

    Raises:
        SettingsError: an unknown preset, or one that does not fit the model's head size.
        UnsupportedModelError: the model's architecture is not among the supported ones.
        CalibrationError: anything else that cannot be used, in one sentence.
    """
    raise NotImplementedError
