"""The contract sees what a release changes: real sources of vLLM, with one thing changed."""

from pathlib import Path

import pytest

from scripts.vllm_contract.__main__ import main
from scripts.vllm_contract.check import Finding, State, compare
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
        '    ) -> None:\n        """Remove and free blocks no longer',
        '        keep: int = 0,\n    ) -> None:\n        """Remove and free blocks no longer',
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
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Finding]:
    """What is to be looked at in the installed vLLM's sources after all these changes."""
    original, root = installed().root, tmp_path_factory.mktemp("spoilt")
    for path in (original / "vllm").rglob("*.py"):
        target = root / path.relative_to(original)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(path)
    for file, old, new, *_ in CHANGES.values():
        text = (root / file).read_text()
        assert text.count(old) == 1
        _write(root / file, text.replace(old, new))
    # What is no change: comments and docstrings of a class that every member of is looked at.
    text = (root / MANAGER).read_text().replace("    def ", "    # Said otherwise.\n    def ")
    assert '"""An abstract base class' in text
    _write(root / MANAGER, text.replace('"""An abstract base class', '"""Quite another class'))
    return {each.item: each for each in compare(Release("0.32.1", root)) if each.is_open}


def _write(path: Path, text: str) -> None:
    path.unlink()
    path.write_text(text)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str, findings: dict[str, Finding]) -> None:
    *_, item, state, broken = CHANGES[change]
    assert findings[item].state is state
    # A reason stands with the first item of its statement.
    same_module = [each.broken or "" for each in findings.values() if each.item.split(":")[0] == item.split(":")[0]]
    assert broken is None or any(broken in reason for reason in same_module)


def test_nothing_else_is_seen(findings: dict[str, Finding]) -> None:
    """Members that derived classes inherit are seen with each, and what a class that is gone had."""
    items = [item for *_, item, _, _ in CHANGES.values()]
    places = {item.rpartition(".")[0] if ".py" not in item else item for item in items}
    assert not [item for item in findings if not item.startswith(tuple(places))]


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
