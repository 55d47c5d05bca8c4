"""Settings that cannot be used, one a row, as they stand in `--additional-config '{"antkv": ...}'`."""

import json

import pytest

from vllm_antkv.config import AntKVConfig
from vllm_antkv.errors import SettingsError

#: The JSON of the entry `antkv`, the key that the sentence names, further words of it.
TABLE: list[tuple[str, str, str]] = [
    # The whole of it.
    ("null", "antkv", "valid dictionary"),
    ("[]", "antkv", "valid dictionary"),
    # Keys.
    ('{"anchors": 0.01}', "anchors", "not permitted"),
    ('{"\\u001b[2J": 1}', "\\x1b[2J", "not permitted"),
    # codebooks: a folder.
    ('{"codebooks": ""}', "codebooks", "at least 1 character"),
    ('{"codebooks": "a\\u0000b"}', "codebooks", "control characters"),
    ('{"codebooks": "\\u2028"}', "codebooks", "control characters"),
    ('{"codebooks": "\\ud800"}', "codebooks", "unicode"),
    (json.dumps({"codebooks": "x" * 100_000}), "codebooks", "no path has more than"),
    # calibrate: auto or never; calibration_text: a file.
    ('{"calibrate": "always"}', "calibrate", "'auto' or 'never'"),
    ('{"calibration_text": ""}', "calibration_text", "at least 1 character"),
    # anchor_dtype: fp8 or model.
    ('{"anchor_dtype": "fp16"}', "anchor_dtype", "'fp8' or 'model'"),
    # anchor_share: 0 to 1.
    ('{"anchor_share": 1.01}', "anchor_share", "less than or equal to 1"),
    ('{"anchor_share": -0.01}', "anchor_share", "greater than or equal to 0"),
    ('{"anchor_share": NaN}', "anchor_share", "got nan"),
    ('{"anchor_share": "0.01"}', "anchor_share", "valid number"),
    # sinks: true or false.
    ('{"sinks": 1}', "sinks", "valid boolean"),
    # prefix: 0 to 4096.
    ('{"prefix": -1}', "prefix", "greater than or equal to 0"),
    ('{"prefix": 4097}', "prefix", "less than or equal to 4096"),
    ('{"prefix": 8.5}', "prefix", "valid integer"),
    # recency: sliding:W, log:W or none.
    ('{"recency": ""}', "recency", "must be sliding:W, log:W"),
    ('{"recency": "window:8"}', "recency", "must be sliding:W, log:W"),
    ('{"recency": "sliding:0"}', "recency", "must be sliding:W, log:W"),
    ('{"recency": "sliding:\\u0661"}', "recency", "must be sliding:W, log:W"),
    ('{"recency": "sliding:8\\n"}', "recency", "must be sliding:W, log:W"),
    ('{"recency": "log:41"}', "recency", "must be sliding:W, log:W"),
    (json.dumps({"recency": "sliding:" + "9" * 100_000}), "recency", "must be sliding:W, log:W"),
    ('{"recency": 32}', "recency", "valid string"),
    # windows: coded or exact.
    ('{"windows": "auto"}', "windows", "'coded'"),
    # prefill_reads_cache: true or false.
    ('{"prefill_reads_cache": "true"}', "prefill_reads_cache", "valid boolean"),
    # kernels: a name.
    ('{"kernels": "opencl"}', "kernels", "'auto'"),
    # dashboard_text: true or false.
    ('{"dashboard_text": "yes"}', "dashboard_text", "valid boolean"),
]


@pytest.mark.parametrize(("text", "key", "words"), TABLE, ids=lambda value: value[:40])
def test_a_bad_setting(text, key, words, refused):
    with refused(SettingsError, f"'{key}'", words) as caught:
        AntKVConfig.from_additional_config({"antkv": json.loads(text)})
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("additional_config", [[], [1], "antkv", 5, 0, False, True])
def test_what_is_no_object_at_all(additional_config, refused):
    with refused(SettingsError, "must be a JSON object"):
        AntKVConfig.from_additional_config(additional_config)


@pytest.mark.parametrize("name", AntKVConfig.model_fields)
def test_every_setting_stands_in_the_table(name):
    assert any(key == name for _, key, _ in TABLE)
