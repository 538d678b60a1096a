"""Attention over the paged KV pool, prefix and tail, in one kernel for every kind of forward.

An online softmax over the items of `plan`: blocks and chunks of keys at fixed absolute positions (see `blocks`); the
heads of one KV group are rows of one tile, so K/V are read once for all of them. Items with a part of their tile's keys
(split-KV) store a state per chunk, and the last one to finish folds the whole tile. The nodes of a tree are ordinary
rows up to the last whole block of the prefix; `tree` continues them over the rest. Twin:
`backends.torch_ref.TorchBackend`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specdec.backends.base import LayerSpec
from specdec.backends.triton.attention.blocks import (
    empty_state,
    fold,
    query_tile,
    result_of,
    slots_of,
    take_block,
    visible_keys,
)
from specdec.backends.triton.attention.chunks import chunk_at, chunk_begin
from specdec.backends.triton.attention.folds import fold_apart
from specdec.backends.triton.attention.partials import Partials, fold_rows, padded_dim, store_state
from specdec.backends.triton.attention.plan import ITEM_WIDTH, SplitPlan
from specdec.backends.triton.attention.tiling import Tiling
from specdec.backends.triton.attention.tree import attend_tails
from specdec.backends.triton.launch.relaunch import INTERPRETED, Relaunch, follows_early, wait_for_others
from specdec.core.batch import AttentionMetadata, ForwardMode

LOG2E = 1.4426950408889634
AHEAD = 16 if INTERPRETED else 64  # rows of states loaded at once


@triton.jit
def _leave(
    total, state, place, is_split, partial_acc, partial_stats, at, is_row, dv, STEP: tl.constexpr, V_DIM: tl.constexpr
):
    """End chunk `place` of a tile: store its state in the pool if the tile is split, else fold it into `total`."""
    if is_split:
        store_state(partial_acc, partial_stats, at + place.to(tl.int64) * STEP, is_row, dv, state, V_DIM)
    else:
        total = fold(total, state)
    return total


@triton.jit
def _walk(
    begin,
    end,
    keys,
    table,
    slots,
    q,
    k_head,
    v_head,
    d,
    dv,
    total,
    state,
    q_pos,
    limit,
    is_row,
    window,
    scales,
    pool,
    NUM_KV_HEADS: tl.constexpr,
    QK_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    CAPPED: tl.constexpr,
    UPCAST: tl.constexpr,
    V_IN_K: tl.constexpr,
):
    """Process the blocks of keys [begin, end), the first with `slots`; where a chunk begins, end the one before.

    keys: the item's range; pool: where it stores states. Slots are loaded one block ahead: only then are loads of K and
    V pipelined.
    """
    n = tl.arange(0, BLOCK_N)
    kv_begin, kv_end = keys
    is_split, first_chunk, partial_acc, partial_stats, at = pool
    for start in range(begin, end, BLOCK_N):
        next_slots = slots_of(table, start + BLOCK_N + n, kv_end)
        chunk = chunk_at(start)
        if (start == chunk_begin(chunk)) & (start > kv_begin):
            total = _leave(
                total, state, chunk - 1 - first_chunk, is_split, partial_acc, partial_stats, at, is_row, dv,
                NUM_KV_HEADS * is_row.shape[0], V_DIM,
            )  # fmt: skip
            state = empty_state(is_row.shape[0], dv.shape[0])
        visible = visible_keys(start + n, q_pos, limit, window, HAS_WINDOW) if MASKED else None
        state = take_block(
            q, k_head, v_head, slots, d, dv, state, visible, scales,
            NUM_KV_HEADS, QK_DIM, V_DIM, MASKED, CAPPED, UPCAST, V_IN_K,
        )  # fmt: skip
        slots = next_slots
    return slots, total, state


# Triton compiles a variant for every alignment of a kernel's pointers; these are views, and need no vector loads.
@triton.jit(
    do_not_specialize=["first_node", "tail_len", "window", "table_stride", "is_new"],
    do_not_specialize_on_alignment=["slot_table", "rows", "qo_indptr", "prefix_lens", "positions", "limits", "sinks"],
)
def _attention_kernel(
    q,
    out,
    k_pool,
    v_pool,
    sinks,
    slot_table,
    rows,
    items,
    arrived,
    num_items,
    qo_indptr,
    prefix_lens,
    positions,
    limits,
    partial_acc,
    partial_stats,
    scale_log2,
    cap_scale,
    first_node,
    tail_len,
    window,
    table_stride,
    q_stride_t,
    q_stride_h,
    out_stride_t,
    out_stride_h,
    is_new,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QK_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_QK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    UPCAST: tl.constexpr,
    V_IN_K: tl.constexpr,
    PDL: tl.constexpr,
    TREE: tl.constexpr,
    FOLD_M: tl.constexpr,
    AHEAD: tl.constexpr,
    ITEM: tl.constexpr,
    LIMITED: tl.constexpr,
    APART: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """is_new: the plan's kernel may still be running. Otherwise a layer of the same kind has used this plan before, so
    programs read it, and the slots of their keys, before they wait for the K/V of this layer.

    SPLITS: the plan may split tiles. Without the code for that, a program of 64 rows takes 84 KB of shared memory
    instead of 117 (heads of 128, 16 bits), so two fit on a multiprocessor.
    """
    if PDL:
        if TREE or APART:  # otherwise the next kernel may be any: it starts after this one has ended
            gdc_launch_dependents()
        if is_new:
            gdc_wait()
    item, num_used = items + tl.program_id(1) * ITEM, tl.load(num_items)
    request, m_block, kv_begin, kv_end = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    first_state, chunks_before = tl.load(item + 4), tl.load(item + 5)
    num_states, first_item = tl.load(item + 6), tl.load(item + 7)
    if (tl.program_id(1) >= num_used) | (kv_begin >= kv_end):
        wait_for_others(PDL, False)  # this kernel must not end before those in front of it
        return
    kv_head = tl.program_id(0)
    q_start = tl.load(qo_indptr + request)
    q_len = tl.load(qo_indptr + request + 1) - q_start
    prefix = tl.load(prefix_lens + request).to(tl.int32)
    table = slot_table + tl.load(rows + request) * table_stride
    slots = slots_of(table, kv_begin + tl.arange(0, BLOCK_N), kv_end)
    k_head, v_head = k_pool + kv_head * QK_DIM, v_pool + kv_head * V_DIM
    d, dv = tl.arange(0, BLOCK_QK), tl.arange(0, BLOCK_V)
    scales = (scale_log2, cap_scale)

    in_tile = tl.arange(0, BLOCK_M)
    row = m_block * BLOCK_M + in_tile
    query = row // GROUP  # of the request
    head = kv_head * GROUP + row % GROUP
    is_row = query < q_len
    token = (q_start + query).to(tl.int64)
    wait_for_others(PDL, False)
    q_tile = query_tile(q + token * q_stride_t + head * q_stride_h, d, dv, is_row, QK_DIM, V_DIM, V_IN_K)

    # Keys of [full_begin, masked_from), in whole blocks, are seen by all rows and need no mask.
    if TREE:
        q_pos = tl.load(positions + token, mask=is_row, other=0).to(tl.int32) if HAS_WINDOW else row
        full_end, last_position = kv_end, prefix + tail_len - 1
    else:
        q_pos = prefix + first_node + query
        first, last = m_block * BLOCK_M // GROUP, ((m_block + 1) * BLOCK_M - 1) // GROUP
        full_end, last_position = prefix + first_node + first + 1, prefix + first_node + tl.minimum(last, q_len - 1)
    limit = q_pos
    if LIMITED:
        limit = tl.load(limits + token, mask=is_row, other=0).to(tl.int32)
    full_begin = kv_begin
    if HAS_WINDOW:
        num_near = tl.maximum(last_position - window + 1 - kv_begin, 0)  # keys outside the last row's window
        full_begin += (num_near + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    num_full = tl.maximum(tl.minimum(kv_end, full_end) - full_begin, 0) // BLOCK_N
    masked_from = full_begin + num_full * BLOCK_N

    STEP: tl.constexpr = NUM_KV_HEADS * BLOCK_M  # rows from a chunk's states to the next one's
    at_tile = (first_state.to(tl.int64) * NUM_KV_HEADS + kv_head) * BLOCK_M
    at, first_chunk = at_tile + in_tile, chunk_at(kv_begin) - chunks_before
    is_split = num_states > 0 if SPLITS else False
    pool, keys = (is_split, first_chunk, partial_acc, partial_stats, at), (kv_begin, kv_end)
    total, state = empty_state(BLOCK_M, BLOCK_V), empty_state(BLOCK_M, BLOCK_V)
    if HAS_WINDOW:
        slots, total, state = _walk(
            kv_begin, tl.minimum(full_begin, kv_end), keys, table, slots, q_tile, k_head, v_head, d, dv, total, state,
            q_pos, limit, is_row, window, scales, pool,
            NUM_KV_HEADS, QK_DIM, V_DIM, BLOCK_N, HAS_WINDOW, True, CAPPED, UPCAST, V_IN_K,
        )  # fmt: skip
    slots, total, state = _walk(
        full_begin, masked_from, keys, table, slots, q_tile, k_head, v_head, d, dv, total, state, q_pos, limit, is_row,
        window, scales, pool, NUM_KV_HEADS, QK_DIM, V_DIM, BLOCK_N, HAS_WINDOW, False, CAPPED, UPCAST, V_IN_K,
    )  # fmt: skip
    if not TREE:
        slots, total, state = _walk(
            masked_from, kv_end, keys, table, slots, q_tile, k_head, v_head, d, dv, total, state, q_pos, limit, is_row,
            window, scales, pool, NUM_KV_HEADS, QK_DIM, V_DIM, BLOCK_N, HAS_WINDOW, True, CAPPED, UPCAST, V_IN_K,
        )  # fmt: skip

    place = chunk_at(kv_end - 1) - first_chunk
    if TREE:
        if not is_split:  # the chunks before the last as one, then the last one by itself
            if place > 0:
                store_state(partial_acc, partial_stats, at, is_row, dv, total, V_DIM)
            place = tl.minimum(place, 1)
        store_state(partial_acc, partial_stats, at + place.to(tl.int64) * STEP, is_row, dv, state, V_DIM)
    elif is_split:
        store_state(partial_acc, partial_stats, at + place.to(tl.int64) * STEP, is_row, dv, state, V_DIM)
        if not APART:
            # Barrier and release make this program's states visible to the last one; the acquire shows it all others'.
            tl.debug_barrier()
            counter = arrived + first_item * NUM_KV_HEADS + kv_head
            own = place + 1 - chunks_before
            if tl.atomic_add(counter, own, sem="acq_rel") + own == num_states:
                tl.store(counter, 0)  # for the next layer
                fold_rows(
                    out, sinks, partial_acc, partial_stats, at_tile, num_states, m_block * BLOCK_M,
                    tl.minimum(q_len * GROUP - m_block * BLOCK_M, BLOCK_M), q_start, kv_head, dv, out_stride_t,
                    out_stride_h, GROUP, V_DIM, BLOCK_V, HAS_SINKS, STEP, FOLD_M, AHEAD,
                )  # fmt: skip
    else:
        result = result_of(fold(total, state), sinks, head, is_row, HAS_SINKS)
        out_at = out + token[:, None] * out_stride_t + head[:, None] * out_stride_h + dv
        tl.store(out_at, result.to(out.dtype.element_ty), mask=is_row[:, None] & (dv < V_DIM))


def attend(
    q: torch.Tensor,
    out: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    metadata: AttentionMetadata,
    plan: SplitPlan,
    partials: Partials,
    layer: LayerSpec,
    sinks: torch.Tensor | None,
    tiling: Tiling,
) -> tuple[Relaunch, ...] | None:
    """Compute out [T, Hq, v_dim] from q [T, Hq, qk_dim] and the pool k [N, Hkv, qk_dim], v [N, Hkv, v_dim].

    Returns the launches, to repeat for an equal layer of the same forward with its q, out, K, V and sinks; None in the
    interpreter.
    """
    assert layer.scaling > 0, f"scaling {layer.scaling}: maxima are taken before scaling"
    m, is_tree = metadata, metadata.ancestor_bits is not None
    cap = layer.softcap
    scales = (layer.scaling * LOG2E, 0.0) if cap is None else (cap * LOG2E, 2 * LOG2E * layer.scaling / cap)
    pools = (q, out, k_pool, v_pool, sinks, m.slot_table, m.rows)
    strides = (m.slot_table.stride(0), q.stride(0), q.stride(1), out.stride(0), out.stride(1))
    args = (
        *pools,
        plan.items,
        plan.arrived,
        plan.counts,
        m.qo_indptr,
        m.prefix_lens,
        m.positions,
        m.limits,
        *partials,
        *scales,
        m.tail_len - m.q_len,
        m.tail_len,
        layer.window or 0,
        *strides,
        1,  # is_new: the first layer of its kind
    )
    constants = _constants(layer, sinks is not None, tiling, q.dtype)
    is_short = m.mode is not ForwardMode.EXTEND and m.q_len * constants["GROUP"] <= 8  # depends on no live length
    fold_m = 8 if is_short else 16
    is_apart = layer.v_in_k and m.mode is not ForwardMode.EXTEND and not is_tree
    own = {**constants, "TREE": is_tree, "FOLD_M": fold_m, "AHEAD": AHEAD // fold_m}
    own |= {"ITEM": ITEM_WIDTH, "LIMITED": m.limits is not None, "APART": is_apart}
    own |= {"SPLITS": tiling.resident > 0}
    grid = (layer.num_kv_heads, plan.items.shape[0])
    compiled = _attention_kernel[grid](*args, **own, **tiling.options, launch_pdl=own["PDL"])
    second = None
    if is_tree:
        second = attend_tails(pools, strides, scales, m, plan, partials, layer, constants)
    elif is_apart:
        second = fold_apart(pools[:5], strides[3:], m, plan, partials, constants)
    if compiled is None:  # interpreted, or rehearsed
        return None
    first = Relaunch(_attention_kernel, compiled, grid, (*args[:-1], 0), own)
    return (first,) if second is None else (first, second)


def _constants(layer: LayerSpec, has_sinks: bool, tiling: Tiling, dtype: torch.dtype) -> dict[str, Any]:
    """Return the constexprs of layer and tiling that both kernels share, by name."""
    return dict(
        NUM_KV_HEADS=layer.num_kv_heads,
        GROUP=layer.num_heads // layer.num_kv_heads,
        QK_DIM=layer.qk_dim,
        V_DIM=layer.v_dim,
        BLOCK_QK=padded_dim(layer.qk_dim - (layer.v_dim if layer.v_in_k else 0)),
        BLOCK_V=padded_dim(layer.v_dim),
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        HAS_WINDOW=layer.window is not None,
        CAPPED=layer.softcap is not None,
        HAS_SINKS=has_sinks,
        UPCAST=INTERPRETED and dtype == torch.bfloat16,
        V_IN_K=layer.v_in_k,
        PDL=follows_early(),
    )
