"""Prompts attended to by a kernel that knows plain rows alone, in the calls that are planned, give what the rules say.

The kernel's place is taken by its rules in PyTorch; pages are made by the reference operations. What Triton does of it
is in test_triton_interpreted.py.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.engine import Engine, Shape, draw_sequence
from tests.kernels.varlen_reference import varlen
from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.ops import varlen as varlen_operations
from vllm_antkv.ops.paged import ReferenceOperations
from vllm_antkv.ops.step_requests import step_requests
from vllm_antkv.ops.varlen import VarlenPrefill, supports_varlen
from vllm_antkv.ops.varlen_plan import Limits, Page, plan

SHAPE = Shape(num_heads=6, num_kv_heads=2, max_len=900, dtype=torch.float64)
MAX_TOKENS = 1200


class Planned(ReferenceOperations):
    """The reference, but for attention from more than one new token."""

    nothing = -torch.inf

    def __init__(self, layer):
        layer = replace(layer, varlen=varlen(MAX_TOKENS, self.nothing))
        super().__init__(layer)
        self.calls = 0
        self._prefill = VarlenPrefill(layer, self._write, self._extend, self._merge)

    def attend(self, rows, output, step):
        self._prefill.attend(rows, output, step)
        single = step.query_start_loc.diff() == 1
        expected = torch.empty_like(output)
        super().attend(rows, expected, step)
        alone = single.repeat_interleave(step.query_start_loc.diff())
        output[alone] = expected[alone]

    def _write(self, rows, pages, step):
        requests = {request.row: request for request in step_requests(step)}
        assert len(pages.page_requests) <= len(pages.key)
        for page, (row, block, exact) in enumerate(pages.page_requests.tolist()):
            request = requests[row]
            ids = step.vq_block_table[row, block : block + 1].long()
            positions = torch.arange(block * VQ_BLOCK_SIZE, (block + 1) * VQ_BLOCK_SIZE)
            sections = ((rows.key, self._layer.recency.k), (rows.value, self._layer.recency.v))
            decoded = self._decoded(ids, block * VQ_BLOCK_SIZE)
            is_anchor = torch.zeros(2, *decoded[0].shape[:2], dtype=torch.bool)
            self._correct_anchors(*decoded, ids, range(0 if exact else 1), is_anchor)
            head_size = rows.key.shape[-1]
            is_code = ~is_anchor[0] & (positions >= self._layer.config.prefix)[:, None]
            for to, coded, (in_hand, paged) in zip((pages.key, pages.value), decoded, sections, strict=True):
                alive = positions[positions < request.end]
                seen = self._layer.last_query[alive] >= request.start
                kept = alive[seen if exact else alive < self._layer.config.prefix]
                to[page] = 0
                to[page, ..., :head_size] = 0 if exact else coded
                to[page, kept % VQ_BLOCK_SIZE, :, :head_size] = self._exact_rows(in_hand, paged, kept, step, request)
            pages.key[page, ..., head_size : head_size + 2] = 0 if exact else is_code[..., None].to(pages.key)

    def _extend(self, query, extended):
        bias = torch.einsum("nhd,hd->nh", query.square(), self._layer.jensen_weights.to(query.dtype))
        extended[..., : query.shape[-1]] = query
        extended[..., query.shape[-1] :] = 0
        # The second is for what the first rounds away: any two numbers do that have this sum.
        extended[..., query.shape[-1] :][..., :2] = bias[..., None] / self._layer.rules.scale / 2

    def _merge(self, output, lse, other, other_lse):
        self.calls += 1
        both = torch.stack([lse, other_lse])
        both = both.masked_fill(both == torch.inf, -torch.inf)
        weights = both.softmax(0).nan_to_num().transpose(1, 2)[..., None]
        output.copy_((weights * torch.stack([output, other])).sum(0))
        lse.copy_(both.logsumexp(0))


def run(engine: Engine, sequences: list, draw) -> None:
    while waiting := [s for s in sequences if s.computed < len(s.key)]:
        engine.step([(s, min(draw(), len(s.key) - s.computed)) for s in waiting])
    for sequence in sequences:
        torch.testing.assert_close(sequence.output, engine.offline(sequence), rtol=1e-5, atol=1e-5)


@pytest.mark.long
@settings(max_examples=20, deadline=None)
@given(
    window=st.sampled_from([1, 2, 32, 100, 128]),
    prefix=st.sampled_from([0, 8, 130]),
    share=st.sampled_from([0.0, 0.02]),
    anchor_dtype=st.sampled_from(["fp8", "model"]),
    piece=st.sampled_from([1, 2, 3, 128]),
    error=st.sampled_from([0.0, 1.0]),
    lengths=st.lists(st.integers(1, 600), min_size=1, max_size=2),
    data=st.data(),
)
def test_any_cut_of_any_prompt(window, prefix, share, anchor_dtype, piece, error, lengths, data):
    config = AntKVConfig(recency=f"sliding:{window}", prefix=prefix, anchor_share=share, anchor_dtype=anchor_dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen_operations, "PREFILL_CHUNK_BLOCKS", piece)
        engine = Engine(config, replace(SHAPE, error=error), Planned, compute_dtype=torch.float64)
    sequences = [draw_sequence(seed, length, SHAPE) for seed, length in enumerate(lengths)]
    run(engine, sequences, lambda: data.draw(st.sampled_from([1, 2, 31, 97, 128, 300])))


def test_versions_that_call_nothing_by_another_sign(monkeypatch):
    monkeypatch.setattr(Planned, "nothing", torch.inf)
    monkeypatch.setattr(varlen_operations, "PREFILL_CHUNK_BLOCKS", 2)
    engine = Engine(AntKVConfig(), SHAPE, Planned, compute_dtype=torch.float64)
    run(engine, [draw_sequence(0, 500, SHAPE)], lambda: 170)


def test_a_short_past_is_two_calls():
    (only,) = plan([256], [1024], Limits(window=32, piece=128, num_pages=140))
    causal, recent = only.calls
    assert [(run.num_rows, run.num_keys) for run in causal.runs] == [(32, 768), (96, 896), (32, 896), (96, 1024)]
    assert [(run.num_rows, run.num_keys) for run in recent.runs] == [(32, 160), (96, 0), (32, 160), (96, 0)]
    pages = [only.pages[index] for index in causal.runs[1].pages]
    assert pages == [*(Page(0, block, False) for block in range(6)), Page(0, 6, True)]
    assert only.is_first
    assert (causal.window, recent.window) == (None, 32)


def test_no_round_has_more_pages_than_there_is_room_for():
    limits = Limits(window=32, piece=4, num_pages=9)
    rounds = plan([128, 300, 1, 128, 128], [128, 2000, 7, 256, 900], limits)
    assert max(len(current.pages) for current in rounds) <= 9
    # Nobody's rows are computed from scratch twice, and a single new token is nobody's.
    rows = [row for r in rounds if r.is_first for row in range(r.first_row, r.first_row + r.num_rows)]
    assert rows == [*range(428), *range(429, 685)]


def test_drafts_are_left_to_other_kernels():
    limits = Limits(window=32, piece=4, num_pages=9, longest_decode=4)
    assert plan([4, 1, 2], [400, 7, 130], limits) == []
    (only,) = plan([4, 5, 3], [400, 5, 300], limits)
    assert {page.request for page in only.pages} == {1}


@pytest.mark.parametrize(
    ("settings_", "suited"),
    [
        ({"recency": "sliding:128"}, True),
        ({"recency": "sliding:129"}, False),
        ({"recency": "none"}, False),
        ({"recency": "log:4"}, False),
        ({"prefill_reads_cache": False}, False),
    ],
    ids=str,
)
def test_what_the_plan_covers(settings_, suited):
    state = Engine(AntKVConfig(**settings_), SHAPE, ReferenceOperations).state
    assert supports_varlen(replace(state, varlen=varlen(1))) is suited
    assert not supports_varlen(state)
    assert not supports_varlen(replace(state, varlen=varlen(1), num_heads=4))
    # The channels of a bias would not fit into rows.
    tight = replace(varlen(1), max_head_size=SHAPE.head_size)
    weights = torch.ones_like(state.jensen_weights)
    assert supports_varlen(replace(state, varlen=tight)) is suited
    assert not supports_varlen(replace(state, varlen=tight, jensen_weights=weights))
