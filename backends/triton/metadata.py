"""The builders of `backends.metadata`, their twin and specification, in one launch each."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from specdec.batch import AttentionMetadata, ForwardMode


@triton.jit(do_not_specialize=["table_stride", "width"])
def _uniform_kernel(
    slot_tables,
    prefix_lens,
    depths,
    tail_depths,
    positions,
    out_cache_loc,
    qo_indptr,
    tail_positions,
    table_stride,
    width,
    Q_LEN: tl.constexpr,
    FIRST_NODE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_TAIL: tl.constexpr,
    HAS_DEPTHS: tl.constexpr,
    HAS_TAIL_DEPTHS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    prefix = tl.load(prefix_lens + request)
    i = tl.arange(0, BLOCK_Q)
    is_query = i < Q_LEN
    at = request * Q_LEN + i
    place = prefix + FIRST_NODE + i
    depth = FIRST_NODE + i
    if HAS_DEPTHS:
        depth = tl.load(depths + at, mask=is_query, other=0)
    tl.store(positions + at, prefix + depth, mask=is_query)
    place = tl.minimum(tl.maximum(place, 0), width - 1)
    slots = tl.load(slot_tables + request * table_stride + place, mask=is_query, other=0)
    tl.store(out_cache_loc + at, slots, mask=is_query)
    tl.store(qo_indptr + request + 1, (request * Q_LEN + Q_LEN).to(tl.int32))
    if request == 0:
        tl.store(qo_indptr, 0)
    if HAS_TAIL_DEPTHS:
        TAIL_LEN: tl.constexpr = FIRST_NODE + Q_LEN
        t = tl.arange(0, BLOCK_TAIL)
        at = request * TAIL_LEN + t
        tail_depth = tl.load(tail_depths + at, mask=t < TAIL_LEN, other=0)
        tl.store(tail_positions + at, prefix + tail_depth, mask=t < TAIL_LEN)


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["starts", "q_lens"])
def _prefill_kernel(
    slot_tables, starts, q_lens, positions, out_cache_loc, qo_indptr, table_stride, BLOCK: tl.constexpr
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
    slots = tl.load(slot_tables + request.to(tl.int64) * table_stride + start + i, mask=i < q_len, other=0)
    tl.store(positions + first + i, start + i, mask=i < q_len)
    tl.store(out_cache_loc + first + i, slots, mask=i < q_len)


@triton.jit(do_not_specialize=["bs", "first_node", "window", "table_stride", "width"])
def _kv_indices_kernel(
    slot_tables,
    prefix_lens,
    qo_indptr,
    kv_indptr,
    kv_indices,
    bs,
    first_node,
    window,
    table_stride,
    width,
    BLOCK_BS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0)
    first = tl.zeros([], tl.int64)
    total = tl.zeros([], tl.int64)
    for base in range(0, bs, BLOCK_BS):
        i = base + tl.arange(0, BLOCK_BS)
        length = _num_keys(i, i < bs, prefix_lens, qo_indptr, first_node, window)
        first += tl.sum(tl.where(i < request, length, 0))
        total += tl.sum(length)
    length = _num_keys(request, request < bs, prefix_lens, qo_indptr, first_node, window)
    tl.store(kv_indptr + request + 1, (first + length).to(tl.int32))
    if request == 0:
        tl.store(kv_indptr, 0)
    prefix = tl.load(prefix_lens + request)
    begin = tl.where(window > 0, tl.maximum(prefix - window + 1, 0), 0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slots = tl.load(slot_tables + request.to(tl.int64) * table_stride + begin + i, mask=i < length, other=0)
    tl.store(kv_indices + first + i, slots.to(tl.int32), mask=i < length)
    unused = total + (request * width - first) + (i - length)  # after all used entries, request by request
    tl.store(kv_indices + unused, 0, mask=(i >= length) & (i < width))


@triton.jit
def _num_keys(i, is_request, prefix_lens, qo_indptr, first_node, window):
    """Keys that requests `i` attend to, 0 past the batch."""
    prefix = tl.load(prefix_lens + i, mask=is_request, other=0)
    q_len = tl.load(qo_indptr + i + 1, mask=is_request, other=0) - tl.load(qo_indptr + i, mask=is_request, other=0)
    begin = tl.where(window > 0, tl.maximum(prefix - window + 1, 0), 0)
    return tl.where(is_request, prefix + first_node + q_len - begin, 0)


def uniform_metadata(
    mode: ForwardMode,
    slot_tables: torch.Tensor,
    prefix_lens: torch.Tensor,
    *,
    q_len: int,
    max_prefix: int,
    first_node: int = 0,
    depths: torch.Tensor | None = None,
    tail_depths: torch.Tensor | None = None,
    ancestor_bits: torch.Tensor | None = None,
) -> AttentionMetadata:
    """Twin: `backends.metadata.uniform_metadata`, which says what the arguments are."""
    bs, device = slot_tables.shape[0], prefix_lens.device
    tail_len = first_node + q_len
    positions = torch.empty(bs * q_len, dtype=torch.int64, device=device)
    out_cache_loc = torch.empty_like(positions)
    qo_indptr = torch.empty(bs + 1, dtype=torch.int32, device=device)
    tail_positions = None
    if tail_depths is not None:
        tail_positions = torch.empty(bs, tail_len, dtype=torch.int64, device=device)
    _uniform_kernel[(bs,)](
        slot_tables,
        prefix_lens,
        None if depths is None else depths.contiguous(),
        None if tail_depths is None else tail_depths.contiguous(),
        positions,
        out_cache_loc,
        qo_indptr,
        tail_positions,
        slot_tables.stride(0),
        slot_tables.shape[1],
        Q_LEN=q_len,
        FIRST_NODE=first_node,
        BLOCK_Q=triton.next_power_of_2(q_len),
        BLOCK_TAIL=triton.next_power_of_2(tail_len),
        HAS_DEPTHS=depths is not None,
        HAS_TAIL_DEPTHS=tail_depths is not None,
    )
    return AttentionMetadata(
        mode=mode,
        slot_tables=slot_tables,
        prefix_lens=prefix_lens,
        positions=positions,
        out_cache_loc=out_cache_loc,
        qo_indptr=qo_indptr,
        q_len=q_len,
        tail_len=tail_len,
        max_prefix=max_prefix,
        ancestor_bits=None if ancestor_bits is None else ancestor_bits.contiguous(),
        tail_positions=tail_positions,
    )


def prefill_metadata(slot_tables: torch.Tensor, starts: Sequence[int], q_lens: Sequence[int]) -> AttentionMetadata:
    """Twin: `backends.metadata.prefill_metadata`."""
    device, bs, num_tokens = slot_tables.device, len(q_lens), sum(q_lens)
    host = torch.tensor([list(starts), list(q_lens)], dtype=torch.int64)
    if device.type == "cuda":
        host = host.pin_memory()
    lens = host.to(device, non_blocking=True)
    positions = torch.empty(num_tokens, dtype=torch.int64, device=device)
    out_cache_loc = torch.empty_like(positions)
    qo_indptr = torch.empty(bs + 1, dtype=torch.int32, device=device)
    block = 256
    _prefill_kernel[(bs, triton.cdiv(max(q_lens), block))](
        slot_tables,
        lens[0],
        lens[1],
        positions,
        out_cache_loc,
        qo_indptr,
        slot_tables.stride(0),
        BLOCK=block,
    )
    return AttentionMetadata(
        mode=ForwardMode.EXTEND,
        slot_tables=slot_tables,
        prefix_lens=lens[0],
        positions=positions,
        out_cache_loc=out_cache_loc,
        qo_indptr=qo_indptr,
        q_len=max(q_lens),
        tail_len=max(q_lens),
        max_prefix=max(starts),
        q_lens=tuple(q_lens),
    )


def kv_indices(metadata: AttentionMetadata, window: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin: `backends.metadata.kv_indices`."""
    m, width = metadata, metadata.max_prefix + metadata.tail_len
    kv_indptr = torch.empty(m.num_reqs + 1, dtype=torch.int32, device=m.prefix_lens.device)
    packed = torch.empty(m.num_reqs * width, dtype=torch.int32, device=m.prefix_lens.device)
    block = 1024
    _kv_indices_kernel[(m.num_reqs, triton.cdiv(width, block))](
        m.slot_tables,
        m.prefix_lens,
        m.qo_indptr,
        kv_indptr,
        packed,
        m.num_reqs,
        m.tail_len - m.q_len,
        window or 0,
        m.slot_tables.stride(0),
        width,
        BLOCK_BS=64,
        BLOCK=block,
    )
    return kv_indptr, packed
