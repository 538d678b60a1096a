"""Joins the LoRA terms of the parts of a joined matmul in a traced graph: `specdec::lora` runs once, before the split.
So Q, K and V, or gate and up, take two launches instead of two each. A matmul in 16 bits and its adapters then become
one op, `lora_linear`."""

import operator
from typing import Any

import torch
from torch import fx

from specdec.backends.linear import MOST_PARTS, lora  # noqa: F401 (it defines the op)
from specdec.reach.targets.compiling.matching import is_function, only_user, replace

LORA, LORA_LINEAR = torch.ops.specdec.lora.default, torch.ops.specdec.lora_linear.default
LINEAR, GATE = torch.ops.specdec.linear.default, torch.ops.specdec.gate.default


def join_adapters(graph: fx.GraphModule) -> None:
    """Rewrite `graph` in place, wherever every part of a split product is adapted."""
    for split in [n for n in graph.graph.nodes if is_function(n, torch.split)]:
        parts = sorted(split.users, key=lambda user: user.args[1])
        adapted = [only_user(part) for part in parts]
        if 1 < len(parts) <= MOST_PARTS and all(_is_adapted(n, i, split) for i, n in enumerate(adapted)):
            _join(graph.graph, split, parts, adapted)


def take_in_adapters(graph: fx.GraphModule) -> None:
    """Replace our matmul ops, with their LoRA terms and a gate of two parts, by `lora_linear`, in place."""
    for node in [n for n in graph.graph.nodes if is_function(n, LORA)]:
        product, gate = node.args[1], only_user(node)
        if not is_function(product, LINEAR) or only_user(product) is not node or product.args[0] is not node.args[0]:
            continue
        last, activation = (gate, gate.args[1:]) if is_function(gate, GATE) and len(node.args[2]) == 2 else (node, ())
        parts = (product, node, last)
        replace(graph.graph, LORA_LINEAR, (*product.args, *node.args[2:], *activation), last, {*parts})


def _is_adapted(node: Any, i: int, split: fx.Node) -> bool:
    """Return whether `node` is the LoRA term of part i of a matmul, with the same input as the matmul."""
    product: Any = split.args[0]
    if not is_function(node, LORA) or not is_function(node.args[1], operator.getitem):
        return False
    return node.args[0] is product.args[0] and node.args[1].args == (split, i)


def _join(graph: fx.Graph, split: fx.Node, parts: list[fx.Node], adapted: list[fx.Node]) -> None:
    product: Any = split.args[0]
    weights = [[weight for node in adapted for weight in node.args[i]] for i in (2, 3, 4)]  # type: ignore[union-attr]
    with graph.inserting_before(split):
        joined = graph.call_function(LORA, (product.args[0], product, *weights))
    joined.meta = dict(product.meta)
    split.replace_input_with(product, joined)
    for node, part in zip(adapted, parts, strict=True):
        node.replace_all_uses_with(part)
        graph.erase_node(node)
