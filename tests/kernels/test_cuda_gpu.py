"""The CUDA kernels on a GPU, through CuPy, give what the offline evaluator computes in float64."""

from dataclasses import replace

import pytest
import torch

from tests.kernels.cuda_emulation.cases import FLOAT16, LAYERS, assert_decoded, decode_from
from tests.kernels.engine import Engine, Shape, draw_sequence
from vllm_antkv.config import AntKVConfig
from vllm_antkv.ops import cuda
from vllm_antkv.ops.cuda import CudaOperations
from vllm_antkv.ops.layer import LayerState
from vllm_antkv.ops.paged import ReferenceOperations
from vllm_antkv.ops.step import Step

pytestmark = pytest.mark.gpu

CONFIGS = [
    AntKVConfig(),
    AntKVConfig(anchor_share=0.0, sinks=False, recency="none", prefix=0),
    AntKVConfig(anchor_share=1.0, recency="log:42", prefix=150),
]
DEVICE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def kernels_can_run():
    if (reason := cuda.missing(DEVICE)) is not None:
        pytest.skip(reason)


class OnDevice:
    """Runs operations on the test engine's pages, which are in host memory: there and back for every call."""

    def __init__(self, layer: LayerState, fp8: bool) -> None:
        self._host = torch.empty(0, dtype=torch.uint8).set_(layer.vq.k_codes.untyped_storage())
        self._pages = self._host.to(DEVICE)
        self.layer = replace(
            layer,
            vq=self._moved(layer.vq),
            recency=self._moved(layer.recency),
            k_centroids=layer.k_centroids.to(DEVICE),
            v_centroids=layer.v_centroids.to(DEVICE),
            rotary=None if layer.rotary is None else layer.rotary.to(DEVICE),
            last_query=layer.last_query.to(DEVICE),
            counts_rows=False,
        )
        self.operations = CudaOperations(self.layer, fp8=fp8, others=ReferenceOperations(self.layer))

    def _moved(self, pages):
        views = {}
        for name, view in vars(pages).items():
            raw = self._pages.view(view.dtype)
            views[name] = raw.as_strided(view.shape, view.stride(), view.storage_offset())
        return type(pages)(**views)

    def _run(self, name, *arguments):
        self._pages.copy_(self._host)
        moved = [_to_device(argument) for argument in arguments]
        getattr(self.operations, name)(*moved)
        self._host.copy_(self._pages)
        return moved

    def encode_store(self, key, value, step):
        self._run("encode_store", key, value, step)

    def anchor_score(self, query, key, value, is_sink, lse, step):
        self._run("anchor_score", query, key, value, is_sink, lse, step)

    def attend(self, query, key, value, output, lse, step):
        moved = self._run("attend", query, key, value, output, lse, step)
        output.copy_(moved[3])
        if lse is not None:
            lse.copy_(moved[4])


def _to_device(argument):
    if isinstance(argument, Step):
        return Step(**{name: _to_device(value) for name, value in vars(argument).items()})
    return argument.to(DEVICE) if isinstance(argument, torch.Tensor) else argument


def build_for(fp8: bool = False):
    return lambda layer: OnDevice(layer, fp8)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(("shape", "fp8"), [case[:2] for case in LAYERS if not case[1]], ids=str)
def test_decoding_gives_what_the_evaluator_computes(monkeypatch, config, shape, fp8):
    monkeypatch.setattr(cuda, "_MIN_SPLIT", 256)
    prompts = [0, 1, 126, 255, 330, *[3] * 33]
    engine = Engine(config, shape, build_for(fp8))
    sequences = [draw_sequence(seed, prompt + 4, shape) for seed, prompt in enumerate(prompts)]
    decode_from(engine, sequences, prompts, 4)
    assert_decoded(engine, sequences, prompts, 4)


def test_fp8_centroids_answer_as_float16_ones_do():
    shape = Shape("antkv-1bit", 128, 8, 2, FLOAT16)
    outputs = []
    for fp8 in (False, True):
        engine = Engine(AntKVConfig(), shape, build_for(fp8))
        sequence = draw_sequence(0, 303, shape)
        decode_from(engine, [sequence], [300], 3)
        outputs.append(sequence.output[300:303])
    # e4m3 has 4 significant bits: an eighth of a centroid's channel at most, and errors of many channels cancel.
    assert (outputs[0] - outputs[1]).norm() / outputs[0].norm() < 0.1


def test_a_graph_replays_with_other_requests():
    """Captured once for the longest context, replayed on other tokens, other lengths and padding."""
    shape = Shape("antkv-1bit", 128, 8, 2, torch.bfloat16)
    engine = Engine(AntKVConfig(), shape, build_for())
    sequences = [draw_sequence(seed, 330, shape) for seed in range(2)]
    for sequence in sequences:
        engine.step([(sequence, 280)])
    on_device = engine.operations
    on_device._pages.copy_(on_device._host)
    tables = [torch.tensor([[*s.vq_blocks, 0, 0][:4], [0] * 4], dtype=torch.int32, device=DEVICE) for s in sequences]
    recent = [torch.zeros(2, shape.max_len, dtype=torch.int32, device=DEVICE) for _ in sequences]
    for table, sequence in zip(recent, sequences, strict=True):
        table[0, : len(sequence.table)] = torch.tensor(sequence.table, dtype=torch.int32)
    step = Step(
        query_start_loc=torch.tensor([0, 1, 1], dtype=torch.int32, device=DEVICE),
        seq_lens=torch.tensor([280, 0], dtype=torch.int32, device=DEVICE),
        vq_block_table=tables[0].clone(),
        recency_block_table=recent[0].clone(),
        max_query_len=1,
        max_seq_len=shape.max_len,
    )
    rows = [getattr(sequences[0], name)[[279, 279]].to(DEVICE) for name in ("query", "key", "value")]
    output = torch.empty_like(rows[0])

    def decode():
        on_device.operations.encode_store(*rows[1:], step)
        on_device.operations.attend(*rows, output, None, step)

    decode()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode()
    # The last token of the other sequence, which its pages hold already.
    for row, name in zip(rows, ("query", "key", "value"), strict=True):
        row.copy_(getattr(sequences[1], name)[[279, 279]])
    step.vq_block_table.copy_(tables[1])
    step.recency_block_table.copy_(recent[1])
    output.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    expected = engine.offline(sequences[1])[279]
    torch.testing.assert_close(output[0].cpu().double(), expected, rtol=4e-2, atol=4e-2)
