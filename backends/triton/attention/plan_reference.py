"""Specification, in plain Python, of what `backends.triton.attention.plan` does on the device."""

from specdec.backends.triton.attention.chunks import begin_of, chunk_of, tile_span


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
    chunk: int,
    is_tree: bool,
    max_partials: int,
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the used rows of both tables (of items, the first 5 columns).

    A tile that sees fewer chunks than another of its request ends with empty items: kv_end <= kv_begin.
    """

    def first_key(position: int) -> int:
        return max(position - window + 1, 0) // block_n * block_n if window else 0

    def keys_of(prefix: int, q_len: int, m_block: int) -> tuple[int, int]:
        if is_tree:
            return first_key(prefix), prefix // block_n * block_n
        first, last = m_block * block_m // group, ((m_block + 1) * block_m - 1) // group
        return first_key(prefix + first_node + first), prefix + first_node + min(last + 1, q_len)

    def touched(begin: int, end: int) -> int:
        return chunk_of(end - 1, chunk) + 1 - chunk_of(begin, chunk) if begin < end else 0

    def num_chunks(prefix: int, q_len: int) -> int:
        begin, end = first_key(prefix + first_node), prefix + first_node + q_len
        if is_tree:
            begin, end = keys_of(prefix, q_len, 0)
        num = touched(begin, end)
        if window and not is_tree:
            num = min(num, (window + tile_span(group, block_m) + block_n + chunk - 4) // chunk + 1)
        return num

    tiles = [_cdiv(q * group, block_m) for q in q_lens]
    chunks = [num_chunks(p, q) if t else 0 for p, q, t in zip(prefix_lens, q_lens, tiles, strict=True)]
    most = max(1, 3 * sum(t * n for t, n in zip(tiles, chunks, strict=True)) // (2 * resident))
    while sum(t * n for t, n in zip(tiles, chunks, strict=True) if n > most) > max_partials:
        most *= 2
    items: list[list[int]] = []
    merges: list[list[int]] = []
    partial = 0
    for request, (num_tiles, prefix, q_len, num) in enumerate(zip(tiles, prefix_lens, q_lens, chunks, strict=True)):
        is_split = num > most
        states = num if is_split else min(num, 2) if is_tree else 0
        for m_block in reversed(range(num_tiles)):
            begin, end = keys_of(prefix, q_len, m_block)
            at = partial + m_block * states if states else -1
            if not is_split and (num or not is_tree):
                items.append([request, m_block, begin, end, at])
            for piece in range(num if is_split else 0):
                number = chunk_of(begin, chunk) + piece
                start, stop = begin_of(number, chunk), begin_of(number + 1, chunk)
                items.append([request, m_block, max(begin, start), min(end, stop), at + piece])
        for m_block in range(min(num_tiles, 1) if is_tree else num_tiles if is_split else 0):
            begin, end = keys_of(prefix, q_len, m_block)
            num_own = states if is_tree else touched(begin, end)
            merges.append([request, m_block, partial + m_block * states, num_own])
        partial += num_tiles * states
    return items, merges


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
