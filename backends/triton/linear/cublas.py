"""Products of many rows: cuBLAS or cuBLASLt, where its bits are our kernel's, as they are where K is not split."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch.nn import functional as F

from specdec.backends.triton.launch.ahead import is_rehearsing
from specdec.backends.triton.launch.relaunch import OUR_ROWS
from specdec.backends.triton.linear import gates, products

MAX_ROWS, MAX_GATED_ROWS = OUR_ROWS, 128  # up to here our kernel is the faster one
LT_ROWS = 128  # above, cuBLASLt is mostly faster than our kernel where cuBLAS splits K
TIMED_ROWS, TIMES = 1024, 3  # up to here the faster of the two: cuBLAS took 266 µs for 448 rows, cuBLASLt 160
CHECKED_APART, LEAST_CHECKED = 64, 16  # rows: one of each of the smallest tiles that cuBLAS has for many rows
SEED = 0


# Multiplies rows x [M, K] with weight [N, K], and adds a bias [N] or None.
Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
# By shape: the library's way with our bits, None if it has none. Of this process, as Triton's own caches are; cuBLAS
# does not change in it.
ANSWERS: dict[tuple[object, ...], Linear | None] = {}


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> torch.Tensor:
    """See `products.product`, for any number of rows. A rehearsal meets the kernels of both ways."""
    most = MAX_ROWS if activation is None else MAX_GATED_ROWS
    linear: Linear | None = None
    if x.shape[0] > most:
        linear = by_cublas if is_rehearsing() else with_our_bits(x.shape[0], weight, bias)
    if linear is not None:
        joined = linear(x, weight, bias)
        out = joined if activation is None else gates.gate(joined, activation)
        if not is_rehearsing():
            return out
        products.product(x[:LEAST_CHECKED], weight, bias, None)  # what `with_our_bits` compares
    return products.product(x, weight, bias, activation)


def by_cublas(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight, bias)


def by_cublas_lt(weight: torch.Tensor) -> Linear:
    """Return a product without a bias by cuBLASLt, which seldom splits K: torch gives it products with a bias, of zeros
    here."""
    zeros = weight.new_zeros(weight.shape[0])
    return lambda x, weight, _: F.linear(x, weight, zeros)


def with_our_bits(num_rows: int, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear | None:
    """Return a library's way to multiply `num_rows` rows with weights of this shape to the bits of our kernel.

    That differs from one number of rows to the next. The first call compares them, which waits for the GPU, unless a
    capture runs: then the answer is None, which is always right.
    """
    key = (num_rows, *weight.shape, weight.dtype, weight.device, bias is not None)
    if key not in ANSWERS:
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        ways = [by_cublas, *[by_cublas_lt(weight)] * (bias is None and num_rows > LT_ROWS)]
        equal = filter(partial(_agrees, num_rows, weight, bias), ways)
        if num_rows <= TIMED_ROWS:
            ANSWERS[key] = min(equal, key=partial(_ms, num_rows, weight, bias), default=None)
        else:  # prompts of so many tokens also run eagerly, each with a first call of its length
            ANSWERS[key] = next(equal, None)
    return ANSWERS[key]


def _agrees(num_rows: int, weight: torch.Tensor, bias: torch.Tensor | None, linear: Linear) -> bool:
    """Compare some of `num_rows` random rows, one of every tile, the first and the last among them. Zeros show nothing.

    Our kernel takes LEAST_CHECKED at a time.
    """
    random = torch.Generator(weight.device).manual_seed(SEED)
    x = torch.randn(num_rows, weight.shape[1], generator=random, dtype=weight.dtype, device=weight.device)
    num_checked = LEAST_CHECKED * -(-num_rows // (LEAST_CHECKED * CHECKED_APART))
    rows = torch.linspace(0, num_rows - 1, num_checked, device=weight.device).long()
    ours = torch.cat([products.product(part, weight, bias, None) for part in x[rows].split(LEAST_CHECKED)])
    return bool((linear(x, weight, bias)[rows] == ours).all() & ours.any())


def _ms(num_rows: int, weight: torch.Tensor, bias: torch.Tensor | None, linear: Linear) -> float:
    """Return the least of TIMES times that a product takes on the GPU, which has loaded its kernel before."""
    if not weight.is_cuda:
        return 0.0
    x = weight.new_zeros(num_rows, weight.shape[1])
    events = [torch.cuda.Event(enable_timing=True) for _ in range(TIMES + 1)]
    events[0].record()
    for event in events[1:]:
        linear(x, weight, bias)
        event.record()
    events[-1].synchronize()
    return min(begin.elapsed_time(end) for begin, end in pairwise(events))
