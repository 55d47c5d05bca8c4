"""The operations of decoding in CUDA C++ (csrc/cuda); Triton does the rest.

A launch hands over addresses on PyTorch's current stream, allocates nothing and waits for nothing: CUDA graphs can hold
it.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from weakref import WeakKeyDictionary

import torch

from vllm_antkv.config import VQ_BLOCK_SIZE
from vllm_antkv.errors import UnsupportedModelError
from vllm_antkv.ops.arguments import rows_argument, step_argument
from vllm_antkv.ops.cuda_arguments import LayerArgument, ResultsArgument, anchor_bytes, layer_argument, tables_of
from vllm_antkv.ops.cuda_backend import Backend, CudaBackend
from vllm_antkv.ops.cuda_build import CLUSTER, ENCODE_RUN, Build
from vllm_antkv.ops.layer import LayerKind, LayerState, VotingBeside
from vllm_antkv.ops.rope import angles_are_linear
from vllm_antkv.ops.step import Step
from vllm_antkv.select.recency import sees_own_block

#: Query heads per KV head that the registers have room for.
MAX_GROUP = 16
HEAD_SIZES = (64, 128)
#: (channels per sub-vector, centroids) of the presets that there is code for.
FORMATS = ((4, 256), (8, 256), (16, 4096), (32, 4096))
#: Compute capability from which there is mma with bfloat16 and cp.async.
_MIN_CAPABILITY = (8, 0)
#: Tokens of a split, a multiple of what the warps of a CTA take together. A constant: who else is served changes no bit
#: of a result. Long enough for what a split costs beside its tokens, short enough for 16 CTAs to share 32K tokens.
SPLIT = 2048
#: Tokens of a tile of antkv_encode_store.
_ENCODE_TILE = 16


def missing(device: torch.device, layers: Sequence[LayerKind] = ()) -> str | None:
    """Why the kernels cannot run on a device, or have no code for one of the layers; None where all is well."""
    if device.type != "cuda":
        return "the CUDA kernels run on NVIDIA GPUs only"
    if importlib.util.find_spec("cupy") is None:
        return "the CUDA kernels need CuPy, which is not installed (pip install 'vllm-antkv[cuda]')"
    capability = torch.cuda.get_device_capability(device)
    if capability < _MIN_CAPABILITY:
        return f"the CUDA kernels need compute capability 8.0 or newer, not {capability[0]}.{capability[1]}"
    try:
        backend = _backend(device)
    except ImportError as error:
        return f"CuPy, which the CUDA kernels need, cannot be loaded ({error})"
    return next((reason for layer in layers if (reason := unsupported(layer, False, backend)) is not None), None)


def unsupported(layer: LayerKind, fp8: bool, backend: Backend) -> str | None:
    """What the kernels have no code for in this layer, on this GPU; or None."""
    preset = layer.preset
    if (preset.sub_vector_size, preset.num_centroids) not in FORMATS:
        return f"the CUDA kernels have no code for {preset.name}"
    if layer.head_size not in HEAD_SIZES:
        return f"the CUDA kernels have head sizes 64 and 128, not {layer.head_size}"
    if fp8 and preset.num_centroids == 256 and layer.head_size != 128:
        return "the CUDA kernels have 256 centroids in FP8 at head size 128 only"
    if layer.group > MAX_GROUP:
        return f"the CUDA kernels have room for {MAX_GROUP} query heads per KV head, not {layer.group}"
    if layer.dtype not in (torch.float16, torch.bfloat16):
        return f"the CUDA kernels take float16 and bfloat16 models, not {layer.dtype}"
    if layer.rotary is not None and not (layer.rotary.is_neox_style and layer.rotary.rotary_dim == layer.head_size):
        return "the CUDA kernels turn whole heads as Llama does, and this model's RoPE is partial or interleaved"
    if layer.rotary is not None and not angles_are_linear(layer.rotary):
        return "the CUDA kernels need angles that are linear in the position, and this model's RoPE is not"
    needed = Build.of(layer, fp8, backend.shared_bytes, backend.capability).decode_shared_bytes
    if needed > backend.shared_bytes:
        return (
            f"the CUDA kernels need {needed} bytes of shared memory for this model, and this GPU has"
            f" {backend.shared_bytes}"
        )
    return None


@cache
def _backend(device: torch.device) -> CudaBackend:
    return CudaBackend(device)


class CudaOperations:
    """See `LayerOperations`.

    fp8: 256 centroids in 8 bits (e4m3, a scale per sub-vector), which halves the shared memory; head size 128 only.
        4,096 are so in any case (`fp8_tables`).
    backend, others: where the kernels run, and what does the rest; None is the layer's GPU, and Triton.
    split: tokens of a split, `SPLIT` where nothing is said.

    Raises:
        UnsupportedModelError: the kernels have no code for this layer, or this GPU has too little shared memory.
    """

    def __init__(
        self,
        layer: LayerState,
        fp8: bool = False,
        backend: Backend | None = None,
        others: VotingBeside | None = None,
        split: int | None = None,
    ) -> None:
        self._split = SPLIT if split is None else split
        self._backend = _backend(layer.recency.k.device) if backend is None else backend
        reason = unsupported(layer.kind, fp8, self._backend)
        if reason is not None:
            raise UnsupportedModelError(f"This model cannot run here: {reason}: use the antkv setting kernels=triton.")
        self._others = _triton(layer) if others is None else others
        build = Build.of(layer.kind, fp8, self._backend.shared_bytes, self._backend.capability)
        self._build = build.with_anchors(anchor_bytes(layer))
        self._backend.load(self._build)
        self._scratch = layer.scratch
        self._votes = layer.config.anchor_rows > 0 and not layer.votes_on_prompt and sees_own_block(layer.last_query)
        # Steps whose single tokens are to vote when they attend, with the sinks among their tokens. A step that never
        # attends is forgotten with whoever held it.
        self._awaited: WeakKeyDictionary[Step, torch.Tensor | None] = WeakKeyDictionary()
        # The structure holds addresses: these tensors must live as long.
        self._tensors = {name: tensor.contiguous() for name, tensor in tables_of(layer, self._build).items()}
        self._layer = layer_argument(layer, self._tensors, self._build, self._split)
        workers = max(self._backend.multiprocessors // len(layer.k_centroids), 1)
        self._alone = _Decoding(self._build, self._layer, workers)
        self._clustered = self._in_clusters(layer)
        self._pool_splits = len(layer.vq.k_codes) * VQ_BLOCK_SIZE // self._split
        # As much as any step will take.
        self._partials(layer.max_num_reqs, len(layer.last_query))

    def _in_clusters(self, layer: LayerState) -> "_Decoding | None":
        """Decoding with K's tables in clusters, where there is one at least for every KV head; else None."""
        clusters = self._backend.clusters // len(layer.k_centroids)
        build = self._build.in_clusters(self._backend.shared_bytes)
        if build is None or clusters == 0:
            return None
        build = build.with_anchors(anchor_bytes(layer))
        self._backend.load(build)
        return _Decoding(build, layer_argument(layer, self._tensors, build, self._split), clusters * CLUSTER)

    def encode_store(self, key: torch.Tensor, value: torch.Tensor, step: Step) -> None:
        """See `LayerOperations`."""
        if not len(key):
            return
        build, num_kv_heads = self._build, key.shape[1]
        # Long runs read centroids less often, but there must be runs for all multiprocessors.
        least, most = -(-len(key) // ENCODE_RUN), -(-len(key) // _ENCODE_TILE)
        num_runs = min(max(self._backend.multiprocessors // (2 * num_kv_heads), least), most)
        self._backend.launch(
            build,
            "antkv_encode_store",
            (num_runs, num_kv_heads, 2),
            build.encode_threads,
            build.encode_shared_bytes,
            (self._layer, step_argument(step), rows_argument(key), rows_argument(value)),
        )

    def anchor_score(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        is_sink: torch.Tensor | None,
        lse: torch.Tensor | None,
        step: Step,
    ) -> None:
        """See `LayerOperations`. In scope `block`, single tokens vote when their step attends, which must follow."""
        if not self._votes:
            self._others.anchor_score(query, key, value, is_sink, lse, step)
            return
        if step.max_query_len > 1:
            self._others.score_longer(query, key, value, is_sink, step)
        if step.num_reqs:
            self._awaited[step] = is_sink

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        lse: torch.Tensor | None,
        step: Step,
    ) -> None:
        """See `LayerOperations`. Longer queries are Triton's; single tokens beside them get the bits they get alone."""
        if step.max_query_len > 1:
            self._others.attend(query, key, value, output, lse, step)
        if step.num_reqs:
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
        num_kv_heads = key.shape[1]
        votes = step in self._awaited
        is_sink = self._awaited.pop(step, None)
        partials, places = self._partials(step.num_reqs, step.max_seq_len)
        capacity = len(partials)
        results = ResultsArgument(
            rows_argument(output),
            None if lse is None else lse.data_ptr(),
            partials.data_ptr(),
            places.data_ptr(),
            capacity,
            None if is_sink is None else is_sink.data_ptr(),
            votes,
        )
        # Both give the same bits. Bringing tables pays where every CTA has a split.
        decoding = self._alone
        if self._clustered is not None and capacity >= self._clustered.workers:
            decoding = self._clustered
        build = decoding.build
        self._backend.launch(
            build,
            "antkv_decode",
            (min(decoding.workers, capacity), num_kv_heads),
            build.decode_threads,
            build.decode_shared_bytes,
            (
                decoding.layer,
                step_argument(step),
                rows_argument(query),
                rows_argument(key),
                rows_argument(value),
                results,
            ),
        )
        self._backend.launch(
            build,
            "antkv_merge",
            (step.num_reqs, num_kv_heads),
            build.merge_threads,
            0,
            (self._layer, step_argument(step), results),
        )
        if votes:
            self._others.close_blocks(key, value, step)

    def _partials(self, num_reqs: int, max_seq_len: int) -> list[torch.Tensor]:
        """Scratch for what the splits leave to be merged, and where each request's start.

        All sequences together are rarely longer than the pool, even where they share blocks. Where they are, the
        kernels make do with it (csrc/cuda/items.cuh).
        """
        capacity = min(num_reqs * -(-max_seq_len // self._split), num_reqs + self._pool_splits)
        shape = (capacity, self._layer.num_kv_heads, self._build.partial_floats)
        return self._scratch((shape, torch.float32), ((num_reqs, 2), torch.int32))


@dataclass(frozen=True)
class _Decoding:
    """A build of antkv_decode, and how many CTAs of a KV head run at a time."""

    build: Build
    layer: LayerArgument
    workers: int


def _triton(layer: LayerState) -> VotingBeside:
    from vllm_antkv.ops.triton import TritonOperations

    return TritonOperations(layer, decodes=False)
