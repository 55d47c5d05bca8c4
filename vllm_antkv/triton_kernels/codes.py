"""How the kernels read codes, and look up the centroids that they name."""

import triton
import triton.language as tl

from .common import channels_of_pairs


@triton.jit
def load_codes(rows: tl.tensor, sub: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """Codes of sub-vectors `sub` of the rows of bytes that start at `rows`, which broadcast. int32.

    Nothing is masked: any byte of a page is a valid code.
    """
    if shape.code_bits == 8:
        return tl.load(rows + sub).to(tl.int32)
    # Two codes share three bytes: the even one has its low byte first, the odd one its high byte last.
    first_byte = 3 * sub // 2
    low = tl.load(rows + first_byte).to(tl.int32)
    high = tl.load(rows + first_byte + 1).to(tl.int32)
    return tl.where(sub % 2 == 0, low | ((high & 0xF) << 8), (low >> 4) | (high << 4))


@triton.jit
def look_up(codes: tl.tensor, sub: tl.tensor, centroids: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """Centroids that `codes` (N, S) of sub-vectors `sub` (S,) stand for, (N, S * sub_vector_size) float16.

    A centroid is one vector load: the tile is three-dimensional so that the compiler sees its contiguous channels.
    """
    index = (sub[None, :] * shape.num_centroids + codes) * shape.sub_vector_size
    channel = tl.arange(0, shape.sub_vector_size)
    values = tl.load(centroids + index[:, :, None] + channel[None, None, :])
    return tl.reshape(values, (codes.shape[0], sub.shape[0] * shape.sub_vector_size))


@triton.jit
def look_up_channels(codes: tl.tensor, channels: tl.tensor, centroids: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """Channels (N, C) float16 of what `codes` (N, C), one for each, stand for: where they cut through sub-vectors."""
    known = tl.minimum(channels, shape.head_size - 1)
    sub = known // shape.sub_vector_size
    index = (sub[None, :] * shape.num_centroids + codes) * shape.sub_vector_size
    return tl.load(centroids + index + (known % shape.sub_vector_size)[None, :])


@triton.jit
def decode_channels(rows: tl.tensor, centroids: tl.tensor, channels: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """Decoded channels of N rows of bytes at `rows`, (N, C) float16, one by one."""
    return look_up_channels(load_channel_codes(rows, channels, shape), channels, centroids, shape)


@triton.jit
def load_channel_codes(rows: tl.tensor, channels: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """(N, C) int32, the codes of the sub-vectors that channels lie in."""
    sub = tl.minimum(channels, shape.head_size - 1) // shape.sub_vector_size
    return load_codes(rows[:, None], sub[None, :], shape)


@triton.jit
def subs_of_halves(shape: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Sub-vectors of the first and of the second channels of rotary pairs, where halves are whole sub-vectors."""
    subs_per_half: tl.constexpr = shape.num_sub_vectors // 2
    subs_rotating: tl.constexpr = shape.rotary_half // shape.sub_vector_size
    sub = tl.minimum(tl.arange(0, shape.half_pad // shape.sub_vector_size), subs_per_half - 1)
    return tl.where(sub < subs_rotating, sub, sub + subs_rotating), tl.where(
        sub < subs_rotating, sub + subs_rotating, sub + subs_per_half
    )


@triton.jit
def load_key_codes(rows: tl.tensor, shape: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """What `look_up_key_halves` needs of rows of bytes at `rows` (N,)."""
    if shape.aligned:
        first, second = subs_of_halves(shape)
        return load_codes(rows[:, None], first[None, :], shape), load_codes(rows[:, None], second[None, :], shape)
    else:
        first, second = channels_of_pairs(tl.arange(0, shape.half_pad), shape)
        return load_channel_codes(rows, first, shape), load_channel_codes(rows, second, shape)


@triton.jit
def look_up_key_halves(
    first_codes: tl.tensor, second_codes: tl.tensor, centroids: tl.tensor, shape: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Halves of decoded K before RoPE, (N, half_pad) float16 each.

    What lies in the padding is finite; queries are 0 there.
    """
    if shape.aligned:
        first, second = subs_of_halves(shape)
        return look_up(first_codes, first, centroids, shape), look_up(second_codes, second, centroids, shape)
    else:
        first, second = channels_of_pairs(tl.arange(0, shape.half_pad), shape)
        first_half = look_up_channels(first_codes, first, centroids, shape)
        return first_half, look_up_channels(second_codes, second, centroids, shape)


@triton.jit
def subs_of_values(shape: tl.constexpr) -> tl.tensor:
    """(sub_pad,) sub-vectors of V; those of the padding are the last one again."""
    return tl.minimum(tl.arange(0, shape.sub_pad), shape.num_sub_vectors - 1)


@triton.jit
def load_value_codes(rows: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """What `look_up_values` needs of rows of bytes at `rows` (N,)."""
    return load_codes(rows[:, None], subs_of_values(shape)[None, :], shape)


@triton.jit
def look_up_values(codes: tl.tensor, centroids: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """Decoded V, (N, head_pad) float16. What lies in the padding is finite."""
    return look_up(codes, subs_of_values(shape), centroids, shape)


@triton.jit
def head_centroids(centroids: tl.tensor, head: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """Pointer to the centroids of one KV head."""
    return centroids + head * (shape.num_sub_vectors * shape.num_centroids * shape.sub_vector_size)
