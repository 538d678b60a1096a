"""Simplifies the inputs of recurrent layers in a traced graph: queries and keys that several heads share, and the gates
of delta rules."""

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from specdec.backends.recurrent import gates  # noqa: F401 (it defines an op)
from specdec.reach.targets.compiling.matching import (
    erase_upwards,
    is_function,
    is_method,
    is_op,
    is_product,
    is_sum,
    is_tensor,
    only_user,
    operands,
    uncast,
    value,
)

SCAN = torch.ops.specdec.scan.default


def share_keys(graph: fx.GraphModule) -> None:
    """Give scans queries and keys without transformers' repetition (until 5.22), in place."""
    known: dict[int, torch.Tensor] = {}
    for node in [n for n in graph.graph.nodes if is_function(n, SCAN)]:
        whole = [_unrepeated(x) for x in node.args[:2]]
        if None in whole or value(whole[0]).shape != value(whole[1]).shape:
            continue
        for i, source in enumerate(whole):
            old = node.args[i]
            node.update_arg(i, _first(graph.graph, source, old, known))
            erase_upwards(graph.graph, old)


def take_over_delta_gates(graph: fx.GraphModule) -> None:
    """Compute the decays and strengths of scans by `specdec::delta_gates`, in place.

    Recognised are g = -exp(A_log) * softplus(a + dt_bias) in fp32 and beta = sigmoid(b), as in Qwen's hybrids.
    """
    known: dict[int, torch.Tensor] = {}
    for node in [n for n in graph.graph.nodes if is_function(n, SCAN) and len(n.args) > 5]:
        decay, strength = node.args[4:6]
        a, b = _decay(uncast(decay)), _strength(uncast(strength))
        if a is None or b is None or value(a[0]).shape != value(b).shape:
            continue
        with graph.graph.inserting_before(node):
            given = [_first(graph.graph, x, node, known) for x in (a[0], b)]
            both = graph.graph.call_function(torch.ops.specdec.delta_gates.default, (*given, *a[1:]))
            results = [graph.graph.call_function(operator.getitem, (both, i)) for i in range(2)]
        for i, (new, old) in enumerate(zip(results, (decay, strength), strict=True)):
            new.meta = dict(old.meta)
            node.update_arg(4 + i, new)
            erase_upwards(graph.graph, old)


def _first(graph: fx.Graph, source: fx.Node, before: fx.Node, known: dict[int, torch.Tensor]) -> fx.Node:
    """Return a new node source[0], inserted before another. known: by example value, which equal layers share, its
    first."""
    with graph.inserting_before(before):
        new = graph.call_function(operator.getitem, (source, 0))
    example = value(source)
    if id(example) not in known:
        known[id(example)] = example[0]
    new.meta["example_value"] = known[id(example)]
    return new


def _unbatched(node: Any) -> Any:
    """Return x where `node` is x[0]; else None."""
    return node.args[0] if is_function(node, operator.getitem) and node.args[1] == 0 else None


def _unrepeated(node: Any) -> Any:
    """Return x [1, T, G, N] if `node` is x.repeat_interleave(n, dim=2)[0] and only the scan uses it; else None."""
    repeated: Any = _unbatched(node)
    if only_user(node) is None or not is_method(repeated, "repeat_interleave") or only_user(repeated) is not node:
        return None
    return repeated.args[0] if repeated.kwargs == {"dim": 2} and isinstance(repeated.args[1], int) else None


def _decay(node: Any) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """Return a [1, T, H], A_log and dt_bias [H] where `node` is (-exp(A_log) * softplus(a + dt_bias))[0]."""
    product = uncast(_unbatched(node))
    pair = operands(product, lambda n: is_function(n, operator.neg, torch.neg)) if is_product(product) else None
    if pair is None or not is_function(pair[1], F.softplus) or len(pair[1].args) != 1 or pair[1].kwargs:
        return None
    exponential, step = pair[0].args[0], pair[1].args[0]
    is_rate = is_op(exponential, "exp") and exponential.args
    terms = operands(step, lambda n: is_tensor(n) and value(n).dim() == 1) if is_sum(step) else None
    if not is_rate or terms is None or not is_tensor(terms[1]) or value(step).dtype != torch.float32:
        return None
    rates, bias, a = uncast(exponential.args[0]), uncast(terms[0]), uncast(terms[1])
    is_given = all(n.op == "placeholder" and value(n).shape == value(a).shape[-1:] for n in (rates, bias))
    return (a, rates, bias) if is_given and value(a).dim() == 3 else None


def _strength(node: Any) -> Any:
    """Return b [1, T, H] where `node` is sigmoid(b)[0]; else None."""
    active = _unbatched(node)
    return active.args[0] if is_op(active, "sigmoid") and active.args and value(active).dim() == 3 else None
