"""A watch over modules: are all tensors and submodules what they were, and where they lay, when it was set?

Graphs and compiled layers read weights by address, so whatever replaces or moves one makes them read what is no longer
there. A call of `generate` cannot afford to walk a model by name, which takes milliseconds; the watch keeps the
dictionaries that such a walk looks into and compares them with copies, without a loop in Python.
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
        self._places: list[tuple[dict[Any, Any], str, str, Any]] = []  # where it stands, its key, its name, and what
        for root in modules:
            for path, module in root.named_modules():
                prefix = f"{path}." if path else ""
                for owned in (module._parameters, module._buffers, module._modules):
                    what = "module " if owned is module._modules else ""
                    self._places += [(owned, k, f"{what}{prefix}{k}", v) for k, v in owned.items() if v is not None]
        self._tensors = [t for *_, t in self._places if isinstance(t, torch.Tensor)]
        self._addresses = list(map(torch.Tensor.data_ptr, self._tensors))
        self._single = [(owned, key, t) for owned, key, _, t in self._places if _is_single(t)]
        self._owned = list({id(owned): owned for owned, *_ in self._places}.values())
        self._then = list(map(dict, self._owned))

    def is_intact(self) -> bool:
        """Whether everything is what and where it was."""
        if self._is_same() and all(owned.get(key) is tensor for owned, key, tensor in self._single):
            return list(map(torch.Tensor.data_ptr, self._tensors)) == self._addresses
        if self.moved():
            return False
        self._then = list(map(dict, self._owned))  # there is more than before
        return True

    def moved(self) -> list[str]:
        """Names of what is no longer what or where it was."""
        pairs = zip(self._tensors, self._addresses, strict=True)
        elsewhere = {id(tensor) for tensor, address in pairs if tensor.data_ptr() != address}
        return [name for owned, key, name, then in self._places if owned.get(key) is not then or id(then) in elsewhere]

    def _is_same(self) -> bool:
        """Whether every dictionary holds what it held; of tensors with one element, equal numbers will do."""
        try:
            return self._owned == self._then  # values are compared by identity first
        except (RuntimeError, TypeError):  # other tensors: ambiguous truth, other shapes or devices
            return False


def _is_single(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1
