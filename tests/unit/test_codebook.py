import json
import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.codebooks import random_codebook
from tests.unit import spoilt
from vllm_antkv import centroids
from vllm_antkv.codebook import (
    Codebook,
    ModelIdentity,
    SinkRule,
    codebook_path,
    default_folders,
    find_codebook,
    own_folder,
    search,
    shipped_folder,
    user_folder,
)
from vllm_antkv.codebook.tensors import checksum_of
from vllm_antkv.errors import CodebookError
from vllm_antkv.presets import LAYER_PRESETS, PRESETS, get_preset

SHIPPED = sorted(Path(centroids.__file__).parent.glob("*/*.safetensors"))
MODEL = spoilt.MODEL.model_copy(update={"head_size": 32})
same_file = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def make(preset="antkv-4bit", model=MODEL, seed=0, **more):
    return random_codebook(model, preset, seed, **more)


sink_rules = st.none() | st.builds(
    SinkRule,
    layer=st.integers(0, MODEL.num_layers - 1),
    channels=st.lists(st.integers(0, MODEL.hidden_size - 1), min_size=1, max_size=4).map(tuple),
    threshold=st.floats(1e-3, 1e6),
)


layer_presets = st.tuples(*2 * [st.sampled_from(sorted(LAYER_PRESETS))])
CHANNELS = (MODEL.num_layers, MODEL.num_kv_heads, MODEL.head_size)
#: What may be known of the channels of keys.
KEYS = {"k_errors": torch.rand(CHANNELS), "k_scale": torch.randint(-7, 8, CHANNELS).float().exp2()}


@given(
    preset=st.sampled_from(sorted(PRESETS)),
    layers=st.none() | layer_presets,
    sinks=sink_rules,
    known=st.sets(st.sampled_from(sorted(KEYS))),
)
@settings(parent=same_file, max_examples=15)
def test_what_is_saved_is_loaded(tmp_path, preset, layers, sinks, known):
    if layers is not None and sum(map(cost, layers)) > MODEL.num_layers * cost(preset):
        layers = (preset, preset)
    saved = replace(make(preset, sinks=sinks, layers=layers), **{name: KEYS[name] for name in known})
    path = tmp_path / "codebook.safetensors"
    saved.save(path)
    loaded = Codebook.load(path, preset, MODEL)
    assert all(map(torch.equal, (*loaded.k, *loaded.v), (*saved.k, *saved.v)))
    for name, rows in KEYS.items():
        assert torch.equal(getattr(loaded, name), rows) if name in known else getattr(loaded, name) is None
    assert loaded.header.model_copy(update={"checksum": ""}) == saved.header
    assert loaded.preset == get_preset(preset)
    assert loaded.num_bytes == saved.num_bytes
    assert len(loaded.identity) == 12


def test_a_file_that_says_it_has_no_trained_prefix_is_loaded(tmp_path):
    """As versions wrote it that could train one."""
    path = tmp_path / "c"
    make().save(path)
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["antkv"]) | {"prefix": None}
    tensors = load_file(path)
    header["checksum"] = checksum_of(header, tensors)
    save_file(tensors, path, {"antkv": json.dumps(header)})
    assert Codebook.load(path).header.checksum == header["checksum"]


def cost(preset):
    return LAYER_PRESETS[preset].code_bytes(MODEL.head_size)


def test_layers_of_a_preset_stand_together_and_come_back_in_order(tmp_path):
    model = MODEL.model_copy(update={"num_layers": 4})
    layers = ("antkv-0.375bit", "antkv-2bit", "antkv-1bit", "antkv-0.375bit")
    saved = make("antkv-1bit", model, layers=layers)
    saved.save(tmp_path / "c")
    shapes = {name: tensor.shape[:1] for name, tensor in load_file(tmp_path / "c").items()}
    counts = {"": 1, ".antkv-2bit": 1, ".antkv-0.375bit": 2}
    assert shapes == {kind + suffix: (count,) for kind in "kv" for suffix, count in counts.items()}
    loaded = Codebook.load(tmp_path / "c", "antkv-1bit", model)
    assert all(map(torch.equal, (*loaded.k, *loaded.v), (*saved.k, *saved.v)))
    assert [preset.name for preset in loaded.header.layer_presets] == list(layers)
    assert loaded.header.mix == "antkv-2bit in layers 1; antkv-1bit in layers 2; antkv-0.375bit in layers 0, 3"


@pytest.mark.parametrize("field", ModelIdentity.model_fields)
def test_the_wrong_model_is_refused_and_the_difference_named(tmp_path, refused, field):
    make().save(tmp_path / "c")
    other = MODEL.model_copy(update={field: "MistralForCausalLM" if field == "architecture" else 7})
    with refused(CodebookError, str(tmp_path / "c"), field):
        Codebook.load(tmp_path / "c", model=other)
    assert other.key != MODEL.key


def test_a_file_that_may_not_be_read_is_refused(tmp_path, refused):
    path = tmp_path / "c"
    make().save(path)
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    with refused(CodebookError, str(path)):
        Codebook.load(path)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "c"
    make(seed=1).save(path)
    before = path.read_bytes()
    full_disk = Mock(side_effect=OSError("No space left on device"))
    for step in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, step, full_disk)
            with pytest.raises(OSError, match="No space"):
                make(seed=2).save(path)
        assert path.read_bytes() == before
        assert os.listdir(tmp_path) == ["c"]


def test_a_codebook_that_could_not_be_loaded_is_not_saved(tmp_path):
    good = make()
    with pytest.raises(CodebookError):
        Codebook(good.header, tuple(layer.float() for layer in good.k), good.v).save(tmp_path / "c")
    assert os.listdir(tmp_path) == []


def test_lookup_goes_from_the_model_to_what_we_ship_to_the_users_cache(tmp_path, monkeypatch, refused):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(search.importlib.resources, "files", lambda _: tmp_path / "shipped")
    name = str(tmp_path / "model")
    os.mkdir(name)
    folders = default_folders(name, MODEL)
    users = user_folder(MODEL)
    beside = [Path(name) / "codebooks", Path(name) / "antkv"]
    assert folders == [*beside, shipped_folder(MODEL), users, own_folder(name, MODEL)]
    assert folders[-1].parent == users
    with refused(CodebookError, f"antkv calibrate {name} --preset antkv-4bit"):
        find_codebook(name, MODEL, "antkv-4bit")
    for folder in reversed(folders):
        path = codebook_path(folder, "antkv-4bit")
        make().save(path)
        assert find_codebook(name, MODEL, "antkv-4bit") == path
    mine = tmp_path / "mine"
    with pytest.raises(CodebookError):
        find_codebook(name, MODEL, "antkv-4bit", str(mine))
    make().save(codebook_path(mine, "antkv-4bit"))
    assert find_codebook(name, MODEL, "antkv-4bit", str(mine)) == codebook_path(mine, "antkv-4bit")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_shipped_codebook_is_whole_and_found_for_its_model(path):
    header = Codebook.load(path).header
    assert find_codebook("a model with a name alone", header.model, header.preset) == path
