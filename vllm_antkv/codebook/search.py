"""Where codebooks are looked up: beside the model, among those shipped, in the user's cache."""

import importlib.resources
import os
from pathlib import Path

from platformdirs import user_cache_path

from vllm_antkv.codebook.identity import ModelIdentity
from vllm_antkv.errors import CodebookError


def codebook_path(folder: Path, preset: str) -> Path:
    """The file of one preset in a folder of codebooks."""
    return folder / f"{preset}.safetensors"


def find_codebook(model_name: str, identity: ModelIdentity, preset: str, folder: str | None = None) -> Path:
    """Where the codebook for this model is.

    `folder` when given; otherwise beside the model (`MODEL/antkv/`), among those shipped with vllm-antkv, then in the
    user's cache. Raises CodebookError with the command that makes one when there is none.
    """
    folders = [Path(folder)] if folder is not None else default_folders(model_name, identity)
    for candidate in folders:
        path = codebook_path(candidate, preset)
        # Whatever has the name is the one that is meant: reading it says what is wrong with it.
        if os.path.lexists(path):
            return path
    out = folder or str(user_folder(identity))
    raise CodebookError(
        f"No {preset} codebook for {model_name} in {', '.join(map(str, folders))}: make one with "
        f"`antkv calibrate {model_name} --preset {preset} --text FILE --out {out}`."
    )


def default_folders(model_name: str, identity: ModelIdentity) -> list[Path]:
    """Folders searched when no `codebooks` setting is given, in order."""
    beside = [Path(model_name) / "antkv"] if Path(model_name).is_dir() else []
    return [*beside, shipped_folder(identity), user_folder(identity)]


def shipped_folder(identity: ModelIdentity) -> Path:
    """Where this package ships codebooks for a model."""
    return Path(str(importlib.resources.files("vllm_antkv.centroids"))) / identity.key


def user_folder(identity: ModelIdentity) -> Path:
    """Where this user's codebooks for a model are kept."""
    return user_cache_path("vllm-antkv") / identity.key
