"""What the package uses of vLLM is in every supported release, and what a release changes of it is found."""

import pytest

from scripts.vllm_contract.__main__ import base_of, differences, main
from scripts.vllm_contract.names import Package
from scripts.vllm_contract.releases import Release, UnavailableError, fetch, installed
from scripts.vllm_contract.sources import Function, Sources, parameters
from vllm_antkv.releases import SUPPORTED

SPECS = "vllm/v1/kv_cache_interface.py"
#: What a next release might do: file, text, its replacement, and how the line that is to be found begins.
CHANGES = {
    "a spec decides something new": (
        SPECS,
        "class SlidingWindowSpec(AttentionSpec):\n",
        "class SlidingWindowSpec(AttentionSpec):\n    @property\n    def decides(self) -> int:\n        return 1\n\n",
        "new      vllm.v1.kv_cache_interface:SlidingWindowSpec.decides",
    ),
    "somebody asks for our parent": (
        "vllm/v1/worker/utils.py",
        "\nlogger = ",
        "\ndef null_below(spec):\n    return isinstance(spec, SlidingWindowSpec)\n\nlogger = ",
        "asks     return isinstance(spec, SlidingWindowSpec)",
    ),
    "a function that is called needs more": (
        "vllm/v1/core/block_pool.py",
        "def get_new_blocks(self, num_blocks: int)",
        "def get_new_blocks(self, num_blocks: int, group: int)",
        "changed  vllm.v1.core.block_pool:BlockPool.get_new_blocks: (self, num_blocks) is now ",
    ),
    "a field has another name": (
        "vllm/v1/attention/backend.py",
        "    num_actual_tokens: int",
        "    num_tokens_now: int",
        "gone     vllm.v1.attention.backend:CommonAttentionMetadata.num_actual_tokens",
    ),
    "a class is gone": (
        "vllm/v1/kv_cache_spec_registry.py",
        "class KVCacheSpecRegistry",
        "class Registry",
        "gone     vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry",
    ),
}


@pytest.fixture(scope="module")
def package() -> Package:
    return Package()


def test_every_import_is_there(release: Release, package: Package) -> None:
    """What a release does not have is looked up behind a question for it."""
    sources = Sources(release.root)
    missing = [each for each in package.imports if sources.find(each.module, each.name) is None]
    assert not missing
    assert len(package.imports) > 50


def test_our_methods_take_what_vllm_passes(release: Release, package: Package) -> None:
    """By name, as vLLM may pass it so; more than that only with a default."""
    sources = Sources(release.root)
    checked = 0
    for each in package.overrides:
        definition = sources.find(each.base.module, each.base.name)
        assert definition is not None
        _, node = sources.members(definition).get(each.method, (None, None))
        if isinstance(node, Function) and each.method != "__init__":
            ours, theirs = each.parameters.split(", "), parameters(node).split(", ")
            given = [name.removesuffix("=") for name in theirs]
            if "*" not in each.parameters:
                assert [name.removesuffix("=") for name in ours][: len(given)] == given, each
            assert all(name.endswith("=") or "*" in name for name in ours[len(given) :]), each
            checked += 1
    assert checked > 15


def test_the_installed_vllm_is_a_supported_one() -> None:
    """A patch release fails here until somebody looked at it."""
    assert installed().version in SUPPORTED.values(), "run `make vllm-contract`, and change vllm_antkv/releases.py"


def test_a_release_is_compared_with_the_one_before() -> None:
    oldest, newest = SUPPORTED.values()
    assert [base_of(each) for each in (oldest, newest, "99.0.0")] == [oldest, oldest, newest]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, package: Package) -> list[str]:
    """Differences of the installed vLLM's sources after all these changes."""
    original, root = installed().root, tmp_path_factory.mktemp("spoilt")
    for path in (original / "vllm").rglob("*.py"):
        target = root / path.relative_to(original)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(path)
    for file, old, new, _ in CHANGES.values():
        text = (root / file).read_text()
        assert text.count(old) == 1
        (root / file).unlink()
        (root / file).write_text(text.replace(old, new))
    return list(differences(package, Sources(original), Sources(root)))


@pytest.mark.long
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str, found: list[str]) -> None:
    assert any(line.startswith(CHANGES[change][3]) for line in found)


@pytest.mark.long
def test_nothing_else_is_seen(found: list[str]) -> None:
    """Members that derived classes inherit are seen with each, and what a class that is gone had."""
    names = ("decides", "isinstance(spec", "get_new_blocks", "num_actual_tokens", "num_tokens_now", "SpecRegistry")
    assert not [line for line in found if not any(name in line for name in names)]


def test_without_an_index_there_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], refused
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with refused(UnavailableError):
        fetch("0.0.1")
    monkeypatch.setattr("sys.argv", ["vllm_contract"])
    assert main() == 2
    assert capsys.readouterr().err.count("\n") == 1
