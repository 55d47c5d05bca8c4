"""Which tokens of a step get a row of the trained prefix, in whatever order a model runner has the requests."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from vllm_antkv.vllm_adapter.attention.trained_prefix import LayerPrefix, PrefixTokens

PREFIX = [5, 6, 7]
#: Requests by the page of another group and their own first page. "late" starts with the prefix only with its answer.
PROMPTS = {"long": [5, 6, 7, 8, 9], "other": [5, 6, 8, 8, 9], "late": [5, 6], "exact": [5, 6, 7]}
PAGES = {name: ([40 + index], [1 + index, 20]) for index, name in enumerate(PROMPTS)}


def tokens_of_requests() -> PrefixTokens:
    tokens = PrefixTokens(PREFIX, "layer", 32, torch.device("cpu"))
    tokens.allocate(50)
    tokens.note(scheduled(PROMPTS))
    return tokens


def scheduled(prompts: dict[str, list[int]]) -> SchedulerOutput:
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [
        NewRequestData(name, ids, [], None, None, PAGES[name], 0, None) for name, ids in prompts.items()
    ]
    return output


def step(requests: list[tuple[int, int, int]], padding: int = 0) -> CommonAttentionMetadata:
    """Of requests by their first pages, tokens before the step and new tokens."""
    pages, computed, new = torch.tensor(requests, dtype=torch.int32).T
    starts = torch.cat((torch.zeros(1, dtype=torch.int32), new.cumsum(0, dtype=torch.int32)))
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=computed + new,
        seq_lens_cpu_upper_bound=computed + new,
        num_reqs=len(requests),
        num_actual_tokens=int(starts[-1]) + padding,
        max_query_len=int(new.max()),
        max_seq_len=64,
        block_table_tensor=torch.stack((pages, torch.full_like(pages, 20)), dim=1),
        slot_mapping=torch.zeros(0),
    )


def rows(tokens: PrefixTokens, num_tokens: int) -> list[int] | None:
    return None if tokens.rows is None else tokens.rows[:num_tokens].tolist()


def test_rows_of_a_mixed_step() -> None:
    tokens = tokens_of_requests()
    # The rest of a prompt that was cut, two prompts without the prefix, one that is all prefix; tokens behind them.
    tokens.plan(step([(1, 1, 4), (2, 0, 5), (3, 0, 2), (4, 0, 3)], padding=2))
    assert rows(tokens, 14) == [1, 2, 3, 3, *[3] * 7, 0, 1, 2]
    tokens.plan(step([(1, 5, 1), (2, 5, 1), (4, 3, 1)]))
    assert tokens.rows is None, "steps of decoding are left alone"


def test_a_page_that_another_request_begins_with_is_its_own() -> None:
    tokens = tokens_of_requests()
    # vLLM ends a request and takes one of the same name in one step.
    output = scheduled({"exact": [5, 6, 9]})
    output.finished_req_ids = {"exact"}
    tokens.note(output)
    tokens.plan(step([(4, 0, 3), (1, 0, 3)]))
    assert rows(tokens, 6) == [3, 3, 3, 0, 1, 2]


def test_a_preempted_request_begins_again_with_other_pages() -> None:
    """Model runner V1 is told so; its answer is no part of its prompt."""
    tokens, output = tokens_of_requests(), scheduled({})
    output.scheduled_cached_reqs = CachedRequestData(
        ["late", "long", "other"],
        {"late", "long"},
        [],
        {},
        [([41], [30]), ([42], [31]), ([], [32])],
        [0, 0, 5],
        [1] * 3,
    )
    tokens.note(output)
    tokens.plan(step([(30, 0, 3), (31, 0, 2), (2, 5, 1)]))
    assert rows(tokens, 6) == [3, 3, 3, 0, 1, 3]


@given(cuts=st.lists(st.integers(1, 4), min_size=1, max_size=6), before=st.integers(1, 3))
def test_however_a_prompt_is_cut_every_position_gets_its_row_once(cuts: list[int], before: int) -> None:
    tokens, computed, found = tokens_of_requests(), 0, []
    for new in cuts:
        tokens.plan(step([(2, 9, before), (1, computed, new)]))
        chosen = rows(tokens, before + new) or [3] * (before + new)
        assert chosen[:before] == [3] * before
        found += [(computed + index, row) for index, row in enumerate(chosen[before:]) if row < 3]
        computed += new
    assert found == [(position, position) for position in range(min(computed, len(PREFIX)))]


def test_rows_are_put_in_and_the_models_own_left_as_they_were() -> None:
    tokens = tokens_of_requests()
    own, key, value = torch.randn(2, 4, 2, 4), torch.zeros(6, 2, 4), torch.ones(6, 2, 4)
    layer = LayerPrefix(tokens, *own)
    assert layer.put_in(key, value) == (key, value)
    tokens.plan(step([(2, 0, 2), (1, 1, 4)]))
    new_key, new_value = layer.put_in(key, value)
    assert torch.equal(new_key[2:4], own[0, 1:3])
    assert torch.equal(new_value[2:4], own[1, 1:3])
    assert not new_key[[0, 1, 4, 5]].any()
    assert not key.any()


def test_a_captured_graph_reads_what_each_step_fills() -> None:
    """A step of one token per request replays a graph; the memory it reads must hold that step's rows."""
    tokens = tokens_of_requests()
    tokens.use_buffer()
    captured = tokens.rows
    assert (captured == 3).all()
    tokens.plan(step([(2, 9, 1), (1, 2, 1)]))
    assert captured[:2].tolist() == [3, 2]
