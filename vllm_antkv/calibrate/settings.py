"""What is asked of a calibration: one object, checked when it is made, and recorded in the codebook's header."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from vllm_antkv.errors import CalibrationError
from vllm_antkv.presets import PRESETS, Preset, get_preset

#: How a token counts in k-means: by the norm of its gradient (AnTKV, equation 2), and a channel of K by its queries. Or
#: all alike.
Weights = Literal["grad", "none"]
#: How sub-vectors take the channels of K (`ops.rope.interleaved`); V's are taken as they come.
Channels = Literal["interleaved", "consecutive"]
#: Whether layers have presets of their own (`calibrate.mix`), or all the same.
Bits = Literal["uniform", "mixed"]


@dataclass(frozen=True)
class CalibrationSettings:
    """One calibration.

    model: folder or Hugging Face name of a causal language model.
    presets: preset names; `all` stands for every preset.
    texts: plain text files, or names of Hugging Face data sets where `datasets` is installed; none: the
        text that comes with the package (`texts.built_in_text`).
    out: folder for the codebooks, made if it does not exist; files are `codebook_path(out, preset)`.
    samples: windows of text, at most; fewer when the text is shorter.
    seq_len: tokens per window, BOS included; clipped to the model's context.
    weights: `grad` or `none`.
    channels: `interleaved` or `consecutive`, how sub-vectors take the channels of K.
    bits: `uniform` gives all layers the preset; `mixed` gives each what it needs, all together no more bytes.
    lora: folder of an adapter that is always on.
    device: `auto`, `cpu`, `cuda` or `cuda:N`.
    train_steps: in which centroids are trained after k-means (`calibrate.train`).
    seed: chooses the text windows, seeds k-means, and orders what is trained on.

    Raises:
        SettingsError: an unknown preset.
        CalibrationError: any other value that cannot be used, in one sentence.
    """

    model: str
    presets: Sequence[str]
    texts: Sequence[str]
    out: Path
    samples: int = 128
    seq_len: int = 2048
    weights: Weights = "grad"
    channels: Channels = "interleaved"
    bits: Bits = "mixed"
    lora: Path | None = None
    device: str = "auto"
    train_steps: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        """Check all that can be checked without the model."""
        if self.samples < 1 or self.seq_len < 2 or self.seed < 0 or self.train_steps < 0:
            raise CalibrationError(
                f"--samples {self.samples}, --seq-len {self.seq_len}, --seed {self.seed}, --train-steps "
                f"{self.train_steps}: they must be at least 1, 2, 0 and 0."
            )
        for option, value, known in (
            ("weights", self.weights, get_args(Weights)),
            ("channels", self.channels, get_args(Channels)),
            ("bits", self.bits, get_args(Bits)),
        ):
            if value not in known:
                raise CalibrationError(f"--{option} '{value}' is none of {', '.join(known)}.")
        if not self.presets:
            raise CalibrationError("Calibration needs at least one --preset.")
        self.chosen()

    def chosen(self) -> list[Preset]:
        """The presets, each once; SettingsError names the known ones when one is unknown."""
        if "all" in self.presets:
            return list(PRESETS.values())
        return [get_preset(name) for name in dict.fromkeys(self.presets)]

    def recorded(self) -> dict[str, Any]:
        """What the codebook's header says of them, whatever the text and the machine."""
        return {
            "weights": self.weights,
            "channels": self.channels,
            "bits": self.bits,
            "seed": self.seed,
            **({"lora": self.lora.name} if self.lora else {}),
            **({"train_steps": self.train_steps} if self.train_steps else {}),
        }
