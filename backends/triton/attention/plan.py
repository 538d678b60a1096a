"""Split-KV plan: divides the work of one attention forward into items of about equal length, on the device.

A tile is BLOCK_M query rows (query x head of one KV group) of one request, and the keys that any of them sees: up to
the last query's own if the forward is causal, and from the start of the first query's window. Where tiles alone do not
fill the GPU, keys are split too: into the shortest chunks that the GPU can hold all at once, whatever the mix of
lengths. The device decides; the host knows only an upper bound of the items, so a captured grid fits any lengths. With
`resident` items per KV head at once,
    items <= max(resident, tiles + resident / 2)    merges <= min(tiles, resident)    partials <= 2 * resident
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from specdec.backends.triton.launch.relaunch import CachedLaunch

# Columns of the tables (int32).
ITEM_WIDTH = 8  # request (-1: none), m_block, kv_begin, kv_end, partial (-1: the tile's only split), is_first, 0, 0
MERGE_WIDTH = 4  # request (-1: none), m_block, first partial, number of splits


@triton.jit
def key_range(i, bs, prefix_lens, qo_indptr, first_node, window):
    """Return the number of queries and the half-open range of keys of requests `i`; empty past the batch."""
    is_request = i < bs
    prefix = tl.load(prefix_lens + i, mask=is_request, other=0).to(tl.int32)
    start = tl.load(qo_indptr + i, mask=is_request, other=0)
    q_len = tl.load(qo_indptr + i + 1, mask=is_request, other=0) - start
    kv_begin = tl.where(window > 0, tl.maximum(prefix - window + 1, 0), 0)
    kv_end = tl.where(q_len > 0, prefix + first_node + q_len, kv_begin)
    return q_len, kv_begin, kv_end


@triton.jit
def _tiles(
    i,
    bs,
    prefix_lens,
    qo_indptr,
    first_node,
    window,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPAN: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Return for requests `i`: tiles, an upper bound of a tile's keys, queries, and the end of keys.

    SPAN: the most queries of a tile. A tree's nodes are not in causal order, so its tiles take all keys of the request.
    """
    q_len, kv_begin, kv_end = key_range(i, bs, prefix_lens, qo_indptr, first_node, window)
    num_keys = kv_end - kv_begin
    if CAUSAL:
        num_keys = tl.where(window > 0, tl.minimum(num_keys, window - 1 + SPAN), num_keys)
    return (q_len * GROUP + BLOCK_M - 1) // BLOCK_M, num_keys, q_len, kv_end


@triton.jit
def _splits(kv_len, chunk, BLOCK_N: tl.constexpr):
    """Return number and length of the splits that cover kv_len keys: about equal, at most `chunk`, in whole blocks."""
    n = tl.maximum((kv_len + chunk - 1) // chunk, 1)
    size = ((kv_len + n - 1) // n + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    size = tl.maximum(size, BLOCK_N).to(tl.int32)
    return (kv_len + size - 1) // size, size


@triton.jit
def _num_items(
    bs,
    prefix_lens,
    qo_indptr,
    first_node,
    window,
    chunk,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPAN: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_BS: tl.constexpr,
):
    """Return the number of items of the whole batch if keys are split into chunks."""
    total = tl.zeros([], tl.int32)
    for base in range(0, bs, BLOCK_BS):
        request = base + tl.arange(0, BLOCK_BS)
        tiles, num_keys, _q_len, _kv_end = _tiles(
            request, bs, prefix_lens, qo_indptr, first_node, window, GROUP, BLOCK_M, SPAN, CAUSAL
        )
        total += tl.sum(tiles * ((num_keys + chunk - 1) // chunk))
    return total


@triton.jit(
    do_not_specialize=["bs", "num_items", "num_merges", "first_node", "window", "resident", "min_chunk"],
    do_not_specialize_on_alignment=["prefix_lens", "qo_indptr"],
)
def _plan_kernel(
    prefix_lens,
    qo_indptr,
    items,
    merges,
    bs,
    num_items,
    num_merges,
    first_node,
    window,
    resident,
    min_chunk,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPAN: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_BS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    ITEM: tl.constexpr,
    MERGE: tl.constexpr,
):
    lanes = tl.arange(0, BLOCK_BS)
    num_tiles = tl.zeros([], tl.int32)
    longest = tl.zeros([], tl.int32)
    for base in range(0, bs, BLOCK_BS):
        tiles, num_keys, _q_len, _kv_end = _tiles(
            base + lanes, bs, prefix_lens, qo_indptr, first_node, window, GROUP, BLOCK_M, SPAN, CAUSAL
        )
        num_tiles += tl.sum(tiles)
        longest = tl.maximum(longest, tl.max(num_keys))
    most = tl.maximum(resident, num_tiles + resident // 2)
    low = (min_chunk // BLOCK_N).to(tl.int32)  # the answer lies in [low, high], in blocks
    high = tl.maximum((longest + BLOCK_N - 1) // BLOCK_N, low)
    while low < high:  # halves the range each time; short contexts need no iteration
        middle = (low + high) // 2
        num = _num_items(
            bs, prefix_lens, qo_indptr, first_node, window, middle * BLOCK_N, GROUP, BLOCK_M, SPAN, CAUSAL, BLOCK_BS
        )
        low = tl.where(num > most, middle + 1, low)
        high = tl.where(num > most, high, middle)
    chunk = high * BLOCK_N

    w = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    items_before = tl.zeros([], tl.int32)
    partials_before = tl.zeros([], tl.int32)
    merges_before = tl.zeros([], tl.int32)
    tl.store(items + w * ITEM, -1, mask=w < num_items)
    tl.store(merges + w * MERGE, -1, mask=w < num_merges)
    tl.debug_barrier()  # the rows below overwrite what other threads have just cleared
    for base in range(0, bs, BLOCK_BS):
        request = base + lanes
        tiles, num_keys, q_len, kv_end = _tiles(
            request, bs, prefix_lens, qo_indptr, first_node, window, GROUP, BLOCK_M, SPAN, CAUSAL
        )
        n, size = _splits(num_keys, chunk, BLOCK_N)
        n = tl.where(tiles > 0, n, 0)
        num = tiles * n
        num_partial = tl.where(n > 1, num, 0)
        num_merge = tl.where(n > 1, tiles, 0)
        first_item = items_before + tl.cumsum(num) - num
        first_partial = partials_before + tl.cumsum(num_partial) - num_partial
        first_merge = merges_before + tl.cumsum(num_merge) - num_merge

        owns = (w[:, None] >= first_item) & (w[:, None] < first_item + num)  # [BLOCK_W, BLOCK_BS], at most one a row
        own_n = tl.sum(tl.where(owns, n, 0), 1)
        index = w - tl.sum(tl.where(owns, first_item, 0), 1)
        tile = index // tl.maximum(own_n, 1)
        split = index - tile * own_n
        own_size = tl.sum(tl.where(owns, size, 0), 1)
        partial = tl.where(own_n > 1, tl.sum(tl.where(owns, first_partial, 0), 1) + index, -1)
        # The last tiles of a causal prefill see the most keys: they go first.
        m_block = tl.sum(tl.where(owns, tiles, 0), 1) - 1 - tile
        tile_end = tl.sum(tl.where(owns, kv_end, 0), 1)
        nearest = tile_end - tl.sum(tl.where(owns, q_len, 0), 1)  # position of the first query, or of a tree's root
        if CAUSAL:
            tile_end = tl.minimum(tile_end, nearest + ((m_block + 1) * BLOCK_M - 1) // GROUP + 1)
            nearest += m_block * BLOCK_M // GROUP
        else:
            nearest -= first_node
        begin = tl.where(window > 0, tl.maximum(nearest - window + 1, 0), 0) + split * own_size
        row, is_mine = items + w * ITEM, tl.sum(owns.to(tl.int32), 1) > 0
        tl.store(row, tl.sum(tl.where(owns, request, 0), 1), mask=is_mine)
        tl.store(row + 1, m_block, mask=is_mine)
        tl.store(row + 2, begin, mask=is_mine)
        tl.store(row + 3, tl.minimum(begin + own_size, tile_end), mask=is_mine)
        tl.store(row + 4, partial, mask=is_mine)
        tl.store(row + 5, (split == 0).to(tl.int32), mask=is_mine)

        owns = (w[:, None] >= first_merge) & (w[:, None] < first_merge + num_merge)
        own_n = tl.sum(tl.where(owns, n, 0), 1)
        index = w - tl.sum(tl.where(owns, first_merge, 0), 1)
        row, is_mine = merges + w * MERGE, own_n > 0
        tl.store(row, tl.sum(tl.where(owns, request, 0), 1), mask=is_mine)
        tl.store(row + 1, tl.sum(tl.where(owns, tiles, 0), 1) - 1 - index, mask=is_mine)
        tl.store(row + 2, tl.sum(tl.where(owns, first_partial, 0), 1) + index * own_n, mask=is_mine)
        tl.store(row + 3, own_n, mask=is_mine)

        items_before += tl.sum(num)
        partials_before += tl.sum(num_partial)
        merges_before += tl.sum(num_merge)


_launch = CachedLaunch(_plan_kernel)
_launch_few = CachedLaunch(_plan_kernel, num_warps=1)  # for up to FEW requests: one warp needs no barriers
FEW = 8


@dataclass(frozen=True)
class SplitPlan:
    """items [num_items, ITEM_WIDTH] and merges [num_merges, MERGE_WIDTH], int32; num_partials bounds the partials."""

    items: torch.Tensor
    merges: torch.Tensor
    num_partials: int


def tile_span(group: int, block_m: int) -> int:
    """Return the most queries that a tile of `block_m` rows covers, wholly or in part; `group` rows per query."""
    return block_m // group if block_m % group == 0 else (block_m + group - 2) // group + 1


def most_keys(context: int, tail_len: int, window: int, group: int, block_m: int, is_causal: bool) -> int:
    """Return an upper bound of one tile's keys if no request has more than `context`, tail_len of them new."""
    if not window:
        return context
    return min(context, window - 1 + (min(tail_len, tile_span(group, block_m)) if is_causal else tail_len))


def split_plan(
    prefix_lens: torch.Tensor,
    qo_indptr: torch.Tensor,
    *,
    first_node: int,
    window: int,
    num_tiles: int,
    resident: int,
    group: int,
    block_m: int,
    block_n: int,
    min_chunk: int,
    is_causal: bool,
    most: int | None = None,
    is_small: bool = False,
) -> SplitPlan:
    """Plan one forward. prefix_lens [bs] int64, qo_indptr [bs+1] int32.

    is_causal: query i of a request is at position prefix + first_node + i and sees everything before it; otherwise
    queries are tree nodes, at the end of the prefix or later.
    num_tiles: host upper bound of the tiles; resident: items that run at once per KV head; window: 0 for none;
    min_chunk: the shortest chunk, rounded up to whole blocks; most: host upper bound of a tile's keys, if there is one:
    where a chunk holds as many, nothing is split, and there is no room for it. is_small: the kernel that is quicker
    for up to FEW requests, and right for more. Twin: `split_plan_reference`.
    """
    device = prefix_lens.device
    min_chunk = triton.cdiv(min_chunk, block_n) * block_n
    may_split = most is None or most > min_chunk
    num_merges = min(num_tiles, resident) if may_split else 0
    num_items = max(resident, num_tiles + resident // 2) if may_split else num_tiles
    items = torch.empty(num_items, ITEM_WIDTH, dtype=torch.int32, device=device)
    merges = torch.empty(num_merges, MERGE_WIDTH, dtype=torch.int32, device=device)
    block_w, launch = 32, _launch_few if is_small else _launch
    launch(
        (triton.cdiv(num_items, block_w),),
        prefix_lens,
        qo_indptr,
        items,
        merges,
        prefix_lens.shape[0],
        num_items,
        num_merges,
        first_node,
        window,
        resident,
        min_chunk,
        GROUP=group,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        SPAN=tile_span(group, block_m),
        CAUSAL=is_causal,
        BLOCK_BS=FEW if is_small else 64,
        BLOCK_W=block_w,
        ITEM=ITEM_WIDTH,
        MERGE=MERGE_WIDTH,
    )
    return SplitPlan(items, merges, min(2 * resident, num_items) if may_split else 0)
