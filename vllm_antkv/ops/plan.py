"""One engine step, cut into segments: what each query sees exactly, what through codes, and which keys it votes on.

Built once per step on the host and shared by all layers; it depends on positions alone. A *segment* is the run of a
request's new tokens that lie in one VQ block. Segments of one request depend on each other (a block's anchors serve
the next block), those of different requests do not, so the k-th segments of all requests form a *wave* that is computed
as one padded batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.select.recency import last_query_table

#: Segments x tokens that a wave decodes at most (a single longer segment goes alone): bounds the gathered rows to about
#: 1 GiB per layer for 8 KV heads of 128 channels.
MAX_WAVE_TOKENS = 1 << 16


@dataclass(frozen=True)
class Wave:
    """Segments of different requests, computed together. S segments, Q padded queries, E padded exact rows.

    requests: (S,) rows of the block tables.
    own_block: (S,) index of the VQ block that holds the segment.
    query_token: (S, Q) index into the step's tokens; padding repeats token 0.
    query_valid: (S, Q) bool.
    coded_mask: (S, Q, T) bool, the query sees token t through its code (or anchor row); T a multiple of the block size.
    exact_pos: (S, E) positions of the rows in full precision; the first VQ_BLOCK_SIZE are those of the own block.
    exact_token: (S, E) index into the step's tokens where the row is in hand, else -1: it is in a recency page.
    exact_valid: (S, E) bool, some query sees the row or votes on it. Others may be gone: block tables keep the ids of
        pages that were freed, so nothing but this says which rows can be read.
    exact_mask: (S, Q, E) bool, the query sees the row exactly.
    vote_mask: (S, Q, E) bool, the query votes in the row's Anchor Score.
    score_slot: (S, E) where the row's Anchor Score is kept during the step.
    pinned: (S, VQ_BLOCK_SIZE) bool, tokens of the intact prefix: always exact, so they take no anchor row.
    closes: (S,) bool, the segment fills its block.
    """

    requests: torch.Tensor
    own_block: torch.Tensor
    query_token: torch.Tensor
    query_valid: torch.Tensor
    coded_mask: torch.Tensor
    exact_pos: torch.Tensor
    exact_token: torch.Tensor
    exact_valid: torch.Tensor
    exact_mask: torch.Tensor
    vote_mask: torch.Tensor
    score_slot: torch.Tensor
    pinned: torch.Tensor
    closes: torch.Tensor


@dataclass(frozen=True)
class StepPlan:
    """A step of N new tokens.

    positions, token_request: (N,) position in the sequence and row of the block tables.
    waves: in order of computation.
    num_score_slots: slots for Anchor Scores: one per new token, one per token carried in an open block, and one
        that collects what nobody reads.
    carried_*: (C,) tokens of blocks that were open before the step.
    open_*: (O,) tokens of blocks that are open after it.
    """

    positions: torch.Tensor
    token_request: torch.Tensor
    waves: list[Wave]
    num_score_slots: int
    carried_request: torch.Tensor
    carried_pos: torch.Tensor
    carried_slot: torch.Tensor
    open_request: torch.Tensor
    open_pos: torch.Tensor
    open_slot: torch.Tensor

    @property
    def num_tokens(self) -> int:
        """New tokens of the step."""
        return len(self.positions)


@dataclass(frozen=True)
class _Request:
    """A request's part of a step: tokens `start .. end` of the sequence are at `first ...` of the step's tokens."""

    row: int
    first: int
    start: int
    end: int
    carried_slot: int

    @property
    def open_start(self) -> int:
        """First token of the block that was open before the step."""
        return self.start // VQ_BLOCK_SIZE * VQ_BLOCK_SIZE

    def slots(self, positions: np.ndarray) -> np.ndarray:
        """Score slots of in-hand and carried tokens."""
        carried = self.carried_slot + positions - self.open_start
        return np.where(positions >= self.start, self.first + positions - self.start, carried)

    def segments(self) -> list[tuple[int, int]]:
        """The `(begin, end)` of each segment."""
        cuts = range((self.start // VQ_BLOCK_SIZE + 1) * VQ_BLOCK_SIZE, self.end, VQ_BLOCK_SIZE)
        bounds = [self.start, *cuts, self.end]
        return list(pairwise(bounds))


#: A request and the `begin` and `end` of its segment.
_Segment = tuple[_Request, int, int]


def _split(wave: list[_Segment]) -> list[list[_Segment]]:
    """Cut a wave into parts of similar length whose padded size stays within MAX_WAVE_TOKENS."""
    parts: list[list[_Segment]] = []
    # Longest first: the first segment of a part says how long the part is padded.
    for segment in sorted(wave, key=lambda segment: -segment[1]):
        if parts and (len(parts[-1]) + 1) * parts[-1][0][2] <= MAX_WAVE_TOKENS:
            parts[-1].append(segment)
        else:
            parts.append([segment])
    return parts


class StepPlanner:
    """Makes the plan of each step. Holds the recency table for sequences of up to `max_len` tokens."""

    def __init__(self, config: AntKVConfig, max_len: int, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._last_query = last_query_table(config, max_len).numpy().astype(np.int64)

    def plan(self, query_start_loc: Sequence[int], seq_lens: Sequence[int]) -> StepPlan:
        """Plan a step.

        Args:
            query_start_loc: (num_reqs + 1) prefix sums of the requests' numbers of new tokens.
            seq_lens: (num_reqs) sequence lengths, new tokens included.
        """
        requests = self._requests(query_start_loc, seq_lens)
        num_tokens = int(query_start_loc[-1])
        num_carried = sum(request.start - request.open_start for request in requests)
        dump_slot = num_tokens + num_carried
        waves: dict[tuple[int, bool], list[_Segment]] = {}
        for request in requests:
            for number, (begin, end) in enumerate(request.segments()):
                # Decodes are kept apart from long segments, which would pad them.
                waves.setdefault((number, end - begin > 1), []).append((request, begin, end))
        carried = [(r, np.arange(r.open_start, r.start)) for r in requests]
        still_open = [(r, np.arange(r.end // VQ_BLOCK_SIZE * VQ_BLOCK_SIZE, r.end)) for r in requests]
        return StepPlan(
            self._tensor(np.concatenate([np.arange(r.start, r.end) for r in requests])),
            self._tensor(np.repeat([r.row for r in requests], [r.end - r.start for r in requests])),
            [
                self._wave(segments, dump_slot)
                for _, wave in sorted(waves.items(), key=lambda item: item[0])
                for segments in _split(wave)
            ],
            dump_slot + 1,
            *self._token_columns(carried),
            *self._token_columns(still_open),
        )

    def _requests(self, query_start_loc: Sequence[int], seq_lens: Sequence[int]) -> list[_Request]:
        requests = []
        carried_slot = int(query_start_loc[-1])
        for row, end in enumerate(seq_lens):
            first = int(query_start_loc[row])
            start = int(end) - (int(query_start_loc[row + 1]) - first)
            if start == end:
                continue
            requests.append(_Request(row, first, start, int(end), carried_slot))
            carried_slot += start % VQ_BLOCK_SIZE
        return requests

    def _token_columns(self, tokens: list[tuple[_Request, np.ndarray]]) -> list[torch.Tensor]:
        rows = np.concatenate([np.full(len(pos), request.row) for request, pos in tokens])
        positions = np.concatenate([pos for _, pos in tokens])
        slots = np.concatenate([request.slots(pos) for request, pos in tokens])
        return [self._tensor(rows), self._tensor(positions), self._tensor(slots)]

    def _wave(self, segments: list[_Segment], dump_slot: int) -> Wave:
        exact = [self._exact_positions(request, begin, end) for request, begin, end in segments]
        num_queries = max(end - begin for _, begin, end in segments)
        num_coded = max((begin // VQ_BLOCK_SIZE + 1) * VQ_BLOCK_SIZE for _, begin, _ in segments)
        num_exact = max(len(positions) for positions in exact)
        shape = (len(segments), num_queries)
        columns: dict[str, np.ndarray] = {
            "query_token": np.zeros(shape, np.int64),
            "query_valid": np.zeros(shape, bool),
            "coded_mask": np.zeros((*shape, num_coded), bool),
            "exact_pos": np.zeros((len(segments), num_exact), np.int64),
            "exact_token": np.full((len(segments), num_exact), -1, np.int64),
            "exact_valid": np.zeros((len(segments), num_exact), bool),
            "exact_mask": np.zeros((*shape, num_exact), bool),
            "vote_mask": np.zeros((*shape, num_exact), bool),
            "score_slot": np.full((len(segments), num_exact), dump_slot, np.int64),
            "pinned": np.zeros((len(segments), VQ_BLOCK_SIZE), bool),
        }
        for index, ((request, begin, end), positions) in enumerate(zip(segments, exact, strict=True)):
            rows = {name: column[index] for name, column in columns.items()}
            self._fill(rows, request, begin, end, positions)
        own_block = np.array([begin // VQ_BLOCK_SIZE for _, begin, _ in segments])
        return Wave(
            requests=self._tensor(np.array([request.row for request, _, _ in segments])),
            own_block=self._tensor(own_block),
            closes=self._tensor(np.array([end % VQ_BLOCK_SIZE == 0 for _, _, end in segments])),
            **{name: self._tensor(column) for name, column in columns.items()},
        )

    def _exact_positions(self, request: _Request, begin: int, end: int) -> np.ndarray:
        """The own block, then every earlier token that some query of the segment sees or votes on."""
        own = begin // VQ_BLOCK_SIZE * VQ_BLOCK_SIZE
        wanted = self._last_query[:own] >= begin
        if not self._config.prefill_reads_cache:
            wanted[request.start :] = True
        if self._config.anchor_scope == "prompt":
            wanted[request.open_start :] = True
        return np.concatenate((np.arange(own, own + VQ_BLOCK_SIZE), np.flatnonzero(wanted)))

    def _fill(self, rows: dict[str, np.ndarray], request: _Request, begin: int, end: int, exact: np.ndarray) -> None:
        queries = np.arange(begin, end)
        num_queries, num_exact = len(queries), len(exact)
        valid = exact < end
        votes = exact >= (request.open_start if self._config.anchor_scope == "prompt" else exact[0])
        causal = (exact <= queries[:, None]) & valid
        rows["query_token"][:num_queries] = request.first + queries - request.start
        rows["query_valid"][:num_queries] = True
        rows["exact_pos"][:num_exact] = np.where(valid, exact, 0)
        rows["exact_token"][:num_exact] = np.where(
            valid & (exact >= request.start), request.first + exact - request.start, -1
        )
        seen = causal & self._seen_exactly(request, exact, queries)
        voted = causal & votes & bool(self._config.anchor_rows)
        rows["exact_mask"][:num_queries, :num_exact] = seen
        rows["vote_mask"][:num_queries, :num_exact] = voted
        rows["exact_valid"][:num_exact] = (seen | voted).any(axis=0)
        rows["score_slot"][:num_exact][valid & votes] = request.slots(exact[valid & votes])
        past = np.arange(end)
        coded = (past <= queries[:, None]) & ~self._seen_exactly(request, past, queries)
        rows["coded_mask"][:num_queries, :end] = coded
        rows["pinned"][:] = exact[:VQ_BLOCK_SIZE] < self._config.prefix

    def _seen_exactly(self, request: _Request, keys: np.ndarray, queries: np.ndarray) -> np.ndarray:
        last_query = self._last_query[np.minimum(keys, len(self._last_query) - 1)]
        seen = last_query >= queries[:, None]
        if not self._config.prefill_reads_cache:
            seen = seen | (keys >= request.start)
        return seen

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
