"""Pages of a model's layers: what is in them, and that both kinds fit side by side into a block of the pool."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_antkv.cache.footprint import footprint
from vllm_antkv.cache.pages import (
    ALIGNMENT,
    BlockPlan,
    PageLayout,
    RecencyPages,
    VQPages,
    page_layouts,
    pool_block_bytes,
)
from vllm_antkv.config import AntKVConfig
from vllm_antkv.errors import SettingsError
from vllm_antkv.presets import PRESETS, get_preset, nominal_bits

configs = st.builds(
    AntKVConfig,
    anchor_share=st.sampled_from([0.0, 0.01, 0.05, 0.2]),
    anchor_dtype=st.sampled_from(["fp8", "model"]),
    sinks=st.booleans(),
)
presets = st.sampled_from(list(PRESETS.values()))
head_sizes = st.sampled_from([32, 64, 96, 128, 256])
dtypes = st.sampled_from([torch.bfloat16, torch.float32])


@given(config=configs, layers=st.lists(presets, min_size=1, max_size=40), head_size=head_sizes, dtype=dtypes)
def test_recency_pages_of_all_layers_fit_into_the_block_of_the_vq_pages(config, layers, head_size, dtype):
    layouts = page_layouts(config, layers, head_size, dtype)
    assert [layout.preset for layout in layouts] == layers
    assert len({(layout.recency_block_size, layout.recency_page_bytes) for layout in layouts}) == 1
    of_vq, of_recency = (
        sum(sizes) for sizes in zip(*((x.vq_page_bytes, x.recency_page_bytes) for x in layouts), strict=True)
    )
    assert of_recency < of_vq or layouts[0].recency_block_size == 1
    # 2% make room for recency pages.
    content = sum(layout.vq_page_bytes - layout.padding for layout in layouts)
    assert of_vq <= 1.02 * content + ALIGNMENT * len(layouts)
    assert all(layout.vq_page_bytes % ALIGNMENT == 0 for layout in layouts)


@given(config=configs, preset=presets, num_layers=st.integers(1, 40), head_size=head_sizes, dtype=dtypes)
def test_layers_of_one_preset_have_the_same_pages(config, preset, num_layers, head_size, dtype):
    one = PageLayout.of(config, preset, head_size, dtype)
    assert page_layouts(config, [preset] * num_layers, head_size, dtype) == [one] * num_layers


@given(config=configs, layers=st.lists(presets, min_size=1, max_size=40), length=st.integers(1, 20000))
def test_bits_are_those_of_the_layers_together(config, layers, length):
    layouts = page_layouts(config, layers, 128, torch.bfloat16)
    cost = footprint(layouts, config, length)
    assert cost.bits(cost.codes) == pytest.approx(nominal_bits(layers))
    assert cost.padding >= 0
    assert cost.total % pool_block_bytes(layouts) == 0


@given(config=configs, preset=presets, head_size=head_sizes, dtype=dtypes)
def test_views_share_no_byte_and_leave_the_padding(config, preset, head_size, dtype):
    layout = PageLayout.of(config, preset, head_size, dtype)
    vq, recency = (
        torch.zeros(2, 3, 1, n, dtype=torch.uint8) for n in (layout.vq_page_bytes, layout.recency_page_bytes)
    )
    both = ((vq, VQPages.view(vq, layout)), (recency, RecencyPages.view(recency, layout, dtype)))
    for raw, pages in both:
        views = vars(pages).values()
        for view in views:
            view.view(torch.uint8).add_(1)
        assert raw.max() <= 1, "no byte is in two views"
        taken = sum(view.nbytes for view in views)
        assert int(raw.sum()) == taken


@given(
    config=configs,
    layers=st.lists(presets, min_size=1, max_size=6),
    num_pages=st.integers(2, 6),
    state_bytes=st.integers(1, 300_000),
)
def test_pages_of_a_block_share_no_byte_and_leave_other_blocks(config, layers, num_pages, state_bytes):
    """Where vLLM lays the bytes of a layer side by side, whatever the order of layers."""
    layouts = page_layouts(config, layers, 64, torch.bfloat16, plan=BlockPlan(num_pages, state_bytes))
    num_bytes = [num_pages * layout.vq_page_bytes for layout in layouts]
    block = 2 * sum(num_bytes)
    assert block == 2 * pool_block_bytes(layouts) >= 2 * state_bytes
    pool, start, taken = torch.zeros(3 * block, dtype=torch.uint8), 0, 0
    for layout, size in zip(layouts, num_bytes, strict=True):
        raw = pool.as_strided((3, 2, 1, size), (block, size, size, 1), start)
        start += 2 * size
        for view in vars(VQPages.view(raw, layout)).values():
            assert len(view) == 3 * num_pages
            view[num_pages : 2 * num_pages].view(torch.uint8).add_(1)
            taken += view[:num_pages].nbytes
    assert pool.max() <= 1, "no byte is in two views"
    assert int(pool[block : 2 * block].sum()) == int(pool.sum()) == taken


@given(config=configs, head_size=head_sizes, dtype=dtypes)
def test_two_anchor_rows_are_one_in_full_precision(config, head_size, dtype):
    layout = PageLayout.of(config, get_preset("antkv-1bit"), head_size, dtype)
    raw = torch.zeros(2, 3, 1, layout.vq_page_bytes, dtype=torch.uint8)
    pages = VQPages.view(raw, layout)
    rows = VQPages.as_exact_rows(pages.v_anchors, dtype)
    assert rows.shape == (2, 3, config.anchor_rows // 2, head_size)
    number = torch.tensor(1.5, dtype=dtype)
    for row in range(rows.shape[2]):
        rows[1, 2, row] = number
        pair = pages.v_anchors[1, 2, 2 * row : 2 * row + 2].flatten()
        assert torch.equal(pair, number.expand(head_size).contiguous().view(torch.uint8))
        assert raw[1, 2].count_nonzero() == raw.count_nonzero() == pair.count_nonzero()
        rows[1, 2, row] = 0


@pytest.mark.parametrize(("anchor_dtype", "num_bytes"), [("fp8", 4624), ("model", 5136)])
def test_bytes_of_a_page_of_the_papers_models(anchor_dtype, num_bytes):
    """Codes, two anchors of K and two of V, and their offsets."""
    layout = PageLayout.of(AntKVConfig(anchor_dtype=anchor_dtype), get_preset("antkv-1bit"), 128, torch.bfloat16)
    assert layout.vq_page_bytes - layout.padding == num_bytes


def test_a_preset_that_does_not_divide_the_head_is_refused():
    with pytest.raises(SettingsError, match=r"antkv-0\.375bit"):
        page_layouts(AntKVConfig(), [get_preset("antkv-1bit"), get_preset("antkv-0.375bit")], 80, torch.bfloat16)
