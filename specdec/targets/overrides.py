"""What of a live model is set for the time of a context, and put back: implementations by name, answers of modules."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

_OURS = 0  # not training, and neither of the values that users set
_WARNING = "warn_if_padding_and_no_attention_mask"


class ConfigViews:
    """Shows the modules of a model their configs with another attention implementation, within `shown`.

    The configs themselves, which other models may share and which other threads may set, are left alone: a view has the
    attributes of its config, as they are at the time, and a class of its own.
    """

    def __init__(self, model: nn.Module, implementation: str):
        views: dict[int, Any] = {}
        self._places: list[tuple[dict[str, Any], Any, Any]] = []  # attributes of a module, its config, the view
        for module in model.modules():
            config = vars(module).get("config")
            if hasattr(config, "_attn_implementation_internal"):
                if id(config) not in views:
                    views[id(config)] = _view(config, implementation)
                self._places.append((vars(module), config, views[id(config)]))

    @contextmanager
    def shown(self) -> Iterator[None]:
        """See the class."""
        places = [(attributes, view, attributes["config"]) for attributes, config, view in self._places]
        try:
            for attributes, _, view in self._places:
                attributes["config"] = view
            yield
        finally:
            for attributes, view, config in places:
                if attributes["config"] is view:
                    attributes["config"] = config


def _view(config: Any, implementation: str) -> Any:
    kind = type(config)
    changed = {
        "_attn_implementation": property(lambda _: implementation, kind._attn_implementation.fset),
        "__reduce_ex__": lambda view, _: (object.__new__, (kind,), vars(view)),  # a copy is no view
    }
    view: Any = object.__new__(type(kind.__name__, (kind,), changed))
    object.__setattr__(view, "__dict__", vars(config))
    return view


@contextmanager
def replaced(configs: Sequence[Any], attribute: str, value: str) -> Iterator[None]:
    """Set `attribute` of `configs` to `value`, and put the old values back where it still is."""
    before = [getattr(c, attribute) for c in configs]
    try:
        for config in configs:
            setattr(config, attribute, value)
        yield
    finally:
        for config, old in zip(configs, before, strict=True):
            if getattr(config, attribute) == value:
                setattr(config, attribute, old)


@contextmanager
def evaluating(model: nn.Module, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Have `model` in eval mode within the context, so that nothing is dropped out; if another thread calls its `eval`
    or `train` meanwhile, that stays. modules: what it had at first, which is looked at where the model itself is in
    eval mode: walking it takes longer."""
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


def warning_models(model: nn.Module) -> list[nn.Module]:
    """List the models in `model`, which warn of padding without a mask where their class does."""
    return [m for m in model.modules() if isinstance(m, PreTrainedModel) and _WARNING not in m.__dict__]


@contextmanager
def unwarned(models: Sequence[nn.Module]) -> Iterator[None]:
    """Leave out the warning of `warning_models` within the context, since it reads ids on the host; contexts nest."""
    before = [_WARNING in model.__dict__ for model in models]
    try:
        for model in models:
            model.__dict__[_WARNING] = _nothing
        yield
    finally:
        for model, was_left_out in zip(models, before, strict=True):
            if not was_left_out:
                del model.__dict__[_WARNING]


def _nothing(*args: Any) -> None:
    return None
