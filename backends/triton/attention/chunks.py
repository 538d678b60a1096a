"""Chunks of keys, whose length depends on the position only, on the device and on the host.

The first 16 chunks have CHUNK keys each, those up to 4 times as far twice as many, and so on up to 16 times: many
chunks of short contexts, which fill the GPU, and few of long ones, which are folded one after another.
"""

import triton
import triton.language as tl


@triton.jit
def chunk_at(position, CHUNK: tl.constexpr):
    """Return the number of the chunk that holds `position`, int32. Twin: `chunk_of`."""
    number = position // CHUNK
    for level in tl.static_range(1, 5):
        later = 24 * 2 ** (level - 1) - 8 + (position - CHUNK * 4 * 4**level) // (CHUNK * 2**level)
        number = tl.where(position >= CHUNK * 4 * 4**level, later, number)
    return number


@triton.jit
def chunk_begin(number, CHUNK: tl.constexpr):
    """Return the first position of chunk `number`. Twin: `begin_of`."""
    begin = number * CHUNK
    for level in tl.static_range(1, 5):
        later = CHUNK * 4 * 4**level + (number - (24 * 2 ** (level - 1) - 8)) * (CHUNK * 2**level)
        begin = tl.where(number >= 24 * 2 ** (level - 1) - 8, later, begin)
    return begin


@triton.jit
def num_chunks(begin, end, CHUNK: tl.constexpr):
    """Return how many chunks the keys [begin, end) touch."""
    return tl.where(begin < end, chunk_at(end - 1, CHUNK) + 1 - chunk_at(begin, CHUNK), 0)


@triton.jit
def first_key(position, window, BLOCK_N: tl.constexpr):
    """Return where the block begins that holds the first key which the query at `position` sees."""
    return tl.where(window > 0, tl.maximum(position - window + 1, 0) // BLOCK_N * BLOCK_N, 0)


def tile_span(group: int, block_m: int) -> int:
    """Return the most queries that a tile of `block_m` rows covers, wholly or in part; `group` rows per query."""
    return block_m // group if block_m % group == 0 else (block_m + group - 2) // group + 1


def most_chunks(context: int, tail_len: int, window: int, span: int, block_n: int, chunk: int) -> int:
    """Return an upper bound of one tile's chunks if no request has more than `context` keys, tail_len of them new.

    span: the most queries of a tile, of a tree all.
    """
    keys = min(context, window + min(tail_len, span) + block_n - 2) if window else context
    return min(chunk_of(context - 1, chunk) + 1, (keys + chunk - 2) // chunk + 1)


def chunk_of(position: int, chunk: int) -> int:
    """Return the number of the chunk that holds `position`; the first 16 chunks have `chunk` keys each."""
    level = sum(position >= chunk * 4 ** (n + 2) for n in range(4))
    far = position - chunk * 4 ** (level + 1)
    return 24 * 2**level // 2 - 8 + far // (chunk << level) if level else position // chunk


def begin_of(number: int, chunk: int) -> int:
    """Return the first position of chunk `number`."""
    level = sum(number >= 24 * 2**n - 8 for n in range(4))
    first = 24 * 2**level // 2 - 8
    return chunk * (4 ** (level + 1) + (number - first) * 2**level) if level else number * chunk
