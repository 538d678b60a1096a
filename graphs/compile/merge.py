"""Joins linear products of one input into one product in a traced graph: Q, K and V, or gate and up, or a router, a
shared expert and its gate.

Small batches are bound by launches and by how well one product fills the GPU. The joined weight replaces its parts,
which become views of it, so no weight is stored twice; `part` gives every weight its own storage again.
"""

import operator
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

ALIGNMENT = 16  # bytes, of the features of a joined product: cuBLAS has only slow kernels for others


def merge_linears(graph: fx.GraphModule, reals: Sequence[Any]) -> list[list[int]]:
    """Rewrite `graph` in place; return groups of argument positions: the weights, or the biases, of one joined product.

    reals: its arguments; the joined tensor must replace the one at the first position of a group. Products are joined
    if they have one input, and weights and biases that are arguments of the graph, each used once and sharing its
    storage with no other tensor.
    """
    places = {node: i for i, node in enumerate(n for n in graph.graph.nodes if n.op == "placeholder")}
    own = places_with_own_storage(reals)
    alike: dict[tuple[fx.Node, bool], list[_Product]] = defaultdict(list)
    for number, node in enumerate(graph.graph.nodes):
        if node.op == "call_function" and node.target is F.linear and not node.kwargs:
            source, weight, bias = (*node.args, None)[:3]
            operands = [places.get(o, -1) for o in (weight, bias) if o is not None and len(o.users) == 1]
            is_whole = len(operands) == 1 + (bias is not None) and own.issuperset(operands)
            if is_whole and reals[operands[0]].dim() == 2:
                alike[viewed(source), bias is not None].append(_Product(number, node, operands, reals[operands[0]]))
    mutations = [number for number, node in enumerate(graph.graph.nodes) if _mutates(node)]
    groups: list[list[int]] = []
    for products in alike.values():
        first, last = products[0].number, products[-1].number
        if len(products) > 1 and not any(first < number < last for number in mutations):
            groups += _join_products(graph, products)
    graph.recompile()
    return groups


def join(members: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return `members`, weights or biases, concatenated, with zeros up to a multiple of ALIGNMENT of features."""
    joined = torch.cat([m.detach() for m in members])
    rest = _unaligned(joined.shape[0], joined)
    return torch.cat([joined, joined.new_zeros(rest, *joined.shape[1:])]) if rest else joined


def _unaligned(num_features: int, weight: torch.Tensor) -> int:
    """Return how many features of the dtype of `weight` are missing to a multiple of ALIGNMENT."""
    return -num_features % (ALIGNMENT // weight.element_size())


def viewed(node: fx.Node) -> fx.Node:
    """Return the tensor of which `node` is a view of the same shape and dtype, or a cast to its own dtype: products of
    both have one input."""
    while node.op == "call_method" and node.target in ("view", "reshape", "to") and not node.kwargs:
        source = node.args[0]
        if not isinstance(source, fx.Node) or _kind(source) != _kind(node):
            break
        node = source
    return node


def _kind(node: fx.Node) -> tuple[torch.dtype, torch.device, str]:
    value = node.meta["example_value"]
    return value.dtype, value.device, str(tuple(value.shape))


class _Product(NamedTuple):
    """A linear product: its number in the graph, node, argument positions of its weight (and bias), and the weight."""

    number: int
    node: fx.Node
    operands: list[int]
    weight: torch.Tensor


def places_with_own_storage(reals: Sequence[Any]) -> set[int]:
    """Return the positions of contiguous tensors that share their storage with no other argument or process."""
    tensors = {
        i: t for i, t in enumerate(reals) if isinstance(t, torch.Tensor) and not is_traceable_wrapper_subclass(t)
    }
    owners = Counter(t.untyped_storage().data_ptr() for t in tensors.values())
    return {
        i
        for i, t in tensors.items()
        if t.is_contiguous()
        and owners[t.untyped_storage().data_ptr()] == 1
        and t.untyped_storage().nbytes() == t.nbytes
        and not (t.device.type == "cpu" and t.is_shared())
    }


def _mutates(node: fx.Node) -> bool:
    """Return whether a node may write to one of its arguments; products must not move across it."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    is_in_place = name.endswith("_") and not name.endswith("__")
    return node.op in ("call_function", "call_method") and (is_in_place or name == "setitem" or "out" in node.kwargs)


def _join_products(graph: fx.GraphModule, products: Sequence[_Product]) -> list[list[int]]:
    """Replace `products` of one input by one product and a split of its output; return the groups of operands.

    Those whose features are not a multiple of ALIGNMENT come last, since later ones would be unaligned.
    """
    first = products[0].node
    products = sorted(products, key=lambda p: _unaligned(p.weight.shape[0], p.weight) > 0)
    groups = [list(group) for group in zip(*(p.operands for p in products), strict=True)]
    sizes = [p.weight.shape[0] for p in products]
    rest = _unaligned(sum(sizes), products[0].weight)
    joined = []
    for operands in zip(*(p.node.args[1 : 1 + len(groups)] for p in products), strict=True):
        value = operands[0].meta["example_value"]
        with value.fake_mode:
            operands[0].meta["example_value"] = value.new_empty(sum(sizes) + rest, *value.shape[1:])  # as `join` does
        joined.append(operands[0])
    with graph.graph.inserting_before(first):
        product = graph.graph.call_function(F.linear, (first.args[0], *joined))
        divide(graph.graph, product, [*sizes, rest] if rest else sizes, [p.node for p in products])
    return groups


def divide(graph: fx.Graph, joined: fx.Node, sizes: Sequence[int], nodes: Sequence[fx.Node]) -> None:
    """Split `joined` by `sizes` along the last dimension, at the insertion point; its parts replace `nodes`."""
    parts = graph.call_function(torch.split, (joined, sizes, -1))
    chosen = [graph.call_function(operator.getitem, (parts, i)) for i in range(len(nodes))]
    for node, part in zip(nodes, chosen, strict=True):
        node.replace_all_uses_with(part, propagate_meta=True)
        graph.erase_node(node)


class MergedWeights:
    """The weights and biases of joined products; groups: of positions in `args`, from `merge_linears`."""

    def __init__(self, groups: Sequence[Sequence[int]], args: list[Any]):
        self._groups = groups
        self._args = args
        self._members: list[list[torch.Tensor]] = []

    @torch.inference_mode(False)  # autograd can still use the weights
    def join(self) -> None:
        """Put the joined tensor of each group at its first position; all tensors of the group become views of it."""
        try:
            for group in self._groups:
                members = [self._args[i] for i in group]
                joined = join(members)
                self._members.append(members)
                self._args[group[0]] = joined
                at = 0
                for member in members:
                    member.data = joined[at : at + member.shape[0]]
                    at += member.shape[0]
        except BaseException:
            self.part()
            raise

    @torch.inference_mode(False)
    def part(self) -> None:
        """Give every weight its own storage again, one group at a time, and drop the joined tensors.

        If it raises, the remaining groups are unchanged, and another call continues with them. It may be called while
        another callable is traced: an unreferenced engine can be garbage collected at any time.
        """
        while self._members:
            with _disable_current_modes():  # a trace's fake tensors
                own = [member.data.clone() for member in self._members[-1]]
                for member, data in zip(self._members.pop(), own, strict=True):
                    member.data = data
            self._args[self._groups[len(self._members)][0]] = None
