"""CTAs of a cluster that share K's tables give the bits of those that read them from L2, and run where they pay."""

from collections.abc import Sequence as Arguments
from dataclasses import replace

import pytest
import torch

from tests.kernels.cuda_emulation.backend import EmulatedBackend, decoding, needs_emulation
from tests.kernels.cuda_emulation.cases import BFLOAT16, FLOAT16, LAYERS, assert_decoded
from tests.kernels.engine import Engine, Sequence, Shape, draw_sequence
from tests.kernels.guarded import guarding
from vllm_antkv.config import AntKVConfig
from vllm_antkv.ops import cuda
from vllm_antkv.ops.cuda_backend import Argument
from vllm_antkv.ops.cuda_build import CLUSTER, Build

pytestmark = needs_emulation
#: A lane's halves of K in the tables of one CTA, and of two.
SHAPES = [
    Shape("antkv-0.75bit", 128, 4, 1, BFLOAT16, magnitude=1.3, reorders=True, max_len=700),
    Shape("antkv-0.75bit", 64, 3, 1, FLOAT16, max_len=700),
]
#: With the next token, splits of 256: 3, 1 and 2, a turn and a half of a cluster's CTAs.
PROMPTS = [620, 3, 300]


class Recording(EmulatedBackend):
    """launches: clusters that decoding was launched in, and its grid."""

    def __init__(self, shared_bytes: int = 232448, clusters: int = 1) -> None:
        super().__init__(shared_bytes, clusters)
        self.launches: list[tuple[int, int]] = []

    def launch(
        self,
        build: Build,
        kernel: str,
        grid: tuple[int, ...],
        threads: int,
        shared: int,
        arguments: Arguments[Argument],
    ) -> None:
        if kernel == "antkv_decode":
            self.launches.append((build.cluster, grid[0]))
        super().launch(build, kernel, grid, threads, shared, arguments)


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "SPLIT", 256)
    monkeypatch.setattr(cuda, "tables_of", guarding(cuda.tables_of))


def decoded(backend: EmulatedBackend, shape: Shape, prompts: list[int]) -> tuple[Engine, list[Sequence]]:
    """Two tokens after every prompt, all requests together."""
    engine = Engine(AntKVConfig(anchor_share=0.03), shape, decoding(backend))
    sequences = [draw_sequence(seed, prompt + 2, shape) for seed, prompt in enumerate(prompts)]
    for sequence, prompt in zip(sequences, prompts, strict=True):
        engine.step([(sequence, prompt)])
    backend.launches.clear()
    for _ in range(2):
        engine.step([(sequence, 1) for sequence in sequences])
    return engine, sequences


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_clusters_give_the_same_bits(shape):
    backends = [Recording(clusters=clusters) for clusters in (0, 1)]
    (_, alone), (engine, together) = (decoded(backend, shape, PROMPTS) for backend in backends)
    assert [backend.launches for backend in backends] == [[(1, 4)] * 2, [(CLUSTER, 4)] * 2]
    for first, second in zip(alone, together, strict=True):
        assert torch.equal(first.output[-2:], second.output[-2:])
    assert_decoded(engine, together, PROMPTS, 2)


def test_ctas_without_a_split_have_tables_for_the_others():
    """Beside a chunk of a prompt there are two splits, and room for nine: two CTAs have none, nor has a cluster."""
    shape, backend = SHAPES[1], Recording(clusters=2)
    engine = Engine(AntKVConfig(), shape, decoding(backend))
    prompts = [0, 3, 250]
    sequences = [draw_sequence(seed, prompt + 1, shape) for seed, prompt in enumerate(prompts)]
    chunk = draw_sequence(3, 620, shape)
    for sequence, prompt in zip(sequences[1:], prompts[1:], strict=True):
        engine.step([(sequence, prompt)])
    backend.launches.clear()
    engine.step([(chunk, 620), *((sequence, 1) for sequence in sequences[1:])])
    assert backend.launches == [(CLUSTER, 8)]
    assert_decoded(engine, sequences[1:], prompts[1:], 1)


@pytest.mark.parametrize(
    ("shape", "backend", "prompts"),
    [
        (SHAPES[1], Recording(clusters=0), PROMPTS),
        # Fewer splits than CTAs.
        (SHAPES[1], Recording(), [200, 3, 4]),
        (SHAPES[1], Recording(clusters=3), PROMPTS),
        # More KV heads than clusters.
        (replace(SHAPES[1], num_heads=6, num_kv_heads=2), Recording(), PROMPTS),
        # Centroids that are whole sectors of L2, and those that a CTA has all of.
        (LAYERS[6][0], Recording(), [200, 250, 250, 250]),
        (LAYERS[1][0], Recording(), [200, 250, 250, 250]),
        # A GPU that has no clusters.
        (SHAPES[0], Recording(shared_bytes=166912), PROMPTS),
    ],
    ids=lambda value: str(value) if isinstance(value, Shape) else "",
)
def test_without_clusters_that_pay_tables_are_read_from_l2(shape, backend, prompts):
    engine, sequences = decoded(backend, shape, prompts)
    assert {cluster for cluster, _ in backend.launches} == {1}
    assert_decoded(engine, sequences, prompts, 2)


def test_a_build_for_clusters_has_room_for_what_it_says():
    build = Build(128, 4, 16, 4096, bfloat16=True, bulk=True)
    clustered = build.in_clusters(232448)
    assert clustered is not None
    assert clustered.table_bytes == 128 * 4096 // CLUSTER
    assert clustered.decode_shared_bytes <= 232448
    assert build.in_clusters(clustered.table_bytes) is None
    assert replace(build, bulk=False).in_clusters(232448) is None
