"""What the kernels share: how they read rows and positions.

"Halves" below are the first and the second channels of all rotary pairs, in two tiles: a rotation is then element-wise,
and a logit is the sum of two products.
"""

import triton
import triton.language as tl

from .arguments import Block, ExactRows, Layer, Request

#: log2(e): the kernels compute powers of two, which the hardware has.
LOG2E = tl.constexpr(1.4426950408889634)
#: Larger than any position.
ALWAYS = tl.constexpr(2**31 - 1)


@triton.jit
def find_request(query_start_loc: tl.tensor, num_reqs: tl.tensor, index: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """The request that a tile of `TILE` positions belongs to, or (TILE = 1) the request of each of several tokens.

    Tiles start at multiples of TILE in a sequence, so n tokens touch at most n // TILE + 2 of them; every request has
    that many indices, counted from `first_tile`. The branchless search suits scalars and vectors alike.
    """
    low = index * 0
    size = num_reqs
    while size > 1:
        half = size // 2
        low = tl.where(first_tile(query_start_loc, low + half, TILE) <= index, low + half, low)
        size -= half
    return low


@triton.jit
def first_tile(query_start_loc: tl.tensor, request: tl.tensor, TILE: tl.constexpr) -> tl.tensor:
    """Index of the first tile of a request: see `find_request`."""
    first = tl.load(query_start_loc + request)
    if TILE == 1:
        return first
    return first // TILE + 2 * request


@triton.jit
def channels_of_pairs(pairs: tl.tensor, shape: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """First and second channels of `pairs` of a head; channels that do not rotate are paired behind those that do."""
    if not shape.is_neox:
        return 2 * pairs, 2 * pairs + 1
    if 2 * shape.rotary_half == shape.head_size:
        return pairs, pairs + shape.rotary_half
    rotating = pairs < shape.rotary_half
    first = tl.where(rotating, pairs, pairs + shape.rotary_half)
    return first, tl.where(rotating, pairs + shape.rotary_half, pairs + shape.head_size // 2)


@triton.jit
def channels_in_rows(places: tl.tensor, layer: Layer, shape: tl.constexpr) -> tl.tensor:
    """Where rows in full precision have the channels of K that stand at `places` of decoded rows."""
    if not shape.ordered:
        return places
    return tl.load(layer.k_order + places, mask=places < shape.head_size, other=0)


@triton.jit
def load_halves(
    pointers: tl.tensor, mask: tl.tensor, layer: Layer, AS_DECODED: tl.constexpr, shape: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Halves (N, half_pad) of the rows that start at `pointers` (N,); 0 where masked.

    AS_DECODED: with the channels where decoded K rows have them; else as they come.
    """
    pairs = tl.arange(0, shape.half_pad)
    first, second = channels_of_pairs(pairs, shape)
    if AS_DECODED:
        first = channels_in_rows(first, layer, shape)
        second = channels_in_rows(second, layer, shape)
    known = pairs < shape.head_size // 2
    return load_rows(pointers, mask, first, known), load_rows(pointers, mask, second, known)


@triton.jit
def load_rows(pointers: tl.tensor, mask: tl.tensor, channels: tl.tensor, channel_mask: tl.tensor) -> tl.tensor:
    """(N, C) channels of the rows that start at `pointers` (N,); 0 where masked."""
    return tl.load(pointers[:, None] + channels[None, :], mask=mask[:, None] & channel_mask[None, :], other=0)


@triton.jit
def from_e4m3(bytes: tl.tensor) -> tl.tensor:
    """The numbers that bytes (uint8) stand for, float32; they are none that is not finite.

    In integers, as Triton casts e4m3 from compute capability 8.9 on only: float16 has the same bits, but for a larger
    bias of the exponent.
    """
    wide = bytes.to(tl.uint16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def to_e4m3(numbers: tl.tensor) -> tl.tensor:
    """The nearest e4m3 numbers to float32 ones as bytes, uint8; ties go to the even one, what is too large to 448."""
    sign = (numbers.to(tl.uint32, bitcast=True) >> 31) << 7
    size = tl.minimum(tl.abs(numbers), 448.0)
    bits = size.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 the numbers are multiples of 2^-9: a sum with 2^14 is rounded to one.
    tiny = (size + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    return (tl.where(size < 0.015625, tiny, normal) | sign).to(tl.uint8)


@triton.jit
def rotate(
    first: tl.tensor,
    second: tl.tensor,
    block: Block,
    offsets: tl.tensor,
    mask: tl.tensor,
    pairs: tl.tensor,
    layer: Layer,
    shape: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Apply RoPE to `pairs` (P,) of rows at `offsets` (N,) of a block.

    first and second are (N, P), the results float32. mask (N,): which rows there are.
    """
    first = first.to(tl.float32)
    second = second.to(tl.float32)
    if shape.rotary_half == 0:
        return first, second
    cos, sin = angles(block, offsets, mask, pairs, layer, shape)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def angles(
    block: Block, offsets: tl.tensor, mask: tl.tensor, pairs: tl.tensor, layer: Layer, shape: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Cosines and sines at `offsets` of a block, (N, P) float32 each; those of channels that do not rotate are 1 and 0.

    Where the table allows, they are made from the angles of the origin and of the offset: the same few rows of the
    table serve every block and stay in L1, where rows by position would cost many times the bytes of the codes.
    """
    rotating = (pairs < shape.rotary_half)[None, :]
    if not shape.composes:
        known = mask[:, None] & rotating
        positions = rope_positions(block.origin + offsets, block.id, pairs, known, layer, shape)
        index = positions * shape.rotary_half + pairs[None, :]
        return tl.load(layer.cos + index, mask=known, other=1.0), tl.load(layer.sin + index, mask=known, other=0.0)
    index = offsets[:, None] * shape.rotary_half + pairs[None, :]
    cos = tl.load(layer.cos + index, mask=rotating, other=1.0)
    sin = tl.load(layer.sin + index, mask=rotating, other=0.0)
    index = block.origin * shape.rotary_half + pairs[None, :]
    origin_cos = tl.load(layer.cos + index, mask=rotating, other=1.0)
    origin_sin = tl.load(layer.sin + index, mask=rotating, other=0.0)
    # Some tables carry a magnitude, which must not count twice.
    magnitude = tl.rsqrt(origin_cos * origin_cos + origin_sin * origin_sin)
    origin_cos *= magnitude
    origin_sin *= magnitude
    return cos * origin_cos - sin * origin_sin, sin * origin_cos + cos * origin_sin


@triton.jit
def rope_positions(
    places: tl.tensor, block_id: tl.tensor, pairs: tl.tensor, known: tl.tensor, layer: Layer, shape: tl.constexpr
) -> tl.tensor:
    """By which position K of tokens is rotated in `pairs` (P,): (N, P), or (N, 1) for all of them. int32.

    places (N,): of the tokens in the sequence; block_id: int64, of their VQ page or (N,) pages; known (N, P): where
    there is a token and a pair that rotates.
    """
    if shape.three_part:
        section = tl.load(layer.sections + pairs, mask=pairs < shape.rotary_half, other=0)
        of_token = layer.positions + (block_id * layer.position_stride + places % shape.block_size * 3)
        positions = tl.load(of_token[:, None] + section[None, :], mask=known, other=0)
    else:
        positions = places[:, None]
    return positions


@triton.jit
def in_vq_page(section: tl.tensor, block_id: tl.tensor, head: tl.tensor, layer: Layer) -> tl.tensor:
    """Pointer into a section of the VQ pages for block ids (int64) and a KV head."""
    per_unit: tl.constexpr = 128 // section.dtype.element_ty.primitive_bitwidth
    return section + (block_id * layer.vq_block_stride + head * layer.vq_head_stride) * per_unit


@triton.jit
def in_recency_page(section: tl.tensor, block_id: tl.tensor, head: tl.tensor, layer: Layer) -> tl.tensor:
    """Pointer into a section of the recency pages for block ids (int64) and a KV head."""
    per_unit: tl.constexpr = 128 // section.dtype.element_ty.primitive_bitwidth
    return section + (block_id * layer.recency_block_stride + head * layer.recency_head_stride) * per_unit


@triton.jit
def vq_blocks(request: Request) -> tl.tensor:
    """Pointer to the ids of a request's VQ blocks."""
    return request.batch.vq_table + request.index * request.batch.vq_table_stride


@triton.jit
def vq_block(request: Request, index: tl.tensor, shape: tl.constexpr) -> Block:
    """Number `index` of a request's VQ blocks."""
    return Block(index * shape.block_size, tl.load(vq_blocks(request) + index).to(tl.int64), request.head)


@triton.jit
def exact_rows(
    kind: tl.constexpr, keys: tl.tensor, mask: tl.tensor, request: Request, layer: Layer, shape: tl.constexpr
) -> ExactRows:
    """The full-precision rows of tokens `keys`: in hand if they are new, else in pages. kind: 0 for K, 1 for V.

    Block tables keep the ids of freed pages, so `mask` must hold only tokens whose row is known to be alive. One whose
    page is the null block is read as zeros: see `mark_missing`.
    """
    rows, batch = request.rows, request.batch
    paged = layer.recent_v if kind else layer.recent_k
    in_hand = rows.value if kind else rows.key
    token_stride = rows.value_stride if kind else rows.key_stride
    stored = mask & (keys < request.start)
    table = batch.recency_table + request.index * batch.recency_table_stride
    page = tl.load(table + keys // shape.page_size, mask=stored, other=0).to(tl.int64)
    stored &= page > 0
    row = (request.first_row + keys - request.start).to(tl.int64)
    return ExactRows(
        in_recency_page(paged, page, request.head, layer) + keys % shape.page_size * shape.head_size,
        in_hand + (row * token_stride + request.head * shape.head_size),
        stored,
        mask & (keys >= request.start),
    )


@triton.jit
def mark_missing(rows: ExactRows, wanted: tl.tensor, request: Request, layer: Layer) -> None:
    """Mark a request some of whose `wanted` (N,) rows have no page; see `ops.counters.Counters`."""
    # All to one place: nothing is done where none is missing.
    mark = layer.missing_rows + request.index + tl.zeros_like(wanted).to(tl.int32)
    tl.store(mark, 1, mask=wanted & ~(rows.stored | rows.new))


@triton.jit
def load_exact(rows: ExactRows, channels: tl.tensor, channel_mask: tl.tensor) -> tl.tensor:
    """(N, C) channels of rows; 0 where they are neither stored nor in hand.

    Two loads of which one is masked: choosing the pointer first would hide its alignment from the compiler.
    """
    stored = load_rows(rows.stored_at, rows.stored, channels, channel_mask)
    return tl.where(rows.stored[:, None], stored, load_rows(rows.new_at, rows.new, channels, channel_mask))


@triton.jit
def capped(logits: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """Logits times log2(e), within the soft cap of the layer if it has one."""
    if shape.soft_cap > 0:
        # tanh x = 1 - 2 / (e^2x + 1); an infinite power gives 1.
        logits = shape.soft_cap * LOG2E * (1 - 2 / (tl.exp2(logits * (2 / shape.soft_cap)) + 1))
    return logits


@triton.jit
def shares(logits: tl.tensor, real: tl.tensor, heads: tl.tensor, layer: Layer, shape: tl.constexpr) -> tl.tensor:
    """Softmax over the columns of (M, N) logits times log2(e), of `real` rows (M,); learned sinks take their part."""
    maximum = tl.max(logits, 1)
    sink = maximum
    if shape.has_sinks:
        sink = tl.load(layer.sinks + heads, mask=real, other=0.0) * LOG2E
        maximum = tl.maximum(maximum, sink)
    raw = tl.exp2(logits - tl.where(real, maximum, 0.0)[:, None])
    total = tl.sum(raw, 1)
    if shape.has_sinks:
        total += tl.exp2(sink - maximum)
    return raw / tl.where(real, total, 1.0)[:, None]
