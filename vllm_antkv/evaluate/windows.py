"""Evaluation text: from a file to windows of token ids, the same for the offline and the served evaluator."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from vllm_antkv.errors import SettingsError
from vllm_antkv.offline.windows import in_windows

#: Files that hold exact token ids. Text that a model sampled does not tokenise back to what was sampled.
IDS_SUFFIX = "_ids.json"


@dataclass(frozen=True)
class TextWindows:
    """What is evaluated.

    text: where the windows come from, for the report.
    ids: (num_windows, context) int64.
    """

    text: Path
    ids: torch.Tensor


def load_windows(
    path: Path, tokenizer: PreTrainedTokenizerBase, context: int, max_windows: int | None = None
) -> torch.Tensor:
    """Cut a text into windows of `context` tokens, in order and without overlap.

    A plain text file is tokenised as a whole; every window begins with BOS where the tokenizer has one. A file named
    `*_ids.json` holds a list of windows of token ids, of which the first `context` are taken as they are. A last,
    incomplete window is left out.

    Returns:
        (num_windows, context) int64.

    Raises:
        SettingsError: the file cannot be read, or does not fill one window.
    """
    content = _read(path)
    if path.name.endswith(IDS_SUFFIX):
        return _exact_windows(path, content, len(tokenizer), context)[:max_windows]
    tokens = tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"]
    windows = in_windows(tokens, tokenizer, context)
    if len(windows) == 0:
        raise SettingsError(f"{path} has {len(tokens)} tokens, fewer than one window of --context {context}.")
    return windows[:max_windows]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SettingsError(f"There is no text file {path}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read as plain text: {error}.") from None


def _exact_windows(path: Path, content: str, vocab_size: int, context: int) -> torch.Tensor:
    try:
        # From numbers of its own kind, so that no fraction is cut and no truth value counted.
        rows = [torch.tensor(row) for row in json.loads(content)]
    except (ValueError, TypeError, RuntimeError):
        rows = []
    if not rows or any(row.dim() != 1 or (len(row) and row.dtype != torch.int64) for row in rows):
        raise SettingsError(f"{path} is not a list of windows of token ids.")
    shortest = min(len(row) for row in rows)
    if shortest < context:
        raise SettingsError(f"{path} has a window of {shortest} tokens, fewer than --context {context}.")
    windows = torch.stack([row[:context] for row in rows])
    if windows.min() < 0 or windows.max() >= vocab_size:
        raise SettingsError(f"{path} holds token ids that the model does not have (its vocabulary: {vocab_size}).")
    return windows
