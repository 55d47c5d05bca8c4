"""What the commands that evaluate methods have in common."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from vllm_antkv.cli.options import CacheOptions, WindowOptions
from vllm_antkv.progress import progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from vllm_antkv.evaluate.report import PerplexityReport
    from vllm_antkv.offline.method import Method
    from vllm_antkv.offline.models import ModelCard

#: A model and the methods that are measured on it, from its card and the tokens of a window.
Loader: TypeAlias = "Callable[[ModelCard, int], tuple[PreTrainedModel, list[Method]]]"


def perplexities(
    model: str, given: WindowOptions, json: Path, load: Loader, against_own: bool = False
) -> "Iterator[PerplexityReport]":
    """One after the other, as they are measured. Everything that can be wrong is checked before the first one."""
    from vllm_antkv.evaluate.perplexity import evaluate_perplexity
    from vllm_antkv.evaluate.report import check_writable
    from vllm_antkv.evaluate.windows import TextWindows, load_windows
    from vllm_antkv.offline.models import ModelCard

    check_writable(json)
    card = ModelCard.read(model)
    card.check_context(given.context)
    ids = load_windows(given.text, card.tokenizer, given.context, given.max_windows)
    windows = TextWindows(given.text, ids)
    loaded, built = load(card, given.context)
    for method in built:
        with progress_bar(method.name, len(ids)) as progress:
            report = evaluate_perplexity(card, loaded, method, windows, progress.update, against_own)
        yield report


def method_loader(names: list[str], cache: CacheOptions) -> Loader:
    """Builds these methods, and only then loads the model; refuses at once names and settings that cannot be used."""
    from vllm_antkv.evaluate.methods import build_method, check_method
    from vllm_antkv.evaluate.methods.request import MethodRequest

    config = cache.config()
    names = [check_method(name.strip()) for name in names]

    def load(card: "ModelCard", context: int) -> "tuple[PreTrainedModel, list[Method]]":
        del context
        request = MethodRequest(card.name, card.identity, cache.codebooks, config)
        built = [build_method(name, request) for name in names]
        return card.load(), built

    return load
