"""Which recent tokens stay unquantised, as one table: the last query that sees each token so.

The query at position `i >= j` sees token `j` unquantised iff `i <= last_query[j]`. The table depends on positions
alone, so chunking, batching, preemption and prefix-cache hits cannot change what a query sees. It covers sliding
windows, LogQuant's log-distributed retention (algorithm 1), the intact prefix and the open VQ block.
"""

import torch

from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig, Recency

#: "Every query": larger than any position.
ALWAYS = 2**31 - 1
#: A layer with a window keeps at most one in so many of its tokens unquantised as recent ones. It holds few tokens,
#: however long the context, and a recent one takes as much room as 16 coded ones of 1 bit.
_WINDOW_PER_RECENT = 32
#: The least that the rule above leaves of any window.
_FEWEST_RECENT = 8


def visible(queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
    """Mask of the keys that queries see at all, unquantised or through their codes.

    Args:
        queries, keys: positions, whose shapes broadcast.
        window: number of tokens that a query sees, itself included; None: all before it.
    """
    causal = keys <= queries
    return causal if window is None else causal & (keys > queries - window)


def last_query_table(config: AntKVConfig, max_len: int, window: int | None = None) -> torch.Tensor:
    """The last query position that sees each token unquantised, if it sees it at all (`visible`).

    Args:
        window: of the layer; None: every query sees all tokens before it.

    Returns:
        (max_len,) int32; entry `j` is at least `j`: a token always sees itself unquantised.
    """
    policy = config.recency_policy
    positions = torch.arange(max_len, dtype=torch.int32)
    table = _retention(policy, positions, window)
    if policy.kind != "none":
        table = torch.maximum(table, _block_end(positions))
    if window is not None and config.windows == "exact":
        table = torch.maximum(table, positions + (window - 1))
    table[: config.prefix] = ALWAYS
    return table


def last_use_table(config: AntKVConfig, max_len: int, window: int | None = None) -> torch.Tensor:
    """The last position whose step reads the unquantised K and V of each token, for attention or for anchors.

    Anchors are chosen when a block closes, so its K and V live until then. (max_len,) int32.

    window: of the layer, as in `last_query_table`.
    """
    table, positions = last_query_table(config, max_len, window), torch.arange(max_len, dtype=torch.int32)
    if window is not None:
        table = torch.minimum(table, positions + (window - 1))
    if config.anchor_rows:
        table = torch.maximum(table, _block_end(positions))
    return table


def sees_own_block(last_query: torch.Tensor) -> bool:
    """Whether every query sees all earlier tokens of its own VQ block unquantised; (max_len,) int32 table."""
    ends = _block_end(torch.arange(len(last_query))).clamp(max=len(last_query) - 1)
    return bool((last_query.cpu() >= ends).all())


def exact_bounds(last_query: torch.Tensor) -> tuple[int, int]:
    """Bounds of the unquantised tokens of closed blocks: the first tokens, and those shortly before the query.

    Args:
        last_query: (max_len,) int32 table.

    Returns:
        `(prefix, reach)`: a token of an earlier VQ block that a query sees unquantised is one of the first `prefix`, or
        at most `reach` before the query.
    """
    positions = torch.arange(len(last_query))
    # There is no query beyond the end of the table.
    table = last_query.long().cpu().clamp(max=len(last_query) - 1)
    prefix = int((table == len(table) - 1).int().cumprod(0).sum())
    seen_later = (positions >= prefix) & (table > _block_end(positions))
    return prefix, int(((table - positions) * seen_later).max())


def _block_end(positions: torch.Tensor) -> torch.Tensor:
    return (positions // VQ_BLOCK_SIZE + 1) * VQ_BLOCK_SIZE - 1


def _retention(policy: Recency, positions: torch.Tensor, window: int | None) -> torch.Tensor:
    if policy.kind == "log":
        return _log_retention(policy.window, len(positions))
    if policy.kind == "sliding":
        return positions + (_sliding(policy.window, window) - 1)
    return positions.clone()


def _sliding(recent: int, window: int | None) -> int:
    """How many of the last tokens a layer keeps where one without a window keeps `recent`."""
    return recent if window is None else min(recent, max(window // _WINDOW_PER_RECENT, _FEWEST_RECENT))


def _log_retention(window: int, max_len: int) -> torch.Tensor:
    """LogQuant algorithm 1: when 3W tokens are held, the older 2W are thinned to every second one.

    Run once per table. A token thinned out when token `n` arrives was last seen by query `n - 1`.
    """
    table = torch.full((max_len,), ALWAYS, dtype=torch.int32)
    held: list[int] = []
    for token in range(max_len):
        if len(held) == 3 * window:
            dropped = held[1 : 2 * window : 2]
            table[torch.tensor(dropped)] = token - 1
            held = held[0 : 2 * window : 2] + held[2 * window :]
        held.append(token)
    return table
