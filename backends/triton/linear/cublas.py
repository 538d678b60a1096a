"""Products of many rows: cuBLAS, else cuBLASLt, where its bits are our kernel's, as they are where K is not split."""

from enum import Enum, auto
from functools import cache

import torch
from torch.nn import functional as F

from specdec.backends.triton.launch.ahead import is_rehearsing
from specdec.backends.triton.launch.relaunch import OUR_ROWS
from specdec.backends.triton.linear import gates, products

MAX_ROWS, MAX_GATED_ROWS = OUR_ROWS, 128  # up to here our kernel is the faster one
LT_ROWS = 128  # above, cuBLASLt is mostly faster than our kernel where cuBLAS splits K
CHECKED_APART, LEAST_CHECKED = 64, 16  # rows: one of each of the smallest tiles that cuBLAS has for many rows
SEED = 0


class Way(Enum):
    """Ways to multiply. CUBLAS_LT adds a bias of zeros: torch gives products with a bias to cuBLASLt, which seldom
    splits K."""

    OURS = auto()
    CUBLAS = auto()
    CUBLAS_LT = auto()


# Of this process, as Triton's own caches are; cuBLAS does not change in it.
ANSWERS: dict[tuple[object, ...], Way] = {}


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> torch.Tensor:
    """See `products.product`, for any number of rows. A rehearsal meets the kernels of both ways."""
    most = MAX_ROWS if activation is None else MAX_GATED_ROWS
    way = Way.OURS
    if x.shape[0] > most:
        way = Way.CUBLAS if is_rehearsing() else way_of(x.shape[0], weight, bias)
    if way is not Way.OURS:
        joined = F.linear(x, weight, _zeros(weight) if way is Way.CUBLAS_LT else bias)
        out = joined if activation is None else gates.gate(joined, activation)
        if not is_rehearsing():
            return out
        products.product(x[:LEAST_CHECKED], weight, bias, None)  # what `way_of` compares
    return products.product(x, weight, bias, activation)


def way_of(num_rows: int, weight: torch.Tensor, bias: torch.Tensor | None) -> Way:
    """Return the way to multiply `num_rows` rows with weights of this shape: a library's where it has our bits.

    That differs from one number of rows to the next. The first call compares them, which waits for the GPU, unless a
    capture runs: then the answer is ours, which is always right.
    """
    key = (num_rows, *weight.shape, weight.dtype, weight.device, bias is not None)
    if key not in ANSWERS:
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return Way.OURS
        ANSWERS[key] = _compared(num_rows, weight, bias)
    return ANSWERS[key]


def _compared(num_rows: int, weight: torch.Tensor, bias: torch.Tensor | None) -> Way:
    if _agrees(num_rows, weight, bias, bias):
        return Way.CUBLAS
    may_help = bias is None and num_rows > LT_ROWS
    return Way.CUBLAS_LT if may_help and _agrees(num_rows, weight, None, _zeros(weight)) else Way.OURS


def _agrees(num_rows: int, weight: torch.Tensor, bias: torch.Tensor | None, given: torch.Tensor | None) -> bool:
    """Compare some of `num_rows` random rows, one of every tile, the first and the last among them. Zeros show nothing.

    Our kernel takes LEAST_CHECKED at a time, and `bias`; the library gets the bias `given`.
    """
    random = torch.Generator(weight.device).manual_seed(SEED)
    x = torch.randn(num_rows, weight.shape[1], generator=random, dtype=weight.dtype, device=weight.device)
    num_checked = LEAST_CHECKED * -(-num_rows // (LEAST_CHECKED * CHECKED_APART))
    rows = torch.linspace(0, num_rows - 1, num_checked, device=weight.device).long()
    ours = torch.cat([products.product(part, weight, bias, None) for part in x[rows].split(LEAST_CHECKED)])
    return bool((F.linear(x, weight, given)[rows] == ours).all() & ours.any())


def _zeros(weight: torch.Tensor) -> torch.Tensor:
    return _cached_zeros(weight.shape[0], weight.dtype, weight.device)


@cache  # graphs read it
def _cached_zeros(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(size, dtype=dtype, device=device)
