"""Pages in a folder on a GPU: gathered behind a step, loaded behind those before, and nobody waits for the copies."""

import warnings
from pathlib import Path
from threading import Thread

import pytest
import torch

import vllm_antkv
from tests.gpu.conftest import FLOAT16, SAME_KERNELS, assert_close
from tests.gpu.on_device import DEVICE
from tests.serving.conftest import EMBEDDED, PRESET, transfer
from vllm_antkv.vllm_adapter.kv_transfer.lanes import Lane, Point
from vllm_antkv.vllm_adapter.kv_transfer.pages import Block, PoolPages

NUM_BLOCKS, PAGE_BYTES = 64, 1 << 20
#: Tokens of `prompts[-1]` that are whole VQ blocks.
HIT = 512
#: Some tenths of a second of a GPU, in cycles.
BUSY = 1 << 29
OURS = Path(vllm_antkv.__file__).parent


@pytest.fixture
def pool() -> torch.Tensor:
    return torch.randint(200, (NUM_BLOCKS, PAGE_BYTES), dtype=torch.uint8, device=DEVICE)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_pages_are_those_that_the_step_left(pool, num_layers):
    """More than go at once; the next step, queued before any is copied, overwrites them."""
    halves = pool.view(NUM_BLOCKS, 2, -1)
    layers = {"a": pool} if num_layers == 1 else {"b": halves[:, 1], "a": halves[:, 0]}
    pages = PoolPages({0: layers})
    blocks = [Block(0, str(index), index) for index in range(0, NUM_BLOCKS, 2)]
    expected = torch.cat([pages.flatten(1) for pages in layers.values()], dim=1).cpu().numpy()
    lane = Lane(DEVICE, pages.at_once)
    marks = torch.zeros(9, dtype=torch.int32, device=DEVICE)
    # Memory is allocated the first time.
    for some in list(pages.gather(blocks, marks.any())):
        some.contents(lane)
    torch.cuda._sleep(BUSY)
    pool ^= 255
    pool ^= 255
    gathered = list(pages.gather(blocks, marks.any()))
    pool.fill_(255)
    assert len(gathered) == 2
    assert not gathered[0].point.event.query(), "somebody waited for the device"
    found = [content for some in gathered for content in some.contents(lane)]
    assert found == [expected[block.block_id].tobytes() for block in blocks]


def test_nothing_is_kept_of_a_step_that_went_wrong(pool):
    pages = PoolPages({0: {"a": pool}})
    marks = torch.zeros(9, dtype=torch.int32, device=DEVICE)
    torch.cuda._sleep(BUSY)
    marks[7] = 1
    (gathered,) = pages.gather([Block(0, "one", 1)], marks.any())
    marks.zero_()
    assert gathered.contents(Lane(DEVICE, pages.at_once)) == []


def test_pages_are_written_behind_what_whoever_had_them_before_writes(pool):
    pages, lane = PoolPages({0: {"a": pool}}), Lane(DEVICE, PAGE_BYTES)
    expected = pool.cpu()
    expected[5] = 77
    torch.cuda._sleep(BUSY)
    pool[5] = 255
    point = Point(DEVICE)
    thread = Thread(target=pages.write, args=(Block(0, "five", 5), bytes([77]) * PAGE_BYTES, lane, point))
    thread.start()
    assert not point.event.query(), "somebody waited for the device"
    thread.join()
    # A later step reads them.
    assert torch.equal((pool + 0).cpu(), expected)


@pytest.mark.serving
@pytest.mark.parametrize("kernels", ["triton", "cuda"])
def test_a_restart_finds_what_a_local_hit_finds(start_engine, default, prompts, tmp_path, kernels):
    """Compiled and in CUDA graphs, as it is served; no step waits in a line of ours."""
    dtype, tolerance = ("float32", SAME_KERNELS) if kernels == "triton" else ("float16", FLOAT16)
    options = {"dtype": dtype, "enforce_eager": False, "max_num_batched_tokens": 300}
    options |= {"kv_transfer_config": transfer(tmp_path), "disable_log_stats": False}
    settings = default | {"kernels": kernels}
    with start_engine(EMBEDDED, PRESET, settings, **options) as engine, warnings.catch_warnings(record=True) as caught:
        engine.complete(prompts, together=False)
        local = engine.complete(prompts, together=False)
    waited = [warning for warning in caught if "sync" in str(warning.message)]
    assert not [str(warning) for warning in waited if Path(warning.filename).is_relative_to(OURS)]
    with start_engine(EMBEDDED, PRESET, settings, **options) as engine:
        engine.fill_with_nan()
        for together in (False, True):
            assert engine.llm.reset_prefix_cache()
            hits = engine.complete(prompts, together=together)
            assert hits[-1].num_cached_tokens == local[-1].num_cached_tokens == HIT
            assert_close(hits, local, tolerance)
        assert engine.count("external_prefix_cache_hits") >= 2 * HIT
        engine.assert_all_blocks_free()
