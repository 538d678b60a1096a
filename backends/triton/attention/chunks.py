"""Chunks of keys, with boundaries at fixed absolute positions: functions for the device and for the host.

Keys come in units of 64. A chunk has one unit up to position 256, two up to 1,024, four up to 8,192, and 16 beyond:
many chunks of short contexts, which fill the GPU, and few of long ones, which are folded one after another.
"""

import triton
import triton.language as tl

UNIT = tl.constexpr(64)  # keys; BLOCK_N is 64 or a smaller power of two


@triton.jit
def chunk_at(position):
    """Return the number of the chunk that holds `position`, int32. Twin: `chunk_of`."""
    u = position // UNIT
    return tl.minimum(tl.minimum(u, u // 2 + 2), tl.minimum(u // 4 + 6, u // 16 + 30))


@triton.jit
def chunk_begin(n):
    """Return the first position of chunk `n`. Twin: `tests.split_plan.begin_of`."""
    return tl.maximum(tl.maximum(n, 2 * (n - 2)), tl.maximum(4 * (n - 6), 16 * (n - 30))) * UNIT


@triton.jit
def first_key(position, window, BLOCK_N: tl.constexpr):
    """Return the start of the block that holds the first key visible to the query at `position`."""
    return tl.where(window > 0, tl.maximum(position - window + 1, 0) // BLOCK_N * BLOCK_N, 0)


def tile_span(group: int, block_m: int) -> int:
    """Return the most queries that a tile of `block_m` rows covers, wholly or in part; `group` rows per query."""
    return block_m // group if block_m % group == 0 else (block_m + group - 2) // group + 1


def most_chunks(context: int, tail_len: int, window: int, span: int, block_n: int) -> int:
    """Return an upper bound of one tile's chunks if no request has more than `context` keys, tail_len of them new.

    span: the most queries of a tile; for a tree, all queries.
    """
    keys = min(context, window + min(tail_len, span) + block_n - 2) if window else context
    return min(chunk_of(context - 1) + 1, (keys + UNIT.value - 2) // UNIT.value + 1)


def chunk_of(position: int) -> int:
    """Return the number of the chunk that holds `position`."""
    u = position // UNIT.value
    return min(u, u // 2 + 2, u // 4 + 6, u // 16 + 30)
