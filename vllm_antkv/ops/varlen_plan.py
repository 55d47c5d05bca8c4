"""Attention of prompts by a kernel that knows plain rows alone: which calls of it give what the cache's rules say.

Such a kernel (FlashAttention's, with a page table) attends from runs of queries to the first `num_keys` rows of a list
of pages: to all of them, or with a causal mask whose last query sees the last key. With `prefill_reads_cache: false`
all queries of a request see exactly what its first one does, so that a row of the past is the same for all:

* Where no request has a past there are no pages, and nothing is planned: the rows in hand are what there is.
* Else pages are written (`triton_kernels.dequantised_pages`), of the past and of the step's tokens, and one call with a
  mask attends to them.
* Pages of a long past do not fit at once. It comes in pieces of a fixed number of blocks, which all queries see whole,
  in calls without a mask; the last piece ends with the step's tokens. What the calls of a request give is merged by its
  log-sum-exp (`triton_kernels.merge_calls`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from vllm_antkv.config import VQ_BLOCK_SIZE


@dataclass(frozen=True, eq=False)
class Round:
    """Pages that are there at once, and the call on them.

    first_row, num_rows: of the step's tensors. Rows of requests that decode lie before and between others, and see
        nothing.
    is_first: nothing was computed for these rows before. Others go on where the round before them left off.
    pages: (num_pages, 2) int32: request and VQ block.
    starts: (num_runs + 1,) int32 rows of the round, where runs of consecutive queries begin and the last one ends.
    num_keys: (num_runs,) int32 rows from a run's first page on; 0 where its queries see nothing.
    page_table: (num_runs, most) int32 indices into `pages`; 0 behind those with keys.
    max_rows, max_keys: the most of a run.
    causal: the last query of a run sees all its keys, the one before it one less.
    """

    first_row: int
    num_rows: int
    is_first: bool
    pages: np.ndarray
    starts: np.ndarray
    num_keys: np.ndarray
    page_table: np.ndarray
    max_rows: int
    max_keys: int
    causal: bool


@dataclass(frozen=True)
class Limits:
    """piece: blocks of a past at once. num_pages: that there is room for, which must do for a piece and the blocks of a
    step's tokens. longest_decode: requests with so many new tokens or fewer are left to other kernels.
    """

    piece: int
    num_pages: int
    longest_decode: int = 1


def plan(query_lens: Sequence[int], seq_lens: Sequence[int], limits: Limits) -> list[Round]:
    """What computes attention of the requests that do not decode, at the end of so long sequences.

    Nothing where none of them has a past.
    """
    lens = list(zip(query_lens, seq_lens, strict=True))
    if all(num_new == end for num_new, end in lens if num_new > limits.longest_decode):
        return []
    rounds: list[list[_Piece]] = []
    # Requests share a round where one is enough for each of them: pages that the last one has room for.
    row = room = 0
    for request, (num_new, end) in enumerate(lens):
        if num_new > limits.longest_decode:
            for piece in _pieces(request, row, (end - num_new, end), limits.piece):
                if piece.is_whole and piece.num_pages <= room:
                    rounds[-1].append(piece)
                else:
                    rounds.append([piece])
                    room = limits.num_pages if piece.is_whole else 0
                room -= piece.num_pages
        row += num_new
    # The first one has all rows of a step that needs no other: nobody takes them apart.
    rows = [0 if pieces is rounds[0] and pieces[0].is_whole else pieces[0].row for pieces in rounds]
    return [_round(pieces, row) for pieces, row in zip(rounds, rows, strict=True)]


@dataclass(frozen=True)
class _Piece:
    """Blocks `first .. stop` of a request, which its new tokens, `num_rows` from `row` on, see.

    num_keys: tokens of the blocks. is_last: they end with the new ones.
    """

    request: int
    row: int
    num_rows: int
    first: int
    stop: int
    num_keys: int
    is_last: bool

    @property
    def num_pages(self) -> int:
        return self.stop - self.first

    @property
    def is_whole(self) -> bool:
        return self.is_last and self.first == 0


def _pieces(request: int, row: int, tokens: tuple[int, int], size: int) -> Iterator[_Piece]:
    """Of a request with new tokens from `tokens[0]` to `tokens[1]`."""
    start, end = tokens
    num_blocks = -(-end // VQ_BLOCK_SIZE)
    first_of_last = start // VQ_BLOCK_SIZE // size * size
    for first in range(0, first_of_last + 1, size):
        is_last = first == first_of_last
        stop = num_blocks if is_last else first + size
        num_keys = min(end, stop * VQ_BLOCK_SIZE) - first * VQ_BLOCK_SIZE
        yield _Piece(request, row, end - start, first, stop, num_keys, is_last)


def _round(pieces: list[_Piece], first_row: int) -> Round:
    """Of requests in the order of their rows."""
    starts, num_keys, runs = [0], list[int](), list[int]()
    for piece in pieces:
        begin = piece.row - first_row
        if begin > starts[-1]:
            # Rows between two requests are a run, too.
            starts.append(begin)
            num_keys.append(0)
        runs.append(len(num_keys))
        starts.append(begin + piece.num_rows)
        num_keys.append(piece.num_keys)
    pages = np.empty((sum(piece.num_pages for piece in pieces), 2), np.int32)
    page_table = np.zeros((len(num_keys), max(piece.num_pages for piece in pieces)), np.int32)
    written = 0
    for run, piece in zip(runs, pieces, strict=True):
        end = written + piece.num_pages
        pages[written:end, 0] = piece.request
        pages[written:end, 1] = np.arange(piece.first, piece.stop)
        page_table[run, : piece.num_pages] = np.arange(written, end)
        written = end
    return Round(
        first_row=first_row,
        num_rows=starts[-1],
        is_first=pieces[0].first == 0,
        pages=pages,
        starts=np.array(starts, np.int32),
        num_keys=np.array(num_keys, np.int32),
        page_table=page_table,
        max_rows=max(stop - start for start, stop in pairwise(starts)),
        max_keys=max(num_keys),
        causal=pieces[0].is_last,
    )
