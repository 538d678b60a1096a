"""Gathers and moves rows by index: starts of rounds, features of the accepted path, draft-extend rows, K/V of paths."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from specdec.backends.triton.launch.relaunch import early, wait_for_others
from specdec.backends.triton.launch.sizes import cdiv, next_power_of_2
from specdec.core.cache.pool import KVPool


@triton.jit(do_not_specialize=["num_rows", "h"])
def _gather_kernel(values, index, out, num_rows, h, stride_b, stride_n, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_others(PDL, False)
    row = tl.program_id(0).to(tl.int64)
    source = tl.maximum(tl.load(index + row), 0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(values + (row // num_rows) * stride_b + source * stride_n + d, mask=d < h, other=0)
    tl.store(out + row * h + d, found, mask=d < h)


@triton.jit(do_not_specialize=["n", "h"])
def _keep_last_kernel(states, lens, rows, into, n, h, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_others(PDL, False)
    request = tl.program_id(0).to(tl.int64)
    last = tl.maximum(tl.load(lens + request) - 1, 0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(states + (request * n + last) * h + d, mask=d < h, other=0)
    tl.store(into + tl.load(rows + request) * h + d, found.to(into.dtype.element_ty), mask=d < h)


@triton.jit
def _starts_kernel(seq_lens, roots, rows, out_lens, out_roots, PDL: tl.constexpr):
    wait_for_others(PDL, True)
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + request)
    tl.store(out_lens + request, tl.load(seq_lens + row))
    tl.store(out_roots + request, tl.load(roots + row))


@triton.jit(
    do_not_specialize=["table_stride", "width"],
    do_not_specialize_on_alignment=["slot_table", "rows", "seq_lens", "accept_index"],
)
def _move_kernel(
    caches,
    row_sizes,
    like,
    slot_table,
    rows,
    seq_lens,
    accept_index,
    table_stride,
    width,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Move one request's path in one cache, BLOCK elements of each row."""
    request, cache = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pool = tl.load(caches + cache).to(like.dtype)
    row_size = tl.load(row_sizes + cache)
    c = tl.arange(0, BLOCK_W)
    node = tl.load(accept_index + request * W + c, mask=c < W, other=-1)
    start = tl.load(seq_lens + request)
    table = slot_table + tl.load(rows + request) * table_stride
    source = tl.load(table + tl.minimum(start + tl.maximum(node, 0), width - 1)).to(tl.int64)
    target = tl.load(table + tl.minimum(start + c, width - 1)).to(tl.int64)
    d = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    moves = ((node >= 0) & (node != c))[:, None] & (d < row_size)
    moved = tl.load(pool + source[:, None] * row_size + d, mask=moves, other=0)
    tl.debug_barrier()  # a row that one thread overwrites may be another's source
    tl.store(pool + target[:, None] * row_size + d, moved, mask=moves)


def gather_rows(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return rows index [bs, m] int64 of values [bs, n, h] (last dim dense): [bs, m, h]; -1 reads row 0.

    Twin: `values.gather(1, index.clamp(min=0).unsqueeze(2).expand(-1, -1, h))`.
    """
    assert values.stride(2) == 1, "values need a dense last dim"
    (bs, num_rows), h, block = index.shape, values.shape[2], 1024
    out = torch.empty(bs, num_rows, h, dtype=values.dtype, device=values.device)
    _gather_kernel[(bs * num_rows, cdiv(h, block))](
        values, index.contiguous(), out, num_rows, h, values.stride(0), values.stride(1), BLOCK=block, **early()
    )
    return out


def keep_last(states: torch.Tensor, lens: torch.Tensor, rows: torch.Tensor, into: torch.Tensor) -> None:
    """Copy row lens - 1 of states [bs, n, h] to `rows` of into [num_rows, h] (dense); lens, rows [bs] int64. See
    `core.functional.ops.RoundOps`."""
    (bs, n, h), block = states.shape, 1024
    grid = bs, cdiv(h, block)
    _keep_last_kernel[grid](states.contiguous(), lens, rows, into, n, h, BLOCK=block, **early())


def starts(seq_lens: torch.Tensor, roots: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return seq_lens and roots [num_rows] int64 at `rows` [bs] int64. Twin: `seq_lens[rows], roots[rows]`."""
    out_lens, out_roots = torch.empty_like(rows), torch.empty_like(rows)
    _starts_kernel[(len(rows),)](seq_lens, roots, rows, out_lens, out_roots, num_warps=1, **early())
    return out_lens, out_roots


def committer(pool: KVPool) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """Return a function that moves accepted paths' K/V in all layers of `pool` in one launch.

    Twin: `core.functional.torch_ops.TORCH_OPS`. The pool's addresses are read here, once, so its tensors must not move.
    """
    tensors = pool.planes
    device = tensors[0].device
    sizes = [t[0].numel() for t in tensors]
    caches = torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device=device)
    row_sizes = torch.tensor(sizes, dtype=torch.int64, device=device)
    block = min(256, next_power_of_2(max(sizes)))
    num_blocks = cdiv(max(sizes), block)

    def commit(
        slot_table: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, accept_index: torch.Tensor
    ) -> None:
        bs, width = accept_index.shape
        _move_kernel[(bs, len(tensors), num_blocks)](
            caches,
            row_sizes,
            tensors[0],
            slot_table,
            rows,
            seq_lens,
            accept_index.contiguous(),
            slot_table.stride(0),
            slot_table.shape[1],
            W=width,
            BLOCK_W=next_power_of_2(width),
            BLOCK=block,
        )

    return commit
