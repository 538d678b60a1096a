"""The contract of the device operations of a round besides attention. There are two sets: see `torch_ops`.

A set goes with the attention backend. The torch one specifies them and runs anywhere; the Triton one does each
operation in one or two launches, which is what a captured round is made of.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specdec.core.cache.pool import Commit, KVPool
from specdec.core.functional.processors import ProcessorState
from specdec.core.functional.sampling import Guide, SamplingBatch
from specdec.core.functional.tree import Frontier, Tree
from specdec.core.functional.verify import VerifyOutput


@dataclass(frozen=True)
class RoundOps:
    """The operations of a set; each computes the same as its torch twin.

    chain, best_token, top_tokens, grow, build: `specdec.core.functional.tree`; put_first: `.spine`, in place; verify_*:
    `.verify`; process: `specdec.core.functional.processors`; sample, law (`process_logits`): `.sampling` beside it;
    uniforms(seeds [bs], counters [bs], first_stream, num) -> [bs, num]: `sampling.uniform` on consecutive streams;
    gather_rows(values [bs, n, h], index [bs, m]) -> [bs, m, h]: rows by index, -1 reads row 0;
    keep_last(states [bs, n, h], lens [bs], rows [bs], into [num_rows, h]): line lens-1 (0 for none) of each request's
        states to its row of `into`, in place;
    impose: `.verify.impose_acceptance`; starts(seq_lens, roots, rows [bs]) -> both of `rows`, [bs] int64;
    trim(verified, rows [bs], stop_ids [num_rows, num_stops], remaining [num_rows]) -> the output cut at stops and
        limits; `remaining` of the rows is lowered in place, to 0 for those that are over;
    emit(verified, rows, seq_lens, roots, remaining, history [num_rows, width] int32, moves) -> results for the host,
        [bs, W+3] int64, see `specdec.core.functional.results`; in place, the last token becomes the root, if `moves`,
        seq_lens grow by accept_lens, and the tokens end in the history's column L;
    mail(results [n, W+3], host [n, W+3]): copies results to pinned, dense host memory;
    admit(packed [n, 1+F+P] int64, columns, table [num_rows, width] int32, page_size): of each line, into the row that
        its first number names: F numbers go to `EngineState.columns`, one after the other; P pages become the row's
        slots, 0 past the last one;
    look_up, merge: `specdec.core.functional.lookup`; constrain, guided: `specdec.core.functional.sampling`;
    committer(pool): made once a pool; it gives a `Commit` that moves the accepted path's K/V of every layer to the
    slots of positions L..; -1 moves nothing.
    """

    name: str
    chain: Callable[[torch.Tensor, torch.Tensor], Tree]
    best_token: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
    top_tokens: Callable[[torch.Tensor, int, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]
    grow: Callable[
        [torch.Tensor, torch.Tensor, Frontier, torch.Tensor, int, bool], tuple[torch.Tensor, torch.Tensor, Frontier]
    ]
    build: Callable[..., Tree]
    put_first: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], None]
    verify_greedy: Callable[[torch.Tensor, Tree, int], VerifyOutput]
    verify_tree: Callable[[torch.Tensor, Tree, int, torch.Tensor], VerifyOutput]
    verify_chain: Callable[[torch.Tensor, torch.Tensor, Tree, torch.Tensor], VerifyOutput]
    verify_spine: Callable[[torch.Tensor, torch.Tensor, Tree, int, torch.Tensor], VerifyOutput]
    process: Callable[[torch.Tensor, Tree, torch.Tensor, torch.Tensor, ProcessorState], torch.Tensor]
    law: Callable[[torch.Tensor, SamplingBatch], torch.Tensor]
    sample: Callable[..., torch.Tensor]
    uniforms: Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor]
    gather_rows: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    keep_last: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
    impose: Callable[[VerifyOutput, Tree, torch.Tensor, torch.Tensor], VerifyOutput]
    starts: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    trim: Callable[[VerifyOutput, torch.Tensor, torch.Tensor, torch.Tensor], VerifyOutput]
    emit: Callable[..., torch.Tensor]
    mail: Callable[[torch.Tensor, torch.Tensor], None]
    constrain: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    guided: Callable[[torch.Tensor, Guide, int, torch.Tensor], torch.Tensor]
    look_up: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, int], tuple[torch.Tensor, torch.Tensor]]
    merge: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    admit: Callable[[torch.Tensor, Sequence[torch.Tensor], torch.Tensor, int], None]
    committer: Callable[[KVPool], Commit]
