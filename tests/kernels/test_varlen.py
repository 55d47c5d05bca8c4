"""Prompts attended to by a kernel that knows plain rows alone, in the calls that are planned, give what the rules say.

The kernel's place is taken by its rules in PyTorch; pages are made by the reference operations. What Triton does of it
is in test_triton_interpreted.py.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.as_reference import assert_as_reference
from tests.kernels.engine import Engine, Shape
from tests.kernels.test_exact_prompts import draw_schedule
from tests.kernels.varlen_reference import planned, varlen
from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.ops import varlen as varlen_operations
from vllm_antkv.ops.paged import ReferenceOperations
from vllm_antkv.ops.step import step_requests
from vllm_antkv.ops.varlen import VarlenPrefill, prefill_limits
from vllm_antkv.ops.varlen_plan import Limits, Round, plan

SHAPE = Shape(num_heads=6, num_kv_heads=2, max_len=900, dtype=torch.float64)
MAX_TOKENS = 1200


class Planned(ReferenceOperations):
    """The reference, but for attention from more than one new token."""

    nothing = -torch.inf
    narrow_values = False

    def __init__(self, layer):
        layer = replace(layer, varlen=varlen(MAX_TOKENS, self.nothing, self.narrow_values))
        super().__init__(layer)
        self._prefill = VarlenPrefill(layer, self._write, self._merge)

    def attend(self, rows, output, step):
        plan = planned(step, self._layer)
        if plan.rounds is not None:
            self._prefill.attend(rows, output, plan)
        single = step.query_start_loc.diff() == 1
        expected = torch.empty_like(output)
        super().attend(rows, expected, step)
        alone = single.repeat_interleave(step.query_start_loc.diff())
        output[alone] = expected[alone]

    def _write(self, rows, plain, pages, extends, step):
        requests = {request.row: request for request in step_requests(step)}
        assert len(pages.requests) <= len(plain.key)
        for page, (row, block) in enumerate(pages.requests.tolist()):
            request, head_size = requests[row], rows.key.shape[-1]
            ids = step.vq_block_table[row, block : block + 1].long()
            positions = torch.arange(block * VQ_BLOCK_SIZE, min((block + 1) * VQ_BLOCK_SIZE, request.end))
            decoded = self._decoded(ids, block * VQ_BLOCK_SIZE)
            is_anchor = torch.zeros(2, *decoded[0].shape[:2], dtype=torch.bool)
            kept = positions[self._layer.last_query[positions] >= request.start]
            # A block that closes in this step is seen exactly.
            self._correct_anchors(*decoded, ids, range(len(kept) < len(positions)), is_anchor)
            sections = ((rows.key, self._layer.recency.k), (rows.value, self._layer.recency.v))
            for to, coded, (in_hand, paged) in zip((plain.key, plain.value), decoded, sections, strict=True):
                to[page] = 0
                to[page, ..., :head_size] = coded
                to[page, kept % VQ_BLOCK_SIZE, :, :head_size] = self._exact_rows(in_hand, paged, kept, request)
            is_anchor[0, kept % VQ_BLOCK_SIZE] = True
            plain.key[page, ..., head_size : head_size + 2] = (~is_anchor[0])[..., None].to(plain.key)
        if extends:
            self._extend(rows.query, plain.queries[: len(rows.query)])

    def _extend(self, query, extended):
        bias = torch.einsum("nhd,hd->nh", query.square(), self._layer.jensen_weights.to(query.dtype))
        extended[..., : query.shape[-1]] = query
        extended[..., query.shape[-1] :] = 0
        # The second is for what the first rounds away: any two numbers do that have this sum.
        extended[..., query.shape[-1] :][..., :2] = bias[..., None] / self._layer.rules.scale / 2

    def _merge(self, so_far, added, is_first):
        parts = [(added.output[..., : so_far.output.shape[-1]].clone(), added.lse.clone())]
        if not is_first:
            parts.append((so_far.output.clone(), so_far.lse.clone()))
        both = torch.stack([statistics for _, statistics in parts])
        both = both.masked_fill(both == torch.inf, -torch.inf)
        weights = both.softmax(0).nan_to_num().transpose(1, 2)[..., None]
        so_far.output.copy_((weights * torch.stack([result for result, _ in parts])).sum(0))
        so_far.lse.copy_(both.logsumexp(0))


@pytest.mark.long
@settings(max_examples=20)
@given(
    recency=st.sampled_from(["sliding:1", "sliding:32", "sliding:200", "log:8"]),
    prefix=st.sampled_from([0, 8, 130]),
    share=st.sampled_from([0.0, 0.02]),
    anchor_dtype=st.sampled_from(["fp8", "model"]),
    piece=st.sampled_from([1, 2, 3, 128]),
    error=st.sampled_from([0.0, 1.0]),
    narrow_values=st.booleans(),
    lengths=st.lists(st.integers(1, 600), min_size=1, max_size=3),
    data=st.data(),
)
def test_any_cut_of_any_prompt(recency, prefix, share, anchor_dtype, piece, error, narrow_values, lengths, data):
    config = AntKVConfig(recency=recency, prefix=prefix, anchor_share=share, anchor_dtype=anchor_dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen_operations, "PREFILL_CHUNK_BLOCKS", piece)
        patch.setattr(Planned, "narrow_values", narrow_values)
        assert_as_reference(config, replace(SHAPE, error=error), Planned, draw_schedule(lengths, data))


@pytest.mark.parametrize("nothing", [torch.inf, -torch.inf])
def test_versions_that_call_nothing_by_another_sign(monkeypatch, nothing):
    monkeypatch.setattr(Planned, "nothing", nothing)
    monkeypatch.setattr(varlen_operations, "PREFILL_CHUNK_BLOCKS", 2)
    assert_as_reference(AntKVConfig(), SHAPE, Planned, [[170, 1, 300], [170, 1, 5], [160, 130, 1]])


def pages(current: Round) -> list[tuple[int, int]]:
    """Request and block of each page."""
    return [tuple(page) for page in current.pages.tolist()]


def runs(current: Round) -> list[tuple[int, int]]:
    """Rows and keys of each run."""
    return list(zip(current.starts[1:] - current.starts[:-1], current.num_keys, strict=True))


def test_nothing_is_planned_where_no_request_has_a_past():
    assert plan([256, 1, 100], [256, 700, 100], Limits(piece=128, num_pages=140)) == []
    assert plan([1, 1], [7, 700], Limits(piece=128, num_pages=140)) == []


def test_a_short_past_is_one_call():
    (only,) = plan([256, 1, 100], [1000, 50, 100], Limits(piece=128, num_pages=140))
    assert runs(only) == [(256, 1000), (1, 0), (100, 100)]
    assert pages(only) == [*((0, block) for block in range(8)), (2, 0)]
    assert only.page_table.tolist() == [[*range(8)], [0] * 8, [8, *[0] * 7]]
    assert only.causal
    assert only.is_first


def test_a_round_that_needs_no_other_is_all_of_a_step():
    (only,) = plan([1, 1, 256], [70, 9, 1000], Limits(piece=128, num_pages=140))
    assert (only.first_row, runs(only)) == (0, [(2, 0), (256, 1000)])
    # Others leave the rows of those before them alone.
    limits = Limits(piece=4, num_pages=8)
    assert [each.first_row for each in plan([1, 600, 300], [7, 1000, 900], limits)] == [0, 601, 601]
    assert {each.first_row for each in plan([1, 600], [7, 2000], limits)} == {1}


def test_a_long_past_comes_in_pieces():
    rounds = plan([8192], [131_072], Limits(piece=128, num_pages=195))
    assert len(rounds) == 8
    assert [each.is_first for each in rounds] == [True, *[False] * 7]
    for current in rounds[:-1]:
        assert runs(current) == [(8192, 128 * VQ_BLOCK_SIZE)]
        assert not current.causal
    assert runs(rounds[-1]) == [(8192, 131_072 - 7 * 128 * VQ_BLOCK_SIZE)]
    assert rounds[-1].causal
    # The piece that has the first new token is the last one.
    assert [runs(each) for each in plan([600], [1000], Limits(piece=2, num_pages=9))] == [[(600, 256)], [(600, 744)]]


def test_no_round_has_more_pages_than_there_is_room_for():
    limits = Limits(piece=4, num_pages=9)
    rounds = plan([128, 300, 1, 128, 128], [128, 2000, 7, 256, 900], limits)
    assert max(len(current.pages) for current in rounds) <= 9
    # Nobody's rows are computed from scratch twice, and a single new token is nobody's.
    rows = [row for r in rounds if r.is_first for row in range(r.first_row, r.first_row + r.num_rows)]
    assert rows == [*range(428), *range(429, 685)]


def test_drafts_are_left_to_other_kernels():
    limits = Limits(piece=4, num_pages=9, longest_decode=4)
    assert plan([4, 1, 2], [400, 7, 130], limits) == []
    (only,) = plan([4, 5, 3], [400, 6, 300], limits)
    assert set(only.pages[:, 0].tolist()) == {1}


@pytest.mark.parametrize(
    ("settings_", "suited"),
    [
        ({"recency": "sliding:129"}, True),
        ({"recency": "log:4"}, True),
        ({"recency": "none"}, False),
        ({"prefill_reads_cache": True}, False),
    ],
    ids=str,
)
def test_what_the_plan_covers(settings_, suited):
    def covers(layer):
        return prefill_limits(layer, 1) is not None

    state = Engine(AntKVConfig(**{"prefill_reads_cache": False, **settings_}), SHAPE, ReferenceOperations).state
    assert covers(replace(state, varlen=varlen(1))) is suited
    assert not covers(state)
    # The channels of a bias would not fit into rows.
    tight = replace(varlen(1), max_head_size=SHAPE.head_size)
    weights = torch.ones_like(state.jensen_weights)
    assert covers(replace(state, varlen=tight)) is suited
    assert not covers(replace(state, varlen=tight, jensen_weights=weights))
