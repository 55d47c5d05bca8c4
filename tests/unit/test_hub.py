"""Codebooks in repositories of the Hugging Face hub, over HTTP: found, pinned, kept, checked, published.

The hub is the part of its protocol that reads files of models.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote

import pytest
from huggingface_hub import CommitOperationAdd, HfApi, constants

from tests.http_server import Handler, Server
from tests.unit.test_codebook import MODEL, make
from vllm_antkv import cli
from vllm_antkv.codebook import Codebook, NoCodebookError, find_codebook
from vllm_antkv.codebook.hub import Repository
from vllm_antkv.errors import CodebookError

Files = dict[str, bytes]


class Hub(Server):
    """Repositories, each a list of commits of which the last is `main`; its URL is an HF_ENDPOINT.

    fetched: paths of files whose content was sent.
    """

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.repositories: dict[str, list[tuple[str, Files]]] = {}
        self.fetched: list[str] = []

    def commit(self, name: str, changes: Files) -> str:
        """Add a commit to a repository; its id."""
        commits = self.repositories.setdefault(name, [])
        files = {**commits[-1][1], **changes} if commits else dict(changes)
        oid = hashlib.sha1(f"{name} {len(commits)}".encode()).hexdigest()
        commits.append((oid, files))
        return oid

    def at(self, name: str, revision: str) -> tuple[str, Files] | None:
        """The commit of a repository that a revision stands for."""
        commits = self.repositories[name]
        if revision == "main":
            return commits[-1] if commits else None
        return next((commit for commit in commits if commit[0] == revision), None)


class _Handler(Handler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", unquote(self.path))
        if match is None or match[1] not in self.server.repositories:
            return self._refuse("RepoNotFound")
        found = self.server.at(match[1], match[2])
        if found is None:
            return self._refuse("RevisionNotFound")
        oid, files = found
        if match[3] not in files:
            return self._refuse("EntryNotFound", oid)
        content = files[match[3]]
        if self.command == "GET":
            self.server.fetched.append(match[3])
        self.send(200, content, {"X-Repo-Commit": oid, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'})

    do_HEAD = do_GET

    def _refuse(self, code: str, oid: str = "") -> None:
        self.send(404, b"", {"X-Error-Code": code, **({"X-Repo-Commit": oid} if oid else {})})


PRESET = "antkv-4bit"
FILE = f"codebooks/{PRESET}.safetensors"


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[Hub]:
    """A hub, an empty cache for what comes from it, and an empty one for what servers learn."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "users"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with Hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("/{repo_id}")
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "".join(template[1:]))
        yield hub


def content(tmp_path: Path, **changes: int) -> bytes:
    """Of a codebook file."""
    path = tmp_path / "made.safetensors"
    make(**changes).save(path)
    return path.read_bytes()


def find(place: str | None, model: str = "somebody/model", revision: str | None = None) -> Path:
    return find_codebook(model, MODEL, PRESET, place, revision)


def test_a_repository_is_found_by_its_name_and_fetched_once(hub, tmp_path):
    written = content(tmp_path)
    hub.commit("somebody/books", {FILE: written})
    path = find("somebody/books")
    assert path.read_bytes() == written
    Codebook.load(path, PRESET, MODEL)
    assert find("somebody/books") == path
    assert hub.fetched == [FILE]


def test_a_commit_stays_what_it_was(hub, tmp_path):
    old, new = content(tmp_path), content(tmp_path, seed=1)
    pinned = hub.commit("somebody/books", {FILE: old})
    hub.commit("somebody/books", {FILE: new})
    assert find("somebody/books").read_bytes() == new
    assert find(f"somebody/books@{pinned}").read_bytes() == old
    assert pinned in str(find(f"somebody/books@{pinned}"))


def test_offline_only_the_cache_is_asked(hub, tmp_path, monkeypatch, refused):
    hub.commit("somebody/books", {FILE: content(tmp_path)})
    path = find("somebody/books")
    hub.commit("somebody/others", {FILE: content(tmp_path)})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find("somebody/books") == path
    with refused(CodebookError, "HF_HUB_OFFLINE"):
        find("somebody/others")
    assert hub.fetched == [FILE]


def test_the_models_own_repository_is_searched_at_its_revision(hub, tmp_path):
    old, new = content(tmp_path), content(tmp_path, seed=1)
    pinned = hub.commit("somebody/model", {FILE: old, "config.json": b"{}"})
    hub.commit("somebody/model", {FILE: new})
    assert find(None).read_bytes() == new
    assert find(None, revision=pinned).read_bytes() == old


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("somebody/books", "in the repository somebody/books"),
        ("somebody/books@nowhere", "cannot be fetched"),
        ("nobody/books", "cannot be fetched"),
        (None, "No antkv-4bit codebook for somebody/model"),
    ],
)
def test_what_is_not_there_is_one_sentence(hub, place, says, refused):
    hub.commit("somebody/books", {"README.md": b"Nothing yet."})
    hub.commit("somebody/model", {"config.json": b"{}"})
    with refused(CodebookError, says) as caught:
        find(place)
    assert isinstance(caught.value, NoCodebookError) == (says != "cannot be fetched")


@pytest.mark.parametrize(
    ("text", "repository"),
    [
        ("owner/name", Repository("owner/name")),
        ("owner/na.me@v1.0", Repository("owner/na.me", "v1.0")),
        ("folder", None),
        ("./owner/name", None),
        ("/owner/name", None),
        ("a/b/c", None),
        ("../name", None),
        ("owner/name@", None),
        ("tests/unit", None),
    ],
)
def test_which_places_are_repositories(text, repository, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    assert Repository.parse(text) == repository


def test_what_is_published_is_found_by_its_name(hub, tmp_path, monkeypatch, capsys):
    """How files are uploaded is the hub's client's own business."""

    def create_commit(_: HfApi, name: str, operations: list[CommitOperationAdd], **more: object) -> SimpleNamespace:
        files = {}
        for operation in operations:
            with operation.as_file() as file:
                files[operation.path_in_repo] = file.read()
        return SimpleNamespace(oid=hub.commit(name, files))

    monkeypatch.setattr(HfApi, "create_repo", lambda _, name, exist_ok: hub.repositories.setdefault(name, []))
    monkeypatch.setattr(HfApi, "create_commit", create_commit)
    written = content(tmp_path)
    model = tmp_path / "model"
    (model / "antkv").mkdir(parents=True)
    (model / "antkv" / f"{PRESET}.safetensors").write_bytes(written)
    config = MODEL.model_dump() | {"model_type": "llama", "architectures": [MODEL.architecture]}
    names = {"num_layers": "num_hidden_layers", "num_kv_heads": "num_key_value_heads", "head_size": "head_dim"}
    (model / "config.json").write_text(json.dumps({names.get(name, name): value for name, value in config.items()}))
    assert cli.run(["publish", str(model), "somebody/books"]) == 0
    ((oid, files),) = hub.repositories["somebody/books"]
    assert capsys.readouterr().out.strip() == f"somebody/books@{oid}: {FILE}"
    assert files[FILE] == written
    card = files["README.md"].decode()
    assert '{"antkv": {"codebooks": "somebody/books"}}' in card
    assert str(tmp_path) not in card
    assert find("somebody/books").read_bytes() == written
