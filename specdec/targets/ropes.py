"""Rotary embeddings whose frequencies depend on the longest sequence: held at those of short ones.

Transformers' "dynamic" and "longrope" look at the largest position of every forward, which waits for the device, and
change their frequencies beyond a limit, for all tokens at once. Below it they are constant: `rope_limit` says where it
is, and within `constant_ropes` such modules compute with the original frequencies and look at nothing. Those that
compute frequencies anew in every forward, on the host (Phi-MoE), look up what they gave by position at attach.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

VARYING = ("dynamic", "longrope")
ORIGINAL = "original_inv_freq"
ANEW = "rope_init_fn"  # computes frequencies; forwards that name it do so every time
MOST_POSITIONS = 1 << 20  # of a table

Forward = Callable[..., Any]


def rope_limit(config: Any) -> tuple[int, str] | None:
    """Return up to how many positions the frequencies of a text config's ropes are constant, and the type of the rope
    that ends first; None if they all are constant."""
    parameters = getattr(config, "rope_parameters", None) or {}
    limits = []
    for own in [parameters, *parameters.values()]:
        kind = own.get("rope_type") if isinstance(own, dict) else None
        if kind in VARYING:
            trained = own.get("original_max_position_embeddings") if kind == "longrope" else None
            limits.append((int(trained or config.max_position_embeddings), str(kind)))
    return min(limits, default=None)


def varying_ropes(model: nn.Module) -> list[nn.Module]:
    """List the modules of `model` whose frequencies change and that keep the original ones."""
    found = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        names = kinds.values() if isinstance(kinds, dict) else [kinds]
        if any(name in VARYING for name in names) and any(name.endswith(ORIGINAL) for name in module._buffers):
            found.append(module)
    return found


@torch.no_grad()
def tabled_ropes(model: Any, num_positions: int) -> dict[nn.Module, Forward]:
    """Return forwards that look up cos and sin for the modules of `model` that compute frequencies anew in theirs.

    num_positions: of the model, up to where its frequencies are constant; of more than a table has room for, none.
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


@contextmanager
def constant_ropes(ropes: Sequence[nn.Module], tables: Mapping[nn.Module, Forward]) -> Iterator[None]:
    """Let `ropes` compute with their original frequencies, whatever sequences they saw, within the context, and those
    in `tables` by these."""
    changed = dict.fromkeys([*ropes, *tables])
    before = [(rope, dict(rope._buffers), rope.__dict__.get("forward")) for rope in changed]
    try:
        for rope in changed:
            for name in [n for n in rope._buffers if n.endswith(ORIGINAL)]:
                rope._buffers[name.removesuffix(ORIGINAL) + "inv_freq"] = rope._buffers[name]
            rope.__dict__["forward"] = tables.get(rope) or _own_forward(rope)
        yield
    finally:
        for rope, buffers, forward in before:
            rope._buffers.update(buffers)
            rope.__dict__.pop("forward")
            if forward is not None:
                rope.__dict__["forward"] = forward


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
