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
        Family("qwen2", "Qwen2ForCausalLM", "Qwen2", special="K has biases, in Qwen2.5 of several hundred"),
        Family("qwen3", "Qwen3ForCausalLM", "Qwen3", special="K is coded after its norm"),
        Family(
            "phi3",
            "Phi3ForCausalLM",
            "Phi-3",
            special="one projection for Q, K and V; partial RoPE too",
        ),
        Family("gemma2", "Gemma2ForCausalLM", "Gemma-2", special="soft caps on logits, windows in every second layer"),
        Family(
            "gpt_oss", "GptOssForCausalLM", "gpt-oss", special="learned sinks, windows in every second layer, experts"
        ),
        Family("gemma3_text", "Gemma3ForCausalLM", "Gemma-3", special="windows in five of six layers"),
    )
}

#: What the server and `antkv doctor` take.
SERVED_ARCHITECTURES = tuple(family.architecture for family in FAMILIES.values() if family.served)
