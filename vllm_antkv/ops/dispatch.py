"""Which kernels run the operations of a layer: chosen once at start-up, never changed afterwards."""

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from vllm_antkv.errors import SettingsError
from vllm_antkv.ops import cpu, cuda
from vllm_antkv.ops.layer import LayerKind, LayerOperations, LayerState
from vllm_antkv.ops.paged import ReferenceOperations

_Key = TypeVar("_Key")


@dataclass(frozen=True)
class Kernels:
    """One set of kernels.

    name: what the setting `kernels` calls it.
    family: what the setting calls it together with others; it then means the fastest of them.
    title: what people call it.
    missing: why it cannot run on a device, or None.
    unsupported: what it has no code for in a layer on a device where it is not `missing`, or None.
    build: makes a layer's operations.
    on_gpu: calls only launch kernels, which compile at their first launch and can be replayed from CUDA graphs.
    """

    name: str
    family: str
    title: str
    missing: Callable[[torch.device], str | None]
    unsupported: Callable[[torch.device, LayerKind], str | None]
    build: Callable[[LayerState], LayerOperations]
    on_gpu: bool


@dataclass(frozen=True)
class LayerKernels:
    """The kernels of a layer.

    passed_over: faster ones, and why each does not run it.
    """

    kernels: Kernels
    passed_over: tuple[tuple[Kernels, str], ...] = ()


def _nothing(device: torch.device, layer: LayerKind) -> str | None:
    return None


def _cpu(variant: cpu.Variant) -> Kernels:
    return Kernels(
        variant.name,
        "cpu",
        f"C++ ({variant.name})",
        lambda device: variant.missing() if device.type == "cpu" else "the C++ kernels run on CPUs only",
        # What these have no code for, no other kernels of CPUs can serve at their speed: building them says so.
        _nothing,
        partial(cpu.CpuOperations, variant=variant),
        on_gpu=False,
    )


def _triton_missing(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "the Triton kernels run on GPUs only"
    return None if importlib.util.find_spec("triton") else "triton is not installed"


def _triton(layer: LayerState) -> LayerOperations:
    # Triton is imported only where it runs.
    from vllm_antkv.ops.triton import TritonOperations

    return TritonOperations(layer)


CUDA = Kernels("cuda", "cuda", "CUDA", cuda.missing, cuda.unsupported_on, cuda.CudaOperations, on_gpu=True)
TRITON = Kernels("triton", "triton", "Triton", _triton_missing, _nothing, _triton, on_gpu=True)
REFERENCE = Kernels(
    "reference", "reference", "reference (PyTorch)", lambda device: None, _nothing, ReferenceOperations, on_gpu=False
)
#: What is said of kernels where faster ones were asked for and passed over.
_SLOWER = {
    TRITON: "%s on the Triton kernels, which take several times as long to decode as CUDA's: %s.",
    REFERENCE: "%s on PyTorch reference code, which is SLOW: %s.",
}
#: In the order in which `auto` takes them.
KERNELS = (*map(_cpu, cpu.VARIANTS), CUDA, TRITON, REFERENCE)


def choose(setting: str, device: torch.device, layers: Sequence[LayerKind]) -> list[LayerKernels]:
    """The kernels of each layer on this device: the fastest of those that `setting` asks for.

    Layers for which the CUDA kernels have no code are Triton's, under `cuda` too, where they have code for any.

    Args:
        setting: `auto`, or a name or family.
        device: that has the pages.
        layers: one or more.

    Raises:
        SettingsError: the set that was asked for can run none of the layers here.
    """
    asked_for = [kernels for kernels in KERNELS if setting in ("auto", kernels.name, kernels.family)]
    candidates = [*asked_for, TRITON] if asked_for == [CUDA] else asked_for
    missing = {kernels: kernels.missing(device) for kernels in candidates}
    chosen = []
    for layer in layers:
        passed_over: dict[Kernels, str] = {}
        for kernels in candidates:
            reason = missing[kernels] or kernels.unsupported(device, layer)
            if reason is None:
                chosen.append(LayerKernels(kernels, tuple(passed_over.items())))
                break
            passed_over[kernels] = reason
        else:
            raise _refused(setting, passed_over[asked_for[-1]])
    if not any(layer.kernels in asked_for for layer in chosen):
        raise _refused(setting, dict(chosen[0].passed_over)[asked_for[-1]])
    return chosen


def summary(chosen: Mapping[int, LayerKernels]) -> str:
    """Which kernels run, and for which layers where they differ; keys are indices of layers."""
    groups = _grouped(chosen, lambda layer: layer.kernels.title)
    if len(groups) == 1:
        return next(iter(groups))
    return ", ".join(f"{title} in {_named(layers)}" for title, layers in groups.items())


def cautions(chosen: Mapping[int, LayerKernels]) -> Iterator[str]:
    """A sentence for each reason why layers run on slower kernels than a device of this kind has."""
    slow = {index: layer for index, layer in chosen.items() if layer.kernels in _SLOWER and layer.passed_over}
    for (kernels, why), layers in _grouped(slow, lambda layer: (layer.kernels, _why(layer))).items():
        where = "The antkv cache runs" if len(layers) == len(chosen) else f"In {_named(layers)} the antkv cache runs"
        yield _SLOWER[kernels] % (where, why)


def _why(layer: LayerKernels) -> str:
    """What kernels that are made for the device lack; of a device without such, what all lack."""
    reasons = dict(layer.passed_over)
    if layer.kernels is TRITON:
        return reasons[CUDA]
    return "; ".join(reasons.values())


def _grouped(chosen: Mapping[int, LayerKernels], key: Callable[[LayerKernels], _Key]) -> dict[_Key, list[int]]:
    groups: dict[_Key, list[int]] = {}
    for index, layer in chosen.items():
        groups.setdefault(key(layer), []).append(index)
    return groups


def _named(layers: list[int]) -> str:
    """As `layers 0-3, 5`."""
    runs: list[list[int]] = []
    for index in sorted(layers):
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    listed = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"layer{'s' * (len(layers) > 1)} {listed}"


def _refused(setting: str, why: str) -> SettingsError:
    return SettingsError(f"--additional-config: antkv setting 'kernels' is '{setting}', but {why}: leave it out.")
