"""Replaces matmuls of linear layers in a traced graph by `specdec::linear`, and those of a gated MLP by `gated_linear`.

Matmuls of experts already are our ops; they take in the gate that follows. A gate that follows LoRA terms becomes
`gate`.
"""

import operator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from specdec.backends.experts import quantised  # noqa: F401 (it defines ops)
from specdec.backends.gates import swigluoai
from specdec.backends.linear import KERNEL_DTYPES
from specdec.reach.targets.compiling.adapters import LORA
from specdec.reach.targets.compiling.matching import (
    is_function,
    is_like,
    is_method,
    is_op,
    is_product,
    is_tensor,
    only_user,
    operands,
    replace,
    uncast,
    value,
)
from specdec.reach.targets.compiling.quantised import FIRST, NUM_BEFORE

ACTIVATIONS = {F.silu: "silu", F.gelu: "gelu"}
GROUPED, GROUPED_FP8 = torch.ops.specdec.grouped_linear.default, torch.ops.specdec.grouped_fp8.default
BEFORE_GATE = {**NUM_BEFORE, GROUPED: 5, GROUPED_FP8: 6}  # arguments
Gated = tuple[fx.Node, str, set[fx.Node]]  # the result of a gate, its activation, and its nodes


def take_over_products(graph: fx.GraphModule) -> None:
    """Rewrite the matmuls of linear layers in `graph`, in place."""
    for node in [n for n in graph.graph.nodes if is_function(n, F.linear) and not n.kwargs and _is_matrix(n.args[1])]:
        gated, wide = _gated(node), _wide(node)
        arguments = (*node.args, None)[:3]
        if wide is not None:
            replace(graph.graph, torch.ops.specdec.wide_linear.default, wide, node, {node, *node.all_input_nodes})
        elif gated is None:
            replace(graph.graph, torch.ops.specdec.linear.default, arguments, node, {node})
        else:
            last, name, parts = gated
            replace(graph.graph, torch.ops.specdec.gated_linear.default, (*arguments, name), last, parts)
    for node in list(graph.graph.nodes):
        gated = _gate_behind(node)
        if gated is None:
            continue
        last, name, parts = gated
        if is_function(node, LORA):
            replace(graph.graph, torch.ops.specdec.gate.default, (node, name), last, parts)
        else:
            replace(graph.graph, node.target, (*node.args[: BEFORE_GATE[node.target]], name), last, parts)


def take_over_gates(graph: fx.GraphModule) -> None:
    """Replace act(gate) * up, of tensors of one shape in 16 bits, by `specdec::apply_gate`, in place."""
    for node in [n for n in graph.graph.nodes if is_product(n)]:
        pair = operands(node, lambda n: bool(_of_gate(n)) and len(n.users) == 1 and len(n.args) > 0)
        if pair is None or not all(_are_halves(n, pair[1]) for n in (*pair, pair[0].args[0])):
            continue
        active, up = pair
        gate, parts = active.args[0], {node, active}
        if is_method(gate, "reshape", "view") and only_user(gate) and _divides(value(gate.args[0]), value(up)):
            parts.add(gate)
            gate = gate.args[0]  # its rows may be strided: this saves a copy
        replace(graph.graph, torch.ops.specdec.apply_gate.default, (gate, up, _of_gate(active)), node, parts)


def _are_halves(a: Any, b: Any) -> bool:
    """Return whether both are tensors of one shape with a known last dim, and of the same 16-bit dtype."""
    if not is_tensor(a) or not is_tensor(b):
        return False
    x, y = value(a), value(b)
    is_known = y.dtype in KERNEL_DTYPES and y.dim() > 1 and isinstance(y.shape[-1], int)
    return is_known and x.dtype == y.dtype and x.shape == y.shape


def _divides(gate: torch.Tensor, up: torch.Tensor) -> bool:
    """Return whether the length of rows of `up` is a multiple of `gate`'s."""
    return isinstance(gate.shape[-1], int) and up.shape[-1] % gate.shape[-1] == 0


def _of_gate(node: Any) -> str:
    """Return the name of the activation of the gate that `node` applies; "" for others."""
    return "sigmoid" if is_op(node, "sigmoid") else _activation(node)


def _gate_behind(node: fx.Node) -> Gated | None:
    """Return the gate for `node` to take in: `node` is a matmul by our op, or the LoRA term of one."""
    if is_function(node, GROUPED):
        return _gated(node) or _taking_turns(node)
    if is_function(node, LORA) or (is_function(node, *FIRST) and len(node.args[FIRST[node.target]]) == 2):  # type: ignore[arg-type]
        return _gated(node)
    gated = _gated(node) if is_function(node, GROUPED_FP8) else None
    return gated if gated is not None and gated[1] == "silu" else None


def _is_matrix(weight: Any) -> bool:
    """Return whether `weight` is a plain matrix: torchao's have their own matmuls."""
    return is_tensor(weight) and value(weight).dim() == 2 and not is_traceable_wrapper_subclass(value(weight))


def _gated(product: fx.Node) -> Gated | None:
    """Return the result, the activation and the nodes, if every use of `product` is act(first half)·second half."""
    halves = only_user(product)
    if halves is None or not _is_halved(halves):
        return None
    places = {user.args[1]: user for user in halves.users if is_function(user, operator.getitem)}
    if len(halves.users) != 2 or set(places) != {0, 1}:
        return None
    active, up = only_user(places[0]), places[1]
    result = only_user(up)
    if active is None or result is None or not is_product(result):
        return None
    name = _activation(active)
    pair = operands(result, lambda n: n is active)
    if not name or pair is None or pair[1] is not up or only_user(active) is not result:
        return None
    return result, name, {product, halves, *places.values(), active, result}


def _taking_turns(product: fx.Node) -> Gated | None:
    """Return the same as `_gated`, if GPT-OSS's gate follows `product`."""
    for user in product.users:
        last: Any = user
        while last is not None:
            parts = {product}
            if is_like(last, _swigluoai(), product, parts):
                return last, "swigluoai", parts
            last = only_user(last)
    return None


@cache
def _swigluoai() -> Any:
    """Return the result of this gate in its own graph."""
    return next(n for n in fx.symbolic_trace(swigluoai).graph.nodes if n.op == "output").args[0]


def _wide(product: fx.Node) -> tuple[Any, ...] | None:
    """Return the arguments of `wide_linear`, if `product` is one of fp32 copies."""
    x, weight, bias = (*product.args, None)[:3]
    given = uncast(x), uncast(weight)
    is_cast = x is not given[0] and weight is not given[1]
    dtypes = {value(node).dtype for node in given} if is_cast else set()
    return (*given, bias) if len(dtypes) == 1 and dtypes < set(KERNEL_DTYPES) else None


def _is_halved(node: Any) -> bool:
    """Return whether `node` splits its input into halves along the last dimension."""
    if is_function(node, torch.split):
        sizes = node.args[1]
        return isinstance(sizes, (list, tuple)) and len(sizes) == 2 and sizes[0] == sizes[1] and node.args[2:] == (-1,)
    return is_op(node, "chunk") and node.args[1:] == (2,) and node.kwargs == {"dim": -1}


def _activation(node: Any) -> str:
    """Return the name of the activation that `node` applies; "" for one that `gated_linear` does not have."""
    for function, name in ACTIVATIONS.items():
        if is_function(node, function):
            options: dict[str, Any] = {k: v for k, v in node.kwargs.items() if v not in (False, "none")}
            if name == "gelu" and options == {"approximate": "tanh"}:
                return "gelu_tanh"
            return name if not options and len(node.args) == 1 else ""
    return ""
