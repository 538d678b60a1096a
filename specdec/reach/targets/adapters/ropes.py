"""Rotary embeddings whose frequencies depend on the longest sequence: kept at those of short sequences.

Transformers' "dynamic" and "longrope" read the largest position of every forward, which waits for the device, and
change their frequencies beyond a limit, for all tokens at once. Below it (`rope_limit`) they are constant; within
`Ropes.routed` such modules use the original frequencies without reading positions on the host. Those that compute
frequencies in every forward, on the host (Phi-MoE), look up tables by position, made at attach.
"""

import inspect
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from specdec.reach.targets.overrides import replaced
from specdec.reach.targets.shape import VARYING, position_limit

ORIGINAL = "original_inv_freq"
ANEW = "rope_init_fn"  # computes frequencies; forwards that name it do so every time
MOST_POSITIONS = 1 << 20  # of a table

Forward = Callable[..., Any]


def varying_ropes(model: nn.Module) -> list[nn.Module]:
    """List the modules of `model` whose frequencies change and that keep the original ones."""
    found = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        names = kinds.values() if isinstance(kinds, dict) else [kinds]
        if any(name in VARYING for name in names) and any(name.endswith(ORIGINAL) for name in module._buffers):
            found.append(module)
    return found


class Ropes:
    """The ropes in `model` whose frequencies are not constant."""

    def __init__(self, model: Any):
        tables = _tables(model, position_limit(model.config.get_text_config())[0] or MOST_POSITIONS + 1)
        self._forwards = {rope: tables.get(rope) or _own_forward(rope) for rope in [*varying_ropes(model), *tables]}

    def routed(self) -> AbstractContextManager[None]:
        """Use the original frequencies, or look them up, within the context, whatever sequences were seen."""
        places: list[tuple[dict[str, Any], str, Any]] = [(vars(r), "forward", f) for r, f in self._forwards.items()]
        for rope in self._forwards:
            kept = [(name, buffer) for name, buffer in rope._buffers.items() if name.endswith(ORIGINAL)]
            places += [(rope._buffers, name.removesuffix(ORIGINAL) + "inv_freq", buffer) for name, buffer in kept]
        return replaced(places)


@torch.no_grad()
def _tables(model: Any, num_positions: int) -> dict[nn.Module, Forward]:
    """Return forwards that look up cos and sin, for the modules of `model` that compute frequencies in every forward.

    num_positions: the number of positions with constant frequencies; {} if a table has no room for so many.
    """
    found = [rope for rope in model.modules() if ANEW in _names(rope)]
    if not found or num_positions > MOST_POSITIONS:
        return {}
    x = torch.zeros(1, 1, 1, dtype=model.dtype, device=model.device)
    positions = torch.arange(num_positions, device=model.device).unsqueeze(0)
    return {rope: partial(_look_up, *(table[0] for table in _own_forward(rope)(x, positions))) for rope in found}


def _look_up(
    cos: torch.Tensor, sin: torch.Tensor, x: torch.Tensor, position_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of cos and sin [num_positions, dim] in the dtype of x; position_ids: [B, T]."""
    return cos[position_ids].to(x.dtype), sin[position_ids].to(x.dtype)


def _own_forward(rope: nn.Module) -> Forward:
    """Return the forward of the class of `rope`, without what transformers wraps around it."""
    return MethodType(inspect.unwrap(type(rope).forward), rope)


def _names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of globals and attributes in a module's forward."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return () if code is None else code.co_names


def warn_of_low_precision(model: nn.Module) -> None:
    """Warn of low-precision rotary frequencies, as `model.to(dtype)` makes them: they change every text a little."""
    exact = (torch.float32, torch.float64)
    low = [name for name, b in model.named_buffers() if name.endswith("inv_freq") and b.dtype not in exact]
    if low:
        warnings.warn(
            f"{low[0]} is in low precision: model.to(dtype) rounded the rotary frequencies. The engine reproduces the "
            "model as it is; load with from_pretrained(..., dtype=...) to keep them in fp32.",
            stacklevel=4,
        )
