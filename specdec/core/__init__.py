"""The core ring: what a prompt, a round and a graph replay need. It knows live models by protocols alone."""

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")


def names_from(package: str, names: Sequence[str], homes: Sequence[str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of `package`, which imports `names` on first use from its modules `homes`, in order."""

    def find(name: str) -> Any:
        if name in names:
            for home in homes:
                module = import_module(f".{home}", package)
                if name in vars(module):
                    return vars(module)[name]
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find


def grouped(values: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """Group `values` by `key`, in the order of appearance."""
    found: dict[Any, list[T]] = {}
    for value in values:
        found.setdefault(key(value), []).append(value)
    return found
