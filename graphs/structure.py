"""What a trace depends on beside the values of tensors, as a digest: two models of one digest have the same trace.

It holds the modules with their plain attributes and hooks, the code that their forwards reach by name, as it is in
memory and as it is in its files, and how tensors lie in memory. What it cannot see (state deep inside an attribute)
shows where the trace is compared with the model.
"""

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specdec.graphs.merge import places_with_own_storage

PLAIN = (bool, int, float, complex, str, bytes, type(None))
TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, Enum)
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
DEPTH = 4  # of attributes within attributes
FOREIGN = {"torch", "numpy", "triton", *sys.stdlib_module_names}  # told apart by their versions


def structure(
    fn: Callable[..., Any],
    modules: Mapping[str, nn.Module],
    tensors: Mapping[str, torch.Tensor],
    inputs: Sequence[torch.Tensor],
    facts: str,
) -> str:
    """Return the digest of what tracing fn(*inputs) depends on, in hex.

    modules: roots of what `fn` runs; tensors: all that it reads; facts: what else the caller knows it depends on. Call
    it where `fn` is traced, after it has run: that may change what modules hold.
    """
    told = _Teller()
    lines: list[Any] = [facts, [_tensor(t) for t in inputs], _flags(), told.of(fn)]
    lines += [(name, _tensor(t)) for name, t in tensors.items()]
    lines.append(sorted(places_with_own_storage(list(tensors.values()))))  # which decides what is joined
    for prefix, root in modules.items():
        lines += [(prefix, name, told.module(module)) for name, module in root.named_modules()]
    lines += [sorted(told.code), sorted((name, _of_file(name)) for name in told.sources)]
    lines += [sorted((path.name, _file(path)) for path in Path(__file__).parent.glob("*.py"))]
    return sha256(repr(lines).encode()).hexdigest()[:32]


def _tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    kind, flags = type(tensor).__qualname__, (tensor.requires_grad, tensor.is_inference())
    return kind, str(tensor.dtype), tuple(tensor.shape), tensor.stride(), str(tensor.device), *flags


def _flags() -> list[Any]:
    """Return what forwards ask torch for."""
    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return [torch.get_default_dtype(), *(torch.is_autocast_enabled(device) for device in devices)]


class _Teller:
    """Describes values without addresses, and collects the code that they reach.

    code: (module, name, digest) of functions; sources: the modules they are from.
    """

    def __init__(self) -> None:
        self.code: set[tuple[str, str, str]] = set()
        self.sources: set[str] = set()
        self._seen: set[tuple[int, int]] = set()
        self._kept: list[Any] = []  # so that no address of `_seen` is used again

    def module(self, module: nn.Module) -> list[Any]:
        """Describe a module without its children and tensors; its forward is followed."""
        own = vars(module)
        usual = vars(nn.Module())
        lines: list[Any] = [
            self._class(type(module)),
            [self.of(h) for name in HOOKS for h in own.get(name, {}).values()],
        ]
        lines += [(name, self.of(value)) for name, value in own.items() if name not in usual]
        lines += [module.training, [name for name, value in module._buffers.items() if value is None]]
        if not _is_foreign(type(module).__module__):
            self._method(type(module), "forward")
        return lines

    def of(self, value: Any, depth: int = 0) -> Any:
        """Describe `value`; what is no plain value, collection or function is told by its class and attributes."""
        if isinstance(value, PLAIN + TORCH):
            return repr(value)
        if isinstance(value, torch.Tensor):
            return _tensor(value)
        if isinstance(value, nn.Module | type):
            return self._class(value if isinstance(value, type) else type(value))
        if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            return self._function(value, None)
        if depth == DEPTH:
            return type(value).__qualname__
        if isinstance(value, list | tuple):
            return [self.of(v, depth + 1) for v in value]
        if isinstance(value, set | frozenset):
            return sorted(repr(self.of(v, depth + 1)) for v in value)
        if isinstance(value, Mapping):
            return [(self.of(k, depth + 1), self.of(v, depth + 1)) for k, v in list(value.items())]
        attributes = getattr(value, "__dict__", None) or {}
        return type(value).__qualname__, [(k, self.of(v, depth + 1)) for k, v in list(attributes.items())]

    def _class(self, cls: type) -> str:
        if not _is_foreign(cls.__module__):
            self.sources.add(cls.__module__)
        return f"{cls.__module__}.{cls.__qualname__}"

    def _method(self, cls: type, name: str) -> None:
        """Follow the method, or property, `name` of `cls`; take in what plain value it is."""
        found = inspect.getattr_static(cls, name, None)
        if found is not None and isinstance(found, PLAIN):
            self.code.add((self._class(cls), name, repr(found)))
        for part in ("fget", "__func__", "func"):  # properties; static and class methods; cached properties
            found = getattr(found, part, None) or found
        if isinstance(found, types.FunctionType):
            self._function(found, cls)

    def _function(self, function: Any, cls: type | None) -> Any:
        """Describe a function, and follow what it names: globals, methods of `cls`, what it closes over."""
        if isinstance(function, functools.partial):
            return self.of(function.func), self.of(function.args), self.of(function.keywords)
        if isinstance(function, types.MethodType):
            cls, function = type(function.__self__), function.__func__
            if not isinstance(function, types.FunctionType):
                return type(function).__qualname__
        name = f"{function.__module__}.{function.__qualname__}"
        if _is_foreign(function.__module__) or (id(function), id(cls)) in self._seen:
            return name
        self._seen.add((id(function), id(cls)))
        self._kept.append((function, cls))
        self.sources.add(function.__module__)
        closed = [self.of(cell.cell_contents, DEPTH - 1) for cell in function.__closure__ or () if _is_set(cell)]
        facts = (_code(function.__code__), self.of(function.__defaults__), self.of(function.__kwdefaults__), closed)
        self.code.add((function.__module__, function.__qualname__, sha256(repr(facts).encode()).hexdigest()))
        self._follow(function, cls)
        return name

    def _follow(self, function: types.FunctionType, cls: type | None) -> None:
        names = set(_names(function.__code__))
        for name in sorted(names):
            value = function.__globals__.get(name)
            if isinstance(value, types.ModuleType) and not _is_foreign(value.__name__):
                for other in sorted(names.intersection(vars(value))):
                    self._value(f"{value.__name__}.{other}", vars(value)[other])
            elif value is not None:
                self._value(f"{function.__module__}.{name}", value)
            if cls is not None and not _is_foreign(cls.__module__):
                self._method(cls, name)

    def _value(self, name: str, value: Any) -> None:
        """Take in what the global `name` is."""
        if isinstance(value, (types.FunctionType, functools.partial, type, *PLAIN)):
            self.code.add(("global", name, repr(self.of(value))))


def _is_foreign(module: str | None) -> bool:
    return (module or "torch").partition(".")[0] in FOREIGN


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _inner(code: types.CodeType) -> Iterator[types.CodeType]:
    return (const for const in code.co_consts if isinstance(const, types.CodeType))


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the names that `code` looks up."""
    yield from code.co_names
    for inner in _inner(code):
        yield from _names(inner)


def _code(code: types.CodeType) -> Any:
    """Describe compiled code without where it is from."""
    consts = [
        sorted(map(repr, c)) if isinstance(c, frozenset) else repr(c)
        for c in code.co_consts
        if c not in [*_inner(code)]
    ]
    return code.co_code.hex(), code.co_names, code.co_varnames, consts, [_code(inner) for inner in _inner(code)]


def _of_file(module: str) -> str:
    """Return the digest of a module's file; empty for what has none."""
    path = getattr(sys.modules.get(module), "__file__", None)
    return _file(Path(path)) if path and Path(path).is_file() else ""


def _file(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()
