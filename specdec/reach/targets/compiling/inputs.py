"""Replaces the ops before a traced draft head's first matmul by `specdec::joined_inputs`.

Recognised are norms of embeddings and of states, concatenated, and rope tables looked up by position.
"""

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from specdec.backends.linear import inputs  # noqa: F401 (it defines the op)
from specdec.reach.targets.compiling.matching import is_function, is_method, is_tensor, replace_pair, value
from specdec.reach.targets.compiling.norms import RMS_NORM

JOINED_INPUTS = torch.ops.specdec.joined_inputs.default


def take_over_inputs(graph: fx.GraphModule) -> None:
    """Rewrite the first layer's inputs, in place."""
    lookups = [n for n in graph.graph.nodes if is_function(n, operator.getitem) and is_tensor(n.args[1])]
    found = [(n, _norms(n)) for n in graph.graph.nodes if is_function(n, torch.cat)]
    joined = [(node, norms) for node, norms in found if norms is not None]
    if len(lookups) != 1 or len(joined) != 1:
        return
    (lookup,), ((joint, (ids, embedding, states, *norms)),) = lookups, joined
    tables, positions = lookup.args
    given = (ids, embedding, states, positions, tables, *norms[:2])
    if all(n.op == "placeholder" for n in given) and value(tables).dim() == 3 and value(positions).dim() == 1:
        replace_pair(graph.graph, JOINED_INPUTS, (*given, *norms[2:]), (joint, lookup), min(joint, lookup))


def _norms(node: Any) -> tuple[Any, ...] | None:
    """Return ids, embedding, states, and weights and numbers of the norms, the states' first, if `node` concatenates
    the norms of embeddings [T, H] and of states."""
    parts, dim = node.args[0] if node.args else (), (*node.args[1:], *node.kwargs.values())
    if dim != (-1,) or len(parts) != 2 or not all(is_function(n, RMS_NORM) for n in parts):
        return None
    (embeds, weight, *numbers), (states, state_weight, *others) = (n.args for n in parts)
    is_plain = is_function(embeds, F.embedding) and len(embeds.args) in (2, 3) and "max_norm" not in embeds.kwargs
    if not is_plain or numbers != others:
        return None
    ids, embedding = embeds.args[:2]
    if is_method(ids, "clamp") and ids.args[1:] == () and ids.kwargs == {"min": 0}:
        ids = ids.args[0]
    alike = {value(n).dtype for n in (embedding, states, weight, state_weight)}
    is_flat = value(ids).dim() == 1 and value(embeds).shape == value(states).shape and value(embedding).is_contiguous()
    return (ids, embedding, states, state_weight, weight, *numbers) if is_flat and len(alike) == 1 else None
