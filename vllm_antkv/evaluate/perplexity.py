"""Perplexity of a model on fixed windows when every position sees a past that went through a method."""

from transformers import PreTrainedModel

from vllm_antkv.evaluate.effective_bits import effective_bits
from vllm_antkv.evaluate.report import PerplexityReport, perplexity_of, versions
from vllm_antkv.evaluate.windows import TextWindows
from vllm_antkv.offline.method import Method
from vllm_antkv.offline.models import ModelCard
from vllm_antkv.offline.score import Progress, score


def evaluate_perplexity(
    card: ModelCard,
    model: PreTrainedModel,
    method: Method,
    windows: TextWindows,
    progress: Progress = lambda done: None,
    against_own: bool = False,
) -> PerplexityReport:
    """Score every position of every window but the first, which nothing predicts.

    Args:
        card: what is known of the model.
        model: the model itself, from `card.load()`.
        method: what its past goes through.
        windows: what is scored.
        progress: see `Progress`.
        against_own: compare with the model's own predictions as well, which runs it twice.
    """
    num_windows, context = windows.ids.shape
    card.check_windows(windows.ids)
    scores = score(model, method, windows.ids, progress, against_own)
    return PerplexityReport(
        model=card.name,
        method=method.name,
        text=str(windows.text),
        context=context,
        windows=num_windows,
        tokens=num_windows * (context - 1),
        perplexity=perplexity_of(scores.nll),
        nll=scores.nll,
        nominal_bits=method.nominal_bits,
        effective_bits=effective_bits(method, card.identity, card.dtype, context, card.windows),
        fidelity=scores.fidelity,
        settings=method.settings,
        versions=versions("torch", "transformers"),
    )
