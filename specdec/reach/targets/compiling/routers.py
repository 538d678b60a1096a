"""Replaces `torch.topk` in a traced graph by our op where routers choose from a few scores a row."""

from typing import Any

import torch
from torch import fx

from specdec.backends.experts.choices import takes


def take_over_choices(graph: fx.GraphModule) -> int:
    """Let calls of topk(scores, k) along the last dimension, the largest first, be of `specdec::top_scores`.

    In place; returns the number of calls rewritten. What needs the names of topk's results is left alone.
    """
    num_rewritten = 0
    for node in list(graph.graph.nodes):
        arguments = _arguments(node)
        if arguments is None:
            continue
        scores, k = arguments
        example = scores.meta["example_value"]
        if not takes(example, k) or any(_is_named(user) for user in node.users):
            continue
        with graph.graph.inserting_before(node):
            chosen = graph.graph.call_function(torch.ops.specdec.top_scores.default, (scores, k))
        chosen.meta = dict(node.meta)
        node.replace_all_uses_with(chosen)
        graph.graph.erase_node(node)
        num_rewritten += 1
    graph.graph.lint()
    graph.recompile()
    return num_rewritten


def _is_named(user: fx.Node) -> bool:
    """Return whether `user` takes a result of topk by its name."""
    return user.op == "call_function" and user.target is getattr


def _arguments(node: fx.Node) -> tuple[fx.Node, int] | None:
    """Return scores and k of a call of topk that is for us, None for any other node."""
    is_topk = (node.op == "call_function" and node.target is torch.topk) or (
        node.op == "call_method" and node.target == "topk"
    )
    if not is_topk:
        return None
    names = ("input", "k", "dim", "largest", "sorted")
    given: dict[str, Any] = {"dim": -1, "largest": True, "sorted": True}
    given |= dict(zip(names, node.args, strict=False)) | node.kwargs
    scores, k = given["input"], given["k"]
    if not isinstance(scores, fx.Node) or not isinstance(k, int) or given.get("out") is not None:
        return None
    is_last = given["dim"] in (-1, scores.meta["example_value"].dim() - 1)
    return (scores, k) if is_last and given["largest"] else None
