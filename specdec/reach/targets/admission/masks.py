"""Classifies mask functions of transformers by their values far out: causal, a window, chunks, or another kind."""

from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch

FAR = 1 << 18  # masks are evaluated around this query position, so that windows and chunks up to it are seen


class Reach(NamedTuple):
    """The keys that a causal mask leaves visible: of the last `window` tokens, or of the query's chunk; None: all."""

    window: int | None = None
    chunk: int | None = None


def classify_mask(mask_function: Callable[..., Any], device: torch.device) -> str | Reach:
    """Return how far back queries see under a mask function of transformers, or a phrase that describes another
    mask."""
    zero = torch.zeros((), dtype=torch.int64, device=device)
    mask_function, keys = _far_out(mask_function), torch.arange(FAR + 1, device=device)

    def first_visible(q: int) -> int | str:
        try:
            visible = torch.as_tensor(
                mask_function(zero, zero, torch.tensor(q, device=device), keys), device=device
            ).expand(FAR + 1)
        except Exception as error:
            return f"a mask that cannot be evaluated alone ({type(error).__name__})"
        count = int(visible.count_nonzero())
        if not bool(visible[q]) or bool(visible[q + 1 :].any()):
            return "a mask that is not causal"
        return q + 1 - count if bool(visible[q + 1 - count : q + 1].all()) else "a mask with holes"

    firsts: dict[int, int] = {}
    for q in (FAR, FAR - 37, FAR - 4999):
        first = first_visible(q)
        if isinstance(first, str):
            return first
        firsts[q] = first
    if not any(firsts.values()):
        return Reach()
    window = FAR + 1 - firsts[FAR]
    if all(q + 1 - first == window for q, first in firsts.items()):
        return Reach(window=window)
    before = first_visible(firsts[FAR] - 1)  # the end of the previous chunk
    if isinstance(before, int) and all(first == q - q % (firsts[FAR] - before) for q, first in firsts.items()):
        return Reach(chunk=firsts[FAR] - before)
    return "a mask whose width depends on the position"


def _far_out(value: Any) -> Any:
    """Return `value`, found in the closure of a mask function, extended past the end of the text: a tensor by row and
    token that puts all tokens in the block -1, that is in none (an image, say), does the same for later tokens."""
    if isinstance(value, tuple):
        return tuple(map(_far_out, value))
    if isinstance(value, torch.Tensor) and value.dim() == 2 and bool((value == -1).all()):
        return value[:, :1].expand(-1, FAR + 1)
    if not isinstance(value, FunctionType) or not value.__closure__:
        return value
    cells = tuple(CellType(_far_out(cell.cell_contents)) for cell in value.__closure__)
    return FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
