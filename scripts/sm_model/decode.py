"""antkv_decode in the model: cycles per (token, KV head), and what a split costs besides."""

from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.gpu.antkv_layer import Requests, Tokens
from benchmarks.gpu.llama import NUM_HEADS, NUM_KV_HEADS
from scripts.sm_model.backend import ModelledBackend
from scripts.sm_model.constants import Constants
from scripts.sm_model.sm import Report
from vllm_antkv.config import AntKVConfig
from vllm_antkv.ops.cuda import SPLIT, CudaOperations
from vllm_antkv.ops.paged import ReferenceOperations

#: Tokens that a warp decodes together.
TILE = 32


@dataclass(frozen=True)
class Prediction:
    """cycles: of a multiprocessor per (token, KV head), within a split. split_cycles: what a split takes besides, while
    others are under way. split: its tokens.

    instructions: of all warps per tile of 32 tokens; by kind in `kinds`. wavefronts of shared memory and sectors that
    pass L1, per tile. shares: how the schedulers spend their cycles.
    """

    cycles: float
    split_cycles: float
    split: int
    instructions: float
    kinds: dict[str, float]
    wavefronts: float
    sectors: float
    shares: dict[str, float]


@dataclass(frozen=True)
class Run:
    """report: of a CTA that decoded KV head 0 of one request alone.

    output, expected: (group, head_size), of its machine code and of the specification.
    """

    report: Report
    output: torch.Tensor
    expected: torch.Tensor


def run(preset: str, length: int, config: AntKVConfig, constants: Constants) -> Run:
    """One request of `length` tokens with random contents."""
    torch.manual_seed(length)
    requests = Requests(preset, 1, length, 1, config, device="cpu")
    backend, state = ModelledBackend(constants), requests.state
    others = ReferenceOperations(state)
    operations = CudaOperations(state, backend=backend, others=others)
    storage = state.vq.k_codes.untyped_storage()
    backend.streamed.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    tokens = Tokens.random(1, device="cpu")
    rows = (tokens.query, tokens.key, tokens.value)
    expected = torch.empty_like(tokens.output)
    with np.errstate(all="ignore"):  # lanes that are switched off compute with whatever they hold
        operations.attend(*rows, tokens.output, None, requests.step)
    others.attend(*rows, expected, None, requests.step)
    group = NUM_HEADS // NUM_KV_HEADS
    return Run(backend.reports["antkv_decode"], tokens.output[0, :group], expected[0, :group])


def predict(preset: str, constants: Constants, anchor_share: float | None = None) -> Prediction:
    """At the default settings, or with another share of anchors (0: no sinks either)."""
    config = AntKVConfig()
    if anchor_share is not None:
        config = AntKVConfig(anchor_share=anchor_share, sinks=anchor_share > 0)
    half, one, two = (run(preset, length, config, constants).report for length in (SPLIT // 2, SPLIT, 2 * SPLIT))
    tiles = SPLIT / 2 / TILE
    kinds = per_tile(half, one, tiles)
    cycles = (one.cycles - half.cycles) / (SPLIT / 2)
    return Prediction(
        cycles=cycles,
        split_cycles=max(two.cycles - one.cycles - SPLIT * cycles, 0),
        split=SPLIT,
        instructions=sum(kinds.values()),
        kinds=kinds,
        wavefronts=(one.wavefronts - half.wavefronts) / tiles,
        sectors=(one.sectors - half.sectors) / tiles,
        shares=one.shares,
    )


def per_tile(short: Report, long: Report, tiles: float) -> dict[str, float]:
    """Instructions by kind of the tiles that the longer run has more."""
    kinds = {name: (count - short.instructions[name]) / tiles for name, count in long.instructions.items()}
    return dict(sorted(kinds.items(), key=lambda item: -item[1]))
