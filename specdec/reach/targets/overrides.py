"""Sets attributes of a live model for the time of a context, and puts them back."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from specdec.backends.linear import linear

_OURS = 0  # a false `training` flag that differs from the True and False that users set
_IMPLEMENTATION = "_attn_implementation_internal"  # an attribute that configs of transformers have
_WARNING = "warn_if_padding_and_no_attention_mask"


_MISSING = object()


@contextmanager
def replaced(places: Iterable[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Set own[key] = value for all (own, key, value) within the context, then restore or delete the old value.

    Values that others set meanwhile stay. Contexts may nest.
    """
    places = list(places)
    before = [own.get(key, _MISSING) for own, key, _ in places]
    try:
        for own, key, value in places:
            own[key] = value
        yield
    finally:
        for (own, key, value), old in zip(places, before, strict=True):
            if own.get(key) is value:
                if old is _MISSING:
                    del own[key]
                else:
                    own[key] = old


class ConfigViews:
    """Shows `modules` of a model their configs with another attention implementation, within `shown`.

    The configs themselves, which other models may share and other threads may set, do not change. A view reads its
    config's attributes live, shows views of its parts (`text_config`), and has its own class.
    """

    def __init__(self, modules: Iterable[nn.Module], implementation: str):
        found = [(vars(module), vars(module).get("config")) for module in modules]
        places = [(own, config) for own, config in found if hasattr(config, _IMPLEMENTATION)]
        views = {id(config): _view(config, implementation) for config in {id(c): c for _, c in places}.values()}
        self._places = [(own, views[id(config)]) for own, config in places]

    def shown(self) -> AbstractContextManager[None]:
        """See the class; contexts may nest."""
        return replaced((own, "config", view) for own, view in self._places)


class _Quick:
    """A base whose subclasses transformers does not make dataclasses, which takes milliseconds each."""

    def __init_subclass__(cls) -> None:
        return None


def _view(config: Any, implementation: str) -> Any:
    kind = type(config)
    parts = {name: part for name, part in vars(config).items() if hasattr(part, _IMPLEMENTATION)}
    changed = {
        **{name: _constant(_view(part, implementation)) for name, part in parts.items()},
        "_attn_implementation": property(lambda _: implementation, kind._attn_implementation.fset),
        "__reduce_ex__": lambda view, _: (object.__new__, (kind,), vars(view)),  # a copy is not a view
    }
    bases = (kind,) if issubclass(kind, _Quick) else (_Quick, kind)  # views nest
    view: Any = object.__new__(type(kind.__name__, bases, changed))
    object.__setattr__(view, "__dict__", vars(config))
    return view


def _constant(value: Any) -> property:
    return property(lambda _: value)


@contextmanager
def evaluating(model: nn.Module, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put `model` in eval mode within the context, so that dropout is off; a call of `eval` or `train` by another
    thread meanwhile takes precedence. modules: the model's modules at attach, used while the model itself is in eval
    mode, since walking the model takes longer."""
    training = [m for m in (model.modules() if model.training else modules) if m.training]
    before = model.training
    try:
        for module in training:
            module.training = False
        vars(model)["training"] = _OURS
        yield
    finally:
        if vars(model)["training"] is _OURS:
            vars(model)["training"] = before
            for module in training:
                module.training = True


def multiplying(layer: nn.Module | None) -> AbstractContextManager[None]:
    """Route `layer`, if it is a plain `nn.Linear`, through `specdec::linear` within the context."""
    if type(layer) is not nn.Linear or "forward" in vars(layer):
        return nullcontext()
    return replaced([(vars(layer), "forward", partial(linear, weight=layer.weight, bias=layer.bias))])


class Warnings:
    """The submodels in `model` whose class warns of padding without a mask, for which it reads ids on the host."""

    def __init__(self, model: nn.Module):
        self._models = [m for m in model.modules() if isinstance(m, PreTrainedModel) and _WARNING not in m.__dict__]

    def routed(self) -> AbstractContextManager[None]:
        """Skip the warning within the context; contexts may nest."""
        return replaced((vars(model), _WARNING, lambda *_: None) for model in self._models)
