"""Admission in one launch: writes state and slot tables of the rows that a packed copy from the host names.

Twin: `admit` of `specdec.core.functional.torch_ops.TORCH_OPS`.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from specdec.backends.triton.launch.relaunch import CachedLaunch
from specdec.backends.triton.launch.sizes import cdiv


@triton.jit(
    do_not_specialize=["stride", "num_pages", "width", "page_size", "num_rows"],
    do_not_specialize_on_alignment=["packed", "table", "seq_lens", "remaining", "adapters", "stop_ids", "sampling"],
)
def _admit_kernel(
    packed,
    table,
    seq_lens,
    remaining,
    adapters,
    stop_ids,
    sampling,
    stride,
    num_pages,
    width,
    page_size,
    num_rows,
    NUM_STOPS: tl.constexpr,
    NUM_SAMPLING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    line = packed + tl.program_id(0).to(tl.int64) * stride
    row = tl.load(line)
    number, i = line + 1, tl.arange(0, BLOCK)
    if tl.program_id(1) == 0:
        tl.store(seq_lens + row, tl.load(number))
        tl.store(remaining + row, tl.load(number + 1))
        tl.store(adapters + row, tl.load(number + 2))
        tl.store(stop_ids + row * NUM_STOPS + i, tl.load(number + 3 + i, mask=i < NUM_STOPS), mask=i < NUM_STOPS)
        own = tl.load(number + 3 + NUM_STOPS + i, mask=i < NUM_SAMPLING)
        tl.store(sampling + i * num_rows + row, own, mask=i < NUM_SAMPLING)
    position = tl.program_id(1) * BLOCK + i
    page = position // page_size
    is_owned = page < num_pages
    pages = number + 3 + NUM_STOPS + NUM_SAMPLING
    slot = tl.load(pages + page, mask=is_owned, other=0) * page_size + position % page_size
    slot = tl.where(is_owned, slot, 0).to(tl.int32)
    tl.store(table + row * width + position, slot, mask=position < width)


_launch = CachedLaunch(_admit_kernel)


def admit(packed: torch.Tensor, columns: Sequence[torch.Tensor], table: torch.Tensor, page_size: int) -> None:
    """See `specdec.core.functional.ops.RoundOps`."""
    (stops, width), sampling, block = (columns[3].shape[1], table.shape[1]), columns[4], 512
    num_numbers = 1 + sum(column.shape[1:].numel() for column in columns)
    assert sampling.T.is_contiguous() and table.is_contiguous() and packed.stride(1) == 1
    grid = packed.shape[0], cdiv(width, block)
    sizes = (packed.stride(0), packed.shape[1] - num_numbers, width, page_size, len(sampling))
    _launch(grid, packed, table, *columns, *sizes, NUM_STOPS=stops, NUM_SAMPLING=sampling.shape[1], BLOCK=block)
