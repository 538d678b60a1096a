"""Detects changes of a live model: tensors, submodules, hooks, forwards, plain attributes and configs.

Graphs and compiled layers hold the tensors they were made from, and cached K/V belongs to the weights that computed it.
Walking a model by name takes milliseconds, too long for every call of `generate`; the watch keeps the dictionaries that
such a walk reads and compares them with copies, without a Python loop.
"""

import operator
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from specdec.graphs.held import HOOKS, OWN, Held, copied, is_equal


class ChangeKind(Enum):
    """Kinds of change of a model: values written in place, a tensor moved or converted, or an object replaced."""

    WRITTEN = "written"
    MOVED = "moved"
    CONVERTED = "converted"
    TENSOR = "another tensor"
    MODULE = "another module"
    HOOKS = "other hooks"
    ATTRIBUTE = "another value"


class Change(NamedTuple):
    """A change of a model: `key` of `owner`, a module or config (None for a separate tensor); before: the old value."""

    kind: ChangeKind
    name: str
    detail: str
    owner: Any
    key: str
    before: Any

    def __str__(self) -> str:
        return f"{self.name} ({self.detail})"


class Watch:
    """Detects changes of the modules in `roots` (by name prefix) since it was made, or since `accept`.

    Detected: parameters and buffers that were replaced, moved (`.to()`, `.data =`), converted or written in place, by
    optimizers too; submodules, hooks and forwards that were replaced; other values of plain attributes, and of those of
    configs. Additions count only for hooks, forwards, configs and what an `nn.Sequential` runs, since no existing code
    reads others. Not detected: writes through `.data` or `numpy()`, or by kernels unknown to PyTorch.
    free: modules to leave out; tensors: further tensors whose writes count, by name; neutral: names of attributes that
    do not affect a forward; passive: the same for hooks, by their names or Python modules.
    """

    def __init__(
        self,
        roots: Mapping[str, nn.Module],
        *,
        free: Collection[nn.Module] = (),
        tensors: Iterable[tuple[str, torch.Tensor]] = (),
        neutral: Collection[str] = (),
        passive: Collection[str] = (),
    ):
        self._roots, self._free, self._beside = dict(roots), free, list(tensors)
        self._neutral, self._passive = frozenset(neutral), frozenset(passive)
        self._stepped: set[int] = set()  # addresses of storages: fused optimizers count no versions
        self._pending: set[int] = set()  # those of them that `changes` has seen
        hook = register_optimizer_step_post_hook(partial(_note_step, self._stepped))
        self.close = weakref.finalize(self, hook.remove)
        self._walk()

    def changes(self) -> list[Change]:
        """Return the changes since the watch was made, or since `accept`; empty if there are none."""
        while self._stepped:
            self._pending.add(self._stepped.pop())
        self._now = self._numbers()
        if not self._pending and self._now == self._then and self._is_same():
            return []
        found = [*self._tensor_changes(), *self._owned_changes()]
        if not found:
            self._refresh()
        return found

    def accept(self, changes: Sequence[Change]) -> None:
        """Accept `changes`, the result of the last `changes()`: later ones are relative to the present state."""
        if all(change.kind is ChangeKind.WRITTEN for change in changes):
            self._refresh()
        else:
            self._walk()

    def _refresh(self) -> None:
        """Accept the current state, so that later checks skip changes that were ignored or accepted."""
        self._pending.clear()
        self._then, self._held = self._now, self._hold()

    def _walk(self) -> None:
        self._pending.clear()
        self._owners: list[tuple[str, Any]] = []  # modules and configs, by prefixes of attributes
        self._places: list[_Place] = []
        seen: set[int] = set()
        for prefix, root in self._roots.items():
            for path, module in root.named_modules():
                if module not in self._free and id(module) not in seen:
                    self._add(f"{prefix}{path}{'.' * bool(path)}", module, seen)
        self._base = [copied(vars(owner)) for _, owner in self._owners]  # what counts
        self._held = self._hold()  # what was seen last
        self._dicts, self._keys = [p.owned for p in self._places], [p.key for p in self._places]
        self._values = [p.tensor for p in self._places]
        tensors = {id(t): t for t in self._values if t is not None}
        self._tensors = list(tensors.values())
        self._kinds = {key: (t.dtype, t.device) for key, t in tensors.items()}
        written = [*self._tensors, *(t for _, t in self._beside)]
        self._counted = [t for t in written if _has_version(t)]
        self._then = self._now = self._numbers()

    def _add(self, name: str, module: nn.Module, seen: set[int]) -> None:
        seen.add(id(module))
        self._owners.append((name, module))
        for owned in (module._parameters, module._buffers):
            self._places += [_Place(f"{name}{key}", module, key, owned, tensor) for key, tensor in owned.items()]
        config = vars(module).get("config")
        if config is not None and id(config) not in seen and hasattr(config, "__dict__"):
            seen.add(id(config))
            self._owners.append((f"{name}config.", config))

    def _hold(self) -> Held:
        return Held([owner for _, owner in self._owners], self._neutral)

    def _is_same(self) -> bool:
        """Return whether every dictionary has its old values, as far as they count."""
        is_same = all(map(operator.is_, map(dict.get, self._dicts, self._keys), self._values))
        return is_same and self._held.is_same()

    def _numbers(self) -> tuple[list[int], list[int]]:
        """Return the addresses of tensors, and how often each was written in place."""
        return list(map(torch.Tensor.data_ptr, self._tensors)), list(map(_VERSION, self._counted))

    def _tensor_changes(self) -> Iterator[Change]:
        moved, written = (
            {id(t) for t, now, then in zip(*counted, strict=True) if now != then}
            for counted in zip((self._tensors, self._counted), self._now, self._then, strict=True)
        )
        for name, module, key, owned, before in self._places:
            after = owned.get(key)
            kind = None
            if after is not before:
                kind = ChangeKind.TENSOR
            elif id(before) in moved:
                kind = ChangeKind.MOVED
            elif id(before) in written or self._is_stepped(before):
                kind = ChangeKind.WRITTEN
            if kind is not None:
                detail = self._conversion(before, after) if owned is module._parameters else ""
                kind = ChangeKind.CONVERTED if detail else kind
                yield Change(kind, name, detail or kind.value, module, key, before)
        for name, tensor in self._beside:
            if id(tensor) not in self._kinds and (id(tensor) in written or self._is_stepped(tensor)):
                yield Change(ChangeKind.WRITTEN, name, ChangeKind.WRITTEN.value, None, name, tensor)

    def _is_stepped(self, tensor: torch.Tensor | None) -> bool:
        """Return whether an optimizer has written the memory of `tensor`."""
        return tensor is not None and bool(self._pending) and _address(tensor) in self._pending

    def _conversion(self, before: torch.Tensor | None, after: torch.Tensor | None) -> str:
        """Return, in words, which dtype and device a parameter had and has; empty if they are the same."""
        if before is None or after is None or (then := self._kinds[id(before)]) == (after.dtype, after.device):
            return ""
        return f"{then[0]} on {then[1]} → {after.dtype} on {after.device}"

    def _owned_changes(self) -> Iterator[Change]:
        for (name, owner), then in zip(self._owners, self._base, strict=True):
            if not is_equal(vars(owner), then):
                yield from self._differences(name, owner, then, vars(owner))

    def _differences(self, name: str, owner: Any, then: dict[str, Any], now: dict[str, Any]) -> Iterator[Change]:
        if isinstance(owner, nn.Module):
            for hooks in HOOKS:
                if self._active(then[hooks]) != self._active(now[hooks]):
                    yield Change(ChangeKind.HOOKS, f"{name}{hooks.strip('_')}", "other hooks", owner, hooks, None)
            added = now["_modules"] if isinstance(owner, nn.Sequential) else ()
            for key in dict.fromkeys([*then["_modules"], *added]):
                before = then["_modules"].get(key)
                if now["_modules"].get(key) is not before:
                    yield Change(ChangeKind.MODULE, f"{name}{key}", "another module", owner, key, before)
        for key in dict.fromkeys([*then, *(["forward"] if isinstance(owner, nn.Module) else now)]):
            before, after = then.get(key, GONE), now.get(key, GONE)
            if key in OWN or key in self._neutral or _is_as_it_was(before, after):
                continue
            yield Change(ChangeKind.ATTRIBUTE, f"{name}{key}", f"{_told(before)} → {_told(after)}", owner, key, before)

    def _active(self, hooks: Mapping[int, Any]) -> dict[int, Any]:
        """Return the hooks that may compute something."""
        return {
            i: hook
            for i, hook in hooks.items()
            if not self._passive & {getattr(hook, "__module__", None), getattr(hook, "__name__", None)}
        }


class _Place(NamedTuple):
    """The place of a tensor: `key` of `owned`, a dictionary of `module`; None where there was none."""

    name: str
    module: nn.Module
    key: str
    owned: dict[str, Any]
    tensor: torch.Tensor | None


class _Gone:
    def __repr__(self) -> str:
        return "nothing"


GONE = _Gone()
_VERSION = operator.attrgetter("_version")


def _has_version(tensor: torch.Tensor) -> bool:
    """Return whether writes to `tensor` are counted: not if it was made in inference mode, whatever data it has now."""
    try:
        _VERSION(tensor)
    except RuntimeError:
        return False
    return True


def _note_step(stepped: set[int], optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Record which memory an optimizer has written; a hook after its steps."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    stepped.update(map(_address, parameters))


def _address(tensor: torch.Tensor) -> int:
    """Return the address of the storage of `tensor`, or of a DTensor's local part; the id of other tensor subclasses
    without storage, such as torchao's."""
    own = getattr(tensor, "_local_tensor", tensor)
    try:
        return own.untyped_storage().data_ptr()
    except RuntimeError:
        return id(own)


def _is_as_it_was(before: Any, after: Any) -> bool:
    """Return whether an attribute still has its value. Keys may be added, and tensors other than parameters and buffers
    do not count: forwards store results there."""
    if before is after or isinstance(before, torch.Tensor) or isinstance(after, torch.Tensor):
        return True
    if isinstance(before, dict) and isinstance(after, dict):
        return all(key in after and _is_as_it_was(value, after[key]) for key, value in before.items())
    return is_equal(before, after)


def _told(value: Any) -> str:
    text = getattr(value, "__qualname__", None) or repr(value)
    return text if len(text) < 60 else f"{text[:56]}..."
