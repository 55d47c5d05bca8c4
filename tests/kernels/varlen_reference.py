"""FlashAttention's place in the tests: its rules, in PyTorch and in any dtype."""

from dataclasses import replace

import torch

from vllm_antkv.ops.layer import LayerState
from vllm_antkv.ops.step import StepPlan
from vllm_antkv.ops.varlen import plan_rounds, prefill_limits
from vllm_antkv.ops.varlen_call import Varlen, VarlenCall


def planned(step: StepPlan, layer: LayerState, decoded: int = 0) -> StepPlan:
    """A step as a builder plans it; decoded: by how much the host overestimates sequences that decode."""
    limits = prefill_limits(layer, layer.recency.score_slots)
    if limits is None or step.query_start_loc_cpu is None or step.max_query_len <= limits.longest_decode:
        return step
    decodes = step.query_start_loc_cpu.diff() <= limits.longest_decode
    seq_lens = step.seq_lens.cpu() + decoded * decodes
    return replace(step, rounds=plan_rounds(step.query_start_loc_cpu, seq_lens, limits, step.seq_lens.device))


def varlen(max_num_tokens: int, nothing: float = -torch.inf, narrow_values: bool = False) -> Varlen:
    """A kernel for plain rows.

    nothing: log-sum-exp of a query that sees no key; versions of FlashAttention differ in its sign.
    """

    def attend(query, key, value, output, call: VarlenCall, scale) -> torch.Tensor:
        wide = torch.promote_types(query.dtype, torch.float32)
        statistics = torch.full((query.shape[1], len(query)), nothing, dtype=wide)
        assert int(call.starts[0]) == 0
        assert int(call.starts[-1]) == len(query)
        assert int(call.starts.diff().max()) == call.max_rows
        assert call.keys is None or int(call.keys.num_keys.max()) == call.max_keys
        for run, (begin, end) in enumerate(zip(call.starts[:-1], call.starts[1:], strict=True)):
            rows = slice(int(begin), int(end))
            keys, values = key[rows], value[rows]
            if call.keys is not None:
                num_keys = int(call.keys.num_keys[run])
                pages = call.keys.page_table[run, : -(-num_keys // key.shape[1])].long()
                keys, values = (plain[pages].flatten(0, 1)[:num_keys] for plain in (key, value))
            # A kernel multiplies what its mask hides, too, by 0.
            assert keys.isfinite().all()
            assert values.isfinite().all()
            output[rows], statistics[:, rows] = attended(query[rows], keys, values, call, scale, nothing)
        return statistics

    return Varlen(attend, max_num_tokens, max_head_size=256, narrow_values=narrow_values)


def attended(query, key, value, call, scale, nothing):
    """Output and log-sum-exp of one run."""
    if not len(key):
        return query.new_zeros(query.shape[:-1] + value.shape[-1:]), torch.full(
            query.shape[1::-1], nothing, dtype=query.dtype
        )
    last = torch.arange(len(query))[:, None] + len(key) - len(query)
    keys = torch.arange(len(key))
    seen = keys <= last if call.causal else torch.ones(len(query), len(key), dtype=torch.bool)
    # Sums in float32 at least, as kernels have them.
    wide = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[1] // key.shape[1]
    expanded = key.to(wide).repeat_interleave(group, 1), value.to(wide).repeat_interleave(group, 1)
    logits = torch.einsum("qhd,khd->hqk", query.to(wide), expanded[0]) * scale
    logits = logits.masked_fill(~seen, -torch.inf)
    weights = logits.softmax(-1).nan_to_num()
    lse = logits.logsumexp(-1)
    output = torch.einsum("hqk,khd->qhd", weights, expanded[1])
    return output.to(query.dtype), lse.masked_fill(lse == -torch.inf, nothing)
