"""RMS norms, with or without a residual added first. A program's work depends on H only, so a row's bits do, too.
Weights are parameters, so they are loaded while the previous kernel still runs.

Twins: `specdec.backends.linear`, and `fp8` there for results in FP8.
"""

import torch
import triton
import triton.language as tl

from specdec.backends.triton.launch.relaunch import (
    cached_launch,
    early_and_leading,
    follows_early,
    is_aligned,
    wait_for_others,
)
from specdec.backends.triton.launch.sizes import cdiv, next_power_of_2
from specdec.backends.triton.linear.rounding import quantised
from specdec.backends.triton.linear.strides import in_rows, whole_rows

WIDE = 1024  # elements per program, at least: several rows if they are short
NUM_WARPS = 8


@triton.jit
def normalised(value, weight, eps, offset, H: tl.constexpr, LATE: tl.constexpr):
    """Return the norms of rows `value` [ROWS, BLOCK], zeros past H, in their dtype; weight [BLOCK]."""
    wide = value.to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 1) / H + eps)[:, None]
    scale = weight.to(tl.float32)[None, :]
    if LATE:
        normed = normed * (offset + scale)
    else:
        normed = normed.to(value.dtype).to(tl.float32) * scale
    return normed.to(value.dtype)


@triton.jit(do_not_specialize=["num_rows", "inner", "stride_outer", "stride_inner"])
def _norm_kernel(
    x,
    residual,
    weight,
    out,
    scales,
    total,
    num_rows,
    inner,
    stride_outer,
    stride_inner,
    eps,
    offset,
    H: tl.constexpr,
    UNIT: tl.constexpr,
    ADD: tl.constexpr,
    LATE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm ROWS rows of H. Row r of x begins at UNIT * (r // inner * stride_outer + r % inner * stride_inner).

    GROUP: features (128, or BLOCK) that are quantised with one scale, as `fp8.quantise` does; 0: no quantisation.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    h = tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (h < H)[None, :]
    source = (row // inner * stride_outer + row % inner * stride_inner) * UNIT
    # 8 features per thread for every dtype: with 16 for FP8, threads would exchange features through shared memory.
    at = tl.max_contiguous(row[:, None] * H + h[None, :], (1, 8))
    scale = tl.load(weight + h, mask=h < H, other=0.0)
    wait_for_others(PDL, True)
    value = tl.load(x + source[:, None] + h[None, :], mask=inside, other=0.0)
    if ADD:
        added = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        value = (value.to(tl.float32) + added).to(total.dtype.element_ty)
        tl.store(total + at, value, mask=inside)
    normed = normalised(value, scale, eps, offset, H, LATE)
    if GROUP:
        groups, of_groups = quantised(normed.to(tl.float32).reshape([ROWS, BLOCK // GROUP, GROUP]), 2)
        tl.store(out + at, groups.reshape([ROWS, BLOCK]), mask=inside)
        g = tl.arange(0, BLOCK // GROUP)
        is_group = (row < num_rows)[:, None] & (g * GROUP < H)[None, :]
        tl.store(scales + row[:, None] * tl.cdiv(H, GROUP) + g[None, :], of_groups, mask=is_group)
    else:
        tl.store(out + at, normed, mask=inside)


@triton.jit(
    do_not_specialize=["num_rows", "inner", "stride_outer", "stride_inner"],
    do_not_specialize_on_alignment=["gate"],
)
def _gated_norm_kernel(
    x,
    gate,
    weight,
    out,
    num_rows,
    inner,
    stride_outer,
    stride_inner,
    eps,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
    LEADS: tl.constexpr,
):
    """Norm and gate ROWS rows of H. Row r of gate begins at r // inner * stride_outer + r % inner * stride_inner."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    h = tl.arange(0, BLOCK)
    scale = tl.load(weight + h, mask=h < H, other=0.0)
    wait_for_others(PDL, LEADS)
    inside = (row < num_rows)[:, None] & (h < H)[None, :]
    source, at = row // inner * stride_outer + row % inner * stride_inner, row[:, None] * H + h[None, :]
    normed = normalised(tl.load(x + at, mask=inside, other=0.0), scale, eps, 0.0, H, False)
    by = tl.load(gate + source[:, None] + h[None, :], mask=inside, other=0.0).to(tl.float32)
    product = normed.to(tl.float32) * (by / (1 + tl.exp(-by)))
    tl.store(out + at, product.to(normed.dtype), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, is_late: bool) -> torch.Tensor:
    """See `specdec.backends.linear.rms_norm`."""
    x, rows = in_rows(x)
    return _launch(x, x, rows, weight, eps, offset, is_late, None)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, is_late: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `specdec.backends.linear.add_rms_norm`."""
    x, residual = x.contiguous(), residual.contiguous()
    total = torch.empty_like(x)
    return _launch(x, residual, whole_rows(x), weight, eps, offset, is_late, total), total


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `specdec.backends.linear.gated_rms_norm`."""
    x, (strided, rows) = x.contiguous(), in_rows(gate)
    out, H = torch.empty_like(x), x.shape[-1]
    num_rows, block = x.numel() // H, next_power_of_2(H)
    together = max(WIDE // 2 // block, 1)
    if num_rows:
        num_tokens = gate.numel() // gate.shape[-2:].numel() if gate.dim() > 2 else gate.shape[0]  # of heads, or rows
        args = x, strided, weight, out, num_rows, *rows, eps
        constants = {"H": H, "ROWS": together, "BLOCK": block}
        _gated_norm_kernel[(cdiv(num_rows, together),)](*args, **constants, **early_and_leading(num_tokens))
    return out


def rms_norm_fp8(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, is_late: bool, by_row: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `specdec.backends.linear.fp8.rms_norm_fp8`."""
    x, scales = x.contiguous(), _scales(x, by_row)
    return _launch(x, x, whole_rows(x), weight, eps, offset, is_late, None, scales), scales


def add_rms_norm_fp8(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    offset: float,
    is_late: bool,
    by_row: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `specdec.backends.linear.fp8.add_rms_norm_fp8`."""
    x, residual, scales = x.contiguous(), residual.contiguous(), _scales(x, by_row)
    total = torch.empty_like(x)
    return _launch(x, residual, whole_rows(x), weight, eps, offset, is_late, total, scales), scales, total


def _scales(x: torch.Tensor, by_row: bool) -> torch.Tensor:
    return torch.empty(*x.shape[:-1], 1 if by_row else x.shape[-1] // 128, dtype=torch.float32, device=x.device)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor,
    rows: tuple[int, int, int],
    weight: torch.Tensor,
    eps: float,
    offset: float,
    is_late: bool,
    total: torch.Tensor | None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch the norm kernel. scales: output for the scales of FP8 results; None: results are not quantised."""
    out = torch.empty(x.shape, dtype=x.dtype if scales is None else torch.float8_e4m3fn, device=x.device)
    H = x.shape[-1]
    num_rows = x.numel() // H
    if num_rows == 0:
        return out
    inner, outer, stride = rows
    unit = 8 if all(stride % 8 == 0 for stride in x.stride()[:-1]) else 1  # whatever the number of rows
    block = next_power_of_2(H)
    together = max(WIDE // block, 1)
    grid = (cdiv(num_rows, together),)
    tensors = x, residual, weight, out, out if scales is None else scales, out if total is None else total
    args = *tensors, num_rows, inner, outer // unit, stride // unit, eps, offset
    constants = {"H": H, "UNIT": unit, "ADD": total is not None, "LATE": is_late}
    is_early = follows_early(num_rows)
    group = 0 if scales is None else block if scales.shape[-1] == 1 else 128
    constants |= {"GROUP": group, "ROWS": together, "BLOCK": block, "PDL": is_early}
    if is_aligned(x, residual, weight):
        cached_launch(_norm_kernel, NUM_WARPS, launch_pdl=is_early)(grid, *args, **constants)
    else:
        _norm_kernel[grid](*args, **constants, num_warps=NUM_WARPS, launch_pdl=is_early)
    return out
