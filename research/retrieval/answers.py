"""Exact match on retrieval prompts, per kind, length and depth, when the past went through a method.

Offline an answer is right when every one of its tokens is the most likely one: that is what greedy decoding would have
written, and it takes one forward pass.
"""

from collections.abc import Sequence
from statistics import mean
from typing import Any

import torch
from pydantic import BaseModel
from transformers import PreTrainedModel

from research.retrieval.prompts import RetrievalPrompt
from vllm_antkv.evaluate.effective_bits import effective_bits
from vllm_antkv.evaluate.report import versions
from vllm_antkv.offline.attention import quantised_past
from vllm_antkv.offline.method import Method
from vllm_antkv.offline.models import ModelCard
from vllm_antkv.offline.score import Progress

#: Tokens in one forward pass.
_TOKENS_PER_PASS = 8192


class RetrievalCell(BaseModel, frozen=True):
    """The prompts of one kind, length and depth."""

    kind: str
    length: int
    depth: float
    prompts: int
    exact_match: float


class RetrievalReport(BaseModel, frozen=True):
    """One method in the JSON of `python -m research.retrieval`.

    exact_match: share of right answers over all cells.
    effective_bits: bits per K or V element for one sequence of the longest length.
    """

    model: str
    method: str
    exact_match: float
    nominal_bits: float
    effective_bits: float
    cells: list[RetrievalCell]
    settings: dict[str, Any]
    versions: dict[str, str]


def evaluate_retrieval(
    card: ModelCard,
    model: PreTrainedModel,
    method: Method,
    prompts: Sequence[RetrievalPrompt],
    progress: Progress = lambda done: None,
) -> RetrievalReport:
    """Answer every prompt offline.

    Args:
        card: what is known of the model.
        model: the model itself, from `card.load()`.
        method: what its past goes through.
        prompts: from `make_prompts`.
        progress: called with the number of prompts done since the last call.
    """
    right = answers_right(model, method, prompts, progress)
    return report_retrieval(card, method, prompts, right)


def answers_right(
    model: PreTrainedModel,
    method: Method,
    prompts: Sequence[RetrievalPrompt],
    progress: Progress = lambda done: None,
) -> list[bool]:
    """Whether each prompt's answer is what greedy decoding writes."""
    right = [False] * len(prompts)
    by_length: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt.prompt) + len(prompt.answer), []).append(index)
    for num_tokens, indices in by_length.items():
        with torch.inference_mode(), quantised_past(model, method, num_tokens):
            for batch in torch.tensor(indices).split(max(1, _TOKENS_PER_PASS // num_tokens)):
                chosen = [prompts[index] for index in batch.tolist()]
                windows = torch.tensor([(*prompt.prompt, *prompt.answer) for prompt in chosen], device=model.device)
                hidden = model.get_decoder()(windows, use_cache=False).last_hidden_state
                for index, prompt, row in zip(batch.tolist(), chosen, hidden, strict=True):
                    predicted = model.get_output_embeddings()(row[len(prompt.prompt) - 1 : -1]).argmax(-1)
                    right[index] = predicted.tolist() == list(prompt.answer)
                progress(len(chosen))
    return right


def report_retrieval(
    card: ModelCard, method: Method, prompts: Sequence[RetrievalPrompt], right: Sequence[bool]
) -> RetrievalReport:
    """Sum up by kind, length and depth, in the order of the prompts."""
    cells: dict[tuple[str, int, float], list[bool]] = {}
    for prompt, is_right in zip(prompts, right, strict=True):
        cells.setdefault((prompt.kind, prompt.length, prompt.depth), []).append(is_right)
    longest = max(prompt.length for prompt in prompts)
    return RetrievalReport(
        model=card.name,
        method=method.name,
        exact_match=mean(right),
        nominal_bits=method.nominal_bits,
        effective_bits=effective_bits(method, card.identity, card.dtype, longest, card.windows),
        cells=[
            RetrievalCell(kind=kind, length=length, depth=depth, prompts=len(answers), exact_match=mean(answers))
            for (kind, length, depth), answers in cells.items()
        ],
        settings=method.settings,
        versions=versions("torch", "transformers"),
    )
