"""Perplexity of a model on fixed windows when every position sees a past that went through a method."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from vllm_antkv.evaluate.attention import quantised_past
from vllm_antkv.evaluate.effective_bits import effective_bits
from vllm_antkv.evaluate.methods import Method
from vllm_antkv.evaluate.models import ModelCard
from vllm_antkv.evaluate.report import PerplexityReport, perplexity_of, versions

#: Tokens in one forward pass: enough to keep two cores or a GPU busy, few enough for the activations of an 8B model.
_TOKENS_PER_PASS = 4096
#: Positions whose logits are held at a time: 128 x a vocabulary of 128 K in float32 is 64 MB.
_LOGITS_CHUNK = 128

#: Called after every batch with the number of windows done since the last call.
Progress = Callable[[int], None]


def evaluate_perplexity(
    card: ModelCard,
    model: PreTrainedModel,
    method: Method,
    windows: torch.Tensor,
    text: Path,
    progress: Progress = lambda done: None,
) -> PerplexityReport:
    """Score every position of every window but the first, which nothing predicts.

    Args:
        card: what is known of the model.
        model: the model itself, from `card.load()`.
        method: what its past goes through.
        windows: (num_windows, context) int64.
        text: where the windows come from, for the report.
        progress: see `Progress`.
    """
    num_windows, context = windows.shape
    card.check_windows(windows)
    nll = mean_nll(model, method, windows, progress)
    return PerplexityReport(
        model=card.name,
        method=method.name,
        text=str(text),
        context=context,
        windows=num_windows,
        tokens=num_windows * (context - 1),
        perplexity=perplexity_of(nll),
        nll=nll,
        nominal_bits=method.nominal_bits,
        effective_bits=effective_bits(method, card.identity, card.dtype, context),
        settings=method.settings,
        versions=versions("torch", "transformers"),
    )


def mean_nll(
    model: PreTrainedModel, method: Method, windows: torch.Tensor, progress: Progress = lambda done: None
) -> float:
    """Mean negative log-likelihood in nats; summed in float64, so that it does not depend on the batches."""
    num_windows, context = windows.shape
    total = 0.0
    with torch.inference_mode(), quantised_past(model, method, context):
        for batch in windows.split(max(1, _TOKENS_PER_PASS // context)):
            batch = batch.to(model.device)
            hidden = model.get_decoder()(batch, use_cache=False).last_hidden_state
            for start in range(0, context - 1, _LOGITS_CHUNK):
                stop = min(start + _LOGITS_CHUNK, context - 1)
                logits = model.get_output_embeddings()(hidden[:, start:stop]).float()
                targets = batch[:, start + 1 : stop + 1]
                losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
                total += losses.double().sum().item()
            progress(len(batch))
    return total / (num_windows * (context - 1))
