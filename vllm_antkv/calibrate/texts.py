"""Calibration text: from files or data sets to windows of token ids."""

import hashlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_antkv.errors import CalibrationError, reason
from vllm_antkv.offline.windows import body_size, in_windows

#: Characters tokenised at a time, per token of a window. A piece then holds about four windows of English, so that few
#: windows straddle two pieces, and a window of any text up to 16 characters per token fits in one.
_PIECE_CHARS_PER_TOKEN = 16


@dataclass(frozen=True)
class Text:
    """One calibration text.

    name: file name without folders, or the name of a data set.
    """

    name: str
    content: str


def read_text(source: str) -> Text:
    """Read a plain text file, or the `text` column of a data set's training split.

    Raises CalibrationError when it is neither, not UTF-8, or empty.
    """
    path = Path(source)
    if path.is_file():
        try:
            content = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CalibrationError(f"{source} cannot be read as plain text ({reason(error)}).") from None
        text = Text(path.name, content)
    elif path.is_dir():
        raise CalibrationError(f"'{source}' is a folder: give the text files in it, each with a --text of its own.")
    elif importlib.util.find_spec("datasets") is None:
        raise CalibrationError(
            f"There is no text file '{source}', and data sets cannot be loaded by name without `pip install datasets`."
        )
    else:
        text = Text(source, _read_dataset(source))
    if not text.content.strip():
        raise CalibrationError(f"Calibration text '{source}' is empty.")
    return text


def built_in_text() -> Text:
    """The text that comes with the package; `docs/calibration.md` says what it is made of."""
    return Text("built-in", (Path(__file__).parent / "text.txt").read_text(encoding="utf-8"))


def text_hash(texts: Sequence[Text]) -> str:
    """SHA-256 over the contents, in order."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(hashlib.sha256(text.content.encode()).digest())
    return digest.hexdigest()


def token_windows(texts: Sequence[Text], tokenizer: Any, samples: int, seq_len: int, seed: int) -> torch.Tensor:
    """Cut texts into windows of token ids, each beginning with BOS where the tokenizer has one.

    Pieces of all texts are drawn in an order set by the seed and tokenised only until there are enough tokens: a corpus
    of any size costs no more than what is used of it.

    Returns:
        (num_windows, seq_len) int64 with num_windows <= samples.

    Raises:
        CalibrationError: the texts do not fill one window.
    """
    body = body_size(tokenizer, seq_len)
    chars = _PIECE_CHARS_PER_TOKEN * seq_len
    pieces = [text.content[start : start + chars] for text in texts for start in range(0, len(text.content), chars)]
    tokens: list[int] = []
    for index in np.random.default_rng(seed).permutation(len(pieces)):
        tokens += tokenizer(pieces[index], add_special_tokens=False, verbose=False)["input_ids"]
        if len(tokens) >= samples * body:
            break
    windows = in_windows(tokens[: samples * body], tokenizer, seq_len)
    if len(windows) == 0:
        raise CalibrationError(
            f"The calibration text has {len(tokens)} tokens, fewer than one window of {seq_len}: give more text or a "
            "smaller --seq-len."
        )
    return windows


def _read_dataset(name: str) -> str:
    import datasets

    try:
        return "\n".join(datasets.load_dataset(name, split="train")["text"])
    except Exception as error:  # the library raises its own, its hub client's and its parsers' errors
        raise CalibrationError(
            f"'{name}' is neither a text file nor a data set with a text column ({reason(error)})."
        ) from None
