"""Products of one input with several weights as one product: Q, K and V, or gate and up, in a traced graph.

Small batches are bound by launches and by how well one product fills the chip. The joined weight takes the place of
its parts, which become views of it, so nothing is held twice; `part` gives every weight a storage of its own again.
"""

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx


def merge_linears(graph: fx.GraphModule, fakes: list[Any], fake_mode: Any) -> list[list[int]]:
    """Rewrite `graph` in place; returns groups of places among its arguments: weights, or biases, of one product.

    fakes: its fake arguments; the first place of a group will hold what is joined there, too. Taken are linear
    products of one input whose weights and biases are arguments of the graph, each used once.
    """
    places = {node: i for i, node in enumerate(n for n in graph.graph.nodes if n.op == "placeholder")}
    alike: dict[tuple[fx.Node, bool], list[fx.Node]] = defaultdict(list)
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target is F.linear and not node.kwargs:
            source, *operands = [a for a in node.args if a is not None]
            if operands and all(_is_plain(operand, places, fakes) for operand in operands):
                alike[source, len(operands) > 1].append(node)
    groups: list[list[int]] = []
    for nodes in alike.values():
        if len(nodes) > 1:
            groups += _join_products(graph, nodes, places, fakes, fake_mode)
    graph.graph.lint()
    graph.recompile()
    return groups


def _is_plain(node: Any, places: Mapping[fx.Node, int], fakes: Sequence[Any]) -> bool:
    """Whether `node` is an argument that only its product uses, and a dense tensor."""
    if node not in places or len(node.users) != 1:
        return False
    value = fakes[places[node]]
    return isinstance(value, torch.Tensor) and value.is_contiguous()


def _join_products(
    graph: fx.GraphModule,
    nodes: Sequence[fx.Node],
    places: Mapping[fx.Node, int],
    fakes: list[Any],
    fake_mode: Any,
) -> list[list[int]]:
    """One product and its parts, in place of the products `nodes` of one input."""
    operands = list(zip(*(node.args[1:] for node in nodes), strict=True))
    groups = [[places[operand] for operand in alike] for alike in operands if alike[0] is not None]
    sizes = [fakes[i].shape[0] for i in groups[0]]
    for alike, group in zip(operands, groups, strict=False):
        with fake_mode:
            fakes[group[0]] = alike[0].meta["example_value"] = torch.cat([fakes[i] for i in group])
    with graph.graph.inserting_before(nodes[0]):
        product = graph.graph.call_function(F.linear, nodes[0].args)
        parts = graph.graph.call_function(torch.split, (product, sizes, -1))
        chosen = [graph.graph.call_function(operator.getitem, (parts, i)) for i in range(len(nodes))]
    for node, part in zip(nodes, chosen, strict=True):
        part.meta = dict(node.meta)
        node.replace_all_uses_with(part)
        graph.graph.erase_node(node)
    return groups


class MergedWeights:
    """The weights and biases of joined products; groups as `merge_linears` gives them."""

    def __init__(self, groups: Sequence[Sequence[int]]):
        self._groups = groups
        self._members: list[torch.Tensor] = []

    def join(self, args: list[Any]) -> None:
        """Put joined tensors where the groups' first ones are among `args`; all of a group become views of theirs."""
        for group in self._groups:
            members = [args[i] for i in group]
            joined = torch.cat([m.detach() for m in members])
            for member, rows in zip(members, joined.split([m.shape[0] for m in members]), strict=True):
                member.data = rows
            self._members += members
            args[group[0]] = joined

    def part(self) -> None:
        """Give every weight a storage of its own again."""
        for member in self._members:
            member.data = member.data.clone()
        self._members = []
