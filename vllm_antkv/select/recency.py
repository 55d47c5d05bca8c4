"""Which recent tokens stay in full precision, as one table: the last query that sees each token exactly.

Token `j` is visible in full precision to the query at position `i >= j` iff `i <= last_query[j]`. The table depends on
positions alone, so chunking, batching, preemption and prefix hits cannot change what a query sees. Sliding windows,
LogQuant's log-distributed retention (algorithm 1), the intact prefix and the open VQ block all fit in it.
"""

import torch

from vllm_antkv.config import VQ_BLOCK_SIZE, AntKVConfig, Recency

#: "Every query": larger than any position.
ALWAYS = 2**31 - 1


def visible(queries: torch.Tensor, keys: torch.Tensor, window: int | None) -> torch.Tensor:
    """Which keys queries see at all, exactly or through their codes, bool.

    Args:
        queries, keys: positions, whose shapes broadcast.
        window: tokens that a query sees, itself included; None: all before it.
    """
    causal = keys <= queries
    return causal if window is None else causal & (keys > queries - window)


def last_query_table(config: AntKVConfig, max_len: int, window: int | None = None) -> torch.Tensor:
    """The last query position that would see each token in full precision, if it saw it at all (`visible`).

    Args:
        window: of the layer; None: every query sees all tokens before it.

    Returns:
        (max_len,) int32; entry `j` is at least `j`, since a token always sees itself exactly.
    """
    policy = config.recency_policy
    positions = torch.arange(max_len, dtype=torch.int32)
    table = _retention(policy, positions)
    if policy.kind != "none":
        table = torch.maximum(table, _block_end(positions))
    if window is not None and config.windows == "exact":
        table = torch.maximum(table, positions + (window - 1))
    table[: config.prefix] = ALWAYS
    return table


def last_use_table(config: AntKVConfig, max_len: int, window: int | None = None) -> torch.Tensor:
    """The last position at whose step the full-precision row of each token is read, for attention or for anchors.

    Anchors are picked from the rows of a block when it closes, so rows live until then. (max_len,) int32.

    window: of the layer, as in `last_query_table`.
    """
    table, positions = last_query_table(config, max_len, window), torch.arange(max_len, dtype=torch.int32)
    if window is not None:
        table = torch.minimum(table, positions + (window - 1))
    if config.anchor_rows:
        table = torch.maximum(table, _block_end(positions))
    return table


def sees_own_block(last_query: torch.Tensor) -> bool:
    """Whether every query sees all tokens of its own VQ block exactly, those before it; (max_len,) int32 table."""
    ends = _block_end(torch.arange(len(last_query))).clamp(max=len(last_query) - 1)
    return bool((last_query.cpu() >= ends).all())


def exact_bounds(last_query: torch.Tensor) -> tuple[int, int]:
    """Where queries look for exact rows of closed blocks: among the first tokens, and shortly before themselves.

    Args:
        last_query: (max_len,) int32 table.

    Returns:
        `(prefix, reach)`: if a query sees a token of an earlier VQ block than its own exactly, then the token is one of
        the first `prefix`, or at most `reach` before the query.
    """
    positions = torch.arange(len(last_query))
    # No query comes behind the end of the table.
    table = last_query.long().cpu().clamp(max=len(last_query) - 1)
    prefix = int((table == len(table) - 1).int().cumprod(0).sum())
    seen_later = (positions >= prefix) & (table > _block_end(positions))
    return prefix, int(((table - positions) * seen_later).max())


def _block_end(positions: torch.Tensor) -> torch.Tensor:
    return (positions // VQ_BLOCK_SIZE + 1) * VQ_BLOCK_SIZE - 1


def _retention(policy: Recency, positions: torch.Tensor) -> torch.Tensor:
    if policy.kind == "log":
        return _log_retention(policy.window, len(positions))
    if policy.kind == "sliding":
        return positions + (policy.window - 1)
    return positions.clone()


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
