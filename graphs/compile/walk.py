"""Walks through a callable: one graph, with every tensor that it reads as an argument, for any number of tokens T.

It is recorded where that can be; else Dynamo walks through its Python. Nothing is computed, compiled, or kept by torch.
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental import _config as shape_config

from specdec.core.errors import GraphError
from specdec.graphs.compile.pieces import check_guards
from specdec.graphs.compile.record import Fakes, record


class Walked(NamedTuple):
    """The graph of a callable.

    graph: its nodes have an example value each, of `mode`. args: the tensors that it was walked with, in the order of
    its placeholders, and T where it takes an int.
    """

    graph: fx.GraphModule
    args: list[Any]
    mode: FakeTensorMode


class _Found(BaseException):
    """Carries what was walked out of the backend, so that neither torch's caches nor its guards hold it."""

    def __init__(self, walked: Walked):
        self.walked = walked


def walk(
    fn: Callable[..., Any],
    args: Sequence[Any],
    dynamic: Sequence[tuple[torch.Tensor, Sequence[int]]],
    sizes: tuple[int, int],
    kwargs: Mapping[str, Any] | None = None,
    module: nn.Module | None = None,
    fakes: Fakes | None = None,
    follows: bool = False,
) -> Walked:
    """Walk through fn(*args, **kwargs), where `dynamic` dimensions of tensors are T; GraphError if that is not one
    graph, or not one for every T from sizes[0] to sizes[1].

    module: has all modules that `fn` runs, which keep nothing of that; without it Dynamo walks. fakes, follows: see
    `record`.
    """
    if module is not None:
        with suppress(Exception), shape_config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
            recorded = Walked(*record(fn, args, dynamic, kwargs or {}, module, fakes, follows))
            check_guards(recorded.mode.shape_env, *sizes)
            return recorded
    return _walk(fn, args, dynamic, sizes, kwargs or {})


def _walk(
    fn: Callable[..., Any],
    args: Sequence[Any],
    dynamic: Sequence[tuple[torch.Tensor, Sequence[int]]],
    sizes: tuple[int, int],
    kwargs: Mapping[str, Any],
) -> Walked:
    """Walk with Dynamo; see `walk`."""
    for tensor, dims in dynamic:
        torch._dynamo.mark_dynamic(tensor, list(dims))
    compiled = torch.compile(_fresh(fn), backend=_give_back, fullgraph=True)
    try:
        with (
            torch.no_grad(),
            # Without it Dynamo assumes T > 1 and leaves no guard that shows it.
            shape_config.patch(backed_size_oblivious=True),  # type: ignore[attr-defined]
            torch._dynamo.config.patch(fake_tensor_cache_enabled=False),  # it costs more than it saves
        ):
            compiled(*args, **kwargs)
    except _Found as found:
        check_guards(found.walked.mode.shape_env, *sizes)
        return found.walked
    except Exception as error:
        message = f"it cannot be traced and compiled as one graph: {why(error)}"
        raise GraphError(message) from error.with_traceback(None)  # torch's frames and it are a cycle
    raise AssertionError("the backend was not asked")


def _fresh(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `fn` in a function with its own code object: Dynamo counts recompilations by code object."""

    def entry(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    entry.__code__ = entry.__code__.replace(co_name=f"traced_{secrets.token_hex(8)}")
    return entry


def _give_back(graph: fx.GraphModule, args: Sequence[Any]) -> Callable[..., Any]:
    """Raise what `torch.compile` passes on. One function for all walks: torch keeps every backend for ever."""
    examples = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
    mode = next(value.fake_mode for value in examples if isinstance(value, FakeTensor))
    given = [a.node.hint if isinstance(a, torch.SymInt) else a for a in args]
    raise _Found(Walked(graph, given, mode))  # no local: with the traceback it would be a cycle that keeps the engine


def why(error: BaseException) -> str:
    """Return, in one line, the compiler's complaint and the line of the model it is about."""
    error = getattr(error, "inner_exception", None) or error
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    hints = [line for line in lines if line.startswith(("Explanation:", "Could not", "Attempted"))]
    frames = [i for i, line in enumerate(lines) if line.startswith('File "')]
    at = [f"at {lines[i]}: {lines[i + 1]}" for i in frames[-1:] if i + 1 < len(lines)]
    return "; ".join(dict.fromkeys([*lines[:1], *hints[:1], *at])) or type(error).__name__
