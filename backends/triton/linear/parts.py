"""Common parts of products with quantised weights: up to three of them, such as Q, K and V, run in one launch, and K is
split in four or eight, each summed over its blocks of 128 features in order; the splits are added in order at the end.
So the bits of a row depend on neither the tile nor the other rows.

For few rows, one tensor-core product has two or four splits (`pack`): both operands, rows and columns, are repeated
once per split, and only the blocks on the diagonal of the product count. So there are more programs, each with fewer
columns and a shorter loop. On Hopper, each split of packed weights has a warp of its own: `few`.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import triton
import triton.language as tl

from specdec.backends.linear import MOST_PARTS
from specdec.backends.triton.linear.tiles import NUM_MULTIPROCESSORS

T = TypeVar("T")


class Tile(NamedTuple):
    """Rows and columns of a tile, splits of K in one product, warps of a program, and pipeline stages."""

    m: int
    n: int
    pack: int
    num_warps: int
    num_stages: int


class Tiles(NamedTuple):
    """Tiles for up to 4, 8, 16, 32, 64 and 128 rows, and for more: for few columns, for more, and for two weights with
    an activation; and the bytes of a row and of a column per block of features. Measured on an H100.

    For one or two programs per multiprocessor, stages of FP8 fill shared memory so that no more fit: programs that
    start while rows are being quantised would crowd on the multiprocessors where that ended first, and take up to twice
    as long.
    """

    narrow: Sequence[Tile]
    wide: Sequence[Tile]
    gated: Sequence[Tile]
    row_bytes: int
    column_bytes: int

    def choose(self, num_rows: int, N: int, is_gated: bool, shared: int) -> Tile:
        """Return the tile of `num_rows` rows and N columns, with as many stages as `shared` bytes hold."""
        tiles = self.gated if is_gated else self.narrow if N <= 32 * NUM_MULTIPROCESSORS else self.wide
        tile = tiles[sum(num_rows > limit for limit in (4, 8, 16, 32, 64, 128))]
        loaded = tile.pack * (self.row_bytes * tile.m + self.column_bytes * tile.n * (2 if is_gated else 1))
        return tile._replace(num_stages=max(1, min(tile.num_stages, shared // loaded)))


@triton.jit
def picked(first, second, third, part):
    """Return the argument of part 0, 1 or 2: a pointer, or a number."""
    return tl.where(part == 0, first, tl.where(part == 1, second, third))


@triton.jit
def part_of(block, n0, n1, BLOCK_N: tl.constexpr):
    """Return the part of a block of columns, and its number within the part; n0, n1: columns of the first two."""
    end0 = tl.cdiv(n0, BLOCK_N)
    end1 = end0 + tl.cdiv(n1, BLOCK_N)
    part = (block >= end0).to(tl.int32) + (block >= end1).to(tl.int32)
    return part, block - picked(0, end0, end1, part)


@triton.jit
def with_diagonal(total, sums, PACK: tl.constexpr):
    """Return `total` [A, B] plus the PACK diagonal blocks of sums [PACK * A, PACK * B], added in order."""
    if PACK == 1:
        total += sums
    else:
        places = sums.reshape([PACK, total.shape[0], PACK, total.shape[1]])
        i = tl.arange(0, PACK)
        is_own = i[:, None, None, None] == i[None, None, :, None]
        blocks = tl.sum(tl.where(is_own, places, 0.0), 2).permute(1, 2, 0)
        if PACK == 2:
            first, second = tl.split(blocks)
            total = total + first + second
        else:
            even, odd = tl.split(blocks.reshape([total.shape[0], total.shape[1], 2, 2]))
            first, third = tl.split(even)
            second, fourth = tl.split(odd)
            total = total + first + second + third + fourth
    return total


@triton.jit
def finished(total, bias, n, size, HAS_BIAS: tl.constexpr, DTYPE: tl.constexpr):
    """Round `total`, and then add the bias of columns n and round again, as modules of quantised models do."""
    product = total.to(DTYPE)
    if HAS_BIAS:
        added = tl.load(bias + n, mask=n < size, other=0.0).to(tl.float32)[:, None]
        product = (product.to(tl.float32) + added).to(DTYPE)
    return product


def filled(parts: Sequence[T]) -> list[T]:
    """Return `parts`, filled up with the first one to MOST_PARTS."""
    return [*parts, *[parts[0]] * (MOST_PARTS - len(parts))]
