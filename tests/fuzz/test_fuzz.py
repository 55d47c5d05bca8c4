"""Whatever a codebook file or a setting holds, it is refused with one readable sentence or understood completely.

Inputs are close to good ones: for a moment, and the same each time. Longer: `--hypothesis-profile fuzz`.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.unit.spoilt import MODEL, PRESET, good_codebook, head
from vllm_antkv.codebook import Codebook
from vllm_antkv.codebook.tensors import OPTIONAL
from vllm_antkv.config import AntKVConfig
from vllm_antkv.errors import AntKVError, CodebookError, SettingsError
from vllm_antkv.presets import PRESETS

_MAX_SENTENCE = 600
_TENSOR_NAMES = ("k", "v", *OPTIONAL)


def _reads_well(error: AntKVError, path: Path) -> None:
    sentence = str(error).replace(str(path), "FILE")
    assert sentence.isprintable(), sentence
    assert sentence.endswith("."), sentence
    assert len(sentence) < _MAX_SENTENCE, sentence


def _loaded(path: Path) -> Codebook | None:
    """None: it was refused."""
    try:
        return Codebook.load(path)
    except CodebookError as error:
        _reads_well(error, path)
        return None


def _tensors(codebook: Codebook) -> tuple[torch.Tensor, ...]:
    return (*codebook.k, *codebook.v, codebook.k_errors, codebook.k_scale)


def _whole_codebook() -> Codebook:
    """A good one with everything that a codebook may hold."""
    codebook = good_codebook()
    orders = {PRESET: tuple(reversed(range(MODEL.head_size)))}
    errors = torch.rand(
        (MODEL.num_layers, MODEL.num_kv_heads, MODEL.head_size), generator=torch.Generator().manual_seed(0)
    )
    header = codebook.header.model_copy(update={"k_orders": orders})
    return dataclasses.replace(codebook, header=header, k_errors=errors, k_scale=torch.full_like(errors, 0.5))


# A file: the bytes of a good one with a few of them changed.


#: (operation, place as a share of the file or of its header, in the header?, bytes).
_EDITS = st.lists(
    st.tuples(
        st.sampled_from(["overwrite", "insert", "delete", "flip", "cut", "double"]),
        st.floats(0, 1, exclude_max=True),
        st.booleans(),
        st.binary(min_size=1, max_size=16) | st.sampled_from([b"0", b"9" * 20, b'"', b"{", b"]", b"\0", b"\xff"]),
    ),
    min_size=1,
    max_size=4,
)  # fmt: skip


def _check_bytes(edits: list[tuple[str, float, bool, bytes]], path: Path) -> None:
    _whole_codebook().save(path)
    good = path.read_bytes()
    content = bytearray(good)
    for operation, share, in_header, new in edits:
        end = min(len(content), 2000) if in_header else len(content)
        at = int(share * end)
        if operation == "overwrite":
            content[at : at + len(new)] = new
        elif operation == "insert":
            content[at:at] = new
        elif operation == "delete":
            del content[at : at + len(new)]
        elif operation == "flip" and at < len(content):
            content[at] ^= 1 << (new[0] % 8)
        elif operation == "cut":
            del content[at:]
        elif operation == "double":
            content[at:at] = content[at : at + 100]
    path.write_bytes(content)
    if (loaded := _loaded(path)) is not None:
        # What came through is the same codebook, written another way: 1e-05 is 1E-05, and blanks mean nothing.
        expected = _whole_codebook()
        assert all(map(torch.equal, _tensors(loaded), _tensors(expected)))
        assert loaded.header.model_copy(update={"checksum": ""}) == expected.header


# Our header: any JSON in any place, with the checksum that belongs to it, as whoever means harm would write it.

_NUMBERS = st.one_of(
    st.integers(-3, 300),
    st.sampled_from([0, -1, 2**31, 2**31 - 1, 2**63, 2**64, 10**30, 10**4000]),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([1.0, 2.0, 1e-320, 1e308]),
)
_TEXTS = st.one_of(st.text(max_size=8), st.sampled_from([*PRESETS, "1", "../..", "\x1b[2J", "a\nb", "x" * 2000]))
_SCALARS = st.one_of(st.none(), st.booleans(), _NUMBERS, _TEXTS)
_JSON = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXTS, inner, max_size=4), max_leaves=6
)
_SINKS = st.fixed_dictionaries(
    {
        "layer": st.integers(-1, 3) | _JSON,
        "channels": st.lists(st.integers(-1, 70), max_size=3) | _JSON,
        "threshold": st.floats() | _JSON,
    }
)
_FIELDS = st.dictionaries(st.sampled_from([*MODEL.model_dump(), "depth"]), _JSON, min_size=1, max_size=2)
_PRESET_NAMES = st.sampled_from(sorted(PRESETS))
_ORDERS = st.permutations(range(MODEL.head_size)) | st.lists(st.integers(-1, MODEL.head_size))
_HEADER_CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "format_version": st.sampled_from([1, 1.0, True]) | _JSON,
        "preset": _PRESET_NAMES | _JSON,
        "model": _FIELDS.map(lambda changes: {**MODEL.model_dump(), **changes}) | _JSON,
        "sinks": _SINKS | _JSON,
        "layers": st.lists(_PRESET_NAMES | _JSON, min_size=1, max_size=3) | _JSON,
        "k_orders": st.dictionaries(_PRESET_NAMES | _TEXTS, _ORDERS | _JSON, max_size=2) | _JSON,
        "prefix": _JSON,
        "calibration": st.dictionaries(_TEXTS, _JSON, max_size=3) | _JSON,
        "antkv_version": _TEXTS | _JSON,
        "unknown": _JSON,
    },
)


def _check_header(changes: dict[str, Any], path: Path) -> None:
    _whole_codebook().save(path)
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        header = {**json.loads(file.metadata()["antkv"]), **changes}
    header["checksum"] = _checksum(header, tensors)
    save_file(tensors, path, {"antkv": json.dumps(header)})
    if (loaded := _loaded(path)) is not None:
        _is_whole(loaded, path)


def _checksum(header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str:
    """As docs/codebook-file.md describes it, independently of the loader."""
    content = {key: value for key, value in header.items() if key != "checksum"}
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].numpy().tobytes())
    return digest.hexdigest()


def _is_whole(codebook: Codebook, path: Path) -> None:
    """Everything that serving relies on."""
    model, preset, sinks = codebook.header.model, codebook.preset, codebook.header.sinks
    assert len(codebook.k) == len(codebook.v) == len(codebook.header.layer_presets) == model.num_layers
    for k, v, of_layer in zip(codebook.k, codebook.v, codebook.header.layer_presets, strict=True):
        num_sub_vectors = model.head_size // of_layer.sub_vector_size
        shape = (model.num_kv_heads, num_sub_vectors, of_layer.num_centroids, of_layer.sub_vector_size)
        assert k.shape == v.shape == shape
    if sinks is not None:
        assert 0 <= sinks.layer < model.num_layers
        assert sinks.channels
        assert all(0 <= channel < model.hidden_size for channel in sinks.channels)
        assert 0 < sinks.threshold < float("inf")
    for order in codebook.header.k_orders.values():
        assert sorted(order) == list(range(model.head_size))
    codebook.save(path)
    assert Codebook.load(path, preset.name, model).header == codebook.header.model_copy(
        update={"checksum": Codebook.load(path).header.checksum}
    )


# The header of safetensors: tensors of any form, in a small file.

_SIZES = st.integers(-1, 300) | st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64 - 1, 10**18])
_TENSOR = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F16", "F32", "BF16", "I8", "U64", "BOOL", "F8_E4M3", "F4", "X1", "f16"]),
        "shape": st.lists(_SIZES, max_size=6) | st.just([2, 2, 2, 256, 8]),
        "data_offsets": st.lists(_SIZES, max_size=3) | st.sampled_from([[0, 32768], [32768, 65536], [0, 4]]),
    }
)
_TENSORS = st.dictionaries(st.sampled_from([*_TENSOR_NAMES, "w", "../k", ""]) | _TEXTS, _TENSOR | _JSON, max_size=3)


def _check_tensors(example: tuple[dict[str, Any], bytes, int], path: Path) -> None:
    tensors, body, length_error = example
    _whole_codebook().save(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    text = json.dumps({"__metadata__": metadata, **tensors}).encode()
    path.write_bytes(head(max(0, len(text) + length_error)) + text + body)
    assert _loaded(path) is None, "tensors that are not those of the checksum"


# Settings.

_WINDOWS = st.sampled_from(["sliding:", "log:", "none", "sliding:8", "log:42", " "])
_RECENCIES = st.builds(str.__add__, _WINDOWS, st.integers(-5, 10**12).map(str) | st.text(max_size=3)) | _TEXTS
_EVEN = st.integers(1, 2048).map(lambda half: 2 * half)
_VALID = {
    "codebooks": st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]), min_size=1, max_size=20),
    "anchor_share": st.floats(0, 1),
    "sinks": st.booleans(),
    "prefix": st.integers(0, 4096),
    "recency": st.just("none") | st.builds("{}:{}".format, st.sampled_from(["sliding", "log"]), _EVEN),
    "prefill_reads_cache": st.booleans(),
    "kernels": st.sampled_from(["auto", "cpu", "triton", "cuda", "reference"]),
    "dashboard_text": st.booleans(),
}
_OTHERS = {"codebooks": _TEXTS, "anchor_share": st.floats(), "prefix": st.integers(-1, 5000), "recency": _RECENCIES}
_SETTINGS = st.fixed_dictionaries({}, optional=_VALID) | st.fixed_dictionaries(
    {}, optional={name: valid | _OTHERS.get(name, _JSON) | _JSON for name, valid in _VALID.items()}
)


def _check_settings(drawn: Any, path: Path) -> None:
    # vLLM reads them with Python's json, which knows NaN and lone surrogates.
    found = json.loads(json.dumps(drawn))
    try:
        config = AntKVConfig.from_additional_config(found)
    except SettingsError as error:
        _reads_well(error, path)
        return
    expected = found.get("antkv", {}) if found is not None else {}
    assert {name: getattr(config, name) for name in expected} == expected
    assert AntKVConfig.model_validate_json(config.model_dump_json()) == config
    assert 0 <= config.anchor_rows <= 128
    assert str(config.recency_policy) == config.recency


#: Inputs, and a check that fails when one is neither refused nor understood; it may write the file at a path.
TARGETS: dict[str, tuple[SearchStrategy[Any], Callable[[Any, Path], None]]] = {
    "bytes of a codebook": (_EDITS, _check_bytes),
    "header of a codebook": (_HEADER_CHANGES, _check_header),
    "tensors of a codebook": (
        st.tuples(_TENSORS, st.binary(max_size=64) | st.just(bytes(65536)), st.sampled_from([0, 0, 0, -1, 1, 8])),
        _check_tensors,
    ),
    "settings": (st.fixed_dictionaries({"antkv": _SETTINGS | _JSON}) | _JSON, _check_settings),
}


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_not_understood_is_refused(name, tmp_path):
    inputs, check = TARGETS[name]

    @given(inputs)
    @settings(suppress_health_check=list(HealthCheck))
    def fuzz(example: Any) -> None:
        check(example, tmp_path / "codebook")

    fuzz()
