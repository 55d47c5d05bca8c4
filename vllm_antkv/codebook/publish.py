"""Publish codebooks to a folder or a Hugging Face repository, whose name servers then take."""

from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi

from vllm_antkv.codebook.file import Codebook
from vllm_antkv.codebook.hub import FOLDER, Repository
from vllm_antkv.codebook.identity import ModelIdentity
from vllm_antkv.codebook.search import NoCodebookError, find_codebook
from vllm_antkv.errors import CodebookError, reason
from vllm_antkv.presets import PRESETS
from vllm_antkv.whole_file import write_whole

_CARD = "README.md"


def codebooks_of(model: str, identity: ModelIdentity, place: str | None) -> dict[Path, Codebook]:
    """Every codebook of a model that would be served, read and checked.

    Raises CodebookError when there is none, or one cannot be served.
    """
    codebooks = {}
    for preset in PRESETS:
        try:
            path = find_codebook(model, identity, preset, place)
        except NoCodebookError:
            continue
        codebooks[path] = Codebook.load(path, preset, identity)
    if not codebooks:
        raise NoCodebookError(
            f"There is no codebook of {model} to publish: make one with `antkv calibrate {model} --preset antkv-1bit "
            "--out DIR` and name DIR with --codebooks."
        )
    return codebooks


def publish(model: str, codebooks: dict[Path, Codebook], target: str) -> list[str]:
    """Copy codebooks into the folder `codebooks` of a folder or repository, with a README where there is none.

    Args:
        target: a folder, or `owner/name` of the Hugging Face hub, which is created if missing.

    Returns:
        The places they were copied to.

    Raises:
        CodebookError: the hub does not take them.
        OSError: the folder cannot be written.
    """
    repository = Repository.parse(target)
    card = _card(model, codebooks, target)
    if repository is None:
        return _to_folder(codebooks, card, Path(target))
    try:
        return _to_hub(codebooks, card, repository)
    except Exception as error:  # the hub's client raises errors of many libraries
        raise CodebookError(f"{target} does not take codebooks ({reason(error)}).") from None


def _to_folder(codebooks: dict[Path, Codebook], card: str, folder: Path) -> list[str]:
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    targets = []
    for path in codebooks:
        target = folder / FOLDER / path.name
        write_whole(target, path.read_bytes())
        targets.append(str(target))
    if not (folder / _CARD).exists():
        (folder / _CARD).write_text(card)
    return targets


def _to_hub(codebooks: dict[Path, Codebook], card: str, repository: Repository) -> list[str]:
    api = HfApi()
    api.create_repo(repository.name, exist_ok=True)
    additions = [CommitOperationAdd(f"{FOLDER}/{path.name}", path) for path in codebooks]
    if not api.file_exists(repository.name, _CARD, revision=repository.revision):
        additions.append(CommitOperationAdd(_CARD, card.encode()))
    commit = api.create_commit(
        repository.name, additions, commit_message="Add codebooks of vllm-antkv", revision=repository.revision
    )
    return [f"{repository.name}@{commit.oid}: {FOLDER}/{path.name}" for path in codebooks]


def _card(model: str, codebooks: dict[Path, Codebook], target: str) -> str:
    """The README of a repository that has nothing else."""
    rows = []
    for codebook in codebooks.values():
        texts = ", ".join(map(str, codebook.header.calibration.get("texts", [])))
        rows.append(f"| `{codebook.preset.name}` | {codebook.num_bytes / 2**20:.1f} MiB | {texts} |")
    name = Path(model).name if Path(model).is_dir() else model
    base = "" if Path(model).is_dir() else f"base_model: {model}\n"
    return "\n".join(
        (
            f"---\nlibrary_name: vllm-antkv\n{base}tags:\n- vllm\n- kv-cache\n---",
            f"# Codebooks of {name} for vllm-antkv\n",
            "```console",
            f"$ vllm serve {name} --kv-cache-dtype {next(iter(codebooks.values())).preset.name} \\",
            f'    --additional-config \'{{"antkv": {{"codebooks": "{target}"}}}}\'',
            "```\n",
            "| preset | centroids | learned from |\n|---|---|---|",
            *rows,
            "",
        )
    )
