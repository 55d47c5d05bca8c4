import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig

windows = st.integers(1, 4096)
recencies = st.one_of(st.just("none"), windows.map(lambda w: f"sliding:{w}"), windows.map(lambda w: f"log:{2 * w}"))
settings_dicts = st.fixed_dictionaries(
    {},
    optional={
        "codebooks": st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), min_size=1, max_size=20),
        "anchor_share": st.floats(0, 1),
        "sinks": st.booleans(),
        "prefix": st.integers(0, 4096),
        "recency": recencies,
        "prefill_reads_cache": st.booleans(),
    },
)


@given(settings_dicts)
def test_every_valid_setting_is_kept_through_json_and_back(values):
    config = AntKVConfig.from_additional_config({"antkv": values})
    assert {name: getattr(config, name) for name in values} == values
    assert AntKVConfig.model_validate_json(config.model_dump_json()) == config


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
