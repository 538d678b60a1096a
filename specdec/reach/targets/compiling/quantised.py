"""Joins matmuls of one input with quantised weights in a traced graph: Q, K and V, or gate and up, are one launch.

Ops take several weights, which stay in place. Rows are quantised to FP8 once for all their matmuls, if possible by the
norm or the gated matmul that produces them.
"""

import operator
from collections import defaultdict
from typing import Any

import torch
from torch import fx

from specdec.backends.linear import MOST_PARTS, fp8, packed  # noqa: F401 (they define the ops)
from specdec.graphs.compile.merge import divide, viewed
from specdec.reach.targets.compiling.matching import (
    erase_unused,
    erase_upwards,
    is_function,
    is_method,
    only_user,
    value,
)

QUANTISE, FP8 = torch.ops.specdec.quantise.default, torch.ops.specdec.fp8_linear.default
PACKED, GATED_FP8 = torch.ops.specdec.packed_linear.default, torch.ops.specdec.gated_linear_fp8.default
RMS_NORM, ADD_RMS_NORM = torch.ops.specdec.rms_norm.default, torch.ops.specdec.add_rms_norm.default
FIRST: dict[Any, int] = {FP8: 2, PACKED: 1}  # the place of the weights of an op, which scales and biases follow
NUM_BEFORE = {FP8: 6, PACKED: 4}  # arguments before the activation


def join_quantised(graph: fx.GraphModule) -> None:
    """Rewrite `graph` in place."""
    rows: dict[Any, fx.Node] = {}
    for node in [n for n in graph.graph.nodes if is_function(n, QUANTISE)]:
        first = rows.setdefault((viewed(node.args[0]), node.args[1]), node)
        if first is not node:
            _share(graph.graph, first, node)
    alike: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in [n for n in graph.graph.nodes if is_function(n, *FIRST)]:
        weights, scales, bias = _operands(node)
        group = value(weights[0]).shape[0] // value(scales[0]).shape[0] if node.target is PACKED else 0
        source = viewed(node.args[0]) if node.target is PACKED else node.args[0]
        alike[source, group, value(scales[0]).dtype, bool(bias)].append(node)
    for nodes in alike.values():
        if 1 < len(nodes) <= MOST_PARTS:
            _join(graph.graph, nodes)


def quantise_results(graph: fx.GraphModule) -> None:
    """Fuse quantisation into norms, and gated matmuls by blocks, whose results are only quantised; in place."""
    for node in [n for n in graph.graph.nodes if is_function(n, QUANTISE)]:
        given: Any = node.args[0]
        while is_method(given, "view", "reshape") and viewed(given) is not given and only_user(given) is not None:
            given = given.args[0]
        if only_user(given) is None:
            continue
        if is_function(given, RMS_NORM):
            _quantise_result(graph.graph, node, given, torch.ops.specdec.rms_norm_fp8.default)
        elif is_function(given, operator.getitem) and is_function(given.args[0], ADD_RMS_NORM) and not given.args[1]:
            _quantise_result(graph.graph, node, given.args[0], torch.ops.specdec.add_rms_norm_fp8.default)
        elif is_function(given, FP8) and any(given.args[NUM_BEFORE[FP8] :]) and not node.args[1]:
            _quantise_result(graph.graph, node, given, GATED_FP8)


def _quantise_result(graph: fx.Graph, node: fx.Node, source: fx.Node, op: Any) -> None:
    """Put `op` in the place of `source`, whose result `node` quantises."""
    by_row = () if op is GATED_FP8 else (node.args[1],)
    with graph.inserting_before(source):
        both = graph.call_function(op, (*source.args, *by_row))
        num = 3 if source.target is ADD_RMS_NORM else 2
        results = [graph.call_function(operator.getitem, (both, i)) for i in range(num)]
    places = {user: results[int(user.args[1])] for user in node.users}  # type: ignore[arg-type]
    places |= {user: results[2] for user in source.users if is_function(user, operator.getitem) and user.args[1] == 1}
    for user, result in places.items():
        user.replace_all_uses_with(result, propagate_meta=True)
    for user in places:
        graph.erase_node(user)
    erase_upwards(graph, node)


def _operands(node: Any) -> list[list[fx.Node]]:
    """Return the weights, the scales and the biases of a product."""
    return [list(given) for given in node.args[FIRST[node.target] :][:3]]


def _share(graph: fx.Graph, first: fx.Node, again: fx.Node) -> None:
    """Replace the results of `again` by those of `first`, which come earlier."""
    places = {user.args[1]: user for user in first.users}
    for user in list(again.users):
        user.replace_all_uses_with(places[user.args[1]])
    erase_unused(graph, [*again.users, again])


def _join(graph: fx.Graph, nodes: list[fx.Node]) -> None:
    """Replace `nodes` by one matmul and a split of its result."""
    first: Any = nodes[0]
    at = FIRST[first.target]
    operands = [[each for given in of_all for each in given] for of_all in zip(*map(_operands, nodes), strict=True)]
    sizes = [value(node).shape[-1] for node in nodes]
    for view in (node for of_all in operands for node in of_all if node.op != "placeholder"):
        first.prepend(view)
    with graph.inserting_before(first):
        joined = graph.call_function(first.target, (*first.args[:at], *operands, *first.args[at + 3 :]))
        divide(graph, joined, sizes, nodes)
