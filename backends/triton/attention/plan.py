"""Split-KV plan: divides the work of one attention forward into items, on the device.

A tile is BLOCK_M query rows (query x head of one KV group) of one request, and the keys that any of them sees: up to
the last query's own if the forward is causal, up to the last whole block of the prefix for a tree, and from the block
in which the first query's window begins. An item is a tile, or a piece of it of one or more chunks. A tile is split if
it has at least two shares of keys, where a share is the keys of all tiles over the programs that run at once; then each
of its chunks stores a state, and the last item to finish folds them. The host uses only upper bounds of all this, so a
captured grid fits any lengths.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from specdec.backends.triton.attention.chunks import chunk_at, chunk_begin, first_key
from specdec.backends.triton.launch.relaunch import CachedLaunch
from specdec.backends.triton.launch.sizes import cdiv, next_power_of_2

# Columns of an item (int32): request, m_block, kv_begin, kv_end, the tile's first state in the pool (-1: none), chunks
# of the tile before the item, states of the tile (0: the item is a whole tile), the tile's first item.
ITEM_WIDTH = 8
SCRATCH_BYTES = 128 << 20  # limit of the partial states of split tiles
PIECES = 4  # of every tile, written by one program of the plan kernel


@triton.jit
def _requests(base, bs, qo_indptr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_BS: tl.constexpr):
    """Return the number of tiles of each request from `base` on, [BLOCK_BS], and its cumulative sum."""
    i = base + tl.arange(0, BLOCK_BS)
    start = tl.load(qo_indptr + i, mask=i < bs, other=0)
    q_len = tl.load(qo_indptr + i + 1, mask=i < bs, other=0) - start
    tiles = (q_len * GROUP + BLOCK_M - 1) // BLOCK_M
    return tiles, tl.cumsum(tiles)


@triton.jit
def _tiles(
    t,
    base,
    bs,
    tiles,
    ends,
    prefix_lens,
    qo_indptr,
    limits,
    first_node,
    window,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TREE: tl.constexpr,
    LIMITED: tl.constexpr,
):
    """Return, for tiles `t` of the requests from `base` on: request, m_block, begin and end of its keys (equal past the
    last tile), is_tile."""
    is_before = t[:, None] >= ends[None, :]
    request = base + tl.sum(is_before.to(tl.int32), 1)
    index = t - tl.sum(tl.where(is_before, tiles[None, :], 0), 1)
    is_tile = request < bs
    prefix = tl.load(prefix_lens + request, mask=is_tile, other=0).to(tl.int32)
    start = tl.load(qo_indptr + request, mask=is_tile, other=0)
    q_len = tl.load(qo_indptr + request + 1, mask=is_tile, other=0) - start
    if TREE:  # states of a request lie in the order of its tiles
        m_block, nearest, end = index, prefix, prefix // BLOCK_N * BLOCK_N
    else:  # the last tiles of a prefill see the most keys: they go first
        m_block = (q_len * GROUP + BLOCK_M - 1) // BLOCK_M - 1 - index
        nearest = prefix + first_node + m_block * BLOCK_M // GROUP
        last = tl.minimum(q_len - 1, ((m_block + 1) * BLOCK_M - 1) // GROUP)
        end = prefix + first_node + last + 1
        if LIMITED:  # limits ascend, so the last query's is the largest
            end = tl.load(limits + start + last, mask=is_tile & (m_block >= 0), other=0).to(tl.int32) + 1
    begin = first_key(nearest, window, BLOCK_N)
    is_tile = is_tile & (t < tl.max(ends, 0))
    return request, m_block, begin, tl.where(is_tile, tl.maximum(end, begin), begin), is_tile


@triton.jit
def _cut(begin, end, share, TREE: tl.constexpr):
    """Return the chunks of tiles, their items, and the states they store: a tree's unsplit tiles store at most two."""
    chunks = tl.where(begin < end, chunk_at(end - 1) + 1 - chunk_at(begin), 0)
    pieces = tl.minimum((end - begin) // share, chunks)
    whole = tl.minimum(chunks, 2) if TREE else tl.zeros_like(chunks)
    return chunks, tl.where(pieces > 1, pieces, tl.minimum(chunks, 1)), tl.where(pieces > 1, chunks, whole)


@triton.jit
def _piece_begin(piece, pieces, begin, end):
    """Return where pieces begin: at the first chunk boundary at or after their share of the tile's keys."""
    at = begin + piece * (end - begin) // tl.maximum(pieces, 1)
    return tl.where(piece > 0, tl.minimum(chunk_begin(chunk_at(tl.maximum(at - 1, 0)) + 1), end), begin)


@triton.jit(
    do_not_specialize=["bs", "first_node", "window", "resident", "bound", "max_partials"],
    do_not_specialize_on_alignment=["prefix_lens", "qo_indptr", "limits"],
)
def _plan_kernel(
    prefix_lens,
    qo_indptr,
    limits,
    items,
    arrived,
    tree_states,
    num_items,
    bs,
    first_node,
    window,
    resident,
    bound,
    max_partials,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TREE: tl.constexpr,
    BLOCK_BS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ITEM: tl.constexpr,
    PIECES: tl.constexpr,
    LIMITED: tl.constexpr,
):
    """Compute the whole plan in every program, which writes its own PIECES pieces of every tile."""
    lanes = tl.arange(0, BLOCK_T)
    all_keys = tl.zeros([], tl.int32)
    for base in range(0, bs, BLOCK_BS):
        tiles, ends = _requests(base, bs, qo_indptr, GROUP, BLOCK_M, BLOCK_BS)
        for first in range(0, tl.max(ends, 0), BLOCK_T):
            _request, _m_block, begin, end, _is_tile = _tiles(
                first + lanes, base, bs, tiles, ends, prefix_lens, qo_indptr, limits, first_node, window,
                GROUP, BLOCK_M, BLOCK_N, TREE, LIMITED,
            )  # fmt: skip
            all_keys += tl.sum(end - begin)
    share = tl.maximum((all_keys + resident - 1) // resident, 1)
    # If split tiles could store more states than the pool holds, fewer are split.
    num_states = bound
    while num_states > max_partials:
        num_states = tl.zeros([], tl.int32)
        for base in range(0, bs, BLOCK_BS):
            tiles, ends = _requests(base, bs, qo_indptr, GROUP, BLOCK_M, BLOCK_BS)
            for first in range(0, tl.max(ends, 0), BLOCK_T):
                _request, _m_block, begin, end, _is_tile = _tiles(
                    first + lanes, base, bs, tiles, ends, prefix_lens, qo_indptr, limits, first_node, window,
                    GROUP, BLOCK_M, BLOCK_N, TREE, LIMITED,
                )  # fmt: skip
                _chunks, pieces, states = _cut(begin, end, share, TREE)
                num_states += tl.sum(tl.where(pieces > 1, states, 0))
        share = tl.where(num_states > max_partials, 2 * share, share)

    piece = tl.program_id(0) * PIECES + tl.arange(0, PIECES)[None, :]
    is_first = tl.program_id(0) == 0
    head = tl.arange(0, BLOCK_H)[None, :]
    items_before, states_before = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for base in range(0, bs, BLOCK_BS):
        tiles, ends = _requests(base, bs, qo_indptr, GROUP, BLOCK_M, BLOCK_BS)
        for first in range(0, tl.max(ends, 0), BLOCK_T):
            request, m_block, begin, end, is_tile = _tiles(
                first + lanes, base, bs, tiles, ends, prefix_lens, qo_indptr, limits, first_node, window,
                GROUP, BLOCK_M, BLOCK_N, TREE, LIMITED,
            )  # fmt: skip
            _chunks, pieces, states = _cut(begin, end, share, TREE)
            first_item = items_before + tl.cumsum(pieces) - pieces
            first_state = states_before + tl.cumsum(states) - states
            counter = arrived + first_item[:, None] * NUM_KV_HEADS + head
            tl.store(counter, 0, mask=is_first & (pieces > 1)[:, None] & (head < NUM_KV_HEADS))
            if TREE:
                is_states = is_first & is_tile & (m_block == 0)
                tl.store(tree_states + 2 * request, first_state, mask=is_states)
                tl.store(tree_states + 2 * request + 1, states, mask=is_states)

            kv_begin = _piece_begin(piece, pieces[:, None], begin[:, None], end[:, None])
            kv_end = _piece_begin(piece + 1, pieces[:, None], begin[:, None], end[:, None])
            kv_end = tl.where(piece + 1 < pieces[:, None], kv_end, end[:, None])
            chunks_before = tl.where(piece > 0, chunk_at(kv_begin) - chunk_at(begin[:, None]), 0)
            row, is_mine = items + (first_item[:, None] + piece) * ITEM, piece < pieces[:, None]
            tl.store(row, request[:, None], mask=is_mine)
            tl.store(row + 1, m_block[:, None], mask=is_mine)
            tl.store(row + 2, kv_begin, mask=is_mine)
            tl.store(row + 3, kv_end, mask=is_mine)
            tl.store(row + 4, tl.where(states > 0, first_state, -1)[:, None], mask=is_mine)
            tl.store(row + 5, chunks_before, mask=is_mine)
            tl.store(row + 6, tl.where(pieces > 1, states, 0)[:, None], mask=is_mine)
            tl.store(row + 7, first_item[:, None], mask=is_mine)
            items_before += tl.sum(pieces)
            states_before += tl.sum(states)
    tl.store(num_items, items_before, mask=is_first)


_launch = CachedLaunch(_plan_kernel)
_launch_few = CachedLaunch(_plan_kernel, num_warps=1)  # for up to FEW requests: one warp needs no barriers
FEW = 8


@dataclass(frozen=True)
class SplitPlan:
    """The plan as the kernels read it, int32.

    items [n, ITEM_WIDTH], of which the first counts[0] are used; arrived [n, Hkv]: at a split tile's first item, how
    many of its states are stored, 0 between launches; tree_states [bs, 2], for trees: the first state of each request's
    first tile, and the number of states per tile. num_partials bounds the states.
    """

    items: torch.Tensor
    arrived: torch.Tensor
    tree_states: torch.Tensor
    counts: torch.Tensor
    num_partials: int


def split_plan(
    prefix_lens: torch.Tensor,
    qo_indptr: torch.Tensor,
    *,
    first_node: int,
    window: int,
    num_tiles: int,
    resident: int,
    num_kv_heads: int,
    group: int,
    block_m: int,
    block_n: int,
    is_tree: bool,
    max_chunks: int,
    max_partials: int,
    is_small: bool = False,
    limits: torch.Tensor | None = None,
) -> SplitPlan:
    """Plan one forward. prefix_lens [bs] int64, qo_indptr [bs+1] int32.

    is_tree: queries are nodes, and keys end with the last whole block of the prefix; otherwise query i of a request is
    at position prefix + first_node + i and sees everything before it.
    num_tiles, max_chunks: host upper bounds of the tiles and of a tile's chunks; resident: items that run at once per
    KV head; window: 0 for none; max_partials: limit of split tiles' states, fewer tiles are split where it would be
    exceeded. is_small: use the kernel that is faster for up to FEW requests and correct for more. limits: see
    `AttentionMetadata`.
    Twin: `tests.split_plan.split_plan_reference`.
    """
    device, bs = prefix_lens.device, prefix_lens.shape[0]
    # A split tile has at least two shares, so at most resident // 2 tiles are split, into at most `resident` pieces.
    bound = min(num_tiles, resident // 2) * max_chunks if max_chunks > 1 else 0
    max_partials = min(max_partials, bound)
    num_items = num_tiles + resident
    sizes = ((num_items, ITEM_WIDTH), (num_items, num_kv_heads), (bs if is_tree else 0, 2), (1,))
    items, arrived, tree_states, counts = (torch.empty(size, dtype=torch.int32, device=device) for size in sizes)
    launch = _launch_few if is_small else _launch
    launch(
        (cdiv(max(min(resident, max_chunks), 1), PIECES),),
        prefix_lens,
        qo_indptr,
        qo_indptr if limits is None else limits,
        items,
        arrived,
        tree_states,
        counts,
        bs,
        first_node,
        window,
        resident,
        bound,
        max_partials,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        TREE=is_tree,
        BLOCK_BS=FEW if is_small else 64,
        BLOCK_T=2 * FEW if is_small else 64,
        BLOCK_H=next_power_of_2(num_kv_heads),
        ITEM=ITEM_WIDTH,
        PIECES=PIECES,
        LIMITED=limits is not None,
    )
    num_partials = max_partials + (min(2, max_chunks) * num_tiles if is_tree else 0)
    return SplitPlan(items, arrived, tree_states, counts, num_partials)
