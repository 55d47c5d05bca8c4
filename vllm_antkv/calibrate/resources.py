"""Says before the work begins whether the device, the memory and the disk suffice for it."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_antkv.calibrate.models import compute_dtype
from vllm_antkv.errors import CalibrationError
from vllm_antkv.offline.models import decoder_layers
from vllm_antkv.offline.pretrained import described, num_parameters

#: float32 tensors as large as the logits that are alive at once in the backward pass of the loss: the logits, their
#: log-softmax and the gradient.
_LOGITS_COPIES = 3
#: Values per token that a decoder layer keeps for its backward pass beside its MLP's, in hidden sizes.
_ATTENTION_ACTIVATIONS = 8
#: And those of an MLP, in its intermediate sizes: gate, its activation, up, and their product.
_MLP_ACTIVATIONS = 4
#: Of a token that goes to an expert, in hidden sizes: its way there and back.
_EXPERT_ACTIVATIONS = 3
#: Of a layer that attends through codes, in float32 logits of all its heads.
_CODED_ATTENTION_ACTIVATIONS = 3
#: Share of free memory beside a GPU that weights may take.
_SHARE_OF_RAM = 0.8
#: Above this many bytes of activations per window, layers are recomputed in the backward pass instead.
_CHECKPOINT_ABOVE = 4 << 30
#: Disk that must stay free beside the activations, for layers' centroids and the codebook itself.
_SPARE_DISK = 1 << 28


def pick_device(name: str) -> torch.device:
    """The device called `auto`, `cpu`, `cuda` or `cuda:N`.

    Raises CalibrationError when there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise CalibrationError(f"Device '{name}' is none of auto, cpu, cuda and cuda:N.")
    if (device.index or 0) >= torch.cuda.device_count():
        raise CalibrationError(f"Device '{name}' does not exist here: PyTorch sees {torch.cuda.device_count()} GPUs.")
    return device


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that a calibration takes of a device.

    weights: of the whole model, every expert included.
    streamed: of the weights that are there together where layers are read one after the other: those outside of the
        layers, and those of the largest layer.
    window: of one window's forward and backward pass.
    streamed_window: the same where layers are recomputed in the backward pass.
    """

    weights: int
    streamed: int
    window: int
    streamed_window: int

    @property
    def total(self) -> int:
        """With all weights."""
        return self.weights + self.window


def memory_need(config: Any, seq_len: int, device: torch.device) -> MemoryNeed:
    """Of a model with this config, for windows of `seq_len` tokens.

    Raises CalibrationError when the config describes no model.
    """
    text, model = config.get_text_config(), described(config, CalibrationError)
    dtype = compute_dtype(config, device)
    layers = [num_parameters(layer) for layer in decoder_layers(model)]
    weights = num_parameters(model)
    logits = _LOGITS_COPIES * 4 * seq_len * text.vocab_size
    kept = layer_activation_bytes(config, seq_len, dtype)
    # One layer at full, and the input of each.
    recomputed = kept // len(layers) + len(layers) * text.hidden_size * seq_len * dtype.itemsize
    window = recomputed if needs_checkpointing(config, seq_len, dtype) else kept
    return MemoryNeed(
        weights=weights * dtype.itemsize,
        streamed=(weights - sum(layers) + max(layers)) * dtype.itemsize,
        window=window + logits,
        streamed_window=recomputed + logits,
    )


def layer_activation_bytes(config: Any, seq_len: int, dtype: torch.dtype) -> int:
    """Bytes that all decoder layers keep of one window for the backward pass, without checkpointing."""
    text = config.get_text_config()
    per_token = text.num_hidden_layers * (_ATTENTION_ACTIVATIONS * text.hidden_size + _mlp_activations(text))
    return per_token * seq_len * dtype.itemsize


def needs_checkpointing(config: Any, seq_len: int, dtype: torch.dtype) -> bool:
    """Whether decoder layers are recomputed in the backward pass, to save memory for a third more time."""
    return layer_activation_bytes(config, seq_len, dtype) > _CHECKPOINT_ABOVE


def training_needs_checkpointing(config: Any, seq_len: int, dtype: torch.dtype) -> bool:
    """As `needs_checkpointing`, where layers attend through codes in float32, and keep what that gives on its way."""
    text = config.get_text_config()
    per_layer = _CODED_ATTENTION_ACTIVATIONS * text.num_attention_heads * seq_len**2 * torch.float32.itemsize
    kept = layer_activation_bytes(config, seq_len, dtype) + text.num_hidden_layers * per_layer
    return kept > _CHECKPOINT_ABOVE


def places_for_weights(config: Any, seq_len: int, device: torch.device) -> dict[int | str, int] | None:
    """Bytes of weights that each place can hold where the device cannot hold them all, as accelerate takes them.

    None: it can. Raises CalibrationError when not even one layer and one window fit.
    """
    need = memory_need(config, seq_len, device)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _available_ram()
    if need.total <= free:
        return None
    least, room = need.streamed + need.streamed_window, free - need.streamed_window
    if least > free:
        raise CalibrationError(
            f"Calibration needs about {_gib(least)} of memory on {device} even where it reads layer after layer from "
            f"disk, but {_gib(free)} are free: use a larger device or a smaller --seq-len."
        )
    if device.type == "cpu":
        return {"cpu": room}
    return {device.index or 0: room, "cpu": int(_SHARE_OF_RAM * _available_ram())}


def check_disk(folder: Path, needed: int) -> None:
    """CalibrationError when the captured activations do not fit the disk of `folder`.

    Args:
        needed: bytes still to be written.
    """
    free = shutil.disk_usage(folder).free
    if needed + _SPARE_DISK > free:
        raise CalibrationError(
            f"The activations need {_gib(needed)} of disk in {folder.parent}, but {_gib(free)} are free: use fewer "
            "--samples or another --out."
        )


def _mlp_activations(text: Any) -> int:
    """Values per token that the MLP of a layer keeps for its backward pass; a token goes to a few experts only."""
    sizes = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    # Some models have one for each layer.
    own: int = max(sizes) if isinstance(sizes, list) else sizes
    num_experts = getattr(text, "num_experts_per_tok", None)
    if not num_experts:
        return _MLP_ACTIVATIONS * own
    width = getattr(text, "moe_intermediate_size", None) or own
    shared = getattr(text, "shared_expert_intermediate_size", None) or 0
    routed: int = num_experts * (_MLP_ACTIVATIONS * width + _EXPERT_ACTIVATIONS * text.hidden_size)
    return routed + _MLP_ACTIVATIONS * shared


def _available_ram() -> int:
    """Bytes that processes can still take: free pages and droppable page cache (Linux, which vLLM needs anyway)."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
