"""What the codes of a layer cost: how far a model's predictions move when its K and V go through them.

To second order the divergence is E[(g . d)^2] / 2, where d is how codes change what a layer's attention gives, and g
the gradient of the next tokens' log-likelihood by that: Fisher information, as in Theis et al., "Faster gaze prediction
with dense networks and Fisher pruning" (arXiv 1801.05787), section 2. The text's own tokens stand for tokens that the
model would draw. One pass there and back measures all layers and codebooks.

The correction of coded logits (`ops.reference.jensen_weights`) is right for the mean over many keys. Where attention
falls on a few of them, it is too large: errors of few keys do not average out. So its size is learned, too: d is nearly
linear in it, and the divergence a parabola.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

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
#: One query in so many is measured: neighbours say little more, and other windows much.
_EVERY = 2
#: The largest correction, in those that `Codebook.k_errors` stands for.
_LARGEST = 1.5


@dataclass(frozen=True)
class LayerDivergences:
    """What is measured, by layer and codebook, (num_layers, num_books) float64.

    nats: per token, when one layer goes through the codes of one codebook.
    sizes: of the correction of its logits with which it costs that, in those that `Codebook.k_errors` stands for.
    """

    nats: np.ndarray
    sizes: np.ndarray


def layer_divergences(
    model: PreTrainedModel, books: Sequence[Codebook], windows: torch.Tensor, advance: Callable[[], object]
) -> LayerDivergences:
    """The divergence when one layer goes through the codes of one codebook, for all of both.

    Args:
        model: frozen, in evaluation mode.
        books: of one preset each, all with the same `k_scale`.
        windows: (num_windows, seq_len) int64.
        advance: called after every layer of every window.
    """
    sums = np.zeros((3, books[0].header.model.num_layers, len(books)))
    for window in windows.to(model.device):
        with _measured(model, books, len(window), sums, advance), torch.enable_grad():
            loss_of(model, window).backward()
    plain, both, by_correction = sums / windows[:, ::_EVERY].numel()
    sizes = np.divide(-both, by_correction, out=np.ones_like(both), where=by_correction > 0).clip(0, _LARGEST)
    return LayerDivergences((plain + 2 * sizes * both + sizes**2 * by_correction) / 2, sizes)


@contextmanager
def _measured(
    model: PreTrainedModel, books: Sequence[Codebook], num_tokens: int, sums: np.ndarray, advance: Callable[[], object]
) -> Iterator[None]:
    """While open, every backward pass adds to `sums`.

    They are of x^2, x y and y^2, where x is g . d without a correction, and y what the whole correction adds to it.
    """
    methods = [served_method(book) for book in books]
    with watched_run(model, methods[0], num_tokens) as run:

        def watch(attended: Attended) -> None:
            if not attended.output.requires_grad:
                return
            rows = (attended.query.detach(), attended.key.detach(), attended.value.detach())
            window, output = run.window(attended.module, *rows, attended.options), attended.output.detach()

            @torch.no_grad()
            def on_gradient(gradient: torch.Tensor) -> None:
                def moved(method: Method) -> torch.Tensor:
                    change = attend_window(window, method, run.sinks_seen(window), every=_EVERY) - output[:, ::_EVERY]
                    return (gradient[:, ::_EVERY] * change).sum((-2, -1)).double()

                for number, method in enumerate(methods):
                    plain = moved(replace(method, key_errors=None))
                    added = moved(method) - plain
                    for row, product in enumerate((plain * plain, plain * added, added * added)):
                        sums[row, window.layer, number] += product.sum().item()
                advance()

            attended.output.register_hook(on_gradient)

        with attention_watched(model, watch):
            yield


def served_method(book: Codebook) -> Method:
    """A codebook with the server's defaults."""
    name, bits, sinks = book.preset.name, book.preset.nominal_bits, book.header.sinks
    return Method(
        name, bits, _SERVED, VectorQuantiser(book), sinks=sinks, key_errors=book.k_errors, k_scale=book.k_scale
    )
