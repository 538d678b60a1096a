"""Specification, in plain Python, of what `backends.triton.attention.plan` does on the device."""

from specdec.backends.triton.attention.plan import tile_span


def split_plan_reference(
    prefix_lens: list[int],
    q_lens: list[int],
    *,
    first_node: int,
    window: int,
    resident: int,
    group: int,
    block_m: int,
    block_n: int,
    min_chunk: int,
    is_causal: bool,
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the used rows of both tables (of items, the first 6 columns).

    A tile that sees fewer keys than the largest tile of its request ends with empty items: kv_end <= kv_begin.
    """
    begins = [max(p - window + 1, 0) if window else 0 for p in prefix_lens]
    lens = [p + first_node + q - b for p, q, b in zip(prefix_lens, q_lens, begins, strict=True)]
    if window and is_causal:
        lens = [min(n, window - 1 + tile_span(group, block_m)) for n in lens]
    tiles = [_cdiv(q * group, block_m) for q in q_lens]
    most = max(resident, sum(tiles) + resident // 2)

    def num_items(chunk: int) -> int:
        return sum(t * _cdiv(n, chunk) for t, n in zip(tiles, lens, strict=True))

    shortest = _cdiv(min_chunk, block_n) * block_n
    chunk = next(c for c in range(shortest, shortest + max(lens) + block_n, block_n) if num_items(c) <= most)
    items: list[list[int]] = []
    merges: list[list[int]] = []
    partial = 0
    for request, (num_tiles, prefix, q_len, kv_len) in enumerate(zip(tiles, prefix_lens, q_lens, lens, strict=True)):
        size = _cdiv(_cdiv(kv_len, _cdiv(kv_len, chunk)), block_n) * block_n
        n = _cdiv(kv_len, size)
        for m_block in reversed(range(num_tiles)):
            nearest, tile_end = prefix, prefix + first_node + q_len
            if is_causal:
                nearest = prefix + first_node + m_block * block_m // group
                tile_end = min(tile_end, prefix + first_node + ((m_block + 1) * block_m - 1) // group + 1)
            begin = max(nearest - window + 1, 0) if window else 0
            if n > 1:
                merges.append([request, m_block, partial, n])
            for split in range(n):
                at = begin + split * size
                end = min(at + size, tile_end)
                items.append([request, m_block, at, end, partial if n > 1 else -1, int(split == 0)])
                partial += n > 1
    return items, merges


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
