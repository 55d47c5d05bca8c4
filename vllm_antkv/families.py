"""The families of models that are tested, and what is special about each: one table for everything that asks.

The start-up check, calibration, the evaluator, `antkv doctor`, the tests and `docs/compatibility.md` read it. Pure
Python.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """One family.

    model_type: of the Hugging Face config.
    architecture: as the config's `architectures` and vLLM name it.
    title: as people name it.
    evaluated: whether the evaluator can compute its attention, so that centroids can be trained through it.
    served: what is run of it in real vLLM with random weights; empty: it is refused.
    trained: what is run of it with trained weights; empty: nothing.
    special: what sets it apart.
    """

    model_type: str
    architecture: str
    title: str
    evaluated: bool = True
    served: str = "run"
    trained: str = ""
    special: str = ""


#: By `model_type`.
FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            "llama",
            "LlamaForCausalLM",
            "Llama",
            served="run: head sizes 32 to 256; default, Llama 3, YaRN and linear RoPE",
            trained="run: the embedded model (5 M parameters), the retrieval model (0.3 M) and, by hand, one of 3 M; "
            "larger ones untested",
        ),
        Family("mistral", "MistralForCausalLM", "Mistral", special="with and without windows"),
        Family("qwen2", "Qwen2ForCausalLM", "Qwen2", special="K has biases"),
        Family("qwen3", "Qwen3ForCausalLM", "Qwen3", special="K is normalised, then coded"),
        Family(
            "phi3",
            "Phi3ForCausalLM",
            "Phi-3",
            served="run: whole and partial RoPE, LongRoPE",
            special="one projection for Q, K and V",
        ),
        Family("gemma", "GemmaForCausalLM", "Gemma"),
        Family("mixtral", "MixtralForCausalLM", "Mixtral", special="experts"),
        Family("qwen2_moe", "Qwen2MoeForCausalLM", "Qwen2-MoE", special="experts, one of them shared"),
        Family("qwen3_moe", "Qwen3MoeForCausalLM", "Qwen3-MoE", special="experts; K is normalised, then coded"),
        Family("olmoe", "OlmoeForCausalLM", "OLMoE", special="experts; norms over all heads"),
        Family("granitemoe", "GraniteMoeForCausalLM", "Granite-MoE", special="experts; its own attention scale"),
        Family("granite", "GraniteForCausalLM", "Granite", special="its own attention scale"),
        Family("olmo2", "Olmo2ForCausalLM", "OLMo-2", special="norms over all heads, after the layers"),
        Family("starcoder2", "Starcoder2ForCausalLM", "StarCoder2", special="with and without windows"),
        Family("glm", "GlmForCausalLM", "GLM-4 (first)", special="half of the channels have RoPE, interleaved"),
        Family("glm4", "Glm4ForCausalLM", "GLM-4", special="half of the channels have RoPE, interleaved"),
        Family("stablelm", "StableLmForCausalLM", "StableLM", special="a quarter of the channels has RoPE"),
        Family("phi", "PhiForCausalLM", "Phi-2", special="half of the channels have RoPE"),
        Family("gpt_neox", "GPTNeoXForCausalLM", "GPT-NeoX", special="a quarter of the channels has RoPE"),
        Family("cohere", "CohereForCausalLM", "Cohere", special="interleaved RoPE"),
        Family("cohere2", "Cohere2ForCausalLM", "Cohere-2", special="windows; no RoPE in layers without"),
        Family("exaone4", "Exaone4ForCausalLM", "EXAONE-4", special="windows; no RoPE in layers without"),
        Family("smollm3", "SmolLM3ForCausalLM", "SmolLM3", special="every fourth layer without RoPE"),
        Family("gpt2", "GPT2LMHeadModel", "GPT-2", special="no RoPE"),
        Family("opt", "OPTForCausalLM", "OPT", special="no RoPE"),
        Family("gemma2", "Gemma2ForCausalLM", "Gemma-2", special="soft caps on logits, windows in every second layer"),
        Family("gemma3_text", "Gemma3ForCausalLM", "Gemma-3", special="windows in five of six layers"),
        Family(
            "gemma3n_text",
            "Gemma3nForCausalLM",
            "Gemma-3n",
            special="windows in four of five layers; the last layers share the KV cache of earlier ones",
        ),
        Family("olmo3", "Olmo3ForCausalLM", "OLMo-3", special="windows in three of four layers"),
        Family(
            "afmoe",
            "AfmoeForCausalLM",
            "AFMoE (Trinity)",
            special="experts, output gates, windows; no RoPE in layers without",
        ),
        Family(
            "idefics3",
            "Idefics3ForConditionalGeneration",
            "Idefics3, SmolVLM",
            served="run: with images",
            special="text model: a Llama",
        ),
        Family(
            "llava",
            "LlavaForConditionalGeneration",
            "LLaVA",
            served="run: with images",
            special="text model: here a Llama",
        ),
        Family(
            "llava_next",
            "LlavaNextForConditionalGeneration",
            "LLaVA-NeXT, Granite-vision",
            served="run: with images",
            special="text model: here a Granite",
        ),
        Family(
            "mistral3",
            "Mistral3ForConditionalGeneration",
            "Mistral-3",
            served="run: with images",
            special="text model: a Mistral; vision: a Pixtral",
        ),
        Family(
            "qwen2_vl",
            "Qwen2VLForConditionalGeneration",
            "Qwen2-VL",
            served="run: with images",
            special="M-RoPE: three positions per token",
        ),
        Family(
            "qwen2_5_vl",
            "Qwen2_5_VLForConditionalGeneration",
            "Qwen2.5-VL",
            served="run: with images",
            special="M-RoPE: three positions per token",
        ),
        Family(
            "qwen3_vl",
            "Qwen3VLForConditionalGeneration",
            "Qwen3-VL",
            served="run: with images",
            special="M-RoPE: three positions per token",
        ),
        Family(
            "lfm2",
            "Lfm2ForCausalLM",
            "LFM2",
            special="most layers are convolutions with a small state; K is normalised, then coded",
        ),
        Family(
            "granitemoehybrid",
            "GraniteMoeHybridForCausalLM",
            "Granite-4-H",
            special="most layers are Mamba-2, with a large state; experts",
        ),
        Family("falcon_h1", "FalconH1ForCausalLM", "Falcon-H1", special="every layer attends and is Mamba-2"),
        Family("nemotron_h", "NemotronHForCausalLM", "Nemotron-H", special="most layers are Mamba-2 or have no cache"),
        Family(
            "qwen3_5",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3.5",
            served="run: with images",
            special="three of four layers are linear attention with a large state; M-RoPE; output gates",
        ),
        Family(
            "qwen3_next",
            "Qwen3NextForCausalLM",
            "Qwen3-Next",
            special="experts; three of four layers are linear attention with a large state; output gates",
        ),
        Family(
            "gpt_oss", "GptOssForCausalLM", "gpt-oss", special="experts, learned sinks, windows in every second layer"
        ),
    )
}

#: What is tested. Servers take others too, whose layers are of kinds that the cache has, and say so.
SERVED_ARCHITECTURES = tuple(family.architecture for family in FAMILIES.values() if family.served)
