"""Merges the splits of a tile: partial attention outputs weighted by their softmax mass, as in flash-decoding."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from specdec.backends.base import LayerSpec
from specdec.backends.triton.attention.plan import MERGE_WIDTH
from specdec.backends.triton.launch.relaunch import INTERPRETED, Relaunch, follows_early


@triton.jit
def _merge_kernel(
    out,
    partial_out,
    partial_lse,
    merges,
    qo_indptr,
    out_stride_t,
    out_stride_h,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,
    MERGE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write a row of one split tile: the partials weighted by their share of the mass."""
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
    in_tile = tl.program_id(0)
    row = m_block * BLOCK_M + in_tile
    if row // GROUP >= q_len:
        return
    dv = tl.arange(0, BLOCK_V)
    m = tl.full([], float("-inf"), tl.float32)
    mass = tl.zeros([], tl.float32)
    acc = tl.zeros([BLOCK_V], tl.float32)
    for base in range(0, num_splits, BLOCK_S):
        split = base + tl.arange(0, BLOCK_S)
        at = ((first + split).to(tl.int64) * NUM_KV_HEADS + kv_head) * BLOCK_M + in_tile
        is_here = split < num_splits
        lse = tl.load(partial_lse + at, mask=is_here, other=float("-inf"))
        m_new = tl.maximum(m, tl.max(lse, 0))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        weight = tl.exp2(lse - m_safe)
        values = tl.load(partial_out + at[:, None] * V_DIM + dv, mask=is_here[:, None] & (dv < V_DIM), other=0.0)
        shrink = tl.exp2(m - m_safe)
        acc = acc * shrink + tl.sum(weight[:, None] * values, 0)
        mass = mass * shrink + tl.sum(weight, 0)
        m = m_new
    result = acc / tl.where(mass == 0, 1.0, mass)
    token, head = (q_start + row // GROUP).to(tl.int64), kv_head * GROUP + row % GROUP
    out_at = out + token * out_stride_t + head * out_stride_h + dv
    tl.store(out_at, result.to(out.dtype.element_ty), mask=dv < V_DIM)


def merge(
    out: torch.Tensor,
    partials: tuple[torch.Tensor, torch.Tensor],
    merges: torch.Tensor,
    qo_indptr: torch.Tensor,
    layer: LayerSpec,
    block_m: int,
) -> Relaunch | None:
    """Write the rows of split tiles from their partials; see `attend`. Twin: `merge_reference`.

    Returns the launch, to repeat with another `out`; None in the interpreter.
    """
    grid = (block_m, layer.num_kv_heads, merges.shape[0])
    args = (out, *partials, merges, qo_indptr, out.stride(0), out.stride(1))
    constants = dict(
        NUM_KV_HEADS=layer.num_kv_heads,
        GROUP=layer.num_heads // layer.num_kv_heads,
        V_DIM=layer.v_dim,
        BLOCK_V=padded_dim(layer.v_dim),
        BLOCK_M=block_m,
        BLOCK_S=8,
        MERGE=MERGE_WIDTH,
        PDL=follows_early(),
    )
    compiled = _merge_kernel[grid](*args, **constants, launch_pdl=constants["PDL"], num_warps=1)
    return None if INTERPRETED else Relaunch(_merge_kernel, compiled, grid, args, constants)


def merge_reference(partial_out: torch.Tensor, partial_lse: torch.Tensor) -> torch.Tensor:
    """Return the attention over all keys from partials [num_splits, ..., v_dim] and log2-sum-exp [num_splits, ...]."""
    weight = (partial_lse * 0.6931471805599453).softmax(0)
    return (weight.unsqueeze(-1) * partial_out).sum(0)


def padded_dim(dim: int) -> int:
    """Return the columns of a tile that holds `dim`: a power of two that `tl.dot` accepts."""
    return max(16, triton.next_power_of_2(dim))
