"""Codebooks that nobody learned."""

from dataclasses import replace
from typing import Any

import torch

from vllm_antkv.codebook import FORMAT_VERSION, Codebook, CodebookHeader, ModelIdentity
from vllm_antkv.ops.rope import RotaryTable, interleaved


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


def interleaved_and_scaled(codebook: Codebook) -> Codebook:
    """With sub-vectors of interleaved channels, and with scales of K, which a pair of channels shares."""
    model = codebook.header.model
    pairs = RotaryTable(*2 * [torch.zeros(1, model.head_size // 2)])
    orders = {
        preset.name: tuple(interleaved(pairs, model.head_size, preset.sub_vector_size))
        for preset in codebook.header.layer_presets
    }
    exponents = torch.arange(model.num_layers * model.num_kv_heads * model.head_size // 2) % 3 - 1
    k_scale = exponents.float().exp2().view(model.num_layers, model.num_kv_heads, -1).repeat(1, 1, 2)
    return replace(codebook, header=codebook.header.model_copy(update={"k_orders": orders}), k_scale=k_scale)
