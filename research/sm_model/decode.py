"""antkv_decode in the model: cycles per (token, KV head), and what a split costs besides."""

from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.gpu.antkv_layer import Requests, Tokens
from benchmarks.gpu.llama import NUM_HEADS, NUM_KV_HEADS
from research.sm_model.backend import ModelledBackend
from research.sm_model.constants import Constants
from research.sm_model.sm import Report
from vllm_antkv.config import AntKVConfig
from vllm_antkv.ops.cuda import SPLIT, CudaOperations
from vllm_antkv.ops.paged import ReferenceOperations

#: Tokens that a warp decodes together.
TILE = 32
#: Tokens of the runs whose difference is steady decoding: the first have all that a CTA starts with.
SHORT, LONG = 1024, 5120
#: Requests of `SHORT` tokens that a CTA decodes one after another.
SEVERAL = 4


@dataclass(frozen=True)
class Prediction:
    """cycles: of a multiprocessor per (token, KV head), within a split. split: tokens of a split.

    Per KV head, besides, while others are under way: split_cycles, of a split; request_cycles, of a request, with its
    splits at `SHORT` tokens and the rows that it sees in full precision; vote_cycles, of the votes of its token.
    last_vote_cycles: of the votes of a launch's last request, while nothing else is under way.
    instructions: of all warps per tile of 32 tokens; by kind in `kinds`. wavefronts of shared memory and sectors that
    pass L1, per tile. shares: how the schedulers spend their cycles.
    """

    cycles: float
    split_cycles: float
    request_cycles: float
    vote_cycles: float
    last_vote_cycles: float
    split: int
    instructions: float
    kinds: dict[str, float]
    wavefronts: float
    sectors: float
    shares: dict[str, float]


@dataclass(frozen=True)
class Work:
    """requests: of `length` tokens each, in splits of `split`. votes: their tokens vote."""

    length: int
    split: int = SPLIT
    requests: int = 1
    votes: bool = False


@dataclass(frozen=True)
class Run:
    """report: of a CTA that decoded KV head 0 of its requests.

    output, expected: (group, head_size), of its machine code and of the specification, of the first request.
    """

    report: Report
    output: torch.Tensor
    expected: torch.Tensor


def run(preset: str, work: Work, config: AntKVConfig, constants: Constants) -> Run:
    """Requests with random contents."""
    torch.manual_seed(work.length)
    requests = Requests(preset, [work.length] * work.requests, 1, config, device="cpu")
    backend, state = ModelledBackend(constants), requests.state
    others = ReferenceOperations(state)
    operations = CudaOperations(state, backend=backend, triton=others, split=work.split)
    # The model runs decode.cu alone.
    operations.encode_store = others.encode_store
    storage = state.vq.k_codes.untyped_storage()
    backend.streamed.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    tokens = Tokens.random(requests.step.num_reqs, device="cpu")
    expected = torch.empty_like(tokens.output)
    run = operations.run if work.votes else operations.attend
    with np.errstate(all="ignore"):  # lanes that are switched off compute with whatever they hold
        run(tokens.rows, tokens.output, requests.step)
    others.attend(tokens.rows, expected, requests.step)
    group = NUM_HEADS // NUM_KV_HEADS
    return Run(backend.reports["antkv_decode"], tokens.output[0, :group], expected[0, :group])


def predict(preset: str, constants: Constants, anchor_share: float | None = None) -> Prediction:
    """At the default settings, or with another share of anchors (0: no sinks either)."""
    config = AntKVConfig()
    if anchor_share is not None:
        config = AntKVConfig(anchor_share=anchor_share, sinks=anchor_share > 0)
    # Pairs that differ in nothing but the number of tokens, of splits, of requests, and votes.
    schedules = (
        *(Work(SHORT, SHORT), Work(LONG, LONG), Work(LONG, LONG // 2)),
        *(Work(SHORT, SHORT, SEVERAL), Work(SHORT, SHORT, SEVERAL, votes=True), Work(SHORT, SHORT, votes=True)),
    )
    short, long, cut, several, voting, last = (run(preset, work, config, constants).report for work in schedules)
    num_tokens = LONG - SHORT
    cycles = (long.cycles - short.cycles) / num_tokens
    last_vote = last.cycles - short.cycles
    tiles = num_tokens / TILE
    kinds = per_tile(short, long, tiles)
    return Prediction(
        cycles=cycles,
        split_cycles=cut.cycles - long.cycles,
        request_cycles=(several.cycles - short.cycles) / (SEVERAL - 1) - SHORT * cycles,
        vote_cycles=(voting.cycles - several.cycles - last_vote) / (SEVERAL - 1),
        last_vote_cycles=last_vote,
        split=SPLIT,
        instructions=sum(kinds.values()),
        kinds=kinds,
        wavefronts=(long.wavefronts - short.wavefronts) / tiles,
        sectors=(long.sectors - short.sectors) / tiles,
        shares=_shares(short, long),
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
