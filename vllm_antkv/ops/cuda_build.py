"""What the CUDA kernels are compiled for: a kind of layer, and how much shared memory it takes."""

from dataclasses import dataclass, replace

import torch

from vllm_antkv.ops.layer import LayerKind

#: Bytes of a staged table: 256 codes in rows of 256 bytes.
_TABLE = 256 * 256
#: Tokens of a CTA of antkv_encode_store at most, whose centroids are read once.
ENCODE_RUN = 64


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
    def of(cls, layer: LayerKind, fp8: bool, shared_bytes: int) -> "Build":
        """For a layer on a GPU whose CTAs have `shared_bytes`."""
        build = cls(
            head_size=layer.head_size,
            group=layer.group,
            sub_vector_size=layer.preset.sub_vector_size,
            num_centroids=layer.preset.num_centroids,
            bfloat16=layer.dtype == torch.bfloat16,
            fp8=fp8,
        )
        return build.fitted(shared_bytes)

    def fitted(self, shared_bytes: int) -> "Build":
        """With as many warps per CTA as there is shared memory for; with the fewest, where even they do not fit."""
        most, fewest = (replace(self, warps=warps) for warps in (8, 4))
        return most if most.decode_shared_bytes <= shared_bytes else fewest

    @property
    def threads(self) -> int:
        """Of a CTA of antkv_decode or antkv_encode_store."""
        return self.warps * 32

    @property
    def stages_tables(self) -> bool:
        """The centroids are few enough for shared memory: csrc/cuda/staged_tables.cuh, else cached_tables.cuh."""
        return self.num_centroids == 256

    @property
    def num_tables(self) -> int:
        """That are staged: 1 where the centroids of K and V lie side by side in rows of 256 bytes, 2 where they fill a
        row each.
        """
        return self.head_size * (1 if self.fp8 else 2) // 128 if self.stages_tables else 0

    @property
    def code_bytes(self) -> int:
        """Of a K (or V) row."""
        code_bits = self.num_centroids.bit_length() - 1
        return self.head_size // self.sub_vector_size * code_bits // 8

    @property
    def partial_floats(self) -> int:
        """Of a split of one KV head: output, maxima and sums."""
        return self.group * (self.head_size + 2)

    @property
    def merge_threads(self) -> int:
        """Of a CTA of antkv_merge."""
        return min(self.group * self.head_size, 1024)

    @property
    def decode_shared_bytes(self) -> int:
        """Of a CTA of antkv_decode; csrc/cuda/decode.cu asserts that it is the same."""
        query = 2 * self.group * self.head_size * 2
        logits_and_weights = self.warps * self.group * 32 * (4 + 2 * 2)
        statistics = self.warps * self.group * 2 * 4
        staged_codes = self.warps * 2 * 2 * 32 * self.code_bytes
        # Queries that share the 8 columns of an mma: with staged tables, sets of 32 channels lie side by side there.
        merged_queries = 8 // (self.head_size // 32) if self.stages_tables else 8
        merging = self.warps * merged_queries * self.head_size * 4
        content = query + logits_and_weights + statistics
        raw_query = self.group * self.head_size * 4
        return self.num_tables * _TABLE + -(-content // 16) * 16 + raw_query + max(staged_codes, merging)

    @property
    def encode_shared_bytes(self) -> int:
        """Of a CTA of antkv_encode_store, likewise."""
        num_sub_vectors = self.head_size // self.sub_vector_size
        searches = max(self.warps // num_sub_vectors, 1) * num_sub_vectors
        return ENCODE_RUN * (self.head_size * 4 + searches * (4 + 2) + 8)

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
