"""What the codes of a layer cost: how far a model's predictions move when its K and V go through them.

To second order the divergence is E[(g . d)^2] / 2, where d is how codes change what a layer's attention gives, and g
the gradient of the next tokens' log-likelihood by that: Fisher information, as in Theis et al., "Faster gaze prediction
with dense networks and Fisher pruning" (arXiv 1801.05787), section 2. The text's own tokens stand for tokens that the
model would draw. One pass there and back measures all layers and codebooks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from transformers import PreTrainedModel

from vllm_antkv.codebook import Codebook
from vllm_antkv.config import AntKVConfig
from vllm_antkv.offline.attention import attend_window, watched_run
from vllm_antkv.offline.capture_attention import Attended, attention_watched
from vllm_antkv.offline.hidden import loss_of
from vllm_antkv.offline.method import Method
from vllm_antkv.offline.vector_quantiser import VectorQuantiser

#: Everything but the codes is as the server's defaults have it.
_SERVED = AntKVConfig()


def layer_divergences(
    model: PreTrainedModel, books: Sequence[Codebook], windows: torch.Tensor, advance: Callable[[], object]
) -> np.ndarray:
    """The divergence when one layer goes through the codes of one codebook, for all of both.

    Args:
        model: frozen, in evaluation mode.
        books: of one preset each, all with the same `k_scale`.
        windows: (num_windows, seq_len) int64.
        advance: called after every layer of every window.

    Returns:
        (num_layers, num_books) float64, nats per token.
    """
    found = np.zeros((books[0].header.model.num_layers, len(books)))
    for window in windows.to(model.device):
        with _measured(model, books, len(window), found, advance), torch.enable_grad():
            loss_of(model, window).backward()
    return found / windows.numel()


@contextmanager
def _measured(
    model: PreTrainedModel, books: Sequence[Codebook], num_tokens: int, found: np.ndarray, advance: Callable[[], object]
) -> Iterator[None]:
    """While open, every backward pass adds to `found`, in nats."""
    methods = [_method(book) for book in books]
    with watched_run(model, methods[0], num_tokens) as run:

        def watch(attended: Attended) -> None:
            if not attended.output.requires_grad:
                return
            rows = (attended.query.detach(), attended.key.detach(), attended.value.detach())
            window, output = run.window(attended.module, *rows, attended.options), attended.output.detach()

            @torch.no_grad()
            def on_gradient(gradient: torch.Tensor) -> None:
                for number, method in enumerate(methods):
                    moved = attend_window(window, method, run.sinks_seen(window)) - output
                    found[window.layer, number] += (gradient * moved).sum((-2, -1)).square().sum().item() / 2
                advance()

            attended.output.register_hook(on_gradient)

        with attention_watched(model, watch):
            yield


def _method(book: Codebook) -> Method:
    name, bits, sinks = book.preset.name, book.preset.nominal_bits, book.header.sinks
    return Method(
        name,
        bits,
        _SERVED,
        VectorQuantiser(book),
        sinks=sinks,
        key_errors=book.k_errors,
        k_scale=book.k_scale,
    )
