"""Moves the rotation of queries and keys, and norms of their heads before it, into attention in a traced graph.

Inductor rotates q and k in a kernel each; the backend's kernel that stores K and V rotates both as well. Recognised is
the half-split rotation of `backends.rope.rotate`, as transformers writes it: x·cos + cat(-high, low)·sin, of all dims
or the first, or cat(low·cos - high·sin, high·cos + low·sin) by tables of one half. Others stay as they are.
"""

import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from specdec.reach.targets.compiling.matching import (
    erase_upwards,
    is_function,
    is_method,
    is_product,
    is_sum,
    is_tensor,
    value,
)


class _Rotation(NamedTuple):
    """A rotation of `source` [1, heads, T, dim] by tables cos and sin [1, T, R], or [1, T, R/2] of one half."""

    source: fx.Node
    cos: fx.Node
    sin: fx.Node
    is_half: bool = False


def hand_over_rotations(graph: fx.GraphModule, op: Any) -> int:
    """Pass q and k before their rotation, and its tables [T, R], to calls of op(q, k, v, layer, cos, sin) without
    tables, if both were rotated by the same tables. In place; returns the number of calls rewritten."""
    tables: dict[fx.Node, fx.Node] = {}
    num_rewritten = 0
    for call in graph.graph.nodes:
        if not is_function(call, op, op.overloadpacket) or any(table is not None for table in call.args[4:]):
            continue
        places = [_below_layout(call, x) for x in call.args[:2]]
        rotations = [_rotation(node) for _, node in places]
        q, k = rotations
        if q is None or k is None or q[1:] != k[1:]:
            continue
        for table in (q.cos, q.sin):
            if table not in tables:
                tables[table] = _without_batch(graph.graph, table, q.is_half)
        call.args = (*call.args[:4], tables[q.cos], tables[q.sin])
        for (user, node), source in zip(places, (q.source, k.source), strict=True):
            user.replace_input_with(node, source)
            erase_upwards(graph.graph, node)
        num_rewritten += 1
    return num_rewritten


def hand_over_norms(graph: fx.GraphModule, op: Any) -> int:
    """Pass q and k before `specdec::rms_norm` of their heads, with its weights and settings, to calls of op(q, k, v,
    layer, cos, sin), if both had one with equal settings. In place; returns the number of calls rewritten."""
    num_rewritten, norm = 0, torch.ops.specdec.rms_norm.default
    for call in graph.graph.nodes:
        if not is_function(call, op, op.overloadpacket) or len(call.args) != 6 or call.args[5] is None:
            continue
        places = [_below_layout(call, x) for x in call.args[:2]]
        norms = [node for _, node in places]
        if not all(is_function(n, norm) and len(n.users) == 1 for n in norms) or norms[0] is norms[1]:
            continue
        if norms[0].args[2:] != norms[1].args[2:]:
            continue
        call.args = (*call.args, norms[0].args[1], *norms[1].args[1:])
        for user, node in places:
            user.replace_input_with(node, node.all_input_nodes[0])
            graph.graph.erase_node(node)
        num_rewritten += 1
    return num_rewritten


def _below_layout(user: fx.Node, node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Return the node that `node` is only another layout of, or the element of a batch of, and its user there."""
    while is_method(node, "transpose") or (is_function(node, operator.getitem) and node.args[1] == 0):
        user, node = node, node.args[0]  # type: ignore[assignment]
    return user, node


def _rotation(node: fx.Node) -> _Rotation | None:
    """Return the rotation whose result `node` is, or None."""
    parts = _concatenated(node)
    whole = _sum(node) or (_halves(*parts) if parts is not None else None)
    if whole is not None:
        return whole
    first = _sum(parts[0]) if parts else None
    if parts is None or first is None:
        return None
    base, size = first.source.args[0] if first.source.args else None, _size(first.source)
    if not isinstance(base, fx.Node) or not _is_slice(first.source, base, None, size):
        return None
    return first._replace(source=base) if _is_slice(parts[1], base, size, None) else None


def _sum(node: Any) -> _Rotation | None:
    """Match x·cos + cat(-high, low)·sin."""
    if not is_function(node, operator.add) or not all(is_function(n, operator.mul) for n in node.args):
        return None
    (x, cos), (turned, sin) = (product.args for product in node.args)
    parts = _concatenated(turned)
    half = _size(x) // 2
    if parts is None or not is_function(parts[0], operator.neg):
        return None
    if not _is_slice(parts[0].args[0], x, half, None) or not _is_slice(parts[1], x, None, half):
        return None
    tables = _table(cos, x), _table(sin, x)
    return None if tables[0] is None or tables[1] is None else _Rotation(x, tables[0], tables[1])


def _halves(first: Any, second: Any) -> _Rotation | None:
    """Match low·cos - high·sin and high·cos + low·sin, where low and high are the halves of one tensor."""
    if not is_function(first, operator.sub) or not is_sum(second):
        return None
    products = [*first.args, *second.args]
    if len(products) != 4 or not all(is_product(p) for p in products):
        return None
    (low, cos), (high, sin), *others = (p.args for p in products)
    if others != [(high, cos), (low, sin)] or not all(is_function(n, operator.getitem) for n in (low, high)):
        return None
    halves = low.args[0]
    is_split = is_function(halves, torch.chunk) and (*halves.args[1:], *halves.kwargs.values()) == (2, -1)
    if not is_split or (low.args, high.args) != ((halves, 0), (halves, 1)):
        return None
    tables = _table(cos, low), _table(sin, low)
    x = halves.args[0]
    return None if tables[0] is None or tables[1] is None else _Rotation(x, tables[0], tables[1], is_half=True)


def _table(node: Any, x: Any) -> fx.Node | None:
    """Return the [1, T, R] that `node` is with a dimension for heads, if it is of the dtype and R of `x`."""
    if not is_method(node, "unsqueeze") or node.args[1:] != (1,) or not (is_tensor(node.args[0]) and is_tensor(x)):
        return None
    ours, theirs = value(node.args[0]), value(x)
    is_fitting = ours.dim() == 3 and ours.shape[0] == 1 and ours.shape[2] == theirs.shape[-1]
    return node.args[0] if is_fitting and ours.dtype == theirs.dtype else None


def _concatenated(node: Any) -> tuple[Any, Any] | None:
    """Return the two nodes that `node` concatenates along their last dimension, if it does."""
    if not is_function(node, torch.cat) or (*node.args[1:], *node.kwargs.values()) != (-1,):
        return None
    first, *rest = node.args[0]
    return (first, rest[0]) if len(rest) == 1 else None


def _is_slice(node: Any, source: Any, start: int | None, stop: int | None) -> bool:
    """Return whether `node` is source[..., start:stop]."""
    return is_function(node, operator.getitem) and node.args == (source, (Ellipsis, slice(start, stop, None)))


def _size(node: Any) -> int:
    return int(value(node).shape[-1]) if is_tensor(node) else 0


def _without_batch(graph: fx.Graph, table: fx.Node, is_half: bool) -> fx.Node:
    """Return the element of the batch of one, with both halves."""
    with graph.inserting_after(table):
        element = graph.call_function(operator.getitem, (table, 0))
    element.meta["example_value"] = value(table)[0]
    if not is_half:
        return element
    with graph.inserting_after(element):
        return graph.call_function(torch.cat, ([element, element], -1))
