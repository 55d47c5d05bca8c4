"""A step keeps the pages that later steps read, and no request holds more than the bound that admits it."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_antkv.config import AntKVConfig
from vllm_antkv.select.recency import last_use_table
from vllm_antkv.select.retention import PageRetention, page_retention

MAX_LEN = 1500
CONFIGS = st.builds(
    AntKVConfig,
    anchor_share=st.sampled_from([0.0, 0.01]),
    sinks=st.booleans(),
    prefix=st.sampled_from([0, 1, 8, 300]),
    recency=st.sampled_from(["none", "sliding:1", "sliding:32", "sliding:500", "log:4", "log:42"]),
)
RETENTIONS = st.builds(
    lambda config, block_size, interval, vq_block_size, unsettled, drops: (
        config,
        replace(
            page_retention(config, MAX_LEN, block_size, interval, vq_block_size=vq_block_size),
            unsettled=unsettled,
            dropped=vq_block_size if drops else 0,
        ),
    ),
    CONFIGS,
    st.sampled_from([1, 4, 8, 32, 128]),
    st.sampled_from([0, 256, 512]),
    st.sampled_from([128, 256]),
    st.sampled_from([0, 3, 24]),
    st.booleans(),
)
#: Tokens of a step, and how many of the last ones are rejected if that many may be.
STEPS = st.lists(st.tuples(st.integers(1, 400), st.integers(0, 30)), min_size=1, max_size=12)


def run(retention: PageRetention, steps: list[tuple[int, int]]) -> tuple[int, set[int], int]:
    """Tokens that are computed after these steps, pages that a request holds then, and the most it held at once."""
    held: set[int] = set()
    computed, most, first = 0, 0, 0
    for chunk, rejected in steps:
        end = computed + chunk
        if end > MAX_LEN:
            break
        held = {page for page in held if retention.last_use[page] >= computed}
        needed = retention.pages_of_step(first, end)
        held |= {first + int(index) for index in np.flatnonzero(needed)}
        first = max(first, -(-end // retention.block_size))
        most = max(most, len(held))
        computed = end - min(rejected, chunk - 1, retention.unsettled)
    return computed, held, most


@given(RETENTIONS, STEPS)
def test_every_row_that_is_still_read_has_a_page(pair, steps):
    config, retention = pair
    computed, held, most = run(retention, steps)
    rows = last_use_table(config, MAX_LEN).numpy()[:computed]
    wanted = {int(token) // retention.block_size for token in np.flatnonzero(rows >= computed)}
    assert wanted <= held
    assert most <= retention.max_pages(MAX_LEN, 400, 1)


@given(RETENTIONS, st.integers(1, MAX_LEN // 256), st.integers(0, 300))
def test_a_hit_at_the_last_boundary_of_a_step_finds_its_pages(pair, block, beyond):
    _, retention = pair
    boundary = block * retention.vq_block_size
    end = min(boundary + beyond % retention.vq_block_size, MAX_LEN)
    stored = set(np.flatnonzero(retention.tails_of_step(0, end)).tolist())
    assert set(retention.pages_at(boundary - retention.dropped).tolist()) <= stored
    pages = retention.pages_at(boundary)
    all_pages = np.arange(len(retention.last_use))
    assert np.flatnonzero(retention.tail(all_pages, end)).tolist() == pages.tolist()
    assert retention.reachable(pages, [boundary], end).all()


@given(RETENTIONS, st.integers(1, MAX_LEN), st.integers(1, MAX_LEN))
def test_a_hit_at_a_multiple_of_the_interval_finds_its_pages(pair, start, end):
    """However the steps are cut: pages of earlier steps are stored for later boundaries too, or still needed there."""
    _, retention = pair
    start, end = sorted((start, end))
    if not retention.interval:
        return
    first = -(-start // retention.block_size)
    stored = {first + int(index) for index in np.flatnonzero(retention.tails_of_step(first, end))}
    for boundary in range(retention.interval, end + 1, retention.interval):
        assert {page for page in retention.pages_at(boundary).tolist() if page >= first} <= stored


@given(RETENTIONS, st.integers(1, MAX_LEN // 256), st.lists(st.integers(1, MAX_LEN), min_size=2, max_size=6))
def test_a_hit_where_prompts_part_finds_its_pages(pair, block, ends):
    """However the steps are cut."""
    _, retention = pair
    shared, first, stored = block * retention.vq_block_size, 0, set()
    for end in sorted(ends):
        mask = retention.tails_of_step(first, end, shared)
        stored |= {first + int(index) for index in np.flatnonzero(mask)}
        first = -(-end // retention.block_size)
    assert {page for page in retention.pages_at(shared).tolist() if page < first} <= stored


@given(RETENTIONS, st.integers(0, MAX_LEN))
def test_a_page_once_dead_is_never_needed_again(pair, num_tokens):
    _, retention = pair
    pages = np.arange(len(retention.last_use))
    needed = retention.needed_after(pages, num_tokens)
    assert not (retention.needed_after(pages, num_tokens + 1) & ~needed).any()


def test_a_sliding_window_holds_the_open_block_the_window_and_the_prefix():
    retention = page_retention(AntKVConfig(), 32768, 8, 0)
    assert retention.pages_at(1024).tolist() == [0, 124, 125, 126, 127]
    assert len(retention.pages_at(1024 + 127)) == 1 + 16
