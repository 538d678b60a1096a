"""The tile of a product, by its shape. It affects only the time: bits are the same with any tile.

Measured on an H200, whose multiprocessors read weights fastest with 64 columns per program, as long as that gives at
least half of them a program; 64 is also the smallest tile that wgmma takes.
"""

from typing import NamedTuple

import torch

from specdec.backends.triton.launch.shared_memory import shared_memory
from specdec.backends.triton.launch.sizes import cdiv

NUM_MULTIPROCESSORS = 132  # of an H200 and an H100


class Tile(NamedTuple):
    """Rows, columns and features of a tile; warps of a program, and pipeline stages."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int

    def fitting(self, num_weights: int, shared: int) -> "Tile":
        """Return the tile with as many of its stages as `shared` bytes hold, of 2-byte elements; if fewer than 3 fit,
        with its features halved, down to 32."""
        k, num_stages = self.k, 0
        while num_stages < min(3, self.num_stages) and k >= 32:
            num_stages = min(self.num_stages, shared // ((self.n * num_weights + self.m) * k * 2))
            k, last = k // 2, k
        return self._replace(k=last, num_stages=max(num_stages, 1))


# By columns of the weight; keys are the most rows that a tile is for. TMA is slow past the last row, so two overlapping
# tiles are faster than one that is half full; so are tiles of fewer rows while each multiprocessor has at most one
# program.
FEW = {32: Tile(16, 64, 256, 4, 5), 128: Tile(32, 64, 256, 4, 4)}
NARROW = {16: Tile(16, 64, 256, 4, 5), 64: Tile(32, 64, 128, 4, 8), 128: Tile(64, 64, 128, 4, 6)}
MIDDLE = {16: Tile(16, 64, 256, 4, 4), 32: Tile(32, 64, 256, 4, 4), 36: Tile(32, 128, 128, 4, 4)}
MIDDLE |= {64: Tile(64, 64, 128, 4, 5), 112: Tile(64, 128, 128, 4, 4), 128: Tile(128, 64, 128, 4, 4)}
WIDE = {16: Tile(16, 128, 128, 4, 3), 32: Tile(32, 64, 128, 4, 3), 64: Tile(64, 128, 128, 4, 4)}
WIDE |= {128: Tile(128, 128, 64, 4, 6)}
GATED_FEW = {16: Tile(16, 16, 128, 2, 4), 32: Tile(32, 16, 128, 2, 4), 128: Tile(32, 64, 128, 4, 3)}
GATED = {16: Tile(16, 64, 128, 4, 3), 32: Tile(32, 64, 64, 4, 5), 96: Tile(64, 64, 64, 4, 4)}
GATED |= {128: Tile(128, 64, 64, 4, 5)}
# For more rows.
MANY, MANY_GATED = Tile(128, 128, 64, 8, 4), Tile(128, 64, 64, 8, 4)
SMALLER = (Tile(64, 64, 128, 4, 6), Tile(64, 128, 64, 4, 6))  # while each multiprocessor has at most one program


def choose_tile(num_rows: int, N: int, is_gated: bool, device: torch.device) -> Tile:
    """Return the tile of `num_rows` rows times a weight of N columns, 2 bytes per element; is_gated: two weights."""
    shared, is_few = shared_memory(device), N <= NUM_MULTIPROCESSORS * 16
    if num_rows > 128:
        fitting = (t for t in SMALLER if cdiv(num_rows, t.m) * cdiv(N, t.n) <= NUM_MULTIPROCESSORS)
        tile = MANY_GATED if is_gated else next(fitting, MANY)
    else:
        if is_gated:
            tiles = GATED_FEW if is_few else GATED
        elif N > NUM_MULTIPROCESSORS * 64:
            tiles = WIDE
        else:
            tiles = FEW if is_few else NARROW if N <= NUM_MULTIPROCESSORS * 32 else MIDDLE
        tile = next(tile for most, tile in tiles.items() if num_rows <= most)
        if tiles is GATED and tile.m >= 64:
            tile = _at_once(tile, cdiv(num_rows, tile.m) * cdiv(N, tile.n), shared)
    return tile.fitting(2 if is_gated else 1, shared - (8 << 10))


def _at_once(tile: Tile, num_programs: int, shared: int) -> Tile:
    """Return a tile of two weights with the most stages, three to five, with which all programs run at once.

    A program takes up to 2 KB of shared memory for other purposes.
    """
    for num_stages in (5, 4, 3):
        size = (2 * tile.n + tile.m) * tile.k * 2 * num_stages + (2 << 10)
        if num_programs <= NUM_MULTIPROCESSORS * (shared // size):
            return tile._replace(num_stages=num_stages)
    return tile
