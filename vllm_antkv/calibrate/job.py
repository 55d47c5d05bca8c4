"""A calibration that was checked against its model and text, before the model is run."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig

from vllm_antkv.calibrate.capture import checkpointed
from vllm_antkv.calibrate.models import compute_dtype, load_model
from vllm_antkv.calibrate.resources import (
    needs_checkpointing,
    pick_device,
    places_for_weights,
    training_needs_checkpointing,
)
from vllm_antkv.calibrate.settings import CalibrationSettings
from vllm_antkv.calibrate.texts import built_in_text, read_text, text_hash, token_windows
from vllm_antkv.calibrate.train import STEP_TOKENS
from vllm_antkv.calibrate.workspace import check_writable
from vllm_antkv.codebook import ModelIdentity
from vllm_antkv.config import VQ_BLOCK_SIZE
from vllm_antkv.errors import CalibrationError, UnsupportedModelError
from vllm_antkv.features import unserved_feature
from vllm_antkv.offline.adapters import read_adapter
from vllm_antkv.offline.pretrained import check_token_ids, hands_over_rows, is_quantised, read_config, read_tokenizer
from vllm_antkv.presets import Preset, parts_of_mix
from vllm_antkv.progress import say

logger = logging.getLogger(__name__)

#: One window in so many judges, and so many do at most. A few tokens decide what a layer costs, so that one window is
#: often wrong by a factor of two (`docs/research/ablations.md`).
_JUDGING_EVERY = 6
_MAX_JUDGING = 4


@dataclass(frozen=True)
class WhyVllm:
    """Why vLLM has to run a model, and transformers' code is no use.

    because: as a sentence goes on after "as".
    instead: what else can be done; empty: nothing.
    """

    because: str
    instead: str = ""


QUANTISED = WhyVllm(
    "no gradient flows through quantised weights", "calibrate the unquantised model, whose codebooks fit both"
)
HIDDEN = WhyVllm("transformers' code of this model does not hand them over")


def why_vllm(config: PretrainedConfig) -> WhyVllm | None:
    """Why vLLM has to run the model of a config; None: transformers does.

    Raises:
        CalibrationError: the config describes no model.
        UnsupportedModelError: only vLLM could, and the codebook would serve nobody.
    """
    if is_quantised(config):
        return QUANTISED
    if hands_over_rows(config, CalibrationError):
        return None
    if feature := unserved_feature(config.get_text_config()):
        raise UnsupportedModelError(
            f"There is no antkv cache for a model with {feature}, and transformers' code of it does not hand over K "
            "and V: serve it with --kv-cache-dtype auto."
        )
    return HIDDEN


@dataclass(frozen=True)
class Job:
    """Checked settings, and what they mean for this model and text.

    presets: those asked for, each once.
    parts: of a preset, by its name, those that its layers may have; none: all layers have the preset.
    windows: (num_windows, seq_len) int64.
    training: (num_windows, STEP_TOKENS or less), those of the steps in which centroids are trained; none of none.
    why_vllm: why vLLM has to run the model; None: transformers does.
    places: bytes of weights that each place can hold where the device cannot hold them all; None: it can.
    record: what the codebook's header says about the calibration.
    """

    settings: CalibrationSettings
    config: Any
    identity: ModelIdentity
    presets: list[Preset]
    parts: dict[str, list[Preset]]
    windows: torch.Tensor
    training: torch.Tensor
    device: torch.device
    why_vllm: WhyVllm | None
    places: dict[int | str, int] | None
    record: dict[str, Any]

    @property
    def weighted(self) -> bool:
        """Whether tokens count by their gradients."""
        return self.settings.weights == "grad"

    @property
    def learned(self) -> list[Preset]:
        """The presets whose centroids the codebooks are made of."""
        return _learned(self.presets, self.parts)

    @property
    def judging(self) -> torch.Tensor:
        """The windows by which a mix of layers is chosen; none where layers are alike."""
        wanted = min(max(1, len(self.windows) // _JUDGING_EVERY), _MAX_JUDGING)
        return self.windows[: wanted if self.parts else 0]

    @property
    def learning(self) -> torch.Tensor:
        """The windows that centroids are learned from: all others, as large tables know their text better."""
        return self.windows[len(self.judging) :]

    @property
    def recomputes(self) -> bool:
        """Whether decoder layers are recomputed on the way back, because memory is short."""
        dtype = compute_dtype(self.config, self.device)
        return self.places is not None or needs_checkpointing(self.config, self.windows.shape[1], dtype)

    def load_model(self, folder: Path) -> Any:
        """The model, frozen; weights that do not fit are read when they are needed, some of them from `folder`."""
        streaming = None
        if self.places is not None:
            # In the folder are weights that transformers does not read as the checkpoint has them, such as experts'.
            streaming = {"device_map": "sequential", "max_memory": self.places, "offload_folder": str(folder)}
        return load_model(self.settings.model, self.config, self.device, streaming, self.settings.lora)

    @contextmanager
    def model_again(self, folder: Path, trains: bool = False) -> Iterator[Any]:
        """The model, loaded again as `load_model` does; it recomputes its layers where memory is short.

        trains: what keeps more of every layer (`calibrate.train`).
        """
        model, recomputes = self.load_model(folder), self.recomputes
        if trains and not recomputes:
            dtype = compute_dtype(self.config, self.device)
            recomputes = training_needs_checkpointing(self.config, self.training.shape[1], dtype)
        with checkpointed(model, recomputes):
            yield model


def prepare(settings: CalibrationSettings) -> Job:
    """Check everything that can be checked without running the model.

    Raises SettingsError, UnsupportedModelError and CalibrationError, as `run.calibrate` does.
    """
    presets, model = settings.chosen(), settings.model
    if settings.lora is not None:
        read_adapter(settings.lora, CalibrationError)
    device = pick_device(settings.device)
    config = read_config(model, CalibrationError)
    identity = ModelIdentity.from_hf_config(config)
    why = why_vllm(config)
    if why is not None and settings.lora:
        raise UnsupportedModelError(
            f"--lora works through transformers' code, but vLLM has to run {model}, as {why.because}: "
            f"{why.instead or 'leave --lora out'}."
        )
    for preset in presets:
        preset.num_sub_vectors(identity.head_size)
    # Of a prompt, vLLM wants to predict one token more.
    longest = config.get_text_config().max_position_embeddings - (why is not None)
    if settings.seq_len > longest:
        logger.warning("--seq-len %d is longer than the model's context: using %d.", settings.seq_len, longest)
    seq_len = min(settings.seq_len, longest)
    _check_trainable(settings, seq_len, why)
    tokenizer = read_tokenizer(model, CalibrationError)
    windows, training, record = _read_windows(settings, tokenizer, seq_len)
    check_token_ids(torch.cat((windows.flatten(), training.flatten())), model, identity.vocab_size, CalibrationError)
    num_tokens = windows.numel() - len(windows)
    parts = _parts(settings, identity.head_size, windows, why)
    check_enough(_learned(presets, parts), num_tokens, seq_len)
    # vLLM itself says whether it has room for a model that it runs.
    places = None if why is not None else places_for_weights(config, seq_len, device)
    if places is not None:
        _check_streamable(settings, device)
    # Last, since it makes the folder.
    check_writable(settings.out)
    record |= {"samples": len(windows), "seq_len": seq_len, **settings.recorded()}
    if why is not None and settings.weights == "grad":
        record["weights"] = "votes"
    return Job(settings, config, identity, presets, parts, windows, training, device, why, places, record)


def _parts(
    settings: CalibrationSettings, head_size: int, windows: torch.Tensor, why: WhyVllm | None
) -> dict[str, list[Preset]]:
    """As `Job.parts` says."""
    if settings.bits == "uniform":
        return {}
    parts = {preset.name: parts_of_mix(preset, head_size) for preset in settings.chosen()}
    num_windows, seq_len = windows.shape
    if why is not None:
        say(f"All layers get the same preset: nothing tells which needs more bits, as {why.because}.")
    elif num_windows < 2 or seq_len < 2 * VQ_BLOCK_SIZE:
        say(f"All layers get the same preset: bits by layer need two windows of {2 * VQ_BLOCK_SIZE} tokens or more.")
    else:
        return {name: found for name, found in parts.items() if found}
    return {}


def _learned(presets: Sequence[Preset], parts: Mapping[str, list[Preset]]) -> list[Preset]:
    return list(dict.fromkeys(part for preset in presets for part in parts.get(preset.name, [preset])))


def _read_windows(
    settings: CalibrationSettings, tokenizer: Any, seq_len: int
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """The windows, those of training, and what the codebook's header says about their text."""
    texts = [read_text(source) for source in settings.texts] or [built_in_text()]
    windows = token_windows(texts, tokenizer, settings.samples, seq_len, settings.seed)
    training, steps = windows[:0], settings.train_steps
    if steps:
        training = token_windows(texts, tokenizer, steps, min(seq_len, STEP_TOKENS), settings.seed)
    return windows, training, {"texts": [text.name for text in texts], "text_sha256": text_hash(texts)}


def check_enough(presets: Sequence[Preset], num_tokens: int, seq_len: int) -> None:
    """CalibrationError when there are fewer tokens to cluster than centroids."""
    largest = max(presets, key=lambda preset: preset.num_centroids)
    if num_tokens < largest.num_centroids:
        raise CalibrationError(
            f"{largest.name} needs at least {largest.num_centroids} calibration tokens beside first tokens and sinks, "
            f"but there are {num_tokens}: give more text or more --samples (of {seq_len} tokens each)."
        )


def _check_trainable(settings: CalibrationSettings, seq_len: int, why: WhyVllm | None) -> None:
    """UnsupportedModelError for a model without gradients, CalibrationError for windows that read no codes."""
    if settings.train_steps and why is not None:
        raise UnsupportedModelError(
            f"--train-steps needs gradients, and vLLM, which has to run {settings.model}, as {why.because}, has none: "
            "leave it out."
        )
    if settings.train_steps and seq_len < 2 * VQ_BLOCK_SIZE:
        raise CalibrationError(f"--train-steps needs windows of {2 * VQ_BLOCK_SIZE} tokens or more, not of {seq_len}.")


def _check_streamable(settings: CalibrationSettings, device: torch.device) -> None:
    """CalibrationError when all weights are needed at once."""
    if settings.lora:
        raise CalibrationError(
            f"--lora needs all weights in memory, and {device} cannot hold those of {settings.model}: leave --lora "
            "out, or use a larger device."
        )
    say(f"{device} cannot hold all weights: layers that do not fit are read whenever they are run, twice a window.")
