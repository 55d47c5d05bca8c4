"""Says before the work begins whether the device, the memory and the disk suffice for it."""

import shutil
from pathlib import Path
from typing import Any

import torch

from vllm_antkv.calibrate.models import compute_dtype
from vllm_antkv.errors import CalibrationError
from vllm_antkv.offline.pretrained import num_parameters

#: float32 tensors as large as the logits that are alive at once in the backward pass of the loss: the logits, their
#: log-softmax and the gradient.
_LOGITS_COPIES = 3
#: Values per token that a decoder layer keeps for its backward pass, in hidden sizes: norms, projections and attention
#: about 8, and an MLP of 4 hidden sizes three times.
_LAYER_ACTIVATIONS = 20
#: Above this many bytes of activations per window, layers are recomputed in the backward pass instead.
_CHECKPOINT_ABOVE = 2 << 30
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


def layer_activation_bytes(config: Any, seq_len: int, dtype: torch.dtype) -> int:
    """Bytes that all decoder layers keep of one window for the backward pass, without checkpointing."""
    text = config.get_text_config()
    per_token = text.num_hidden_layers * text.hidden_size * _LAYER_ACTIVATIONS
    return per_token * seq_len * dtype.itemsize


def needs_checkpointing(config: Any, seq_len: int, dtype: torch.dtype) -> bool:
    """Whether decoder layers are recomputed in the backward pass, to save memory for a third more time."""
    return layer_activation_bytes(config, seq_len, dtype) > _CHECKPOINT_ABOVE


def memory_needed(config: Any, seq_len: int, device: torch.device) -> int:
    """Bytes of the weights and of one window's forward and backward pass.

    Raises CalibrationError when the config describes no model.
    """
    text = config.get_text_config()
    dtype = compute_dtype(config, device)
    weights = num_parameters(config, CalibrationError)
    activations = layer_activation_bytes(config, seq_len, dtype)
    if activations > _CHECKPOINT_ABOVE:
        # One layer at full, and the input of each.
        activations = activations // text.num_hidden_layers + activations // _LAYER_ACTIVATIONS
    logits = _LOGITS_COPIES * 4 * seq_len * text.vocab_size
    return weights * dtype.itemsize + activations + logits


def check_memory(config: Any, seq_len: int, device: torch.device) -> None:
    """CalibrationError when the model and one window do not fit the device's free memory."""
    needed = memory_needed(config, seq_len, device)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _available_ram()
    if needed > free:
        raise CalibrationError(
            f"Calibration needs about {_gib(needed)} of memory on {device}, but {_gib(free)} are free: use a larger "
            "device or a smaller --seq-len."
        )


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


def _available_ram() -> int:
    """Bytes that processes can still take: free pages and droppable page cache (Linux, which vLLM needs anyway)."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
