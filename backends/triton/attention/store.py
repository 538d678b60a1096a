"""Writes K and V of new tokens to the pool in one launch, with norms and rotation of q and k if those are passed.

Twin: `KVPool.write` after `backends.rope.prepare`. If there are few tokens, each is split over programs by heads, but
not with norms, whose sums would have another order than in prefills.
"""

from math import gcd

import torch
import triton
import triton.language as tl

from specdec.backends.base import AnyRope, HeadNorms, NormedRope
from specdec.backends.triton.launch.relaunch import EARLY_ROWS, cached_launch, early, is_aligned, wait_for_others
from specdec.backends.triton.launch.sizes import next_power_of_2

PROGRAMS = 8  # per token, at most


@triton.jit
def _normed(x, inverse, weight, inside, offset, NORMS: tl.constexpr, DTYPE: tl.constexpr):
    """Return x over its root mean square, weighted and rounded as `linear.rms_norm` does; NORMS: "late" or "early"."""
    scale = tl.load(weight, mask=inside, other=0.0).to(tl.float32)[None, :]
    x = x * inverse
    if NORMS == "late":
        x = x * (offset + scale)
    else:
        x = x.to(DTYPE).to(tl.float32) * scale
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def _rotated_copy(
    source,
    target,
    cos,
    sin,
    norm,
    eps,
    offset,
    source_stride_h,
    target_stride_h,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    NORMS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Copy one token's [HEADS, DIM], normed unless NORMS is "", with its first ROTARY dims rotated in fp32."""
    HALF: tl.constexpr = ROTARY // 2
    h = tl.arange(0, BLOCK_H)[:, None]
    i, d = tl.arange(0, BLOCK_HALF), ROTARY + tl.arange(0, BLOCK_D)
    is_low, is_rest = (h < HEADS) & (i < HALF), (h < HEADS) & (d < DIM)
    low = tl.load(source + h * source_stride_h + i, mask=is_low, other=0.0).to(tl.float32)
    high = tl.load(source + h * source_stride_h + HALF + i, mask=is_low, other=0.0).to(tl.float32)
    if ROTARY < DIM:
        rest = tl.load(source + h * source_stride_h + d, mask=is_rest, other=0.0).to(tl.float32)
    if NORMS != "":
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1)
        if ROTARY < DIM:
            squares += tl.sum(rest * rest, 1)
        inverse = tl.rsqrt(squares / DIM + eps)[:, None]
        low = _normed(low, inverse, norm + i, i < HALF, offset, NORMS, source.dtype.element_ty)
        high = _normed(high, inverse, norm + HALF + i, i < HALF, offset, NORMS, source.dtype.element_ty)
        if ROTARY < DIM:
            rest = _normed(rest, inverse, norm + d, d < DIM, offset, NORMS, source.dtype.element_ty)
    cos_low = tl.load(cos + i, mask=i < HALF, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + i, mask=i < HALF, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + HALF + i, mask=i < HALF, other=0.0).to(tl.float32)
    dtype = target.dtype.element_ty
    tl.store(target + h * target_stride_h + i, (low * cos_low - high * sin_low).to(dtype), mask=is_low)
    tl.store(target + h * target_stride_h + HALF + i, (high * cos_high + low * sin_high).to(dtype), mask=is_low)
    if ROTARY < DIM:
        tl.store(target + h * target_stride_h + d, rest.to(dtype), mask=is_rest)


@triton.jit
def _copy(
    source,
    target,
    source_stride_h,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    h = tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, BLOCK_D)
    inside = (h < HEADS) & (d < DIM)
    values = tl.load(source + h * source_stride_h + d, mask=inside, other=0.0)
    tl.store(target + h * DIM + d, values.to(target.dtype.element_ty), mask=inside)


STRIDES = ["q_stride_t", "q_stride_h", "k_stride_t", "k_stride_h", "v_stride_t", "v_stride_h", "rope_stride_t"]


@triton.jit(do_not_specialize=STRIDES)
def _store_kernel(
    q,
    q_out,
    k,
    v,
    k_pool,
    v_pool,
    slots,
    cos,
    sin,
    q_norm,
    k_norm,
    eps,
    offset,
    q_stride_t,
    q_stride_h,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    rope_stride_t,
    UNIT: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    QK_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    NORMS: tl.constexpr,
    COPIES_Q: tl.constexpr,
    V_IN_K: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_HQ: tl.constexpr,
    BLOCK_HKV: tl.constexpr,
    BLOCK_QK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store HEADS heads of K and V of one token, and write their heads of q. Strides come in units of UNIT, so that the
    compiler knows their alignment."""
    q_stride_t, q_stride_h, rope_stride_t = q_stride_t * UNIT, q_stride_h * UNIT, rope_stride_t * UNIT
    k_stride_t, k_stride_h = k_stride_t * UNIT, k_stride_h * UNIT
    v_stride_t, v_stride_h = v_stride_t * UNIT, v_stride_h * UNIT
    Q_HEADS: tl.constexpr = NUM_HEADS * HEADS // NUM_KV_HEADS
    wait_for_others(PDL, True)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = part * HEADS
    pool_row = tl.load(slots + token) * NUM_KV_HEADS + first
    k_row, k_slot = k + token * k_stride_t + first * k_stride_h, k_pool + pool_row * QK_DIM
    q_row = q + token * q_stride_t + part * Q_HEADS * q_stride_h
    q_target = q_out + (token * NUM_HEADS + part * Q_HEADS) * QK_DIM
    if not V_IN_K:
        v_row = v + token * v_stride_t + first * v_stride_h
        _copy(v_row, v_pool + pool_row * V_DIM, v_stride_h, HEADS, V_DIM, BLOCK_HKV, BLOCK_V)
    if ROTARY == 0:
        _copy(k_row, k_slot, k_stride_h, HEADS, QK_DIM, BLOCK_HKV, BLOCK_QK)
        if COPIES_Q:
            _copy(q_row, q_target, q_stride_h, Q_HEADS, QK_DIM, BLOCK_HQ, BLOCK_QK)
    else:
        cos_row, sin_row = cos + token * rope_stride_t, sin + token * rope_stride_t
        _rotated_copy(
            k_row, k_slot, cos_row, sin_row, k_norm, eps, offset, k_stride_h, QK_DIM, HEADS, QK_DIM, ROTARY,
            NORMS, BLOCK_HKV, BLOCK_HALF, BLOCK_QK,
        )  # fmt: skip
        _rotated_copy(
            q_row, q_target, cos_row, sin_row, q_norm, eps, offset, q_stride_h, QK_DIM, Q_HEADS, QK_DIM, ROTARY,
            NORMS, BLOCK_HQ, BLOCK_HALF, BLOCK_QK,
        )  # fmt: skip


def store_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    slots: torch.Tensor,
    rope: AnyRope | None,
    q_out: torch.Tensor | None = None,
    v_in_k: bool = False,
) -> torch.Tensor:
    """Write k [T, Hkv, qk_dim] and v [T, Hkv, v_dim] to the pool at `slots` [T] int64; return the q to attend with.

    Without `rope`, q [T, Hq, qk_dim] is returned unchanged; with it, q and k are normed, if it has norms, and rotated.
    q_out, dense like q, receives the q to attend with in either case. v_in_k: v is a part of k and not written again.
    """
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1, "q, k and v need a dense last dim"
    num_tokens, num_heads, qk_dim = q.shape
    num_kv_heads, v_dim = v.shape[1:]
    rotary = 0 if rope is None else rope.cos.shape[-1]
    copies_q = rope is None and q_out is not None
    if q_out is None:
        q_out = q if rope is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    assert q_out is q or (q_out.is_contiguous() and q_out.shape == q.shape), "q_out must be dense and like q"
    cos, sin = (q, q) if rope is None else rope[:2]
    norms = rope.norms if isinstance(rope, NormedRope) else HeadNorms(q, q, 0.0, 0.0, False)
    kind = "" if norms.q is q else "late" if norms.is_late else "early"
    assert cos.stride() == sin.stride() and cos.stride(-1) == 1, "cos and sin need one layout and a dense last dim"
    is_split = num_tokens <= EARLY_ROWS and num_heads % num_kv_heads == 0 and not kind
    heads = num_kv_heads // gcd(num_kv_heads, PROGRAMS) if is_split else num_kv_heads
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], cos.stride(0))
    unit = 8 if all(stride % 8 == 0 for stride in strides) else 1
    tensors = q, q_out, k, v, k_pool, v_pool, slots, cos, sin, norms.q, norms.k
    args = *tensors, norms.eps, norms.offset, *(stride // unit for stride in strides)
    starts = early()
    constants = {
        "UNIT": unit,
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "QK_DIM": qk_dim,
        "V_DIM": v_dim,
        "ROTARY": rotary,
        "NORMS": kind,
        "COPIES_Q": copies_q,
        "V_IN_K": v_in_k,
        "HEADS": heads,
        "BLOCK_HQ": next_power_of_2(max(num_heads * heads // num_kv_heads, 1)),
        "BLOCK_HKV": next_power_of_2(heads),
        "BLOCK_QK": next_power_of_2(qk_dim),
        "BLOCK_V": next_power_of_2(v_dim),
        "BLOCK_HALF": next_power_of_2(max(rotary // 2, 1)),
        "PDL": starts["PDL"],
    }
    options = {"num_warps": 2 if heads < num_kv_heads else 4, "launch_pdl": starts["launch_pdl"]}
    grid = (num_tokens, num_kv_heads // heads)
    if is_aligned(*tensors):
        cached_launch(_store_kernel, **options)(grid, *args, **constants)
    else:
        _store_kernel[grid](*args, **constants, **options)
    return q_out
