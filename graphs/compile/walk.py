"""Traces a callable as one graph for any number of tokens T, with every tensor that it reads as an argument.

It is recorded (`record`) if possible, else traced by Dynamo. Nothing is computed or compiled, and torch keeps nothing.
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

    graph: each node has an example value, of `mode`. args: the tensors that it was traced with, in the order of its
    placeholders, and T where it takes an int.
    """

    graph: fx.GraphModule
    args: list[Any]
    mode: FakeTensorMode


class _Found(BaseException):
    """Carries the trace out of the backend, so that neither torch's caches nor its guards hold it."""

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
    """Trace fn(*args, **kwargs), where `dynamic` dimensions of tensors are T; GraphError if it is not one graph for
    every T from sizes[0] to sizes[1].

    module: contains all modules that `fn` runs, which must not store tensors; None: Dynamo traces. fakes, follows: see
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
    """Trace with Dynamo; see `walk`."""
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
    """Raise the graph that `torch.compile` passes to its backend. One function for all traces, since torch never frees
    a backend."""
    examples = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
    mode = next(value.fake_mode for value in examples if isinstance(value, FakeTensor))
    given = [a.node.hint if isinstance(a, torch.SymInt) else a for a in args]
    raise _Found(Walked(graph, given, mode))  # a local would form a cycle with the traceback and keep the engine alive


def why(error: BaseException) -> str:
    """Return, in one line, the compiler's message and the line of the model that it refers to."""
    error = getattr(error, "inner_exception", None) or error
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    hints = [line for line in lines if line.startswith(("Explanation:", "Could not", "Attempted"))]
    frames = [i for i, line in enumerate(lines) if line.startswith('File "')]
    at = [f"at {lines[i]}: {lines[i + 1]}" for i in frames[-1:] if i + 1 < len(lines)]
    return "; ".join(dict.fromkeys([*lines[:1], *hints[:1], *at])) or type(error).__name__
