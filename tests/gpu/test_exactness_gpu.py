"""What real vLLM serves on a GPU equals `auto` where everything is exact, and does not depend on scheduling.

The cases are those of tests/serving/test_exactness.py that a GPU can spoil.
"""

import pytest

from tests.gpu.conftest import OTHER_KERNELS, SAME_KERNELS, assert_close
from tests.serving.conftest import EMBEDDED, PRESET

pytestmark = pytest.mark.serving

NO_ANCHORS = {"anchor_share": 0.0, "sinks": False}


@pytest.mark.parametrize("settings", [{"prefix": 1024}, {"recency": "sliding:1024"}], ids=str)
def test_equals_auto_where_every_token_is_exact(start_engine, default, auto, prompts, settings):
    with start_engine(EMBEDDED, PRESET, default | settings, max_num_batched_tokens=300) as engine:
        assert_close(engine.complete(prompts), auto, OTHER_KERNELS)


def test_codes_alone_differ_from_auto(alone, auto):
    """The comparisons of this file can fail."""
    with pytest.raises(AssertionError):
        assert_close(alone, auto, OTHER_KERNELS)


@pytest.mark.parametrize("settings", [NO_ANCHORS, {}], ids=str)
def test_same_in_mixed_batches_with_reused_blocks(start_engine, default, prompts, settings):
    """Chunks of prompts beside decodes, in pages full of NaN at first, then of what earlier requests left."""
    settings = default | settings
    with start_engine(EMBEDDED, PRESET, settings, enable_prefix_caching=False) as engine:
        alone = engine.complete(prompts, together=False)
    options = {"num_gpu_blocks_override": 400, "max_num_batched_tokens": 200, "enable_prefix_caching": False}
    with start_engine(EMBEDDED, PRESET, settings, **options) as engine:
        engine.fill_with_nan()
        first = engine.complete(prompts)
        assert_close(engine.complete(prompts), first, SAME_KERNELS)
        assert_close(first, alone, SAME_KERNELS)
        assert_close(engine.complete(prompts[::-1]), alone[::-1], SAME_KERNELS)
        engine.assert_all_blocks_free()


@pytest.mark.parametrize("settings", [NO_ANCHORS, {}], ids=str)
def test_same_after_preemption(start_engine, default, prompts, settings):
    short = [prompt[:40] for prompt in prompts[1:9]]
    options = {"max_model_len": 256, "num_gpu_blocks_override": 120, "enable_prefix_caching": False}
    with start_engine(EMBEDDED, PRESET, default | settings, disable_log_stats=False, **options) as engine:
        alone = engine.complete(short, max_tokens=110, together=False)
        together = engine.complete(short, max_tokens=110)
        assert engine.count("num_preemptions") > 0
        assert_close(together, alone, SAME_KERNELS)
        engine.assert_all_blocks_free()
