"""The two sets of `RoundOps`: torch, which specifies them, and Triton; and the choice between them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from specdec.backends.base import Capabilities
from specdec.backends.metadata import slots_at
from specdec.core.cache.pool import Commit, KVPool
from specdec.core.cache.tables import write_pages
from specdec.core.functional import lookup, processors, sampling, spine, tree, verify
from specdec.core.functional.ops import RoundOps
from specdec.core.functional.results import pack
from specdec.core.functional.tree import Frontier, Tree
from specdec.core.functional.verify import VerifyOutput


def pick_ops(capabilities: Capabilities) -> RoundOps:
    """Return the set of operations for a backend with `capabilities`."""
    return _triton_ops() if capabilities.fused_ops else TORCH_OPS


def _uniforms(seeds: torch.Tensor, counters: torch.Tensor, first_stream: int, num: int) -> torch.Tensor:
    streams = torch.arange(first_stream, first_stream + num, device=seeds.device)
    return sampling.uniform(seeds, counters, streams)


def _gather_rows(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    wide = index.clamp(min=0).unsqueeze(2).expand(-1, -1, values.shape[2])
    return values.gather(1, wide)


def _keep_last(states: torch.Tensor, lens: torch.Tensor, rows: torch.Tensor, into: torch.Tensor) -> None:
    into[rows] = states[torch.arange(len(lens), device=lens.device), (lens - 1).clamp(min=0)].to(into.dtype)


def _trim(verified: VerifyOutput, rows: torch.Tensor, stop_ids: torch.Tensor, remaining: torch.Tensor) -> VerifyOutput:
    left = remaining[rows]
    verified, finished = verify.trim(verified, stop_ids[rows], left)
    remaining[rows] = (left - verified.accept_lens).masked_fill(finished, 0)
    return verified


def _emit(
    verified: VerifyOutput,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    roots: torch.Tensor,
    remaining: torch.Tensor,
    history: torch.Tensor,
    moves: bool,
) -> torch.Tensor:
    positions = seq_lens[rows].unsqueeze(1) + torch.arange(verified.tokens.shape[1], device=rows.device) + int(moves)
    is_kept = (verified.tokens >= 0) & (positions < history.shape[1])
    owners = torch.where(is_kept, rows.unsqueeze(1), history.shape[0] - 1)  # padding goes to the dummy row, as token 0
    history[owners, torch.where(is_kept, positions, 0)] = torch.where(is_kept, verified.tokens, 0).int()
    last = (verified.accept_lens - 1).clamp(min=0).unsqueeze(1)
    roots[rows] = verified.tokens.gather(1, last).squeeze(1).clamp(min=0)
    if moves:
        seq_lens[rows] = seq_lens[rows] + verified.accept_lens
    return pack(verified.tokens, verified.accept_lens, verified.invalid, remaining[rows] == 0)


def _mail(results: torch.Tensor, host: torch.Tensor) -> None:
    host.copy_(results, non_blocking=True)


def _admit(packed: torch.Tensor, columns: Sequence[torch.Tensor], table: torch.Tensor, page_size: int) -> None:
    sizes = [column[0].numel() for column in columns]
    first, *values, pages = packed.split([1, *sizes, packed.shape[1] - 1 - sum(sizes)], 1)
    rows = first[:, 0]
    for column, value in zip(columns, values, strict=True):
        column.index_copy_(0, rows, value.reshape(-1, *column.shape[1:]))
    write_pages(table, rows, pages, page_size)


def _committer(pool: KVPool) -> Commit:
    def commit(
        slot_table: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, accept_index: torch.Tensor
    ) -> None:
        start = seq_lens.unsqueeze(1)
        source = slots_at(slot_table, rows, start + accept_index.clamp(min=0))
        target = slots_at(slot_table, rows, start + torch.arange(accept_index.shape[1], device=start.device))
        # Columns past the accepted path copy a slot onto itself: nothing moves, no shape depends on the data.
        target = torch.where(accept_index >= 0, target, source)
        pool.move(source.view(-1), target.view(-1))

    return commit


TORCH_OPS = RoundOps(
    name="torch",
    chain=tree.chain,
    best_token=tree.best_token,
    top_tokens=tree.top_tokens,
    grow=tree.grow,
    build=tree.build,
    put_first=spine.put_first,
    verify_greedy=verify.verify_greedy,
    verify_tree=verify.verify_tree,
    verify_chain=verify.verify_chain,
    verify_spine=verify.verify_spine,
    process=processors.process,
    law=sampling.process_logits,
    sample=sampling.sample,
    uniforms=_uniforms,
    gather_rows=_gather_rows,
    keep_last=_keep_last,
    impose=verify.impose_acceptance,
    starts=lambda seq_lens, roots, rows: (seq_lens[rows], roots[rows]),
    trim=_trim,
    emit=_emit,
    mail=_mail,
    look_up=lookup.look_up,
    constrain=sampling.constrain,
    guided=sampling.guided,
    merge=lookup.merge,
    admit=_admit,
    committer=_committer,
)


def _on_parts(
    kernel: Callable[..., tuple[torch.Tensor, ...]], num_parts: int = 0, result: Callable[..., Any] = VerifyOutput
) -> Callable[..., Any]:
    """Return `kernel`, which takes the first `num_parts` tensors of a tree, as a function of the tree itself."""

    def run(*arguments: Any, **shape: int) -> Any:
        parts = [part for a in arguments for part in (a[:num_parts] if isinstance(a, Tree) else (a,))]
        return result(*kernel(*parts, **shape))

    return run


def _triton_ops() -> RoundOps:
    """Return the Triton set, with the types of this layer; imported here, since triton is optional."""
    from specdec.backends.triton.round import admit, chain, imposed, lookup, rows, tree, trim, walk
    from specdec.backends.triton.round import spine as drawn_paths
    from specdec.backends.triton.sampling import bitmask, draws, law, processors, top
    from specdec.backends.triton.sampling import uniform as sampling

    def grow(
        log_probs: torch.Tensor, tokens: torch.Tensor, before: Frontier, *rest: Any
    ) -> tuple[torch.Tensor, torch.Tensor, Frontier]:
        found = tree.grow(log_probs, tokens, before.scores, before.names, before.bits, *rest)
        return found[0], found[1], Frontier(*found[2:])

    return RoundOps(
        name="triton",
        chain=_on_parts(chain.chain, result=Tree),
        best_token=top.best_token,
        top_tokens=top.top_tokens,
        grow=grow,
        build=_on_parts(tree.build, result=Tree),
        put_first=partial(drawn_paths.put_first, ranks=(spine.LOG_ACCEPTED, spine.LOG_REFUSED)),
        verify_greedy=_on_parts(walk.verify_greedy, 2),
        verify_tree=_on_parts(walk.verify_tree, 2),
        verify_chain=_on_parts(walk.verify_chain, 1),
        verify_spine=_on_parts(drawn_paths.verify_spine, 3),
        process=lambda logits, draft, *rest: processors.process(logits, *draft, *rest),
        law=law.law,
        sample=draws.sample,
        uniforms=sampling.uniform,
        gather_rows=rows.gather_rows,
        keep_last=rows.keep_last,
        impose=_on_parts(imposed.impose, 1),
        starts=rows.starts,
        trim=_on_parts(trim.trim),
        emit=trim.emit,
        mail=trim.mail,
        look_up=lookup.look_up,
        constrain=bitmask.constrain,
        guided=bitmask.guided,
        merge=lookup.merge,
        admit=admit.admit,
        committer=rows.committer,
    )
