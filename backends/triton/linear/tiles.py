"""The tile of a product, by its shape. It decides the time and nothing else: bits are the same whatever the tile.

Measured on an H200, whose multiprocessors read weights fastest with 64 columns a program, for as long as that gives
half of them a program each; a tile of 64 is also the least that its tensor cores take from shared memory at once.
"""

from typing import NamedTuple

import torch

from specdec.backends.triton.launch.shared_memory import shared_memory
from specdec.backends.triton.launch.sizes import cdiv

NUM_MULTIPROCESSORS = 132  # of an H200 and an H100


class Tile(NamedTuple):
    """Rows, columns and features of a tile; warps of a program, and tiles that it loads ahead."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int

    def fitting(self, num_weights: int, shared: int) -> "Tile":
        """Return the tile with as many stages, and then features, as `shared` bytes hold of 2-byte elements."""
        k, num_stages = self.k, 0
        while num_stages < min(3, self.num_stages) and k >= 32:
            num_stages = min(self.num_stages, shared // ((self.n * num_weights + self.m) * k * 2))
            k, last = k // 2, k
        return self._replace(k=last, num_stages=max(num_stages, 1))


# For up to 16, 32, 64 and 128 rows; see LIMITS.
SHORT = (Tile(16, 64, 128, 4, 5), Tile(32, 64, 128, 4, 5), Tile(64, 64, 128, 4, 5), Tile(64, 64, 128, 4, 4))
NARROW = (Tile(16, 64, 256, 4, 5), Tile(32, 64, 128, 4, 8), Tile(64, 64, 128, 4, 6), Tile(64, 64, 128, 4, 6))
MIDDLE = (Tile(16, 64, 256, 4, 4), Tile(32, 64, 256, 4, 4), Tile(64, 64, 128, 4, 5), Tile(128, 64, 128, 4, 4))
WIDE = (Tile(16, 128, 128, 4, 3), Tile(32, 64, 128, 4, 3), Tile(64, 128, 128, 4, 4), Tile(128, 128, 64, 4, 6))
GATED = (Tile(16, 64, 128, 4, 3), Tile(32, 64, 64, 4, 5), Tile(64, 64, 64, 4, 4), Tile(128, 64, 64, 4, 5))
GATED_NARROW = tuple(Tile(m, 16, 128, 2, 4) for m in (16, 32, 64, 64))
# Rows up to which a tile is used, where not 16, 32 and 64. TMA is slow past the last row, so two tiles that overlap
# are faster than one that rows fill by half.
LIMITS: dict[tuple[Tile, ...], tuple[int, int, int]] = {NARROW: (16, 48, 64), GATED: (16, 32, 96)}
# For more rows.
MANY, MANY_GATED = Tile(128, 128, 64, 8, 4), Tile(128, 64, 64, 8, 4)
SMALLER = (Tile(64, 64, 128, 4, 6), Tile(64, 128, 64, 4, 6))  # while each multiprocessor has one program at most


def choose_tile(num_rows: int, N: int, K: int, is_gated: bool, device: torch.device) -> Tile:
    """Return the tile of x [num_rows, K] times weight [N, K], of 2 bytes an element; is_gated: of two such weights."""
    if num_rows > 128:
        fitting = (t for t in SMALLER if cdiv(num_rows, t.m) * cdiv(N, t.n) <= NUM_MULTIPROCESSORS)
        tile = MANY_GATED if is_gated else next(fitting, MANY)
    else:
        is_narrow = N <= NUM_MULTIPROCESSORS * 32
        if is_gated:
            tiles = GATED_NARROW if is_narrow else GATED
        elif N > NUM_MULTIPROCESSORS * 64:
            tiles = WIDE
        else:
            tiles = SHORT if K < 1024 else NARROW if is_narrow else MIDDLE
        tile = tiles[sum(num_rows > limit for limit in LIMITS.get(tiles, (16, 32, 64)))]
        if tile == GATED[-1] and NUM_MULTIPROCESSORS < cdiv(N, tile.n) <= 2 * NUM_MULTIPROCESSORS:
            tile = tile._replace(num_stages=3)  # two programs fit on a multiprocessor, so all run at once
    return tile.fitting(2 if is_gated else 1, shared_memory(device) - (8 << 10))
