"""Products of many rows: cuBLAS where its bits are those of our kernel, which they are where it does not split K."""

import torch
from torch.nn import functional as F

from specdec.backends.triton.launch.ahead import is_rehearsing
from specdec.backends.triton.launch.relaunch import OUR_ROWS
from specdec.backends.triton.linear import gates, products

MAX_ROWS, MAX_GATED_ROWS = OUR_ROWS, 128  # up to here our kernel is the faster one
CHECKED_APART, LEAST_CHECKED = 64, 16  # rows: one of each of the smallest tiles that cuBLAS has for many rows
SEED = 0

ANSWERS: dict[
    tuple[object, ...], bool
] = {}  # of this process, as Triton's own caches are; cuBLAS does not change in it


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> torch.Tensor:
    """See `products.product`, for any number of rows. A rehearsal meets the kernels of both ways."""
    most = MAX_ROWS if activation is None else MAX_GATED_ROWS
    if x.shape[0] > most and (is_rehearsing() or same_bits(x.shape[0], weight, bias)):
        joined = F.linear(x, weight, bias)
        out = joined if activation is None else gates.gate(joined, activation)
        if not is_rehearsing():
            return out
        products.product(x[:LEAST_CHECKED], weight, bias, None)  # what `same_bits` compares
    return products.product(x, weight, bias, activation)


def same_bits(num_rows: int, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Return whether cuBLAS computes the bits of our kernel for `num_rows` rows and weights of this shape.

    That differs from one number of rows to the next. The first call compares them, which waits for the GPU, unless a
    capture runs: then the answer is no, which is always right.
    """
    key = (num_rows, *weight.shape, weight.dtype, weight.device, bias is not None)
    if key not in ANSWERS:
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        ANSWERS[key] = _agrees(num_rows, weight, bias)
    return ANSWERS[key]


def _agrees(num_rows: int, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Compare some of `num_rows` random rows, one of every tile, the first and the last among them. Zeros show nothing.

    Our kernel takes LEAST_CHECKED at a time.
    """
    random = torch.Generator(weight.device).manual_seed(SEED)
    x = torch.randn(num_rows, weight.shape[1], generator=random, dtype=weight.dtype, device=weight.device)
    num_checked = LEAST_CHECKED * -(-num_rows // (LEAST_CHECKED * CHECKED_APART))
    rows = torch.linspace(0, num_rows - 1, num_checked, device=weight.device).long()
    ours = torch.cat([products.product(part, weight, bias, None) for part in x[rows].split(LEAST_CHECKED)])
    return bool((F.linear(x, weight, bias)[rows] == ours).all() & ours.any())
