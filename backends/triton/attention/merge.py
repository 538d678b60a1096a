"""Merges the chunks of a tile whose keys are split: their states are folded in order, as `kernel` does in registers."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from specdec.backends.base import LayerSpec
from specdec.backends.triton.attention.blocks import fold, load_state, result_of
from specdec.backends.triton.attention.plan import MERGE_WIDTH
from specdec.backends.triton.launch.relaunch import INTERPRETED, Relaunch, follows_early

AHEAD = 1 if INTERPRETED else 16  # states that are loaded at once


class Partials(NamedTuple):
    """Scratch for states, fp32: acc [num_partials, Hkv, block_m, v_dim] and stats [num_partials, Hkv, block_m, 2],
    maximum and mass."""

    acc: torch.Tensor
    stats: torch.Tensor

    @classmethod
    def empty(cls, num: int, num_kv_heads: int, block_m: int, v_dim: int, device: torch.device) -> "Partials":
        """Return scratch for `num` states a KV head."""
        rows = (num, num_kv_heads, block_m)
        shapes = ((*rows, v_dim), (*rows, 2))
        return cls(*(torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes))


@triton.jit(do_not_specialize_on_alignment=["sinks", "qo_indptr"])
def _merge_kernel(
    out,
    sinks,
    partial_acc,
    partial_stats,
    merges,
    qo_indptr,
    out_stride_t,
    out_stride_h,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    MERGE: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write a row of one split tile."""
    if PDL:
        gdc_wait()
    kv_head = tl.program_id(1)
    entry = merges + tl.program_id(2) * MERGE
    request = tl.load(entry)
    if request < 0:
        return
    m_block, first, num_splits = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
    q_start = tl.load(qo_indptr + request)
    q_len = tl.load(qo_indptr + request + 1) - q_start
    if (m_block * BLOCK_M + tl.program_id(0)) // GROUP >= q_len:
        return
    in_tile = tl.program_id(0) + tl.arange(0, 1)
    row = m_block * BLOCK_M + in_tile
    dv = tl.arange(0, BLOCK_V)
    total = (
        tl.full([1], float("-inf"), tl.float32),
        tl.zeros([1, 1], tl.float32),
        tl.zeros([1, BLOCK_V], tl.float32),
    )
    for base in range(0, num_splits, AHEAD):
        for i in tl.static_range(AHEAD):
            at = ((first + base + i).to(tl.int64) * NUM_KV_HEADS + kv_head) * BLOCK_M + in_tile
            is_there = (in_tile >= 0) & (base + i < num_splits)
            total = fold(total, load_state(partial_acc, partial_stats, at, is_there, dv, V_DIM))
    head = kv_head * GROUP + row % GROUP
    result = result_of(total, sinks, head, head >= 0, HAS_SINKS)
    token = (q_start + row // GROUP).to(tl.int64)
    out_at = out + token[:, None] * out_stride_t + head[:, None] * out_stride_h + dv
    tl.store(out_at, result.to(out.dtype.element_ty), mask=(dv < V_DIM)[None, :])


def merge(
    out: torch.Tensor,
    sinks: torch.Tensor | None,
    partials: Partials,
    merges: torch.Tensor,
    qo_indptr: torch.Tensor,
    layer: LayerSpec,
    block_m: int,
) -> Relaunch | None:
    """Write the rows of split tiles from their partials; see `attend`. Twin: `merge_reference`.

    Returns the launch, to repeat with another `out` and other sinks; None in the interpreter.
    """
    grid = (block_m, layer.num_kv_heads, merges.shape[0])
    args = (out, sinks, *partials, merges, qo_indptr, out.stride(0), out.stride(1))
    constants = dict(
        NUM_KV_HEADS=layer.num_kv_heads,
        GROUP=layer.num_heads // layer.num_kv_heads,
        V_DIM=layer.v_dim,
        BLOCK_V=padded_dim(layer.v_dim),
        BLOCK_M=block_m,
        HAS_SINKS=sinks is not None,
        MERGE=MERGE_WIDTH,
        AHEAD=AHEAD,
        PDL=follows_early(),
    )
    compiled = _merge_kernel[grid](*args, **constants, launch_pdl=constants["PDL"], num_warps=1)
    return None if INTERPRETED else Relaunch(_merge_kernel, compiled, grid, args, constants)


def merge_reference(m: torch.Tensor, mass: torch.Tensor, acc: torch.Tensor) -> torch.Tensor:
    """Return the attention over all keys from the states of chunks: m, mass [n, ...] and acc [n, ..., v_dim]."""
    weight = ((m - m.amax(0)) * 0.6931471805599453).exp()
    return (weight.unsqueeze(-1) * acc).sum(0) / (weight * mass).sum(0).unsqueeze(-1)


def padded_dim(dim: int) -> int:
    """Return the columns of a tile that holds `dim`: a power of two that `tl.dot` accepts."""
    return max(16, triton.next_power_of_2(dim))
