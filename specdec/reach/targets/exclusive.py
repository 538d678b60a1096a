"""Mutual exclusion of a live model's two callers: its owner, and the engine, which reroutes its attention.

While an engine is attached, a forward of the model waits until the engine's step is over, and vice versa. So does a
layer that gradient checkpointing recomputes in a backward pass.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from specdec.reach.targets.overrides import replaced
from specdec.reach.targets.shape import decoder_of

ATTACHING = threading.RLock()  # held by `attach`, which sets and restores attributes of live models and shared objects
_CHECKPOINT = "_gradient_checkpointing_func"  # of layers with gradient checkpointing
_CALL = "_compiled_call_impl"  # called in place of a module's forward and hooks: `module.compile()` sets it


def make_exclusive(model: PreTrainedModel, turns: AbstractContextManager[Any]) -> ExitStack:
    """Make every call of `model`, its decoder and its checkpointed layers enter `turns`, a lock, until the result is
    closed. Calls traced by `torch.compile` do not: a trace must not hold a lock."""
    undo, callers = ExitStack(), (model, decoder_of(model))
    for module in model.modules():
        if module in callers or isinstance(module, GradientCheckpointingLayer):
            undo.enter_context(called_by(module, _exclusive(module, turns)))
    return undo


def _exclusive(module: nn.Module, turns: AbstractContextManager[Any]) -> Callable[..., Any]:
    this, before = weakref.ref(module), vars(module).get(_CALL)

    def call(*args: Any, **kwargs: Any) -> Any:
        layer: Any = this()
        run = before or layer._call_impl
        if torch.compiler.is_compiling():
            return run(*args, **kwargs)
        if layer.training and _CHECKPOINT in vars(layer):
            run = partial(_checkpointing, layer, turns, run)
        return _in_turn(turns, run, *args, **kwargs)

    return call


def _in_turn(turns: AbstractContextManager[Any], run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    turns.__enter__()
    try:
        return run(*args, **kwargs)
    finally:  # without the error: the engine's own state is whole
        turns.__exit__(None, None, None)


def _checkpointing(
    layer: nn.Module, turns: AbstractContextManager[Any], run: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run `layer`, whose checkpoint enters `turns` to recompute it: transformers 5.24 does so without calling it."""
    own = vars(layer)[_CHECKPOINT]

    def checkpoint(forward: Callable[..., Any], *args: Any) -> Any:
        return own(partial(_in_turn, turns, forward), *args)

    with replaced([(vars(layer), _CHECKPOINT, checkpoint)]):
        return run(*args, **kwargs)


@contextmanager
def answering(module: nn.Module, output: Any, check: Callable[[], object] = bool) -> Iterator[None]:
    """Make this thread's calls of `module` return `output` within the context, whatever their arguments; no hooks run.

    check: called first, where the module would have run; may raise.
    """
    me, this, before = threading.get_ident(), weakref.ref(module), vars(module).get(_CALL)

    def answer(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == me:
            check()
            return output
        return (before or this()._call_impl)(*args, **kwargs)  # type: ignore[union-attr]

    with called_by(module, answer):
        yield


def called_by(module: nn.Module, call: Callable[..., Any]) -> AbstractContextManager[None]:
    """Replace what is called for `module`'s forward and hooks; copies and pickles of it leave that out."""
    return replaced([(vars(module), _CALL, call)])  # if `module.compile()` sets it meanwhile, that stays
