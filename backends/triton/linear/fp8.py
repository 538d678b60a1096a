"""Products of rows and weights in FP8, each with a scale per 128 features (and 128 columns, of a weight), as
DeepSeek-V3 has them. Tensor cores multiply FP8; a block of features is scaled in fp32 before it is added, in order.

Twins: `specdec.backends.linear.fp8`.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from specdec.backends.triton.launch.relaunch import CachedLaunch
from specdec.backends.triton.linear.parts import Tile, Tiles
from specdec.backends.triton.linear.quantised import launch
from specdec.backends.triton.linear.rounding import quantised


@triton.jit(do_not_specialize=["stride"])
def _quantise_kernel(x, out, scales, stride, NUM: tl.constexpr, BLOCKS: tl.constexpr):
    """BLOCKS blocks of 128 features of one row, of NUM blocks in all; stride in units of 16."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    at, inside = block[:, None] * 128 + tl.arange(0, 128)[None, :], (block < NUM)[:, None]
    value = tl.load(x + row * stride * 16 + at, mask=inside, other=0.0).to(tl.float32)
    value, scale = quantised(value, 1)
    tl.store(out + row * NUM * 128 + at, value, mask=inside)
    tl.store(scales + row * NUM + block, scale, mask=block < NUM)


FEW, SOME, MANY = Tile(16, 16, 4, 4, 4), Tile(64, 64, 1, 4, 5), Tile(128, 128, 1, 8, 3)
TILES = Tiles(
    narrow=(FEW, FEW, Tile(32, 32, 2, 4, 6), Tile(64, 32, 2, 8, 5), SOME, MANY),
    wide=(FEW, FEW, Tile(32, 32, 2, 4, 4), Tile(64, 64, 1, 4, 6), SOME, MANY),
    gated=(FEW, FEW, Tile(32, 32, 2, 4, 4), Tile(64, 64, 1, 8, 5), Tile(128, 64, 1, 8, 3), MANY),
    row_bytes=132,
    column_bytes=132,
)


_quantise = CachedLaunch(_quantise_kernel)


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `specdec.backends.linear.fp8.quantise`; rows x [M, K], aligned."""
    num_rows, num = x.shape[0], x.shape[1] // 128
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_rows, num, dtype=torch.float32, device=x.device)
    if num_rows:
        grid = num_rows, triton.cdiv(num, 16)
        _quantise(grid, x, out, scales, x.stride(0) // 16, NUM=num, BLOCKS=16)
    return out, scales


def fp8_linear(
    x: torch.Tensor,
    row_scales: torch.Tensor,
    weights: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    bias: Sequence[torch.Tensor],
    dtype: torch.dtype,
    activation: str,
) -> torch.Tensor:
    """See `specdec.backends.linear.fp8.fp8_linear`; rows x [M, K]."""
    return launch(x, row_scales, weights, scales, [len(w) for w in weights], bias, dtype, activation, 0, TILES)
