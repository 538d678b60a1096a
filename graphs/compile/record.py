"""Records a callable's tensor operations as one graph for any number of tokens T: it runs once, on fake tensors.

Python between two calls of torch runs natively, and sizes are symbols: assumptions about T leave guards, and reading a
tensor's values is an error. Much faster than Dynamo, which interprets Python.
"""

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo import config as dynamo_config
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from specdec.core.errors import GraphError
from specdec.graphs.compile.alike import PLAIN, seen

SET_ITEM = torch.Tensor.__setitem__
OPERATORS: dict[str, Any] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "neg", "matmul")},
    **{name: getattr(operator, name) for name in ("__getitem__", "__setitem__")},
    **{"div": operator.truediv, "div_": operator.itruediv},
}
# Generated code cannot name these: they call themselves torch._tensor.pow and pow_, which do not exist.
WRAPPED: dict[Any, Any] = {torch.Tensor.__pow__: operator.pow, torch.Tensor.__ipow__: operator.ipow}


class _ShapeEnv(ShapeEnv):
    """A ShapeEnv whose guards do not name their line: to find it, torch imports its compilers, for half a second."""

    def _get_user_frame(self) -> FrameType | None:
        return inspect.currentframe()


class Fakes:
    """Fake tensors of related traces, in one `mode`; num_tokens: their common T, once it is known.

    calls: for each call of the last recording its key, its result, and a callable that keeps its arguments alive. ops:
    those whose argument 3 is ignored when calls are compared.
    """

    def __init__(self, ops: Sequence[Any] = ()) -> None:
        with dynamo_config.patch(fake_tensor_cache_enabled=False):  # it costs more than it saves
            self.mode = FakeTensorMode(shape_env=_ShapeEnv(), allow_non_fake_inputs=True)
        self.num_tokens: Any = None
        self.calls: list[tuple[Any, Any, Callable[[], Any]]] = []
        self.ops, self.numbered = ops, {form for op in ops for form in (op, op.overloadpacket)}


def record(
    fn: Callable[..., Any],
    args: Sequence[Any],
    dynamic: Sequence[tuple[torch.Tensor, Sequence[int]]],
    kwargs: Mapping[str, Any],
    module: nn.Module,
    fakes: Fakes | None = None,
    follows: bool = False,
) -> tuple[fx.GraphModule, list[Any], FakeTensorMode]:
    """Record fn(*args, **kwargs); see `walk`. GraphError, or whatever torch raises, for what cannot be recorded.

    follows: as long as the calls equal those of the last recording with `fakes`, their results and T are reused.
    """
    fakes = fakes or Fakes()
    recorder = _Recorder(fakes, follows)
    dims = {id(tensor): which for tensor, which in dynamic}
    given = tree_map_only(torch.Tensor, lambda t: recorder.input(t, dims.get(id(t), ())), (tuple(args), dict(kwargs)))
    with torch.no_grad(), _unchanged(module), fakes.mode, enable_python_dispatcher(), recorder:
        recorder.end(fn(*given[0], **given[1]))
    return *recorder.finish(), fakes.mode


@contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Restore the attributes of all modules in `module` afterwards; GraphError if a fake tensor was stored in one."""
    spaces = [space for m in module.modules() for space in (vars(m), m._parameters, m._buffers)]
    before = [dict(space) for space in spaces]
    is_kept = False
    try:
        yield
    finally:
        for space, old in zip(spaces, before, strict=True):
            for key in [k for k in {**old, **space} if space.get(k) is not old.get(k)]:
                is_kept |= any(isinstance(x, FakeTensor) for x in tree_leaves(space.pop(key, None)))
                space.update({key: old[key]} if key in old else {})
    if is_kept:
        raise GraphError("it stores tensors besides its outputs")


class _Recorder(TorchFunctionMode):
    """Records calls of torch as nodes, with example values; tensors that are not fake become arguments."""

    def __init__(self, fakes: Fakes, follows: bool):
        super().__init__()
        self._fakes, self._mode = fakes, fakes.mode
        self._followed, fakes.calls = iter(fakes.calls if follows else ()), []
        self._graph = fx.Graph()
        self._size = self._last = self._graph.placeholder("num_tokens")
        self._args: dict[fx.Node, Any] = {}
        self._nodes: dict[int, fx.Node] = {}  # by id of a tensor, which the node keeps alive

    def input(self, tensor: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
        """Return the fake of an argument, whose dimensions `dims` are T."""
        sizes = [DimDynamic.DYNAMIC if i in dims else DimDynamic.STATIC for i in range(tensor.dim())]
        context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
        source = ConstantSource(f"input_{len(self._args)}")
        key = tensor.dtype, tensor.device, [None if i in dims else n for i, n in enumerate(tensor.shape)]
        make = partial(self._mode.from_tensor, tensor, symbolic_context=context, source=source)
        fake: torch.Tensor = self._result(key, make)
        if dims and self._size not in self._args:
            self._args[self._size] = tensor.shape[dims[0]]
            if self._fakes.num_tokens is None:
                self._fakes.num_tokens = fake.shape[dims[0]]
            self._size.meta["example_value"] = self._fakes.num_tokens
        for dim in dims:
            assert fake.shape[dim] == self._fakes.num_tokens  # from then on they are one symbol
        self._place(tensor, fake)
        return fake

    def _result(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the followed recording's result, if its keys have matched up to this one; else make it."""
        known = next(self._followed, None)
        if known is None or known[0] != key:
            self._followed, known = iter(()), (key, make(), make)
        self._fakes.calls.append(known)
        return known[1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch._C._is_any_autocast_enabled():
            raise GraphError("it runs under autocast")  # which nodes do not record
        kwargs = kwargs or {}
        fakes = tree_map_only(torch.Tensor, self._fake, (args, kwargs))
        told = (*args[:3], *args[4:]) if func in self._fakes.numbered else args
        out = self._result((func, tree_map(_key, (told, kwargs))), lambda: func(*fakes[0], **fakes[1]))
        if func is SET_ITEM or any(isinstance(x, torch.Tensor) for x in tree_leaves(out)):
            kind, target, *given = _called(func, args, kwargs)
            self._keep(self._graph.create_node(kind, target, *fx.node.map_aggregate(given, self._given)), out)
        return out

    def end(self, returned: Any) -> None:
        """Set the graph's outputs: the tensors in `returned`, each once."""
        leaves = [leaf for leaf in tree_leaves(returned) if isinstance(leaf, torch.Tensor)]
        self._graph.output(tuple(dict.fromkeys(self._given(leaf) for leaf in leaves)))

    def finish(self) -> tuple[fx.GraphModule, list[Any]]:
        """Return the graph and its arguments."""
        for node in reversed(self._graph.nodes):
            is_idle = node.op == "placeholder" or node.target in (operator.getitem, operator.add, operator.mul)
            if is_idle and not node.users and node is not self._size:
                self._graph.erase_node(node)
                self._args.pop(node, None)
        with _use_lazy_graph_module(True):  # it is rewritten before it needs code
            graph = _make_graph_module(nn.Module(), self._graph)
        return graph, [self._args[n] for n in self._graph.nodes if n in self._args]

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in self._nodes:
            self._place(tensor, self._mode.from_tensor(tensor, static_shapes=True))
        return self._nodes[id(tensor)].meta["example_value"]

    def _place(self, tensor: torch.Tensor, fake: torch.Tensor) -> None:
        """Make `tensor` an argument."""
        with self._graph.inserting_after(self._last):
            self._last = self._graph.placeholder(f"given_{len(self._args)}")
        self._last.meta["example_value"] = fake
        self._args[self._last] = tensor
        self._nodes[id(tensor)] = self._nodes[id(fake)] = self._last

    def _keep(self, node: fx.Node, out: Any) -> None:
        """Record `node` as the source of `out`, and getitem nodes as those of its elements."""
        node.meta["example_value"] = out
        if isinstance(out, torch.Tensor):
            self._nodes[id(out)] = node
        elif isinstance(out, tuple | list):
            for i, part in enumerate(out):
                self._keep(self._graph.call_function(operator.getitem, (node, i)), part)

    def _given(self, value: Any) -> Any:
        """Return the graph's form of an argument: nodes for tensors and symbolic sizes."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self._nodes:
                raise GraphError("a tensor comes from a call that cannot be recorded")
            return self._nodes[id(value)]
        if isinstance(value, torch.Size):
            return tuple(map(self._given, value))
        if isinstance(value, torch.SymFloat | torch.SymBool):
            raise GraphError(f"a number depends on the number of tokens: {value}")
        return self._number(value.node.expr) if isinstance(value, torch.SymInt) else value

    def _number(self, expression: Any) -> Any:
        """Return the int or node of an expression of sizes, a sum or product."""
        if expression.is_Integer:
            return int(expression)
        if expression.is_Symbol:
            return self._size
        if not (expression.is_Add or expression.is_Mul):
            raise GraphError(f"a size is {expression}")
        combine = operator.add if expression.is_Add else operator.mul
        return reduce(lambda a, b: self._graph.call_function(combine, (a, b)), map(self._number, expression.args))


def _key(value: Any) -> Any:
    """Return a key of an argument, equal if results are: real tensors by their description, fake ones by id."""
    if isinstance(value, torch.SymInt):
        return value.node.expr
    if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
        return type(value), seen(value), value.requires_grad
    return (type(value), value) if isinstance(value, (*PLAIN, torch.Size, slice)) else id(value)


def _called(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, Any, tuple[Any, ...], Any]:
    """Return the node that calls func(*args, **kwargs), named as Dynamo names it: kind, target, args and kwargs."""
    name = func.__name__
    if func in WRAPPED:
        return "call_function", WRAPPED[func], tuple(args), kwargs
    if name == "__get__":
        return "call_function", getattr, (*args, func.__self__.__name__), kwargs
    if getattr(torch.Tensor, name, None) is func:
        if name in OPERATORS and not kwargs:
            return "call_function", OPERATORS[name], tuple(args), kwargs
        return "call_method", name, tuple(args), kwargs
    if isinstance(func, FunctionType) and kwargs:  # torch's Python functions pass all of their arguments, by name
        given, names = dict(kwargs), inspect.signature(func).parameters
        for key, parameter in names.items():
            if key in given and given[key] is parameter.default:
                del given[key]
        for key in list(names)[len(args) :]:
            if key not in given:
                break
            args = (*args, given.pop(key))
        kwargs = given
    return "call_function", func, tuple(args), kwargs
