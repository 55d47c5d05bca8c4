"""What the kernels are given, in named tuples, which Triton takes apart. Knows nothing of vLLM.

Everything that depends on the batch is a tensor, so that a launch can be replayed from a CUDA graph.
"""

from typing import NamedTuple

import torch
import triton.language as tl


class Layer(NamedTuple):
    """A layer's pages, of which all but the block and head dimensions are contiguous, and contiguous tables.

    k_codes, v_codes: (num_blocks, num_kv_heads, block_size, code_bytes) uint8.
    k_anchors, v_anchors: (num_blocks, num_kv_heads, anchor_rows, anchor_bytes) uint8, corrections in e4m3.
    k_exact, v_exact: (num_blocks, num_kv_heads, anchor_rows // 2, head_size) model dtype: the same, two rows being one.
    anchor_offsets: (num_blocks, num_kv_heads, 2, anchor_rows) int16, K then V, negative where unused.
    recent_k, recent_v: (num_blocks, num_kv_heads, page_size, head_size) model dtype, K after RoPE.
    scores: (num_blocks, num_kv_heads, score_slots * 2, page_size) float32.
    positions: (num_blocks, block_size, 3) int32, those of the tokens of VQ pages; not read where tokens have one.
    missing_rows: (max_num_reqs,) int32, see `ops.counters.Counters`.
    vq_*_stride: of the first seven; recency_*_stride: of the next three. In units of 16 bytes, so that the compiler
        knows that rows are aligned and reads 16 bytes at a time. position_stride: from block to block, in entries.

    k_centroids, v_centroids: (num_kv_heads, num_sub_vectors, num_centroids, sub_vector_size) float16.
    k_half_norms, v_half_norms: (num_kv_heads, num_sub_vectors, num_centroids) float32, half their squared norms.
    k_order: (head_size,) int32, the channel of K that stands at each place of decoded rows; not read where they are the
        same. Rows in full precision have their channels as the model has them.
    cos, sin: (max_position, rotary_half) float32; not read without RoPE.
    sections: (rotary_half,) int32, which of three positions each pair rotates by; not read where tokens have one.
    last_query: (max_model_len,) int32, the last query position that sees each token exactly.
    sinks: (num_heads,) float32, learned logits that take part in every softmax; not read where there are none.
    jensen_weights: (num_heads, head_size) float32, see `ops.reference.jensen_bias`; not read where all are 0.
    """

    k_codes: torch.Tensor
    v_codes: torch.Tensor
    k_anchors: torch.Tensor
    v_anchors: torch.Tensor
    k_exact: torch.Tensor
    v_exact: torch.Tensor
    anchor_offsets: torch.Tensor
    recent_k: torch.Tensor
    recent_v: torch.Tensor
    scores: torch.Tensor
    positions: torch.Tensor
    missing_rows: torch.Tensor
    vq_block_stride: int
    vq_head_stride: int
    recency_block_stride: int
    recency_head_stride: int
    position_stride: int

    k_centroids: torch.Tensor
    v_centroids: torch.Tensor
    k_half_norms: torch.Tensor
    v_half_norms: torch.Tensor
    k_order: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    sections: torch.Tensor
    last_query: torch.Tensor
    sinks: torch.Tensor
    jensen_weights: torch.Tensor


class Batch(NamedTuple):
    """The requests of a step.

    query_start_loc: (num_reqs + 1,) int32, prefix sums of the requests' numbers of new tokens.
    seq_lens: (num_reqs,) int32, new tokens included.
    vq_table, recency_table: (num_reqs, ...) int32 block tables, rows contiguous. Recency block 0 is the null block.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    vq_table: torch.Tensor
    vq_table_stride: int
    recency_table: torch.Tensor
    recency_table_stride: int


class Rows(NamedTuple):
    """The rows of a step; strides between tokens, in elements. The heads of a token are contiguous.

    query: (num_tokens, num_heads, head_size) model dtype.
    key, value: (num_tokens, num_kv_heads, head_size) model dtype, K after RoPE.
    """

    query: torch.Tensor
    query_stride: int
    key: torch.Tensor
    key_stride: int
    value: torch.Tensor
    value_stride: int


class PlainRows(NamedTuple):
    """Rows for a kernel that knows nothing else; contiguous, model dtype.

    key, value: (at least num_pages, block_size, num_kv_heads, channels), K after RoPE, channels as the model has them;
        see `ops.varlen.BIAS_CHANNELS` for those beyond a head's.
    queries: (at least num_tokens, num_heads, channels of K); not written where those are a head's.
    """

    key: torch.Tensor
    value: torch.Tensor
    queries: torch.Tensor


class Request(NamedTuple):
    """What a program computes for: a request and a KV head; scalars inside kernels.

    index: of the request in the batch.
    start: position of its first new token, which is row `first_row` of `rows`.
    head: of K and V.
    rows, batch: of the step.
    """

    index: tl.tensor
    start: tl.tensor
    first_row: tl.tensor
    head: tl.tensor
    rows: Rows
    batch: Batch


class Block(NamedTuple):
    """A VQ block of a request, for a KV head; inside kernels. Of several blocks: (N,) each.

    origin: position of its first token.
    id: int64, of its page.
    """

    origin: tl.tensor
    id: tl.tensor
    head: tl.tensor


class Queries(NamedTuple):
    """A tile of queries of one KV head, all heads of its group side by side; inside kernels.

    at: (M,) pointers to the queries.
    first, second: (M, half_pad) model dtype, their halves in the order of decoded rows.
    positions: (M,) int32, negative for rows of padding.
    earliest, latest: int32, smallest and largest position of the others, in one VQ block.
    scale: float32, multiplies products with keys; that is a logit.
    bias: (M,) float32, added to logits of codes that are no anchors, times log2(e).
    """

    at: tl.tensor
    first: tl.tensor
    second: tl.tensor
    positions: tl.tensor
    earliest: tl.tensor
    latest: tl.tensor
    scale: tl.tensor
    bias: tl.tensor


class Softmax(NamedTuple):
    """An online softmax so far, of M rows of queries; float32, inside kernels.

    maximum: (M,) of the logits, times log2(e). total: (M,) denominator. weighted: (M, head_pad) weighted sum of V.
    """

    maximum: tl.tensor
    total: tl.tensor
    weighted: tl.tensor


class ExactRows(NamedTuple):
    """Where the full-precision rows of some tokens are; inside kernels.

    stored_at, new_at: (N,) pointers into the pages and into the step's rows.
    stored, new: (N,) bool, which of the two holds; neither for a row that must not be read.
    """

    stored_at: tl.tensor
    new_at: tl.tensor
    stored: tl.tensor
    new: tl.tensor


class Shape(NamedTuple):
    """What is compiled in. Padded sizes are powers of two, as Triton's tiles must be.

    half_pad, head_pad: padded `head_size / 2` and `head_size`, large enough for a matrix product.
    group, group_pad: query heads per KV head.
    queries_pad: padded number of new tokens of a request that `decode` takes.
    sub_pad: padded number of sub-vectors.
    code_bytes: of one row.
    ordered: decoded K rows have their channels in another order than rows in full precision.
    rotary_half: rotary pairs; 0 without RoPE.
    is_neox: channel `c` rotates with `c + rotary_half`, else with its neighbour.
    aligned: the halves of a head are whole sub-vectors.
    composes: the table rotates by `a + b` where it rotates by `a` and then by `b`, and K by its place in the sequence.
    three_part: K of a token rotates by three positions.
    anchor_rows, anchor_bytes: per block, K and V each; of a row.
    corrections: some anchors are kept as what their codes lose.
    exact_anchor: added to the offset of an anchor that is kept as it is; 0 where none is.
    page_size, score_slots: tokens per recency page, and its Anchor Scores of each (`cache.pages`).
    reads_cache: every query of a prompt sees exactly what a decode step would; else what the step's first one does,
        and so the tokens of the step.
    exact_prefix, exact_reach: a query sees tokens of closed blocks exactly only if they are among the first
        `exact_prefix` of the sequence, or at most `exact_reach` before it.
    window: tokens that a query sees, itself included; 0 for all before it.
    soft_cap: logits become soft_cap * tanh(logit / soft_cap); 0 where they stay.
    has_sinks: of learned logits.
    has_jensen: logits of coded keys are corrected (`Layer.jensen_weights`).
    dequantised_key_size, dequantised_value_size: channels of a row of plain pages.
    """

    head_size: int
    half_pad: int
    head_pad: int
    num_kv_heads: int
    group: int
    group_pad: int
    queries_pad: int
    sub_vector_size: int
    num_sub_vectors: int
    sub_pad: int
    num_centroids: int
    code_bits: int
    code_bytes: int
    ordered: bool
    rotary_half: int
    is_neox: bool
    aligned: bool
    composes: bool
    three_part: bool
    anchor_rows: int
    anchor_pad: int
    anchor_bytes: int
    corrections: bool
    exact_anchor: int
    page_size: int
    score_slots: int
    block_size: int
    reads_cache: bool
    exact_prefix: int
    exact_reach: int
    window: int
    soft_cap: float
    has_sinks: bool
    has_jensen: bool
    dequantised_key_size: int
    dequantised_value_size: int


class Policy(NamedTuple):
    """How rows compete; compiled in.

    anchors: rows are chosen by score; else only sinks are.
    exact: all anchors are kept as they are; else sinks are.
    vote_prior: votes that every row is credited with, beside its own.
    """

    anchors: bool
    exact: bool
    vote_prior: int
