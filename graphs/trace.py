"""Traces a callable once with `torch.compile` and our own backend, and splits the graph at an op that is not compiled.

The trace has a dynamic first dimension. Pieces that differ only in their weights, such as the middle layers of a model,
are compiled once; weights are arguments. The result is called directly, bypassing Dynamo: no guards, no recompilation
at sizes 0 and 1, no limit on how many models one process traces. Compiling runs nothing and captures nothing.
"""

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext, detect_fake_mode
from torch._inductor import standalone_compile
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import _config as shape_config
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.split_module import split_module

from specdec.errors import GraphError
from specdec.graphs.kept import keeping, num_found, renewing
from specdec.graphs.merge import MergedWeights, merge_linears
from specdec.graphs.regions import number, regions, write_out


class Traced:
    """A traced callable of tensors [T, ...] with any T, on the weights it was traced with.

    num_pieces: parts between the ops it was split at; num_compiled: distinct parts; num_found: those of them that an
    earlier compilation had left in Inductor's caches.
    """

    def __init__(self, split: fx.GraphModule, args: Sequence[Any], inputs: Sequence[torch.Tensor]):
        self._split = split
        self._args = list(args)
        self._sizes = [i for i, a in enumerate(args) if isinstance(a, int)]
        self._places = [next((i for i, a in enumerate(args) if a is t), None) for t in inputs]
        self.num_pieces = 0
        self.num_compiled = 0
        self.num_found = 0
        self._merged = MergedWeights([], self._args)

    def __call__(self, *inputs: torch.Tensor) -> tuple[Any, ...]:
        args = self._args.copy()
        for size in self._sizes:
            args[size] = inputs[0].shape[0]
        for place, value in zip(self._places, inputs, strict=True):
            if place is not None:  # an input that the callable does not use is not an argument of its graph
                args[place] = value
        return self._split(*args)

    def join(self, groups: Sequence[Sequence[int]]) -> None:
        """Join the weights of joined products; groups: from `merge_linears`."""
        self._merged = MergedWeights(groups, self._args)
        self._merged.join()

    def release(self) -> None:
        """Give joined weights their own storage again; the callable cannot be called afterwards."""
        self._merged.part()
        self._args = []


class _Arguments(BaseException):
    """Carries the arguments the traced graph would have been called with; raised so that nothing runs."""

    def __init__(self, args: tuple[Any, ...]):
        self.args_given = args


def trace(
    fn: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    split_at: Any,
    compiler: str,
    *,
    num_outputs: int = 1,
    smallest: int = 1,
    largest: int = 1 << 13,
    joins: bool = True,
    alike: Sequence[nn.Module] = (),
    numbers: Sequence[int] | None = None,
    rewrite: Callable[[fx.GraphModule], object] | None = None,
    keep: Path | None = None,
    progress: Callable[[], None] = lambda: None,
) -> Traced:
    """Trace fn(*inputs), which returns `num_outputs` tensors, possibly in tuples and beside None.

    inputs: examples [T, ...] of one T > 1, whose first dimension becomes dynamic. smallest, largest: the T it will be
    called with. A caller that compares T=1 with `fn` itself passes smallest=2: torch's own ops guard against one row
    where a copy might broadcast, which seldom changes their result. split_at: the op overload to split at.
    compiler: "inductor", or "eager" to leave the pieces as they are. joins: whether products of one input become one.
    alike: modules in `fn` many of which are equal but for their weights: those are walked once, where torch can show
    that they are; nothing else depends on it. numbers: the argument 3 of the calls of `split_at`, in their order.
    rewrite: changes the flat graph in place, before it is split.
    keep: folder that `keeping` is in force for; renewed if a piece does not compile with what is in it.
    progress: called after every piece.
    Raises GraphError for what cannot be traced as one graph for every T, or not be compiled; it names the op.
    """
    for tensor in inputs:
        torch._dynamo.mark_dynamic(tensor, 0)
    while True:
        backend = _Backend(split_at, compiler, (smallest, largest), joins, numbers, rewrite, keep, progress)
        compiled = torch.compile(_fresh(fn), backend=backend, fullgraph=True)
        try:
            # Without it Dynamo assumes T > 1 and leaves no guard that shows it.
            with torch.no_grad(), shape_config.patch(backed_size_oblivious=True), regions(alike):  # type: ignore[attr-defined]
                compiled(*inputs)
            raise AssertionError("the backend was not asked")
        except _Arguments as called:
            args = called.args_given
            break
        except Exception as error:
            if not alike:
                raise GraphError(f"it cannot be traced and compiled as one graph: {_why(error)}") from error
        alike = ()
    if backend.num_outputs != num_outputs:
        raise GraphError(
            f"its trace returns {backend.num_outputs} tensors, {num_outputs} were expected: it keeps tensors "
            "elsewhere, or returns one twice"
        )
    traced = Traced(backend.split, args, inputs)
    traced.join(backend.groups)
    traced.num_pieces, traced.num_compiled = backend.num_pieces, len(backend.compiled)
    traced.num_found = backend.num_found
    return traced


def _fresh(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `fn` in a function with its own code object: Dynamo counts recompilations by code object."""

    def entry(*args: torch.Tensor) -> Any:
        return fn(*args)

    entry.__code__ = entry.__code__.replace(co_name=f"traced_{secrets.token_hex(8)}")
    return entry


class _Backend:
    """Backend to which `torch.compile` passes the graph."""

    def __init__(
        self,
        split_at: Any,
        compiler: str,
        sizes: tuple[int, int],
        joins: bool,
        numbers: Sequence[int] | None,
        rewrite: Callable[[fx.GraphModule], object] | None,
        keep: Path | None,
        progress: Callable[[], None],
    ):
        self.num_pieces = 0
        self.num_found = 0
        self.num_outputs = 0
        self.compiled: dict[Any, Callable[..., Any]] = {}
        self.groups: list[list[int]] = []
        self._split_at = split_at
        self._compiler = compiler
        self._smallest, self._largest = sizes
        self._joins = joins
        self._numbers = numbers
        self._rewrite = rewrite
        self._keep = keep
        self._progress = progress

    def __call__(self, graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        mode = detect_fake_mode(example_inputs)
        assert mode is not None, "Dynamo traces with fake tensors"
        _check_guards(mode.shape_env, self._smallest, self._largest)
        write_out(graph)
        if self._numbers is not None:
            number(graph, self._split_at, 3, self._numbers)
        if self._rewrite is not None:
            self._rewrite(graph)
        fakes = [_fake(mode, x) if isinstance(x, torch.Tensor) else x for x in example_inputs]
        self.num_outputs = len(next(n for n in graph.graph.nodes if n.op == "output").args[0])
        if self._joins:
            self.groups = merge_linears(graph, fakes, example_inputs, mode)
        self.split = _cut(graph, self._split_at)
        with mode, enable_python_dispatcher():  # which keeps sizes symbolic in composite ops
            _Compiling(self, self.split).run(*fakes)
        # The compiler guards against one row wherever an op could broadcast it, but its code is correct for one row.
        _check_guards(mode.shape_env, 2, self._largest)

        def called(*args: Any) -> Any:
            raise _Arguments(args)

        return called

    def piece(self, module: fx.GraphModule, args: Sequence[Any]) -> Callable[..., Any]:
        """Compile `module`, or return the compiled form of an equal one."""
        self.num_pieces += 1
        key = fingerprint(module)
        if key not in self.compiled:
            before = num_found()
            self.compiled[key] = _compile(module, args, self._compiler, self._keep)
            self.num_found += num_found() > before
        self._progress()
        return self.compiled[key]


def _fake(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """Return the fake `tensor` that the trace saw, with the symbols that Dynamo gave its dynamic dimensions."""
    context = TracingContext.get().tensor_to_context.get(tensor)
    source = getattr(context, "tensor_source", None)
    return mode.from_tensor(tensor, symbolic_context=context, source=source)


def _check_guards(shape_env: ShapeEnv | None, smallest: int, largest: int) -> None:
    """Raise GraphError if the trace is correct only for some of the sizes. Dynamo would retrace for others; we bypass
    it."""
    for guard in shape_env.guards if shape_env is not None else ():
        size = sympy.Symbol("T", integer=True, positive=True)
        told = guard.expr.subs(dict.fromkeys(guard.expr.free_symbols, size))  # every dynamic size is T
        if told == True or _holds(told, size, smallest, largest):  # noqa: E712 (sympy)
            continue
        raise GraphError(
            f"what it computes depends on the number of tokens T: {told} was taken for granted, {guard.sloc}"
        )


def _holds(told: Any, size: sympy.Symbol, smallest: int, largest: int) -> bool:
    """Whether the relation `told` holds for every `size` from `smallest` to `largest`."""
    sizes: Sequence[int] = range(smallest, largest + 1)
    is_inequality = isinstance(told, sympy.Ge | sympy.Gt | sympy.Le | sympy.Lt)
    if is_inequality and sympy.diff(told.lhs - told.rhs, size).is_number:  # linear: the ends decide
        sizes = (smallest, largest)
    return all(told.subs(size, n) == True for n in sizes)  # noqa: E712 (sympy)


class _Compiling(fx.Interpreter):
    """Runs a split graph on fake tensors and replaces every piece except the split ops by its compiled form."""

    def __init__(self, backend: _Backend, split: fx.GraphModule):
        super().__init__(split)
        self._backend = backend
        self.extra_traceback = False

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outputs = super().call_module(target, args, kwargs)
        module = self.fetch_attr(target)
        if not _has(module, self._backend._split_at):
            # An attribute of the instance takes precedence over the submodule of that name.
            self.module.__dict__[target] = self._backend.piece(module, args)
        return outputs


def _compile(module: fx.GraphModule, args: Sequence[Any], compiler: str, keep: Path | None) -> Callable[..., Any]:
    """Compile one piece; once more with nothing kept if that fails, for what is kept may be damaged."""
    if compiler == "eager":
        return module.forward
    try:
        return standalone_compile(module, list(args), dynamic_shapes="from_tracing_context")
    except Exception:
        if keep is None:
            raise
    with renewing(keep) as fresh, keeping(fresh):
        return standalone_compile(module, list(args), dynamic_shapes="from_tracing_context")


def _cut(graph: fx.GraphModule, split_at: Any) -> fx.GraphModule:
    """Split `graph` into a chain of submodules; every call of `split_at` is a submodule of its own."""
    part = 0
    parts: dict[fx.Node, int] = {}
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if _is_call(node, split_at):
            parts[node] = part + 1
            part += 2
        else:
            parts[node] = part
    return split_module(graph, graph, lambda node: parts[node], keep_original_order=True)


def _has(module: fx.GraphModule, split_at: Any) -> bool:
    return any(_is_call(node, split_at) for node in module.graph.nodes)


def _is_call(node: fx.Node, op: Any) -> bool:
    return node.op == "call_function" and node.target in (op, op.overloadpacket)


def fingerprint(module: fx.GraphModule) -> tuple[Any, ...]:
    """Return the key of a compiled graph: equal for graphs that differ only in names and in the values of inputs."""
    numbers: dict[fx.Node, int] = {}
    lines: list[Any] = []

    def name(node: fx.Node) -> str:
        return f"%{numbers[node]}"

    for i, node in enumerate(module.graph.nodes):
        numbers[node] = i
        args = fx.map_arg((node.args, node.kwargs), name) if node.op != "placeholder" else ()
        target: Any = "" if node.op in ("placeholder", "output") else str(node.target)
        if node.op == "get_attr":
            target = id(getattr(module, str(node.target)))  # a constant: equal only to itself
        lines.append((node.op, target, repr(args), _signature(node.meta.get("example_value"))))
    return tuple(lines)


def _signature(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), str(tuple(value.shape)), str(value.stride()), str(value.device), value.requires_grad)
    return str(type(value))


def _why(error: BaseException) -> str:
    """Return, in one line, the compiler's complaint and the line of the model it is about."""
    error = getattr(error, "inner_exception", None) or error
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if line.startswith(("Explanation:", "Could not", "Attempted"))]
    frames = [i for i, line in enumerate(lines) if line.startswith('File "')]
    at = [f"at {lines[i]}: {lines[i + 1]}" for i in frames[-1:] if i + 1 < len(lines)]
    return "; ".join(dict.fromkeys([*lines[:1], *told[:1], *at])) or type(error).__name__
