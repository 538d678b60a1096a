"""Products with 4-bit weights that are unpacked in registers. Sums are those of `parts`.

Twin: `specdec.backends.linear.packed.packed_linear`.
"""

from collections.abc import Sequence

import torch

from specdec.backends.linear import aligned_rows
from specdec.backends.triton.linear.parts import Tile, Tiles
from specdec.backends.triton.linear.quantised import launch

FEW, SOME, MANY = Tile(16, 32, 2, 4, 6), Tile(64, 64, 1, 4, 4), Tile(128, 128, 1, 8, 3)
GATED = Tile(32, 64, 1, 4, 3), Tile(64, 64, 1, 4, 3), Tile(128, 64, 1, 8, 3), Tile(128, 64, 1, 8, 3)
TILES = Tiles(
    narrow=(Tile(4, 32, 4, 4, 4), Tile(8, 32, 4, 4, 4), FEW, Tile(32, 32, 2, 4, 4), Tile(64, 32, 2, 4, 4), SOME, MANY),
    wide=(Tile(4, 16, 4, 4, 3), Tile(8, 32, 4, 4, 3), FEW, Tile(32, 64, 2, 4, 6), Tile(64, 64, 2, 8, 3), SOME, MANY),
    gated=(Tile(4, 16, 4, 4, 4), Tile(8, 32, 4, 4, 3), FEW, *GATED),
    row_bytes=256,
    column_bytes=72,
)


def packed_linear(
    x: torch.Tensor,
    words: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    bias: Sequence[torch.Tensor],
    activation: str = "",
) -> torch.Tensor:
    """See `specdec.backends.linear.packed.packed_linear`."""
    group, sizes = x.shape[-1] // len(scales[0]), [w.shape[1] for w in words]
    product = launch(aligned_rows(x), None, words, scales, sizes, bias, x.dtype, activation, group, TILES)
    return product.view(*x.shape[:-1], product.shape[1])
