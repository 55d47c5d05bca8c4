"""The operations of decoding in CUDA C++ (csrc/cuda), compiled at run time; Triton does the rest.

The kernels are compiled for one kind of layer at a time (head size, preset, query heads per KV head, dtype) with NVRTC
through CuPy, once per machine: the result is kept in the user's cache. A launch hands over addresses on PyTorch's
current stream, allocates nothing once the scratch memory has its size, and waits for nothing: CUDA graphs can hold it.
"""

import ctypes
import hashlib
import importlib
import importlib.resources
import importlib.util
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from platformdirs import user_cache_path

from vllm_antkv.errors import UnsupportedModelError
from vllm_antkv.ops.layer import LayerOperations, LayerState
from vllm_antkv.ops.rope import angles_are_linear
from vllm_antkv.ops.step import Step

#: Query heads per KV head that the registers have room for.
MAX_GROUP = 16
HEAD_SIZES = (64, 128)
SUB_VECTOR_SIZES = (4, 8)
#: Compute capability from which there is mma with bfloat16 and cp.async.
_MIN_CAPABILITY = (8, 0)
#: Tokens of a split: at least this, since a CTA reads the tables once, and never more splits than this per request.
#: It depends on the longest request the server takes and on nothing else: results do not depend on who else is served.
_MIN_SPLIT, _MAX_SPLITS = 1024, 16
#: Tokens that the warps of a CTA take together; splits are multiples of it.
_SPAN = 256
#: Bytes of a staged table: 256 codes in rows of 256 bytes.
_TABLE = 256 * 256
_ENCODE_RUN, _ENCODE_THREADS = 16, 256
#: Largest e4m3 number.
_FP8_MAX = 448.0


def missing(device: torch.device, layer: LayerState | None = None) -> str | None:
    """Why the kernels cannot run on a device (and this layer), or None."""
    if device.type != "cuda":
        return "the CUDA kernels run on NVIDIA GPUs only"
    if importlib.util.find_spec("cupy") is None:
        return "the CUDA kernels need CuPy, which is not installed (pip install 'cupy-cuda13x>=14')"
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY:
        return f"the CUDA kernels need compute capability 8.0 or newer, not {capability[0]}.{capability[1]}"
    return None if layer is None else unsupported(layer)


def unsupported(layer: LayerState) -> str | None:
    """What the kernels have no code for in this layer, or None."""
    num_kv_heads, num_sub_vectors, num_centroids, size = layer.k_centroids.shape
    head_size, group = num_sub_vectors * size, layer.num_heads // num_kv_heads
    if num_centroids != 256 or size not in SUB_VECTOR_SIZES:
        return f"the CUDA kernels have antkv-1bit and antkv-2bit, not {layer.preset.name}"
    if head_size not in HEAD_SIZES:
        return f"the CUDA kernels have head sizes 64 and 128, not {head_size}"
    if group > MAX_GROUP:
        return f"the CUDA kernels have room for {MAX_GROUP} query heads per KV head, not {group}"
    if layer.recency.k.dtype not in (torch.float16, torch.bfloat16):
        return f"the CUDA kernels take float16 and bfloat16 models, not {layer.recency.k.dtype}"
    if layer.rotary is not None and not (layer.rotary.is_neox_style and layer.rotary.rotary_dim == head_size):
        return "the CUDA kernels turn whole heads as Llama does, and this model's RoPE is partial or interleaved"
    if layer.rotary is not None and not angles_are_linear(layer.rotary):
        return "the CUDA kernels need angles that are linear in the position, and this model's RoPE is not"
    return None


class LayerArgument(ctypes.Structure):
    """Layer of csrc/cuda/layer.cuh."""

    _fields_: ClassVar = [
        ("vq", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("vq_block_stride", "vq_head_stride")),
        *((name, ctypes.c_int64) for name in ("v_codes", "k_anchors", "v_anchors", "anchor_offsets")),
        ("recency", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("recency_block_stride", "recency_head_stride", "recency_v")),
        *((name, ctypes.c_void_p) for name in ("k_centroids", "v_centroids", "k_half_norms", "v_half_norms")),
        *((name, ctypes.c_void_p) for name in ("tables", "k_scales", "v_scales", "cos", "sin", "last_query")),
        *((name, ctypes.c_float) for name in ("scale", "rotary_magnitude")),
        *((name, ctypes.c_int32) for name in ("num_kv_heads", "rotary_dim", "is_neox_style", "rotary_rows")),
        *((name, ctypes.c_int32) for name in ("recency_block_size", "anchor_rows", "split", "unused")),
    ]


class _StepArgument(ctypes.Structure):
    """Step."""

    _fields_: ClassVar = [
        *((name, ctypes.c_void_p) for name in ("query_start_loc", "seq_lens", "vq_table", "recency_table")),
        *((name, ctypes.c_int64) for name in ("vq_stride", "recency_stride", "num_reqs")),
    ]


class _RowsArgument(ctypes.Structure):
    """Rows."""

    _fields_: ClassVar = [("data", ctypes.c_void_p), ("stride", ctypes.c_int64)]


#: What a kernel takes: structures by value, integers of 64 bits, addresses.
Argument = ctypes.Structure | ctypes.c_int64 | ctypes.c_void_p


@dataclass(frozen=True)
class Build:
    """What the kernels are compiled for."""

    head_size: int
    group: int
    sub_vector_size: int
    num_centroids: int
    bfloat16: bool
    fp8: bool
    warps: int = 8

    @classmethod
    def of(cls, layer: LayerState, fp8: bool, shared_bytes: int) -> "Build":
        """For a layer on a GPU whose CTAs have `shared_bytes`."""
        num_kv_heads, num_sub_vectors, num_centroids, size = layer.k_centroids.shape
        build = cls(
            head_size=num_sub_vectors * size,
            group=layer.num_heads // num_kv_heads,
            sub_vector_size=size,
            num_centroids=num_centroids,
            bfloat16=layer.recency.k.dtype == torch.bfloat16,
            fp8=fp8,
        )
        return build.fitted(shared_bytes)

    def fitted(self, shared_bytes: int) -> "Build":
        """With as many warps per CTA as there is shared memory for."""
        builds = [replace(self, warps=warps) for warps in (8, 4)]
        for build in builds:
            if build.decode_shared_bytes <= shared_bytes:
                return build
        raise UnsupportedModelError(
            f"The CUDA kernels need {builds[-1].decode_shared_bytes} bytes of shared memory for this layer, and "
            f"this GPU has {shared_bytes}: serve this model with the antkv setting kernels=triton."
        )

    @property
    def num_tables(self) -> int:
        """1 where the centroids of K and V lie side by side in rows of 256 bytes, 2 where they fill a row each."""
        return self.head_size * (1 if self.fp8 else 2) // 128

    @property
    def partial_floats(self) -> int:
        """Of a split of one KV head: output, maxima and sums."""
        return self.group * (self.head_size + 2)

    @property
    def decode_shared_bytes(self) -> int:
        """Of a CTA of antkv_decode; csrc/cuda/decode.cu asserts that it is the same."""
        query = 2 * self.group * self.head_size * 2
        logits_and_weights = self.warps * self.group * 32 * (4 + 2 * 2)
        statistics = self.warps * self.group * 2 * 4
        staged_codes = self.warps * 2 * 2 * 32 * self.head_size // self.sub_vector_size
        merging = self.warps * 256 * 4
        content = query + logits_and_weights + statistics
        return self.num_tables * _TABLE + -(-content // 16) * 16 + max(staged_codes, merging)

    @property
    def encode_shared_bytes(self) -> int:
        """Of a CTA of antkv_encode_store, likewise."""
        return _ENCODE_RUN * (self.head_size * 4 + self.head_size // self.sub_vector_size * 2 + 8)

    @property
    def definitions(self) -> dict[str, str]:
        """Preprocessor macros."""
        flags = {"BFLOAT16": self.bfloat16, "FP8": self.fp8}
        numbers = {
            "HEAD_SIZE": self.head_size,
            "GROUP": self.group,
            "SUB_VECTOR": self.sub_vector_size,
            "CENTROIDS": self.num_centroids,
            "WARPS": self.warps,
            "DECODE_SHARED": self.decode_shared_bytes,
            "ENCODE_SHARED": self.encode_shared_bytes,
        }
        values = {name: str(value) for name, value in numbers.items()}
        return {f"ANTKV_{k}": v for k, v in (values | {n: str(f).lower() for n, f in flags.items()}).items()}


class Backend(Protocol):
    """Where kernels run: a GPU, or the emulation of one in tests.

    multiprocessors: CTAs that run at a time.
    shared_bytes: the most shared memory of a CTA.
    """

    multiprocessors: int
    shared_bytes: int

    def load(self, build: Build) -> None:
        """Make the kernels of a build ready."""
        ...

    def launch(
        self, build: Build, kernel: str, grid: tuple[int, ...], threads: int, shared: int, arguments: Sequence[Argument]
    ) -> None:
        """Start a kernel."""
        ...


class CudaBackend:
    """See `Backend`."""

    def __init__(self, device: torch.device) -> None:
        cupy = importlib.import_module("cupy")
        properties = torch.cuda.get_device_properties(device)
        self.multiprocessors: int = properties.multi_processor_count
        self.shared_bytes: int = cupy.cuda.Device(device.index).attributes["MaxSharedMemoryPerBlockOptin"]
        self._device = device
        self._architecture = f"sm_{properties.major}{properties.minor}"
        self._kernels: dict[tuple[Build, str], Any] = {}

    def load(self, build: Build) -> None:
        """See `Backend`."""
        if (build, "antkv_decode") in self._kernels:
            return
        cupy = importlib.import_module("cupy")
        shared = {"encode_store": {"antkv_encode_store": 0}}
        shared["decode"] = {"antkv_decode": build.decode_shared_bytes, "antkv_merge": 0}
        with torch.cuda.device(self._device):
            for source, kernels in shared.items():
                module = cupy.RawModule(path=str(cubin(source, build, self._architecture)))
                for name, num_bytes in kernels.items():
                    kernel = module.get_function(name)
                    if num_bytes:
                        kernel.max_dynamic_shared_size_bytes = num_bytes
                    self._kernels[build, name] = kernel

    def launch(
        self, build: Build, kernel: str, grid: tuple[int, ...], threads: int, shared: int, arguments: Sequence[Argument]
    ) -> None:
        """See `Backend`."""
        pointer = importlib.import_module("cupy.cuda.function").CPointer
        stream = importlib.import_module("cupy.cuda").Stream.from_external
        # CuPy reads an argument from where the pointer says, whatever its type.
        pointers = tuple(pointer(ctypes.addressof(argument)) for argument in arguments)
        with stream(_Stream(torch.cuda.current_stream(self._device).cuda_stream)):
            self._kernels[build, kernel](grid, (threads,), pointers, shared_mem=shared)


@dataclass(frozen=True)
class _Stream:
    """A stream of PyTorch's, in the protocol that CuPy takes streams in."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


def cubin(source: str, build: Build, architecture: str) -> Path:
    """Machine code of csrc/cuda/<source>.cu, compiled where the user's cache does not hold it."""
    nvrtc = importlib.import_module("cupy_backends.cuda.libs.nvrtc")
    folder = importlib.resources.files("vllm_antkv.csrc") / "cuda"
    headers = {file.name.encode(): file.read_bytes() for file in folder.iterdir() if file.name.endswith(".cuh")}
    text = (folder / f"{source}.cu").read_text()
    options = [f"--gpu-architecture={architecture}", "--std=c++17"]
    options += [f"-D{name}={value}" for name, value in build.definitions.items()]
    identity = repr((nvrtc.getVersion(), options, text, sorted(headers.items())))
    name = f"{source}-{architecture}-{hashlib.sha256(identity.encode()).hexdigest()[:24]}.cubin"
    path = user_cache_path("vllm-antkv") / "kernels" / name
    if not path.is_file():
        program = nvrtc.createProgram(text, f"{source}.cu", list(headers.values()), list(headers))
        try:
            nvrtc.compileProgram(program, options)
            code = nvrtc.getCUBIN(program)
        except nvrtc.NVRTCError as error:
            raise RuntimeError(f"csrc/cuda/{source}.cu: {nvrtc.getProgramLog(program)}") from error
        finally:
            nvrtc.destroyProgram(program)
        _write_atomically(path, code)
    return path


def _write_atomically(path: Path, content: bytes) -> None:
    """Other processes see the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    os.replace(file.name, path)


@cache
def _backend(device: torch.device) -> CudaBackend:
    return CudaBackend(device)


class CudaOperations:
    """See `LayerOperations`.

    fp8: centroids in 8 bits (e4m3, a scale per sub-vector), which halves the shared memory; head size 128 only.
    backend, others: where the kernels run, and what does the rest; None is the layer's GPU, and Triton.

    Raises:
        UnsupportedModelError: the kernels have no code for this layer, or this GPU has too little shared memory.
    """

    def __init__(
        self,
        layer: LayerState,
        fp8: bool = False,
        backend: Backend | None = None,
        others: LayerOperations | None = None,
    ) -> None:
        reason = unsupported(layer)
        if fp8 and layer.k_centroids.shape[1] * layer.preset.sub_vector_size != 128:
            reason = "the CUDA kernels have FP8 centroids for head size 128 only"
        if reason is not None:
            raise UnsupportedModelError(f"This model cannot run here: {reason}: use the antkv setting kernels=triton.")
        device = layer.recency.k.device
        self._backend = _backend(device) if backend is None else backend
        self._others = _triton(layer) if others is None else others
        self._build = Build.of(layer, fp8, self._backend.shared_bytes)
        self._backend.load(self._build)
        self._scratch = layer.scratch
        # The structure holds addresses: these tensors must live as long.
        self._tensors = {name: tensor.contiguous() for name, tensor in _tables(layer, self._build).items()}
        self._layer = _layer_argument(layer, self._tensors)
        # As much as any step will take.
        self._partials(layer.max_num_reqs, len(layer.last_query))

    def encode_store(self, key: torch.Tensor, value: torch.Tensor, step: Step) -> None:
        """See `LayerOperations`."""
        if not len(key):
            return
        grid = (-(-len(key) // _ENCODE_RUN), key.shape[1], 2)
        arguments = (self._layer, _step(step), _rows(key), _rows(value))
        shared = self._build.encode_shared_bytes
        self._backend.launch(self._build, "antkv_encode_store", grid, _ENCODE_THREADS, shared, arguments)

    def anchor_score(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        is_sink: torch.Tensor | None,
        lse: torch.Tensor | None,
        step: Step,
    ) -> None:
        """See `LayerOperations`."""
        self._others.anchor_score(query, key, value, is_sink, lse, step)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor | None,
        step: Step,
    ) -> None:
        """See `LayerOperations`. Steps with longer queries, which are no graphs, are Triton's."""
        if step.max_query_len > 1:
            self._others.attend(query, key, value, output, lse, step)
        elif step.num_reqs:
            self._decode(query, key, value, output, lse, step)

    def _decode(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor | None,
        step: Step,
    ) -> None:
        build, num_kv_heads = self._build, key.shape[1]
        partials = self._partials(step.num_reqs, step.max_seq_len)
        max_splits = partials.shape[1]
        common = (ctypes.c_int64(max_splits), ctypes.c_void_p(partials.data_ptr()))
        workers = min(max(self._backend.multiprocessors // num_kv_heads, 1), step.num_reqs * max_splits)
        rows = (_rows(query), _rows(key), _rows(value))
        self._backend.launch(
            build,
            "antkv_decode",
            (workers, num_kv_heads),
            build.warps * 32,
            build.decode_shared_bytes,
            (self._layer, _step(step), *rows, *common),
        )
        self._backend.launch(
            build,
            "antkv_merge",
            (step.num_reqs, num_kv_heads),
            build.head_size,
            0,
            (
                self._layer,
                _step(step),
                _rows(output),
                ctypes.c_void_p(None if lse is None else lse.data_ptr()),
                *common,
            ),
        )

    def _partials(self, num_reqs: int, max_seq_len: int) -> torch.Tensor:
        """Scratch for what the splits leave to be merged."""
        max_splits = -(-max_seq_len // self._layer.split)
        shape = (num_reqs, max_splits, self._layer.num_kv_heads, self._build.partial_floats)
        (partials,) = self._scratch((shape, torch.float32))
        return partials


def _triton(layer: LayerState) -> LayerOperations:
    from vllm_antkv.ops.triton import TritonOperations

    return TritonOperations(layer)


def _tables(layer: LayerState, build: Build) -> dict[str, torch.Tensor]:
    """What the kernels read beside the pages, in their layouts."""
    tables = {"last_query": layer.last_query}
    columns = []
    for name, centroids in (("k", layer.k_centroids), ("v", layer.v_centroids)):
        tables[f"{name}_centroids"] = centroids.half()
        tables[f"{name}_half_norms"] = centroids.float().square().sum(-1) / 2
        entries = centroids.half()
        if build.fp8:
            # The channels of a rotary pair share their scale, so that it can ride on the cosines.
            scales = _power_of_two_scales(centroids, shared_by_halves=name == "k")
            tables[f"{name}_scales"] = scales
            entries = (centroids.float() / scales[:, :, None, None]).to(torch.float8_e4m3fn)
        # A row per code: csrc/cuda/tables.cuh.
        rows = entries.transpose(1, 2).flatten(2)
        columns.append(rows.contiguous().view(torch.uint8))
    tables["tables"] = torch.cat(columns, dim=1 if build.num_tables == 2 else 2)
    if layer.rotary is not None:
        tables |= {"cos": layer.rotary.cos, "sin": layer.rotary.sin}
    return tables


def _power_of_two_scales(centroids: torch.Tensor, shared_by_halves: bool) -> torch.Tensor:
    """(num_kv_heads, num_sub_vectors) float32. e4m3 has an exponent of its own: finer scales would gain nothing."""
    largest = centroids.float().abs().amax((2, 3)).clamp(min=1e-6)
    if shared_by_halves:
        halves = largest.unflatten(1, (2, -1)).amax(1, keepdim=True)
        largest = halves.expand(-1, 2, -1).flatten(1)
    return torch.exp2(torch.ceil(torch.log2(largest / _FP8_MAX)))


def _layer_argument(layer: LayerState, tables: dict[str, torch.Tensor]) -> LayerArgument:
    vq, recency, rotary = layer.vq, layer.recency, layer.rotary
    wanted = -(-len(layer.last_query) // _MAX_SPLITS)
    return LayerArgument(
        vq=vq.k_codes.data_ptr(),
        vq_block_stride=_stride(vq.k_codes, 0),
        vq_head_stride=_stride(vq.k_codes, 1),
        v_codes=_section(vq.k_codes, vq.v_codes),
        k_anchors=_section(vq.k_codes, vq.k_anchors),
        v_anchors=_section(vq.k_codes, vq.v_anchors),
        anchor_offsets=_section(vq.k_codes, vq.anchor_offsets),
        recency=recency.k.data_ptr(),
        recency_block_stride=_stride(recency.k, 0),
        recency_head_stride=_stride(recency.k, 1),
        recency_v=_section(recency.k, recency.v),
        **{name: tensor.data_ptr() for name, tensor in tables.items()},
        scale=layer.scale,
        rotary_magnitude=1.0 if rotary is None else float(rotary.cos[0, 0]),
        num_kv_heads=layer.k_centroids.shape[0],
        rotary_dim=0 if rotary is None else rotary.rotary_dim,
        is_neox_style=rotary is None or rotary.is_neox_style,
        rotary_rows=0 if rotary is None else len(rotary.cos),
        recency_block_size=recency.k.shape[2],
        anchor_rows=vq.k_anchors.shape[2],
        split=max(_MIN_SPLIT, -(-wanted // _SPAN) * _SPAN),
    )


@lru_cache(maxsize=1)
def _step(step: Step) -> _StepArgument:
    """All layers of a model and their operations are given the same step."""
    return _StepArgument(
        step.query_start_loc.data_ptr(),
        step.seq_lens.data_ptr(),
        step.vq_block_table.data_ptr(),
        step.recency_block_table.data_ptr(),
        step.vq_block_table.stride(0),
        step.recency_block_table.stride(0),
        step.num_reqs,
    )


def _rows(rows: torch.Tensor) -> _RowsArgument:
    """(num_tokens, heads, head_size) whose heads lie side by side, as they come from one projection."""
    return _RowsArgument(rows.data_ptr(), rows.stride(0))


def _stride(pages: torch.Tensor, dim: int) -> int:
    return pages.stride(dim) * pages.itemsize


def _section(first: torch.Tensor, section: torch.Tensor) -> int:
    return section.data_ptr() - first.data_ptr()
