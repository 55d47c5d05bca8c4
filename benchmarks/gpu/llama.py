"""The shape of Llama-3-8B: what every GPU benchmark measures, without its weights."""

from collections.abc import Sequence
from pathlib import Path

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

    from vllm_antkv.codebook import FORMAT_VERSION, Codebook, CodebookHeader, ModelIdentity, codebook_path
    from vllm_antkv.ops.rope import RotaryTable, interleaved
    from vllm_antkv.presets import LAYER_PRESETS

    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=max_len,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    identity = ModelIdentity.from_hf_config(config)
    generator = torch.Generator().manual_seed(0)
    half = torch.zeros(1, HEAD_SIZE // 2)
    rotary = RotaryTable(half, half)
    for name in presets:
        layers = tuple(MIX.get(name, {}).get(layer, name) for layer in range(NUM_LAYERS))
        kinds = [LAYER_PRESETS[layer] for layer in layers]
        header = CodebookHeader(
            format_version=FORMAT_VERSION,
            preset=name,
            model=identity,
            layers=layers,
            k_orders={kind.name: tuple(interleaved(rotary, HEAD_SIZE, kind.sub_vector_size)) for kind in kinds},
            sinks=None,
            calibration={},
        )
        path = codebook_path(folder / "antkv", name)
        path.parent.mkdir(exist_ok=True)
        k, v = (
            tuple(
                torch.randn(
                    (NUM_KV_HEADS, kind.num_sub_vectors(HEAD_SIZE), kind.num_centroids, kind.sub_vector_size),
                    generator=generator,
                ).half()
                for kind in kinds
            )
            for _ in "kv"
        )
        channels = NUM_LAYERS, NUM_KV_HEADS, HEAD_SIZE
        Codebook(header, k, v, torch.full(channels, 0.1), torch.full(channels, 2.0)).save(path)
    return folder
