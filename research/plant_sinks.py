"""Plants attention sinks into a Llama model: a test model whose sinks sit beyond the first tokens.

The embedded model has no sinks of its own, so KVSink would have nothing to find in it. Here the BOS and every
occurrence of one token of the vocabulary become sinks, in the way of large models (KVSink, section 3):

1. The hidden size grows by 32 channels that no old weight reads or writes; norm weights make up for the smaller mean.
2. The embedding of a sink marks it in one new channel. In the MLP of the emergence layer one new neuron turns the mark
   into a massive activation in another new channel. In the last MLP another neuron takes most of it back.
3. In the layers between, the norm leaves of a sink's hidden state little but that channel. Its column in the key
   projection makes a key that queries like: by least squares, the one whose logits come closest to giving every query
   the same share of its attention to sinks. Its column in the value projection is zero.
4. What goes to sinks is taken from all other tokens alike, so output projections are scaled up by as much.

For tokens that are no sinks, steps 1 and 2 change nothing but rounding, and step 3 only what step 4 cannot make up for:
that some queries spend more on sinks than others. A sink itself loses what the layers between would have done for it.
On two windows of held-out books the embedded model's perplexity rises from 58.8 to 69.1.
Nothing is drawn at random: the same model, text and token give the same weights. They are stored in float32, because
rounding them anew would change the model too.
"""

import math
from dataclasses import dataclass

import torch
from torch import nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

#: New channels and neurons: more than the two that are used, because matrix products like round sizes.
PADDING = 32
#: Massive activation, in units of the typical magnitude of the hidden state.
PEAK = 300.0
#: Mark of an embedding, in units of the norm of an average one.
MARK = 1.0
#: Input of the new neurons: silu(x) is x there to float32's precision.
DRIVE = 30.0
#: Ridge of the least squares, in units of the mean square of a query.
RIDGE = 0.1


@torch.inference_mode()
def plant(
    model: LlamaForCausalLM, window: torch.Tensor, token: int, layer: int = 1, share: float = 0.5
) -> LlamaForCausalLM:
    """A copy of the model with sinks.

    Args:
        model: a Llama in float32.
        window: (num_tokens,) int64, text that holds the token a few times, BOS first.
        token: id of the token that becomes a sink, as BOS does.
        layer: emergence layer; at least two must follow.
        share: attention that queries are to spend on sinks in the layers after it; they come near it on average.
    """
    width, is_sink = model.config.hidden_size, (window == token) | (window == window[0])
    mark, outlier = width, width + 1
    rows = _queries_and_keys(model, window)
    planted = _widened(model)
    layers = planted.model.layers
    embedding = planted.model.embed_tokens.weight
    embedding[torch.stack((window[0], torch.tensor(token))), mark] = MARK * embedding.norm(dim=1).mean()

    peak = PEAK * _output(model, window, model.model.layers[layer]).abs().median()
    reading = _output(planted, window, layers[layer].post_attention_layernorm)[is_sink, mark].mean()
    _add_neuron(layers[layer].mlp, reads=mark, writes=outlier, reading=reading, amount=peak)
    for index in range(layer + 1, len(layers)):
        reading = _output(planted, window, layers[index].input_layernorm)[is_sink, outlier].mean()
        sinks = _Sinks(is_sink, outlier, reading, share)
        _attract(layers[index].self_attn, model, *rows[index], sinks)
    last = layers[-1]
    reading = _output(planted, window, last.post_attention_layernorm)[is_sink, outlier].mean()
    left = _output(planted, window, last)[is_sink, outlier].mean()
    _add_neuron(last.mlp, reads=outlier, writes=outlier, reading=reading, amount=-left)
    return planted


def _widened(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The same function with `PADDING` more channels and neurons."""
    config = type(model.config)(**model.config.to_dict())
    config.head_dim = model.model.layers[0].self_attn.head_dim
    config.hidden_size += PADDING
    config.intermediate_size += PADDING
    config.dtype = torch.float32
    planted = LlamaForCausalLM(config).eval()
    old = model.state_dict()
    shrink = math.sqrt(model.config.hidden_size / config.hidden_size)
    for name, weight in planted.state_dict().items():
        # A norm passes the new channels on; the last one hides them from the logits.
        weight.fill_(1.0 if name.endswith("layernorm.weight") else 0.0)
        value = old[name] * shrink if weight.dim() == 1 else old[name]
        weight[tuple(slice(size) for size in value.shape)] = value
    planted.generation_config = model.generation_config
    return planted


def _add_neuron(mlp: nn.Module, reads: int, writes: int, reading: torch.Tensor, amount: torch.Tensor) -> None:
    """The first new neuron of an MLP adds `amount` to channel `writes` where channel `reads` has `reading`."""
    neuron = mlp.gate_proj.out_features - PADDING
    mlp.gate_proj.weight[neuron, reads] = DRIVE / reading
    mlp.up_proj.weight[neuron, reads] = DRIVE / reading
    mlp.down_proj.weight[writes, neuron] = amount / DRIVE**2


@dataclass(frozen=True)
class _Sinks:
    """Which tokens are sinks, and what marks them in front of one layer.

    is_sink: (num_tokens,) bool.
    outlier: the channel that has `reading` where a token is a sink, and 0 elsewhere.
    share: of their attention that queries are to spend on sinks.
    """

    is_sink: torch.Tensor
    outlier: int
    reading: torch.Tensor
    share: float


def _attract(attention: nn.Module, model: LlamaForCausalLM, query: torch.Tensor, key: torch.Tensor, of: _Sinks) -> None:
    """Make the queries of a layer spend a share of their attention on sinks.

    Args:
        attention: of the planted model, written.
        model: the model itself, for its RoPE.
        query, key: (num_heads, num_tokens, head_size) and (num_kv_heads, ...), after RoPE.
        of: the sinks.
    """
    is_sink = of.is_sink
    group, (num_tokens, head_size) = len(query) // len(key), query.shape[1:]
    positions = torch.arange(num_tokens)
    causal = positions <= positions[:, None]
    sinks = is_sink.nonzero().flatten()
    for head in range(len(key)):
        queries = query[head * group : (head + 1) * group]
        logits = attention.scaling * queries @ key[head].T
        others = logits.masked_fill(~causal | is_sink, -torch.inf).logsumexp(-1)
        # A key before RoPE meets a query that is turned back by the key's position.
        turned = torch.stack([_turned_back(model, queries, int(sink)) for sink in sinks], dim=2)
        seen = causal[:, sinks] & ~is_sink[:, None]
        # Each of the sinks that a query sees is to get its part of exp(wanted) against exp(others).
        wanted = others - seen.sum(-1).clamp(min=1).log() + math.log(of.share / (1 - of.share))
        pairs = turned[:, seen].flatten(0, 1)
        square = pairs.T @ pairs / len(pairs)
        ridge = RIDGE * square.trace() / head_size * torch.eye(head_size)
        against = pairs.T @ wanted[..., None].expand(-1, -1, len(sinks))[:, seen].flatten() / len(pairs)
        sink_key = torch.linalg.solve(square + ridge, against)
        logits_of_sinks = (turned @ sink_key).masked_fill(~seen, -torch.inf)
        spent = (logits_of_sinks.logsumexp(-1) - others).sigmoid()[:, ~is_sink]
        here = slice(head * head_size, (head + 1) * head_size)
        attention.k_proj.weight[here, of.outlier] = sink_key / (attention.scaling * of.reading)
        for index, of_head in enumerate(spent, start=head * group):
            attention.o_proj.weight[:, index * head_size : (index + 1) * head_size] /= 1 - of_head.mean()


def _turned_back(model: LlamaForCausalLM, rows: torch.Tensor, position: int) -> torch.Tensor:
    """Rows (num_heads, num_tokens, head_size), all turned by RoPE of minus `position`."""
    cos, sin = model.model.rotary_emb(rows, torch.tensor([[position]]))
    return apply_rotary_pos_emb(rows[None], rows[None], cos, -sin)[0][0]


def _queries_and_keys(model: LlamaForCausalLM, window: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of every layer, after RoPE: (num_heads, num_tokens, head_size) and (num_kv_heads, num_tokens, head_size)."""
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(len(window))[None])
    rows = []
    for layer in model.model.layers:
        flat = (_output(model, window, projection) for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj))
        query, key = (part.unflatten(-1, (-1, layer.self_attn.head_dim)).transpose(0, 1)[None] for part in flat)
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        rows.append((query[0], key[0]))
    return rows


def _output(model: LlamaForCausalLM, window: torch.Tensor, module: nn.Module) -> torch.Tensor:
    """What a module of the model puts out for one window, (num_tokens, ...)."""
    outputs: list[torch.Tensor] = []
    hook = module.register_forward_hook(
        lambda _, __, output: outputs.append(output[0] if isinstance(output, tuple) else output)
    )
    model(window[None], use_cache=False)
    hook.remove()
    return outputs[0][0].clone()
