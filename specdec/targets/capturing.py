"""Hooks by which transformers keeps the outputs of layers: installed when they are first asked for, and never removed.

Where we were the first to ask, they go when we go; transformers would install them again.
"""

from collections.abc import Iterator

from torch import nn
from transformers.utils import output_capturing

INSTALLED = "_output_capturing_hooks_installed"  # transformers' own note on a model


class CapturingHooks:
    """The hooks that `model` has when this is made, and is left with by `restore`."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._hooks = set(_hooks(model))
        self._noted = set(_noted(model))

    def restore(self) -> None:
        """Remove the hooks that have come since, and the notes that they are there."""
        for module, key in set(_hooks(self._model)) - self._hooks:
            del module._forward_hooks[key]
        for module in set(_noted(self._model)) - self._noted:
            delattr(module, INSTALLED)


def _hooks(model: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    for module in model.modules():
        for key, hook in module._forward_hooks.items():
            if getattr(hook, "__module__", None) == output_capturing.__name__:
                yield module, key


def _noted(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if INSTALLED in vars(module))
