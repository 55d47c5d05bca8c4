"""The contract sees what a release changes: real sources of vLLM, with one thing changed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.vllm_contract.__main__ import main
from scripts.vllm_contract.check import CONSUMERS, Finding, State, compare
from scripts.vllm_contract.releases import Release, UnavailableError, fetch, installed

SPECS = "vllm/v1/kv_cache_interface.py"
MANAGER = "vllm/v1/core/single_type_kv_cache_manager.py"
#: What a next release might do: file, text, its replacement, and the item that is to be found.
CHANGES = {
    "a spec decides something new": (
        SPECS,
        "class SlidingWindowSpec(AttentionSpec):\n",
        "class SlidingWindowSpec(AttentionSpec):\n    @property\n    def decides(self) -> int:\n        return 1\n\n",
        "vllm.v1.kv_cache_interface:SlidingWindowSpec.decides",
        State.NEW,
        None,
    ),
    "somebody asks for our parent": (
        "vllm/v1/worker/utils.py",
        "\nlogger = ",
        "\ndef null_below(spec):\n    return isinstance(spec, SlidingWindowSpec)\n\nlogger = ",
        "vllm/v1/worker/utils.py::null_below: isinstance(spec, SlidingWindowSpec)",
        State.NEW,
        None,
    ),
    "a method that is overridden gets a parameter": (
        MANAGER,
        "num_prompt_tokens: int | None = None",
        "num_prompt_tokens: int | None = None, keep: int = 0",
        "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.remove_skipped_blocks",
        State.CHANGED,
        "its parameters are",
    ),
    "a function that is called needs more": (
        "vllm/v1/core/block_pool.py",
        "def get_new_blocks(self, num_blocks: int)",
        "def get_new_blocks(self, num_blocks: int, group: int)",
        "vllm.v1.core.block_pool:BlockPool.get_new_blocks",
        State.CHANGED,
        "it needs group as well",
    ),
    "a field has another name": (
        "vllm/v1/attention/backend.py",
        "    num_actual_tokens: int",
        "    num_tokens_now: int",
        "vllm.v1.attention.backend:CommonAttentionMetadata.num_actual_tokens",
        State.GONE,
        "there is no",
    ),
    "a function does something else": (
        "vllm/v1/core/block_pool.py",
        "    def free_blocks(self,",
        "    @profiled\n    def free_blocks(self,",
        "vllm.v1.core.block_pool:BlockPool.free_blocks",
        State.CHANGED,
        None,
    ),
    "a module is gone": (
        "vllm/v1/kv_cache_spec_registry.py",
        "class KVCacheSpecRegistry",
        "class Registry",
        "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.register",
        State.GONE,
        "there is no",
    ),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the installed vLLM's sources, of links where that is possible."""
    root = tmp_path_factory.mktemp("spoilt")
    for path in (installed().root / "vllm").rglob("*.py"):
        target = root / path.relative_to(installed().root)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(path)
    return root


@pytest.fixture(params=CHANGES.values(), ids=CHANGES.keys())
def spoilt(request: pytest.FixtureRequest, sources: Path) -> Iterator[tuple[list[Finding], str, State, str | None]]:
    file, old, new, item, state, broken = request.param
    path, original = sources / file, installed().root / file
    text = original.read_text()
    assert text.count(old) >= 1
    path.unlink()
    path.write_text(text.replace(old, new))
    # Another root for each, since sources are parsed once.
    root = sources.parent / f"{sources.name}-{request.node.name[-12:]}"
    root.symlink_to(sources)
    try:
        yield compare(Release("0.32.1", root)), item, state, broken
    finally:
        root.unlink()
        path.unlink()
        path.symlink_to(original)


def test_a_change_is_seen(spoilt: tuple[list[Finding], str, State, str | None]) -> None:
    findings, item, state, broken = spoilt
    open_ones = {each.item: each for each in findings if each.is_open}
    assert item in open_ones
    assert open_ones[item].state is state
    # The reason stands with the first item of a statement.
    reasons = [each.broken for each in open_ones.values() if each.broken]
    assert bool(reasons) == (broken is not None)
    assert broken is None or any(broken in reason for reason in reasons)


def test_comments_and_docstrings_are_no_change(sources: Path) -> None:
    path, original = sources / MANAGER, installed().root / MANAGER
    path.unlink()
    path.write_text("# A comment.\n\n" + original.read_text().replace('"""', '"""Said otherwise. '))
    findings = compare(Release("0.32.1", sources))
    path.unlink()
    path.symlink_to(original)
    assert [each.item for each in findings if each.state is not State.SAME] == []
    assert [each for each in findings if each.room == CONSUMERS]


def test_without_an_index_there_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], reads_well
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(UnavailableError) as error:
        fetch("0.0.1")
    reads_well(error.value)
    monkeypatch.setattr("sys.argv", ["vllm_contract"])
    assert main() == 2
    assert capsys.readouterr().err.count("\n") == 1
