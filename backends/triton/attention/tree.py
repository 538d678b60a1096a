"""Attention of a tree's nodes, each as if its path were a chain: the ancestor at depth d is the key of position L + d.

`kernel` has processed the blocks that lie wholly in the prefix, for all nodes at once. Here a program loads the states
of one node, processes the blocks with the rest of the prefix and the node's path, and folds its chunks. Rows of a
block head see each other, so all their paths end with the block's last row.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from specdec.backends.base import LayerSpec
from specdec.backends.triton.attention.blocks import MASS, empty_state, fold, query_tile, result_of, take_block
from specdec.backends.triton.attention.chunks import chunk_at, chunk_begin
from specdec.backends.triton.attention.partials import Partials, fold_chunks, load_state
from specdec.backends.triton.attention.plan import SplitPlan
from specdec.backends.triton.launch.relaunch import INTERPRETED, Relaunch, wait_for_others
from specdec.backends.triton.launch.sizes import cdiv, next_power_of_2
from specdec.core.batch import AttentionMetadata

ROWS = 16  # per program: the smallest M of `tl.dot`
AHEAD = 1 if INTERPRETED else 8  # states loaded at once; at most two of latents, which are wide


@triton.jit(
    do_not_specialize=["q_len", "tail_len", "window", "table_stride", "is_new"],
    do_not_specialize_on_alignment=["slot_table", "rows", "prefix_lens", "positions", "sinks"],
)
def _tails_kernel(
    q,
    out,
    k_pool,
    v_pool,
    sinks,
    slot_table,
    rows,
    path_slots,
    prefix_lens,
    positions,
    tree_states,
    partial_acc,
    partial_stats,
    scale_log2,
    cap_scale,
    q_len,
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
    ROWS: tl.constexpr,
    MEMBERS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Continue one node over the rest of its keys. is_new: as in the first kernel."""
    if PDL:
        if is_new:
            gdc_wait()
    node, request = tl.program_id(0), tl.program_id(2)
    kv_head, part = tl.program_id(1) % NUM_KV_HEADS, tl.program_id(1) // NUM_KV_HEADS
    prefix = tl.load(prefix_lens + request).to(tl.int32)
    table = slot_table + tl.load(rows + request) * table_stride
    first, num = tl.load(tree_states + 2 * request), tl.load(tree_states + 2 * request + 1)
    k_head, v_head = k_pool + kv_head * QK_DIM, v_pool + kv_head * V_DIM
    n, d, dv = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_QK), tl.arange(0, BLOCK_V)
    # Heads of the KV head's group; if there are fewer than ROWS, rows of the tile repeat them.
    member = part * ROWS + tl.arange(0, MEMBERS)
    is_member = member < GROUP
    head_of_row = kv_head * GROUP + part * ROWS + tl.arange(0, ROWS) % MEMBERS
    is_row = head_of_row < kv_head * GROUP + GROUP
    token = request.to(tl.int64) * q_len + node
    path = path_slots + token * tail_len
    end = prefix  # of the node's keys: after its path, which for rows of a block includes the rows after it
    for base in range(0, tail_len, BLOCK_N):
        slots = tl.load(path + base + n, mask=base + n < tail_len, other=0)
        end = tl.maximum(end, prefix + tl.max(tl.where(slots > 0, base + n + 1, 0), 0))
    position = tl.load(positions + token).to(tl.int32)
    wait_for_others(PDL, False)
    q_tile = query_tile(q + token * q_stride_t + head_of_row * q_stride_h, d, dv, is_row, QK_DIM, V_DIM, V_IN_K)

    # The states of the node's rows, one per chunk; the blocks below continue the last one.
    row = node * GROUP + member
    at = ((first + row // BLOCK_M * num).to(tl.int64) * NUM_KV_HEADS + kv_head) * BLOCK_M + row % BLOCK_M
    STEP: tl.constexpr = NUM_KV_HEADS * BLOCK_M
    folded = fold_chunks(partial_acc, partial_stats, at, STEP, num - 1, is_member, dv, V_DIM, BLOCK_V, AHEAD)
    last = load_state(partial_acc, partial_stats, at + (num - 1) * STEP, is_member & (num > 0), dv, V_DIM)
    total, state = _repeat(folded, ROWS), _repeat(last, ROWS)

    for start in range(prefix // BLOCK_N * BLOCK_N, end, BLOCK_N):
        if start == chunk_begin(chunk_at(start)):
            total = fold(total, state)
            state = empty_state(ROWS, BLOCK_V)
        key = tl.minimum(start + n, end - 1)
        in_prefix = tl.load(table + key, mask=key < prefix, other=0)
        in_tail = tl.load(path + key - prefix, mask=key >= prefix, other=0)
        visible = start + n < end
        if HAS_WINDOW:
            visible = visible & (position - key < window)
        visible = visible[None, :] & (head_of_row >= 0)[:, None]
        state = take_block(
            q_tile, k_head, v_head, in_prefix + in_tail, d, dv, state, visible, (scale_log2, cap_scale),
            NUM_KV_HEADS, QK_DIM, V_DIM, True, CAPPED, UPCAST, V_IN_K,
        )  # fmt: skip
    result = result_of(fold(total, state), sinks, head_of_row, is_row, HAS_SINKS)
    out_at = out + token * out_stride_t + head_of_row[:, None] * out_stride_h + dv
    is_first = tl.arange(0, ROWS) < MEMBERS
    tl.store(out_at, result.to(out.dtype.element_ty), mask=(is_row & is_first)[:, None] & (dv < V_DIM))


@triton.jit
def _repeat(state, ROWS: tl.constexpr):
    """Return the state [ROWS, ...] that repeats the rows of `state` [M, ...]."""
    m, mass, acc = state
    TIMES: tl.constexpr = ROWS // m.shape[0]
    V: tl.constexpr = acc.shape[1]
    m = tl.reshape(tl.broadcast_to(m[None, :], [TIMES, m.shape[0]]), [ROWS])
    mass = tl.reshape(tl.broadcast_to(mass[None, :, :], [TIMES, mass.shape[0], 1]), [ROWS, 1])
    acc = tl.reshape(tl.broadcast_to(acc[None, :, :], [TIMES, acc.shape[0], V]), [ROWS, V])
    return m, tl.broadcast_to(mass, [ROWS, MASS]), acc


def attend_tails(
    pools: Sequence[torch.Tensor | None],
    strides: Sequence[int],
    scales: Sequence[float],
    metadata: AttentionMetadata,
    plan: SplitPlan,
    partials: Partials,
    layer: LayerSpec,
    constants: Mapping[str, Any],
) -> Relaunch | None:
    """Launch the second kernel of a forward with trees; pools, strides, scales and constants are those of the first.

    Returns the launch, to repeat it; None in the interpreter.
    """
    m, group = metadata, layer.num_heads // layer.num_kv_heads
    if m.path_slots is None:
        raise ValueError("ancestor_bits without tail_depths: a tree needs both; pass tail_depths")
    args = (
        *pools,
        m.path_slots,
        m.prefix_lens,
        m.positions,
        plan.tree_states,
        *partials,
        *scales,
        m.q_len,
        m.tail_len,
        layer.window or 0,
        *strides,
        1,  # is_new
    )
    members = min(next_power_of_2(group), ROWS)
    num_warps, ahead = (8, min(AHEAD, 2)) if layer.v_in_k else (2, AHEAD)
    own = {**constants, "ROWS": ROWS, "MEMBERS": members, "AHEAD": ahead}
    grid = (m.q_len, layer.num_kv_heads * cdiv(group, ROWS), m.num_reqs)
    compiled = _tails_kernel[grid](*args, **own, num_warps=num_warps, num_stages=1, launch_pdl=own["PDL"])
    return None if INTERPRETED else Relaunch(_tails_kernel, compiled, grid, (*args[:-1], 0), own)
