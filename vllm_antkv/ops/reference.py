"""The operations in plain PyTorch: the specification that every kernel is tested against.

Obvious rather than fast. All functions compute in the dtype they are given: float32 when serving, float64 as the
reference in tests. They know nothing of pages, requests or vLLM. `S` below counts segments: runs of consecutive queries
of one request that lie in one VQ block.
"""

from typing import NamedTuple

import torch

from vllm_antkv.ops.logits import LogitRules
from vllm_antkv.ops.rope import RotaryTable
from vllm_antkv.presets import Preset

#: Largest e4m3 number.
E4M3_MAX = 448.0
#: Rows encoded at a time, which bounds the distance matrix to a few hundred MB at 4096 centroids.
_ENCODE_CHUNK = 512


def encode(rows: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Index of the nearest centroid of every sub-vector; equal distances take the lower index.

    Args:
        rows: (num_tokens, num_kv_heads, head_size).
        centroids: (num_kv_heads, num_sub_vectors, num_centroids, sub_vector_size), same dtype.

    Returns:
        (num_tokens, num_kv_heads, num_sub_vectors) int64.
    """
    num_kv_heads, num_sub_vectors, _, size = centroids.shape
    half_norms = centroids.square().sum(-1) / 2
    codes = []
    for chunk in rows.split(_ENCODE_CHUNK):
        sub_vectors = chunk.view(-1, num_kv_heads, num_sub_vectors, size)
        # argmin |x - c|^2 = argmin |c|^2 / 2 - x.c
        codes.append((half_norms - torch.einsum("nhsd,hscd->nhsc", sub_vectors, centroids)).argmin(-1))
    return torch.cat(codes)


def decode(codes: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """The rows that codes stand for.

    Args:
        codes: (..., num_kv_heads, num_sub_vectors) integer.
        centroids: (num_kv_heads, num_sub_vectors, num_centroids, sub_vector_size).

    Returns:
        (..., num_kv_heads, head_size) in the dtype of `centroids`.
    """
    num_kv_heads, num_sub_vectors, num_centroids, _ = centroids.shape
    first = torch.arange(num_kv_heads * num_sub_vectors, device=codes.device) * num_centroids
    rows = codes.long() + first.view(num_kv_heads, num_sub_vectors)
    return torch.nn.functional.embedding(rows, centroids.flatten(0, 2)).flatten(-2)


def pack_codes(codes: torch.Tensor, preset: Preset) -> torch.Tensor:
    """Codes to bytes: (..., num_sub_vectors) integer -> (..., code_bytes) uint8.

    12-bit codes are little-endian within a row: two codes `a`, `b` become a[0:8], a[8:12] | b[0:4] << 4, b[4:12].
    """
    if preset.code_bits == 8:
        return codes.to(torch.uint8)
    odd = codes.shape[-1] % 2
    padded = torch.nn.functional.pad(codes.int(), (0, odd))
    first, second = padded[..., 0::2], padded[..., 1::2]
    packed = torch.stack((first & 0xFF, (first >> 8) | ((second & 0xF) << 4), second >> 4), dim=-1).flatten(-2)
    return packed[..., : packed.shape[-1] - odd].to(torch.uint8)


def unpack_codes(packed: torch.Tensor, preset: Preset, num_sub_vectors: int) -> torch.Tensor:
    """Inverse of `pack_codes`: (..., code_bytes) uint8 -> (..., num_sub_vectors) int32."""
    if preset.code_bits == 8:
        return packed.int()
    padded = torch.nn.functional.pad(packed.int(), (0, -packed.shape[-1] % 3))
    low, middle, high = padded[..., 0::3], padded[..., 1::3], padded[..., 2::3]
    codes = torch.stack((low | ((middle & 0xF) << 8), (middle >> 4) | (high << 4)), dim=-1).flatten(-2)
    return codes[..., :num_sub_vectors]


class SeenRows(NamedTuple):
    """Rows, and who sees them.

    key, value: (S, T, num_kv_heads, head_size).
    mask: (S, num_queries, T) bool, True where a query sees the row.
    """

    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor


def mixed_attention(
    query: torch.Tensor, coded: SeenRows, exact: SeenRows, rules: LogitRules, bias: torch.Tensor | float = 0.0
) -> torch.Tensor:
    """One softmax over two kinds of rows: those decoded from codes (anchors corrected) and those kept exactly.

    Args:
        query: (S, num_queries, num_heads, head_size).
        coded, exact: rows of each kind, see `SeenRows`.
        rules: of the layer; the masks say already what its window hides.
        bias: (S, num_heads, num_queries, T) of the coded rows, see `jensen_bias`.

    Returns:
        (S, num_queries, num_heads, head_size).
    """
    logits = torch.cat(
        (
            _logits(query, coded.key, rules, bias).masked_fill(~coded.mask[:, None], -torch.inf),
            _logits(query, exact.key, rules).masked_fill(~exact.mask[:, None], -torch.inf),
        ),
        dim=-1,
    )
    lse = rules.lse(logits)
    # A padded query sees nothing: its LSE is -inf and its row of A is 0, not NaN.
    probs = torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0)[..., None])
    split = coded.key.shape[1]
    return _weighted_sum(probs[..., :split], coded.value) + _weighted_sum(probs[..., split:], exact.value)


def jensen_weights(errors: torch.Tensor, num_heads: int, scale: float, rotary: RotaryTable | None) -> torch.Tensor:
    """The table of `jensen_bias`, from what codes lose.

    A code stands for all keys near its centroid c. With an error e that is 0 on average, E exp(scale q.(c + e)) is
    about exp(scale q.c + scale^2 / 2 * sum of q_c^2 E[e_c^2]): the exponential of a mean is less than the mean of
    exponentials (Jensen), so that without this term coded keys get too little attention beside exact ones.

    Args:
        errors: (num_kv_heads, head_size) float32, mean squared error of each channel of coded K before RoPE, in the
            model's order. The two channels of a rotary pair have the same, so that no rotation changes it.
        num_heads: query heads.
        scale: of the logits.
        rotary: of the layer, whose magnitude K after RoPE has; None without.

    Returns:
        (num_heads, head_size) float32.
    """
    weights = errors * (scale * scale / 2)
    if rotary is not None and rotary.rotary_dim:
        weights[:, : rotary.rotary_dim] *= float(rotary.cos[0, 0]) ** 2 + float(rotary.sin[0, 0]) ** 2
    return weights.repeat_interleave(num_heads // len(weights), 0)


def jensen_bias(query: torch.Tensor, weights: torch.Tensor, is_code: torch.Tensor) -> torch.Tensor:
    """What is added to the scaled products of queries and coded keys: sum over channels of q_c^2 w_c.

    Args:
        query: (S, num_queries, num_heads, head_size), after RoPE.
        weights: (num_heads, head_size), see `jensen_weights`.
        is_code: (S, T, num_kv_heads) bool, False for anchors, whose keys are (nearly) exact.

    Returns:
        (S, num_heads, num_queries, T).
    """
    bias = torch.einsum("sqhd,hd->shq", query.square(), weights)
    group = query.shape[2] // is_code.shape[2]
    return bias[..., None] * is_code.transpose(1, 2).repeat_interleave(group, 1)[:, :, None]


def causal_lse(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor, rules: LogitRules) -> torch.Tensor:
    """Log-sum-exp of the logits of these keys alone: with it, Anchor Scores need nothing but the rows of a block.

    Args:
        query: (S, num_queries, num_heads, head_size).
        key: (S, E, num_kv_heads, head_size).
        mask: (S, num_queries, E) bool, True where the query sees the key.
        rules: of the layer; its sinks take part.

    Returns:
        (S, num_queries, num_heads).
    """
    return rules.lse(_logits(query, key, rules).masked_fill(~mask[:, None], -torch.inf)).transpose(1, 2)


def anchor_votes(
    query: torch.Tensor, key: torch.Tensor, lse: torch.Tensor, rules: LogitRules
) -> tuple[torch.Tensor, torch.Tensor]:
    """How far a unit error of a key or a value moves the output of each query (the terms of AnTKV's equation 5).

        vote on K_j: A_ij (1 - A_ij) ||Q_i||,    vote on V_j: A_ij

    A is rebuilt from the exact keys and the log-sum-exp of the queries' logits: over all they attended to (the
    paper's), or over the keys of their block (`causal_lse`, what the engine does; `docs/design.md` compares the two).

    Args:
        query: (S, num_queries, num_heads, head_size).
        key: (S, E, num_kv_heads, head_size), exact rows.
        lse: (S, num_queries, num_heads), from `causal_lse`.
        rules: of the layer.

    Returns:
        votes on K and on V, each (S, num_heads, num_queries, E); those of queries that do not see the key mean nothing.
    """
    finite_lse = lse.masked_fill(lse == -torch.inf, torch.inf).transpose(1, 2)
    # A row that the query saw only through its code can come out above 1 here.
    probs = torch.exp(_logits(query, key, rules) - finite_lse[..., None]).clamp(max=1.0)
    norms = query.norm(dim=-1).transpose(1, 2)
    return probs * (1 - probs) * norms[..., None], probs


def anchor_score(
    query: torch.Tensor, key: torch.Tensor, lse: torch.Tensor, weight: torch.Tensor, rules: LogitRules, power: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Anchor Score of every key and value: votes summed over the queries and heads of its group.

    Args:
        query, key, lse, rules: as in `anchor_votes`.
        weight: (S, num_queries, E), what query i's vote on key j counts; 0 where it does not see it.
        power: 1 adds votes (AnTKV, equation 5), 2 their squares.

    Returns:
        scores of K and of V, each (S, num_kv_heads, E).
    """
    num_kv_heads = key.shape[2]
    of_key, of_value = (
        (votes**power * weight[:, None]).sum(2).unflatten(1, (num_kv_heads, -1)).sum(2)
        for votes in anchor_votes(query, key, lse, rules)
    )
    return of_key, of_value


def correction(exact_rows: torch.Tensor, coded_rows: torch.Tensor) -> torch.Tensor:
    """What an anchor stores: the error of its code in FP8 (e4m3), rounded to nearest, ties to even, saturating at 448.

    A float64 error is rounded to float32 first: all that kernels know of it, and how PyTorch converts it.

    Not the row itself: e4m3 has three bits of mantissa, which is too few for K channels that are large in every token
    (Qwen2.5 has biases of several hundred). Their codes have them exactly enough. And however the error is rounded, a
    channel with its correction is never further from the truth than without: an anchor cannot be worse than its code.

    Args:
        exact_rows, coded_rows: same shape and floating dtype, K after RoPE.

    Returns:
        the bytes, uint8, same shape.
    """
    error = (exact_rows - coded_rows).clamp(-E4M3_MAX, E4M3_MAX)
    return error.to(torch.float8_e4m3fn).view(torch.uint8)


def corrected(coded_rows: torch.Tensor, corrections: torch.Tensor) -> torch.Tensor:
    """Anchor rows as attention sees them: decoded rows with the `correction` that was stored for them, uint8, added."""
    return coded_rows + corrections.view(torch.float8_e4m3fn).to(coded_rows.dtype)


def _logits(
    query: torch.Tensor, key: torch.Tensor, rules: LogitRules, bias: torch.Tensor | float = 0.0
) -> torch.Tensor:
    """(S, num_heads, num_queries, T)."""
    grouped = query.unflatten(2, (key.shape[2], -1))
    return rules.logits(torch.einsum("sqhgd,sthd->shgqt", grouped, key).flatten(1, 2), bias)


def _weighted_sum(probs: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """(S, num_queries, num_heads, head_size)."""
    grouped = probs.unflatten(1, (value.shape[2], -1))
    return torch.einsum("shgqt,sthd->sqhgd", grouped, value).flatten(2, 3)
