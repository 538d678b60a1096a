"""Replaces a rope's tables in a traced graph, cos and sin of positions times frequencies, by `specdec::rope_tables`."""

import operator
from typing import Any

import torch
from torch import fx

from specdec.reach.targets.compiling.matching import (
    erase_upwards,
    is_function,
    is_method,
    is_product,
    is_tensor,
    only_user,
    uncast,
    value,
)

_ALL = slice(None, None, None)


def take_over_tables(graph: fx.GraphModule) -> None:
    """Rewrite every pair of tables [1, T, R] that is recognised, in place."""
    for node in list(graph.graph.nodes):
        angles = node.args[0] if is_method(node, "cos") else None
        sines = [n for n in angles.users if is_method(n, "sin")] if isinstance(angles, fx.Node) else []
        origin = _origin(angles)
        if origin is None or len(sines) != 1:
            continue
        positions, frequencies, is_doubled = origin
        (cos, scale), (sin, other) = _result(node), _result(sines[0])
        if scale != other or value(cos).dtype != value(sin).dtype:
            continue
        with graph.graph.inserting_before(min(node, sines[0])):
            arguments = (positions, frequencies, scale, is_doubled, value(cos).dtype)
            tables = graph.graph.call_function(torch.ops.specdec.rope_tables.default, arguments)
            for i, old in enumerate((cos, sin)):
                new = graph.graph.call_function(operator.getitem, (tables, i))
                new.meta = dict(old.meta)
                old.replace_all_uses_with(new)
        for old in (cos, sin):
            erase_upwards(graph.graph, old, lambda n: n.op != "placeholder")


def _origin(angles: Any) -> tuple[fx.Node, fx.Node, bool] | None:
    """Return positions [1, T], frequencies [F], and whether `angles` [1, T, F or 2F] are their products twice."""
    is_doubled = is_function(angles, torch.cat) and (*angles.args[1:], *angles.kwargs.values()) == (-1,)
    if is_doubled:
        first, *rest = angles.args[0]
        if rest != [first]:
            return None
        angles = first
    if not is_method(angles, "transpose") or angles.args[1:] != (1, 2):
        return None
    product = angles.args[0]
    if not is_function(product, torch.matmul, operator.matmul) or value(product).dtype != torch.float32:
        return None
    frequencies, positions = (_spread(side) for side in product.args)
    if frequencies is None or positions is None or frequencies.args[1] != (None, _ALL, None):
        return None
    if positions.args[1] != (_ALL, None, _ALL) or value(frequencies.args[0]).dim() != 1:
        return None
    return positions.args[0], frequencies.args[0], is_doubled


def _spread(node: Any) -> Any:
    """Return the indexing of a tensor that `node` is the fp32 of, expanded to a batch of one."""
    node = uncast(node)
    if is_method(node, "expand") and is_tensor(node.args[0]) and value(node).shape == value(node.args[0]).shape:
        node = uncast(node.args[0])
    return node if is_function(node, operator.getitem) and is_tensor(node.args[0]) else None


def _result(node: Any) -> tuple[fx.Node, float]:
    """Return `node` times a number and in another dtype, as far as that is all that uses it, and the number."""
    scale, user = 1.0, only_user(node)
    if is_product(user) and isinstance(user.args[1], (int, float)):
        node, scale = user, float(user.args[1])
        user = only_user(node)
    return (user, scale) if is_method(user, "to") else (node, scale)
