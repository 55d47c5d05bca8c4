"""What an engine tells of its requests: tokens they hold, anchors of the last ones, and samples of the attention."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.serving.conftest import EMBEDDED, Engine, assert_same
from tests.serving.tiny import GEMMA, make_coded
from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.vllm_adapter.plan.engine_plan import engine_plan

SETTINGS = {"anchor_share": 0.03, "dashboard_text": True}
ANCHOR_ROWS = AntKVConfig(**SETTINGS).anchor_rows
NUM_LAYERS, NUM_HEADS = 5, 2


@pytest.fixture(scope="module")
def running(start_engine) -> Iterator[Engine]:
    with start_engine(EMBEDDED, "antkv-1bit", SETTINGS) as engine:
        yield engine


@pytest.fixture
def engine(running) -> Engine:
    """With nothing in its prefix cache."""
    assert running.llm.reset_prefix_cache()
    return running


def offsets(answer: dict[str, Any]) -> Any:
    """Of the only worker: [layer][block][head][K, V][row]."""
    (worker,) = answer["map"]["workers"]
    return worker


def add(engine: Engine, name: str, prompt: list[int]) -> None:
    """Give the engine a request, and run the step that computes the prompt."""
    engine.add(name, prompt, max_tokens=50)
    engine.step()


def impls(engine: Engine) -> list[Any]:
    """Of the layers that attend."""
    return [layer.impl for layer in engine.layers.values() if hasattr(layer, "impl")]


def test_every_head_keeps_its_anchors_in_every_block(engine, prompts):
    engine.complete([prompts[-1]])
    answer = engine.core.antkv_anchors(None, 0)
    num_blocks = len(prompts[-1]) // VQ_BLOCK_SIZE
    assert [each["blocks"] for each in answer["prompts"]] == [num_blocks]
    assert answer["prompts"][0]["running"] is False
    found = offsets(answer)
    assert (len(found), len(found[0]), len(found[0][0])) == (NUM_LAYERS, num_blocks, NUM_HEADS)
    for rows in (kind for layer in found for block in layer for head in block for kind in head):
        assert len(set(rows)) == ANCHOR_ROWS
        assert all(0 <= offset < VQ_BLOCK_SIZE for offset in rows)
    # The intact prefix is exact anyway.
    first_blocks = [row for layer in found for head in layer[0] for kind in head for row in kind]
    assert min(first_blocks) >= AntKVConfig().prefix


def test_what_prompts_share_has_the_same_anchors(engine, prompts):
    longer = prompts[-1]
    shorter = longer[: 2 * VQ_BLOCK_SIZE + 50]
    engine.complete([longer, shorter], together=False)
    answer = engine.core.antkv_anchors(None, 0)
    newest, before = (each["prompt"] for each in answer["prompts"][:2])
    assert newest == before + 1
    for mine, theirs in zip(offsets(answer), offsets(engine.core.antkv_anchors(before, 0)), strict=True):
        assert mine == theirs[:2]


def test_text_is_sent_only_where_the_setting_allows_it(engine, prompts, monkeypatch):
    prompt = prompts[-1]
    engine.complete([prompt])
    assert engine.core.antkv_anchors(None, 1)["map"]["token_ids"] == prompt[VQ_BLOCK_SIZE : 4 * VQ_BLOCK_SIZE]
    plan = engine_plan(engine.core.vllm_config)
    settings = plan.settings.model_copy(update={"dashboard_text": False})
    monkeypatch.setitem(
        engine.core.vllm_config.additional_config,
        "antkv",
        plan.model_copy(update={"settings": settings}).model_dump_json(),
    )
    assert engine.core.antkv_anchors(None, 1)["map"]["token_ids"] is None


def test_a_window_begins_no_later_than_at_the_last_block(engine, prompts):
    engine.complete([prompts[-1]])
    last = len(prompts[-1]) // VQ_BLOCK_SIZE - 1
    shown = engine.core.antkv_anchors(None, 10**9)["map"]
    assert (shown["first_block"], shown["blocks"]) == (last, 1)


def test_an_answer_has_no_more_rows_than_it_may(engine, prompts, monkeypatch):
    rows_per_block = 2 * NUM_LAYERS * NUM_HEADS * ANCHOR_ROWS
    monkeypatch.setattr("vllm_antkv.vllm_adapter.hooks.status._MAX_ROWS", 3 * rows_per_block - 1)
    engine.complete([prompts[-1]])
    assert engine.core.antkv_anchors(None, 0)["map"]["blocks"] == 2


def test_a_prompt_that_the_prefix_cache_forgot_is_not_shown(engine, prompts):
    engine.complete([prompts[-1]])
    number = engine.core.antkv_anchors(None, 0)["map"]["prompt"]
    assert engine.llm.reset_prefix_cache()
    assert engine.core.antkv_anchors(number, 0) == {"prompts": [], "map": None}


def test_a_running_request_is_shown_and_what_requests_share_counts_once(engine, prompts):
    longer = prompts[-1]
    # A hit can end at 512 tokens.
    shorter = longer[: 4 * VQ_BLOCK_SIZE + 50]
    assert engine.core.antkv_status()["tokens_in_use"] == 0
    add(engine, "longer", longer)
    status = engine.core.antkv_status()
    assert status["tokens_in_use"] == len(longer)
    # Of the open block, and a few more.
    assert 0 < status["pages_in_use"]["recency"] < 64
    add(engine, "shorter", shorter)
    status = engine.core.antkv_status()
    assert status["tokens_in_use"] == len(longer) + 1 + 50
    assert status["pages_in_use"]["vq"] == len(longer) // VQ_BLOCK_SIZE + 1 + 1
    assert [each["running"] for each in engine.core.antkv_anchors(None, 0)["prompts"][:2]] == [True, True]
    list(engine.steps())
    assert engine.core.antkv_status()["tokens_in_use"] == 0


def test_asking_changes_no_answer_and_leaves_nothing_behind(engine, prompts):
    batch = prompts[6:]
    silent = engine.complete(batch, max_tokens=6)
    before = sum(engine.core.antkv_status()["workers"][0]["sampled_attention"].values())
    assert engine.llm.reset_prefix_cache()
    asked = engine.complete(batch, max_tokens=6)
    for mine, theirs in zip(asked, silent, strict=True):
        assert_same(mine, theirs, tolerance=0)
    assert all(impl.observer is None for impl in impls(engine))
    report = engine.core.antkv_status()["workers"][0]
    assert sum(report["sampled_attention"].values()) == pytest.approx(before + 1)


@pytest.mark.long
def test_an_engine_at_rest_does_not_wake_its_workers(engine, prompts, monkeypatch):
    """vLLM's workers spin for a second after each call, and the metrics ask every five."""
    core = type(engine.core)
    ask, asked = core.collective_rpc, []

    def listen(self: Any, method: str, *args: Any) -> Any:
        asked.append(method)
        return ask(self, method, *args)

    monkeypatch.setattr(core, "collective_rpc", listen)
    for num_requests in range(1, 3):
        engine.complete([prompts[0]])
        # A server takes this step by itself: it tells the workers which requests are finished.
        engine.step()
        first = engine.core.antkv_status()
        assert [engine.core.antkv_status() for _ in range(3)] == 3 * [first]
        assert asked == num_requests * ["antkv_report"]
    add(engine, "running", prompts[-1])
    before = engine.core.antkv_status()["workers"][0]["tokens_stored"]
    assert before > first["workers"][0]["tokens_stored"]
    list(engine.steps())
    assert engine.core.antkv_status()["workers"][0]["tokens_stored"] > before
    assert asked == 4 * ["antkv_report"]


def test_samples_take_turns_among_the_layers(engine, prompts):
    """One layer is observed for one step; none is until somebody asks."""
    assert len(impls(engine)) == NUM_LAYERS
    sampled = []
    for _ in range(NUM_LAYERS):
        engine.core.antkv_status()
        (index,) = [number for number, impl in enumerate(impls(engine)) if impl.observer is not None]
        sampled.append(index)
        engine.complete([prompts[0]], max_tokens=3)
    assert sorted(sampled) == list(range(NUM_LAYERS))


def test_a_step_of_a_prompt_is_sampled(engine, prompts):
    """Others are replayed from CUDA graphs on a GPU, and call nobody."""
    before = sum(engine.core.antkv_status()["workers"][0]["sampled_attention"].values())
    engine.complete([prompts[-1]], max_tokens=1)
    (report,) = engine.core.antkv_status()["workers"]
    assert sum(report["sampled_attention"].values()) == pytest.approx(before + 1)
    assert report["sampled_attention"]["codes"] > 0


@pytest.mark.parametrize("kinds", [["sliding_attention", "full_attention"], ["sliding_attention"] * 2], ids=" ".join)
def test_a_layer_with_a_window_shows_the_anchors_that_it_still_has(start_engine, tmp_path, prompts, kinds):
    """While a request runs, those of the blocks that its window reaches; other layers show them all."""
    window, prompt = 200, prompts[-1]
    sizes = GEMMA | {"layer_types": kinds, "sliding_window": window, "max_position_embeddings": 1024}
    model = make_coded(tmp_path / "model", "gemma3_text", sizes)
    with start_engine(model, "antkv-1bit", SETTINGS) as engine:
        add(engine, "0", prompt)
        # The step after that of the prompt frees what it no longer sees.
        engine.step()
        answer = engine.core.antkv_anchors(None, 0)
        num_blocks, first_seen = len(prompt) // VQ_BLOCK_SIZE, (len(prompt) + 1 - window) // VQ_BLOCK_SIZE
        assert answer["map"]["blocks"] == num_blocks
        assert 0 < first_seen < num_blocks
        for kind, layer in zip(kinds, offsets(answer), strict=True):
            for block, heads in enumerate(layer):
                is_there = kind == "full_attention" or block >= first_seen
                for rows in (rows for head in heads for rows in head):
                    assert len({row for row in rows if row >= 0}) == (ANCHOR_ROWS if is_there else 0)
        list(engine.steps())
