"""The shape of Llama-3-8B: what every GPU benchmark measures, without its weights."""

from collections.abc import Sequence
from pathlib import Path

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 32, 32, 8, 128
ROPE_THETA = 500_000.0
SCALE = HEAD_SIZE**-0.5
#: Bytes of K and V of a token in one layer, in bfloat16.
BFLOAT16_BYTES = 2 * 2 * NUM_KV_HEADS * HEAD_SIZE


def make_model(folder: Path, presets: Sequence[str], max_len: int) -> Path:
    """A model folder without weights (`load_format="dummy"`) and tokenizer, with codebooks of random centroids."""
    import torch
    from transformers import LlamaConfig

    from vllm_antkv.codebook import FORMAT_VERSION, Codebook, CodebookHeader, ModelIdentity, codebook_path
    from vllm_antkv.presets import get_preset

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
    for name in presets:
        preset = get_preset(name)
        sub_vectors = preset.num_sub_vectors(HEAD_SIZE)
        shape = (NUM_LAYERS, NUM_KV_HEADS, sub_vectors, preset.num_centroids, preset.sub_vector_size)
        header = CodebookHeader(format_version=FORMAT_VERSION, preset=name, model=identity, sinks=None, calibration={})
        path = codebook_path(folder / "antkv", name)
        path.parent.mkdir(exist_ok=True)
        k, v = (torch.randn(shape, generator=generator).half() for _ in "kv")
        Codebook(header, tuple(k), tuple(v)).save(path)
    return folder
