"""What the commands that evaluate methods have in common."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_antkv.cli.options import MethodOptions, WindowOptions
from vllm_antkv.progress import progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from vllm_antkv.evaluate.report import PerplexityReport
    from vllm_antkv.offline.method import Method
    from vllm_antkv.offline.models import ModelCard


def perplexities(
    model: str, methods: list[str], given: WindowOptions, json: Path, cache: MethodOptions, against_own: bool = False
) -> "Iterator[PerplexityReport]":
    """One after the other, as they are measured. Everything that can be wrong is checked before the first one."""
    from vllm_antkv.evaluate.methods import check_method
    from vllm_antkv.evaluate.perplexity import evaluate_perplexity
    from vllm_antkv.evaluate.report import check_writable
    from vllm_antkv.evaluate.windows import TextWindows, load_windows
    from vllm_antkv.offline.models import ModelCard

    cache.config()  # refuses settings that cannot be used
    names = [check_method(name.strip()) for name in methods]
    check_writable(json)
    card = ModelCard.read(model)
    card.check_context(given.context)
    ids = load_windows(given.text, card.tokenizer, given.context, given.max_windows)
    windows = TextWindows(given.text, ids)
    loaded, built = load_methods(card, names, cache, given.context)
    for method in built:
        with progress_bar(method.name, len(ids)) as progress:
            report = evaluate_perplexity(card, loaded, method, windows, progress.update, against_own)
        yield report


def load_methods(
    card: "ModelCard", names: list[str], cache: MethodOptions, context: int
) -> "tuple[PreTrainedModel, list[Method]]":
    """The model, and the methods; these first, unless they learn from a sample that the model has to read."""
    from vllm_antkv.evaluate.methods import build_method
    from vllm_antkv.evaluate.windows import load_windows
    from vllm_antkv.laboratory.base import MethodRequest
    from vllm_antkv.laboratory.sample import take_sample
    from vllm_antkv.offline.attention import check_eviction

    request = MethodRequest(card.name, card.identity, cache.codebooks, cache.config(), cache.own_recency)
    request = replace(request, anchor_scope=cache.anchor_scope)
    if cache.calibration is None:
        built = [build_method(name, request) for name in names]
        loaded = card.load()
    else:
        learned = load_windows(cache.calibration, card.tokenizer, context)
        card.check_windows(learned)
        loaded = card.load()
        request = replace(request, sample=take_sample(loaded, learned, str(cache.calibration)))
        built = [build_method(name, request) for name in names]
    for method in built:
        check_eviction(loaded, method, context)
    return loaded, built
