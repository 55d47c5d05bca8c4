"""Blocks leave a pool as they were when they were gathered, and come back as they left."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_antkv.vllm_adapter.kv_transfer import pages as pool_pages
from vllm_antkv.vllm_adapter.kv_transfer.lanes import Lane, Point
from vllm_antkv.vllm_adapter.kv_transfer.pages import Block, PoolPages

CPU = torch.device("cpu")
NUM_BLOCKS = 7
#: Of a layer: bytes between its page and the one before, its dtype, heads and rows of a page.
Layer = tuple[int, torch.dtype, int, int]
LAYERS = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 4, 12]),
        st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]),
        st.integers(1, 3),
        st.sampled_from([4, 8, 12]),
    ),
    min_size=1,
    max_size=4,
)
BLOCK_IDS = st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True, max_size=5)


def pool_of(layers: list[Layer]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Raw memory full of 0xFF, and pages (NUM_BLOCKS, rows, heads) in it that do not lie in this order."""
    sizes = [heads * rows * dtype.itemsize for _, dtype, heads, rows in layers]
    block = sum(gap for gap, *_ in layers) + sum(sizes)
    raw = torch.full((NUM_BLOCKS * block,), 0xFF, dtype=torch.uint8)
    views, end = {}, 0
    for number, ((gap, dtype, heads, rows), size) in enumerate(zip(layers, sizes, strict=True)):
        pages = raw.view(NUM_BLOCKS, block)[:, end + gap : end + gap + size].view(dtype)
        views[str(number)] = pages.unflatten(1, (heads, rows)).transpose(1, 2)
        end += gap + size
    return raw, views


def content(pages: torch.Tensor) -> bytes:
    """Of a page, in the order in which it lies."""
    return pages.transpose(0, 1).contiguous().view(torch.uint8).numpy().tobytes()


def fill(pages: torch.Tensor, seed: int) -> None:
    pages.copy_(torch.randint(0, 200, pages.shape, generator=torch.Generator().manual_seed(seed)))


@given(LAYERS, BLOCK_IDS, BLOCK_IDS, st.integers(1, 200))
def test_blocks_come_back_as_they_left(layers, few, many, at_once):
    raw, views = pool_of(layers)
    groups = {0: {"0": views["0"]}, 1: views}
    blocks = [Block(group, f"{group}-{index}", index) for group, ids in ((1, many), (0, few)) for index in ids]
    pages = PoolPages(groups)
    for seed, view in enumerate(views.values()):
        fill(view, seed)
    expected = {
        block.name: b"".join(content(view[block.block_id]) for view in groups[block.group].values()) for block in blocks
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_pages, "_AT_ONCE", at_once)
        gathered = list(pages.gather(blocks, torch.tensor(False)))
        lane = Lane(CPU, pages.at_once)
        assert all(some.pages.nbytes <= pages.at_once for some in gathered)
    # What comes later has the blocks for itself.
    raw.fill_(0xFF)
    found = {name: page for some in gathered for name, page in zip(some.names, some.contents(lane), strict=True)}
    assert found == expected
    for block in blocks:
        pages.write(block, found[block.name], lane, Point(CPU))
        assert expected[block.name] == b"".join(content(view[block.block_id]) for view in groups[block.group].values())
    # Nothing else was written.
    for block in blocks:
        for view in groups[block.group].values():
            view[block.block_id].transpose(0, 1).view(torch.uint8).fill_(0xFF)
    assert bool((raw == 0xFF).all())


def test_nothing_is_kept_of_a_step_that_went_wrong():
    _, views = pool_of([(0, torch.float32, 2, 4)])
    (gathered,) = PoolPages({0: views}).gather([Block(0, "one", 3)], torch.tensor([0, 1]).any())
    assert gathered.contents(Lane(CPU, gathered.pages.nbytes)) == []


def test_layers_that_lie_side_by_side_are_read_as_one():
    """One kernel for a group, where vLLM packs blocks as it does for an antkv cache."""
    _, views = pool_of([(0, torch.uint8, 2, 8), (0, torch.bfloat16, 2, 4), (4, torch.uint8, 1, 4)])
    assert [list(pages.shape) for pages in pool_pages._pieces(list(views.values()))] == [
        [NUM_BLOCKS, 8],
        [NUM_BLOCKS, 1],
    ]
    assert pool_pages._pieces(list(views.values()))[0].dtype == torch.int32
