"""The registry: names, and which codebook each method takes."""

import pytest
import torch

from tests.codebooks import random_codebook
from vllm_antkv.codebook import codebook_path
from vllm_antkv.config import AntKVConfig
from vllm_antkv.errors import CodebookError
from vllm_antkv.evaluate.methods import METHODS, build_method
from vllm_antkv.evaluate.methods.request import MethodRequest
from vllm_antkv.presets import PRESETS


@pytest.fixture
def request_for(identity):
    def make(folder, **settings):
        return MethodRequest("some/model", identity, folder, AntKVConfig(**settings))

    return make


def test_every_preset_has_its_baseline():
    assert set(METHODS) == {"fp16", *PRESETS, *(name.replace("antkv", "cq") for name in PRESETS)}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_can_be_built_and_describes_itself(name, request_for, identity, tmp_path):
    preset = name.replace("cq-", "antkv-")
    if preset in PRESETS:
        random_codebook(identity, preset).save(codebook_path(tmp_path, preset))
    method = build_method(name, request_for(tmp_path))
    assert method.name == name
    assert method.nominal_bits == (PRESETS[preset].nominal_bits if preset in PRESETS else 16)
    assert preset not in PRESETS or set(method.settings) >= {"recency", "anchor_share", "codebook"}


def test_antkv_takes_the_settings_and_cq_only_recency(request_for, codebook_folder):
    request = request_for(codebook_folder, anchor_share=0.05, prefix=3, recency="sliding:7")
    antkv, cq = build_method("antkv-1bit", request), build_method("cq-1bit", request)
    assert antkv.config == request.config
    assert antkv.sinks is not None
    assert (cq.config.anchor_share, cq.config.prefix, cq.config.sinks) == (0, 0, False)
    assert cq.config.recency == "sliding:7"
    assert cq.config.anchor_rows == 0
    assert cq.sinks is None


def test_cq_refuses_weighted_centroids(request_for, identity, tmp_path, refused):
    random_codebook(identity, weights="grad").save(codebook_path(tmp_path, "antkv-1bit"))
    with refused(CodebookError, "--weights none", str(tmp_path / "cq")):
        build_method("cq-1bit", request_for(tmp_path))


def test_cq_prefers_its_own_folder(request_for, identity, tmp_path):
    plain = random_codebook(identity)
    plain.save(codebook_path(tmp_path, "antkv-1bit"))
    assert build_method("cq-1bit", request_for(tmp_path)).settings["weights"] == "none"
    other = random_codebook(identity, preset="antkv-1bit")
    object.__setattr__(other, "k", tuple(layer + 1 for layer in other.k))
    other.save(codebook_path(tmp_path / "cq", "antkv-1bit"))
    assert all(map(torch.equal, build_method("cq-1bit", request_for(tmp_path)).quantiser.codebook.k, other.k))
