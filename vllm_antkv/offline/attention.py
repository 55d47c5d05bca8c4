"""Attention of a whole window through a quantised past: what the serving engine computes, on a Hugging Face model.

The query at position i sees row j exactly (K after RoPE and V, full precision) iff i <= last_query[j] (recency, the
intact prefix, itself; `select.recency`), and otherwise as it comes back from the cache: from its code, and if it is an
anchor of a block that closed before i's block began, with the correction that is stored for it, or as it is where the
cache keeps that. Blocks are taken in order, because the anchors of one decide what the next sees.

With the scope `prompt` anchors are those of the paper: chosen from full-precision attention of all queries of the
window, serving all later blocks. There the future reaches the past, and the engine differs: it sees a prompt in steps,
and blocks that close in a step serve nothing within it. The figures of that scope are the paper's, not the server's.
The logits of coded rows are corrected by what a codebook knows of its errors (`ops.reference.jensen_bias`). K and
queries are scaled as a codebook says (`codebook.key_scales`).
A layer's sliding window, soft cap and learned sink logits are what the model hands over with its rows (`LogitRules`).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from vllm_antkv.codebook.key_scales import query_scales
from vllm_antkv.config import VQ_BLOCK_SIZE
from vllm_antkv.errors import UnsupportedModelError
from vllm_antkv.offline.capture_attention import layer_of, replaced
from vllm_antkv.offline.hidden import handed_on
from vllm_antkv.offline.layer_window import LayerWindow
from vllm_antkv.offline.method import Method
from vllm_antkv.offline.models import decoder_layers
from vllm_antkv.offline.retained import attend_retained
from vllm_antkv.offline.sinks import strongest_so_far
from vllm_antkv.offline.traits import LayerTraits, layer_traits, rotary_tables
from vllm_antkv.ops.logits import LogitRules
from vllm_antkv.ops.reference import (
    SeenRows,
    anchor_score,
    causal_lse,
    corrected,
    correction,
    jensen_bias,
    jensen_weights,
    mixed_attention,
)
from vllm_antkv.ops.rope import RotaryTable
from vllm_antkv.select.anchors import EXACT_ANCHOR, SINK_SCORE, VOTE_POWER, block_anchors, code_errors, vote_weights
from vllm_antkv.select.recency import last_query_table


def check_eviction(model: PreTrainedModel, method: Method, num_tokens: int) -> None:
    """Refuse what a method that drops tokens cannot attend to.

    Raises:
        UnsupportedModelError: a layer has a window of fewer than `num_tokens`, a soft cap or learned sink logits.
    """
    if method.eviction is None:
        return
    for layer, traits in enumerate(layer_traits(model)):
        if not traits.is_plain(num_tokens):
            raise UnsupportedModelError(
                f"Layer {layer} of this model has a sliding window, a logits soft cap or learned sink logits, and "
                f"{method.name} evicts by plain attention: evaluate it with another method."
            )


@contextmanager
def quantised_past(model: PreTrainedModel, method: Method, num_tokens: int) -> Iterator[None]:
    """While open, `model` attends through `method`; its own attention comes back at the end.

    The model must be called on whole windows of at most `num_tokens` tokens, without padding and without a KV cache.

    Raises:
        UnsupportedModelError: its K cannot be turned back; or as `check_eviction`.
    """
    if method.quantiser is None and method.eviction is None:
        yield
        return
    check_eviction(model, method, num_tokens)
    with watched_run(model, method, num_tokens) as run, replaced(model, run.attend):
        yield


@contextmanager
def watched_run(model: PreTrainedModel, method: Method, num_tokens: int) -> Iterator["Run"]:
    """While open, the run sees the sinks of every window that `model` is called on."""
    run = Run(method, rotary_tables(model, num_tokens), layer_traits(model))
    hooks = _watch(model, run)
    try:
        yield run
    finally:
        for hook in hooks:
            hook.remove()


class Run:
    """One method on one model: what the attention function and the sink hook share.

    is_sink: (num_windows, num_tokens) bool of the windows in hand, None until the emergence layer has run; with
        `num_sinks`, int64, the last query for which each token is one.
    sources: of each layer that attends to the K and V of another, that one.
    """

    def __init__(self, method: Method, rotaries: list[RotaryTable], traits: list[LayerTraits]) -> None:
        self.method = method
        self.rotaries = rotaries
        self.traits = traits
        self.sources = {layer: each.source for layer, each in enumerate(traits) if each.source is not None}
        # Of the windows in hand, those of layers that others attend to.
        self._read: dict[int, LayerWindow] = {}
        self.is_sink: torch.Tensor | None = None

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """The signature of transformers' AttentionInterface: (num_windows, heads, num_tokens, head_size) in."""
        of_literature = self.method.retention is not None or self.method.eviction is not None
        attend = attend_retained if of_literature else attend_window
        window = self.window(module, query, key, value, kwargs | {"scaling": scaling})
        return attend(window, self.method, self.sinks_seen(window)).to(query.dtype), None

    def window(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Mapping[str, Any]
    ) -> LayerWindow:
        """The rows of a layer, from what transformers hands to its attention."""
        layer = layer_of(module)
        # In bfloat16 the model hands over rows of the served precision; what is computed with them is float32.
        dtype = torch.promote_types(query.dtype, torch.float32)
        q, k, v = (rows.transpose(1, 2).to(dtype) for rows in (query, key, value))
        if self.method.k_scale is not None:
            k_scale = self.method.k_scale[self.sources.get(layer, layer)].to(k)
            q, k = q * query_scales(k_scale, q.shape[2]), k * k_scale
        rules = LogitRules(options["scaling"], *map(options.get, ("sliding_window", "softcap", "s_aux")))
        if layer in self.sources:
            source = self._read[self.sources[layer]]
            return LayerWindow(layer, q, source.key, source.value, rules, source.rotary, source)
        window = LayerWindow(layer, q, k, v, rules, self.rotaries[layer])
        if layer in self.sources.values():
            self._read[layer] = window
        return window

    def sinks_seen(self, window: LayerWindow) -> torch.Tensor | None:
        """(num_windows, num_tokens) bool, or None in layers before the one where sinks show."""
        rule = self.method.sinks
        return self.is_sink if rule is not None and self.traits[window.owner.layer].index > rule.layer else None

    def watch_sinks(self, module: nn.Module, args: Any, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        """Forward hook of decoder layer `rule.layer` (KVSink, algorithm 1, by threshold)."""
        rule = self.method.sinks
        assert rule is not None
        magnitude = handed_on(output)[..., list(rule.channels)].abs()
        if self.method.num_sinks:
            self.is_sink = strongest_so_far(magnitude.amax(-1), self.method.num_sinks)
        else:
            self.is_sink = (magnitude > rule.threshold).any(-1)


def attend_window(window: LayerWindow, method: Method, is_sink: torch.Tensor | None) -> torch.Tensor:
    """Attention of one layer over whole windows, every query seeing the past as it comes back from the cache.

    Args:
        window: rows in full precision.
        method: with a quantiser.
        is_sink: (num_windows, num_tokens) bool, or None where no sinks are known.

    Returns:
        (num_windows, num_tokens, num_heads, head_size).
    """
    assert method.quantiser is not None
    query, key, value, rules = window.query, window.key, window.value, window.rules
    num_tokens, config, owner = key.shape[1], method.config, window.owner
    positions = torch.arange(num_tokens, device=key.device)
    last_query = last_query_table(config, num_tokens, rules.window).to(key.device)
    # What queries of later blocks see: decoded rows, of which the anchors of closed blocks are corrected.
    seen_key, seen_value = method.quantiser.read_back(owner.layer, key, value, window.rotary)
    of_prompt = prompt_scores(owner, last_query) if method.anchor_scope == "prompt" else None
    weights = _jensen_weights(window, method)
    is_code = torch.ones(key.shape[:3], dtype=torch.bool, device=key.device)
    outputs = []
    for start in range(0, num_tokens, VQ_BLOCK_SIZE):
        block = slice(start, min(start + VQ_BLOCK_SIZE, num_tokens))
        past = slice(0, block.stop)
        visible = rules.visible(positions[block, None], positions[past])
        exact = visible & (positions[block, None] <= last_query[past])
        columns = exact.any(0).nonzero().flatten()
        output = mixed_attention(
            query[:, block],
            SeenRows(seen_key[:, past], seen_value[:, past], (visible & ~exact)[None]),
            SeenRows(key[:, columns], value[:, columns], exact[None, :, columns]),
            rules,
            jensen_bias(query[:, block], weights, is_code[:, past]),
        )
        outputs.append(output)
        # A block that never closes, or that no later query can see, has no anchors.
        if config.anchor_rows == 0 or block.stop - start < VQ_BLOCK_SIZE or block.stop == num_tokens:
            continue
        if of_prompt is None:
            own = visible[None, :, block]
            own_lse = causal_lse(owner.query[:, block], key[:, block], own, owner.rules)
            scores = anchor_score(owner.query[:, block], key[:, block], own_lse, own.to(key.dtype), owner.rules)
        else:
            scores = (of_prompt[0][..., block], of_prompt[1][..., block])
        anchors = []
        for seen, full, score in ((seen_key, key, scores[0]), (seen_value, value, scores[1])):
            if is_sink is not None:
                score = score.masked_fill(is_sink[:, None, block], SINK_SCORE)
            already_exact = positions[block] < config.prefix
            errors = code_errors(full[:, block], seen[:, block])
            offsets = block_anchors(score, errors, already_exact, config, rules.window, method.anchor_scope)
            anchors.append(_correct_anchors(seen[:, block], full[:, block], offsets))
        is_code[:, block] = ~anchors[0]
    return torch.cat(outputs, dim=1)


def prompt_scores(window: LayerWindow, last_query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Anchor Scores summed over all later queries of the window, from full-precision attention, as in the paper.

    Args:
        window: rows in full precision.
        last_query: (max_model_len,) int32, the last query that sees a position exactly (`select.recency`).

    Returns:
        scores of K and of V, each (num_windows, num_kv_heads, num_tokens).
    """
    query, key, rules = window.query, window.key, window.rules
    num_windows, num_tokens, num_kv_heads, _ = key.shape
    positions = torch.arange(num_tokens, device=key.device)
    key_score, value_score = key.new_zeros(2, num_windows, num_kv_heads, num_tokens)
    for start in range(0, num_tokens, VQ_BLOCK_SIZE):
        block = slice(start, min(start + VQ_BLOCK_SIZE, num_tokens))
        past = slice(0, block.stop)
        visible = rules.visible(positions[block, None], positions[past])[None]
        lse = causal_lse(query[:, block], key[:, past], visible, rules)
        weight = vote_weights(positions[block, None], positions[past], last_query, "prompt", rules.window)
        of_key, of_value = anchor_score(query[:, block], key[:, past], lse, weight[None], rules, VOTE_POWER["prompt"])
        key_score[..., past] += of_key
        value_score[..., past] += of_value
    return key_score, value_score


def _correct_anchors(seen: torch.Tensor, full: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Correct the decoded rows of the anchors of one block as the cache would.

    Args:
        seen: (num_windows, block_size, num_kv_heads, head_size) decoded rows, written.
        full: the same rows in full precision.
        rows: (num_windows, num_kv_heads, anchor_rows) offsets of the anchors, from `block_anchors`.

    Returns:
        (num_windows, block_size, num_kv_heads) bool, which rows are anchors.
    """
    offsets = torch.arange(seen.shape[1], device=seen.device)
    # An unused row is -1 and matches no offset.
    in_fp8, exact = (
        (rows[..., None] == first + offsets).any(-2).transpose(1, 2)[..., None] for first in (0, EXACT_ANCHOR)
    )
    seen.copy_(torch.where(exact, full, torch.where(in_fp8, corrected(seen, correction(full, seen)), seen)))
    return (exact | in_fp8)[..., 0]


def _jensen_weights(window: LayerWindow, method: Method) -> torch.Tensor:
    """(num_heads, head_size) in the dtype of the rows; zeros where the method's codes are not corrected."""
    num_heads, head_size = window.query.shape[2:]
    if method.key_errors is None:
        return window.query.new_zeros(num_heads, head_size)
    errors = method.key_errors[window.owner.layer]
    weights = jensen_weights(errors, num_heads, window.rules.scale, window.owner.rotary)
    return weights.to(window.query)


def _watch(model: PreTrainedModel, run: Run) -> list[torch.utils.hooks.RemovableHandle]:
    hooks = []
    if run.method.sinks is not None:
        hooks.append(decoder_layers(model)[run.method.sinks.layer].register_forward_hook(run.watch_sinks))
    return hooks
