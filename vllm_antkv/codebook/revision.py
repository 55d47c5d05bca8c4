"""Identify a model's weights: models of the same sizes need different codebooks."""

import hashlib
from pathlib import Path

from huggingface_hub import hf_hub_download

from vllm_antkv.errors import CodebookError, reason

#: Blocks hashed of each weight file, evenly spread. Training changes all of them.
_BLOCKS = 64
_BLOCK_BYTES = 4096
_LETTERS = 16
_FILES = ("config.json", "*.safetensors", "*.bin")


def revision_of(model: str, revision: str | None = None) -> str:
    """A short name for the weights: the commit of a Hugging Face model, or a hash of a folder's config and weights.

    Args:
        model: folder or Hugging Face name.
        revision: branch, tag or commit of a Hugging Face model; None: its main branch.

    Raises:
        CodebookError: it is neither.
    """
    try:
        folder = Path(model)
        if not folder.is_dir():
            folder = Path(hf_hub_download(model, "config.json", revision=revision)).parent
        # A folder in the hub's cache is named after the commit; vLLM passes it when it is offline.
        return (folder.name if folder.parent.name == "snapshots" else _content_hash(folder))[:_LETTERS]
    except Exception as error:  # the hub's client raises errors of many libraries
        raise CodebookError(f"It cannot be told which weights '{model}' stands for ({reason(error)}).") from None


def _content_hash(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for pattern in _FILES for path in folder.glob(pattern)):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for block in range(_BLOCKS):
                file.seek(max(0, size - _BLOCK_BYTES) * block // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()
