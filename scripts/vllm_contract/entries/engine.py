"""vLLM's public interface as evaluation, scripts and tests use it, and what tests ask of its parsers."""

from scripts.vllm_contract.reliance import How, Reliance

#: 0.33 moved it.
_CLI = "vllm.entrypoints.common.cli_args|vllm.entrypoints.launchers.cli_args"

ENTRIES = (
    Reliance(
        "vllm:LLM.__init__",
        How.CALL,
        "model, dtype=, enable_prefix_caching=, enforce_eager=, kv_cache_memory_bytes=, max_model_len=, "
        "max_num_batched_tokens=, max_num_seqs=, use_tqdm_on_load=",
        "served evaluation, calibration, tests: an engine in this process",
    ),
    Reliance("vllm:LLM.generate", How.CALL, "prompts, sampling_params, use_tqdm=", "served evaluation, tests"),
    Reliance("vllm:LLM.apply_model", How.CALL, "func", "calibration: the model itself, in this process"),
    Reliance("vllm:LLM", How.FIELDS, "apply_model generate llm_engine", "served evaluation, tests: the engine below"),
    Reliance("vllm.v1.engine.llm_engine:LLMEngine", How.FIELDS, "engine_core", "served evaluation: is shut down"),
    Reliance(
        "vllm:SamplingParams",
        How.FIELDS,
        "allowed_token_ids detokenize ignore_eos logprobs max_tokens prompt_logprobs temperature",
        "served evaluation, tests: the likelihood of given tokens",
    ),
    Reliance(
        "vllm:RequestOutput", How.FIELDS, "num_cached_tokens outputs prompt_logprobs prompt_token_ids", "likewise"
    ),
    Reliance("vllm.inputs:TokensPrompt", How.FIELDS, "prompt_token_ids", "served evaluation: prompts as token ids"),
    Reliance("vllm.distributed:cleanup_dist_env_and_memory", How.CALL, "-", "calibration, tests: an engine ends"),
    Reliance("vllm.engine.arg_utils:AsyncEngineArgs.from_cli_args", How.CALL, "args", "tests: what `vllm serve` does"),
    Reliance("vllm.engine.arg_utils:AsyncEngineArgs", How.FIELDS, "from_cli_args create_engine_config", "likewise"),
    Reliance("vllm.engine.arg_utils:EngineArgs.add_cli_args", How.CALL, "parser", "tests: what is a value"),
    Reliance(f"{_CLI}:make_arg_parser", How.CALL, "parser", "tests: options of `vllm serve` in the docs"),
    Reliance(
        "vllm.benchmarks.serve:add_cli_args", How.CALL, "parser", "tests: options of `vllm bench serve` in the docs"
    ),
    Reliance("vllm.entrypoints.cli.main:main", How.CALL, "-", "tests: the command `vllm`"),
    Reliance("vllm.utils.argparse_utils:FlexibleArgumentParser", How.FIELDS, "parse_args", "tests: vLLM's parser"),
    Reliance("vllm:envs", How.FIELDS, "VLLM_CACHE_ROOT", "tests: where vLLM keeps its own while ours is elsewhere"),
    Reliance("vllm.envs:VLLM_CACHE_ROOT", How.NAME, "", "tests: as above"),
    Reliance("vllm.model_executor.models:registry", How.FIELDS, "_run_in_subprocess", "tests: as below"),
    Reliance(
        "vllm.model_executor.models.registry:_run_in_subprocess",
        How.WRAP,
        "fn",
        "tests: a class is looked at in the process that imports it",
    ),
    Reliance("vllm.utils.math_utils:cdiv", How.CALL, "a, b", "managers: pages of so many tokens"),
)
