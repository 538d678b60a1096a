"""Products of many rows: cuBLAS or cuBLASLt where their results equal our kernel's bit for bit, as without split-K."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch.nn import functional as F

from specdec.backends.triton.launch.ahead import is_rehearsing
from specdec.backends.triton.launch.relaunch import OUR_ROWS
from specdec.backends.triton.linear import gates, products

TIMED_ROWS, TIMES = 1024, 2  # up to here implementations are timed: cuBLAS can take 266 µs where cuBLASLt takes 160
HEAD_START = 1 << 18  # cycles that the GPU waits, so that launches are queued before it runs them
CHECKED_APART, LEAST_CHECKED = 64, 16  # rows: one of each of the smallest tiles that cuBLAS has for many rows
SEED = 0


# Multiplies rows x [M, K] with weight [N, K], and adds a bias [N] or None.
Linear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
# By shape: the library call with our bits, None for our kernel. Process-wide, like Triton's own caches; cuBLAS's choice
# does not change within a process.
ANSWERS: dict[tuple[object, ...], Linear | None] = {}


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> torch.Tensor:
    """See `products.product`, for any number of rows. A rehearsal compiles the kernels of both implementations."""
    if x.shape[0] <= OUR_ROWS:
        return products.product(x, weight, bias, activation)
    if is_rehearsing():
        products.product(x[:LEAST_CHECKED], weight, bias, None)  # what `with_our_bits` compares
        _multiply(by_cublas, x, weight, bias, activation)
        return products.product(x, weight, bias, activation)
    return _multiply(with_our_bits(x.shape[0], weight, bias, activation), x, weight, bias, activation)


def _multiply(
    linear: Linear | None, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    if linear is None:
        return products.product(x, weight, bias, activation)
    joined = linear(x, weight, bias)
    return joined if activation is None else gates.gate(joined, activation)


def by_cublas(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight, bias)


def by_cublas_lt(weight: torch.Tensor) -> Linear:
    """Return a bias-free product by cuBLASLt, which seldom splits K: torch calls it only with a bias, of zeros here."""
    zeros = weight.new_zeros(weight.shape[0])
    return lambda x, weight, _: F.linear(x, weight, zeros)


def with_our_bits(
    num_rows: int, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> Linear | None:
    """Return a library call that multiplies `num_rows` rows with weights of this shape to the bits of our kernel; None,
    for our kernel, if no library has these bits or our kernel is faster.

    The result differs from one number of rows to the next. The first call compares and times implementations, which
    waits for the GPU, except during a capture, when it returns None, which is always correct.
    """
    key = (num_rows, *weight.shape, weight.dtype, weight.device, bias is not None, activation)
    if key not in ANSWERS:
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        libraries = by_cublas, *[by_cublas_lt(weight)] * (bias is None)
        equal = filter(partial(_agrees, num_rows, weight, bias), libraries)
        if num_rows <= TIMED_ROWS:
            ANSWERS[key] = min((*equal, None), key=partial(_ms, num_rows, weight, bias, activation))
        else:  # such prompts mostly run eagerly, where nearly every length is new: timing would cost more than it gains
            ANSWERS[key] = next(equal, None)
    return ANSWERS[key]


def _agrees(num_rows: int, weight: torch.Tensor, bias: torch.Tensor | None, linear: Linear) -> bool:
    """Compare results of some of `num_rows` random rows: one of every tile, with the first and the last row. If all of
    ours are zero, the comparison fails. Our kernel takes LEAST_CHECKED rows at a time.
    """
    random = torch.Generator(weight.device).manual_seed(SEED)
    x = torch.randn(num_rows, weight.shape[1], generator=random, dtype=weight.dtype, device=weight.device)
    num_checked = LEAST_CHECKED * -(-num_rows // (LEAST_CHECKED * CHECKED_APART))
    rows = torch.linspace(0, num_rows - 1, num_checked, device=weight.device).long()
    ours = torch.cat([products.product(part, weight, bias, None) for part in x[rows].split(LEAST_CHECKED)])
    return bool((linear(x, weight, bias)[rows] == ours).all() & ours.any())


def _ms(
    num_rows: int, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None, linear: Linear | None
) -> float:
    """Return the minimum of TIMES GPU times of a product, in ms, after a warm-up run."""
    if not weight.is_cuda:
        return 0.0
    x = weight.new_zeros(num_rows, weight.shape[1])
    events = [torch.cuda.Event(enable_timing=True) for _ in range(TIMES + 1)]
    _multiply(linear, x, weight, bias, activation)
    torch.cuda._sleep(HEAD_START)
    events[0].record()
    for event in events[1:]:
        _multiply(linear, x, weight, bias, activation)
        event.record()
    events[-1].synchronize()
    return min(begin.elapsed_time(end) for begin, end in pairwise(events))
