"""The shape of Llama-3-8B: what every GPU benchmark measures, without its weights."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.capacity_figure import LLAMA_3_8B

if TYPE_CHECKING:
    from vllm_antkv.codebook import Codebook, ModelIdentity

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 32, 32, 8, 128
ROPE_THETA = 500_000.0
SCALE = HEAD_SIZE**-0.5
#: Bytes of K and V of a token in one layer, in bfloat16.
BFLOAT16_BYTES = 2 * 2 * NUM_KV_HEADS * HEAD_SIZE
#: Layers with other bits than the preset's, as calibration mixes them at 1 bit.
MIX = {"antkv-1bit": {0: "antkv-2bit", 1: "antkv-2bit", **dict.fromkeys(range(2, 32, 8), "antkv-0.5bit")}}


def make_model(folder: Path, presets: Sequence[str], max_len: int) -> Path:
    """A model folder without weights (`load_format="dummy"`) and tokenizer, with codebooks of random centroids.

    They have all that costs time and that a calibrated one has: mixed layers, orders of channels, errors and scales.
    """
    import torch
    from transformers import LlamaConfig

    from vllm_antkv.codebook import ModelIdentity, codebook_path

    ropes = {"rope_type": "default", "rope_theta": ROPE_THETA}
    sizes = {"head_dim": HEAD_SIZE, "max_position_embeddings": max_len, "rope_parameters": ropes}
    config = LlamaConfig(**LLAMA_3_8B | sizes)
    config.save_pretrained(folder)
    channels = NUM_LAYERS, NUM_KV_HEADS, HEAD_SIZE
    for name in presets:
        layers = tuple(MIX.get(name, {}).get(layer, name) for layer in range(NUM_LAYERS))
        codebook = random_codebook(ModelIdentity.from_hf_config(config), name, layers)
        known = replace(codebook, k_errors=torch.full(channels, 0.1), k_scale=torch.full(channels, 2.0))
        known.save(codebook_path(folder / "antkv", name))
    return folder


def random_codebook(model: "ModelIdentity", preset: str, layers: tuple[str, ...], spread: float = 1) -> "Codebook":
    """Centroids drawn at random, of this standard deviation, and orders of channels as calibration makes them.

    layers: the preset of each.
    """
    import torch

    from vllm_antkv.codebook import FORMAT_VERSION, Codebook, CodebookHeader
    from vllm_antkv.ops.rope import RotaryTable, interleaved
    from vllm_antkv.presets import LAYER_PRESETS

    kinds, size = [LAYER_PRESETS[layer] for layer in layers], model.head_size
    generator = torch.Generator().manual_seed(0)
    rotary = RotaryTable(*torch.zeros(2, 1, size // 2))
    header = CodebookHeader(
        format_version=FORMAT_VERSION,
        preset=preset,
        model=model,
        layers=layers,
        k_orders={kind.name: tuple(interleaved(rotary, size, kind.sub_vector_size)) for kind in kinds},
        sinks=None,
        calibration={},
    )
    shapes = [
        (model.num_kv_heads, kind.num_sub_vectors(size), kind.num_centroids, kind.sub_vector_size) for kind in kinds
    ]
    k, v = (tuple((spread * torch.randn(shape, generator=generator)).half() for shape in shapes) for _ in "kv")
    return Codebook(header, k, v)
