"""The pool of partial states, which chunks of split tiles and of trees store and others fold."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from specdec.backends.triton.attention.blocks import fold, result_of
from specdec.backends.triton.launch.sizes import next_power_of_2


class Partials(NamedTuple):
    """Scratch, fp32: acc [num_partials, Hkv, block_m, v_dim] and maximum and mass [num_partials, Hkv, block_m, 2]."""

    acc: torch.Tensor
    stats: torch.Tensor

    @classmethod
    def empty(cls, num: int, num_kv_heads: int, block_m: int, v_dim: int, device: torch.device) -> "Partials":
        """Return scratch for `num` states per KV head."""
        rows = (num, num_kv_heads, block_m)
        shapes = ((*rows, v_dim), (*rows, 2))
        return cls(*(torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes))


def padded_dim(dim: int) -> int:
    """Return the columns of a tile that holds `dim`: a power of two that `tl.dot` accepts."""
    return max(16, next_power_of_2(dim))


@triton.jit
def load_state(partial_acc, partial_stats, at, is_there, dv, V_DIM: tl.constexpr):
    """Load the states [M] of rows `at`, int64; mass [M, 1]. Rows outside `is_there` get the empty state.

    Other programs may have stored them in the same launch, so they are read from L2.
    """
    m = tl.load(partial_stats + 2 * at, mask=is_there, other=float("-inf"), cache_modifier=".cg")
    mass = tl.load(partial_stats + 2 * at + 1, mask=is_there, other=0.0, cache_modifier=".cg")
    acc_at, mask = partial_acc + at[:, None] * V_DIM + dv, is_there[:, None] & (dv < V_DIM)
    return m, mass[:, None], tl.load(acc_at, mask=mask, other=0.0, cache_modifier=".cg")


@triton.jit
def fold_chunks(
    partial_acc,
    partial_stats,
    at,
    step,
    num,
    is_row,
    dv,
    V_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Return the total of `num` chunks, mass [M, 1], whose states are at rows `at`, `at + step`, and so on.

    AHEAD states are loaded at once.
    """
    M: tl.constexpr = at.shape[0]
    total = tl.full([M], float("-inf"), tl.float32), tl.zeros([M, 1], tl.float32), tl.zeros([M, BLOCK_V], tl.float32)
    for base in range(0, num, AHEAD):
        for i in tl.static_range(AHEAD):
            is_there = is_row & (base + i < num)
            total = fold(total, load_state(partial_acc, partial_stats, at + (base + i) * step, is_there, dv, V_DIM))
    return total


@triton.jit
def store_state(partial_acc, partial_stats, at, is_row, dv, state, V_DIM: tl.constexpr):
    """Store the states of rows `at`, int64."""
    m, mass, acc = state
    tl.store(partial_stats + 2 * at, m, mask=is_row)
    tl.store(partial_stats + 2 * at + 1, tl.max(mass, 1), mask=is_row)
    tl.store(partial_acc + at[:, None] * V_DIM + dv, acc, mask=is_row[:, None] & (dv < V_DIM))


@triton.jit
def fold_rows(
    out,
    sinks,
    partial_acc,
    partial_stats,
    at,
    num_states,
    first_row,
    num_rows,
    token,
    kv_head,
    dv,
    out_stride_t,
    out_stride_h,
    GROUP: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    STEP: tl.constexpr,
    FOLD_M: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Fold and write the rows [first_row, first_row + num_rows) of a request; at: the first row's first state.

    token: the request's first; rows are folded FOLD_M at a time.
    """
    for begin in range(0, num_rows, FOLD_M):
        in_tile = begin + tl.arange(0, FOLD_M)
        is_row = in_tile < num_rows
        total = fold_chunks(
            partial_acc, partial_stats, at + in_tile, STEP, num_states, is_row, dv, V_DIM, BLOCK_V, AHEAD
        )
        row = first_row + in_tile
        head = kv_head * GROUP + row % GROUP
        result = result_of(total, sinks, head, is_row, HAS_SINKS)
        out_at = out + (token + row // GROUP).to(tl.int64)[:, None] * out_stride_t + head[:, None] * out_stride_h + dv
        tl.store(out_at, result.to(out.dtype.element_ty), mask=is_row[:, None] & (dv < V_DIM))
