"""Kernels for the functions of `backends.metadata`, their specification in torch: one launch each."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from specdec.backends.metadata import MetadataBuilder, Placement
from specdec.backends.triton.launch.relaunch import CachedLaunch, early, wait_for_others
from specdec.backends.triton.launch.sizes import cdiv, next_power_of_2


# Triton compiles a variant for every alignment of a kernel's pointers; views of packed tensors can have any alignment.
@triton.jit(
    do_not_specialize=["table_stride", "width", "depth_stride", "tail_stride"],
    do_not_specialize_on_alignment=["slot_table", "rows", "prefix_lens", "depths", "tail_depths", "ancestor_bits"],
)
def _uniform_kernel(
    slot_table,
    rows,
    prefix_lens,
    depths,
    tail_depths,
    ancestor_bits,
    rope_deltas,
    positions,
    out_cache_loc,
    qo_indptr,
    tail_positions,
    path_slots,
    rotary,
    table_stride,
    width,
    depth_stride,
    tail_stride,
    Q_LEN: tl.constexpr,
    FIRST_NODE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    HAS_DEPTHS: tl.constexpr,
    HAS_TAIL_DEPTHS: tl.constexpr,
    HAS_DELTAS: tl.constexpr,
    WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_others(PDL, False)
    request = tl.program_id(0).to(tl.int64)
    prefix = tl.load(prefix_lens + request)
    i = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    is_query = i < Q_LEN
    at = request * Q_LEN + i
    place = prefix + FIRST_NODE + i
    depth = FIRST_NODE + i
    if HAS_DEPTHS:
        depth = tl.load(depths + request * depth_stride + i, mask=is_query, other=0)
    tl.store(positions + at, prefix + depth, mask=is_query)
    if HAS_DELTAS:
        delta = tl.load(rope_deltas + tl.load(rows + request))
        tl.store(rotary + at, prefix + depth + delta, mask=is_query)
    place = tl.minimum(tl.maximum(place, 0), width - 1)
    table = slot_table + tl.load(rows + request) * table_stride
    slots = tl.load(table + place, mask=is_query, other=0)
    tl.store(out_cache_loc + at, slots.to(tl.int64), mask=is_query)
    tl.store(qo_indptr + request + 1, (request * Q_LEN + Q_LEN).to(tl.int32))
    if request == 0:
        tl.store(qo_indptr, 0)
    if HAS_TAIL_DEPTHS:
        TAIL_LEN: tl.constexpr = FIRST_NODE + Q_LEN
        t = tl.arange(0, BLOCK_TAIL)
        at = request * TAIL_LEN + t
        tail_depth = tl.load(tail_depths + request * tail_stride + t, mask=t < TAIL_LEN, other=0)
        tl.store(tail_positions + at, prefix + tail_depth, mask=t < TAIL_LEN)
        if WORDS:
            is_pair = is_query[:, None] & (t < TAIL_LEN)
            node = request * Q_LEN + i[:, None]
            tl.store(path_slots + node * TAIL_LEN + t, 0, mask=is_pair)
            tl.debug_barrier()  # ancestors overwrite what other threads have just cleared
            word = tl.load(ancestor_bits + node * WORDS + t // 64, mask=is_pair, other=0)
            slot = tl.load(table + tl.minimum(prefix + t, width - 1), mask=t < TAIL_LEN, other=0)
            is_seen = is_pair & ((word >> t % 64) & 1 != 0) & (tail_depth < TAIL_LEN)
            tl.store(path_slots + node * TAIL_LEN + tail_depth, slot + 0 * i[:, None], mask=is_seen)


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=[
        "slot_table", "rows", "starts", "q_lens", "positions", "out_cache_loc", "qo_indptr",
    ],
)  # fmt: skip
def _prefill_kernel(
    slot_table, rows, starts, q_lens, positions, out_cache_loc, qo_indptr, table_stride, BLOCK: tl.constexpr
):
    request = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    first = tl.zeros([], tl.int64)
    for base in range(0, request, BLOCK):
        first += tl.sum(tl.load(q_lens + base + lanes, mask=base + lanes < request, other=0))
    start, q_len = tl.load(starts + request), tl.load(q_lens + request)
    tl.store(qo_indptr + request + 1, (first + q_len).to(tl.int32))
    if request == 0:
        tl.store(qo_indptr, 0)
    i = tl.program_id(1) * BLOCK + lanes
    table = slot_table + tl.load(rows + request) * table_stride
    slots = tl.load(table + start + i, mask=i < q_len, other=0)
    tl.store(positions + first + i, start + i, mask=i < q_len)
    tl.store(out_cache_loc + first + i, slots.to(tl.int64), mask=i < q_len)


_launch_prefill = CachedLaunch(_prefill_kernel)


def uniform_placement(
    slot_table: torch.Tensor,
    rows: torch.Tensor,
    prefix_lens: torch.Tensor,
    q_len: int,
    first_node: int,
    depths: torch.Tensor | None,
    tail_depths: torch.Tensor | None,
    ancestor_bits: torch.Tensor | None,
    rope_deltas: torch.Tensor | None = None,
) -> Placement:
    """Twin: `backends.metadata.uniform_placement`."""
    bs, device, tail_len = rows.shape[0], prefix_lens.device, first_node + q_len
    placement = _empty_placement(bs, bs * q_len, device)
    if rope_deltas is not None:
        placement = placement._replace(rotary=torch.empty_like(placement.positions))
    depths, tail_depths = (t if t is None or t.stride(1) == 1 else t.contiguous() for t in (depths, tail_depths))
    block_q, words = next_power_of_2(q_len), 0
    if tail_depths is not None:
        placement = placement._replace(tail_positions=torch.empty(bs, tail_len, dtype=torch.int64, device=device))
        if ancestor_bits is not None:
            path_slots = torch.empty(bs, q_len, tail_len, dtype=torch.int32, device=device)
            placement, words = placement._replace(path_slots=path_slots), ancestor_bits.shape[-1]
            block_q = min(block_q, 16)
    _uniform_kernel[(bs, cdiv(q_len, block_q))](
        slot_table,
        rows,
        prefix_lens,
        depths,
        tail_depths,
        ancestor_bits,
        rope_deltas,
        *placement,
        slot_table.stride(0),
        slot_table.shape[1],
        *[0 if t is None else t.stride(0) for t in (depths, tail_depths)],
        Q_LEN=q_len,
        FIRST_NODE=first_node,
        BLOCK_Q=block_q,
        BLOCK_TAIL=next_power_of_2(tail_len),
        HAS_DEPTHS=depths is not None,
        HAS_TAIL_DEPTHS=tail_depths is not None,
        HAS_DELTAS=rope_deltas is not None,
        WORDS=words,
        **early(),
    )
    return placement


def prefill_placement(
    slot_table: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    q_lens: torch.Tensor,
    num_tokens: int,
    longest: int,
    into: Sequence[torch.Tensor] | None = None,
) -> Placement:
    """Twin: `backends.metadata.prefill_placement`. If `num_tokens` is a bound, `into` must be given, zeroed."""
    bs, block = rows.shape[0], 256
    if into is None:
        placement = _empty_placement(bs, num_tokens, rows.device)
    else:
        qo_indptr = torch.empty(bs + 1, dtype=torch.int32, device=rows.device)
        placement = Placement(into[0][:num_tokens], into[1][:num_tokens], qo_indptr)
    grid, stride = (bs, cdiv(longest, block)), slot_table.stride(0)
    _launch_prefill(grid, slot_table, rows, starts, q_lens, *placement[:3], stride, BLOCK=block)
    return placement


def _empty_placement(bs: int, num_tokens: int, device: torch.device) -> Placement:
    positions = torch.empty(num_tokens, dtype=torch.int64, device=device)
    qo_indptr = torch.empty(bs + 1, dtype=torch.int32, device=device)
    return Placement(positions, torch.empty_like(positions), qo_indptr)


TRITON_METADATA = MetadataBuilder(uniform_placement, prefill_placement)
