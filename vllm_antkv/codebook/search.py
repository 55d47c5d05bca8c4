"""Where codebooks are searched: beside the model, among the shipped ones, in the user's cache, or in a named place."""

import hashlib
import importlib.resources
import os
from pathlib import Path

from platformdirs import user_cache_path

from vllm_antkv.codebook.hub import FOLDER, Repository
from vllm_antkv.codebook.identity import ModelIdentity
from vllm_antkv.codebook.revision import revision_of
from vllm_antkv.errors import CodebookError, SettingsError


class NoCodebookError(CodebookError):
    """There is no codebook for this model and preset anywhere."""


def codebook_path(folder: Path, preset: str) -> Path:
    """The file of one preset in a folder of codebooks."""
    return folder / f"{preset}.safetensors"


def find_codebook(
    model_name: str,
    identity: ModelIdentity,
    preset: str,
    place: str | None = None,
    revision: str | None = None,
    text: str | None = None,
) -> Path:
    """Where the codebook for this model is.

    Args:
        place: a folder, or a repository of the Hugging Face hub. Without it: beside the model (`MODEL/codebooks/`, of
            its repository too, or `MODEL/antkv/`), among those shipped with vllm-antkv, in the user's cache for all
            models of these sizes, then in `own_folder`.
        revision: see `own_folder`.
        text: see `own_folder`.

    Raises:
        NoCodebookError: there is none; with the command that makes one.
        CodebookError: the hub does not say whether there is one in `place`.
        SettingsError: `text` cannot be read.
    """
    repository = None if place is None else Repository.parse(place)
    if repository is not None:
        folders = repository.folders(preset)
    elif place is not None:
        folders = [Path(place)]
    else:
        folders = [*_in_own_repository(model_name, revision, preset)]
        folders += default_folders(model_name, identity, revision, text)
    for candidate in folders:
        path = codebook_path(candidate, preset)
        # Take whatever has the name, even a broken link: reading it gives the precise error.
        if os.path.lexists(path):
            return path
    searched = ", ".join(map(str, folders)) or f"the repository {place}"
    out = place if place and not repository else str(user_folder(identity))
    raise NoCodebookError(
        f"No {preset} codebook for {model_name} in {searched}: make one with "
        f"`antkv calibrate {model_name} --preset {preset} --out {out}`."
    )


def default_folders(
    model_name: str, identity: ModelIdentity, revision: str | None = None, text: str | None = None
) -> list[Path]:
    """Folders searched when no `codebooks` setting is given, in order; arguments as of `own_folder`."""
    own = [Path(model_name) / name for name in (FOLDER, "antkv")] if Path(model_name).is_dir() else []
    folders = [*own, shipped_folder(identity), user_folder(identity)]
    try:
        return [*folders, own_folder(model_name, identity, revision, text)]
    except CodebookError:
        # Where the weights cannot be read, no server can have learned a codebook.
        return folders


def _in_own_repository(model_name: str, revision: str | None, preset: str) -> list[Path]:
    """The codebook's folder in the model's own repository, where the model is a hub name."""
    repository = Repository.parse(model_name)
    if repository is None:
        return []
    try:
        return Repository(repository.name, revision).folders(preset)
    except CodebookError:
        return []


def shipped_folder(identity: ModelIdentity) -> Path:
    """Where this package ships codebooks for a model."""
    return Path(str(importlib.resources.files("vllm_antkv.centroids"))) / identity.key


def user_folder(identity: ModelIdentity) -> Path:
    """Where this user's codebooks for a model are kept."""
    return user_cache_path("vllm-antkv") / identity.key


def own_folder(model_name: str, identity: ModelIdentity, revision: str | None = None, text: str | None = None) -> Path:
    """Where servers store codebooks that they learned for exactly these weights.

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
