"""Products of rows and weights in FP8. Tensor cores multiply FP8; blocks of 128 features are added in order, in fp32.

By block, rows have a scale per 128 features and weights per 128 x 128, as DeepSeek-V3 has them, and a block is scaled
before it is added; by channel, rows have one scale and weights one per column, and sums are scaled at the end.

Twins: `specdec.backends.linear.fp8`.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from specdec.backends.linear import aligned_rows
from specdec.backends.triton.launch.relaunch import cached_launch, follows_early, wait_for_others
from specdec.backends.triton.launch.sizes import cdiv, next_power_of_2
from specdec.backends.triton.linear.gated_fp8 import gated_fp8, takes
from specdec.backends.triton.linear.parts import Tile, Tiles
from specdec.backends.triton.linear.quantised import launch
from specdec.backends.triton.linear.rounding import quantised


@triton.jit(do_not_specialize=["stride"])
def _quantise_kernel(
    x, out, scales, stride, K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, PDL: tl.constexpr
):
    """Quantise GROUPS groups of features of one row of K, with a scale per group. GROUP: 128, or at least K; stride in
    units of 16."""
    wait_for_others(PDL, True)
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    value = tl.load(x + row * stride * 16 + at, mask=at < K, other=0.0).to(tl.float32)
    value, scale = quantised(value, 1)
    tl.store(out + row * K + at, value, mask=at < K)
    tl.store(scales + row * tl.cdiv(K, GROUP) + group, scale, mask=group * GROUP < K)


FEW, NARROW, MANY = Tile(16, 16, 4, 4, 4), Tile(16, 16, 4, 4, 5), Tile(128, 128, 1, 8, 3)
TILES = Tiles(
    narrow=(NARROW, NARROW, NARROW, Tile(32, 32, 2, 4, 7), Tile(64, 32, 2, 4, 6), Tile(64, 64, 2, 8, 4), MANY),
    wide=(FEW, FEW, FEW, Tile(32, 32, 2, 4, 5), Tile(64, 64, 2, 8, 4), Tile(64, 128, 1, 8, 4), MANY),
    gated=(FEW, FEW, FEW, Tile(64, 64, 1, 4, 3), Tile(64, 64, 1, 4, 3), Tile(128, 64, 1, 8, 4), MANY),
    row_bytes=132,
    column_bytes=132,
)


def quantise(x: torch.Tensor, by_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """See `specdec.backends.linear.fp8.quantise`."""
    rows = aligned_rows(x)
    num_rows, K = rows.shape
    group, together = (next_power_of_2(K), 1) if by_row else (128, 16)
    num = cdiv(K, group)
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_rows, num, dtype=torch.float32, device=x.device)
    if num_rows:
        grid = num_rows, cdiv(num, together)
        is_early = follows_early(num_rows)
        run = cached_launch(_quantise_kernel, 16 if by_row else 4, launch_pdl=is_early)
        run(grid, rows, out, scales, rows.stride(0) // 16, K=K, GROUP=group, GROUPS=together, PDL=is_early)
    return out, scales.view(*x.shape[:-1], num)


def fp8_linear(
    x: torch.Tensor,
    row_scales: torch.Tensor,
    weights: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    bias: Sequence[torch.Tensor],
    dtype: torch.dtype,
    activation: str = "",
) -> torch.Tensor:
    """See `specdec.backends.linear.fp8.fp8_linear`."""
    args = _rows(x), _rows(row_scales), weights, scales
    if takes(len(args[0]), len(weights[0]), scales, activation):
        product = gated_fp8(*args, bias, dtype, activation, False)[0]
    else:
        sizes, group = [len(w) for w in weights], -1 if scales[0].dim() == 1 else 0
        product = launch(*args, sizes, bias, dtype, activation, group, TILES)
    return product.view(*x.shape[:-1], product.shape[1])


def gated_linear_fp8(
    x: torch.Tensor,
    row_scales: torch.Tensor,
    weights: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    bias: Sequence[torch.Tensor],
    dtype: torch.dtype,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `specdec.backends.linear.fp8.gated_linear_fp8`. Many rows take two launches."""
    rows = _rows(x)
    if not takes(len(rows), len(weights[0]), scales, activation):
        return quantise(fp8_linear(x, row_scales, weights, scales, bias, dtype, activation), False)
    made = gated_fp8(rows, _rows(row_scales), weights, scales, bias, dtype, activation, True)
    return made[0].view(*x.shape[:-1], made[0].shape[1]), made[1].view(*x.shape[:-1], made[1].shape[1])


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])
