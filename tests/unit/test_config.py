import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig


@pytest.mark.parametrize("additional_config", [None, {}, {"antkv": {}}, {"someone_else": {"a": 1}}])
def test_no_settings_means_the_defaults(additional_config):
    assert AntKVConfig.from_additional_config(additional_config) == AntKVConfig()


@given(st.floats(0, 1), st.booleans(), st.sampled_from([("fp8", 1), ("model", 2)]))
def test_anchor_rows_follow_the_share(share, sinks, dtype):
    rows = AntKVConfig(anchor_share=share, anchor_dtype=dtype[0], sinks=sinks).anchor_rows
    assert 0 <= rows <= dtype[1] * VQ_BLOCK_SIZE
    assert rows % dtype[1] == 0
    assert rows == 0 or share > 0 or sinks
    assert rows >= dtype[1] or (share == 0 and not sinks)
    assert rows >= 2 or not sinks, "a sink has two"
    assert abs(rows / dtype[1] - share * VQ_BLOCK_SIZE) <= (2 if sinks else 1)
