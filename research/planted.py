"""The embedded model with attention sinks planted beyond its first tokens; see `plant_sinks.py`."""

from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from research.plant_sinks import plant
from vllm_antkv.codebook import Codebook, ModelIdentity, SinkRule, codebook_path, find_codebook
from vllm_antkv.offline.hidden import captured_hidden
from vllm_antkv.offline.models import decoder_layers
from vllm_antkv.offline.sinks import find_channels, find_rule, peak_ratios

ROOT = Path(__file__).parents[1]
EMBEDDED = ROOT / "models" / "embedded"
TEXT = ROOT / "LICENSE"
PRESET = "antkv-1bit"
#: " as": once in 214 tokens of the text.
SINK_TOKEN = 345
LAYER = 1
CONTEXT = 512


def text_windows(num_windows: int) -> torch.Tensor:
    """Windows of the text, BOS first, each with two sinks or more beyond it: (num_windows, CONTEXT) int64."""
    ids = AutoTokenizer.from_pretrained(EMBEDDED)(TEXT.read_text(), add_special_tokens=False, verbose=False)[
        "input_ids"
    ]
    body = torch.tensor(ids[: num_windows * (CONTEXT - 1)]).view(num_windows, -1)
    assert (body == SINK_TOKEN).sum(1).min() >= 2
    return torch.cat((torch.zeros(num_windows, 1, dtype=torch.int64), body), dim=1)


def plant_embedded(folder: Path) -> Path:
    """Write the planted model with its tokenizer. Its keys are fitted on the first window."""
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).eval()
    plant(model, text_windows(1)[0], SINK_TOKEN, LAYER).save_pretrained(folder)
    AutoTokenizer.from_pretrained(EMBEDDED).save_pretrained(folder)
    return folder


def is_planted(windows: torch.Tensor) -> torch.Tensor:
    """(num_windows, CONTEXT) bool, True for the tokens that were made sinks."""
    return (windows == SINK_TOKEN) | (windows == 0)


def calibrated_rule(model: nn.Module, windows: torch.Tensor) -> SinkRule:
    """What calibration finds in a model, as `antkv calibrate` does."""
    found = find_channels(np.stack([peak_ratios(model, window) for window in windows]))
    assert found is not None
    values: list[np.ndarray] = []
    channels = list(found.channels)
    with (
        torch.no_grad(),
        captured_hidden([decoder_layers(model)[found.layer]], lambda h: values.append(h[:, channels])),
    ):
        for window in windows:
            model(window[None])
    rule = find_rule(found, torch.stack(values).abs().numpy())
    assert rule is not None
    return rule


def shipped_codebook() -> Codebook:
    """The embedded model's own."""
    identity = ModelIdentity.from_hf_config(AutoConfig.from_pretrained(EMBEDDED))
    return Codebook.load(find_codebook(str(EMBEDDED), identity, PRESET))


def write_codebook(model: Path, rule: SinkRule) -> Codebook:
    """Beside the planted model: the centroids of the embedded model, whose K and V are alike but for sinks."""
    codebook = shipped_codebook()
    identity = ModelIdentity.from_hf_config(AutoConfig.from_pretrained(model))
    header = codebook.header.model_copy(update={"model": identity, "sinks": rule})
    path = codebook_path(model / "antkv", PRESET)
    Codebook(header, codebook.k, codebook.v).save(path)
    return Codebook.load(path)
