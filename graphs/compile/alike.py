"""Groups modules that are equal in classes, plain attributes and shapes of weights."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, type)


def alike(layers: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Return `layers`, children of one list, in groups of equal class, plain attributes, and shapes of weights.

    An attribute that is each layer's index in the list does not count.
    """
    facts = [_facts(layer) for layer in layers]
    names = {name for f in facts for name in f}
    indices = {name for name in names if all(f.get(name, i) == i for i, f in enumerate(facts))}
    groups: dict[str, list[nn.Module]] = defaultdict(list)
    for layer, f in zip(layers, facts, strict=True):
        groups[str(sorted((name, repr(v)) for name, v in f.items() if name not in indices))].append(layer)
    return list(groups.values())


def _facts(layer: nn.Module) -> dict[str, Any]:
    """Return the facts that are compared, by name: attributes of all modules within, shapes of all tensors."""
    facts: dict[str, Any] = {}
    for path, module in layer.named_modules(remove_duplicate=False):
        facts[f"{path}:"] = type(module)
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers", "_modules") and not name.startswith("_specdec"):
                facts[f"{path}:{name}"] = _fact(value)
    first: dict[int, str] = {}
    for name, tensor in tensors_of(layer).items():
        is_parameter = isinstance(tensor, nn.Parameter), tensor.requires_grad
        facts[name] = (type(tensor), seen(tensor), is_parameter, first.setdefault(id(tensor), name))
    return facts


def _fact(value: Any) -> Any:
    """Return a key that identifies `value`: itself if it is plain, functions by their code, else its id."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, MethodType):
        return _fact(value.__func__)
    if isinstance(value, FunctionType):
        return id(value.__code__), [_fact(c.cell_contents) for c in value.__closure__ or ()], _fact(value.__defaults__)
    if isinstance(value, partial):
        return _fact(value.func), _fact(value.args), _fact(value.keywords)
    if isinstance(value, Mapping):  # the keys of hooks are numbers that count up
        return type(value), [(k if isinstance(k, str) else "", _fact(v)) for k, v in value.items()]
    if isinstance(value, tuple | list | set | frozenset):
        return type(value), [_fact(v) for v in value]
    return id(value)


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name; a shared one under each of its names."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return parameters | dict(module.named_buffers(remove_duplicate=False))


def seen(value: Any) -> Any:
    """Return a tensor's shape, dtype, device and strides; any other value unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    return tuple(value.shape), value.dtype, value.device, value.stride()
