"""What an antkv cache cannot serve is refused when the server starts, with one sentence that names it.

Tiny configs in real vLLM, without weights: the refusal comes before they would be read.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from tests.serving.conftest import EMBEDDED
from tests.serving.tiny import EXPERTS, LINEAR, LLAMA3, LONGROPE, SIZES, WINDOWS, YARN, make_coded
from vllm_antkv.codebook import NoCodebookError
from vllm_antkv.errors import AntKVError, UnsupportedModelError
from vllm_antkv.ops.rope import rotate
from vllm_antkv.vllm_adapter import kv_transfer
from vllm_antkv.vllm_adapter.load.rope import rotary_tables
from vllm_antkv.vllm_adapter.plan.refusals import refuse_unsupported

MLA: dict[str, Any] = {
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
}
WHISPER: dict[str, Any] = {
    "d_model": 128,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "max_target_positions": 512,
    "architectures": ["WhisperForConditionalGeneration"],
}
T5 = {"d_model": 128, "num_layers": 2, "architectures": ["T5ForConditionalGeneration"]}
PALIGEMMA = {
    "text_config": {**SIZES, "model_type": "gemma", "head_dim": 64},
    "architectures": ["PaliGemmaForConditionalGeneration"],
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MROPE = {**ROPE, "mrope_section": [8, 12, 12]}
SLIDING = {"use_sliding_window": True, "sliding_window": 150}
FOPE = {**ROPE, "use_fope": True, "num_inv_freq": 16, "fope_sep_head": True, "fope_init_factor": 0.1}
DUAL_CHUNK = {"chunk_size": 128, "local_size": 32, "original_max_position_embeddings": 256}
DRAFT = {"method": "ngram_gpu", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
CONNECTOR = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
STORE = {"kv_connector": "AntKVStore", "kv_role": "kv_both"}
SEVERAL = {**STORE, "kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [STORE, CONNECTOR]}}
NEVER = {"antkv": {"calibrate": "never"}}

QWEN2 = {"hidden_size": 256}
#: Model type, its config, words of the sentence.
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "DeepSeek-V2": ("deepseek_v2", MLA, "multi-head latent attention (MLA)"),
    "DeepSeek-V3": ("deepseek_v3", MLA, "multi-head latent attention (MLA)"),
    "Whisper": ("whisper", WHISPER, "encoder-decoder models"),
    "T5": ("t5", T5, "encoder-decoder models"),
    "PaliGemma": ("paligemma", PALIGEMMA, "images whose tokens attend to each other"),
    "M-RoPE and windows": (
        "qwen2",
        {**QWEN2, "rope_parameters": MROPE, "layer_types": WINDOWS, **SLIDING},
        "M-RoPE beside sliding windows",
    ),
    "M-RoPE with four positions": (
        "qwen2",
        {**QWEN2, "rope_parameters": {**ROPE, "mrope_section": [8, 8, 8, 8]}},
        "M-RoPE with 4 positions per token",
    ),
    "dual chunk": ("qwen2", {**QWEN2, "dual_chunk_attention_config": DUAL_CHUNK}, "dual chunk attention"),
    "FoPE": ("llama", {"head_dim": 64, "rope_parameters": FOPE}, "(FoPE)"),
    "LongRoPE by length": (
        "glm",
        {"head_dim": 32, "rope_parameters": LONGROPE},
        "RoPE of type longrope in models that vLLM serves through transformers",
    ),
    "Bloom": ("bloom", {"n_head": 2, "n_layer": 2}, "ALiBi"),
    "Falcon with ALiBi": ("falcon", {"alibi": True}, "ALiBi"),
    "not causal": ("llama", {"head_dim": 64, "is_causal": False}, "not causal"),
    "head size": ("llama", {"head_dim": 48}, "head size 48"),
    "state space": ("mamba", {}, "models without attention"),
    "hybrid that vLLM does not have": (
        "bamba",
        {"attn_layer_indices": [1]},
        "state-space or linear-attention layers of the kind bamba",
    ),
    "chunked attention": (
        "llama4_text",
        {**EXPERTS, "head_dim": 32, "intermediate_size_mlp": 192},
        "chunked attention",
    ),
}
#: Options of the server, words of the sentence.
OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "drafts": ({"speculative_config": DRAFT}, "speculative decoding by ngram_gpu"),
    "a cache of what drafts": (
        {"speculative_config": {"model": str(EMBEDDED), "num_speculative_tokens": 1, "kv_cache_dtype": "fp8"}},
        "a kv_cache_dtype of what drafts",
    ),
    "KV offloading": ({"kv_offloading_size": 1.0}, "--kv-offloading-size, to which, unlike AntKVStore, recency pages"),
    "pages through NIXL, of drafts": (
        {
            "kv_transfer_config": {**STORE, "kv_connector": "NixlConnector"},
            "speculative_config": {"model": str(EMBEDDED), "num_speculative_tokens": 1},
        },
        "NixlConnector with speculative decoding",
    ),
    "pages through NIXL, in stages": (
        {"kv_transfer_config": {**STORE, "kv_connector": "NixlConnector"}, "pipeline_parallel_size": 2},
        "NixlConnector with pipeline parallelism",
    ),
    "pages in a folder, without hashes": (
        {"kv_transfer_config": STORE, "enable_prefix_caching": False},
        "AntKVStore without prefix caching",
    ),
    "pages in a folder, of unknown weights": (
        {"kv_transfer_config": STORE, "load_format": "dummy"},
        "AntKVStore with this --load-format",
    ),
    "DCP": ({"tensor_parallel_size": 2, "decode_context_parallel_size": 2}, "decode context parallelism (DCP)"),
    "DCP on one GPU": ({"decode_context_parallel_size": 2}, "decode context parallelism (DCP)"),
    "PCP": ({"prefill_context_parallel_size": 2}, "prefill context parallelism (PCP)"),
    "pipeline": (
        {"pipeline_parallel_size": 2, "kv_cache_dtype_skip_layers": ["0"]},
        "pipeline parallelism with --kv-cache-dtype-skip-layers",
    ),
    "dual batch overlap": ({"ubatch_size": 2, "all2all_backend": "deepep_low_latency"}, "dual batch overlap"),
    "pooling": ({"runner": "pooling"}, "pooling models"),
    "prompts past shared layers": ({"kv_sharing_fast_prefill": True}, "--kv-sharing-fast-prefill"),
    "one kind of page": ({"disable_hybrid_kv_cache_manager": True}, "--disable-hybrid-kv-cache-manager"),
    "another worker": ({"worker_cls": "vllm.v1.worker.worker_base.WorkerBase"}, "--worker-cls"),
    "another backend": ({"attention_backend": "CPU_ATTN"}, "--attention-backend"),
}


def make_config(folder: Path, model_type: str, changes: dict[str, Any]) -> Path:
    """A model without weights; that which generates text, unless its config says another."""
    architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)]
    config = AutoConfig.for_model(model_type, **{**SIZES, "architectures": architectures, **changes})
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(EMBEDDED).save_pretrained(folder)
    return folder


@pytest.fixture
def llama(tmp_path) -> Path:
    return make_config(tmp_path / "llama", "llama", {"head_dim": 64})


def configure(model: Path, **options: Any) -> None:
    """Let real vLLM make its configuration."""
    EngineArgs(model=str(model), **{"kv_cache_dtype": "antkv-1bit", **options}).create_engine_config()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_refused(tmp_path, refused, name):
    model_type, changes, words = MODELS[name]
    model = make_config(tmp_path, model_type, changes)
    with refused(UnsupportedModelError, words, "serve this model with --kv-cache-dtype auto"):
        configure(model)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_is_refused(llama, refused, name):
    options, words = OPTIONS[name]
    with refused(UnsupportedModelError, words, "--kv-cache-dtype auto"):
        configure(llama, **options)


#: All that this vLLM knows by name: their pages are told apart by tokens, not by what the codes in them stand for
#: (https://github.com/vllm-project/vllm/issues/55904).
CONNECTORS = sorted(KVConnectorFactory._registry.keys() - kv_transfer.MODULES.keys() - {"MultiConnector"})
TIERS = sorted(OffloadingSpecFactory._registry)


@pytest.mark.parametrize("name", CONNECTORS)
def test_no_connector_of_vllm_s_reads_pages_of_another_codebook(llama, refused, name):
    connector = {**CONNECTOR, "kv_connector": name}
    several = {**SEVERAL, "kv_connector_extra_config": {"connectors": [STORE, connector]}}
    # As if vLLM itself refused none: some need a GPU, or a library that is not here.
    vllm_config = EngineArgs(model=str(llama)).create_engine_config()
    vllm_config.cache_config.cache_dtype = "antkv-1bit"
    for config in (connector, several):
        vllm_config.kv_transfer_config = KVTransferConfig(**config)
        with refused(UnsupportedModelError, "KV connectors other than AntKVStore and NixlConnector"):
            refuse_unsupported(vllm_config)


@pytest.mark.parametrize("name", TIERS)
def test_nor_does_a_tier_that_vllm_offloads_to(llama, refused, name):
    extra = {"spec_name": name, "cpu_bytes_to_use": 1 << 20}
    config = {**CONNECTOR, "kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
    with refused(UnsupportedModelError, "KV connectors other than AntKVStore and NixlConnector"):
        configure(llama, kv_transfer_config=config)


def test_connectors_of_ours_take_the_place_of_vllm_s_under_their_names(llama, tmp_path):
    make_coded(tmp_path / "whole", "llama", {"head_dim": 64})
    for name, module in kv_transfer.MODULES.items():
        config = {**STORE, "kv_connector": name, "kv_connector_extra_config": {"folder": str(tmp_path / "pages")}}
        made = EngineArgs(
            model=str(tmp_path / "whole"), kv_cache_dtype="antkv-1bit", kv_transfer_config=config
        ).create_engine_config()
        assert made.kv_transfer_config.kv_connector_module_path == module
        assert len(made.kv_transfer_config.kv_connector_extra_config["identity"]) == 64


def test_prefix_caching_beside_mamba2_is_refused_on_cpus(tmp_path, refused):
    model = make_config(tmp_path, "falcon_h1", {"head_dim": 32})
    with refused(AntKVError, "--no-enable-prefix-caching"):
        configure(model)


def test_several_layers_that_draft_are_refused(tmp_path, refused):
    model = make_config(tmp_path, "glm4_moe", {"head_dim": 32, "num_nextn_predict_layers": 2})
    with refused(AntKVError, "several layers of MTP"):
        configure(model, speculative_config={"method": "mtp", "num_speculative_tokens": 2})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_cache_dtype": "antkv-0.375bit"}, "does not divide"),
        ({"kv_cache_dtype_skip_layers": ["2"]}, "names '2', which is neither"),
        ({"kv_cache_dtype_skip_layers": ["0", "1"]}, "names all layers"),
    ],
    ids=str,
)
def test_a_setting_is_refused(tmp_path, refused, options, words):
    wide = make_config(tmp_path, "llama", {"head_dim": 80})
    with refused(AntKVError, words):
        configure(wide, **options)


def test_what_a_refusal_advises_is_not_refused(llama, said):
    """What is then missing is a codebook, which is not to be learned here. Nobody warns of a tested architecture."""
    with pytest.raises(NoCodebookError):
        configure(llama, attention_backend="ANTKV", additional_config=NEVER)
    assert not [line for line in said if "not among the models" in line]


def test_auto_is_not_refused(llama):
    configure(llama, kv_cache_dtype="auto", speculative_config=DRAFT)


def test_an_architecture_that_is_not_tested_is_served_with_one_warning(tmp_path, said):
    arcee = make_config(tmp_path, "arcee", {"head_dim": 32})
    with pytest.raises(NoCodebookError):
        configure(arcee, additional_config=NEVER)
    (warning,) = [line for line in said if "not among the models" in line]
    assert "ArceeForCausalLM" in warning
    assert f"`antkv doctor {arcee} --verify`" in warning


@pytest.mark.parametrize("rope_type", ["default", "linear", "dynamic", "ntk", "llama3", "yarn"])
def test_the_table_of_every_kind_of_rope_is_the_one_that_turns(rope_type):
    scaled = {"llama3": LLAMA3, "yarn": YARN}.get(rope_type, {**LINEAR, "rope_type": rope_type})
    with set_current_vllm_config(VllmConfig()):
        module = get_rope(32, 512, rope_parameters=scaled, dtype=torch.float32)
    (table,) = rotary_tables(nn.ModuleList([module]), (), 512)
    positions = torch.tensor([0, 1, 77, 511])
    query, key = torch.randn(2, 4, 32).unbind()
    _, turned = module(positions, query.clone(), key.clone())
    torch.testing.assert_close(rotate(key[:, None], positions, table)[:, 0], turned, atol=1e-5, rtol=1e-5)
