"""Attention over the paged KV pool, prefix and tail, in one kernel for every kind of forward.

An online softmax over the items of `plan`: keys of a request in order of its slot table, prefix first, then its tail;
the heads of one KV group are rows of one tile, so K/V are read once for all of them. Tiles whose keys are split write
partials for `merge`. Twin: `backends.torch_ref.TorchBackend`.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.torch_version import TorchVersion
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specdec.backends.base import LayerSpec
from specdec.backends.triton.attention.blocks import slots_of, take_block, visible_keys
from specdec.backends.triton.attention.merge import merge, padded_dim
from specdec.backends.triton.attention.plan import ITEM_WIDTH, SplitPlan
from specdec.backends.triton.attention.tiling import Tiling
from specdec.backends.triton.launch.relaunch import INTERPRETED, Relaunch, follows_early, is_hopper
from specdec.core.batch import AttentionMetadata

LOG2E = 1.4426950408889634
# Before 3.7.1 Triton lets wgmma, which large tiles take, read what cp.async wrote without a proxy fence: stale keys.
LACKS_FENCES, WGMMA_ROWS = TorchVersion(triton.__version__) < "3.7.1", 64


# Triton compiles a variant for every alignment of a kernel's pointers; these are views, and none is read in rows.
@triton.jit(
    do_not_specialize=["first_node", "tail_len", "window", "table_stride"],
    do_not_specialize_on_alignment=[
        "slot_table", "rows", "qo_indptr", "prefix_lens", "positions", "ancestor_bits", "tail_positions", "sinks",
    ],
)  # fmt: skip
def _attention_kernel(
    q,
    out,
    k_pool,
    v_pool,
    sinks,
    slot_table,
    rows,
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
    WORDS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_TAIL_POSITIONS: tl.constexpr,
    CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    UPCAST: tl.constexpr,
    FENCED: tl.constexpr,
    ITEM: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
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
    table = slot_table + tl.load(rows + request) * table_stride

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
    bits, bits_at = token, token
    if WORDS:
        bits_at = ancestor_bits + token * WORDS
    if WORDS == 1:
        bits = tl.load(bits_at, mask=is_row, other=0)
    q_pos = node
    if HAS_WINDOW:
        q_pos = tl.load(positions + token, mask=is_row, other=0).to(tl.int32)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * 1.4426950408889634
        m = tl.where(is_first > 0, sink, m)
        mass = tl.where(is_first > 0, 1.0, mass)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)

    # Keys of [full_begin, masked_from), in whole blocks, are seen by all rows and need no mask.
    if WORDS:
        full_end, last_position = prefix, prefix + tail_len - 1
    else:
        first, last = m_block * BLOCK_M // GROUP, ((m_block + 1) * BLOCK_M - 1) // GROUP
        full_end, last_position = prefix + first_node + first + 1, prefix + first_node + tl.minimum(last, q_len - 1)
    full_begin = kv_begin
    if HAS_WINDOW:
        num_near = tl.maximum(last_position - window + 1 - kv_begin, 0)  # keys out of the last row's window
        full_begin += (num_near + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    num_full = tl.maximum(tl.minimum(kv_end, full_end) - full_begin, 0) // BLOCK_N
    masked_from = full_begin + num_full * BLOCK_N

    k_head = k_pool + kv_head * QK_DIM
    v_head = v_pool + kv_head * V_DIM
    tail_at = tail_positions
    if HAS_TAIL_POSITIONS:
        tail_at = tail_positions + request * tail_len
    n = tl.arange(0, BLOCK_N)
    # The slots of a block are loaded one block ahead: only then are its keys and values pipelined.
    slots = slots_of(table, kv_begin + n, kv_end)
    if HAS_WINDOW:
        for start in range(kv_begin, tl.minimum(full_begin, kv_end), BLOCK_N):
            next_slots = slots_of(table, start + BLOCK_N + n, kv_end)
            visible = visible_keys(
                start + n, kv_end, prefix, is_row, node, bits, bits_at, q_pos, window, tail_at,
                WORDS, HAS_WINDOW, HAS_TAIL_POSITIONS,
            )  # fmt: skip
            m, mass, acc = take_block(
                q_tile, k_head, v_head, slots, d, dv, m, mass, acc, visible, scale_log2, cap_log2, cap_scale,
                NUM_KV_HEADS * QK_DIM, NUM_KV_HEADS * V_DIM, QK_DIM, V_DIM, True, CAPPED, UPCAST, FENCED,
            )  # fmt: skip
            slots = next_slots
    for start in range(full_begin, masked_from, BLOCK_N):
        next_slots = slots_of(table, start + BLOCK_N + n, kv_end)
        m, mass, acc = take_block(
            q_tile, k_head, v_head, slots, d, dv, m, mass, acc, is_row, scale_log2, cap_log2, cap_scale,
            NUM_KV_HEADS * QK_DIM, NUM_KV_HEADS * V_DIM, QK_DIM, V_DIM, False, CAPPED, UPCAST, FENCED,
        )  # fmt: skip
        slots = next_slots
    for start in range(masked_from, kv_end, BLOCK_N):
        next_slots = slots_of(table, start + BLOCK_N + n, kv_end)
        visible = visible_keys(
            start + n, kv_end, prefix, is_row, node, bits, bits_at, q_pos, window, tail_at,
            WORDS, HAS_WINDOW, HAS_TAIL_POSITIONS,
        )  # fmt: skip
        m, mass, acc = take_block(
            q_tile, k_head, v_head, slots, d, dv, m, mass, acc, visible, scale_log2, cap_log2, cap_scale,
            NUM_KV_HEADS * QK_DIM, NUM_KV_HEADS * V_DIM, QK_DIM, V_DIM, True, CAPPED, UPCAST, FENCED,
        )  # fmt: skip
        slots = next_slots

    some_mass = tl.where(mass == 0, 1.0, mass)
    result = acc / some_mass[:, None]
    if partial < 0:
        out_at = out + token[:, None] * out_stride_t + head[:, None] * out_stride_h + dv
        tl.store(out_at, result.to(out.dtype.element_ty), mask=is_row[:, None] & (dv < V_DIM))
    else:
        at = (partial.to(tl.int64) * NUM_KV_HEADS + kv_head) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(partial_out + at[:, None] * V_DIM + dv, result, mask=is_row[:, None] & (dv < V_DIM))
        tl.store(partial_lse + at, tl.where(mass == 0, float("-inf"), m + tl.log2(some_mass)), mask=is_row)


class AttendAgain(NamedTuple):
    """The launches of one `attend`, to repeat for an equal layer of the same forward."""

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
    """Compute out [T, Hq, v_dim] from q [T, Hq, qk_dim] and the pool k [N, Hkv, qk_dim], v [N, Hkv, v_dim].

    partials: scratch for split tiles, fp32: [num_partials, Hkv, block_m, v_dim] and [num_partials, Hkv, block_m].
    Returns a callable that repeats the launches for an equal layer; None in the interpreter.
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
        m.slot_table,
        m.rows,
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
        m.slot_table.stride(0),
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
    )
    constants = _constants(m, layer, sinks is not None, tiling, q.dtype)
    options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages, "launch_pdl": constants["PDL"]}
    compiled = _attention_kernel[grid](*args, **constants, **options)
    merged = None
    if plan.merges.shape[0]:
        merged = merge(out, partials, plan.merges, m.qo_indptr, layer, tiling.block_m)
    if compiled is None:  # interpreted, or rehearsed
        return None
    return AttendAgain(Relaunch(_attention_kernel, compiled, grid, args, constants), merged)


def _constants(
    m: AttentionMetadata, layer: LayerSpec, has_sinks: bool, tiling: Tiling, dtype: torch.dtype
) -> dict[str, Any]:
    """Return what the kernel is compiled for, by its names: the layer, what the forward holds, and the tiling."""
    return dict(
        NUM_KV_HEADS=layer.num_kv_heads,
        GROUP=layer.num_heads // layer.num_kv_heads,
        QK_DIM=layer.qk_dim,
        V_DIM=layer.v_dim,
        BLOCK_QK=padded_dim(layer.qk_dim),
        BLOCK_V=padded_dim(layer.v_dim),
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        WORDS=0 if m.ancestor_bits is None else m.ancestor_bits.shape[-1],
        HAS_WINDOW=layer.window is not None,
        HAS_TAIL_POSITIONS=m.tail_positions is not None,
        CAPPED=layer.softcap is not None,
        HAS_SINKS=has_sinks,
        UPCAST=INTERPRETED and dtype == torch.bfloat16,
        FENCED=LACKS_FENCES and tiling.block_m >= WGMMA_ROWS and is_hopper(),
        ITEM=ITEM_WIDTH,
        PDL=follows_early(),
    )
