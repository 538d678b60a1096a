"""What of a live model is set for the time of a context, and put back: implementations by name, answers of modules."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

_WARNING = "warn_if_padding_and_no_attention_mask"


def attention_configs(model: nn.Module) -> list[Any]:
    """List every config object in `model` that names an attention implementation, once each."""
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    return [c for c in configs.values() if hasattr(c, "_attn_implementation_internal")]


@contextmanager
def attention_implementation(configs: Sequence[Any], name: str) -> Iterator[None]:
    """Set the attention implementation of `configs` to `name`, and put the old ones back."""
    with replaced(configs, "_attn_implementation_internal", name):
        yield


@contextmanager
def replaced(configs: Sequence[Any], attribute: str, value: str) -> Iterator[None]:
    """Set `attribute` of `configs` to `value`, and put the old values back."""
    before = [getattr(c, attribute) for c in configs]
    try:
        for config in configs:
            setattr(config, attribute, value)
        yield
    finally:
        for config, old in zip(configs, before, strict=True):
            setattr(config, attribute, old)


@contextmanager
def answering(module: nn.Module, output: Any) -> Iterator[None]:
    """Make calls of `module` return `output` within the context, whatever the arguments, without running its hooks."""
    own = {name: value for name, value in module.__dict__.items() if name == "_compiled_call_impl"}
    # `module.compile()` sets this; it is called in place of forward and hooks.
    module._compiled_call_impl = lambda *args, **kwargs: output
    try:
        yield
    finally:
        del module._compiled_call_impl
        module.__dict__.update(own)


@contextmanager
def evaluating(model: nn.Module, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Have `model` in eval mode within the context, so that nothing is dropped out. modules: what it had at first,
    which is looked at where the model itself is in eval mode: walking it takes longer."""
    training = [m for m in (model.modules() if model.training else modules) if m.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
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
