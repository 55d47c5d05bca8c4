"""Attention of requests with more new tokens than `decode` takes, to coded and exact rows.

Grid (num_tokens // Q + 2 num_reqs, num_kv_heads), Q queries a tile: see `common.find_request`. The rows of a tile are Q
queries times the heads of the group, so that a decoded row serves all of them.
"""

import torch
import triton
import triton.language as tl

from .arguments import Batch, Layer, Queries, Request, Rows, Shape, Softmax
from .attention import attend_tile, coded_bias, nothing_seen, query_pointers
from .common import LOG2E, find_request, first_tile, load_halves
from .launch import Fixed, autotuned

_CONFIGS = [
    triton.Config({"BLOCK_M": 128, "BLOCK_N": 64}, num_warps=8, num_stages=1),
    triton.Config({"BLOCK_M": 64, "BLOCK_N": 32}, num_warps=4, num_stages=1),
    # For large heads, whose accumulators fill the registers of the others.
    triton.Config({"BLOCK_M": 32, "BLOCK_N": 32}, num_warps=8, num_stages=1),
]


def prefill(rows: Fixed, output: torch.Tensor, layer: Fixed, batch: Fixed, shape: Shape, scale: float) -> None:
    """Attend from the requests that have more than `score_slots` new tokens.

    Args:
        output: (num_tokens, num_heads, head_size) model dtype, heads contiguous; written.
        rows, layer, batch: `Rows`, `Layer` and `Batch`.
        scale: multiplies the logits.
    """
    num_tokens, num_reqs = output.shape[0], batch.argument.seq_lens.shape[0]

    def grid(meta: dict[str, int]) -> tuple[int, int]:
        return num_tokens // _queries(meta["BLOCK_M"], shape) + 2 * num_reqs, shape.num_kv_heads

    given = rows.argument, output, output.stride(0), layer.argument, batch.argument
    _prefill_kernel[grid](*given, num_reqs, scale, shape)


def _queries(block_m: int, shape: Shape) -> int:
    """Queries per tile: a divisor of the VQ block, which no tile straddles."""
    return max(block_m // shape.group_pad, 1)


@autotuned(_CONFIGS, key=["shape"])
@triton.jit(do_not_specialize=["num_reqs"])
def _prefill_kernel(
    rows: Rows,
    output: tl.tensor,
    output_stride: tl.tensor,
    layer: Layer,
    batch: Batch,
    num_reqs: tl.tensor,
    scale: tl.tensor,
    shape: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """One tile of queries of one KV head."""
    TILE: tl.constexpr = BLOCK_M // shape.group_pad if shape.group_pad < BLOCK_M else 1
    # Late tiles see the most keys: they go first, so that the short ones fill the gaps at the end.
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    found = find_request(batch.query_start_loc, num_reqs, index, TILE)
    first_row = tl.load(batch.query_start_loc + found)
    num_new = tl.load(batch.query_start_loc + found + 1) - first_row
    end = tl.load(batch.seq_lens + found)
    start = end - num_new
    tile_begin = (start // TILE + index - first_tile(batch.query_start_loc, found, TILE)) * TILE
    if (num_new <= shape.score_slots) | (tile_begin >= end):
        return

    row = tl.arange(0, TILE * shape.group_pad)
    positions = tile_begin + row // shape.group_pad
    real = (positions >= start) & (positions < end) & (row % shape.group_pad < shape.group)
    tokens = first_row + positions - start
    heads = head * shape.group + row % shape.group_pad
    final_query = tl.minimum(tile_begin + TILE, end) - 1
    at = query_pointers(rows, tokens, heads, shape)
    first, second = load_halves(at, real, layer, True, shape)
    earliest = tl.maximum(tile_begin, start)
    bias = coded_bias(at, heads, real, layer.jensen_weights, shape) * LOG2E
    queries = Queries(at, first, second, tl.where(real, positions, -1), earliest, final_query, scale, bias)
    request = Request(found, start, first_row, head, rows, batch)
    softmax = nothing_seen(row, shape)
    if shape.has_sinks:
        maximum = tl.load(layer.sinks + heads, mask=real, other=float("-inf")) * LOG2E
        softmax = Softmax(maximum, tl.where(real, 1.0, 0.0), softmax.weighted)
    first_key = 0
    if shape.window > 0:
        first_key = tl.maximum(earliest - shape.window + 1, 0) // BLOCK_N * BLOCK_N
    for tile in range(first_key, final_query + 1, BLOCK_N):
        softmax = attend_tile(queries, tile, request, softmax, layer, shape, shape.reads_cache, BLOCK_N)
    channels = tl.arange(0, shape.head_pad)[None, :]
    pointers = output + (tokens.to(tl.int64) * output_stride + heads * shape.head_size)[:, None] + channels
    result = (softmax.weighted / softmax.total[:, None]).to(output.dtype.element_ty)
    tl.store(pointers, result, mask=real[:, None] & (channels < shape.head_size))
