"""Computed capacity follows from bytes: fewer bits, more tokens, in exact proportion."""

import pytest
from transformers import PreTrainedModel

from vllm_antkv.config import AntKVConfig
from vllm_antkv.evaluate.capacity import GPU_SHARE, WORKSPACE_BYTES, capacities, weight_bytes
from vllm_antkv.offline.models import ModelCard
from vllm_antkv.presets import PRESETS


def test_weights_are_counted_without_making_them(model: PreTrainedModel, model_folder) -> None:
    assert weight_bytes(ModelCard.read(str(model_folder))) == sum(p.nbytes for p in model.parameters())


def test_tokens_take_what_is_left(model: PreTrainedModel, model_folder) -> None:
    card = ModelCard.read(str(model_folder))
    found = {c.kv_cache_dtype: c for c in capacities(card, AntKVConfig(), 8192, [2.0, 24.0, 48.0])}
    assert list(found) == ["auto", *PRESETS]
    heads = card.identity.num_layers * card.identity.num_kv_heads
    for capacity in found.values():
        token_bytes = heads * 2 * card.identity.head_size * capacity.bits / 8
        left = GPU_SHARE * 24e9 - weight_bytes(card) - capacity.codebook_bytes - WORKSPACE_BYTES
        assert capacity.tokens[1] == pytest.approx(left / token_bytes, abs=1)
        assert capacity.tokens[0] == 0, "92% of 2 GB is less than the workspace"
        assert capacity.tokens[2] > 2 * capacity.tokens[1]
    assert found["auto"].bits == 8 * card.dtype.itemsize
    assert found["antkv-1bit"].tokens[1] > found["antkv-2bit"].tokens[1] > found["auto"].tokens[1]
