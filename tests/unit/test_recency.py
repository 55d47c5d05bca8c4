import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.select.recency import ALWAYS, exact_bounds, last_query_table, last_use_table, sees_own_block

LENGTH = 700
even = st.integers(1, 64).map(lambda w: 2 * w)
policies = st.one_of(st.just("none"), st.integers(1, 300).map(lambda w: f"sliding:{w}"), even.map(lambda w: f"log:{w}"))
configs = st.builds(
    AntKVConfig,
    recency=policies,
    prefix=st.integers(0, 40),
    anchor_share=st.sampled_from([0.0, 0.01, 1.0]),
    sinks=st.booleans(),
)


def alone(recency):
    """A policy without the intact prefix."""
    return AntKVConfig(recency=recency, prefix=0)


def block_end(position):
    return position // VQ_BLOCK_SIZE * VQ_BLOCK_SIZE + VQ_BLOCK_SIZE - 1


def logquant_by_hand(window, length):
    """What LogQuant's algorithm 1 holds in full precision when each query is made: {query: tokens}."""
    reserved, held_at = [], {}
    for token in range(length):
        if len(reserved) >= 3 * window:
            old, recent = reserved[: 2 * window], reserved[2 * window :]
            reserved = old[::2] + recent
        reserved.append(token)
        held_at[token] = set(reserved)
    return held_at


@given(configs, st.integers(1, LENGTH))
def test_a_token_sees_itself_and_the_table_never_ends_before(config, length):
    positions = torch.arange(length)
    assert (last_query_table(config, length) >= positions).all()
    assert (last_use_table(config, length) >= last_query_table(config, length)).all()


@given(configs, st.integers(1, LENGTH), st.integers(1, LENGTH))
def test_the_table_of_a_token_does_not_depend_on_the_length_asked_for(config, one, other):
    """Or rather, only in what lies past the end: chunking must not change what a query sees."""
    shared = min(one, other)
    for table in (last_query_table, last_use_table):
        short, long = table(config, one)[:shared], table(config, other)[:shared]
        last_query = shared - 1
        assert torch.equal(short.clamp(max=last_query), long.clamp(max=last_query))


@given(st.integers(1, 300))
def test_sliding_keeps_the_last_w_tokens_and_the_open_block(window):
    table = last_query_table(alone(f"sliding:{window}"), LENGTH).tolist()
    assert table == [max(j + window - 1, block_end(j)) for j in range(LENGTH)]


@given(st.integers(1, 300), st.integers(1, 5000))
def test_a_layer_with_a_window_keeps_at_most_a_32nd_of_it_but_eight(recent, window):
    table = last_query_table(alone(f"sliding:{recent}"), LENGTH, window)
    kept = min(recent, max(window // 32, 8))
    assert torch.equal(table, last_query_table(alone(f"sliding:{kept}"), LENGTH))


@pytest.mark.parametrize("recency", ["none", "log:42"])
def test_a_window_changes_no_other_recency(recency):
    assert torch.equal(last_query_table(alone(recency), LENGTH, 64), last_query_table(alone(recency), LENGTH))


@given(even)
@settings(max_examples=20)
def test_log_retention_is_algorithm_1_of_logquant(window):
    table = last_query_table(alone(f"log:{window}"), LENGTH).tolist()
    for query, held in logquant_by_hand(window, LENGTH).items():
        visible = {j for j in range(query + 1) if table[j] >= query}
        open_block = set(range(query // VQ_BLOCK_SIZE * VQ_BLOCK_SIZE, query + 1))
        assert visible == held | open_block
        assert len(held) <= 3 * window


@given(configs, st.integers(2, LENGTH))
def test_all_but_none_see_their_own_block(config, length):
    """A prefix that is all there is shows as much."""
    sees_all = all(
        int(last) >= min(block_end(token), length - 1)
        for token, last in enumerate(last_query_table(config, length).tolist())
    )
    assert sees_own_block(last_query_table(config, length)) == sees_all
    assert sees_all or config.recency == "none"


def test_none_leaves_a_token_to_itself():
    assert torch.equal(last_query_table(alone("none"), LENGTH), torch.arange(LENGTH, dtype=torch.int32))


@given(policies, st.integers(0, 40))
def test_the_intact_prefix_is_seen_for_ever(recency, prefix):
    config = AntKVConfig(recency=recency, prefix=prefix)
    table = last_query_table(config, LENGTH)
    assert (table[:prefix] == ALWAYS).all()
    assert torch.equal(table[prefix:], last_query_table(alone(recency), LENGTH)[prefix:])


@given(configs)
def test_rows_live_until_their_block_chooses_its_anchors(config):
    use = last_use_table(config, LENGTH)
    if config.anchor_rows:
        assert all(use[j] >= block_end(j) for j in range(LENGTH))
    else:
        assert torch.equal(use, last_query_table(config, LENGTH))


@given(configs)
def test_exact_rows_of_closed_blocks_are_where_the_bounds_say(config):
    table = last_query_table(config, LENGTH)
    prefix, reach = exact_bounds(table)
    query, token = torch.meshgrid(torch.arange(LENGTH), torch.arange(LENGTH), indexing="ij")
    closed = token // VQ_BLOCK_SIZE < query // VQ_BLOCK_SIZE
    exact = closed & (table[token] >= query)
    assert not (exact & (token >= prefix) & (query - token > reach)).any()


def test_bounds_of_exact_rows_are_tight():
    assert exact_bounds(last_query_table(AntKVConfig(), LENGTH)) == (8, 31)
    assert exact_bounds(last_query_table(alone("none"), LENGTH)) == (0, 0)
