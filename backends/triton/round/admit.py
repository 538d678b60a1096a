"""Admission in one launch: a packed copy from the host becomes state and slot tables of the rows that it names.

Twin: `admit` of `specdec.core.functional.ops.TORCH_OPS`.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from specdec.backends.triton.launch.relaunch import CachedLaunch


@triton.jit
def _write_number(column, row, value):
    """`value` is int64, or the bits of a float64 where the column holds floats."""
    if column.dtype.element_ty.is_floating():
        value = value.to(tl.float64, bitcast=True)
    tl.store(column + row, value.to(column.dtype.element_ty))


@triton.jit(
    do_not_specialize=["stride", "num_pages", "width", "page_size"],
    do_not_specialize_on_alignment=[
        "packed", "table", "seq_lens", "remaining", "stop_ids", "temperature", "top_k", "top_p", "min_p", "seeds",
    ],
)  # fmt: skip
def _admit_kernel(
    packed,
    table,
    seq_lens,
    remaining,
    stop_ids,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    stride,
    num_pages,
    width,
    page_size,
    NUM_STOPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    line = packed + tl.program_id(0).to(tl.int64) * stride
    row = tl.load(line)
    number = line + 1
    if tl.program_id(1) == 0:
        _write_number(seq_lens, row, tl.load(number))
        _write_number(remaining, row, tl.load(number + 1))
        stop = tl.arange(0, NUM_STOPS)
        tl.store(stop_ids + row * NUM_STOPS + stop, tl.load(number + 2 + stop))
        _write_number(temperature, row, tl.load(number + NUM_STOPS + 2))
        _write_number(top_k, row, tl.load(number + NUM_STOPS + 3))
        _write_number(top_p, row, tl.load(number + NUM_STOPS + 4))
        _write_number(min_p, row, tl.load(number + NUM_STOPS + 5))
        _write_number(seeds, row, tl.load(number + NUM_STOPS + 6))
    position = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    page = position // page_size
    is_owned = page < num_pages
    slot = tl.load(number + NUM_STOPS + 7 + page, mask=is_owned, other=0) * page_size + position % page_size
    slot = tl.where(is_owned, slot, 0).to(tl.int32)
    tl.store(table + row * width + position, slot, mask=position < width)


_launch = CachedLaunch(_admit_kernel)


def admit(packed: torch.Tensor, columns: Sequence[torch.Tensor], table: torch.Tensor, page_size: int) -> None:
    """See `specdec.core.functional.ops.RoundOps`."""
    stops, width = columns[2].shape[1], table.shape[1]
    num_numbers = 1 + sum(column[0].numel() for column in columns)
    assert columns[2].dim() == 2 and num_numbers == stops + 8 and table.is_contiguous() and packed.stride(1) == 1
    block = 512
    grid = packed.shape[0], triton.cdiv(width, block)
    numbers = (packed.stride(0), packed.shape[1] - num_numbers, width, page_size)
    _launch(grid, packed, table, *columns, *numbers, NUM_STOPS=stops, BLOCK=block)
