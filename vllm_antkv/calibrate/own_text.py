"""Calibration text that the model writes itself: no file and no network is needed, and it is the model's own language.

Tokens are drawn from the model's predictions as they are (temperature 1), all windows of a batch side by side. A window
begins with BOS, where the tokenizer has one, or with BOS and a short seed; where a document ends, another begins, as in
the text that models are trained on.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vllm_antkv.errors import CalibrationError

#: What the header says in the place of the names of texts.
NAME = "the model's own"
#: Windows that are written side by side. Fixed: the same model writes the same text, however much memory is free.
BATCH = 32
#: First words of documents of many kinds. Without BOS a model needs some; with it they add kinds that it begins rarely.
SEEDS = (
    "The",
    "I",
    "In",
    "A",
    "Once",
    "When",
    "This",
    "He said",
    "#",
    "1.",
    "Question:",
    "How to",
    "Dear",
    "import",
    "def",
    "{",
    "<",
    "Le",
    "Der",
    "El",
    "На",
    "我",
)
#: The model chooses.
_FREE = -1


def write_windows(
    model: nn.Module, tokenizer: Any, shape: tuple[int, int], seed: int, advance: Callable[[], object]
) -> torch.Tensor:
    """Let the model write windows of token ids.

    Args:
        model: a causal language model of transformers.
        shape: (num_windows, seq_len).
        seed: of all draws.
        advance: called after every token of a batch.

    Returns:
        shape, int64, on the CPU.

    Raises:
        CalibrationError: the model's predictions are not finite, or nothing says how its documents begin.
    """
    num_windows, seq_len = shape
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    first = torch.full((num_windows, seq_len), _FREE, device=device)
    for row, tokens in zip(first, beginnings(tokenizer, num_windows, seq_len), strict=True):
        row[: len(tokens)] = torch.tensor(tokens)
    ends = _ends_of_documents(model, device)
    bos = _FREE if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    with torch.inference_mode():
        batches = [_write(model, batch, ends, bos, generator, advance) for batch in first.split(BATCH)]
    return torch.cat(batches).cpu()


def beginnings(tokenizer: Any, num_windows: int, seq_len: int) -> list[list[int]]:
    """How each window begins, in token ids; at most `seq_len` of them.

    With BOS, every other window has no seed: it is what the model takes for a text.

    Raises CalibrationError when nothing says how documents begin.
    """
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    seeds = [tokenizer(seed, add_special_tokens=False)["input_ids"] for seed in SEEDS]
    seeds = [seed for seed in seeds if seed]
    if not seeds and not bos:
        raise CalibrationError("The model cannot write text to calibrate on: its tokenizer has no token to begin with.")
    first = []
    for index in range(num_windows):
        seeded = seeds and (not bos or index % 2)
        tokens = [*bos, *(seeds[(index // 2 if bos else index) % len(seeds)] if seeded else [])]
        first.append(tokens[:seq_len])
    return first


def _write(
    model: nn.Module,
    first: torch.Tensor,
    ends: torch.Tensor,
    bos: int,
    generator: torch.Generator,
    advance: Callable[[], object],
) -> torch.Tensor:
    """One batch: `first`, (num_windows, seq_len) int64, with what is free filled in."""
    written = first.clone()
    cache = None
    for position in range(1, written.shape[1]):
        current = written[:, position - 1]
        output = model(input_ids=current[:, None], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        drawn = _draw(output.logits[:, -1], generator)
        if bos != _FREE:
            # Where BOS also ends documents, it is not repeated.
            drawn = torch.where(torch.isin(current, ends) & (current != bos), bos, drawn)
        written[:, position] = torch.where(first[:, position] == _FREE, drawn, first[:, position])
        advance()
    return written


def _draw(logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A token for each row of (num_windows, vocab_size) logits."""
    chances = logits.float().softmax(-1)
    if not torch.isfinite(chances).all():
        raise CalibrationError("The model cannot write text to calibrate on: its predictions are not finite.")
    return torch.multinomial(chances, 1, generator=generator)[:, 0]


def _ends_of_documents(model: nn.Module, device: torch.device) -> torch.Tensor:
    """Token ids that end a document: one, several, or none."""
    ends = model.config.eos_token_id  # type: ignore[union-attr]
    known = [] if ends is None else ends if isinstance(ends, list) else [ends]
    return torch.tensor(known, dtype=torch.int64, device=device)
