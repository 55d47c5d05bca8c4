import random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig
from vllm_antkv.ops.logits import LogitRules
from vllm_antkv.ops.reference import (
    SeenRows,
    anchor_score,
    causal_lse,
    corrected,
    correction,
    encode,
    jensen_bias,
    jensen_weights,
    mixed_attention,
    pack_codes,
    unpack_codes,
)
from vllm_antkv.ops.rope import RotaryTable
from vllm_antkv.presets import PRESETS
from vllm_antkv.select.anchors import EXACT_ANCHOR, SINK_SCORE, anchor_slots, code_errors, top_rows

presets = st.sampled_from(list(PRESETS.values()))
seeds = st.integers(0, 2**31)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def draw(seed, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=generator(seed), dtype=dtype)


# --- codes ---------------------------------------------------------------------------------------------------------


@given(presets, st.integers(1, 130), st.integers(0, 4), seeds)
def test_unpack_undoes_pack_and_takes_the_bytes_that_the_preset_says(preset, num_sub_vectors, num_rows, seed):
    codes = torch.randint(0, preset.num_centroids, (num_rows, 2, num_sub_vectors), generator=generator(seed))
    packed = pack_codes(codes, preset)
    assert packed.dtype == torch.uint8
    assert packed.shape == (num_rows, 2, preset.code_bytes(num_sub_vectors * preset.sub_vector_size))
    assert torch.equal(unpack_codes(packed, preset, num_sub_vectors), codes.int())


def test_packing_of_12_bit_codes_is_little_endian():
    packed = pack_codes(torch.tensor([[0xABC, 0x123, 0xDEF]]), PRESETS["antkv-0.75bit"])
    assert packed.tolist() == [[0xBC, 0x3A, 0x12, 0xEF, 0x0D]]


@given(st.integers(1, 3), st.integers(1, 4), st.sampled_from([1, 2, 8]), st.integers(2, 20), seeds)
def test_encode_picks_the_nearest_centroid(heads, num_sub_vectors, size, num_centroids, seed):
    rows = draw(seed, 5, heads, num_sub_vectors * size)
    centroids = draw(seed + 1, heads, num_sub_vectors, num_centroids, size)
    codes = encode(rows, centroids)
    distances = (rows.unflatten(-1, (num_sub_vectors, 1, size)) - centroids).square().sum(-1)
    assert codes.shape == (5, heads, num_sub_vectors)
    torch.testing.assert_close(distances.gather(-1, codes[..., None])[..., 0], distances.amin(-1))


@given(seeds)
def test_equal_centroids_take_the_lower_code(seed):
    few = draw(seed, 2, 3, 4, 8)
    rows = draw(seed + 1, 600, 2, 24)
    assert torch.equal(encode(rows, few.repeat(1, 1, 3, 1)), encode(rows, few))


@given(seeds, st.integers(1, 1100))
def test_a_row_is_encoded_the_same_alone_and_in_company(seed, num_tokens):
    rows = draw(seed, num_tokens, 2, 16, dtype=torch.float32)
    centroids = draw(seed + 1, 2, 4, 32, 4, dtype=torch.float32)
    together = encode(rows, centroids)
    for index in {0, num_tokens // 2, num_tokens - 1}:
        assert torch.equal(encode(rows[index : index + 1], centroids)[0], together[index])


# --- attention -----------------------------------------------------------------------------------------------------

SEGMENTS, QUERIES, HEADS, KV_HEADS, HEAD_SIZE, CODED, EXACT = 2, 5, 6, 2, 16, 7, 9
SCALE = HEAD_SIZE**-0.5
RULES = LogitRules(SCALE)


def draw_attention(seed):
    query = draw(seed, SEGMENTS, QUERIES, HEADS, HEAD_SIZE)
    coded = [draw(seed + i, SEGMENTS, CODED, KV_HEADS, HEAD_SIZE) for i in (1, 2)]
    exact = [draw(seed + i, SEGMENTS, EXACT, KV_HEADS, HEAD_SIZE) for i in (3, 4)]
    coded_mask = torch.rand(SEGMENTS, QUERIES, CODED, generator=generator(seed)) < 0.6
    exact_mask = torch.rand(SEGMENTS, QUERIES, EXACT, generator=generator(seed + 1)) < 0.6
    exact_mask[..., 0] = True
    return query, coded, coded_mask, exact, exact_mask


def naive_attention(query, key, value, mask):
    """Softmax attention and its matrix, one query and one head at a time. Grouped heads share a KV head in order."""
    output, probs = torch.zeros_like(query), torch.zeros(SEGMENTS, HEADS, QUERIES, key.shape[1], dtype=query.dtype)
    for s in range(SEGMENTS):
        for h in range(HEADS):
            kv_head = h // (HEADS // KV_HEADS)
            for q in range(QUERIES):
                logits = key[s, :, kv_head] @ query[s, q, h] * SCALE
                probs[s, h, q] = torch.softmax(logits.masked_fill(~mask[s, q], -torch.inf), 0)
                output[s, q, h] = probs[s, h, q] @ value[s, :, kv_head]
    return output, probs


@given(seeds)
def test_mixed_attention_is_softmax_attention_over_both_kinds_of_rows(seed):
    query, coded, coded_mask, exact, exact_mask = draw_attention(seed)
    output = mixed_attention(query, SeenRows(*coded, coded_mask), SeenRows(*exact, exact_mask), RULES)
    key, value = torch.cat((coded[0], exact[0]), 1), torch.cat((coded[1], exact[1]), 1)
    expected, _ = naive_attention(query, key, value, torch.cat((coded_mask, exact_mask), -1))
    torch.testing.assert_close(output, expected)


def test_a_query_that_sees_nothing_gives_zeros_not_nan():
    query, coded, coded_mask, exact, exact_mask = draw_attention(0)
    coded_mask[0, 2], exact_mask[0, 2] = False, False
    output = mixed_attention(query, SeenRows(*coded, coded_mask), SeenRows(*exact, exact_mask), RULES)
    lse = causal_lse(query, exact[0], exact_mask, RULES)
    assert (output[0, 2] == 0).all()
    assert (lse[0, 2] == -torch.inf).all()
    assert output.isfinite().all()
    score = anchor_score(query, exact[0], lse, torch.ones_like(exact_mask), RULES, 1)
    assert all(part.isfinite().all() for part in score)


@given(seeds, st.sampled_from([None, 20.0]))
def test_correcting_logits_brings_attention_to_codes_near_that_to_the_keys_they_stand_for(seed, soft_cap):
    """Keys drawn around centroids: the log-sum-exp of what stands for them is nearer to theirs."""
    rules, (num_kv_heads, size, num_keys) = LogitRules(0.3, soft_cap=soft_cap), (2, 8, 4000)
    errors = torch.rand(num_kv_heads, size // 2, generator=generator(seed), dtype=torch.float64).repeat(1, 2)
    coded = draw(seed, 1, num_keys, num_kv_heads, size)
    key = coded + draw(seed + 1, *coded.shape) * errors.sqrt()
    query = draw(seed + 2, 1, 3, 2 * num_kv_heads, size)
    weights = jensen_weights(errors, 4, rules.scale, None)
    is_code = torch.ones(coded.shape[:3], dtype=torch.bool)
    bias = jensen_bias(query, weights, is_code)
    products = torch.einsum("sqhgd,sthd->shgqt", query.unflatten(2, (num_kv_heads, -1)), coded).flatten(1, 2)
    true = causal_lse(query, key, torch.ones(1, 3, num_keys, dtype=torch.bool), rules).transpose(1, 2)
    plain, corrected_ = (rules.logits(products, by).logsumexp(-1) for by in (0.0, bias))
    assert (corrected_ - true).abs().mean() < 0.3 * (plain - true).abs().mean()


def test_the_correction_leaves_anchors_and_zero_weights_alone():
    query, coded, mask, exact, exact_mask = draw_attention(0)
    rows = SeenRows(*coded, mask), SeenRows(*exact, exact_mask)
    plain = mixed_attention(query, *rows, RULES)
    is_code = torch.zeros(SEGMENTS, CODED, KV_HEADS, dtype=torch.bool)
    anchors = jensen_bias(query, torch.ones(HEADS, HEAD_SIZE, dtype=torch.float64), is_code)
    nothing = jensen_bias(query, torch.zeros(HEADS, HEAD_SIZE, dtype=torch.float64), ~is_code)
    assert torch.equal(mixed_attention(query, *rows, RULES, anchors), plain)
    assert torch.equal(mixed_attention(query, *rows, RULES, nothing), plain)


def test_the_correction_is_half_the_variance_of_a_logit_whatever_the_position():
    """In each head by the errors of its KV head; a rotary table's magnitude is that of rotated errors, too."""
    table = RotaryTable(1.5 * torch.ones(1, 2), torch.zeros(1, 2))
    errors = torch.tensor([[1.0, 2.0, 1.0, 2.0, 3.0], [5.0, 5.0, 5.0, 5.0, 5.0]])
    weights = jensen_weights(errors, 4, 0.5, table)
    expected = torch.tensor([2.25, 4.5, 2.25, 4.5, 3.0]) / 8
    torch.testing.assert_close(weights[:2], expected.expand(2, 5))
    torch.testing.assert_close(weights[2:], (torch.tensor([2.25] * 4 + [1.0]) * 5 / 8).expand(2, 5))


# --- anchors -------------------------------------------------------------------------------------------------------


@given(seeds, st.sampled_from([1, 2]))
def test_anchor_score_sums_the_terms_of_equation_5_or_their_squares(seed, power):
    query, _, _, exact, mask = draw_attention(seed)
    weight = torch.rand(mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * mask
    lse = causal_lse(query, exact[0], mask, RULES)
    key_score, value_score = anchor_score(query, exact[0], lse, weight, RULES, power)
    _, probs = naive_attention(query, *exact, mask)
    for s in range(SEGMENTS):
        for kv_head in range(KV_HEADS):
            for j in range(EXACT):
                of_key = of_value = 0.0
                for h in range(kv_head * HEADS // KV_HEADS, (kv_head + 1) * HEADS // KV_HEADS):
                    for i in range(QUERIES):
                        a = probs[s, h, i, j].item()
                        counts = weight[s, i, j].item()
                        of_key += counts * (a * (1 - a) * query[s, i, h].norm().item()) ** power
                        of_value += counts * a**power
                assert key_score[s, kv_head, j].item() == pytest.approx(of_key)
                assert value_score[s, kv_head, j].item() == pytest.approx(of_value)


def test_scores_stay_in_bounds_when_the_row_was_seen_only_through_its_code():
    query, _, _, exact, mask = draw_attention(0)
    lse = torch.full((SEGMENTS, QUERIES, HEADS), -50.0, dtype=torch.float64)
    key_score, value_score = anchor_score(query, exact[0], lse, torch.ones_like(mask), RULES, 1)
    assert (key_score >= 0).all()
    assert (value_score <= QUERIES * HEADS / KV_HEADS).all()


@given(
    st.lists(st.sampled_from([-float("inf"), 0.0, 1.0, 2.0, float("inf")]), min_size=1, max_size=20), st.integers(0, 25)
)
def test_top_rows_are_the_highest_and_ties_take_the_lower_offset(scores, num_rows):
    chosen = top_rows(torch.tensor(scores), num_rows).tolist()
    by_hand = sorted((j for j, s in enumerate(scores) if s > -float("inf")), key=lambda j: (-scores[j], j))[:num_rows]
    wanted = min(num_rows, len(scores))
    assert chosen == by_hand + [-1] * (wanted - len(by_hand))


@given(st.lists(st.floats(-1000, 1000, width=32), min_size=1), st.lists(st.floats(-1000, 1000, width=32), min_size=1))
@example(exact=[0.25], coded=[9.5])  # -9.49999975 is the tie -9.5 in float32, and goes to -10
def test_a_correction_is_the_nearest_e4m3_number_and_never_makes_things_worse(exact, coded):
    rows = torch.tensor(exact, dtype=torch.float64)[:, None] * torch.logspace(-6, 0, 7, dtype=torch.float64)
    rows, codes = torch.broadcast_tensors(rows[:, None], torch.tensor(coded, dtype=torch.float64)[:, None])
    stored = correction(rows, codes)
    numbers = torch.cat([torch.arange(127), torch.arange(128, 255)]).to(torch.uint8).view(torch.float8_e4m3fn).double()
    left = (corrected(codes, stored) - rows).abs()
    nearest = ((rows - codes)[..., None] - numbers).abs().amin(-1)
    through_float32 = torch.finfo(torch.float32).eps * (rows - codes).abs()
    assert (left <= nearest + through_float32 + 1e-9).all()
    assert (left <= (codes - rows).abs()).all()


def test_corrections_of_corrections_are_the_same_bytes():
    every = torch.cat([torch.arange(127), torch.arange(129, 255)]).to(torch.uint8)
    zero = torch.zeros(len(every))
    assert torch.equal(correction(corrected(zero, every), zero), every)


def choose(scores, num_rows, prefix, errors=None, **kept):
    """Slots of one head whose rows lose `errors` (1 without) through their codes; num_rows: anchor rows, of 8 bits."""
    exact = torch.zeros(len(scores), 1, 4)
    coded = exact.clone()
    coded[:, 0, 0] = torch.ones(len(scores)) if errors is None else torch.tensor(errors)
    config = AntKVConfig(**{"anchor_share": num_rows / VQ_BLOCK_SIZE, "sinks": False} | kept)
    lost, scores, prefix = code_errors(exact, coded), torch.tensor([scores]), torch.tensor([prefix])
    return anchor_slots(scores * lost, scores == SINK_SCORE, prefix, config)[0].tolist()


def test_a_sink_needs_no_error_to_be_kept():
    assert choose([1.0, SINK_SCORE], 2, [False, False], errors=[5.0, 0.0]) == [EXACT_ANCHOR + 1, -1]


@settings(max_examples=200)
@given(
    seed=seeds,
    num_sinks=st.sampled_from([0, 1, 2, 5, 12]),
    share=st.sampled_from([0.0, 0.01, 0.03, 0.06, 0.5, 1.0]),
    anchor_dtype=st.sampled_from(["fp8", "model"]),
    prefix=st.sampled_from([0, 1, 60, 128]),
    sinks=st.booleans(),
)
def test_rows_are_taken_in_order_and_none_twice(seed, num_sinks, share, anchor_dtype, prefix, sinks):
    """Sinks first, exactly unless another sink would go without a row; the prefix takes none."""
    scores = [1.0, 2.0] * ((128 - num_sinks) // 2) + [1.5] * (num_sinks % 2) + [SINK_SCORE] * num_sinks
    random.Random(seed).shuffle(scores)
    kept = {"anchor_share": share, "anchor_dtype": anchor_dtype, "sinks": sinks}
    rows = choose(scores, 0, [j < prefix for j in range(128)], **kept)
    assert len(rows) == AntKVConfig(**kept).anchor_rows
    exact = [j for j in rows if j >= EXACT_ANCHOR]
    # Each exact row starts at an even row, has the next one too, and all of them come first.
    assert rows[: 2 * len(exact)] == [part for j in exact for part in (j, -1)]
    held = [j % EXACT_ANCHOR for j in rows if j >= 0]
    ranked = sorted(range(prefix, 128), key=lambda j: (-scores[j], j))
    wanted = ranked if share else [j for j in ranked if scores[j] == SINK_SCORE]
    assert held == wanted[: len(held)]
    assert len(held) == len(wanted) or all(j >= 0 for j in rows[2 * len(exact) :])
    num_sinks = sum(scores[j] == SINK_SCORE for j in wanted)
    if anchor_dtype == "model":
        assert len(exact) == min(len(wanted), len(rows) // 2)
    else:
        assert len(exact) == max(min(num_sinks, len(rows) - num_sinks), 0)
