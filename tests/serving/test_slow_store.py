"""A disk that does not answer: its own requests wait for it, no others do, and no step."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from tests.patience import PATIENCE
from tests.serving.conftest import EMBEDDED, Engine, flush, transfer
from tests.serving.test_page_store import PRESET
from vllm_antkv.vllm_adapter.kv_transfer import saver
from vllm_antkv.vllm_adapter.kv_transfer.files import PageFiles

pytestmark = pytest.mark.long

#: What asks the disk: for what there is, for pages, and to keep some.
OPERATIONS = ("has", "read", "write")


class Disk:
    """A file system whose calls return when they may."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._answers: dict[str, Event] = {}
        self.asked: dict[str, Event] = {}
        for name in OPERATIONS:
            self._answers[name], self.asked[name] = Event(), Event()
            self._answers[name].set()
            patch.setattr(PageFiles, name, self._waiting(name, getattr(PageFiles, name)))

    def _waiting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*arguments: Any) -> Any:
            self.asked[name].set()
            assert self._answers[name].wait(PATIENCE)
            return call(*arguments)

        return asked

    @contextmanager
    def silent(self, name: str) -> Iterator[None]:
        """While open, calls of this kind do not return."""
        self.asked[name].clear()
        self._answers[name].clear()
        try:
            yield
        finally:
            self._answers[name].set()


@pytest.fixture
def disk(monkeypatch) -> Disk:
    return Disk(monkeypatch)


def steps(engine: Engine, until: Callable[[], bool]) -> dict[str, tuple[tuple[int, ...], int]]:
    """Let it run until this holds; tokens of the requests that end, and how many of each prompt were cached."""
    ended = {}
    while not until():
        for output in engine.step():
            if output.finished:
                ended[output.request_id] = tuple(output.outputs[0].token_ids), output.num_cached_tokens
    return ended


@pytest.fixture(scope="module")
def kept(start_engine, default, prompts, tmp_path_factory) -> tuple[Path, list[tuple[int, ...]]]:
    """A folder with the pages of the last prompt, and what it and shorter ones are answered."""
    folder = tmp_path_factory.mktemp("kept")
    with start_engine(EMBEDDED, PRESET, default, kv_transfer_config=transfer(folder)) as engine:
        return folder, [each.tokens for each in engine.complete([prompts[-1], *prompts[:3]], together=False)]


@pytest.fixture
def engine(start_engine, default, kept, tmp_path) -> Iterator[Engine]:
    folder = Path(shutil.copytree(kept[0], tmp_path / "store"))
    with start_engine(EMBEDDED, PRESET, default, kv_transfer_config=transfer(folder)) as started:
        yield started


@pytest.mark.parametrize("operation", ["has", "read"])
def test_only_the_request_waits_whose_pages_they_are(engine, disk, kept, prompts, operation):
    _, (of_hit, *of_others) = kept
    requests = engine.core.scheduler.requests
    with disk.silent(operation):
        engine.add("hit", prompts[-1])
        steps(engine, disk.asked[operation].is_set)
        for number, prompt in enumerate(prompts[:3]):
            engine.add(str(number), prompt)
        others = steps(engine, lambda: len(requests) == 1)
        assert others == {str(number): (tokens, 0) for number, tokens in enumerate(of_others)}
    assert steps(engine, lambda: not requests) == {"hit": (of_hit, 512)}
    engine.assert_all_blocks_free()


def test_a_request_that_ends_while_it_is_loaded(engine, disk, kept, prompts):
    """Its blocks stay its own until nobody writes to them any more."""
    _, (of_hit, *of_others) = kept
    requests = engine.core.scheduler.requests
    with disk.silent("read"):
        engine.add("hit", prompts[-1])
        steps(engine, disk.asked["read"].is_set)
        num_free = engine.block_pool.get_num_free_blocks()
        engine.llm.llm_engine.abort_request(list(requests), internal=True)
        engine.add("other", prompts[0])
        assert [tokens for tokens, _ in steps(engine, lambda: len(requests) == 1).values()] == of_others[:1]
        assert engine.block_pool.get_num_free_blocks() == num_free
    steps(engine, lambda: not requests)
    engine.assert_all_blocks_free()
    engine.add("again", prompts[-1])
    assert steps(engine, lambda: not requests) == {"again": (of_hit, 512)}


def test_weights_that_come_while_a_request_is_loaded(engine, disk, kept, prompts):
    """It is computed with these."""
    requests = engine.core.scheduler.requests
    with disk.silent("read"):
        engine.add("hit", prompts[-1])
        steps(engine, disk.asked["read"].is_set)
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(EMBEDDED)})
    assert steps(engine, lambda: not requests) == {"hit": (kept[1][0], 0)}
    engine.assert_all_blocks_free()


def test_answers_do_not_wait_for_what_is_saved(engine, disk, prompts, tmp_path, said, monkeypatch):
    """What does not fit into memory meanwhile is not kept, and neither is anything wrong."""
    prompt, requests = prompts[-1][::-1], engine.core.scheduler.requests
    before = set(tmp_path.rglob("*-?"))
    monkeypatch.setattr(saver, "_WAITING", 100_000)
    with disk.silent("write"):
        engine.add("new", prompt)
        ((tokens, _),) = steps(engine, lambda: not requests).values()
        engine.assert_all_blocks_free()
        assert set(tmp_path.rglob("*-?")) == before
    engine.llm.collective_rpc(flush)
    assert len(set(tmp_path.rglob("*-?")) - before) in range(1, 8)
    assert sum("more slowly than they are computed" in message for message in said) == 1
    monkeypatch.undo()
    for num_cached in (range(512), [512]):
        answer = engine.complete_anew(prompt)
        assert answer.tokens == tokens
        assert answer.num_cached_tokens in num_cached
