"""Recurrent layers of live models through our ops: their forwards run with globals in which the primitives are ours.

A mixer is a module whose forward, or a method that it calls, names a primitive; no model is known by name. Only its own
instance changes, and only within `Mixers.routed`.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from specdec.core.errors import AttachError
from specdec.reach.targets.adapters.primitives import PRIMITIVES
from specdec.reach.targets.marks import LayerTurns
from specdec.reach.targets.overrides import replaced


class PrimitiveCall:
    """Replaces a primitive in a mixer: calls our adapter with the layer id of this call.

    turns: the ids in the order of the calls in a forward; several if the mixer calls it several times.
    """

    def __init__(self, name: str, layer_ids: Sequence[int]):
        self.name, self.turns = name, LayerTurns(layer_ids)
        self._run = PRIMITIVES[name]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self.turns.take(), *args, **kwargs)


@dataclass(frozen=True)
class Mixer:
    """A recurrent module called `name`, its primitives in the order of first calls, and its methods bound to them."""

    name: str
    module: nn.Module
    calls: tuple[PrimitiveCall, ...]
    methods: Mapping[str, MethodType]


class Mixers:
    """The mixers of `model` in the order of its modules; ids number their primitives, until `renumber`.

    AttachError for modules whose forward is already overridden, or wrapped in a function that cannot be inspected.
    """

    def __init__(self, model: nn.Module):
        methods = {cls: _methods(cls) for cls in {type(module) for module in model.modules()}}
        self.mixers: list[Mixer] = []
        reasons, next_id = [], 0
        for name, module in model.named_modules():
            if methods[type(module)]:
                try:
                    self.mixers.append(_mixer(name, module, methods[type(module)], next_id))
                    next_id += len(self.mixers[-1].calls)
                except ValueError as error:
                    reasons.append(str(error))
        if reasons:
            raise AttachError(type(model).__name__, reasons)

    @contextmanager
    def routed(self) -> Iterator[None]:
        """Call our ops within the context; contexts may nest. ValueError if a method has been overridden."""
        for mixer in self.mixers:
            _check_methods(mixer)
            for call in mixer.calls:
                call.turns.begin()
        with replaced((vars(m.module), name, method) for m in self.mixers for name, method in m.methods.items()):
            yield

    def renumber(self, order: Sequence[int]) -> None:
        """Number the calls of a forward, from 0 on in their order, where `order` are the ids that it called until now.

        So each call has its own id, also if a mixer calls a primitive several times, or mixers run in another order
        than that of modules; calls that were not made have none.
        """
        for call in [call for mixer in self.mixers for call in mixer.calls]:
            call.turns = LayerTurns([new for new, layer_id in enumerate(order) if layer_id in call.turns.layer_ids])


def _mixer(name: str, module: nn.Module, methods: Mapping[str, FunctionType], first_id: int) -> Mixer:
    """Return `module` as a mixer whose primitives are numbered from first_id on; ValueError if it cannot be routed."""
    overridden = [method for method in methods if method in module.__dict__]
    if overridden:
        raise ValueError(_told(name, module, f"has a {overridden[0]} of its own, which would be left out"))
    names = dict.fromkeys(p for function in methods.values() for p in _primitives(function))
    calls = tuple(PrimitiveCall(p, (first_id + i,)) for i, p in enumerate(names))
    try:
        bound = {method: MethodType(_routed(function, calls), module) for method, function in methods.items()}
    except ValueError as error:
        raise ValueError(_told(name, module, str(error))) from error
    return Mixer(name, module, calls, bound)


def _check_methods(mixer: Mixer) -> None:
    """Raise ValueError if the module of `mixer` has methods now that are not ours."""
    for name, method in mixer.methods.items():
        if vars(mixer.module).get(name, method) is not method:
            raise ValueError(_told(mixer.name, mixer.module, f"was given a {name} of its own"))


def _told(name: str, module: nn.Module, reason: str) -> str:
    return f"recurrent layer {name} ({type(module).__name__}) {reason}: expected the methods of its class"


def _methods(cls: type[nn.Module]) -> dict[str, FunctionType]:
    """Return `forward` and the methods that it calls, themselves or through others, if they name a primitive.

    A method is listed before those it calls.
    """
    seen: dict[str, FunctionType] = {}
    waiting = ["forward"]
    while waiting:
        name = waiting.pop(0)
        function = inspect.getattr_static(cls, name, None)
        if name in seen or not isinstance(function, FunctionType) or function is getattr(nn.Module, name, None):
            continue
        seen[name] = function
        waiting += _names(_innermost(function).__code__)
    return {name: function for name, function in seen.items() if _primitives(function)}


def _innermost(function: FunctionType) -> FunctionType:
    """Return what `function` wraps, innermost, or itself if that is not a function."""
    inner = inspect.unwrap(function)
    return inner if isinstance(inner, FunctionType) else function


def _names(code: CodeType) -> list[str]:
    """Return the names of globals and attributes in `code` and in functions within it, by first use."""
    inner = [name for constant in code.co_consts if isinstance(constant, CodeType) for name in _names(constant)]
    return [*code.co_names, *inner]


def _primitives(function: FunctionType) -> list[str]:
    """Return the primitives that `function` finds among its globals, inside all wrappers."""
    inner = _innermost(function)
    return [name for name in _names(inner.__code__) if name in PRIMITIVES and name in inner.__globals__]


def _routed(function: FunctionType, calls: Sequence[PrimitiveCall]) -> FunctionType:
    """Return a copy of `function`, and of the wrappers around it, in which `calls` are what primitives name.

    ValueError for wrappers that cannot be looked into.
    """
    inner = getattr(function, "__wrapped__", None)
    if inner is not None:
        return _rewrapped(function, inner, calls)
    # With the module's name among its globals, Dynamo would read those of the module.
    own = {name: value for name, value in function.__globals__.items() if name != "__name__"}
    own |= {call.name: call for call in calls}
    return _copy(function, own, function.__closure__)


def _rewrapped(wrapper: FunctionType, inner: Any, calls: Sequence[PrimitiveCall]) -> FunctionType:
    """Return a copy of `wrapper` that calls a copy of `inner` made with `calls`."""
    cells = wrapper.__closure__ or ()
    if not isinstance(inner, FunctionType) or not any(cell.cell_contents is inner for cell in cells):
        raise ValueError(f"has a {wrapper.__name__} in a wrapper that does not show what it calls")
    routed = CellType(_routed(inner, calls))
    closure = tuple(routed if cell.cell_contents is inner else cell for cell in cells)
    return _copy(wrapper, wrapper.__globals__, closure)


def _copy(function: FunctionType, own_globals: dict[str, Any], closure: tuple[CellType, ...] | None) -> FunctionType:
    copy = FunctionType(function.__code__, own_globals, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
