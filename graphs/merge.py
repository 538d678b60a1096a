"""Products of one input with several weights as one product: Q, K and V, or gate and up, in a traced graph.

Small batches are bound by launches and by how well one product fills the chip. The joined weight takes the place of
its parts, which become views of it, so nothing is held twice; `part` gives every weight a storage of its own again.
"""

import operator
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode


def merge_linears(
    graph: fx.GraphModule, fakes: list[Any], reals: Sequence[Any], fake_mode: FakeTensorMode
) -> list[list[int]]:
    """Rewrite `graph` in place; returns groups of places among its arguments: weights, or biases, of one product.

    fakes: its fake arguments; the first place of a group will hold what is joined there, too. reals: its real ones.
    Taken are linear products of one input whose weights and biases are arguments of the graph, each used once and with
    a storage that nobody else has.
    """
    places = {node: i for i, node in enumerate(n for n in graph.graph.nodes if n.op == "placeholder")}
    own = _places_with_own_storage(reals)
    alike: dict[tuple[fx.Node, bool], list[_Product]] = defaultdict(list)
    for number, node in enumerate(graph.graph.nodes):
        if node.op == "call_function" and node.target is F.linear and not node.kwargs:
            source, weight, bias = (*node.args, None)[:3]
            operands = [places.get(o, -1) for o in (weight, bias) if o is not None and len(o.users) == 1]
            if len(operands) == 1 + (bias is not None) and own.issuperset(operands) and fakes[operands[0]].dim() == 2:
                alike[source, bias is not None].append(_Product(number, node, operands))
    mutations = [number for number, node in enumerate(graph.graph.nodes) if _mutates(node)]
    groups: list[list[int]] = []
    for products in alike.values():
        first, last = products[0].number, products[-1].number
        if len(products) > 1 and not any(first < number < last for number in mutations):
            groups += _join_products(graph, products, fakes, fake_mode)
    graph.graph.lint()
    graph.recompile()
    return groups


class _Product(NamedTuple):
    """A linear product: its number in the graph, its node, and where its weight (and bias) are among the arguments."""

    number: int
    node: fx.Node
    operands: list[int]


def _places_with_own_storage(reals: Sequence[Any]) -> set[int]:
    """Places of dense tensors that share their storage with nothing: neither another argument nor another process."""
    tensors = {i: t for i, t in enumerate(reals) if isinstance(t, torch.Tensor)}
    owners = Counter(t.untyped_storage().data_ptr() for t in tensors.values())
    return {
        i
        for i, t in tensors.items()
        if t.is_contiguous()
        and owners[t.untyped_storage().data_ptr()] == 1
        and t.untyped_storage().nbytes() == t.numel() * t.element_size()
        and not (t.device.type == "cpu" and t.is_shared())
    }


def _mutates(node: fx.Node) -> bool:
    """Whether a node may write to one of its arguments: products must not move across it."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    is_in_place = name.endswith("_") and not name.endswith("__")
    return node.op in ("call_function", "call_method") and (is_in_place or name == "setitem" or "out" in node.kwargs)


def _join_products(
    graph: fx.GraphModule, products: Sequence[_Product], fakes: list[Any], fake_mode: FakeTensorMode
) -> list[list[int]]:
    """One product and its parts, in place of `products` of one input."""
    groups = [list(group) for group in zip(*(p.operands for p in products), strict=True)]
    sizes = [fakes[i].shape[0] for i in groups[0]]
    first = products[0].node
    for operand, group in zip(first.args[1:], groups, strict=False):
        assert isinstance(operand, fx.Node)
        with fake_mode:
            fakes[group[0]] = operand.meta["example_value"] = torch.cat([fakes[i] for i in group])
    with graph.graph.inserting_before(first):
        product = graph.graph.call_function(F.linear, first.args)
        parts = graph.graph.call_function(torch.split, (product, sizes, -1))
        chosen = [graph.graph.call_function(operator.getitem, (parts, i)) for i in range(len(products))]
    for (_, node, _), part in zip(products, chosen, strict=True):
        part.meta = dict(node.meta)
        node.replace_all_uses_with(part)
        graph.graph.erase_node(node)
    return groups


class MergedWeights:
    """The weights and biases of joined products; groups as `merge_linears` gives them, of places in `args`."""

    def __init__(self, groups: Sequence[Sequence[int]], args: list[Any]):
        self._groups = groups
        self._args = args
        self._members: list[list[torch.Tensor]] = []

    @torch.inference_mode(False)  # weights stay what autograd can use
    def join(self) -> None:
        """Put joined tensors where the groups' first ones are; all of a group become views of theirs."""
        try:
            for group in self._groups:
                members = [self._args[i] for i in group]
                joined = torch.cat([m.detach() for m in members])
                self._members.append(members)
                self._args[group[0]] = joined
                for member, rows in zip(members, joined.split([m.shape[0] for m in members]), strict=True):
                    member.data = rows
        except BaseException:
            self.part()
            raise

    @torch.inference_mode(False)
    def part(self) -> None:
        """Give every weight a storage of its own again, a group at a time; what was joined is gone then.

        If it raises, the groups that are left are as they were, and another call goes on with them.
        """
        while self._members:
            own = [member.data.clone() for member in self._members[-1]]
            for member, data in zip(self._members.pop(), own, strict=True):
                member.data = data
            self._args[self._groups[len(self._members)][0]] = None
