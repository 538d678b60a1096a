"""`specdec::quantise`, `fp8_linear`, ...: products of FP8 with FP8 (W8A8), with scales by block or by channel.

By block (fine-grained FP8, DeepSeek-V3): activations have a scale per 128 features, weights one per block of 128 x 128.
By channel (compressed-tensors): activations have a scale per row, weights one per output channel. Weights and scales
are the model's own tensors. A row's bits depend on that row alone.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from specdec.backends.library import KERNEL_DTYPES, op
from specdec.backends.linear import NORM_ARGUMENTS, add_rms_norm, joined_twin, rms_norm

BLOCK = 128
DTYPE = torch.float8_e4m3fn
LARGEST, LEAST = 448.0, 1e-12  # of DTYPE, and of a scale
CHUNK = 32 * BLOCK  # rows of a weight that `in_blocks` quantises at a time
Blocks = tuple[torch.Tensor, torch.Tensor]  # weights [N, K], and scales [N / 128, K / 128] float32


@op("quantise(Tensor x, bool by_row) -> (Tensor, Tensor)", lambda *given: _like_quantised(*given), "linear.fp8")
def quantise(x: torch.Tensor, by_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise x [..., K] to FP8 (e4m3); return it and its scales, float32: x is about the product of the two. Each 128
    features have a scale, [..., K / 128], that maps their largest magnitude to 448 (DeepSeek-V3, arXiv:2412.19437,
    section 3.3.2). by_row: each row has one, [..., 1]."""
    blocks = x.float().unflatten(-1, (-1, x.shape[-1] if by_row else BLOCK))
    largest = torch.full((), LARGEST, dtype=torch.float32, device=x.device)
    scales = (blocks.abs().amax(-1) / largest).clamp(min=LEAST)  # by a number, CUDA multiplies by its reciprocal
    return (blocks / scales.unsqueeze(-1)).flatten(-2).to(DTYPE), scales


@op(
    f"rms_norm_fp8(Tensor x, {NORM_ARGUMENTS}, bool by_row) -> (Tensor, Tensor)",
    lambda x, *given: _like_quantised(x, given[-1]),
    "linear.norms",
)
def rms_norm_fp8(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float, is_late: bool, by_row: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `quantise(linear.rms_norm(...), by_row)`, in one launch."""
    return quantise.twin(rms_norm.twin(x, weight, eps, offset, is_late), by_row)


@op(
    f"add_rms_norm_fp8(Tensor x, Tensor residual, {NORM_ARGUMENTS}, bool by_row) -> (Tensor, Tensor, Tensor)",
    lambda x, *given: (*_like_quantised(x, given[-1]), x.new_empty(x.shape)),
    "linear.norms",
)
def add_rms_norm_fp8(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    offset: float,
    is_late: bool,
    by_row: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (FP8, scales, total): `linear.add_rms_norm` with its norm quantised (see `quantise`), in one launch."""
    normed, total = add_rms_norm.twin(x, residual, weight, eps, offset, is_late)
    return *quantise.twin(normed, by_row), total


@op(
    "fp8_linear(Tensor x, Tensor row_scales, Tensor[] weights, Tensor[] scales, Tensor[] bias, ScalarType dtype, "
    "str activation='') -> Tensor",
    lambda x, _, weights, scales, bias, dtype, activation="": x.new_empty(
        *x.shape[:-1], sum(w.shape[0] for w in weights) // (2 if activation else 1), dtype=dtype
    ),
    "linear.fp8",
    lambda *given: given[5] in KERNEL_DTYPES,
)
def fp8_linear(
    x: torch.Tensor,
    row_scales: torch.Tensor,
    weights: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    bias: Sequence[torch.Tensor],
    dtype: torch.dtype,
    activation: str = "",
) -> torch.Tensor:
    """Return x @ W.T + bias [..., sum of N] in `dtype`, for one to three weights W, whose products are concatenated.

    x, row_scales: from `quantise`. weights: [N, K] FP8 (e4m3), contiguous; K a multiple of 128, N of 16. scales: one
    for each weight, float32: [N / 128, K / 128], N / 128 rounded up, or [N] if x was quantised `by_row`. bias: one [N]
    for each weight, or an empty list. Rounded to `dtype` after the product and after the bias. activation: of
    `linear.gated_linear`, with two weights (gate, up) of N rows: the result is activation(gate) * up, [..., N].
    """
    rows = x.float() * row_scales.repeat_interleave(x.shape[-1] // row_scales.shape[-1], -1)
    parts = [(rows @ dequantised(w, s).T).to(dtype) for w, s in zip(weights, scales, strict=True)]
    return joined_twin(parts, bias, activation)


@op(
    "gated_linear_fp8(Tensor x, Tensor row_scales, Tensor[] weights, Tensor[] scales, Tensor[] bias, ScalarType dtype, "
    "str activation) -> (Tensor, Tensor)",
    lambda x, _, weights, *rest: _like_quantised(x.new_empty(*x.shape[:-1], weights[0].shape[0]), False),
    "linear.fp8",
    lambda *given: given[5] in KERNEL_DTYPES,
)
def gated_linear_fp8(
    x: torch.Tensor,
    row_scales: torch.Tensor,
    weights: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor],
    bias: Sequence[torch.Tensor],
    dtype: torch.dtype,
    activation: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `quantise(fp8_linear(...), by_row=False)` with an activation; N must be a multiple of 128. One launch for
    few rows with weights scaled by block."""
    return quantise.twin(fp8_linear.twin(x, row_scales, weights, scales, bias, dtype, activation), False)


def takes(N: int, K: int) -> bool:
    """Return whether `fp8_linear` supports weights [N, K] with scales by block."""
    return N % 16 == 0 and K % BLOCK == 0


@torch.no_grad()
@torch.inference_mode(False)
def in_blocks(weight: torch.Tensor) -> Blocks:
    """Quantise weight [N, K] by blocks of 128 x 128, whose largest magnitude becomes 448: (FP8, scales); see Blocks."""
    weights, scales = zip(*map(_rows_in_blocks, weight.detach().split(CHUNK)), strict=True)
    return torch.cat(weights), torch.cat(scales)


def _rows_in_blocks(weight: torch.Tensor) -> Blocks:
    padded = F.pad(weight.float(), (0, 0, 0, -len(weight) % BLOCK))
    blocks = padded.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
    scales = (blocks.abs().amax((1, 3), keepdim=True) / LARGEST).clamp(min=LEAST)
    return (blocks / scales).to(DTYPE).flatten(2).flatten(0, 1)[: len(weight)], scales[:, 0, :, 0]


def times_blocks(x: torch.Tensor, weights: Blocks, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x @ W.T + bias [..., N] for x [..., K] in bf16 or fp16, W from `in_blocks`, bias [N] or None."""
    of_weights, scales = weights
    return fp8_linear(*quantise(x, False), [of_weights], [scales], [] if bias is None else [bias], x.dtype)


def dequantised(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the fp32 values [N, K] of an FP8 weight and its scales, [N / 128, K / 128] or [N]."""
    N, K = weight.shape
    if scales.dim() == 1:
        return weight.float() * scales.unsqueeze(1)
    return weight.float() * scales.repeat_interleave(BLOCK, 0)[:N].repeat_interleave(BLOCK, 1)[:, :K]


def _like_quantised(x: torch.Tensor, by_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return empty tensors like those that `quantise` makes of x."""
    scales = x.new_empty(*x.shape[:-1], 1 if by_row else x.shape[-1] // BLOCK, dtype=torch.float32)
    return x.new_empty(x.shape, dtype=DTYPE), scales
