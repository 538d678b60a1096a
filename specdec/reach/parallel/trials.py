"""Changes that ranks try on modules together: undoes them, and checks whether outputs stay the same."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from specdec.backends.comm import all_reduce
from specdec.backends.differences import bound, distance

NUM_TOKENS = 8  # tokens of the forwards that are compared


class Changes:
    """Changes of modules that can be undone."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def restore(self) -> None:
        """Undo the changes, the last first. A second call does nothing, or continues where one failed."""
        while self._undo:
            self._undo[-1]()
            self._undo.pop()

    def on_restore(self, fn: Callable[..., Any], *args: Any) -> None:
        """Call fn(*args) at `restore`; it may be called again after an error in it."""
        self._undo.append(partial(fn, *args))

    def replace(self, own: dict[str, Any], key: str, value: Any) -> None:
        self.on_restore(own.__setitem__, key, own[key])
        own[key] = value

    def replace_forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Set the forward of `module`; for the method of its class, remove the override."""
        self.on_restore(_set_forward, module, vars(module).get("forward"))
        is_of_class = getattr(forward, "__func__", None) is type(module).forward
        _set_forward(module, None if is_of_class else forward)


def _set_forward(module: nn.Module, forward: Callable[..., Any] | None) -> None:
    """Override the forward of `module`; None: remove the override."""
    vars(module).pop("forward", None)
    if forward is not None:
        vars(module)["forward"] = forward


def hidden_states(size: int, like: torch.Tensor) -> torch.Tensor:
    """Return hidden states [1, NUM_TOKENS, size], the same on all ranks, of the type and on the device of `like`."""
    numbers = torch.arange(NUM_TOKENS * size, device=like.device)
    return numbers.mul(2.4).sin().to(like.dtype).view(1, NUM_TOKENS, size)


def is_same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether two outputs [.., h] of a module differ by no more than rounding."""
    return distance(ours, theirs) <= bound(ours.dtype)


def any_rank(is_so: bool, group: str, device: torch.device) -> bool:
    """Return whether `is_so` on any rank of the process group named `group`; all its ranks call this."""
    return bool(all_reduce(torch.tensor([float(is_so)], device=device), group) > 0)
