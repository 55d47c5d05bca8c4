"""Codes of 4,096 centroids are those of the nearest, whatever the numbers are like: bytes rule out none of these."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.kernels.engine import Engine, Sequence, Shape, codebook, draw_sequence
from vllm_antkv.config import AntKVConfig
from vllm_antkv.ops.reference import unpack_codes
from vllm_antkv.presets import PRESETS

#: Tokens of the steps: four are compared at once, and what is left one by one.
STEPS = (11, 4, 1, 1, 43)
#: Without RoPE, which would be undone in float32: K is then coded as it comes, and as V is.
SHAPES = [Shape(preset, 64, rotary_dim=0) for preset in ("antkv-0.75bit", "antkv-0.375bit")]

#: Changes rows, (num_tokens, num_kv_heads, head_size), and centroids, (num_kv_heads, num_sub_vectors, 4096, size).
Change = Callable[[torch.Tensor, torch.Tensor], object]


CHANGES: dict[str, Change] = {
    "usual": lambda rows, centroids: None,
    "far from zero": lambda rows, centroids: (rows[..., 3].add_(300), centroids[:, 0, :, 3].add_(300)),
    "rows with outliers": lambda rows, centroids: rows[::7, :, 5].fill_(1e4),
    "a centroid that dwarfs the others": lambda rows, centroids: (centroids[:, :, 7].mul_(1e4), rows[::9].mul_(1e4)),
    "tiny rows": lambda rows, centroids: rows.mul_(1e-30),
    "what bytes cannot tell apart": lambda rows, centroids: (centroids.mul_(1e-3), centroids[:, :, 0].fill_(50)),
}


def one_centroid(rows: torch.Tensor, centroids: torch.Tensor) -> None:
    centroids[:] = centroids[:, :, :1].clone()


def pairs_of_equal_centroids(rows: torch.Tensor, centroids: torch.Tensor) -> None:
    centroids[:, :, 1::2] = centroids[:, :, ::2]


def coded(
    operations, shape: Shape, change: Change, monkeypatch
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Rows, (num_tokens, num_kv_heads, num_sub_vectors, size), their codes, and the centroids, of K and of V."""
    book, sequence = codebook(shape), draw_sequence(0, sum(STEPS), shape)
    k, v = ((centroids := table.clone()) for table in (book.k[0], book.v[0]))
    for rows, centroids in ((sequence.key, k), (sequence.value, v)):
        change(rows, centroids)
    monkeypatch.setattr("tests.kernels.engine.codebook", lambda _: replace(book, k=(k,), v=(v,)))
    engine = Engine(AntKVConfig(), shape, operations)
    for count in STEPS:
        engine.step([(sequence, count)])
    return [
        (rows.unflatten(-1, centroids.shape[1::2]), codes_of(engine, sequence, name), centroids)
        for rows, name, centroids in ((sequence.key, "k_codes", k), (sequence.value, "v_codes", v))
    ]


def codes_of(engine: Engine, sequence: Sequence, name: str) -> torch.Tensor:
    """(num_tokens, num_kv_heads, num_sub_vectors)."""
    packed = getattr(engine.state.vq, name)[sequence.vq_blocks].transpose(1, 2).flatten(0, 1)[: sequence.computed]
    preset = PRESETS[engine.shape.preset]
    return unpack_codes(packed, preset, preset.num_sub_vectors(engine.shape.head_size)).long()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_no_centroid_is_nearer(float32_kernels, shape, change, monkeypatch):
    for rows, codes, centroids in coded(float32_kernels, shape, change, monkeypatch):
        distances = torch.cdist(
            rows.double().permute(1, 2, 0, 3), centroids.double(), compute_mode="donot_use_mm_for_euclid_dist"
        ).square()
        distances = distances.permute(2, 0, 1, 3)  # tokens first
        nearest, chosen = distances.amin(-1), distances.gather(-1, codes[..., None])[..., 0]
        # What float32 keeps of a distance: a share of the squares that it is made of, both less the middle.
        middles = centroids.median(2).values.double()
        sizes = (rows.double() - middles).square().sum(-1)
        assert (chosen - nearest <= 2**-18 * (sizes + chosen)).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equal_distances_take_the_lower_code(float32_kernels, shape, monkeypatch):
    for _, codes, _ in coded(float32_kernels, shape, pairs_of_equal_centroids, monkeypatch):
        assert (codes % 2 == 0).all()
        assert codes.unique().numel() > 100
    for _, codes, _ in coded(float32_kernels, shape, one_centroid, monkeypatch):
        assert (codes == 0).all()
