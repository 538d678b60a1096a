"""Split-KV plan: divides the work of one attention forward into items, on the device.

A tile is BLOCK_M query rows (query x head of one KV group) of one request, and the keys that any of them sees: up to
the last query's own if the forward is causal, up to the last whole block of the prefix for a tree, and from the block
in which the first query's window begins. Keys lie in chunks, whose length depends on the position only. An item is a
tile or one chunk of it: tiles are split that have more than their share of all chunks, for which the GPU would wait.
The host knows only upper bounds of the items, so a captured grid fits any lengths; a program takes several items.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from specdec.backends.triton.attention.chunks import chunk_at, chunk_begin, first_key, num_chunks, tile_span
from specdec.backends.triton.launch.relaunch import CachedLaunch

# Columns of the tables (int32).
ITEM_WIDTH = 8  # request, m_block, kv_begin, kv_end, first partial (-1: none, the item is a whole tile), 0, 0, 0
MERGE_WIDTH = (
    4  # request (-1: none), m_block, first partial, their number; of a tree one a request, with those of a tile
)
SCRATCH_BYTES = 128 << 20  # of partials, if one request needs no more


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
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    SPAN: tl.constexpr,
    TREE: tl.constexpr,
):
    """Return for requests `i`: tiles, an upper bound of a tile's chunks, the position of the first query (of a tree's
    root) and the end of keys; no tiles past the batch. SPAN: the most queries of a tile."""
    is_request = i < bs
    prefix = tl.load(prefix_lens + i, mask=is_request, other=0).to(tl.int32)
    start = tl.load(qo_indptr + i, mask=is_request, other=0)
    q_len = tl.load(qo_indptr + i + 1, mask=is_request, other=0) - start
    nearest, end = prefix + first_node, prefix + first_node + q_len
    if TREE:
        nearest, end = prefix, prefix // BLOCK_N * BLOCK_N
    num = num_chunks(first_key(nearest, window, BLOCK_N), end, CHUNK)
    if not TREE:
        most = window + SPAN + BLOCK_N - 2  # keys of a tile with a window
        num = tl.where(window > 0, tl.minimum(num, (most + CHUNK - 2) // CHUNK + 1), num)
    return (q_len * GROUP + BLOCK_M - 1) // BLOCK_M, num, nearest, end


@triton.jit(
    do_not_specialize=["bs", "num_merges", "first_node", "window", "resident", "max_partials"],
    do_not_specialize_on_alignment=["prefix_lens", "qo_indptr"],
)
def _plan_kernel(
    prefix_lens,
    qo_indptr,
    items,
    merges,
    num_items,
    bs,
    num_merges,
    first_node,
    window,
    resident,
    max_partials,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    SPAN: tl.constexpr,
    TREE: tl.constexpr,
    BLOCK_BS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    ITEM: tl.constexpr,
    MERGE: tl.constexpr,
):
    lanes = tl.arange(0, BLOCK_BS)
    all_chunks = tl.zeros([], tl.int32)
    for base in range(0, bs, BLOCK_BS):
        tiles, num, _nearest, _end = _tiles(
            base + lanes, bs, prefix_lens, qo_indptr, first_node, window, GROUP, BLOCK_M, BLOCK_N, CHUNK, SPAN, TREE
        )
        all_chunks += tl.sum(tiles * num)
    most = tl.maximum(all_chunks * 3 // (2 * resident), 1).to(tl.int32)  # chunks of a tile that is not split
    num_split = max_partials + 1
    while num_split > max_partials:
        num_split = tl.zeros([], tl.int32)
        for base in range(0, bs, BLOCK_BS):
            tiles, num, _nearest, _end = _tiles(
                base + lanes, bs, prefix_lens, qo_indptr, first_node, window, GROUP, BLOCK_M, BLOCK_N, CHUNK, SPAN, TREE
            )
            num_split += tl.sum(tl.where(num > most, tiles * num, 0))
        most = tl.where(num_split > max_partials, 2 * most, most)

    w = tl.program_id(0) * BLOCK_W + tl.arange(0, BLOCK_W)
    items_before = tl.zeros([], tl.int32)
    partials_before = tl.zeros([], tl.int32)
    merges_before = tl.zeros([], tl.int32)
    tl.store(merges + w * MERGE, -1, mask=w < num_merges)
    tl.debug_barrier()  # the rows below overwrite what other threads have just cleared
    for base in range(0, bs, BLOCK_BS):
        request = base + lanes
        tiles, num, nearest, end = _tiles(
            request, bs, prefix_lens, qo_indptr, first_node, window, GROUP, BLOCK_M, BLOCK_N, CHUNK, SPAN, TREE
        )
        is_split = num > most
        pieces = tl.where(is_split, num, 1)
        if TREE:
            pieces = tl.minimum(pieces, num)
            states = tl.where(is_split, num, tl.minimum(num, 2))  # of a whole tile: all chunks but the last, and that
            num_merge = (tiles > 0).to(tl.int32)
        else:
            states = tl.where(is_split, num, 0)
            num_merge = tl.where(is_split, tiles, 0)
        num_own = tiles * pieces
        first_item = items_before + tl.cumsum(num_own) - num_own
        first_partial = partials_before + tl.cumsum(tiles * states) - tiles * states
        first_merge = merges_before + tl.cumsum(num_merge) - num_merge

        owns = (w[:, None] >= first_item) & (
            w[:, None] < first_item + num_own
        )  # [BLOCK_W, BLOCK_BS], one a row at most
        own_pieces, own_states = tl.sum(tl.where(owns, pieces, 0), 1), tl.sum(tl.where(owns, states, 0), 1)
        index = w - tl.sum(tl.where(owns, first_item, 0), 1)
        tile = index // tl.maximum(own_pieces, 1)
        piece = index - tile * own_pieces
        own_partial = tl.sum(tl.where(owns, first_partial, 0), 1)
        # The last tiles of a causal prefill see the most keys: they go first.
        m_block = tl.sum(tl.where(owns, tiles, 0), 1) - 1 - tile
        kv_begin, kv_end = _keys_of(
            m_block, tl.sum(tl.where(owns, nearest, 0), 1), tl.sum(tl.where(owns, end, 0), 1), window,
            GROUP, BLOCK_M, BLOCK_N, TREE,
        )  # fmt: skip
        own_split = tl.sum(tl.where(owns, is_split.to(tl.int32), 0), 1) > 0
        chunk = chunk_at(kv_begin, CHUNK) + piece
        begin, next_begin = chunk_begin(chunk, CHUNK), chunk_begin(chunk + 1, CHUNK)
        row, is_mine = items + w * ITEM, tl.sum(owns.to(tl.int32), 1) > 0
        tl.store(row, tl.sum(tl.where(owns, request, 0), 1), mask=is_mine)
        tl.store(row + 1, m_block, mask=is_mine)
        tl.store(row + 2, tl.where(own_split, tl.maximum(kv_begin, begin), kv_begin), mask=is_mine)
        tl.store(row + 3, tl.where(own_split, tl.minimum(kv_end, next_begin), kv_end), mask=is_mine)
        # Partials of a request lie in the order of its tiles.
        partial = own_partial + m_block * own_states + piece
        tl.store(row + 4, tl.where(own_states > 0, partial, -1), mask=is_mine)

        owns = (w[:, None] >= first_merge) & (w[:, None] < first_merge + num_merge)
        index = w - tl.sum(tl.where(owns, first_merge, 0), 1)
        own_states = tl.sum(tl.where(owns, states, 0), 1)
        own_partial = tl.sum(tl.where(owns, first_partial, 0), 1)
        row, is_mine = merges + w * MERGE, tl.sum(owns.to(tl.int32), 1) > 0
        tl.store(row, tl.sum(tl.where(owns, request, 0), 1), mask=is_mine)
        tl.store(row + 1, index, mask=is_mine)
        tl.store(row + 2, own_partial + index * own_states, mask=is_mine)
        if not TREE:
            kv_begin, kv_end = _keys_of(
                index, tl.sum(tl.where(owns, nearest, 0), 1), tl.sum(tl.where(owns, end, 0), 1), window,
                GROUP, BLOCK_M, BLOCK_N, TREE,
            )  # fmt: skip
            own_states = num_chunks(kv_begin, kv_end, CHUNK)
        tl.store(row + 3, own_states, mask=is_mine)

        items_before += tl.sum(num_own)
        partials_before += tl.sum(tiles * states)
        merges_before += tl.sum(num_merge)
    if tl.program_id(0) == 0:
        tl.store(num_items, items_before)


@triton.jit
def _keys_of(
    m_block,
    nearest,
    end,
    window,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TREE: tl.constexpr,
):
    """Return the half-open range of keys of tiles, from the first query and the end of keys of their requests."""
    if not TREE:
        end = tl.minimum(end, nearest + ((m_block + 1) * BLOCK_M - 1) // GROUP + 1)
        nearest += m_block * BLOCK_M // GROUP
    return first_key(nearest, window, BLOCK_N), end


_launch = CachedLaunch(_plan_kernel)
_launch_few = CachedLaunch(_plan_kernel, num_warps=1)  # for up to FEW requests: one warp needs no barriers
FEW = 8


@dataclass(frozen=True)
class SplitPlan:
    """items [n, ITEM_WIDTH], of which the first counts[0] are used, and merges [n, MERGE_WIDTH], int32.

    num_partials bounds the partials; num_programs: of the attention kernel, a KV head.
    """

    items: torch.Tensor
    merges: torch.Tensor
    counts: torch.Tensor
    num_partials: int
    num_programs: int


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
    chunk: int,
    is_tree: bool,
    max_chunks: int,
    max_partials: int,
    is_small: bool = False,
) -> SplitPlan:
    """Plan one forward. prefix_lens [bs] int64, qo_indptr [bs+1] int32.

    is_tree: queries are nodes, and keys end with the last whole block of the prefix; otherwise query i of a request is
    at position prefix + first_node + i and sees everything before it.
    num_tiles, max_chunks: host upper bounds of the tiles and of a tile's chunks; resident: items that run at once per
    KV head; window: 0 for none; max_partials: of split tiles, those with the most chunks stay whole if there would be
    more. is_small: the kernel that is quicker for up to FEW requests, and right for more.
    Twin: `split_plan_reference`.
    """
    device, bs = prefix_lens.device, prefix_lens.shape[0]
    may_split = max_chunks > 1
    # A split tile has over 3/2 of the chunks of one that is resident, so these are all that there can be.
    num_split = min(num_tiles, resident) if may_split else 0
    max_partials = min(max_partials, num_split * max_chunks)
    num_items = num_tiles + max_partials
    num_merges = bs if is_tree else num_split
    items = torch.empty(num_items, ITEM_WIDTH, dtype=torch.int32, device=device)
    merges = torch.empty(num_merges, MERGE_WIDTH, dtype=torch.int32, device=device)
    counts = torch.empty(1, dtype=torch.int32, device=device)
    block_w, launch = 32, _launch_few if is_small else _launch
    launch(
        (triton.cdiv(max(num_items, num_merges), block_w),),
        prefix_lens,
        qo_indptr,
        items,
        merges,
        counts,
        bs,
        num_merges,
        first_node,
        window,
        resident,
        max_partials,
        GROUP=group,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        CHUNK=chunk,
        SPAN=tile_span(group, block_m),
        TREE=is_tree,
        BLOCK_BS=FEW if is_small else 64,
        BLOCK_W=block_w,
        ITEM=ITEM_WIDTH,
        MERGE=MERGE_WIDTH,
    )
    num_partials = max_partials + (min(2, max_chunks) * num_tiles if is_tree else 0)
    return SplitPlan(items, merges, counts, num_partials, min(num_items, max(num_tiles, 2 * resident)))
