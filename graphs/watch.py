"""Watches modules: detects tensors and submodules that were replaced or moved since the watch was set.

Graphs and compiled layers read weights by address, so if one is replaced or moved they read stale memory. Walking a
model by name takes milliseconds, too long for every call of `generate`; the watch keeps the dictionaries that such a
walk reads and compares them with copies, without a Python loop.
"""

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import nn

from specdec.errors import GraphError


class ModuleWatch:
    """Detects replaced, moved (`.to()`, `.data =`) and re-tied tensors, and replaced submodules, of `modules`.

    Additions do not count: no captured graph reads them. free: modules that may replace what they own.
    """

    def __init__(self, modules: Iterable[nn.Module], free: Collection[nn.Module] = ()):
        self._places: list[tuple[dict[Any, Any], str, str, Any]] = []  # owning dict, key, name, value
        for root in modules:
            for path, module in root.named_modules():
                if module in free:
                    continue
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
        """Return whether nothing was replaced or moved."""
        if self._is_same() and all(owned.get(key) is tensor for owned, key, tensor in self._single):
            return list(map(torch.Tensor.data_ptr, self._tensors)) == self._addresses
        if self.moved():
            return False
        self._then = list(map(dict, self._owned))  # only additions
        return True

    def moved(self) -> list[str]:
        """Return the names of tensors and submodules that were replaced or moved."""
        pairs = zip(self._tensors, self._addresses, strict=True)
        elsewhere = {id(tensor) for tensor, address in pairs if tensor.data_ptr() != address}
        return [name for owned, key, name, then in self._places if owned.get(key) is not then or id(then) in elsewhere]

    def _is_same(self) -> bool:
        """Return whether every dictionary holds what it held; tensors with one element need only equal numbers."""
        try:
            return self._owned == self._then  # values are compared by identity first
        except (RuntimeError, TypeError):  # other tensors: ambiguous truth, other shapes or devices
            return False


class ChangeWatch:
    """Detects that weights of `modules` were changed since the last look: replaced, moved, or written in place.

    What is written through `.data`, or by kernels that PyTorch does not know of, leaves no trace. free: see
    `ModuleWatch`.
    """

    def __init__(self, modules: Iterable[nn.Module], free: Collection[nn.Module] = ()):
        self._modules, self._free = list(modules), free
        self._look()

    def has_changed(self) -> bool:
        """Return whether weights were changed since the last call, or since the watch was set."""
        if self._places.is_intact() and self._versions() == self._then:
            return False
        self._look()
        return True

    def _look(self) -> None:
        self._places = ModuleWatch(self._modules, self._free)
        weights = (weight for module in self._modules for weight in module.parameters())
        self._weights = [weight for weight in weights if not weight.is_inference()]  # those have no versions
        self._then = self._versions()

    def _versions(self) -> list[int]:
        return [weight._version for weight in self._weights]


class KindWatch:
    """Knows dtype and device of the parameters of `modules`, for engines without graphs: pools were made for them."""

    def __init__(self, modules: Iterable[nn.Module]):
        self._then = [
            (module._parameters, key, f"{type(root).__name__}'s {path}{'.' * bool(path)}{key}", p.dtype, p.device)
            for root in modules
            for path, module in root.named_modules()
            for key, p in module._parameters.items()
            if p is not None
        ]

    def check(self) -> None:
        """Raise GraphError if parameters have another dtype or device; parameters that are gone do not count."""
        changed = [
            (name, f"{now.dtype} on {now.device}", f"{dtype} on {device}")
            for owned, key, name, dtype, device in self._then
            if (now := owned.get(key)) is not None and (now.dtype is not dtype or now.device != device)
        ]
        if changed:
            name, is_now, was = changed[0]
            raise GraphError(
                f"{name} is {is_now} now and was {was} at attach() ({len(changed)} parameters in all): the engine's "
                "pools were made for that. detach(), convert and attach() again"
            )


def _is_single(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1
