"""Replaces RMS norms in a traced graph, and the addition before them, by `specdec::rms_norm` and `add_rms_norm`.

Recognised is x·rsqrt(mean(x²) + eps) in fp32, times a weight, as transformers writes it: rounded before the weight is
applied (Llama), or after (Gemma, whose weight is an offset from one, and GPT-OSS); torch's own `rms_norm`; and a norm
times silu(gate), as after linear attention.
"""

import operator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx

from specdec.reach.targets.compiling.matching import (
    CASTS,
    erase_unused,
    is_function,
    is_method,
    is_op,
    is_product,
    is_sum,
    is_tensor,
    only_user,
    operands,
    replace,
    uncast,
    value,
)

RMS_NORM = torch.ops.specdec.rms_norm.default


class _Norm(NamedTuple):
    """The result `out` of a norm of `x`, and its arguments; see `specdec::rms_norm`."""

    x: fx.Node
    weight: fx.Node
    eps: float
    offset: float
    is_late: bool
    out: fx.Node
    parts: set[fx.Node]


def take_over_norms(graph: fx.GraphModule) -> None:
    """Rewrite every recognised norm of `graph`, in place."""
    for node in list(graph.graph.nodes):
        norm = _norm(node)
        if norm is not None:
            _replace(graph.graph, norm)
    for node in [n for n in graph.graph.nodes if is_function(n, RMS_NORM) and n.args[3:] == (0.0, False)]:
        gated = _gated(node)
        if gated is not None:
            replace(graph.graph, torch.ops.specdec.gated_rms_norm.default, *gated)


def _norm(node: Any) -> _Norm | None:
    """Return the norm whose rsqrt `node` is, or that `node` is itself; None for other nodes."""
    if is_function(node, torch.rms_norm, F.rms_norm):
        x, shape, weight, eps = (*node.args, None, None)[:4]
        is_ours = len(node.args) == 4 and len(shape) == 1 and _is_vector(weight) and is_tensor(x) and eps is not None
        return _Norm(x, weight, eps, 0.0, True, node, {node}) if is_ours else None
    if not is_op(node, "rsqrt"):
        return None
    root, scaled = node.args[0], only_user(node)
    if not is_sum(root) or not is_product(scaled):
        return None
    variance, eps = root.args
    wide = _squared(variance)
    pair = operands(scaled, lambda n: n is node)
    if wide is None or not isinstance(eps, float) or pair is None or pair[1] is not wide:
        return None
    x = _source(wide)
    weighted = _weighted(scaled, x)
    if weighted is None:
        return None
    weight, offset, is_late, out, parts = weighted
    parts |= {node, root, variance, variance.args[0], scaled, wide}
    return _Norm(x, weight, eps, offset, is_late, out, parts - {x})


def _gated(norm: fx.Node) -> tuple[tuple[Any, ...], fx.Node, set[fx.Node]] | None:
    """Return the arguments of `gated_rms_norm`, the result and the nodes, if every use of `norm` is norm * silu(gate)
    in fp32, rounded to its dtype."""
    product = only_user(norm)
    pair = operands(product, lambda n: n is norm) if is_product(product) else None
    if pair is None or not is_function(pair[1], F.silu) or only_user(pair[1]) is None or not pair[1].args:
        return None
    last = only_user(product)
    if not is_method(last, *CASTS) or value(last).dtype != value(norm).dtype:
        return None
    active, wide = pair[1], pair[1].args[0]
    gate = uncast(wide)
    parts = {norm, product, last, active, wide}
    if (
        active.kwargs not in ({}, {"inplace": False})
        or value(active).dtype != torch.float32
        or not is_tensor(gate)
        or value(gate).dtype != value(norm).dtype
        or value(gate).shape != value(norm).shape
    ):
        return None
    if is_method(gate, "reshape", "view") and value(gate.args[0]).shape[-1] == value(gate).shape[-1]:
        parts.add(gate)
        gate = gate.args[0]  # its rows may be strided: this saves a copy
    return (norm.args[0], gate, *norm.args[1:3]), last, parts


def _squared(node: Any) -> Any:
    """Return x if `node` is the mean of x² over the last dimension, and x is in fp32."""
    if not is_method(node, "mean") or (*node.args[1:], *node.kwargs.items()) != (-1, ("keepdim", True)):
        return None
    power = node.args[0]
    x = power.args[0] if is_op(power, "pow") and power.args[1:] == (2,) else None
    return x if isinstance(x, fx.Node) and value(x).dtype == torch.float32 else None


def _source(wide: Any) -> fx.Node:
    """Return the node that `wide` is the fp32 copy of."""
    return wide.args[0] if is_method(wide, *CASTS) else wide


def _weighted(scaled: fx.Node, x: fx.Node) -> tuple[fx.Node, float, bool, fx.Node, set[fx.Node]] | None:
    """Return weight, offset, is_late, the result and the nodes, starting from `scaled`, x over its root mean square."""
    dtype, user = value(x).dtype, only_user(scaled)
    rounded = scaled
    if is_method(user, *CASTS) and value(user).dtype == dtype:
        rounded, user = user, only_user(user)
    if not is_product(user):
        return None
    pair = operands(user, lambda n: n is rounded)
    weight = _weight(pair[1]) if pair is not None else None
    if weight is None or value(weight[0]).dtype != dtype:
        return None
    node, offset, parts = weight
    parts |= {rounded, user}
    last = only_user(user)
    if rounded is scaled:
        if last is not None and is_method(last, *CASTS) and value(last).dtype == dtype:
            return node, offset, True, last, parts | {last}
        return (node, offset, True, user, parts) if value(user).dtype == dtype else None
    return (node, offset, False, user, parts) if value(user).dtype == dtype and offset == 0 else None


def _weight(node: Any) -> tuple[fx.Node, float, set[fx.Node]] | None:
    """Return the vector, and the offset in the factor `node` = offset + vector."""
    offset, parts = 0.0, set()
    if is_sum(node):
        pair = operands(node, lambda n: isinstance(n, (int, float)))
        if pair is None:
            return None
        parts.add(node)
        offset, node = float(pair[0]), pair[1]
    vector = uncast(node)
    while node is not vector:
        parts.add(node)
        node = node.args[0]
    return (vector, offset, parts) if _is_vector(vector) else None


def _is_vector(node: Any) -> bool:
    """Return whether `node` is a vector among the graph's inputs, which is defined before every op."""
    return is_tensor(node) and node.op == "placeholder" and value(node).dim() == 1


def _replace(graph: fx.Graph, norm: _Norm) -> None:
    """Put the op in the place of `norm.out`; if only a sum is normed, put the op of both in the place of the sum."""
    x, arguments = norm.x, (norm.weight, norm.eps, norm.offset, norm.is_late)
    terms = x.args if is_sum(x) else ()
    if terms and all(isinstance(t, fx.Node) and _like(t, x) for t in terms):
        with graph.inserting_before(x):
            both = graph.call_function(torch.ops.specdec.add_rms_norm.default, (*terms, *arguments))
            normed, total = (graph.call_function(operator.getitem, (both, i)) for i in range(2))
        x.replace_all_uses_with(total, propagate_meta=True)
        graph.erase_node(x)
        norm.out.replace_all_uses_with(normed, propagate_meta=True)
        erase_unused(graph, norm.parts)
    else:
        replace(graph, RMS_NORM, (x, *arguments), norm.out, norm.parts)


def _like(a: fx.Node, b: fx.Node) -> bool:
    """Return whether both have the same shape and dtype."""
    return value(a).dtype == value(b).dtype and value(a).shape == value(b).shape
