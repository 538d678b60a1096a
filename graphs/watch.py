"""A watch over modules: are all tensors and submodules what they were, and where they lay, when it was set?

Graphs and compiled layers read weights by address, so whatever replaces or moves one makes them read what is no longer
there. A call of `generate` cannot afford to walk a model by name, which takes milliseconds; the watch keeps the
dictionaries that such a walk looks into and compares what they hold without a loop in Python.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


class ModuleWatch:
    """Sees replaced, moved (`.to()`, `.data =`) and re-tied tensors, and replaced submodules, of `modules`.

    Additions do not count: nothing that was captured reads them.
    """

    def __init__(self, modules: Iterable[nn.Module]):
        tensors: list[tuple[dict[str, Any], str, str]] = []  # where it stands, its key there, its full name
        submodules: list[tuple[dict[str, Any], str, str]] = []
        for root in modules:
            for path, module in root.named_modules():
                prefix = f"{path}." if path else ""
                for owned in (module._parameters, module._buffers):
                    tensors += [(owned, key, prefix + key) for key, tensor in owned.items() if tensor is not None]
                submodules += [(module._modules, key, f"module {prefix}{key}") for key in module._modules]
        self._names = [name for *_, name in (*tensors, *submodules)]
        self._tensor_places = [d for d, *_ in tensors], [key for _, key, _ in tensors]
        self._module_places = [d for d, *_ in submodules], [key for _, key, _ in submodules]
        self._tensors, self._modules = self._read()
        self._addresses = list(map(torch.Tensor.data_ptr, self._tensors))

    def is_intact(self) -> bool:
        """Whether everything is what and where it was."""
        tensors, modules = self._read()
        try:
            # Lists compare their items by identity first. Tensors that differ are then compared by value, which raises
            # or, for a tensor of one equal number, goes on to the addresses.
            return (
                modules == self._modules
                and tensors == self._tensors
                and list(map(torch.Tensor.data_ptr, tensors)) == self._addresses
            )
        except (RuntimeError, TypeError):  # ambiguous truth, other shapes or devices; None where something was deleted
            return False

    def moved(self) -> list[str]:
        """Names of what is no longer what or where it was."""
        tensors, modules = self._read()
        now = [(id(t), t.data_ptr() if t is not None else 0) for t in tensors] + [(id(m), 0) for m in modules]
        then = [(id(t), a) for t, a in zip(self._tensors, self._addresses, strict=True)]
        then += [(id(m), 0) for m in self._modules]
        return [name for name, a, b in zip(self._names, now, then, strict=True) if a != b]

    def _read(self) -> tuple[list[Any], list[Any]]:
        """Tensors and submodules as they are now; None where one is gone."""
        return list(map(dict.get, *self._tensor_places)), list(map(dict.get, *self._module_places))
