"""Replaces `torch.topk` of few scores per row, as routers use it, and their softmax by our op in a traced graph; and
moves sums over experts into norms."""

import operator
from typing import Any

import torch
from torch import fx

from specdec.backends.experts.choices import takes
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
    replace,
    uncast,
    value,
)

WEIGHTED_SUM, ADD_RMS_NORM = torch.ops.specdec.weighted_sum.default, torch.ops.specdec.add_rms_norm.default


def take_over_choices(graph: fx.GraphModule) -> int:
    """Replace topk(scores, k) along the last dimension, the largest first, by `specdec::top_scores`.

    In place; returns the number of calls rewritten. A call whose results are accessed by name is left alone.
    """
    num_rewritten = 0
    for node in list(graph.graph.nodes):
        arguments = _arguments(node)
        if arguments is None or not takes(value(arguments[0]), arguments[1]) or any(map(_is_named, node.users)):
            continue
        _replace(graph.graph, node, *arguments)
        num_rewritten += 1
    return num_rewritten


def _replace(graph: fx.Graph, node: fx.Node, scores: fx.Node, k: int) -> None:
    """Put our op in the place of `node`; it also computes the softmax of all scores or of the chosen ones."""
    values = next((u for u in node.users if is_function(u, operator.getitem) and u.args[1] == 0), None)
    source, softmax, last = scores, "", values
    if values is not None:
        source, softmax, last = _softmax(scores, values, k)
        user = only_user(last)
        if softmax and is_method(user, "to") and user.args[1:] == (value(user).dtype,) and not user.kwargs:
            last = user
    with graph.inserting_before(node):
        dtype = None if last is None else value(last).dtype
        chosen = graph.call_function(torch.ops.specdec.top_scores.default, (source, k, softmax, dtype))
        if last is not None:
            found = graph.call_function(operator.getitem, (chosen, 0))
            last.replace_all_uses_with(found, propagate_meta=True)
    node.replace_all_uses_with(chosen, propagate_meta=True)
    for old in (last, node, scores):
        if old is not None and not old._erased:  # searching all nodes for it would be quadratic
            erase_upwards(graph, old)


def _softmax(scores: fx.Node, values: fx.Node, k: int) -> tuple[fx.Node, str, fx.Node]:
    """Return the scores to choose from, the kind of softmax of `top_scores`, and the node that has its results."""
    before, after = _softmax_source(scores), only_user(values)
    if before is not None and value(scores).dtype == torch.float32 and takes(value(before), k):
        divided = _divided(values)
        return (before, "all", values) if divided is None else (before, "chosen", divided)
    is_after = _softmax_source(after) is values
    return (scores, "chosen", after) if is_after else (scores, "", values)


def _softmax_source(node: Any) -> Any:
    """Return the node that `node` is the softmax of, over its last dimension, computed in fp32."""
    if not is_op(node, "softmax") or not node.args:
        return None
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    return uncast(node.args[0]) if is_tensor(node.args[0]) and dim in (-1, value(node).dim() - 1) else None


def _divided(values: fx.Node) -> Any:
    """Return the quotient if every use of `values` is values / values.sum(-1, keepdim=True)."""
    total = next((u for u in values.users if is_op(u, "sum")), None)
    options = () if total is None else (*total.args[1:], *total.kwargs.items())
    if options not in ((("dim", -1), ("keepdim", True)), (-1, ("keepdim", True))) or len(values.users) != 2:
        return None
    quotient = only_user(total)
    is_quotient = is_function(quotient, operator.truediv, operator.itruediv, torch.div)
    return quotient if is_quotient and quotient.args == (values, total) and not quotient.kwargs else None


def _is_named(user: fx.Node) -> bool:
    """Return whether `user` accesses a result of topk by name."""
    return user.op == "call_function" and user.target is getattr


def _arguments(node: fx.Node) -> tuple[fx.Node, int] | None:
    """Return scores and k of a call of topk that our op supports, None for any other node."""
    if not is_op(node, "topk"):
        return None
    names = ("input", "k", "dim", "largest", "sorted")
    given: dict[str, Any] = {"dim": -1, "largest": True, "sorted": True}
    given |= dict(zip(names, node.args, strict=False)) | node.kwargs
    scores, k = given["input"], given["k"]
    if not isinstance(scores, fx.Node) or not isinstance(k, int) or given.get("out") is not None:
        return None
    is_last = given["dim"] in (-1, value(scores).dim() - 1)
    return (scores, k) if is_last and given["largest"] else None


def hand_over_sums(graph: fx.GraphModule) -> None:
    """Replace each `add_rms_norm` of experts' outputs by `specdec::experts_rms_norm`, which sums them; in place."""
    for node in [n for n in graph.graph.nodes if is_function(n, ADD_RMS_NORM)]:
        for x, residual in (node.args[:2], node.args[1::-1]):
            parts = {node}
            given = _experts(x, residual, parts)
            if given is not None:
                op = torch.ops.specdec.experts_rms_norm.default
                replace(graph.graph, op, (*given, residual, *node.args[2:]), node, parts)
                break


def _experts(x: Any, residual: Any, parts: set[fx.Node]) -> tuple[Any, ...] | None:
    """Return rows, weights, shared and gate, see `experts_rms_norm`, if `x` is their sum and only the norm uses it.

    parts: the nodes between are added to it.
    """
    shared = gate = None
    if not is_tensor(residual) or not is_tensor(x) or value(x).shape != value(residual).shape:
        return None
    while is_method(x, "reshape", "view") and only_user(x) and value(x.args[0]).shape[-1] == value(x).shape[-1]:
        parts.add(x)
        x = x.args[0]
    if is_sum(x) and only_user(x):
        pair = operands(x, lambda n: is_function(n, WEIGHTED_SUM))
        if pair is None or not is_tensor(pair[1]) or value(pair[1]).shape != value(pair[0]).shape:
            return None
        parts.add(x)
        x, shared = pair
        factors = operands(shared, _is_gate) if is_product(shared) and only_user(shared) else None
        if factors is not None and value(factors[1]).shape == value(shared).shape:
            parts |= {shared, factors[0]}
            gate, shared = factors[0].args[0], factors[1]
    dtypes = {value(n).dtype for n in (residual, shared, gate) if n is not None}
    if not is_function(x, WEIGHTED_SUM) or not only_user(x) or dtypes != {x.args[2]}:
        return None
    parts.add(x)
    return *x.args[:2], shared, gate


def _is_gate(node: Any) -> bool:
    """Return whether `node` is the sigmoid of one number per row."""
    if not is_op(node, "sigmoid") or not node.args or not is_tensor(node):
        return False
    return value(node).dim() == 2 and value(node).shape[1] == 1
