"""`AntKVStore`: prompts computed before a restart, or by another server, are hits, and nothing wrong is ever read."""

import os
import shutil
import tempfile
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest

from loadtest.server import free_port
from tests.adapters import make_adapter
from tests.places import EMBEDDED, PRESET
from tests.serving.conftest import (
    Completion,
    Engine,
    Start,
    assert_aborts_leave_every_block_free,
    assert_all_same,
    assert_preemption_is_not_seen,
    assert_same,
    transfer,
)
from tests.serving.drafts import speculation
from vllm_antkv.errors import SettingsError
from vllm_antkv.vllm_adapter.block_pool.specs import RecencySpec
from vllm_antkv.vllm_adapter.kv_transfer import files as page_files
from vllm_antkv.vllm_adapter.kv_transfer import identity
from vllm_antkv.vllm_adapter.kv_transfer.files import PageFiles
from vllm_antkv.vllm_adapter.kv_transfer.ledger import Ledger
from vllm_antkv.vllm_adapter.kv_transfer.store import AntKVStore

#: Tokens of `prompts[-1]` that are whole VQ blocks.
HIT = 512


@pytest.fixture(scope="module")
def start(start_engine, default) -> Start:
    """An engine that keeps pages in a folder."""

    def started(folder: Path, model: Path = EMBEDDED, role: str = "kv_both", **options: Any) -> Any:
        settings = {**default, **options.pop("settings", {})}
        options = {"kv_transfer_config": transfer(folder, role), "max_num_batched_tokens": 300, **options}
        return start_engine(model, PRESET, settings, disable_log_stats=False, **options)

    return started


@pytest.fixture(scope="module")
def kept(start, prompts, tmp_path_factory) -> tuple[Path, list[Completion]]:
    """A folder with the pages of all prompts, and what local hits answer."""
    folder = tmp_path_factory.mktemp("kept")
    with start(folder) as engine:
        engine.complete(prompts, together=False)
        return folder, engine.complete(prompts, together=False)


def _is_hit(engine: Engine, prompt: list[int]) -> Completion:
    """What a hit in the store answers."""
    answer = engine.complete_anew(prompt)
    assert answer.num_cached_tokens == HIT
    return answer


@pytest.mark.long
def test_a_restart_finds_what_a_local_hit_finds(start, kept, prompts):
    """To the last bit; what the pool held before does not matter, and a server that only loads writes nothing."""
    folder, local = kept
    before = sorted(folder.rglob("*"))
    with start(folder, role="kv_consumer") as engine:
        engine.fill_with_nan()
        assert engine.complete(prompts, together=False) == local
        assert engine.complete(prompts, together=False) == local
        assert engine.llm.reset_prefix_cache()
        assert_all_same(engine.complete(2 * prompts[::-1]), 2 * local[::-1])
        engine.assert_all_blocks_free()
        # More tokens than were there: some come from the local cache, some from the folder, some from neither.
        engine.complete_anew(prompts[-1][:300])
        assert engine.complete([prompts[-1]]) == local[-1:]
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        assert engine.complete([prompts[-1]])[0].num_cached_tokens == 0
    assert sorted(folder.rglob("*")) == before


def _flip_a_bit(file: Path, other: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-9] ^= 4
    file.write_bytes(content)


#: What happens to a file: it, and another of its class.
DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "lost": lambda file, other: file.unlink(),
    "empty": lambda file, other: file.write_bytes(b""),
    "truncated": lambda file, other: file.write_bytes(file.read_bytes()[:-1]),
    "one bit": _flip_a_bit,
    "of other tokens": lambda file, other: shutil.copy(other, file),
    # Of the same tokens and size.
    "of other settings": lambda file, other: shutil.copy(file.with_suffix(".foreign"), file),
}


@pytest.mark.long
def test_a_damaged_page_is_a_miss_and_is_written_again(start, prompts, tmp_path, said):
    prompt = prompts[-1]
    with start(tmp_path / "foreign", settings={"sinks": False, "anchor_share": 0.016}) as engine:
        engine.complete([prompt])
    foreign = {file.name: file for file in (tmp_path / "foreign").rglob("*-?")}
    folder = tmp_path / "store"
    with start(folder) as engine:
        engine.complete([prompt])
        local = engine.complete([prompt])[0]
        files = sorted(file for file in folder.rglob("*-?") if file.is_file())
        for file in files:
            shutil.copy(foreign[file.name], file.with_suffix(".foreign"))
        groups = engine.core.scheduler.kv_cache_config.kv_cache_groups
        for group, spec in enumerate(groups):
            of_class = [file for file in files if file.name.endswith(f"-{group}")]
            assert len(of_class) > 3, spec
            for (name, damage), file, other in zip(
                DAMAGES.items(), cycle(of_class), cycle(of_class[1:] + of_class[:1]), strict=False
            ):
                assert file.stat().st_size == file.with_suffix(".foreign").stat().st_size
                whole = file.read_bytes()
                damage(file, other)
                assert not file.exists() or file.read_bytes() != whole, name
                answer = engine.complete_anew(prompt)
                assert answer.num_cached_tokens < HIT, (name, group)
                assert_same(answer, local)
                engine.assert_all_blocks_free()
                assert_same(_is_hit(engine, prompt), local)
        assert any(isinstance(spec.kv_cache_spec, RecencySpec) for spec in groups)
        # A folder whose files cannot be read, written or removed.
        files[0].unlink()
        files[0].mkdir()
        assert_same(engine.complete_anew(prompt), local)
        assert f"{files[0]} cannot be read (Is a directory): its tokens are computed again." in said
        shutil.rmtree(folder)
        folder.touch()
        assert_same(engine.complete_anew(prompt), local)
        assert f"Pages cannot be kept in {folder} (File exists)." in said


def _on_a_full_disk(**options: Any) -> Any:
    """A temporary file to which nothing can be written; it still has any size that it is given."""
    file: Any = tempfile.NamedTemporaryFile(**options)  # noqa: SIM115
    file.truncate = lambda size: None
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, file.fileno())
    os.close(full)
    return file


@pytest.mark.long
def test_a_full_disk_and_a_removed_folder_cost_hits_alone(start, prompts, tmp_path, said, monkeypatch):
    prompt, folder = prompts[-1], tmp_path / "store"

    def computed() -> Completion:
        answer = engine.complete_anew(prompt)
        assert answer.num_cached_tokens == 0
        engine.assert_all_blocks_free()
        return answer

    with start(folder) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(page_files, "tempfile", SimpleNamespace(NamedTemporaryFile=_on_a_full_disk))
            first = computed()
            assert not [path for path in folder.rglob("*-?") if path.is_file()]
            assert_same(computed(), first)
        # There is room again.
        assert_same(computed(), first)
        assert_same(_is_hit(engine, prompt), first)
        shutil.rmtree(folder)
        with monkeypatch.context() as patch:
            patch.setattr(page_files, "tempfile", SimpleNamespace(NamedTemporaryFile=_on_a_full_disk))
            assert_same(computed(), first)
        # Of all pages that were not kept, a line each time that the disk is full.
        assert said.count(f"Pages cannot be kept in {folder} (No space left on device).") == 2
        assert_same(computed(), first)
        assert_same(_is_hit(engine, prompt), first)
        # Between the scheduler's look and the load.
        monkeypatch.setattr(PageFiles, "has", lambda files, name: True)
        shutil.rmtree(folder)
        assert_same(computed(), first)
        assert sum("cannot be read (No such file or directory): its tokens" in message for message in said) == 1


def _config(model: Path = EMBEDDED, settings: Any = None, role: str = "kv_both", **options: Any) -> Any:
    given = {"kv_cache_dtype": PRESET, "dtype": "float32", "max_model_len": 512, **options}
    given = {"kv_transfer_config": transfer("/there", role), **given}
    return EngineArgs(str(model), additional_config={"antkv": settings or {}}, **given).create_engine_config()


def _identity(*arguments: Any, **options: Any) -> str:
    config = _config(*arguments, **options).kv_transfer_config
    assert config.kv_load_failure_policy == "recompute"
    return str(config.kv_connector_extra_config["identity"])


def test_what_a_server_does_is_said_by_its_options():
    with pytest.raises(SettingsError, match="pages of an antkv cache"):
        AntKVStore(_config(kv_cache_dtype="auto"), KVConnectorRole.SCHEDULER, None)
    with pytest.raises(SettingsError, match="absolute path"):
        _config(kv_transfer_config=transfer("here"))
    for wrong in ({"max_bytes": 0}, {"max_bytes": "1 GB"}, {"max_byte": 1 << 30}):
        with pytest.raises(SettingsError, match=f"setting '{next(iter(wrong))}' of AntKVStore is not usable"):
            _config(kv_transfer_config=transfer("/there", **wrong))
    only_saves = AntKVStore(_config(role="kv_producer"), KVConnectorRole.SCHEDULER, None)
    assert only_saves.get_num_new_matched_tokens(SimpleNamespace(request_id="one"), 0) == (0, False)


def test_servers_whose_pages_differ_share_none(codebooks, tmp_path, monkeypatch):
    """What is of no concern to a page: where the model is, and what the dashboard shows."""
    same, other = (Path(shutil.copytree(EMBEDDED, tmp_path / name)) for name in ("same", "other"))
    weights = other / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 3] ^= 1
    weights.write_bytes(content)
    drafts = [speculation(*which, tmp_path / which[0]) for which in (("draft_model", 3), ("eagle", 3))]
    drafts.append({**drafts[0], "model": str(other)})
    mine = _identity()
    assert mine == _identity(same, settings={"dashboard_text": True})
    # N-grams have no pages.
    assert mine == _identity(speculative_config=speculation("ngram", 3, tmp_path))
    others = [
        _identity(other),
        _identity(settings={"codebooks": codebooks}),
        _identity(kv_cache_dtype="antkv-0.75bit"),
        _identity(settings={"recency": "sliding:40"}),
        _identity(settings={"kernels": "reference"}),
        _identity(dtype="bfloat16"),
        _identity(max_model_len=640),
        _identity(kv_cache_dtype_skip_layers=["1"]),
        _identity(hf_overrides={"rope_theta": 20000.0}),
        _identity(prefix_caching_hash_algo="sha256_cbor"),
        *(_identity(speculative_config=config) for config in drafts),
    ]
    monkeypatch.setattr(identity, "__version__", "0.2.1")
    others.append(_identity())
    assert len({mine, *others}) == 1 + len(others)
    weights.unlink()
    with pytest.raises(SettingsError, match="has none"):
        _identity(other, settings={"codebooks": codebooks})


@settings(max_examples=20)
@given(st.binary(min_size=1, max_size=99), st.integers(0, 1), st.data())
def test_a_file_is_read_as_it_was_written_or_not_at_all(tmp_path_factory, pages, rank, data):
    root = tmp_path_factory.mktemp("files")
    ledger = Ledger(root)
    files = PageFiles(ledger, "identity", rank, 2)
    files.write("name", "layout", pages)
    assert files.read("name", "layout") == pages
    path = next(path for path in root.rglob("name") if path.is_file())
    whole = path.read_bytes()
    others = [
        PageFiles(ledger, *key) for key in (("another", rank, 2), ("identity", 1 - rank, 2), ("identity", rank, 3))
    ]
    for there, name, layout in [*((other, "name", "layout") for other in others), (files, "eman", "layout")]:
        assert there.read(name, layout) is None
        there.write(name, layout, b"")
        moved = next(path for path in root.rglob(name) if path.is_file() and path.read_bytes() != whole)
        moved.write_bytes(whole)
        assert there.read(name, layout) is None
        assert not moved.exists()
    assert files.read("name", "layout") == pages
    damaged = bytearray(whole)
    damaged[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(data.draw(st.sampled_from([bytes(damaged), whole[: -1 - len(pages) // 2], whole + b"0"])))
    assert files.read("name", "layout") is None


@pytest.mark.long
def test_hits_beside_preemption_and_aborts(start, prompts, tmp_path):
    some = [prompts[-1][:300], prompts[4], prompts[6]]
    # Nine requests do not fit, even where some have not been loaded while others decode.
    options = {"max_model_len": 512, "num_gpu_blocks_override": 110}
    with start(tmp_path, **options) as engine:
        assert_preemption_is_not_seen(engine, some, times=3, max_tokens=100, anew=True)
        hits = engine.count("external_prefix_cache_hits")
        assert hits > 0
        assert_aborts_leave_every_block_free(engine, some)
        assert engine.count("external_prefix_cache_hits") > hits


@pytest.mark.long
def test_other_weights_and_adapters_find_nothing_and_are_not_kept(start, prompts, tmp_path):
    """The names of adapters, which vLLM's hashes have, say nothing of what they do."""
    folder, model = tmp_path / "store", tmp_path / "model"
    adapter = LoRARequest("one", 1, str(make_adapter(EMBEDDED, tmp_path / "adapter")))
    shutil.copytree(EMBEDDED, model)
    with start(folder) as engine:
        engine.complete(prompts[-1:])
        before = sorted(folder.rglob("*"))
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model)})
        assert engine.llm.reset_prefix_cache()
        assert [answer.num_cached_tokens for answer in engine.complete(prompts[-2:], together=False)] == [0, 0]
        assert sorted(folder.rglob("*")) == before
        engine.assert_all_blocks_free()
    with start(folder, enable_lora=True, max_loras=2, max_lora_rank=8) as engine:
        assert engine.complete(prompts[-1:], loras=[adapter])[0].num_cached_tokens == 0
        assert sorted(folder.rglob("*")) == before


def test_weights_stay_beside_nixl(start, tmp_path, monkeypatch):
    """Other servers were told where pages are of the weights before."""
    pytest.importorskip("nixl", reason="NIXL is not installed")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_port()))
    with (
        start(tmp_path, kv_transfer_config={"kv_connector": "NixlConnector", "kv_role": "kv_both"}) as engine,
        pytest.raises(SettingsError, match="cannot be reloaded beside NixlConnector"),
    ):
        engine.llm.collective_rpc("reload_weights")


@pytest.mark.long
def test_all_ranks_compute_again_what_one_cannot_load(start, kept, prompts, tmp_path, monkeypatch):
    # There as here (`made_quickly`).
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    with start(Path(shutil.copytree(kept[0], tmp_path / "store")), tensor_parallel_size=2) as engine:
        # Pages of one rank are of no use to two.
        assert engine.complete(prompts[-1:])[0].num_cached_tokens == 0
        assert_same(_is_hit(engine, prompts[-1]), kept[1][-1])
        for file in tmp_path.rglob("1-of-2/*/*"):
            _flip_a_bit(file, file)
        answer = engine.complete_anew(prompts[-1])
        assert answer.num_cached_tokens == 0
        assert_same(answer, kept[1][-1])
        assert_same(_is_hit(engine, prompts[-1]), kept[1][-1])
