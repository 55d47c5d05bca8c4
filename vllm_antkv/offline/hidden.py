"""A forward pass over one window: its hidden states layer by layer, and its loss."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

_NO_TARGET = -100


def logits_of(model: nn.Module, window: torch.Tensor) -> torch.Tensor:
    """Of one window, (seq_len,) int64: (seq_len, vocab_size); gradients reach all K and V."""
    # The parameters are frozen: the embeddings are where the graph that reaches every K and V begins.
    embeddings = model.get_input_embeddings()(window[None]).detach()  # type: ignore[operator]
    embeddings.requires_grad_(torch.is_grad_enabled())
    logits: torch.Tensor = model(inputs_embeds=embeddings, use_cache=False).logits
    return logits.flatten(0, 1)


def loss_of(model: nn.Module, window: torch.Tensor) -> torch.Tensor:
    """Causal language-model loss of one window, summed over its tokens.

    The sum, not the mean, so that gradients do not shrink with the window's length.

    Args:
        window: (seq_len,) int64.
    """
    logits = logits_of(model, window)
    # Nothing follows the last token. Its logits stay: cut off, they would be copied on the way back.
    targets = functional.pad(window[1:], (0, 1), value=_NO_TARGET)
    return functional.cross_entropy(logits.float(), targets, ignore_index=_NO_TARGET, reduction="sum")


def handed_on(output: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The hidden states, (num_windows, num_tokens, hidden_size), in what a decoder layer returns.

    Layers of Gemma-3n hand on several streams, of which attention reads the first.
    """
    hidden = output[0] if isinstance(output, tuple) else output
    return hidden[0] if hidden.dim() == 4 else hidden


@contextmanager
def captured_hidden(layers: Iterable[nn.Module], on_hidden: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """While active, hand the hidden state after each of these layers, (seq_len, hidden_size), to `on_hidden`."""

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        on_hidden(handed_on(output).detach()[0])

    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_hook(hook).remove)
        yield
