"""Lets recurrent layers read keys and queries that several heads share once, not a copy a head."""

from typing import Any

from torch import fx

from specdec.reach.targets.compiling.matching import is_function, is_method, only_user, value


def share_keys(graph: fx.GraphModule, scan: Any) -> int:
    """Give calls of `scan` queries and keys as they are before transformers repeats them (until 5.22), in place.

    Returns the number of calls rewritten.
    """
    num_rewritten = 0
    for node in [n for n in graph.graph.nodes if is_function(n, scan)]:
        whole = [_unrepeated(x) for x in node.args[:2]]
        if None in whole or value(whole[0]).shape != value(whole[1]).shape:
            continue
        for i, source in enumerate(whole):
            old = node.args[i]
            with graph.graph.inserting_before(old):
                new = graph.graph.call_function(old.target, (source, 0))
                new.meta["example_value"] = value(source)[0]
            node.update_arg(i, new)
            repeated = old.args[0]
            graph.graph.erase_node(old)
            graph.graph.erase_node(repeated)
        num_rewritten += 1
    return num_rewritten


def _unrepeated(node: Any) -> Any:
    """Return x [1, T, G, N] where `node` is x.repeat_interleave(n, dim=2)[0], for the scan alone; else None."""
    is_first = node.op == "call_function" and node.target.__name__ == "getitem" and node.args[1] == 0
    if not is_first or only_user(node) is None:
        return None
    repeated = node.args[0]
    is_it = is_method(repeated, "repeat_interleave") and only_user(repeated) is node
    return repeated.args[0] if is_it and repeated.kwargs == {"dim": 2} and isinstance(repeated.args[1], int) else None
