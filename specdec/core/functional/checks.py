"""Debug mode of the round's operations: checks the bounds of every index that goes in or comes out, on the device.

SPECDEC_DEBUG=1 in the environment turns it on, here and in the backends; each check waits for the host.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from specdec.backends.checks import require_within
from specdec.backends.metadata import slots_at
from specdec.core.cache.pool import Commit, KVPool
from specdec.core.functional.ops import RoundOps
from specdec.core.functional.tree import Tree
from specdec.core.functional.verify import VerifyOutput


def checked(ops: RoundOps) -> RoundOps:
    """Return `ops` with checks around them; ValueError names the first index that is out of bounds."""

    def build(*candidates: torch.Tensor, **shape: int) -> Tree:
        num = candidates[1].shape[1]
        require_within("candidate parents", candidates[3], -1, num - 1, "the last candidate")
        tree = ops.build(*candidates, **shape)
        _check_tree(tree)
        return tree

    def watch(verify: Callable[..., VerifyOutput]) -> Callable[..., VerifyOutput]:
        def watched(values: torch.Tensor, *rest: Any) -> VerifyOutput:
            tree = next(argument for argument in rest if isinstance(argument, Tree))
            _check_tree(tree, values.shape[-1])
            return _check_output(verify(values, *rest), tree, values.shape[-1])

        return watched

    def gather_rows(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        require_within("row index", index, -1, values.shape[1] - 1, "the last row")
        return ops.gather_rows(values, index)

    def committer(pool: KVPool) -> Commit:
        commit = ops.committer(pool)

        def checked_commit(
            slot_table: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, accept_index: torch.Tensor
        ) -> None:
            ends = seq_lens.unsqueeze(1) + accept_index.clamp(min=0)
            require_within("accepted position", ends, 0, slot_table.shape[1] - 1, "the last of the slot table")
            slots = slots_at(slot_table, rows, ends)
            require_within("slot of the accepted path", slots, 0, pool.num_slots - 1, "the last slot of the pool")
            commit(slot_table, rows, seq_lens, accept_index)

        return checked_commit

    return replace(
        ops,
        build=build,
        verify_greedy=watch(ops.verify_greedy),
        verify_tree=watch(ops.verify_tree),
        verify_chain=watch(ops.verify_chain),
        verify_spine=watch(ops.verify_spine),
        gather_rows=gather_rows,
        committer=committer,
    )


def _check_tree(tree: Tree, vocab_size: int | None = None) -> None:
    nodes = torch.arange(tree.parents.shape[1], device=tree.parents.device)
    before = tree.parents - (nodes - 1).clamp(min=0)  # a parent's number is below its child's
    require_within("parent minus the node before", before, -nodes.numel(), 0, "parents come first")
    require_within("parents", tree.parents, 0, None, "")
    last = None if vocab_size is None else vocab_size - 1
    require_within("tree tokens", tree.tokens, 0, last, "the last token of the vocabulary")


def _check_output(verified: VerifyOutput, tree: Tree, vocab_size: int) -> VerifyOutput:
    num_nodes, width = tree.tokens.shape[1], verified.tokens.shape[1]
    require_within("accept_index", verified.accept_index, -1, num_nodes - 1, "the last node")
    require_within("accept_lens", verified.accept_lens, 1, width, "num_steps + 1")
    require_within("emitted tokens", verified.tokens, -1, vocab_size - 1, "the last token of the vocabulary")
    return verified
