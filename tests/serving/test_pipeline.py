"""Pipeline parallelism: each stage has the codes of its own layers, and the answers are those of one process."""

from typing import Any

import pytest

from tests.serving.conftest import EMBEDDED, PRESET, assert_all_same, transfer
from tests.serving.tiny import make_coded
from vllm_antkv.vllm_adapter.server.anchors import Anchors
from vllm_antkv.vllm_adapter.server.status import EngineStatus

pytestmark = pytest.mark.long


def shown(core: Any) -> tuple[EngineStatus, Anchors]:
    """What the routes show of an engine."""
    return EngineStatus.of(0, core.antkv_status()), Anchors.of({0: core.antkv_anchors(None, 0)}, None, 2, str)


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.release), 2])
def test_stages_answer_as_one_process(start_engine, default, prompts, tmp_path, num_ranks):
    """With sinks, which the first stage finds for both, in chunks, in batches, and behind hits, local or stored."""
    with start_engine(EMBEDDED, PRESET, default, max_num_batched_tokens=300) as engine:
        alone = engine.complete(prompts, together=False)
        status, anchors = shown(engine.core)
        assert status.sinks_found > 0
    options = {"pipeline_parallel_size": 2, "tensor_parallel_size": num_ranks}
    options["kv_transfer_config"] = transfer(tmp_path)
    # VLLM's stages do not start with --enforce-eager on CPUs, with `auto` neither.
    with start_engine(EMBEDDED, PRESET, default, max_num_batched_tokens=300, enforce_eager=False, **options) as engine:
        assert_all_same(engine.complete(prompts, together=False), alone)
        mine, found = shown(engine.core)
        same = ("pages_in_use", "tokens_stored", "sinks_found", "anchors_chosen", "implementation")
        assert [getattr(mine, name) for name in same] == [getattr(status, name) for name in same]
        assert mine.fallbacks == status.fallbacks == 0
        assert found == anchors
        assert_all_same(engine.complete(prompts), alone)
        assert engine.llm.reset_prefix_cache()
        stored = engine.complete(prompts[-1:])
        assert_all_same(stored, alone[-1:])
        assert stored[0].num_cached_tokens == 512
        engine.assert_all_blocks_free()


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.release), 150])
def test_stages_of_other_layers(start_engine, prompts, tmp_path, window):
    """Each stage has pages of another preset, of layers without and with windows."""
    changes = {"num_hidden_layers": 4, "sliding_window": window}
    model = make_coded(tmp_path, "mistral", changes, layers=(*2 * ["antkv-0.5bit"], *2 * ["antkv-1bit"]))
    options = {"max_model_len": 512, "max_num_batched_tokens": 300}
    in_stages = {**options, "pipeline_parallel_size": 2, "enforce_eager": False}
    some = prompts[:-1]
    with start_engine(model, PRESET, **options) as engine:
        alone = engine.complete(some, together=False)
    with start_engine(model, PRESET, **in_stages) as engine:
        assert_all_same(engine.complete(some), alone)
        engine.assert_all_blocks_free()
