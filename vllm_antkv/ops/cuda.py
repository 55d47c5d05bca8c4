"""The operations of decoding in CUDA C++ (csrc/cuda); Triton does the rest.

A launch hands over addresses on PyTorch's current stream, allocates nothing and waits for nothing: CUDA graphs can hold
it.
"""

import importlib.util
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from vllm_antkv.ops.triton import TritonOperations

from vllm_antkv.config import VQ_BLOCK_SIZE
from vllm_antkv.errors import UnsupportedModelError
from vllm_antkv.ops.cuda_arguments import ResultsArgument, anchor_bytes, layer_argument, tables_of
from vllm_antkv.ops.cuda_backend import Backend, CudaBackend
from vllm_antkv.ops.cuda_build import ENCODE_RUN, Build
from vllm_antkv.ops.layer import LayerKind, LayerState
from vllm_antkv.ops.rope import angles_are_linear
from vllm_antkv.ops.rows import StepRows, rows_argument
from vllm_antkv.ops.step import StepPlan
from vllm_antkv.select.recency import sees_own_block

#: Query heads per KV head that the registers have room for.
MAX_GROUP = 16
HEAD_SIZES = (64, 128)
#: (channels per sub-vector, centroids) of the presets that there is code for.
FORMATS = ((2, 256), (4, 256), (8, 256), (16, 256), (32, 256), (16, 4096), (32, 4096))
#: Compute capability from which there is mma with bfloat16 and cp.async.
_MIN_CAPABILITY = (8, 0)
#: Tokens of a split, a multiple of what the warps of a CTA take together. A constant: who else is served changes no bit
#: of a result. Long enough for what a split costs beside its tokens, short enough for 16 CTAs to share 32K tokens.
SPLIT = 2048
#: Tokens of a tile of antkv_encode_store.
_ENCODE_TILE = 16


def missing(device: torch.device) -> str | None:
    """Why the kernels cannot run on a device; None where all is well."""
    if device.type != "cuda":
        return "the CUDA kernels run on NVIDIA GPUs only"
    if importlib.util.find_spec("cupy") is None:
        return "the CUDA kernels need CuPy, which is not installed (pip install 'vllm-antkv[cuda]')"
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY:
        return f"the CUDA kernels need compute capability 8.0 or newer, not {capability[0]}.{capability[1]}"
    try:
        _backend(device)
    except ImportError as error:
        return f"CuPy, which the CUDA kernels need, cannot be loaded ({error})"
    return None


def unsupported_on(device: torch.device, layer: LayerKind) -> str | None:
    """What the kernels have no code for in this layer, on a device where they are not `missing`; or None."""
    return unsupported(layer, _backend(device))


class GpuLimits(Protocol):
    """Of a GPU: see `Backend`."""

    @property
    def shared_bytes(self) -> int:
        """The most of a CTA."""
        ...

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability."""
        ...


def unsupported(layer: LayerKind, gpu: GpuLimits) -> str | None:
    """What the kernels have no code for in this layer, on this GPU; or None."""
    if not layer.is_plain:
        return "the CUDA kernels have no code for sliding windows, soft caps, learned sinks and M-RoPE"
    preset = layer.preset
    if (preset.sub_vector_size, preset.num_centroids) not in FORMATS:
        return f"the CUDA kernels have no code for {preset.name}"
    if layer.head_size not in HEAD_SIZES:
        return f"the CUDA kernels have head sizes 64 and 128, not {layer.head_size}"
    if layer.group > MAX_GROUP:
        return f"the CUDA kernels have room for {MAX_GROUP} query heads per KV head, not {layer.group}"
    if layer.dtype not in (torch.float16, torch.bfloat16):
        return f"the CUDA kernels take float16 and bfloat16 models, not {layer.dtype}"
    if layer.rotary is not None and not (layer.rotary.is_neox_style and layer.rotary.rotary_dim == layer.head_size):
        return "the CUDA kernels rotate whole heads as Llama does, and this model's RoPE is partial or interleaved"
    if layer.rotary is not None and not angles_are_linear(layer.rotary):
        return "the CUDA kernels need angles that are linear in the position, and this model's RoPE is not"
    needed = Build.of(layer, gpu.shared_bytes, gpu.capability).decode_shared_bytes
    if needed > gpu.shared_bytes:
        return (
            f"the CUDA kernels need {needed} bytes of shared memory for this model, and this GPU has {gpu.shared_bytes}"
        )
    return None


@cache
def _backend(device: torch.device) -> CudaBackend:
    return CudaBackend(device)


class CudaOperations:
    """See `LayerOperations`.

    backend, triton: where the kernels run, and what does the rest; None is the layer's GPU, and Triton on it. Tests on
        CPUs hand over `ReferenceOperations`, which has the same methods.
    split: tokens of a split, `SPLIT` where nothing is said.

    Raises:
        UnsupportedModelError: the kernels have no code for this layer, or this GPU has too little shared memory.
    """

    def __init__(
        self,
        layer: LayerState,
        backend: Backend | None = None,
        triton: "TritonOperations | Any" = None,
        split: int | None = None,
    ) -> None:
        self._split = SPLIT if split is None else split
        self._backend = _backend(layer.recency.k.device) if backend is None else backend
        reason = unsupported(layer.kind, self._backend)
        if reason is not None:
            raise UnsupportedModelError(f"This model cannot run here: {reason}: use the antkv setting kernels=triton.")
        self._triton = _triton(layer) if triton is None else triton
        build = Build.of(layer.kind, self._backend.shared_bytes, self._backend.capability)
        self._build = build.with_anchors(anchor_bytes(layer))
        self._backend.load(self._build)
        self._scratch = layer.scratch
        self._has_anchors = layer.config.anchor_rows > 0
        # The kernels count votes of queries that see the keys of their block exactly, and that nobody rejects.
        sees_keys = self._has_anchors and sees_own_block(layer.last_query)
        self._score_slots = layer.recency.score_slots
        self._votes = sees_keys and self._score_slots == 1
        # The structure holds addresses: these tensors must live as long.
        self._tensors = {name: tensor.contiguous() for name, tensor in tables_of(layer, self._build).items()}
        self._layer = layer_argument(layer, self._tensors, self._build, self._split)
        self._workers = max(self._backend.multiprocessors // len(layer.k_centroids), 1)
        self._pool_splits = self._score_slots * (len(layer.vq.k_codes) * VQ_BLOCK_SIZE // self._split)
        # As much as any step will take: what the splits leave to be merged, and how many are written.
        shape = self._capacity(layer.max_num_reqs, len(layer.last_query)), len(layer.k_centroids)
        self._partials = (*shape, self._build.partial_floats), torch.float32
        layer.scratch(self._partials)
        self._written = torch.zeros(shape, dtype=torch.int32, device=layer.recency.k.device)

    def run(self, rows: StepRows, output: torch.Tensor, step: StepPlan) -> None:
        """See `LayerOperations`. Single tokens vote on their block while they attend."""
        self.encode_store(rows, step)
        if not self._votes and self._has_anchors:
            self._triton.anchor_score(rows, step)
        elif self._votes and step.max_query_len > 1:
            self._triton.anchor_score(rows, step, singles=False)
        self._attend(rows, output, step, self._votes)
        if self._votes and self._decodes(step):
            self._triton.close_blocks(rows, step)

    def attend(self, rows: StepRows, output: torch.Tensor, step: StepPlan) -> None:
        """See `LayerOperations`."""
        self._attend(rows, output, step, votes=False)

    def encode_store(self, rows: StepRows, step: StepPlan) -> None:
        """See `ReferenceOperations`."""
        num_tokens, num_kv_heads, _ = rows.key.shape
        if not num_tokens:
            return
        build = self._build
        # Long runs read centroids less often, but there must be runs for all multiprocessors.
        least, most = -(-num_tokens // ENCODE_RUN), -(-num_tokens // _ENCODE_TILE)
        num_runs = min(max(self._backend.multiprocessors // (2 * num_kv_heads), least), most)
        self._backend.launch(
            build,
            "antkv_encode_store",
            (num_runs, num_kv_heads, 2),
            build.encode_threads,
            build.encode_shared_bytes,
            (self._layer, step.argument, *rows.arguments[1:]),
        )

    def _attend(self, rows: StepRows, output: torch.Tensor, step: StepPlan, votes: bool) -> None:
        """Longer queries are Triton's; single tokens and drafts beside them get the bits that they get alone."""
        if step.max_query_len > self._score_slots:
            self._triton.attend(rows, output, step, fewest=self._score_slots + 1)
        if self._decodes(step):
            self._decode(rows, output, step, votes)

    def _decodes(self, step: StepPlan) -> bool:
        """Whether a step may have single tokens or drafts."""
        return step.num_reqs > 0 and step.min_query_len <= self._score_slots

    def _decode(self, rows: StepRows, output: torch.Tensor, step: StepPlan, votes: bool) -> None:
        num_kv_heads, is_sink = rows.key.shape[1], rows.is_sink
        (partials,) = self._scratch(self._partials)
        capacity = self._capacity(step.num_reqs, step.max_seq_len)
        results = ResultsArgument(
            rows_argument(output),
            partials.data_ptr(),
            self._written.data_ptr(),
            capacity,
            is_sink.data_ptr() if votes and is_sink is not None else None,
            votes,
        )
        build = self._build
        self._backend.launch(
            build,
            "antkv_decode",
            (min(self._workers, capacity), num_kv_heads),
            build.decode_threads,
            build.decode_shared_bytes,
            (self._layer, step.argument, *rows.arguments, results),
        )

    def _capacity(self, num_reqs: int, max_seq_len: int) -> int:
        """Splits of a step's queries at most.

        All sequences together are rarely longer than the pool, even where they share blocks. Where they are, the
        kernels make do with it (csrc/cuda/split_scheduler.cuh).
        """
        num_queries = num_reqs * self._score_slots
        return min(num_queries * -(-max_seq_len // self._split), num_queries + self._pool_splits)


def _triton(layer: LayerState) -> "TritonOperations":
    from vllm_antkv.ops.triton import TritonOperations

    return TritonOperations(layer, decodes=False)
