"""Rotary embeddings whose frequencies depend on the longest sequence: held at those of short ones.

Transformers' "dynamic" and "longrope" look at the largest position of every forward, which waits for the device, and
change their frequencies beyond a limit, for all tokens at once. Below it they are constant: `rope_limit` says where it
is, and within `constant_ropes` such modules compute with the original frequencies and look at nothing.
"""

import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn

VARYING = ("dynamic", "longrope")
ORIGINAL = "original_inv_freq"


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


@contextmanager
def constant_ropes(ropes: Sequence[nn.Module]) -> Iterator[None]:
    """Let `ropes` compute with their original frequencies, whatever sequences they saw, within the context."""
    before = [(rope, dict(rope._buffers), rope.__dict__.get("forward")) for rope in ropes]
    try:
        for rope in ropes:
            for name in [n for n in rope._buffers if n.endswith(ORIGINAL)]:
                rope._buffers[name.removesuffix(ORIGINAL) + "inv_freq"] = rope._buffers[name]
            rope.__dict__["forward"] = MethodType(inspect.unwrap(type(rope).forward), rope)
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
