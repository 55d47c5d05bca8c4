"""Pages of positions hold what was written of every token, and nobody else's."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from vllm.model_executor.models.interfaces import SupportsMRoPE

from vllm_antkv.cache.footprint import footprint
from vllm_antkv.cache.pages import PageLayout
from vllm_antkv.cache.positions import NUM_POSITIONS, POSITION_PAGE_BYTES, store_positions, view_positions
from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.errors import UnsupportedModelError
from vllm_antkv.presets import PRESETS
from vllm_antkv.vllm_adapter.step.layer import positions_of_step

NUM_BLOCKS = 4


class Text(nn.Module):
    """A model that vLLM has no positions for, if it has M-RoPE."""


class TextWithPositions(Text, SupportsMRoPE):
    """A model that vLLM asks for positions."""


@given(data=st.data(), num_padded=st.integers(0, 3))
def test_a_step_writes_the_positions_of_its_tokens_alone(data, num_padded):
    places = st.integers(VQ_BLOCK_SIZE, NUM_BLOCKS * VQ_BLOCK_SIZE - 1)
    slots = data.draw(st.lists(places, min_size=1, max_size=200, unique=True))
    generator = torch.Generator().manual_seed(len(slots))
    positions = torch.randint(1 << 20, (NUM_POSITIONS, len(slots) + num_padded), generator=generator)
    raw = torch.full((NUM_BLOCKS, 1, 1, POSITION_PAGE_BYTES + 32), 0xFF, dtype=torch.uint8)
    pages = view_positions(raw[..., :POSITION_PAGE_BYTES])
    store_positions(pages, torch.tensor(slots + num_padded * [-1]), positions)
    expected = torch.full((NUM_BLOCKS * VQ_BLOCK_SIZE, NUM_POSITIONS), -1, dtype=torch.int32)
    expected[slots] = positions[:, : len(slots)].T.int()
    # The null block takes what is padding, and nobody reads it.
    assert torch.equal(pages[1:].flatten(0, 1), expected[VQ_BLOCK_SIZE:])
    assert (pages[0] == -1).all() or num_padded
    assert (raw[..., POSITION_PAGE_BYTES:] == 0xFF).all()


def test_a_sequence_has_a_share_in_every_block_that_it_holds():
    layout, settings = PageLayout.of(AntKVConfig(), PRESETS["antkv-1bit"], 128, torch.bfloat16), AntKVConfig()
    without, with_them = (footprint([layout] * 28, settings, 8192, position_bytes=size) for size in (0, 384))
    share = with_them.total - without.total
    assert share % 384 == 0
    assert share >= 8192 // VQ_BLOCK_SIZE * 384
    assert with_them.bits(share) < 0.005
    assert with_them.padding == without.padding + share


@pytest.mark.parametrize(
    ("model", "num_positions", "words"),
    [
        (TextWithPositions, None, "does not say by which three positions"),
        (TextWithPositions, NUM_POSITIONS + 1, "does not say by which three positions"),
        (Text, NUM_POSITIONS, "vLLM does not know how Text gives its tokens three"),
    ],
)
def test_a_runner_or_a_model_that_says_them_otherwise_is_refused(model, num_positions, words):
    said = {} if num_positions is None else {"mrope_positions": SimpleNamespace(gpu=torch.zeros(num_positions, 9))}
    with pytest.raises(UnsupportedModelError, match=words):
        positions_of_step(SimpleNamespace(get_model=model, **said))
