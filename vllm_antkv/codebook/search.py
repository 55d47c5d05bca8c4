"""Where codebooks are looked up: beside the model, among those shipped, in the user's cache."""

import hashlib
import importlib.resources
import os
from pathlib import Path

from platformdirs import user_cache_path

from vllm_antkv.codebook.identity import ModelIdentity
from vllm_antkv.codebook.revision import revision_of
from vllm_antkv.errors import CodebookError, SettingsError


class NoCodebookError(CodebookError):
    """There is no codebook for this model and preset anywhere."""


def codebook_path(folder: Path, preset: str) -> Path:
    """The file of one preset in a folder of codebooks."""
    return folder / f"{preset}.safetensors"


def find_codebook(
    model_name: str, identity: ModelIdentity, preset: str, folder: str | None = None, own: Path | None = None
) -> Path:
    """Where the codebook for this model is.

    `folder` when given; otherwise beside the model (`MODEL/antkv/`), among those shipped with vllm-antkv, in the user's
    cache for all models of these sizes, then in `own` (without it: the `own_folder` of the model's main revision).
    Raises NoCodebookError with the command that makes one when there is none.
    """
    folders = [Path(folder)] if folder is not None else default_folders(model_name, identity, own)
    for candidate in folders:
        path = codebook_path(candidate, preset)
        # Whatever has the name is the one that is meant: reading it says what is wrong with it.
        if os.path.lexists(path):
            return path
    out = folder or str(user_folder(identity))
    raise NoCodebookError(
        f"No {preset} codebook for {model_name} in {', '.join(map(str, folders))}: make one with "
        f"`antkv calibrate {model_name} --preset {preset} --out {out}`."
    )


def default_folders(model_name: str, identity: ModelIdentity, own: Path | None = None) -> list[Path]:
    """Folders searched when no `codebooks` setting is given, in order."""
    beside = [Path(model_name) / "antkv"] if Path(model_name).is_dir() else []
    folders = [*beside, shipped_folder(identity), user_folder(identity)]
    try:
        return [*folders, own or own_folder(model_name, identity)]
    except CodebookError:
        # Of weights that cannot be read here no server has learned anything either.
        return folders


def shipped_folder(identity: ModelIdentity) -> Path:
    """Where this package ships codebooks for a model."""
    return Path(str(importlib.resources.files("vllm_antkv.centroids"))) / identity.key


def user_folder(identity: ModelIdentity) -> Path:
    """Where this user's codebooks for a model are kept."""
    return user_cache_path("vllm-antkv") / identity.key


def own_folder(model_name: str, identity: ModelIdentity, revision: str | None = None, text: str | None = None) -> Path:
    """Where servers keep the codebooks that they have learned for exactly these weights.

    Args:
        revision: see `revision_of`.
        text: the file they were learned from; None: text of the model's own.

    Raises:
        SettingsError: `text` cannot be read.
        CodebookError: it cannot be told which weights these are.
    """
    folder = user_folder(identity) / revision_of(model_name, revision)
    return folder if text is None else folder / f"text-{_hash_of(text)}"


def _hash_of(text: str) -> str:
    try:
        return hashlib.sha256(Path(text).read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise SettingsError(f"The antkv setting calibration_text cannot be read: {text} ({error.strerror}).") from None
