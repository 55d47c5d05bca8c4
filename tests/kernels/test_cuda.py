"""The CUDA kernels, emulated on a CPU from the same sources, give what the offline evaluator computes in float64.

`cuda_emulation/emulation.h` stands for the GPU: every lane, shuffle, mma and asynchronous copy, in exact C++.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels import engine as engine_module
from tests.kernels.anchor_bytes import assert_reads_every_byte
from tests.kernels.cuda_emulation.backend import EmulatedBackend, decoding, library, needs_emulation, operations
from tests.kernels.cuda_emulation.cases import (
    BFLOAT16,
    FLOAT16,
    LAYERS,
    assert_decoded,
    assert_decodes,
    assert_drafts_are_as_single_tokens,
    decode_from,
)
from tests.kernels.engine import Engine, Shape, draw_sequence
from tests.kernels.guarded import guarding
from tests.kernels.missing_rows import assert_missing_rows_are_zeros
from tests.kernels.test_operations import CONFIGS
from vllm_antkv.codebook import Codebook
from vllm_antkv.config import AntKVConfig
from vllm_antkv.errors import UnsupportedModelError
from vllm_antkv.ops import cuda
from vllm_antkv.ops.cuda_build import Build
from vllm_antkv.ops.paged import ReferenceOperations
from vllm_antkv.ops.reference import unpack_codes
from vllm_antkv.ops.rows import StepRows
from vllm_antkv.ops.step import StepPlan
from vllm_antkv.presets import LAYER_PRESETS

pytestmark = [needs_emulation, pytest.mark.long]

SMALL = LAYERS[1][0]
#: So many anchors that spans have no room for them are another build: `test_every_row_an_anchor`.
FEW_ANCHORS = CONFIGS.filter(lambda config: config.anchor_share < 1)
#: The smallest layers whose tables stay in L2.
LOW_BITS = [LAYERS[4][0], LAYERS[6][0]]
#: Two codes for each quad of channels.
FOUR_BITS = LAYERS[11][0]


@pytest.fixture(autouse=True)
def guarded_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operations make tables of their own."""
    monkeypatch.setattr(cuda, "tables_of", guarding(cuda.tables_of))


def test_decoding_is_launched_for_single_tokens_alone() -> None:
    """A prompt alone: codes and anchors, and the attention of prompts."""
    launched: list[str] = []

    class Recording(EmulatedBackend):
        def launch(self, build: Build, kernel: str, *rest: Any) -> None:
            launched.append(kernel)
            super().launch(build, kernel, *rest)

    engine = Engine(AntKVConfig(), SMALL, operations(Recording()))
    sequence = draw_sequence(0, 300, SMALL)
    engine.step([(sequence, 127)])
    assert launched == ["antkv_encode_store"]
    engine.step([(sequence, 1)])
    assert launched[1:] == ["antkv_encode_store", "antkv_decode"]


@pytest.mark.parametrize(("shape", "shared_bytes"), LAYERS, ids=str)
def test_decoding_gives_what_the_evaluator_computes(monkeypatch, shape, shared_bytes):
    monkeypatch.setattr(cuda, "SPLIT", 256)

    @settings(max_examples=4, deadline=None)
    @given(
        config=FEW_ANCHORS,
        prompts=st.lists(st.sampled_from([0, 1, 31, 126, 200, 255, 330]), min_size=1, max_size=3),
        num_steps=st.integers(1, 4),
    )
    def check(config, prompts, num_steps):
        assert_decodes(Engine(config, shape, decoding(EmulatedBackend(shared_bytes))), prompts, num_steps)

    check()


def test_more_splits_than_ctas_and_more_requests_than_a_warp_looks_at(monkeypatch):
    monkeypatch.setattr(cuda, "SPLIT", 256)
    assert_decodes(Engine(AntKVConfig(), SMALL, operations()), [300, 256, 1, *[3] * 33, 380], 2)


def test_requests_that_together_are_longer_than_the_pool(monkeypatch):
    """As they may be where they share blocks: with room for four splits, the second request gets one instead of two."""
    monkeypatch.setattr(cuda, "SPLIT", 256)
    engine = Engine(AntKVConfig(), SMALL, operations())
    monkeypatch.setattr(engine.operations, "_pool_splits", 1)
    assert_decodes(engine, [300, 380, 3], 2)


@pytest.mark.parametrize("recency", ["sliding:32", "none"])
@pytest.mark.parametrize("shape", [SMALL, LOW_BITS[0]], ids=str)
def test_a_row_whose_page_is_null_is_zeros_and_marks_its_request(shape, recency):
    assert_missing_rows_are_zeros(operations(), shape, recency)


@pytest.mark.parametrize("shape", [SMALL, LOW_BITS[1]], ids=str)
def test_every_row_an_anchor(shape):
    """With large logits, so that the maxima of the warps move while they add up."""
    shape = replace(shape, max_len=700)
    config = AntKVConfig(anchor_share=1.0, recency="none", prefix=0)
    engine = Engine(config, shape, decoding())
    sequence = draw_sequence(0, 641, shape)
    sequence.query *= 8
    decode_from(engine, [sequence], [640], 1)
    assert_decoded(engine, [sequence], [640], 1)


@pytest.mark.parametrize("shape", [SMALL, LAYERS[0][0], LOW_BITS[0]], ids=str)
def test_every_byte_of_an_anchor_is_read(shape):
    assert_reads_every_byte(operations(), shape, 2e-3 if shape.dtype == FLOAT16 else 2e-2)


@pytest.mark.parametrize("chunk", [0, 30])
def test_who_else_is_served_changes_no_bit(chunk):
    """Be they single tokens or chunks of prompts in the same steps."""
    outputs = []
    for others in ([], [5, 300]):
        engine = Engine(AntKVConfig(), SMALL, operations())
        prompts = [*others, 290]
        sequences = [draw_sequence(prompt, prompt + 3 * (chunk or 1), SMALL) for prompt in prompts]
        *company, decoded = sequences
        decode_from(engine, sequences, prompts, 0)
        for _ in range(3):
            engine.step([*((other, chunk or 1) for other in company), (decoded, 1)])
        outputs.append(decoded.output[290:293])
    assert torch.equal(*outputs)


def test_drafts_get_the_bits_of_single_tokens_and_leave_no_trace(monkeypatch):
    monkeypatch.setattr(cuda, "SPLIT", 256)
    assert_drafts_are_as_single_tokens(SMALL, operations())


def test_requests_that_a_graph_is_padded_with_are_left_alone():
    engine = Engine(AntKVConfig(), SMALL, operations())
    sequence = draw_sequence(0, 200, SMALL)
    engine.step([(sequence, 199)])
    token = {name: getattr(sequence, name)[199:200] for name in ("query", "key", "value")}
    padded = {name: torch.cat((rows, torch.full_like(rows, torch.nan))) for name, rows in token.items()}
    output = torch.full_like(padded["query"], torch.nan)
    step = StepPlan(
        query_start_loc=torch.tensor([0, 1, 1], dtype=torch.int32),
        seq_lens=torch.tensor([200, 0], dtype=torch.int32),
        vq_block_table=torch.tensor([sequence.vq_blocks, [0, 0]], dtype=torch.int32),
        recency_block_table=torch.tensor([sequence.table, [0] * len(sequence.table)], dtype=torch.int32),
        max_query_len=1,
        max_seq_len=SMALL.max_len,
    )
    before = engine.raw[0].clone()
    engine.operations.run(StepRows(**padded, is_sink=None), output, step)
    assert torch.equal(engine.raw[0], before)
    assert output[1].isnan().all()
    torch.testing.assert_close(output[:1].double(), engine.offline(sequence)[199:], rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize(
    "shape",
    [
        SMALL,
        Shape("antkv-1bit", 64, 2, 2, BFLOAT16, reorders=True),
        Shape("antkv-1bit", 64, 2, 2, FLOAT16, rotary_dim=0),
        Shape("antkv-0.75bit", 128, 1, 1, BFLOAT16),
        Shape("antkv-0.375bit", 64, 2, 2, FLOAT16),
    ],
    ids=str,
)
def test_pages_are_those_of_the_reference(shape):
    engines = [Engine(AntKVConfig(), shape, build) for build in (operations(), ReferenceOperations)]
    sequence = draw_sequence(0, 300, shape)
    for engine in engines:
        sequence.computed, sequence.vq_blocks, sequence.pages, sequence.table = 0, [], [], []
        # Whoever had the blocks before left anchors.
        engine.state.vq.anchor_offsets.fill_(7)
        engine.step([(sequence, 290)])
        engine.step([(sequence, 1)])
    for name in ("k_codes", "v_codes"):
        ours, reference = (getattr(engine.state.vq, name)[sequence.vq_blocks[:2]] for engine in engines)
        # Float32 sums in another order may choose the other of two centroids that are equally near. Were rows rounded
        # to float16, 1.2e-3 of the K codes would be others at 2 and at 0.375 bits.
        assert (ours != reference).float().mean() < 1e-3
    ours, reference = (engine.state.vq.anchor_offsets[sequence.vq_blocks] for engine in engines)
    assert torch.equal(ours, reference)
    pages = [page for page in sequence.pages if page]
    for name in ("k", "v"):
        ours, reference = (getattr(engine.state.recency, name)[pages].view(torch.int16) for engine in engines)
        assert torch.equal(ours, reference)


@pytest.mark.parametrize("shape", [SMALL, LOW_BITS[0], FOUR_BITS], ids=str)
def test_equal_distances_take_the_lower_code(monkeypatch, shape):
    original = engine_module.codebook

    def doubled(shape: Shape) -> Codebook:
        book = original(shape)
        halves = ([table.unflatten(-2, (2, -1))[..., :1, :, :] for table in tables] for tables in (book.k, book.v))
        k, v = (tuple(half.expand(-1, -1, 2, -1, -1).flatten(-3, -2) for half in tables) for tables in halves)
        return replace(book, k=k, v=v)

    monkeypatch.setattr(engine_module, "codebook", doubled)
    engine = Engine(AntKVConfig(), shape, operations())
    sequence = draw_sequence(0, 20, shape)
    engine.step([(sequence, 20)])
    packed = engine.state.vq.k_codes[sequence.vq_blocks[0], :, :20]
    preset = LAYER_PRESETS[shape.preset]
    codes = unpack_codes(packed, preset, preset.num_sub_vectors(shape.head_size))
    assert codes.max() < preset.num_centroids // 2


@pytest.mark.parametrize(
    ("shape", "reads"),
    [
        (LAYERS[0][0], {"key_quad": (2, 8), "value_quad": (1, 16)}),
        (LAYERS[3][0], {"key_quad": (1, 16), "value_quad": (1, 16)}),
        (LAYERS[2][0], {"key_quad": (2, 8), "value_quad": (1, 8)}),
        (SMALL, {"key_quad": (1, 16), "value_quad": (1, 8)}),
        (FOUR_BITS, {"key_quad": (1, 16), "value_quad": (1, 16)}),
    ],
    ids=str,
)
def test_lanes_that_are_served_together_read_other_banks(shape, reads):
    """`reads`: quads that a lane reads at a time, and how many of the lanes that fill the banks read other columns."""
    backend = EmulatedBackend()
    kind = Engine(AntKVConfig(), shape, operations(backend)).state.kind
    build = Build.of(kind, backend.shared_bytes, backend.capability)
    for name, (width, together) in reads.items():
        pairs, at_once = build.head_size // 32, 128 // (8 * width)
        steps = [2 * j + second for j in range(0, pairs, width) for second in (0, 1)]
        for step in steps if name == "key_quad" else range(pairs):
            quads = [getattr(library(build), name)(lane, step) for lane in range(32)]
            assert all(quad % width == 0 for quad in quads)
            columns = [quad // width % at_once for quad in quads]
            for first in range(0, 32, at_once):
                assert len(set(columns[first : first + at_once])) == together


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (Shape("antkv-1bit", 96, 2, 1, FLOAT16), "head sizes"),
        (Shape("antkv-1bit", 64, 34, 2, FLOAT16), "17"),
        (Shape("antkv-1bit", 64, 2, 1), "float32"),
        (Shape("antkv-1bit", 64, 2, 1, FLOAT16, rotary_dim=32), "partial"),
        (Shape("antkv-1bit", 64, 2, 1, FLOAT16, neox=False), "interleaved"),
    ],
    ids=str,
)
def test_layers_without_code_are_refused(shape, words, refused):
    with refused(UnsupportedModelError, words, "kernels=triton"):
        Engine(AntKVConfig(), shape, operations())


@pytest.mark.parametrize(("shape", "shared_bytes"), [(LAYERS[0][0], 101376), (FOUR_BITS, 166912)], ids=str)
def test_a_gpu_with_too_little_shared_memory_is_refused(shape, shared_bytes, refused):
    with refused(UnsupportedModelError, "shared memory"):
        Engine(AntKVConfig(), shape, operations(EmulatedBackend(shared_bytes)))
