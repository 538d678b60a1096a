"""Runs the last piece of a chain, which follows the last attention, on chosen rows only.

A prefill needs K/V of all tokens, but last hidden states only of each prompt's last token: so the last layer's output
product and MLP, and the final norm, need no other rows. Rows do not interact there.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._pytree import tree_map_only

from specdec.graphs.compile.pieces import is_call

WHOLE, UNKNOWN = -1, -2  # of an argument: it has no rows; its rows are not along one dimension
_CHOSEN: ContextVar[tuple[torch.Tensor, int] | None] = ContextVar("specdec_rows", default=None)


@contextmanager
def on_rows(rows: torch.Tensor | None, num_tokens: int) -> Iterator[None]:
    """Return a context in which the last piece of a chain runs on `rows` [n] int64 of `num_tokens` only; other rows of
    its results are zero. It runs on all rows if rows is None or not fewer."""
    token = _CHOSEN.set(None if rows is None or len(rows) >= num_tokens else (rows, num_tokens))
    try:
        yield
    finally:
        _CHOSEN.reset(token)


def hoist_outputs(graph: fx.GraphModule, split_at: Sequence[Any]) -> None:
    """Move nodes that outputs need, but that do not depend on the last call of a `split_at` op, before that call, in
    place. So the last piece holds nothing that must run on all rows."""
    nodes = list(graph.graph.nodes)
    last = next((n for n in reversed(nodes) if is_call(n, split_at)), None)
    if last is None:
        return
    behind = nodes[nodes.index(last) :]
    depends = {last}
    for node in behind:
        if not depends.isdisjoint(node.all_input_nodes):
            depends.add(node)
    needed = set(behind[-1].all_input_nodes) - depends
    for node in reversed(behind):
        if node in needed:
            needed.update(node.all_input_nodes)
    for node in behind:
        if node in needed:
            last.prepend(node)


def let_last_run_on_rows(chain: fx.GraphModule, split_at: Sequence[Any]) -> None:
    """Make the last piece of `chain`, a graph of `compile_pieces`, follow `on_rows`, if its arguments allow it."""
    targets = [str(n.target) for n in chain.graph.nodes if n.op == "call_module"][-2:]
    before, piece = (chain._modules[target] for target in targets) if len(targets) == 2 else (None, None)
    if not isinstance(before, fx.GraphModule) or not isinstance(piece, fx.GraphModule):
        return
    run = getattr(chain, targets[1])
    examples = [n.meta.get("example_value") for n in piece.graph.nodes if n.op == "placeholder"]
    dims = [_dim_of_rows(value, is_compiled=run != piece.forward) for value in examples]
    if UNKNOWN not in dims and any(is_call(n, split_at) for n in before.graph.nodes):
        chain.__dict__[targets[1]] = _LastPiece(run, dims)


class _LastPiece:
    """A piece that follows `on_rows`. dims: each argument's dimension of rows, or WHOLE."""

    def __init__(self, piece: Callable[..., Any], dims: Sequence[int]):
        self._piece, self._dims = piece, dims

    def __call__(self, *args: Any) -> Any:
        chosen = _CHOSEN.get()
        if chosen is None:
            return self._piece(*args)
        rows, num_tokens = chosen

        def taken(value: Any, dim: int) -> Any:
            if isinstance(value, int):
                return len(rows)
            return value if dim == WHOLE else value.index_select(dim, rows)

        def spread(made: torch.Tensor) -> torch.Tensor:
            return made.new_zeros(num_tokens, *made.shape[1:]).index_copy_(0, rows, made)

        return tree_map_only(torch.Tensor, spread, self._piece(*map(taken, args, self._dims)))


def _dim_of_rows(value: Any, is_compiled: bool) -> int:
    """Return the dimension of rows of an example value; 0 if it is the number of rows."""
    if isinstance(value, torch.SymInt):
        return 0 if isinstance(value.node.expr, sympy.Symbol) else UNKNOWN
    if not isinstance(value, torch.Tensor):
        return UNKNOWN
    sizes: dict[int, Any] = {i: size for i, size in enumerate(value.shape) if isinstance(size, torch.SymInt)}
    if not sizes:
        return WHOLE
    is_plain = len(sizes) == 1 and all(isinstance(size.node.expr, sympy.Symbol) for size in sizes.values())
    has_strides = is_compiled and not value.is_contiguous()  # Inductor's code assumes them
    return next(iter(sizes)) if is_plain and not has_strides else UNKNOWN
