"""Codebooks that nobody learned."""

from typing import Any

import torch

from vllm_antkv.codebook import FORMAT_VERSION, Codebook, CodebookHeader, ModelIdentity


def random_codebook(
    identity: ModelIdentity, preset: str = "antkv-1bit", seed: int = 7, weights: str = "none", **more: Any
) -> Codebook:
    """Centroids far from the rows: what is seen exactly and what is not differ clearly. `more`: of its header."""
    header = CodebookHeader(
        **{"sinks": None, **more},
        format_version=FORMAT_VERSION,
        preset=preset,
        model=identity,
        calibration={"weights": weights},
    )
    generator = torch.Generator().manual_seed(seed)
    k, v = (
        tuple(
            torch.randn(
                identity.num_kv_heads,
                form.num_sub_vectors(identity.head_size),
                form.num_centroids,
                form.sub_vector_size,
                generator=generator,
            ).half()
            for form in header.layer_presets
        )
        for _ in "kv"
    )
    return Codebook(header, k, v)
