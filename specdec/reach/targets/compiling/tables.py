"""Replaces a rope's tables in a traced graph, cos and sin of positions times frequencies, by `specdec::rope_tables`.

Qwen3.5 writes tables for images' rows and columns into those of time. For text they are equal: one is enough.
"""

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
    replace_pair,
    uncast,
    value,
)

ROPE_TABLES = torch.ops.specdec.rope_tables.default
_ALL = slice(None, None, None)


def take_over_tables(graph: fx.GraphModule) -> None:
    """Rewrite every recognised pair of tables [1, T, R], in place."""
    _drop_equal_writes(graph.graph)
    for node in list(graph.graph.nodes):
        angles = node.args[0] if is_method(node, "cos") else None
        sines = [n for n in angles.users if is_method(n, "sin")] if isinstance(angles, fx.Node) else []
        origin = _origin(angles)
        if origin is None or len(sines) != 1:
            continue
        positions, frequencies, is_doubled = origin
        cos, scale, is_first, is_twice = _result(node)
        sin, *others = _result(sines[0])
        if (
            [scale, is_first, is_twice] != others
            or value(cos).dtype != value(sin).dtype
            or is_first != (value(node).dim() == 4)
        ):
            continue
        if is_first:
            with graph.graph.inserting_before(min(node, sines[0])):
                positions = graph.graph.call_function(operator.getitem, (positions, 0))
        is_doubled = is_doubled or is_twice
        arguments = (positions, frequencies, scale, is_doubled, value(cos).dtype)
        replace_pair(graph.graph, ROPE_TABLES, arguments, (cos, sin), min(node, sines[0]))


def _drop_equal_writes(graph: fx.Graph) -> None:
    """Erase writes x[0][..., s] = x[i, ..., s] if x is equal along its first dimension, and nothing else writes to x or
    reads it."""
    for node in list(graph.nodes):
        if _is_equal_write(node) and all(is_function(n, torch.cat) or _is_equal_write(n) for n in node.args[0].users):
            given = node.args[2]
            graph.erase_node(node)
            erase_upwards(graph, given)


def _is_equal_write(node: Any) -> bool:
    if not is_function(node, operator.setitem) or not all(is_function(node.args[i], operator.getitem) for i in (0, 2)):
        return False
    (x, first), (source, index) = node.args[0].args, node.args[2].args
    is_equal = x is source and first == 0 and isinstance(index, tuple) and index[1:] == node.args[1]
    others = [n for n in x.users if n is not node.args[0]]
    is_written_only = all(
        is_function(n, operator.getitem) and is_function(only_user(n), operator.setitem) for n in others
    )
    return is_equal and is_written_only and _is_repeated(x)


def _is_repeated(node: Any) -> bool:
    """Return whether `node` is equal along its first dimension."""
    if is_method(node, "expand"):
        source = node.args[0]
        is_new = value(source).dim() < value(node).dim() or value(source).shape[0] == 1
        return is_new or _is_repeated(source)
    if is_function(node, operator.getitem):
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        return (isinstance(index[0], slice) or index[0] is Ellipsis) and _is_repeated(node.args[0])
    if is_function(node, torch.matmul, operator.matmul):
        return (
            value(node).dim() > 2
            and len(node.args) == 2
            and all(value(n).dim() == value(node).dim() and _is_repeated(n) for n in node.args)
        )
    if is_method(node, "transpose"):
        return all(dim > 0 for dim in node.args[1:]) and not node.kwargs and _is_repeated(node.args[0])
    if is_product(node):  # with a number, or with a tensor of fewer dimensions
        factor = node.args[1]
        return (not is_tensor(factor) or value(factor).dim() < value(node).dim()) and _is_repeated(node.args[0])
    return is_method(node, "cos", "sin", "float", "to") and _is_repeated(node.args[0])


def _origin(angles: Any) -> tuple[fx.Node, fx.Node, bool] | None:
    """Return positions [1, T], frequencies [F], and whether `angles` [1, T, F or 2F] are their products twice; or
    positions [3, 1, T], which are equal, if angles are [3, 1, T, F]."""
    is_doubled = is_function(angles, torch.cat) and (*angles.args[1:], *angles.kwargs.values()) == (-1,)
    if is_doubled:
        first, *rest = angles.args[0]
        if rest != [first]:
            return None
        angles = first
    found = _column_times_row(angles) if is_product(angles) else _outer_product(angles)
    if found is None or value(found[1]).dim() != 1:
        return None
    positions, frequencies = found
    is_one = value(positions).dim() == 2 or _is_repeated(positions)
    return (positions, frequencies, is_doubled) if is_one else None


def _column_times_row(angles: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return positions and frequencies of `angles`, positions[..., None] * frequencies; from transformers 5.24 on."""
    column, frequencies = (uncast(side) for side in angles.args)
    is_column = is_function(column, operator.getitem) and column.args[1] == (Ellipsis, None)
    is_known = is_column and is_tensor(frequencies) and value(angles).dtype == torch.float32
    return (column.args[0], frequencies) if is_known else None


def _outer_product(angles: Any) -> tuple[fx.Node, fx.Node] | None:
    """Return positions and frequencies of `angles`, a transposed matrix product of them; before transformers 5.24."""
    if not is_method(angles, "transpose") or angles.args[1:] not in ((1, 2), (2, 3)):
        return None
    product = angles.args[0]
    if not is_function(product, torch.matmul, operator.matmul) or value(product).dtype != torch.float32:
        return None
    frequencies, positions = (_spread(side) for side in product.args)
    if frequencies is None or positions is None or frequencies.args[1] != ((None,) * angles.args[1] + (_ALL, None)):
        return None
    is_known = positions.args[1] == ((_ALL,) * angles.args[1] + (None, _ALL))
    return (positions.args[0], frequencies.args[0]) if is_known else None


def _spread(node: Any) -> Any:
    """Return the indexed tensor of which `node` is the fp32 copy, expanded to a batch of one or of three."""
    node = uncast(node)
    if is_method(node, "expand") and is_tensor(node.args[0]) and value(node).shape[1:] == value(node.args[0]).shape[1:]:
        node = uncast(node.args[0])
    return node if is_function(node, operator.getitem) and is_tensor(node.args[0]) else None


def _result(node: Any) -> tuple[fx.Node, float, bool, bool]:
    """Return the last of the steps that follow `node`, a sine or cosine, and which steps there are.

    Steps: times a number (which is returned, else 1), [0] of a table of three positions, concatenation with itself
    (both returned as bools), and a cast.
    """
    scale, user = 1.0, only_user(node)
    if is_product(user) and isinstance(user.args[1], (int, float)):
        node, scale = user, float(user.args[1])
        user = only_user(node)
    is_first = value(node).dim() == 4 and is_function(user, operator.getitem) and user.args[1] == 0
    if is_first:
        node, user = user, only_user(user)
    is_doubled = is_function(user, torch.cat) and (*user.args, *user.kwargs.values()) in (((node, node), -1),)
    if is_doubled:
        node, user = user, only_user(user)
    return user if is_method(user, "to") else node, scale, is_first, is_doubled
