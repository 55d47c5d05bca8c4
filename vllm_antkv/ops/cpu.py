"""The operations on a CPU in C++ (csrc/cpu), called with raw pointers.

The kernels are built once per instruction set when the package is installed; the one that fits this processor is loaded
at run time. They are compiled with OpenMP but linked against no OpenMP runtime: the process-wide one that they find is
PyTorch's, whose threads vLLM has bound to cores. A second set of threads would fight with it for the same cores.
"""

import ctypes
import importlib.resources
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

import torch

from vllm_antkv.errors import UnsupportedModelError
from vllm_antkv.ops.arguments import layer_fields, plain_tables, section_offset
from vllm_antkv.ops.byte_tables import byte_tables
from vllm_antkv.ops.c_structs import HEADER, fields
from vllm_antkv.ops.cpu_sources import digest
from vllm_antkv.ops.fixed_point import fixed_tables
from vllm_antkv.ops.layer import LayerState
from vllm_antkv.ops.rope import angles_are_linear
from vllm_antkv.ops.rows import RowsArgument, StepRows, rows_argument
from vllm_antkv.ops.step import StepArgument, StepPlan

_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_CSRC = Path(str(importlib.resources.files("vllm_antkv.csrc")))
#: Query heads per KV head that the kernels have room for.
MAX_GROUP = 64
#: ANTKV_NO_WINDOW of csrc/cpu/antkv.h.
_NO_WINDOW = 1 << 30
#: Vectors of the widest instruction set.
_HEAD_SIZE_MULTIPLE = 16


class LayerArgument(ctypes.Structure):
    """antkv_layer of csrc/cpu/antkv.h."""

    _fields_: ClassVar = fields(HEADER, "antkv_layer")


class WorkArgument(ctypes.Structure):
    """antkv_work of csrc/cpu/antkv.h."""

    _fields_: ClassVar = fields(HEADER, "antkv_work", {"antkv_rows": RowsArgument})


@dataclass(frozen=True)
class Variant:
    """One way to run the kernels.

    name: what the setting `kernels` calls it.
    library: the build it is in (`setup.py`).
    tiles: what multiplies tiles, `antkv_tiles` of csrc/cpu/antkv.h.
    features: what the processor must have, as `torch.cpu.get_capabilities` calls it.
    """

    name: str
    library: str
    tiles: int
    features: tuple[str, ...]

    @property
    def has_registers(self) -> bool:
        """Whether tiles are in registers, of AMX or of plain C++, which multiply keys too."""
        return self.tiles in (1, 3)

    @property
    def path(self) -> Path:
        """Where the library would be."""
        return Path(__file__).with_name(f"_cpu_{self.library}.so")

    def missing(self) -> str | None:
        """Why this cannot run here, or None."""
        has = torch.cpu.get_capabilities()
        lacking = [feature for feature in self.features if not has.get(feature)]
        if lacking:
            return f"the C++ kernels ({self.name}) need a processor with {', '.join(lacking)}"
        if not self.path.is_file():
            return (
                f"the C++ kernels ({self.name}) were not built, as no C++ compiler was found that can, when "
                "vllm-antkv was installed"
            )
        if "amx_tile" in self.features and not torch.cpu._init_amx():
            return "the kernel of this system permits no tile registers"
        try:
            library = loaded(self)
        except (OSError, AttributeError) as error:
            return f"the C++ kernels ({self.name}) cannot be loaded ({error})"
        if library.antkv_sources().decode() != digest(_CSRC):
            return f"the C++ kernels ({self.name}) were built from other sources than those installed"
        if self.tiles and not library.antkv_tiles_multiply_right(self.tiles):
            return f"products of the C++ kernels ({self.name}) are wrong on this processor"
        return None


_AVX512 = ("avx2", "avx512_f", "avx512_bw", "avx512_dq", "avx512_vl")
_TILES = (*_AVX512, "avx512_bf16", "avx512_vbmi", "avx512_vnni")
#: Query heads of a KV head for which a key in whole numbers takes less than one in tile registers, where decoding it
#: takes as long for one head as for sixteen (docs/performance.md).
_FEW_HEADS = 8
#: The fastest first.
VARIANTS = (
    Variant("amx", "tiles", 3, (*_TILES, "amx_tile", "amx_bf16")),
    Variant("avx512_bf16", "tiles", 2, _TILES),
    Variant("avx512", "avx512", 0, _AVX512),
    Variant("avx2", "avx2", 0, ("avx2",)),
)
#: Tiles without instructions for them: slow, for tests on any machine of what is written in tiles.
PLAIN_TILES = Variant("plain tiles", "avx2", 1, ("avx2",))


def best() -> Variant | None:
    """The fastest variant that runs here, if any does."""
    return next((variant for variant in VARIANTS if variant.missing() is None), None)


def missing() -> str | None:
    """Why none of the kernels can run here, or None."""
    return None if best() else VARIANTS[-1].missing()


@cache
def loaded(variant: Variant) -> ctypes.CDLL:
    """The kernels.

    Raises:
        OSError, AttributeError: the library does not load, or lacks a function.
    """
    library = ctypes.CDLL(str(variant.path))
    library.antkv_sources.restype = ctypes.c_char_p
    layer, step, work = map(ctypes.POINTER, (LayerArgument, StepArgument, WorkArgument))
    library.antkv_run.argtypes = library.antkv_attend.argtypes = [layer, step, work]
    library.antkv_run.restype = ctypes.c_int64
    library.antkv_attend.restype = library.antkv_cluster.restype = None
    return library


class CpuOperations:
    """See `LayerOperations`.

    Args:
        variant: which of the kernels run, one that is not `missing`.

    Raises:
        UnsupportedModelError: the kernels have no room for this layer.
    """

    def __init__(self, layer: LayerState, variant: Variant) -> None:
        _check(layer)
        self._library = loaded(variant)
        self._state = layer
        # The structure holds addresses: these tensors must live as long.
        self._tensors = {name: tensor.contiguous() for name, tensor in _tables(layer, variant).items()}
        self._layer = _layer(layer, self._tensors, variant)
        self._work = WorkArgument(timings=ctypes.addressof(layer.counters.timings))
        self._strides: tuple[tuple[int, ...], ...] = ()

    def run(self, rows: StepRows, output: torch.Tensor, step: StepPlan) -> None:
        """See `LayerOperations`.

        Raises:
            ValueError: the heads of a token do not lie side by side.
        """
        state = self._state
        num_anchor_rows = self._library.antkv_run(self._layer, step.argument, self._argument(rows, output, step))
        if num_anchor_rows and state.counts_rows:
            state.counters.count_anchor_rows(num_anchor_rows, 2 * state.vq.k_codes.shape[1])

    def attend(self, rows: StepRows, output: torch.Tensor, step: StepPlan) -> None:
        """See `LayerOperations`."""
        self._library.antkv_attend(self._layer, step.argument, self._argument(rows, output, step))

    def _argument(self, rows: StepRows, output: torch.Tensor, step: StepPlan) -> WorkArgument:
        query, key, value, is_sink = rows.query, rows.key, rows.value, rows.is_sink
        work = self._work
        strides = query.stride(), key.stride(), value.stride(), output.stride()
        if strides != self._strides:
            # Strides rarely change, and checking them takes longer than all else here.
            for name, tensor in (("query", query), ("key", key), ("value", value), ("output", output)):
                setattr(work, name, rows_argument(tensor))
            self._strides = strides
        work.query.data, work.key.data = query.data_ptr(), key.data_ptr()
        work.value.data, work.output.data = value.data_ptr(), output.data_ptr()
        work.is_sink, work.is_prefilling = _address(is_sink), _address(step.is_prefilling)
        return work


def _check(layer: LayerState) -> None:
    num_kv_heads, num_sub_vectors, _, size = layer.k_centroids.shape
    if num_sub_vectors * size % _HEAD_SIZE_MULTIPLE or layer.num_heads // num_kv_heads > MAX_GROUP:
        raise UnsupportedModelError(
            f"The C++ kernels need a head size that is a multiple of {_HEAD_SIZE_MULTIPLE} and at most {MAX_GROUP} "
            "query heads per KV head: serve this model with the antkv setting kernels=reference."
        )
    if layer.rotary is not None and not angles_are_linear(layer.rotary):
        raise UnsupportedModelError(
            "The C++ kernels need rotary angles that grow linearly with the position: serve this model with the antkv "
            "setting kernels=reference."
        )


def _tables(layer: LayerState, variant: Variant) -> dict[str, torch.Tensor]:
    """What the kernels read beside the pages, in their layouts."""
    tables = plain_tables(layer)
    if layer.rotary is not None and layer.rotary.sections is not None:
        tables["sections"] = layer.rotary.sections.int()
    if layer.jensen_weights.any():
        tables["jensen_weights"] = layer.jensen_weights / layer.rules.scale
    if layer.rules.sinks is not None:
        tables["sinks"] = layer.rules.sinks.float()
    for name, centroids in (("k", layer.k_centroids), ("v", layer.v_centroids)):
        # Codebooks are float16: nothing is lost, and twice as much fits into a core's cache.
        tables[f"{name}_centroids"] = centroids.half()
        if layer.preset.code_bits == 8:
            tables[f"{name}_columns"] = centroids.half().transpose(2, 3)
            tables[f"{name}_half_norms"] = centroids.square().sum(-1) / 2
        else:
            tables |= {f"{name}_{part}": table for part, table in byte_tables(centroids.half())._asdict().items()}
    if layer.recency.k.dtype != torch.bfloat16:
        return tables  # float32 multiplies
    if variant.tiles:
        tables["v_bfloat16"] = layer.v_centroids.bfloat16()
    if not variant.has_registers or layer.num_heads // len(layer.k_centroids) <= _FEW_HEADS:
        tables |= fixed_tables(layer.k_centroids, layer.rotary) or {}
    return tables


def _layer(layer: LayerState, tables: dict[str, torch.Tensor], variant: Variant) -> LayerArgument:
    recency, config = layer.recency, layer.config
    _, num_sub_vectors, num_centroids, size = layer.k_centroids.shape
    positions = layer.positions if "sections" in tables else None
    return LayerArgument(
        **layer_fields(layer, tables),
        positions=_address(positions),
        position_stride=0 if positions is None else positions.stride(0),
        recency_scores=section_offset(recency.k, recency.scores),
        dtype=_DTYPES[recency.k.dtype],
        num_heads=layer.num_heads,
        head_size=num_sub_vectors * size,
        sub_vector_size=size,
        num_centroids=num_centroids,
        code_bytes=layer.vq.k_codes.shape[-1],
        prefix=config.prefix,
        score_slots=recency.score_slots,
        has_anchors=config.anchor_share > 0,
        exact_anchors=config.anchor_dtype == "model",
        prefill_reads_cache=config.prefill_reads_cache,
        soft_cap=layer.rules.soft_cap or 0.0,
        window=_NO_WINDOW if layer.rules.window is None else layer.rules.window,
        tiles=variant.tiles,
    )


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
