"""Greedy completions with two tensor-parallel workers; run as a script by the exactness tests.

Takes one JSON argument: model, preset, settings, prompts (token ids) and the file to write to.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    """Serve the prompts in one batch and write tokens and log-probabilities."""
    from vllm import LLM, SamplingParams

    task = json.loads(sys.argv[1])
    llm = LLM(
        task["model"],
        kv_cache_dtype=task["preset"],
        additional_config={"antkv": task["settings"]},
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        kv_cache_memory_bytes=64 << 20,
        tensor_parallel_size=2,
    )
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=5, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in task["prompts"]], params, use_tqdm=False)
    completions = [output.outputs[0] for output in outputs]
    result = [
        (list(best.token_ids), [{token: entry.logprob for token, entry in step.items()} for step in best.logprobs])
        for best in completions
    ]
    Path(task["out"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
