"""Specification, in plain Python, of the plan that `backends.triton.attention.plan` writes on the device."""

from specdec.backends.triton.attention.chunks import UNIT, chunk_of


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
    is_tree: bool,
    max_partials: int,
    limits: list[int] | None = None,
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the used rows of items, and tree_states.
    An item is empty (kv_begin == kv_end) if no chunk begins within its share.
    """

    def first_key(position: int) -> int:
        return max(position - window + 1, 0) // block_n * block_n if window else 0

    def keys_of(request: int, prefix: int, q_len: int, m_block: int) -> tuple[int, int]:
        if is_tree:
            return first_key(prefix), max(prefix // block_n * block_n, first_key(prefix))
        first, last = m_block * block_m // group, ((m_block + 1) * block_m - 1) // group
        begin, last = first_key(prefix + first_node + first), min(last, q_len - 1)
        return begin, prefix + first_node + last + 1 if limits is None else limits[sum(q_lens[:request]) + last] + 1

    tiles: list[tuple[int, int, int, int, int]] = []  # request, m_block, keys, chunks
    for request, (prefix, q_len) in enumerate(zip(prefix_lens, q_lens, strict=True)):
        m_blocks = range(-(-q_len * group // block_m))
        for m_block in m_blocks if is_tree else reversed(m_blocks):
            begin, end = keys_of(request, prefix, q_len, m_block)
            chunks = chunk_of(end - 1) + 1 - chunk_of(begin) if begin < end else 0
            tiles.append((request, m_block, begin, end, chunks))

    share = max(1, -(-sum(end - begin for _, _, begin, end, _ in tiles) // resident))

    def pieces_of(begin: int, end: int, chunks: int) -> int:
        return min((end - begin) // share, chunks)

    while sum(tile[-1] for tile in tiles if pieces_of(*tile[2:]) > 1) > max_partials:
        share *= 2

    items: list[list[int]] = []
    tree_states = [[0, 0] for _ in prefix_lens] if is_tree else []
    state = 0
    for request, m_block, begin, end, chunks in tiles:
        pieces = pieces_of(begin, end, chunks)
        states = chunks if pieces > 1 else min(chunks, 2) if is_tree else 0
        if is_tree and m_block == 0:
            tree_states[request] = [state, states]
        starts = [begin]
        starts += [min(begin_of(chunk_of(begin + i * (end - begin) // pieces - 1) + 1), end) for i in range(1, pieces)]
        first_item = len(items)
        for kv_begin, kv_end in zip(starts, [*starts[1:], end], strict=True):
            before = chunk_of(kv_begin) - chunk_of(begin)
            at = [state if states else -1, before, states if pieces > 1 else 0, first_item]
            if chunks:
                items.append([request, m_block, kv_begin, kv_end, *at])
        state += states
    return items, tree_states


def begin_of(n: int) -> int:
    """Return the first position of chunk `n`."""
    return UNIT.value * max(n, 2 * (n - 2), 4 * (n - 6), 16 * (n - 30))
