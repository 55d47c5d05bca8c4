"""How long attention of a prompt takes on a GPU beside FlashAttention 3, counted from the calls that are planned.

FlashAttention works on tiles of 128 rows (heads of a group side by side) by 128 keys, and hands tiles of rows to
multiprocessors one by one. Here the tiles of our calls and of its own are handed out in the same way, and what is read
and written beside them is added. **Counted, not measured**: the time of a tile is FlashAttention's at its usual rate.

    python -m research.prefill_count [--tokens 1024 8192 32768] [--group 4]
"""

import argparse
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.gpu.llama import HEAD_SIZE, NUM_HEADS
from research.sm_model.times import GPUS, Gpu
from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.ops.varlen import PREFILL_CHUNK_BLOCKS
from vllm_antkv.ops.varlen_plan import Limits, Round, plan

#: Rows and keys of a tile, and FlashAttention 3's rate on them in FLOP/s: about what its authors report for causal
#: attention of long sequences at head size 128 on an H100.
TILE, FLOPS = 128, 6e14
#: What a tile of rows costs beside its keys, in tiles of keys: its queries come, its output goes.
_TILE_OVERHEAD = 1
#: Share of the memory's bandwidth that rows are read and written at.
_BANDWIDTH_SHARE = 0.8
#: A launch of a small kernel, in seconds: what a step of a few tokens is bound by.
_LAUNCH = 4e-6
#: Warp instructions that write 64 rows of K and of V of a past page: all that the code of `dequantised_pages` had
#: for sm_90 at 1 bit with an order of channels when it wrote 64 rows at a time, by four warps. A multiprocessor issues
#: two a cycle, as it does of decode.
_PAGE_INSTRUCTIONS, _ISSUED_A_CYCLE = 4 * 3_896, 2.0
_ELEMENT_BYTES = 2


@dataclass(frozen=True)
class Count:
    """Seconds of one layer.

    flash: FlashAttention 3 on rows. tiles, tiles_in_order: its kernel in our calls, tiles with most keys first or as
    the runs come. pages: plain rows written. merging: outputs merged.
    """

    flash: float
    tiles: float
    tiles_in_order: float
    pages: float
    merging: float

    @property
    def ratio(self) -> float:
        """Ours over FlashAttention's."""
        return (self.tiles + self.pages + self.merging) / self.flash

    @property
    def ratio_in_order(self) -> float:
        """Ours over FlashAttention's, if it does not begin with the longest."""
        return (self.tiles_in_order + self.pages + self.merging) / self.flash


def count(num_tokens: int, group: int, gpu: Gpu) -> Count:
    """Of a whole prompt."""
    num_kv_heads = NUM_HEADS // group
    window = AntKVConfig().recency_policy.window
    rounds = plan(
        [num_tokens],
        [num_tokens],
        Limits(window, PREFILL_CHUNK_BLOCKS, PREFILL_CHUNK_BLOCKS + num_tokens // VQ_BLOCK_SIZE + 3),
    )
    calls = [_tiles(current, index, group) for current in rounds for index in range(len(current.calls))]
    seconds = 4 * TILE * TILE * HEAD_SIZE * gpu.multiprocessors / FLOPS
    # FlashAttention 3 takes the heads of a prompt one by one.
    flash = [-(-min(last, num_tokens) // TILE) for last in range(TILE, num_tokens + TILE, TILE)] * NUM_HEADS
    ours = [tiles * num_kv_heads for tiles in calls]
    bandwidth = gpu.bandwidth * _BANDWIDTH_SHARE
    row = HEAD_SIZE * _ELEMENT_BYTES
    pages = [page for current in rounds for page in current.pages]
    written = 2 * len(pages) * VQ_BLOCK_SIZE * num_kv_heads * row
    read = 2 * sum(page.exact for page in pages) * VQ_BLOCK_SIZE * num_kv_heads * row
    instructions = sum(not page.exact for page in pages) * VQ_BLOCK_SIZE // 64 * num_kv_heads * _PAGE_INSTRUCTIONS
    merged = sum(run.num_rows for current in rounds for call in current.calls[1:] for run in call.runs if run.num_keys)
    idle = sum(run.num_rows for r in rounds for call in r.calls[1:] for run in call.runs if not run.num_keys)
    return Count(
        flash=_makespan(sorted(flash, reverse=True), gpu) * seconds,
        tiles=sum(_makespan(sorted(tiles, reverse=True), gpu) for tiles in ours) * seconds,
        tiles_in_order=sum(_makespan(tiles, gpu) for tiles in ours) * seconds,
        pages=(written + read) / bandwidth
        + instructions / _ISSUED_A_CYCLE / gpu.multiprocessors / gpu.clock
        + len(rounds) * _LAUNCH,
        # Rows that see nothing in a call have their zeros written.
        merging=(4 * merged + idle) * NUM_HEADS * row / bandwidth + (len(calls) - 1) * 2 * _LAUNCH,
    )


def _tiles(current: Round, index: int, group: int) -> list[int]:
    """Tiles of keys of every tile of rows of one KV head, in the order of the runs."""
    found: list[int] = []
    call = current.calls[index]
    for run in call.runs:
        for first in range(0, run.num_rows * group, TILE):
            rows = (first // group, min((first + TILE - 1) // group, run.num_rows - 1))
            found.append(_visible(run.num_keys - run.num_rows, run.num_keys, rows, call.causal, call.window))
    return found


def _visible(before: int, num_keys: int, rows: tuple[int, int], causal: bool, window: int | None) -> int:
    """Tiles of keys that some of the rows sees; `before` keys come before what the first row may not see."""
    last = before + rows[1] + 1 if causal else num_keys
    first = 0 if window is None else max(before + rows[0] + 1 - window, 0)
    return max(-(-last // TILE) - first // TILE, 0) if num_keys else 0


def _makespan(tiles: Sequence[int], gpu: Gpu) -> int:
    """When the last multiprocessor is done, each taking the next tile of rows: in tiles of keys."""
    free = [0] * gpu.multiprocessors
    for keys in tiles:
        heapq.heapreplace(free, free[0] + (keys + _TILE_OVERHEAD if keys else 0))
    return max(free)


def rows(lengths: Sequence[int], group: int) -> Iterator[str]:
    """The table's, for an H100."""
    yield "prompt  FA3 ms  tiles  in order  pages  merging  over FA3  in order"
    for num_tokens in lengths:
        found = count(num_tokens, group, GPUS["H100"])
        parts = (found.flash, found.tiles, found.tiles_in_order, found.pages, found.merging)
        cells = "  ".join(f"{part * 1e3:6.3f}" for part in parts)
        yield f"{num_tokens:6}  {cells}  {found.ratio:8.2f}  {found.ratio_in_order:8.2f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 8192, 16384, 32768])
    parser.add_argument("--group", type=int, default=4, help="query heads per KV head")
    arguments = parser.parse_args()
    print("\n".join(rows(arguments.tokens, arguments.group)))


if __name__ == "__main__":
    main()
