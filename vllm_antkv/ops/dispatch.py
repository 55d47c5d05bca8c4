"""Which kernels run the operations on a device: chosen once at start-up, never changed afterwards."""

import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from vllm_antkv.errors import SettingsError
from vllm_antkv.ops import cpu, cuda
from vllm_antkv.ops.layer import LayerKind, LayerOperations, LayerState
from vllm_antkv.ops.paged import ReferenceOperations

logger = logging.getLogger("vllm.antkv")


@dataclass(frozen=True)
class Kernels:
    """One set of kernels.

    name: what the setting `kernels` calls it.
    family: what the setting calls it together with others; it then means the fastest of them.
    title: what people call it.
    missing: why it cannot run on a device, or not with these layers; or None.
    build: makes a layer's operations.
    on_gpu: calls only launch kernels, which compile at their first launch and can be replayed from CUDA graphs.
    """

    name: str
    family: str
    title: str
    missing: Callable[[torch.device, Sequence[LayerKind]], str | None]
    build: Callable[[LayerState], LayerOperations]
    on_gpu: bool


def _cpu(variant: cpu.Variant) -> Kernels:
    return Kernels(
        variant.name,
        "cpu",
        f"C++ ({variant.name})",
        lambda device, layers: variant.missing() if device.type == "cpu" else "the C++ kernels run on CPUs only",
        partial(cpu.CpuOperations, variant=variant),
        on_gpu=False,
    )


def _triton_missing(device: torch.device, layers: Sequence[LayerKind]) -> str | None:
    if device.type != "cuda":
        return "the Triton kernels run on GPUs only"
    return None if importlib.util.find_spec("triton") else "triton is not installed"


def _cuda_missing(device: torch.device, layers: Sequence[LayerKind]) -> str | None:
    plain = [layer for layer in layers if layer.is_plain]
    if layers and not plain:
        return (
            "the CUDA kernels have no code for sliding windows, soft caps, learned sinks and M-RoPE, and all layers "
            "have one of them"
        )
    return cuda.missing(device, plain)


def _cuda(layer: LayerState) -> LayerOperations:
    """Triton's kernels take the layers whose logits are no mere products, or whose keys rotate by three positions."""
    return cuda.CudaOperations(layer) if layer.kind.is_plain else _triton(layer)


def _triton(layer: LayerState) -> LayerOperations:
    # Triton is imported only where it runs.
    from vllm_antkv.ops.triton import TritonOperations

    return TritonOperations(layer)


REFERENCE = Kernels(
    "reference", "reference", "reference (PyTorch)", lambda device, layers: None, ReferenceOperations, on_gpu=False
)
#: In the order in which `auto` takes them.
KERNELS = (
    *map(_cpu, cpu.VARIANTS),
    Kernels("cuda", "cuda", "CUDA", _cuda_missing, _cuda, on_gpu=True),
    Kernels("triton", "triton", "Triton", _triton_missing, _triton, on_gpu=True),
    REFERENCE,
)


def choose(setting: str, device: torch.device, layers: Sequence[LayerKind] = ()) -> Kernels:
    """The kernels for `setting` (`auto`, or a name or family) on this device, for all of these layers.

    Raises:
        SettingsError: the set that was asked for cannot run here.
    """
    asked_for = [kernels for kernels in KERNELS if setting in ("auto", kernels.name, kernels.family)]
    reasons = {kernels.name: kernels.missing(device, layers) for kernels in asked_for}
    chosen = next((kernels for kernels in asked_for if reasons[kernels.name] is None), None)
    if chosen is None:
        why = reasons[asked_for[-1].name]
        raise SettingsError(f"--additional-config: antkv setting 'kernels' is '{setting}', but {why}: leave it out.")
    if setting == "auto" and chosen is REFERENCE:
        why = "; ".join(reason for reason in reasons.values() if reason)
        logger.warning("The antkv cache runs on PyTorch reference code, which is SLOW: %s.", why)
    return chosen
