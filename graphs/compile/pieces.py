"""Splits a traced graph into a chain of pieces, and compiles each distinct piece once.

Compiling is separate from tracing: the arguments' sizes get a new symbol for the number of tokens T.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental import _config as shape_config
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.fx.passes.split_module import split_module

from specdec.core.errors import GraphError
from specdec.graphs.compile.kept import has_pieces, num_found
from specdec.graphs.compile.merge import join

FEW = 4  # kernels of torch's own between ours; a piece with at most as many is not compiled
VIEWS = {
    *("view", "reshape", "flatten", "unflatten", "transpose", "unsqueeze", "squeeze", "expand", "size"),
    *("split", "chunk", "unbind", "contiguous", "getitem"),
}


class Counts(NamedTuple):
    """Counts of a chain: parts between the ops it is cut at, distinct parts that are compiled, and those of them that
    were found in Inductor's caches. Parts with little besides our kernels are not compiled, see `is_covered`."""

    num_pieces: int
    num_compiled: int
    num_found: int


def cut(graph: fx.GraphModule, split_at: Sequence[Any]) -> fx.GraphModule:
    """Split `graph` into a chain of submodules; every call of an op of `split_at` is a submodule of its own.

    Needs the nodes' example values; equal submodules become one.
    """
    part = 0
    parts: dict[fx.Node, int] = {}
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if is_call(node, split_at):
            parts[node] = part + 1
            part += 2
        else:
            parts[node] = part
    _repeat_shapes(graph, parts)
    with _use_lazy_graph_module(True):  # there are many equal parts, of which only the first needs code
        split = split_module(graph, graph, lambda node: parts[node], keep_original_order=True)
    first: dict[tuple[Any, ...], fx.GraphModule] = {}
    for name, module in list(split.named_children()):
        assert isinstance(module, fx.GraphModule)
        setattr(split, name, first.setdefault(fingerprint(module), module))
    for module in first.values():
        _LazyGraphModule.force_recompile(module)
    return split


def _repeat_shapes(graph: fx.GraphModule, parts: dict[fx.Node, int]) -> None:
    """Repeat `size()` in every part that uses a whole shape: parts pass tensors and ints, but no `torch.Size`, which
    Inductor cannot return."""
    for node in [n for n in parts if n.op == "call_method" and n.target == "size" and len(n.args) == 1]:
        asked = {parts[node]: node}
        for user in sorted(u for u in node.users if parts.get(u, parts[node]) != parts[node]):
            part = parts[user]
            if part not in asked:
                with graph.graph.inserting_before(user):
                    asked[part] = graph.graph.node_copy(node)
                parts[asked[part]] = part
            user.replace_input_with(node, asked[part])
        if not node.users:
            graph.graph.erase_node(node)


def is_call(node: fx.Node, ops: Sequence[Any]) -> bool:
    """Return whether `node` calls one of the op overloads `ops`."""
    return node.op == "call_function" and any(node.target in (op, op.overloadpacket) for op in ops)


def fingerprint(module: fx.GraphModule, has_values: bool = True) -> tuple[Any, ...]:
    """Return the key of a compiled graph: equal for graphs that differ only in names and in the values of inputs.

    has_values: shapes of example values are part of it.
    """
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
        lines.append((node.op, target, repr(args), has_values and _signature(node.meta.get("example_value"))))
    return tuple(lines)


def _signature(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        numbers = (n.node.expr if isinstance(n, torch.SymInt) else n for n in (*value.shape, *value.stride()))
        return (value.dtype, value.device, value.requires_grad, *numbers)
    return str(type(value))


def compile_pieces(
    chain: fx.GraphModule,
    args: Sequence[Any],
    groups: Sequence[Sequence[int]],
    inputs: Sequence[torch.Tensor],
    split_at: Sequence[Any],
    compiler: str,
    largest: int,
    progress: Callable[[], None],
) -> Counts:
    """Replace every piece of `chain`, a graph of `cut` that takes `args`, by its compiled form. See `trace`; GraphError
    if it is not correct for every T from 2 to `largest`. Other errors of the compiler propagate."""
    called = {n.target: getattr(chain, n.target) for n in chain.graph.nodes if n.op == "call_module"}
    pieces = [m for m in called.values() if not any(is_call(node, split_at) for node in m.graph.nodes)]
    is_eager = compiler == "eager"
    to_compile = set() if is_eager else {m for m in pieces if not is_covered(m)}
    compiling = _Compiling(chain, to_compile, progress)
    if to_compile:
        compiling.run_on_fakes(args, groups, inputs, largest)
    for target, module in called.items():
        # An attribute of the instance takes precedence over the submodule of that name.
        chain.__dict__[target] = compiling.done.setdefault(module, module.forward)
    return Counts(len(pieces), len(set(pieces) if is_eager else to_compile), compiling.num_found)


def _fakes(
    mode: FakeTensorMode, args: Sequence[Any], groups: Sequence[Sequence[int]], inputs: Sequence[torch.Tensor]
) -> list[Any]:
    """Return fake tensors for `args`: the first dimension of every input is the same symbol."""
    env, source = mode.shape_env, ConstantSource("T")
    assert env is not None
    num_tokens = inputs[0].shape[0]
    symbol = env.create_symbol(num_tokens, source, DimDynamic.DYNAMIC, constraint_dim=None)
    size = env.create_symintnode(symbol, hint=num_tokens, source=source)
    places = {id(t) for t in inputs}

    def fake(arg: Any) -> Any:
        if isinstance(arg, int):
            return size
        if id(arg) in places:
            return torch.empty_strided((size, *arg.shape[1:]), arg.stride(), dtype=arg.dtype, device=arg.device)
        return mode.from_tensor(arg, static_shapes=True)

    with mode:
        fakes = [fake(arg) for arg in args]
        for group in groups:
            fakes[group[0]] = join([fakes[i] for i in group])
    return fakes


class _Compiling(fx.Interpreter):
    """Runs a chain on fake tensors, equal parts once, and compiles the parts in `to_compile`."""

    def __init__(self, chain: fx.GraphModule, to_compile: set[fx.GraphModule], progress: Callable[[], None]):
        super().__init__(chain)
        self.extra_traceback = False
        self.num_found = 0
        self.done: dict[fx.GraphModule, Callable[..., Any]] = {}
        self._to_compile, self._progress = to_compile, progress
        self._outputs: dict[Any, Any] = {}

    def run_on_fakes(
        self, args: Sequence[Any], groups: Sequence[Sequence[int]], inputs: Sequence[torch.Tensor], largest: int
    ) -> None:
        """See `compile_pieces`."""
        from torch._dynamo.convert_frame import compile_lock
        from torch._inductor import config as inductor_config  # slow to import

        with (
            torch.inference_mode(False),
            torch.no_grad(),
            shape_config.patch(backed_size_oblivious=True),  # type: ignore[attr-defined]
            inductor_config.patch(shape_padding=False),  # whether to pad a product depends on T
            compile_lock,
        ):
            mode = FakeTensorMode(shape_env=ShapeEnv())
            with tracing(TracingContext(mode)), mode, enable_python_dispatcher():  # the dispatcher keeps sizes symbolic
                self.run(*_fakes(mode, args, groups, inputs))
        # The compiler guards against one row wherever an op could broadcast it, but its code is correct for one row.
        check_guards(mode.shape_env, 2, largest)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self.fetch_attr(target)
        if module not in self._outputs:
            self._outputs[module] = Noting(module).run(*args)
            if module in self._to_compile:
                before = num_found()
                self.done[module] = _compile(module, args)
                self.num_found += num_found() > before
        if module in self._to_compile:
            self._progress()
        return self._outputs[module]


class Noting(fx.Interpreter):
    """Runs a piece and stores every node's example value, without which torch does not look it up in its cache."""

    def run_node(self, n: fx.Node) -> Any:
        n.meta["example_value"] = value = super().run_node(n)
        return value


def is_covered(module: fx.GraphModule) -> bool:
    """Return whether `module` has calls of our ops and at most FEW of other ops that launch a kernel."""
    others = ours = 0
    for node in module.graph.nodes:
        if node.op == "call_function" and str(node.target).startswith("specdec."):
            ours += 1
        elif node.op in ("call_function", "call_method", "call_module"):
            name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
            others += name not in VIEWS and name != "_log_api_usage_once"
    return ours > 0 and others <= FEW


def _compile(module: fx.GraphModule, args: Sequence[Any]) -> Callable[..., Any]:
    """Compile `module` with Inductor; its worker processes start if no piece is cached for the device."""
    device = next(a.device for a in args if isinstance(a, torch.Tensor))
    if not has_pieces(device):
        _start_workers(device)
    from torch._inductor import standalone_compile  # slow to import

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # it advises rounding that we must not use
        return standalone_compile(module, list(args), dynamic_shapes="from_tracing_context")


def _start_workers(device: torch.device) -> None:
    """Start the processes in which Inductor compiles kernels for a GPU; until they are up it compiles one by one.

    torch.compile starts them when Inductor is its backend; we call Inductor later, and directly.
    """
    if device.type != "cuda":
        return
    from torch._inductor import async_compile  # slow to import

    start = getattr(async_compile, "maybe_warm_pool", None)  # torch's own, for torch's own use
    if start is not None:
        start()


def check_guards(shape_env: ShapeEnv | None, smallest: int, largest: int) -> None:
    """Raise GraphError if the trace is right for some sizes only: we bypass Dynamo, which would retrace for others."""
    size = sympy.Symbol("T", integer=True, positive=True)
    seen: set[Any] = {sympy.true}
    for guard in shape_env.guards if shape_env is not None else ():
        relation = guard.expr.subs(dict.fromkeys(guard.expr.free_symbols, size))  # every dynamic size is T
        if relation in seen or _holds(relation, size, smallest, largest):
            seen.add(relation)
            continue
        raise GraphError(
            f"what it computes depends on the number of tokens T: {relation} was taken for granted, {guard.sloc}"
        )


def _holds(relation: Any, size: sympy.Symbol, smallest: int, largest: int) -> bool:
    """Return whether `relation` holds for every `size` from `smallest` to `largest`."""
    sizes: Sequence[Any] = range(smallest, largest + 1)
    difference = (relation.lhs - relation.rhs).as_poly(size) if isinstance(relation, sympy.Rel) else None
    if difference is not None and difference.degree() == 1:  # the ends decide, and the size where both sides are equal
        slope, offset = difference.all_coeffs()
        sizes = [smallest, largest, *(n for n in [-offset / slope] if n.is_Integer and smallest <= n <= largest)]
    return all(relation.subs(size, n) == True for n in sizes)  # noqa: E712 (sympy)
