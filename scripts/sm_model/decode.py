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
from vllm_antkv.ops.cuda_build import CLUSTER
from vllm_antkv.ops.paged import ReferenceOperations

#: Tokens that a warp decodes together.
TILE = 32
#: Presets that clusters decode, where a GPU has them.
CLUSTERED = ("antkv-0.75bit",)
#: Tokens of the runs whose difference is steady decoding: the first have all that a CTA starts with.
SHORT, LONG = 1024, 5120


@dataclass(frozen=True)
class Prediction:
    """cycles: of a multiprocessor per (token, KV head), within a split. split_cycles: what a split takes besides, while
    others are under way. vote_cycles: what the votes of a single token take, per KV head. split: tokens of a split.

    table_cycles: what tables in the shared memory of a cluster take to come, once a launch; 0 without clusters.
    instructions: of all warps per tile of 32 tokens; by kind in `kinds`. wavefronts of shared memory and sectors that
    pass L1, per tile. shares: how the schedulers spend their cycles.
    """

    cycles: float
    split_cycles: float
    vote_cycles: float
    split: int
    instructions: float
    kinds: dict[str, float]
    wavefronts: float
    sectors: float
    shares: dict[str, float]
    table_cycles: float = 0


@dataclass(frozen=True)
class Run:
    """report: of a CTA that decoded KV head 0 of one request alone.

    output, expected: (group, head_size), of its machine code and of the specification.
    """

    report: Report
    output: torch.Tensor
    expected: torch.Tensor


def run(
    preset: str, length: int, config: AntKVConfig, constants: Constants, split: int = SPLIT, votes: bool = False
) -> Run:
    """A request of `length` tokens with random contents, in splits of `split` tokens, for each CTA of a cluster."""
    torch.manual_seed(length)
    clustered = preset in CLUSTERED
    requests = Requests(preset, CLUSTER if clustered else 1, length, 1, config, device="cpu")
    backend, state = ModelledBackend(constants, NUM_KV_HEADS if clustered else 0), requests.state
    others = ReferenceOperations(state)
    operations = CudaOperations(state, backend=backend, others=others, split=split)
    storage = state.vq.k_codes.untyped_storage()
    backend.streamed.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    tokens = Tokens.random(requests.step.num_reqs, device="cpu")
    rows = (tokens.query, tokens.key, tokens.value)
    expected = torch.empty_like(tokens.output)
    if votes:
        operations.anchor_score(*rows, None, None, requests.step)
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
    # Pairs that differ in nothing but the number of tokens, the number of splits, and votes.
    schedules = (SHORT, SHORT, False), (LONG, LONG, False), (LONG, LONG // 2, False), (SHORT, SHORT, True)
    short, long, cut, voting = (run(preset, at[0], config, constants, *at[1:]).report for at in schedules)
    num_tokens = LONG - SHORT
    tiles = num_tokens / TILE
    kinds = per_tile(short, long, tiles)
    return Prediction(
        cycles=(long.cycles - short.cycles) / num_tokens,
        split_cycles=cut.cycles - long.cycles,
        vote_cycles=voting.cycles - short.cycles,
        split=SPLIT,
        instructions=sum(kinds.values()),
        kinds=kinds,
        wavefronts=(long.wavefronts - short.wavefronts) / tiles,
        sectors=(long.sectors - short.sectors) / tiles,
        shares=_shares(short, long),
        table_cycles=next(iter(long.meetings), 0),
    )


def _shares(short: Report, long: Report) -> dict[str, float]:
    """How the schedulers spend the cycles that the longer run has more."""
    more = long.cycles - short.cycles
    return {
        name: (share * long.cycles - short.shares.get(name, 0) * short.cycles) / more
        for name, share in long.shares.items()
    }


def per_tile(short: Report, long: Report, tiles: float) -> dict[str, float]:
    """Instructions by kind of the tiles that the longer run has more."""
    kinds = {name: (count - short.instructions[name]) / tiles for name, count in long.instructions.items()}
    return dict(sorted(kinds.items(), key=lambda item: -item[1]))
