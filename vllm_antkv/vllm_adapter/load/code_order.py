"""Rotary tables for rows whose channels stand in the order that codes have. Knows nothing of vLLM."""

from vllm_antkv.codebook import Codebook, RopeLayout
from vllm_antkv.errors import CodebookError
from vllm_antkv.ops.rope import RotaryTable, reordered


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
