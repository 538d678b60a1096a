"""Attention over the paged pool for every path of the prefix + tail table, in one kernel.

FlashAttention-2's online softmax (arXiv 2307.08691) over the items of `plan`: keys of a request in order of their
slot table, prefix first, then its tail; the heads of one KV group are rows of one tile, so K/V are read once for all
of them. Tiles whose keys are split leave partials for `merge`. Twin: `backends.torch_ref.TorchBackend`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from specdec.backends.base import LayerSpec
from specdec.backends.triton.merge import merge, padded_dim
from specdec.backends.triton.plan import ITEM_WIDTH, SplitPlan
from specdec.backends.triton.relaunch import INTERPRETED, Relaunch
from specdec.batch import AttentionMetadata

LOG2E = 1.4426950408889634


@triton.jit
def _dot(a, b, acc, UPCAST: tl.constexpr):
    """acc + a @ b. UPCAST: the interpreter has no bf16 product (numpy knows no bf16); widening is exact."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _softmax_step(
    q,
    k,
    v,
    m,
    mass,
    acc,
    visible,
    scale_log2,
    cap_log2,
    cap_scale,
    MASKED: tl.constexpr,
    CAPPED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Take one block of keys into the running maximum m, mass and accumulator acc (logits in units of log2)."""
    s = _dot(q, k, tl.zeros([q.shape[0], k.shape[1]], tl.float32), UPCAST)
    if CAPPED:
        e = tl.exp2(s * cap_scale)  # exp(2x), so that tanh(x) = 1 - 2 / (e + 1) is right at both ends
        s = cap_log2 * (1 - 2 / (e + 1))
        scale_log2 = 1.0
    if MASKED:
        s = tl.where(visible, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)  # scales are positive
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new) if MASKED else m_new  # rows that have seen nothing yet
    p = tl.exp2(s * scale_log2 - m_safe[:, None])
    shrink = tl.exp2(m - m_safe)
    acc = _dot(p.to(v.dtype), v, acc * shrink[:, None], UPCAST)
    return m_new, mass * shrink + tl.sum(p, 1), acc


@triton.jit
def _slots(table, key, kv_end):
    """Slots of keys; those past the last read its slot, which the request owns, and are masked later."""
    return tl.load(table + tl.minimum(key, kv_end - 1))


@triton.jit
def _rows(pool, slots, d, STRIDE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """K or V of slots, [BLOCK_N, BLOCK]; pool points at the head."""
    at = pool + slots[:, None] * STRIDE + d
    if DIM == BLOCK:
        return tl.load(at)
    return tl.load(at, mask=d < DIM, other=0.0)


@triton.jit(do_not_specialize=["first_node", "tail_len", "window", "table_stride"])
def _attention_kernel(
    q,
    out,
    k_pool,
    v_pool,
    sinks,
    slot_tables,
    items,
    qo_indptr,
    prefix_lens,
    positions,
    ancestor_bits,
    tail_positions,
    partial_out,
    partial_lse,
    scale_log2,
    cap_log2,
    cap_scale,
    first_node,
    tail_len,
    window,
    table_stride,
    q_stride_t,
    q_stride_h,
    out_stride_t,
    out_stride_h,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QK_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_QK: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_BITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_TAIL_POSITIONS: tl.constexpr,
    CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    UPCAST: tl.constexpr,
    ITEM: tl.constexpr,
):
    kv_head = tl.program_id(0)
    item = items + tl.program_id(1) * ITEM
    request = tl.load(item)
    if request < 0:
        return
    m_block, kv_begin, kv_end = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    partial, is_first = tl.load(item + 4), tl.load(item + 5)
    q_start = tl.load(qo_indptr + request)
    q_len = tl.load(qo_indptr + request + 1) - q_start
    prefix = tl.load(prefix_lens + request).to(tl.int32)

    row = m_block * BLOCK_M + tl.arange(0, BLOCK_M)
    query = row // GROUP  # of the request
    head = kv_head * GROUP + row % GROUP
    is_row = query < q_len
    token = (q_start + query).to(tl.int64)
    d = tl.arange(0, BLOCK_QK)
    dv = tl.arange(0, BLOCK_V)
    q_at = q + token[:, None] * q_stride_t + head[:, None] * q_stride_h + d
    q_tile = tl.load(q_at, mask=is_row[:, None] & (d < QK_DIM), other=0.0)

    node = first_node + query  # tail index of each row's own token
    bits = token
    if HAS_BITS:
        bits = tl.load(ancestor_bits + token, mask=is_row, other=0)
    else:
        last = tl.minimum(((m_block + 1) * BLOCK_M - 1) // GROUP, q_len - 1)
        kv_end = tl.minimum(kv_end, prefix + first_node + last + 1)
    q_pos = token
    if HAS_WINDOW:
        q_pos = tl.load(positions + token, mask=is_row, other=0)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * 1.4426950408889634
        m = tl.where(is_first > 0, sink, m)
        mass = tl.where(is_first > 0, 1.0, mass)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)

    table = slot_tables + request.to(tl.int64) * table_stride
    k_head = k_pool + kv_head * QK_DIM
    v_head = v_pool + kv_head * V_DIM
    n = tl.arange(0, BLOCK_N)
    masked_from = kv_begin  # blocks from here on need a mask
    # The slots of a block are loaded one block ahead: only then are its keys and values pipelined.
    slots = _slots(table, kv_begin + n, kv_end)
    if not HAS_WINDOW:
        num_full = tl.maximum(tl.minimum(kv_end, prefix) - kv_begin, 0) // BLOCK_N
        masked_from = kv_begin + num_full * BLOCK_N
        for start in range(kv_begin, masked_from, BLOCK_N):
            next_slots = _slots(table, start + BLOCK_N + n, kv_end)
            k = _rows(k_head, slots, d, NUM_KV_HEADS * QK_DIM, QK_DIM, BLOCK_QK)
            v = _rows(v_head, slots, dv, NUM_KV_HEADS * V_DIM, V_DIM, BLOCK_V)
            m, mass, acc = _softmax_step(
                q_tile, tl.trans(k), v, m, mass, acc, is_row, scale_log2, cap_log2, cap_scale, False, CAPPED, UPCAST
            )
            slots = next_slots
    for start in range(masked_from, kv_end, BLOCK_N):
        next_slots = _slots(table, start + BLOCK_N + n, kv_end)
        k = _rows(k_head, slots, d, NUM_KV_HEADS * QK_DIM, QK_DIM, BLOCK_QK)
        v = _rows(v_head, slots, dv, NUM_KV_HEADS * V_DIM, V_DIM, BLOCK_V)
        slots = next_slots
        key = start + n
        is_key = key < kv_end
        tail = key - prefix  # tail index of each key, negative in the prefix
        if HAS_BITS:
            visible = (tail[None, :] < 0) | (((bits[:, None] >> tl.maximum(tail, 0)[None, :]) & 1) != 0)
        else:
            visible = tail[None, :] <= node[:, None]
        visible = visible & is_key[None, :] & is_row[:, None]
        if HAS_WINDOW:
            k_pos = key.to(tl.int64)
            if HAS_TAIL_POSITIONS:
                at = tail_positions + request * tail_len + tail
                k_pos = tl.where(tail < 0, k_pos, tl.load(at, mask=is_key & (tail >= 0), other=0))
            visible = visible & (q_pos[:, None] - k_pos[None, :] < window)
        m, mass, acc = _softmax_step(
            q_tile, tl.trans(k), v, m, mass, acc, visible, scale_log2, cap_log2, cap_scale, True, CAPPED, UPCAST
        )

    some_mass = tl.where(mass == 0, 1.0, mass)
    result = acc / some_mass[:, None]
    if partial < 0:
        out_at = out + token[:, None] * out_stride_t + head[:, None] * out_stride_h + dv
        tl.store(out_at, result.to(out.dtype.element_ty), mask=is_row[:, None] & (dv < V_DIM))
    else:
        at = (partial.to(tl.int64) * NUM_KV_HEADS + kv_head) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(partial_out + at[:, None] * V_DIM + dv, result, mask=is_row[:, None] & (dv < V_DIM))
        tl.store(partial_lse + at, tl.where(mass == 0, float("-inf"), m + tl.log2(some_mass)), mask=is_row)


@dataclass(frozen=True)
class Tiling:
    """Launch shape of the attention kernel: rows and keys of a tile, warps, software-pipelining depth.

    resident: tiles that a multiprocessor holds at once; keys are split until that many are there.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    resident: int


class AttendAgain(NamedTuple):
    """The launches of one `attend`, to be repeated for a layer like it in the same forward."""

    attention: Relaunch
    merge: Relaunch | None

    def __call__(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> None:
        self.attention(q, out, k_pool, v_pool, sinks)
        if self.merge is not None:
            self.merge(out)


def attend(
    q: torch.Tensor,
    out: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    metadata: AttentionMetadata,
    plan: SplitPlan,
    partials: tuple[torch.Tensor, torch.Tensor],
    layer: LayerSpec,
    sinks: torch.Tensor | None,
    tiling: Tiling,
) -> AttendAgain | None:
    """Fill out [T, Hq, v_dim] from q [T, Hq, qk_dim] and the pool k [N, Hkv, qk_dim], v [N, Hkv, v_dim].

    partials: scratch for split tiles, fp32: [num_partials, Hkv, block_m, v_dim] and [num_partials, Hkv, block_m].
    Returns how to do it again for a layer that is alike; None in the interpreter.
    """
    assert layer.scaling > 0, f"scaling {layer.scaling}: maxima are taken before scaling"
    m = metadata
    cap = layer.softcap or 1.0
    grid = (layer.num_kv_heads, plan.items.shape[0])
    args = (
        q,
        out,
        k_pool,
        v_pool,
        sinks,
        m.slot_tables,
        plan.items,
        m.qo_indptr,
        m.prefix_lens,
        m.positions,
        m.ancestor_bits,
        m.tail_positions,
        *partials,
        layer.scaling * LOG2E,
        cap * LOG2E,
        2 * LOG2E * layer.scaling / cap,
        m.tail_len - m.q_len,
        m.tail_len,
        layer.window or 0,
        m.slot_tables.stride(0),
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
    )
    constants = dict(
        NUM_KV_HEADS=layer.num_kv_heads,
        GROUP=layer.num_heads // layer.num_kv_heads,
        QK_DIM=layer.qk_dim,
        V_DIM=layer.v_dim,
        BLOCK_QK=padded_dim(layer.qk_dim),
        BLOCK_V=padded_dim(layer.v_dim),
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        HAS_BITS=m.ancestor_bits is not None,
        HAS_WINDOW=layer.window is not None,
        HAS_TAIL_POSITIONS=m.tail_positions is not None,
        CAPPED=layer.softcap is not None,
        HAS_SINKS=sinks is not None,
        UPCAST=INTERPRETED and q.dtype == torch.bfloat16,
        ITEM=ITEM_WIDTH,
    )
    launch = _attention_kernel[grid]
    compiled = launch(*args, **constants, num_warps=tiling.num_warps, num_stages=tiling.num_stages)
    merged = None
    if plan.merges.shape[0]:
        merged = merge(out, partials, plan.merges, m.qo_indptr, layer, tiling.block_m)
    if INTERPRETED:
        return None
    return AttendAgain(Relaunch(_attention_kernel, compiled, grid, args, constants), merged)
