"""The rotary tables of a loaded model: what its layers may turn K by.

Which layer turns K by which of them, if any, is found by `load.probe`: some layers have such a module and do not
use it.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.layers.rotary_embedding.mrope import MRotaryEmbedding
from vllm.model_executor.layers.rotary_embedding.phi3_long_rope_scaled_rope import Phi3LongRoPEScaledRotaryEmbedding
from vllm.model_executor.models.interfaces import supports_multimodal

from vllm_antkv.cache.positions import NUM_POSITIONS
from vllm_antkv.codebook import Codebook, RopeLayout
from vllm_antkv.errors import CodebookError
from vllm_antkv.ops.rope import RotaryTable, reordered, rotate
from vllm_antkv.ops.rope_detection import transformers_tables


def rotary_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module of the text model that turns something, whatever it is called, by its name there."""
    text_model = model.get_language_model() if supports_multimodal(model) else model  # type: ignore[operator]
    return [
        (name, module) for name, module in text_model.named_modules() if "rotaryemb" in type(module).__name__.lower()
    ]


def rotary_tables(model: nn.Module, layer_types: tuple[str, ...], num_positions: int) -> list[RotaryTable]:
    """Every table of cosines and sines in this model, in float32 and not rounded to the model dtype.

    Args:
        model: as vLLM has loaded it, with modules of its own or, through its Transformers backend, of transformers.
        layer_types: kinds of layers, for modules of transformers that have a table for each.
        num_positions: how many positions are needed; vLLM's own modules say how many they have.
    """
    return [table for _, module in rotary_modules(model) for table in _tables(module, layer_types, num_positions)]


def three_part_tables(model: nn.Module) -> list[RotaryTable]:
    """Every table of a model whose tokens have three positions (M-RoPE), as `rotary_tables`, with its sections."""
    modules = [module for _, module in rotary_modules(model) if isinstance(module, MRotaryEmbedding)]
    return [_with_sections(table, module) for module in modules for table in _tables(module, (), 0)]


def in_code_order(rotaries: dict[int, RotaryTable | None], codebook: Codebook) -> dict[int, RotaryTable | None]:
    """Tables for rows whose channels stand in the order that codes have; layers that had one table still share one.

    Raises:
        CodebookError: the codebook was learned from a model whose layers turn K otherwise.
    """
    made: dict[tuple[int, tuple[int, ...] | None], RotaryTable | None] = {}
    found = {}
    for index, table in rotaries.items():
        learned, order = codebook.header.rope(index), codebook.header.k_order(index)
        served = _layout(table)
        if learned not in (None, served):
            raise CodebookError(
                f"The codebook was learned from a model whose layer {index} {learned}, but that of the served model "
                f"{served}: run `antkv calibrate` on this model."
            )
        key = id(table), order
        if key not in made:
            made[key] = table if table is None or order is None else _reordered(table, order, index)
        found[index] = made[key]
    return found


def _layout(table: RotaryTable | None) -> RopeLayout:
    return (
        RopeLayout() if table is None else RopeLayout(rotary_dim=table.rotary_dim, neighbours=not table.is_neox_style)
    )


def _reordered(table: RotaryTable, order: tuple[int, ...], index: int) -> RotaryTable:
    try:
        return reordered(table, order)
    except ValueError as error:
        raise CodebookError(
            f"The codebook does not fit the RoPE of layer {index} ({error}): run `antkv calibrate` on this model."
        ) from None


def _with_sections(table: RotaryTable, module: MRotaryEmbedding) -> RotaryTable:
    """By which of three positions each pair turns is seen on a row whose pairs are all (1, 0).

    In the dtype and on the device of the module's own table, which it would convert otherwise.
    """
    own = module.cos_sin_cache
    table = table.to(own.device)
    positions = torch.arange(NUM_POSITIONS, device=own.device) * ((len(table.cos) - 1) // (NUM_POSITIONS - 1))
    pairs = own.new_zeros(table.rotary_dim)
    first = slice(0, table.rotary_dim // 2) if table.is_neox_style else slice(0, None, 2)
    pairs[first] = 1
    row = torch.cat((pairs, own.new_zeros(module.head_size - table.rotary_dim)))[None]
    _, turned = module.forward_native(positions[:, None], row.clone(), row)
    by_each = rotate(row.float().expand(NUM_POSITIONS, 1, -1), positions, table)
    errors = (by_each - turned.float().view(1, 1, -1)).abs()[:, 0, : table.rotary_dim]
    of_pairs = errors.unflatten(1, (2, -1)).sum(1) if table.is_neox_style else errors.unflatten(1, (-1, 2)).sum(2)
    return replace(table, sections=of_pairs.argmin(0))


def _tables(module: nn.Module, layer_types: tuple[str, ...], num_positions: int) -> Iterator[RotaryTable]:
    if isinstance(module, Phi3LongRoPEScaledRotaryEmbedding):
        yield _halves(_long_rope(module), True)
    elif isinstance(module, RotaryEmbeddingBase):
        # Computed again, since the module's own copy is rounded to the model dtype: angles of exact tables add up, so
        # that kernels may turn by a tile's position first and by the offset in the tile after it.
        cache = module._compute_cos_sin_cache()
        if cache.shape == (len(cache), module.rotary_dim):
            yield _halves(cache, bool(module.is_neox_style))
    elif type(module).__module__.startswith("transformers"):
        yield from transformers_tables(module, num_positions, layer_types, next(module.buffers()).device)


def _long_rope(module: Phi3LongRoPEScaledRotaryEmbedding) -> torch.Tensor:
    """The one table of the two that vLLM uses for all lengths: the long one where requests may become that long."""
    if module.use_long_rope:
        return module._compute_cos_sin_cache(module.max_position_embeddings, module.long_factor, module.long_mscale)
    return module._compute_cos_sin_cache(
        module.original_max_position_embeddings, module.short_factor, module.short_mscale
    )


def _halves(cache: torch.Tensor, is_neox_style: bool) -> RotaryTable:
    """From rows of all cosines and then all sines."""
    cos, sin = cache.float().chunk(2, dim=-1)
    return RotaryTable(cos.contiguous(), sin.contiguous(), is_neox_style)
