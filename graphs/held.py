"""Snapshots of the attributes of modules and configs, compared later without a Python loop."""

import operator
from collections.abc import Collection, Sequence
from itertools import repeat
from typing import Any

from torch import nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks")
OWN = frozenset({*vars(nn.Module()), "_compiled_call_impl"})  # of every module: watched by name, or not at all
WATCHED = ("_modules", *HOOKS)
DEPTH = 3  # of containers within attributes


class Held:
    """A snapshot of the dictionaries of `owners`, modules and configs: every value of a config, and those values of
    modules that may affect a forward. neutral: names of attributes that do not."""

    def __init__(self, owners: Sequence[Any], neutral: Collection[str]):
        modules = [vars(owner) for owner in owners if isinstance(owner, nn.Module)]
        groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}  # by keys: a call reads the values of all of them
        for owned in modules:
            keys = (key for key in owned if key in WATCHED or not (key in OWN or key in neutral))
            groups.setdefault(tuple(keys), []).append(owned)
        self._groups = [(operator.itemgetter(*keys), group) for keys, group in groups.items()]
        self._values = [[get(copied(owned) | _empty(owned)) for owned in group] for get, group in self._groups]
        self._empty = [part for owned in modules for part in _empty(owned).values()]
        self._plain = [owned for owned in modules if "forward" not in owned]  # their forwards are their classes'
        self._configs = [vars(owner) for owner in owners if not isinstance(owner, nn.Module)]
        self._settings = [copied(owned) for owned in self._configs]

    def is_same(self) -> bool:
        """Return whether all values are unchanged, and no module has got an instance `forward`."""
        if any(self._empty) or any(map(operator.contains, self._plain, repeat("forward"))):
            return False
        try:
            values = [list(map(get, group)) for get, group in self._groups]
        except KeyError:  # an attribute is gone
            return False
        return is_equal((values, self._configs), (self._values, self._settings))


def copied(owned: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the dictionary of a module or config, its containers copied too, DEPTH levels deep."""
    return {k: v if k in OWN and k not in WATCHED else _copied(v, DEPTH) for k, v in owned.items()}


def _copied(value: Any, depth: int) -> Any:
    if depth and isinstance(value, dict):
        return {key: _copied(v, depth - 1) for key, v in value.items()}
    if depth and type(value) is list:
        return [_copied(v, depth - 1) for v in value]
    return set(value) if type(value) is set else value


def _empty(owned: dict[str, Any]) -> dict[str, Any]:
    """Return the watched containers that are empty, uncopied: testing them for emptiness is faster than comparing."""
    return {key: owned[key] for key in WATCHED if not owned[key]}


def is_equal(a: Any, b: Any) -> bool:
    """Return whether values are equal; False if comparing them fails."""
    try:
        return bool(a == b)  # parts of containers are compared by identity first
    except Exception:  # tensors: ambiguous truth, other shapes or devices
        return False
