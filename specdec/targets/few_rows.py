"""Products of a few rows on a CPU, as weight times rows transposed where that is faster: a step or a round at small batch.

Both ways read the same weights and give the same sums, in another order. Which is faster depends on the processor, the
BLAS library and the shape, not always as one would think: with torch 2.13 on an AMD EPYC an output head of 49,152 tokens
takes 10 ms for one row, 33 for three, and 7 transposed (docs/results.md). So it is measured, once a process and shape.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

MEASURED = (1, 2, 3, 4, 6, 8)  # rows; those between go as the next of them
LEAST_SIZE = 1 << 17  # elements of a weight; below, a product takes less than what is around it
MARGIN = 1.2  # by which the other way must be faster, so that processes agree
READ_BYTES = 1 << 25  # of weights in turn, which come from memory then, as in a forward
REPEATS = 3

Ways = tuple[bool, ...]  # by the number of rows, whether they go transposed
_found: dict[tuple[object, ...], Ways] = {}


class FewRows:
    """The linear layers in `modules` whose products of a few rows are faster transposed here; none on a GPU."""

    def __init__(self, modules: Iterable[nn.Module]):
        layers = [m for module in dict.fromkeys(modules) for m in module.modules() if _is_plain(m)]
        by_shape: dict[tuple[object, ...], list[nn.Linear]] = {}
        for layer in dict.fromkeys(layers):
            by_shape.setdefault((layer.weight.shape, layer.weight.dtype, torch.get_num_threads()), []).append(layer)
        self._forwards: dict[nn.Linear, Callable[[torch.Tensor], torch.Tensor]] = {}
        for key, alike in by_shape.items():
            if key not in _found:
                _found[key] = measure([layer.weight.detach() for layer in alike])
            if any(_found[key]):
                self._forwards |= {layer: partial(few_rows, layer, _found[key]) for layer in alike}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within it, those layers multiply that way, but for any whose forward someone else has replaced."""
        replaced = [layer for layer in self._forwards if "forward" not in layer.__dict__]
        try:
            for layer in replaced:
                layer.__dict__["forward"] = self._forwards[layer]
            yield
        finally:
            for layer in replaced:
                layer.__dict__.pop("forward", None)


def _is_plain(module: nn.Module) -> bool:
    """Whether `module` is a linear layer on the CPU that does what `nn.Linear` does, and large enough."""
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        return False
    weight = module.weight
    is_torchs = type(weight) is nn.Parameter and weight.is_floating_point() and weight.is_contiguous()
    return is_torchs and weight.device.type == "cpu" and weight.numel() >= LEAST_SIZE


def few_rows(layer: nn.Linear, ways: Ways, x: torch.Tensor) -> torch.Tensor:
    """What `layer` gives of x [..., K], as `ways` has it."""
    num_rows = x.numel() // x.shape[-1]
    if num_rows >= len(ways) or not ways[num_rows]:
        return F.linear(x, layer.weight, layer.bias)
    out = transposed(x.reshape(num_rows, -1), layer.weight)
    return (out if layer.bias is None else out + layer.bias).view(*x.shape[:-1], -1)


def transposed(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return rows [R, K] times weight [N, K] transposed, [R, N] contiguous. One row goes twice: libraries have another
    routine for a vector, which may be the slower one."""
    given = torch.cat((rows, rows)) if len(rows) == 1 else rows
    return (weight @ given.t()).t()[: len(rows)].contiguous()


@torch.inference_mode()
def measure(weights: Sequence[torch.Tensor]) -> Ways:
    """Return which numbers of rows are faster transposed with `weights` [N, K], all of one shape."""
    used = weights[: max(1, READ_BYTES // weights[0].nbytes)]
    ways = [False] * (MEASURED[-1] + 1)
    for before, num_rows in zip((0, *MEASURED), MEASURED, strict=False):
        rows = torch.arange(num_rows * used[0].shape[1]).cos().view(num_rows, -1).to(used[0].dtype)
        times = [_seconds(partial(way, rows), used) for way in (F.linear, transposed)]
        ways[before + 1 : num_rows + 1] = [times[0] > MARGIN * times[1]] * (num_rows - before)
    return tuple(ways)


def _seconds(product: Callable[[torch.Tensor], object], weights: Sequence[torch.Tensor]) -> float:
    """Return how long the products with all `weights` take, at best."""
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        for weight in weights:
            product(weight)
        best = min(best, time.perf_counter() - start)
    return best
