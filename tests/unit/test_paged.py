"""The operations on pages give what the offline evaluator computes on whole windows, however the steps are cut.

A small engine in this file allocates pages as the block managers do, from memory full of NaN, and runs random
schedules: any chunking, any batching, decodes beside prefills.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_antkv.cache.pages import PageLayout, RecencyPages, VQPages
from vllm_antkv.codebook import FORMAT_VERSION, Codebook, CodebookHeader, ModelIdentity, SinkRule
from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.evaluate.attention import attend_window
from vllm_antkv.evaluate.methods.base import Method
from vllm_antkv.evaluate.methods.vector_quantiser import VectorQuantiser
from vllm_antkv.ops import paged
from vllm_antkv.ops import plan as plan_module
from vllm_antkv.ops.counters import Counters
from vllm_antkv.ops.plan import StepPlanner
from vllm_antkv.ops.rope import RotaryTable
from vllm_antkv.presets import PRESETS
from vllm_antkv.select.retention import page_retention

HEADS, KV_HEADS, MAX_LEN = 4, 2, 400
SCALE = 0.5
CPU = torch.device("cpu")


def rotary(head_size: int) -> RotaryTable:
    angles = torch.arange(MAX_LEN)[:, None] * torch.logspace(0, -3, head_size // 2)
    return RotaryTable(angles.cos(), angles.sin())


def codebook(preset: str, head_size: int) -> Codebook:
    kind = PRESETS[preset]
    generator = torch.Generator().manual_seed(1)
    shape = (1, KV_HEADS, kind.num_sub_vectors(head_size), kind.num_centroids, kind.sub_vector_size)
    k, v = (torch.randn(shape, generator=generator).half() for _ in "kv")
    identity = ModelIdentity(
        architecture="X",
        num_layers=1,
        num_attention_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_size=head_size,
        hidden_size=8,
        vocab_size=8,
    )
    header = CodebookHeader(format_version=FORMAT_VERSION, preset=preset, model=identity, sinks=None, calibration={})
    return Codebook(header, k, v)


@dataclass(eq=False)
class Sequence:
    """Rows of one request, and how far it has been computed.

    pages: what the block manager holds, 0 for a page that was freed; table: what the worker sees, who is never told.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    is_sink: torch.Tensor
    output: torch.Tensor
    computed: int = 0
    vq_blocks: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)


def draw_sequence(seed: int, length: int, head_size: int) -> Sequence:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(length, HEADS, head_size, generator=generator)
    key, value = torch.randn(2, length, KV_HEADS, head_size, generator=generator)
    is_sink = torch.rand(length, generator=generator) < 0.02
    return Sequence(query, key, value, is_sink, torch.full_like(query, torch.nan))


class Engine:
    """Allocates pages and runs steps over several sequences."""

    def __init__(self, config: AntKVConfig, preset: str, head_size: int) -> None:
        self.layout = PageLayout.of(config, PRESETS[preset], head_size, torch.float32)
        self.codebook = codebook(preset, head_size)
        self.config = config
        self.planner = StepPlanner(config, MAX_LEN, CPU)
        self.retention = page_retention(config, MAX_LEN, self.layout.recency_block_size, 0)
        self.free = list(range(1, 1200))
        self.raw = raw = torch.full((1200, KV_HEADS, 1, self.layout.pool_block_bytes), 0xFF, dtype=torch.uint8)
        self.state = paged.LayerState(
            vq=VQPages.view(raw[..., : self.layout.vq_page_bytes], self.layout, torch.float32),
            recency=RecencyPages.view(raw[..., : self.layout.recency_page_bytes], self.layout, torch.float32),
            k_centroids=self.codebook.k[0].float(),
            v_centroids=self.codebook.v[0].float(),
            preset=PRESETS[preset],
            rotary=rotary(head_size),
            config=config,
            scale=SCALE,
            counters=Counters(CPU),
            counts_rows=True,
        )

    def step(self, work: list[tuple[Sequence, int]]) -> None:
        """Compute the next `n` tokens of each sequence."""
        for sequence, count in work:
            self._allocate(sequence, sequence.computed + count)
        parts = [(s, slice(s.computed, s.computed + n)) for s, n in work]
        plan = self.planner.plan(np.cumsum([0, *(n for _, n in work)]).tolist(), [part.stop for _, part in parts])
        tables = paged.StepTables(self._table([s.vq_blocks for s, _ in work]), self._table([s.table for s, _ in work]))
        query, key, value, is_sink = (
            torch.cat([getattr(s, name)[part] for s, part in parts]) for name in ("query", "key", "value", "is_sink")
        )
        output = torch.full_like(query, torch.nan)
        paged.encode_store(key, value, self.state, plan, tables)
        paged.attend(query, key, value, is_sink if self.config.sinks else None, output, self.state, plan, tables)
        for (sequence, part), rows in zip(parts, output.split([n for _, n in work]), strict=True):
            sequence.output[part] = rows
            sequence.computed = part.stop
            self._release(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Give everything back, dirty."""
        self.free += [*sequence.vq_blocks, *(page for page in sequence.pages if page)]

    def _allocate(self, sequence: Sequence, num_tokens: int) -> None:
        while len(sequence.vq_blocks) * VQ_BLOCK_SIZE < num_tokens:
            sequence.vq_blocks.append(self.free.pop())
        for real in self.retention.pages_of_step(len(sequence.pages), num_tokens):
            sequence.pages.append(self.free.pop() if real else 0)
            sequence.table.append(sequence.pages[-1])

    def _release(self, sequence: Sequence) -> None:
        keep = self.retention.needed_after(np.arange(len(sequence.pages)), sequence.computed)
        for index, page in enumerate(sequence.pages):
            if page and not keep[index]:
                self.raw[page] = 0xFF
                self.free.append(page)
                sequence.pages[index] = 0

    @staticmethod
    def _table(rows: list[list[int]]) -> torch.Tensor:
        table = torch.zeros(len(rows), MAX_LEN, dtype=torch.int32)
        for index, row in enumerate(rows):
            table[index, : len(row)] = torch.tensor(row, dtype=torch.int32)
        return table

    def offline(self, sequence: Sequence) -> torch.Tensor:
        """What the evaluator computes for the whole sequence."""
        method = Method(
            "x", 1.0, self.config, VectorQuantiser(self.codebook), sinks=SinkRule(layer=0, channels=(0,), threshold=1.0)
        )
        rows = (tensor[None] for tensor in (sequence.query, sequence.key, sequence.value))
        is_sink = sequence.is_sink[None] if self.config.sinks else None
        return attend_window(*rows, SCALE, 0, method, self.state.rotary, is_sink)[0]


CONFIGS = st.builds(
    AntKVConfig,
    anchor_share=st.sampled_from([0.0, 0.01, 0.05, 1.0]),
    sinks=st.booleans(),
    prefix=st.sampled_from([0, 1, 8, 150]),
    recency=st.sampled_from(["none", "sliding:1", "sliding:32", "sliding:200", "log:4", "log:42"]),
)


@settings(max_examples=40, deadline=None)
@given(
    config=CONFIGS,
    shape=st.sampled_from([("antkv-1bit", 16), ("antkv-4bit", 8), ("antkv-0.75bit", 32), ("antkv-0.375bit", 32)]),
    lengths=st.lists(st.integers(1, 330), min_size=1, max_size=3),
    data=st.data(),
)
def test_any_schedule_gives_what_the_evaluator_computes(config, shape, lengths, data):
    engine = Engine(config, *shape)
    waiting = [draw_sequence(seed, length, shape[1]) for seed, length in enumerate(lengths)]
    sequences = list(waiting)
    while waiting:
        chosen = [s for s in waiting if data.draw(st.booleans())] or waiting[:1]
        engine.step(
            [(s, min(data.draw(st.sampled_from([1, 2, 50, 127, 128, 200])), len(s.key) - s.computed)) for s in chosen]
        )
        for sequence in [s for s in waiting if s.computed == len(s.key)]:
            waiting.remove(sequence)
            engine.finish(sequence)
    for sequence in sequences:
        torch.testing.assert_close(sequence.output, engine.offline(sequence), rtol=1e-3, atol=1e-4)
    assert len(engine.free) == 1199


@pytest.mark.parametrize("scope", ["block", "prompt"])
def test_tokens_in_hand_are_seen_exactly_where_prefill_does_not_read_the_cache(scope):
    config = AntKVConfig(prefill_reads_cache=False, anchor_scope=scope)
    engine = Engine(config, "antkv-1bit", 16)
    sequence = draw_sequence(0, 300, 16)
    engine.step([(sequence, 300)])
    logits = torch.einsum("qhd,khd->hqk", sequence.query, sequence.key.repeat_interleave(2, 1)) * SCALE
    probs = logits.masked_fill(torch.ones(300, 300).triu(1).bool(), -torch.inf).softmax(-1)
    expected = torch.einsum("hqk,khd->qhd", probs, sequence.value.repeat_interleave(2, 1))
    torch.testing.assert_close(sequence.output, expected, rtol=1e-3, atol=1e-4)


def test_prompt_scope_keeps_the_same_anchors_for_later_steps():
    """Anchors of a block are frozen when it closes: the decode steps after it see one choice."""
    engine = Engine(AntKVConfig(anchor_scope="prompt", recency="none", prefix=0), "antkv-1bit", 16)
    sequence = draw_sequence(3, 330, 16)
    engine.step([(sequence, 300)])
    chosen = engine.state.vq.anchor_offsets[sequence.vq_blocks[:2]].clone()
    assert (chosen >= 0).all()
    for _ in range(30):
        engine.step([(sequence, 1)])
    assert torch.equal(engine.state.vq.anchor_offsets[sequence.vq_blocks[:2]], chosen)


def test_waves_that_are_cut_to_save_memory_compute_the_same(monkeypatch):
    sequences = []
    for limit in (plan_module.MAX_WAVE_TOKENS, 300):
        monkeypatch.setattr(plan_module, "MAX_WAVE_TOKENS", limit)
        engine = Engine(AntKVConfig(), "antkv-1bit", 16)
        sequences.append([draw_sequence(seed, length, 16) for seed, length in enumerate((300, 20, 250, 129))])
        engine.step([(sequence, len(sequence.key) - 1) for sequence in sequences[-1]])
        engine.step([(sequence, 1) for sequence in sequences[-1]])
    for whole, cut in zip(*sequences, strict=True):
        torch.testing.assert_close(whole.output, cut.output)


def test_rows_that_nobody_sees_may_be_gone():
    """Without recency, prefix and anchors a row is dead after its own step, though block tables still point to it."""
    config = AntKVConfig(anchor_share=0.0, sinks=False, recency="none", prefix=0)
    engine = Engine(config, "antkv-1bit", 16)
    sequence = draw_sequence(0, 270, 16)
    engine.step([(sequence, 200)])
    while sequence.computed < 270:
        engine.step([(sequence, 1)])
    torch.testing.assert_close(sequence.output, engine.offline(sequence), rtol=1e-3, atol=1e-4)
