"""What the codes of a layer cost: how far a model's predictions move when its K and V go through them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import torch
from transformers import PreTrainedModel

from vllm_antkv.codebook import Codebook
from vllm_antkv.config import AntKVConfig
from vllm_antkv.offline.method import Method, Quantiser
from vllm_antkv.offline.score import score
from vllm_antkv.offline.vector_quantiser import VectorQuantiser
from vllm_antkv.ops.rope import RotaryTable

#: Everything but the codes is as the server's defaults have it.
_SERVED = AntKVConfig()


def layer_divergences(
    model: PreTrainedModel,
    books: Sequence[Codebook],
    windows: torch.Tensor,
    known: Mapping[str, float],
    keep: Callable[[Mapping[str, float]], object],
    advance: Callable[[], object],
) -> np.ndarray:
    """The divergence when one layer goes through the codes of one codebook, for all of both.

    Args:
        model: in evaluation mode.
        books: of one preset each.
        windows: (num_windows, seq_len) int64.
        known: results of an earlier run, by place.
        keep: called after every place with all results so far.
        advance: called after every place.

    Returns:
        (num_layers, num_books) float64, nats per token.
    """
    num_layers = books[0].header.model.num_layers
    found = dict(known)
    for layer, book in product(range(num_layers), books):
        if (place := _place(layer, book)) not in found:
            found[place] = divergence(model, _coded_in(book, layer), _OneLayer(VectorQuantiser(book), layer), windows)
            keep(found)
        advance()
    return np.array([[found[_place(layer, book)] for book in books] for layer in range(num_layers)])


def divergence(model: PreTrainedModel, book: Codebook, quantiser: Quantiser, windows: torch.Tensor) -> float:
    """How far predictions through `quantiser` are from the model's own on windows, (num_windows, seq_len) int64.

    Kullback-Leibler divergence, a mean over all tokens, in nats.
    """
    name, bits, sinks = book.preset.name, book.preset.nominal_bits, book.header.sinks
    method = Method(name, bits, _SERVED, quantiser, sinks=sinks, key_errors=book.key_errors)
    fidelity = score(model, method, windows, against_own=True).fidelity
    assert fidelity is not None
    return fidelity.kl


@dataclass(frozen=True)
class _OneLayer:
    """All other layers keep their rows as they are."""

    quantiser: Quantiser
    layer: int

    def read_back(
        self, layer: int, key: torch.Tensor, value: torch.Tensor, rotary: RotaryTable
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Quantiser.read_back`."""
        if layer == self.layer:
            return self.quantiser.read_back(layer, key, value, rotary)
        return key.clone(), value.clone()


def _coded_in(book: Codebook, layer: int) -> Codebook:
    """`book`, whose codes lose nothing of other layers' keys."""
    if book.k_errors is None:
        return book
    errors = torch.zeros_like(book.k_errors)
    errors[layer] = book.k_errors[layer]
    return replace(book, k_errors=errors)


def _place(layer: int, book: Codebook) -> str:
    return f"{layer}/{book.preset.name}"
