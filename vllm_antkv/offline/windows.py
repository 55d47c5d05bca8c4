"""Token ids of a text, cut into windows as models are trained on them."""

from collections.abc import Sequence
from typing import Any

import torch


def body_size(tokenizer: Any, length: int) -> int:
    """Tokens of text in a window of `length`: all but BOS, where the tokenizer has one."""
    return length - len(_bos(tokenizer))


def in_windows(tokens: Sequence[int], tokenizer: Any, length: int) -> torch.Tensor:
    """Windows of token ids in order and without overlap, each beginning with BOS where the tokenizer has one.

    A last, incomplete window is left out.

    Returns:
        (num_windows, length) int64.
    """
    bos, body = torch.tensor(_bos(tokenizer), dtype=torch.int64), body_size(tokenizer, length)
    num_windows = len(tokens) // body
    windows = torch.tensor(tokens[: num_windows * body], dtype=torch.int64).view(num_windows, body)
    return torch.cat((bos.expand(num_windows, -1), windows), dim=1)


def _bos(tokenizer: Any) -> list[int]:
    return [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
