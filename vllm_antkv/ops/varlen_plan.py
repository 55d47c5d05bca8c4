"""Attention of prompts by a kernel that knows plain rows alone: which calls of it give what the cache's rules say.

Such a kernel (FlashAttention's, with a page table) attends from runs of queries to the first `num_keys` rows of a list
of pages: to all of them, or with a causal mask whose last query sees the last key, or with that and a window. Pages
are written for it (`triton_kernels.dequantised_pages`): a past page has what the codes of a VQ block stand for, anchors
corrected and rows of the prefix exact; an exact page has a block's rows in full precision. With `sliding:W`, W at
most a block, a query sees its own block and the W - 1 tokens before it exactly, all others as codes, and anchors of
all blocks before its own. The first W queries of block `b` are `early`, the others `late`:

    call      early queries                                  late queries
    causal    past pages of blocks 0 .. b - 1, as far as     past pages of blocks 0 .. b - 1, exact page of b
              the last of them sees codes
    recent    exact pages of b - 1 and b, a window of W      nothing

What several calls give is merged by its log-sum-exp. Pages of a long past do not fit at once: it comes in pieces of a
fixed number of blocks, counted from the start of the sequence. Runs that see all of a piece have a call `full`, without
a mask. How a prompt is cut into steps makes other runs, but a query meets the same keys in the same calls.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm_antkv.config import VQ_BLOCK_SIZE


@dataclass(frozen=True)
class Page:
    """What a page is to hold: a VQ block of a request, exact rows or what codes stand for."""

    request: int
    block: int
    exact: bool


@dataclass(frozen=True)
class Run:
    """Consecutive queries, and the rows that they attend to.

    pages: indices into `Round.pages`.
    num_keys: rows from the first page on; 0 where the queries see nothing in this call.
    """

    num_rows: int
    pages: tuple[int, ...] = ()
    num_keys: int = 0


@dataclass(frozen=True)
class Call:
    """One call of the kernel; its runs cover the rows of the round.

    causal: the last query of a run sees all its keys, the one before it one less.
    window: keys that a query sees at most, itself included; None is all.
    """

    runs: tuple[Run, ...]
    causal: bool
    window: int | None = None


@dataclass(frozen=True)
class Round:
    """Pages that are there at once, and the calls on them.

    first_row, num_rows: of the step's tensors. Rows of requests that decode lie between others, and see nothing.
    is_first: nothing was computed for these rows before.
    """

    first_row: int
    num_rows: int
    is_first: bool
    pages: tuple[Page, ...]
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Limits:
    """window: W of `sliding:W`, at most VQ_BLOCK_SIZE. piece: blocks of a past at once. num_pages: that there is room
    for, which must do for a piece and the blocks of a step's tokens. longest_decode: requests with so many new tokens
    or fewer are left to other kernels.
    """

    window: int
    piece: int
    num_pages: int
    longest_decode: int = 1


def plan(query_lens: Sequence[int], seq_lens: Sequence[int], limits: Limits) -> list[Round]:
    """What computes attention of the requests that do not decode, at the end of so long sequences."""
    rounds: list[_Round] = []
    row = 0
    for request, (num_new, end) in enumerate(zip(query_lens, seq_lens, strict=True)):
        num_pieces = 0 if num_new <= limits.longest_decode else -(-end // (limits.piece * VQ_BLOCK_SIZE))
        for index in range(num_pieces):
            piece = _Piece(request, end - num_new, end, index * limits.piece, (index + 1) * limits.piece)
            spans = list(piece.spans(limits.window))
            num_pages = len({page for span in spans for view in span.views.values() for page in view.pages})
            if not rounds or index or rounds[-1].has_later_piece or rounds[-1].num_pages + num_pages > limits.num_pages:
                rounds.append(_Round(row, has_later_piece=index > 0))
            rounds[-1].add(row, spans)
        row += num_new
    return [current.finished(limits.window) for current in rounds]


@dataclass(frozen=True)
class _View:
    """What queries see in one call."""

    pages: tuple[Page, ...]
    num_keys: int


@dataclass(frozen=True)
class _Span:
    """Consecutive queries and what they see, by call."""

    num_rows: int
    views: dict[str, _View]


@dataclass(frozen=True)
class _Piece:
    """Blocks `first .. stop` of a request's past, for its tokens `start .. end`."""

    request: int
    start: int
    end: int
    first: int
    stop: int

    def spans(self, window: int) -> Iterator[_Span]:
        """All tokens, early and late ones of each block apart."""
        for block in range(self.start // VQ_BLOCK_SIZE, -(-self.end // VQ_BLOCK_SIZE)):
            origin = block * VQ_BLOCK_SIZE
            begin, stop = max(origin, self.start), min(origin + VQ_BLOCK_SIZE, self.end)
            middle = min(max(origin + window, begin), stop)
            if begin < middle:
                yield _Span(middle - begin, self._early(block, middle, window))
            if middle < stop:
                yield _Span(stop - middle, self._late(block, stop))

    def _early(self, block: int, end: int, window: int) -> dict[str, _View]:
        """What queries before `end` see: the codes that the last one sees end in the block before theirs."""
        views = {}
        if block - 1 >= self.stop:
            views["full"] = self._past(self.stop, self.stop * VQ_BLOCK_SIZE)
        elif block - 1 >= self.first:
            views["causal"] = self._past(block, end - window)
        if self.first <= block < self.stop:
            before = max(block - 1, 0)
            pages = tuple(Page(self.request, index, True) for index in range(before, block + 1))
            views["recent"] = _View(pages, end - before * VQ_BLOCK_SIZE)
        return views

    def _late(self, block: int, end: int) -> dict[str, _View]:
        if block >= self.stop:
            return {"full": self._past(self.stop, self.stop * VQ_BLOCK_SIZE)}
        if block >= self.first:
            return {"causal": self._past(block, end, Page(self.request, block, True))}
        return {}

    def _past(self, stop: int, end: int, *more: Page) -> _View:
        """Codes of the blocks before `stop`, and a page behind them: keys up to position `end`."""
        pages = tuple(Page(self.request, block, False) for block in range(self.first, stop))
        return _View((*pages, *more), end - self.first * VQ_BLOCK_SIZE)


class _Round:
    """One that is being put together.

    has_later_piece: of a past whose first piece was in a round before.
    """

    def __init__(self, first_row: int, has_later_piece: bool) -> None:
        self.has_later_piece = has_later_piece
        self._first_row, self._num_rows = first_row, 0
        self._pages: dict[Page, int] = {}
        self._runs: dict[str, list[Run]] = {"causal": [], "full": [], "recent": []}

    @property
    def num_pages(self) -> int:
        """Pages so far."""
        return len(self._pages)

    def add(self, row: int, spans: list[_Span]) -> None:
        """Take a request's queries, which begin at `row`."""
        between = row - self._first_row - self._num_rows
        for span in [*([_Span(between, {})] if between else []), *spans]:
            for call, runs in self._runs.items():
                view = span.views.get(call, _View((), 0))
                pages = tuple(self._pages.setdefault(page, len(self._pages)) for page in view.pages)
                runs.append(Run(span.num_rows, pages, view.num_keys))
            self._num_rows += span.num_rows

    def finished(self, window: int) -> Round:
        """Without calls in which nobody sees anything."""
        calls = tuple(
            Call(tuple(runs), causal=name != "full", window=window if name == "recent" else None)
            for name, runs in self._runs.items()
            if any(run.num_keys for run in runs)
        )
        return Round(self._first_row, self._num_rows, not self.has_later_piece, tuple(self._pages), calls)
