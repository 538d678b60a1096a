"""What products with quantised weights have in common: up to three of them are one launch, such as Q, K and V, and two
accumulators, one of even blocks of 128 features and one of odd ones, sum in order and are added at the end. So the bits
of a row depend on neither the tile nor the other rows.

For few rows one product on tensor cores has both sums (PAIRED): its first operand has the columns of an even block and
of an odd one, its second operand the rows for both; the diagonal counts. Programs are half as long, and twice as many.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import triton
import triton.language as tl

from specdec.backends.linear import MOST_PARTS

T = TypeVar("T")


class Tile(NamedTuple):
    """Rows and columns of a tile, whether it has both sums, its warps, tiles that it loads ahead, and registers."""

    m: int
    n: int
    is_paired: bool
    num_warps: int
    num_stages: int
    maxnreg: int | None = None


@triton.jit
def picked(first, second, third, part):
    """Return what belongs to a part: a pointer, or a number."""
    return tl.where(part == 0, first, tl.where(part == 1, second, third))


@triton.jit
def part_of(block, n0, n1, BLOCK_N: tl.constexpr):
    """Return the part that a block of columns is of, and its number there; n0, n1: columns of the first two."""
    end0 = tl.cdiv(n0, BLOCK_N)
    end1 = end0 + tl.cdiv(n1, BLOCK_N)
    part = (block >= end0).to(tl.int32) + (block >= end1).to(tl.int32)
    return part, block - picked(0, end0, end1, part)


@triton.jit
def both(total, other, PAIRED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the sum of both accumulators [BLOCK_N, BLOCK_M]; PAIRED: they are the diagonal of `total`."""
    if PAIRED:
        places = total.reshape([2, BLOCK_N, 2, BLOCK_M])
        i = tl.arange(0, 2)
        is_own = i[:, None, None, None] == i[None, None, :, None]
        return tl.sum(tl.sum(tl.where(is_own, places, 0.0), 2), 0)
    else:
        return total + other


@triton.jit
def finished(total, bias, n, size, HAS_BIAS: tl.constexpr, DTYPE: tl.constexpr):
    """Round `total`, and then add the bias of columns n and round again, as modules of quantised models do."""
    product = total.to(DTYPE)
    if HAS_BIAS:
        added = tl.load(bias + n, mask=n < size, other=0.0).to(tl.float32)[:, None]
        product = (product.to(tl.float32) + added).to(DTYPE)
    return product


def filled(parts: Sequence[T]) -> list[T]:
    """Return `parts`, and the first one in place of those that are missing."""
    return [*parts, *[parts[0]] * (MOST_PARTS - len(parts))]
