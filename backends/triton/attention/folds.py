"""Folds the partial states of split tiles in a kernel of its own, for wide states: folding all rows of a tile in one
program would take longer than attention in many. The arithmetic is that of `partials.fold_rows`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from specdec.backends.triton.attention.partials import Partials, fold_rows
from specdec.backends.triton.attention.plan import ITEM_WIDTH, SplitPlan
from specdec.backends.triton.launch.relaunch import INTERPRETED, Relaunch, wait_for_others
from specdec.core.batch import AttentionMetadata

ROWS = 2  # per program
AHEAD = 1 if INTERPRETED else 8  # states loaded at once
NAMES = ("NUM_KV_HEADS", "GROUP", "V_DIM", "BLOCK_V", "BLOCK_M", "HAS_SINKS", "PDL")


@triton.jit(do_not_specialize_on_alignment=["qo_indptr", "sinks"])
def _fold_kernel(
    q,
    out,
    k_pool,
    v_pool,
    sinks,
    items,
    num_items,
    qo_indptr,
    partial_acc,
    partial_stats,
    out_stride_t,
    out_stride_h,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
    ROWS: tl.constexpr,
    AHEAD: tl.constexpr,
    ITEM: tl.constexpr,
):
    """Fold ROWS rows of a tile, in programs of its first item. q, k_pool, v_pool: unused, for a `Relaunch` like the
    attention kernel's."""
    wait_for_others(PDL, False)
    number = tl.program_id(1)
    if number >= tl.load(num_items):
        return
    item = items + number * ITEM
    request, m_block, first_state = tl.load(item), tl.load(item + 1), tl.load(item + 4)
    num_states, first_item = tl.load(item + 6), tl.load(item + 7)
    if (num_states == 0) | (first_item != number):
        return
    kv_head, first = tl.program_id(0), tl.program_id(2) * ROWS
    q_start = tl.load(qo_indptr + request)
    q_len = tl.load(qo_indptr + request + 1) - q_start
    at = (first_state.to(tl.int64) * NUM_KV_HEADS + kv_head) * BLOCK_M + first
    first_row = m_block * BLOCK_M + first
    fold_rows(
        out, sinks, partial_acc, partial_stats, at, num_states, first_row, tl.minimum(q_len * GROUP - first_row, ROWS),
        q_start, kv_head, tl.arange(0, BLOCK_V), out_stride_t, out_stride_h, GROUP, V_DIM, BLOCK_V, HAS_SINKS,
        NUM_KV_HEADS * BLOCK_M, ROWS, AHEAD,
    )  # fmt: skip


def fold_apart(
    tensors: Sequence[torch.Tensor | None],
    out_strides: Sequence[int],
    metadata: AttentionMetadata,
    plan: SplitPlan,
    partials: Partials,
    constants: Mapping[str, Any],
) -> Relaunch | None:
    """Launch the fold after the attention kernel. tensors: its q, out, K, V and sinks; constants: its constants.

    Returns the launch, to repeat it; None in the interpreter.
    """
    own = {name: constants[name] for name in NAMES} | {"ROWS": ROWS, "AHEAD": AHEAD, "ITEM": ITEM_WIDTH}
    args = (*tensors, plan.items, plan.counts, metadata.qo_indptr, *partials, *out_strides)
    grid = (own["NUM_KV_HEADS"], plan.items.shape[0], own["BLOCK_M"] // ROWS)
    compiled = _fold_kernel[grid](*args, **own, num_warps=4, launch_pdl=own["PDL"])
    return None if compiled is None else Relaunch(_fold_kernel, compiled, grid, args, own)
