"""Matmuls of a few rows on a CPU, computed as weight times transposed rows where that is faster: plain steps and small
rounds.

Both ways read the same weights and give the same sums, in another order. Which is faster depends on processor, BLAS
library and shape, often unexpectedly: with torch 2.13 on an AMD EPYC, an output head of 49,152 tokens takes 10 ms for
one row, 35 for three, and 7 transposed (docs/results.md). So it is measured, once per process and shape.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import nn

MEASURED = (1, 2, 3, 4, 6, 8)  # rows; other numbers of rows use the next larger one's result
LEAST_SIZE = 1 << 17  # elements of a weight; below, a matmul takes less time than the code around it
MARGIN = 1.2  # how much faster the transposed way must be, so that processes agree
READ_BYTES = 1 << 25  # of weights in turn, so that they are read from memory, as in a forward
REPEATS = 3

Ways = tuple[bool, ...]  # by the number of rows, whether to multiply transposed


class FewRows:
    """The linear layers in `modules` whose matmuls of a few rows are faster transposed on this machine; none on a
    GPU."""

    def __init__(self, modules: Iterable[nn.Module]):
        found = (layer for module in modules for layer in module.modules())
        self._forwards: dict[nn.Linear, Callable[[torch.Tensor], torch.Tensor]] = {}
        for layer in found:
            if isinstance(layer, nn.Linear) and layer not in self._forwards and _is_plain(layer):
                chosen = measure(*layer.weight.shape, layer.weight.dtype, torch.get_num_threads())
                if any(chosen):
                    self._forwards[layer] = partial(few_rows, layer, chosen)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Use the faster way within the context, except in layers whose forward is already replaced."""
        try:
            for layer, forward in self._forwards.items():
                layer.__dict__.setdefault("forward", forward)
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Restore the forward of all layers, also after an interrupted step."""
        for layer, forward in self._forwards.items():
            if layer.__dict__.get("forward") is forward:
                del layer.__dict__["forward"]


def _is_plain(layer: nn.Linear) -> bool:
    """Return whether `layer` is on the CPU, does what `nn.Linear` does, and is large enough."""
    if type(layer).forward is not nn.Linear.forward or type(layer.weight) is not nn.Parameter:
        return False
    weight = layer.weight
    is_dense = weight.is_floating_point() and weight.is_contiguous()
    return is_dense and weight.device.type == "cpu" and weight.numel() >= LEAST_SIZE


def few_rows(layer: nn.Linear, ways: Ways, x: torch.Tensor) -> torch.Tensor:
    """Compute `layer` on x [..., K], in the way that `ways` has for its number of rows."""
    num_rows = x.numel() // x.shape[-1]
    if num_rows >= len(ways) or not ways[num_rows]:
        return F.linear(x, layer.weight, layer.bias)
    out = transposed(x.reshape(num_rows, -1), layer.weight)
    return (out if layer.bias is None else out + layer.bias).view(*x.shape[:-1], -1)


def transposed(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return rows [R, K] times weight [N, K] transposed, [R, N] contiguous. One row is computed twice: libraries have
    another routine for a vector, which may be slower."""
    given = torch.cat((rows, rows)) if len(rows) == 1 else rows
    return (weight @ given.t()).t()[: len(rows)].contiguous()


@cache
@torch.inference_mode()
def measure(num_columns: int, num_features: int, dtype: torch.dtype, num_threads: int) -> Ways:
    """Return which numbers of rows are faster transposed with weights [num_columns, num_features] of `dtype`; large
    ones are measured on part of the columns. num_threads: torch's current number."""
    row_bytes = num_features * dtype.itemsize
    num_columns = min(num_columns, max(1, READ_BYTES // row_bytes))
    num_weights = max(1, READ_BYTES // (num_columns * row_bytes))
    weights = torch.ones(num_weights, num_columns, num_features, dtype=dtype, device="cpu")
    ways = [False] * (MEASURED[-1] + 1)
    for before, num_rows in zip((0, *MEASURED), MEASURED, strict=False):
        rows = weights.new_ones(num_rows, num_features)
        as_it_is, other = (_seconds(partial(way, rows), weights) for way in (F.linear, transposed))
        ways[before + 1 : num_rows + 1] = [as_it_is > MARGIN * other] * (num_rows - before)
    return tuple(ways)


def _seconds(product: Callable[[torch.Tensor], object], weights: torch.Tensor) -> float:
    """Return the best time, in seconds, of the products with all of `weights` [W, N, K]."""
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        for weight in weights.unbind():
            product(weight)
        best = min(best, time.perf_counter() - start)
    return best
