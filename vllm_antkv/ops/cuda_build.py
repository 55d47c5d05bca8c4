"""What the CUDA kernels are compiled for: a kind of layer, and how much shared memory it takes."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from vllm_antkv.config import VQ_BLOCK_SIZE
from vllm_antkv.ops.layer import LayerKind

#: Bytes of a staged table: 256 codes in rows of 256 bytes.
_TABLE = 256 * 256
#: Tokens of a CTA of antkv_encode_store at most, whose centroids are read once.
ENCODE_RUN = 64
#: Compute capability from which bulk copies bring pages; cp.async before.
_BULK_CAPABILITY = (9, 0)
#: What decoding would have, as (warps, spans in the ring, anchor rows per page there), the first that fits. Rows that a
#: span has no room for are read where they are; 8 are 6% of a block.
_SIZES = ((8, 4, 8), (8, 3, 8), (8, 2, 8), (8, 2, 2), (4, 4, 8), (4, 3, 2), (4, 2, 2), (4, 2, 0))


@dataclass(frozen=True)
class Build:
    """What the kernels are compiled for.

    staged_rows: anchor rows of K, and of V, that spans have room for beside the codes of a page; 0: anchors are read
        where they are.
    """

    head_size: int
    group: int
    sub_vector_size: int
    num_centroids: int
    bfloat16: bool
    bulk: bool
    warps: int = 8
    ring: int = 4
    staged_rows: int = 8

    @classmethod
    def of(cls, layer: LayerKind, shared_bytes: int, capability: tuple[int, int]) -> "Build":
        """For a layer on a GPU of this compute capability whose CTAs have `shared_bytes`."""
        build = cls(
            head_size=layer.head_size,
            group=layer.group,
            sub_vector_size=layer.preset.sub_vector_size,
            num_centroids=layer.preset.num_centroids,
            bfloat16=layer.dtype == torch.bfloat16,
            bulk=capability >= _BULK_CAPABILITY,
        )
        return build.fitted(shared_bytes)

    def fitted(self, shared_bytes: int) -> "Build":
        """With as much of everything as there is shared memory for; with the least, where even that does not fit."""
        sizes = [replace(self, warps=warps, ring=ring, staged_rows=rows) for warps, ring, rows in _SIZES]
        return next((build for build in sizes if build.decode_shared_bytes <= shared_bytes), sizes[-1])

    def with_anchors(self, num_bytes: int) -> "Build":
        """For pages whose anchors and their offsets are so many bytes: a span has room for all of them or for none."""
        return self if num_bytes <= self.staged_anchor_bytes else replace(self, staged_rows=0)

    def of_coding(self) -> "Build":
        """The one of all builds with the same antkv_encode_store."""
        return replace(self, group=1, bulk=False, ring=1, staged_rows=0)

    @property
    def encode_threads(self) -> int:
        """Of a CTA of antkv_encode_store."""
        return self.warps * 32

    @property
    def decode_threads(self) -> int:
        """Of a CTA of antkv_decode: `warps` attend, and one brings pages."""
        return (self.warps + 1) * 32

    @property
    def stages_tables(self) -> bool:
        """The centroids are few enough for shared memory: csrc/cuda/staged_tables.cuh, else cached_tables.cuh."""
        return self.num_centroids == 256

    @property
    def num_tables(self) -> int:
        """That are staged: 1 where the centroids of K and V lie side by side in rows of 256 bytes, 2 where they fill a
        row each.
        """
        return self.head_size // 64 if self.stages_tables else 0

    @property
    def exchanges_words(self) -> bool:
        """The upper half of V's table has the words of each quad exchanged, so that lanes read other banks."""
        return self.num_tables == 2 and self.sub_vector_size == 2

    @property
    def table_bytes(self) -> int:
        """In the shared memory of a CTA of antkv_decode."""
        return self.num_tables * _TABLE

    @property
    def code_bytes(self) -> int:
        """Of a K (or V) row."""
        code_bits = self.num_centroids.bit_length() - 1
        return self.head_size // self.sub_vector_size * code_bits // 8

    @property
    def partial_floats(self) -> int:
        """Of a split of one KV head: output, maxima and sums."""
        return self.group * (self.head_size + 2)

    @cached_property
    def decode_shared_bytes(self) -> int:
        """Of a CTA of antkv_decode; csrc/cuda/decode.cu asserts that it is the same."""
        row = self.group * self.head_size * 2
        pages = self.warps * 32 // VQ_BLOCK_SIZE
        # Rows of the rotated query are 4 channels longer; logits of a block take their place. Where a span is of, 8
        # numbers; addresses of its pages, a bias of each query, the exact tokens of each warp.
        rotated = max(2 * (row + self.group * 8), self.group * VQ_BLOCK_SIZE * 4)
        span = pages * self.page_bytes + 2 * row + rotated + 8 * 4 + pages * 8 + (self.group + self.warps) * 4
        logits_and_weights = self.warps * self.group * 32 * (4 + 2 * 2)
        # Queries that share the 8 columns of an mma, where parts of the channels lie side by side.
        merged_queries = 8 // (self.head_size // 32 if self.stages_tables else 2)
        merging = self.warps * merged_queries * self.head_size * 4
        statistics = self.warps * self.group * 2 * 4
        barriers = 2 * self.ring * 8
        content = self.ring * _align(span) + max(logits_and_weights, merging) + statistics + barriers
        return self.table_bytes + _align(content)

    @property
    def staged_anchor_bytes(self) -> int:
        """Room for the anchors of a page in a span: rows of K and V, and their offsets."""
        return 2 * self.staged_rows * self.head_size + _align(2 * 2 * self.staged_rows)

    @property
    def page_bytes(self) -> int:
        """Room for a page in a span."""
        return 2 * VQ_BLOCK_SIZE * self.code_bytes + self.staged_anchor_bytes

    @cached_property
    def encode_shared_bytes(self) -> int:
        """Of a CTA of antkv_encode_store, likewise."""
        num_sub_vectors = self.head_size // self.sub_vector_size
        searches = max(self.warps // num_sub_vectors, 1) * num_sub_vectors
        return ENCODE_RUN * (self.head_size * 4 + searches * (4 + 2) + 8)

    @property
    def definitions(self) -> dict[str, str]:
        """Preprocessor macros."""
        flags = {"BFLOAT16": self.bfloat16, "BULK": self.bulk}
        numbers = {
            "HEAD_SIZE": self.head_size,
            "GROUP": self.group,
            "SUB_VECTOR": self.sub_vector_size,
            "CENTROIDS": self.num_centroids,
            "WARPS": self.warps,
            "RING": self.ring,
            "STAGED_ROWS": self.staged_rows,
            "STAGED_ANCHORS": self.staged_anchor_bytes,
            "DECODE_SHARED": self.decode_shared_bytes,
            "ENCODE_SHARED": self.encode_shared_bytes,
        }
        values = {name: str(value) for name, value in numbers.items()}
        return {f"ANTKV_{k}": v for k, v in (values | {n: str(f).lower() for n, f in flags.items()}).items()}


def _align(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16
