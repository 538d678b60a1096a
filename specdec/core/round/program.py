"""The round as a program of fixed shape on the device: draft → verify → accept → commit → extend.

Nothing here syncs with the host or has a data-dependent shape: a round depends on the number of rows and on the kind of
sampling, so it can be captured. Row numbers are its only input; all else is state by row.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from specdec.backends.comm import agreed
from specdec.core.batch import AttentionMetadata, ForwardMode
from specdec.core.cache.pool import Commit
from specdec.core.config import Shape
from specdec.core.draft.catch_up import CatchUp
from specdec.core.draft.worker import (
    STREAM_PREFILL,
    STREAM_SYNTHETIC,
    STREAM_VERIFY,
    Draft,
    NoDraft,
    PrefillChunk,
    RoundBatch,
)
from specdec.core.functional.results import append_logprobs, row_digests, token_logprobs
from specdec.core.functional.sampling import Guide
from specdec.core.functional.tree import Tree, force
from specdec.core.functional.verify import VerifyOutput
from specdec.core.round.parts import Parts
from specdec.core.sampling_params import SamplingKind

LAW_BYTES = 64 << 20  # probabilities that sampled acceptance holds at once; larger batches go in parts


class Round:
    """Plays rounds for rows of `state`; slot_table [num_rows, width] int32 says where their K/V lie.

    rates: `EngineConfig.synthetic_acceptance` [S] float64 on the device, None if nothing is imposed.
    """

    def __init__(self, parts: Parts):
        self.target = parts.target
        self.config = parts.config
        self.worker = parts.worker
        self.context = parts.context
        self.ops = parts.ops
        self.slot_table = parts.tables.table
        self.state = parts.state
        self.feed = parts.feed
        self.pause: Callable[[Callable[[], None]], None] = lambda between: between()  # see `Capture.pause`
        self._commits = {shape: list(_commits(parts, shape)) for shape in parts.config.shapes}
        self._no_draft = NoDraft(parts.ops)
        follows = parts.config.auto_steps is not None and parts.worker.prefills
        self.catch_up = CatchUp(parts.worker, parts.target, parts.config) if follows else None
        rates, device = parts.config.synthetic_acceptance, self.slot_table.device
        self.rates = None if rates is None else torch.tensor(rates, dtype=torch.float64, device=device)

    def play(
        self, kind: str, rows: torch.Tensor, max_prefix: int | None = None, shape: Shape | None = None
    ) -> torch.Tensor:
        """Play one round of `rows` [n] int64: [n, W+3] int64, tokens, accept_len, invalid and finished flag of each.

        kind: how the requests sample (a SamplingKind); max_prefix: host upper bound of L, None if nothing is known;
        shape: what it drafts, by default the engine's (largest) shape.
        """
        batch = self.batch(kind, rows, max_prefix, shape)
        if batch.is_constrained:
            batch = self._guide(batch)
        draft = self.draft(batch)
        if batch.is_constrained:
            self._force(batch, draft)
        logits, aux = self.verify(batch, draft.tree)
        if batch.is_constrained:
            self._constrain(batch, draft.tree, logits)
        verified = self.accept(batch, draft, logits)
        return self.extend(batch, verified, aux)

    def batch(
        self, kind: str, rows: torch.Tensor, max_prefix: int | None = None, shape: Shape | None = None
    ) -> RoundBatch:
        """Gather the state of `rows` for a round."""
        kind = SamplingKind(kind)
        seq_lens, roots = self.ops.starts(self.state.seq_lens, self.state.roots, rows)
        return RoundBatch(
            rows=rows,
            slot_table=self.slot_table,
            history=self.state.history,
            seq_lens=seq_lens,
            roots=roots,
            sampling=None if kind.is_greedy else self.state.sampling.select(rows, kind.has_filters),
            max_prefix=self.slot_table.shape[1] if max_prefix is None else max_prefix,
            shape=shape or self.config.shape,
            is_processed=kind.has_processors,
            is_constrained=kind.is_constrained,
        )

    def draft(self, batch: RoundBatch) -> Draft:
        """Return the draft's proposal, the same tree on all ranks."""
        draft = (self.worker if batch.shape.num_steps else self._no_draft).draft(batch)
        return draft._replace(tree=agreed(self.target.group, draft.tree))

    def verify(self, batch: RoundBatch, tree: Tree) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run one target forward over all nodes: logits [bs, D, V] and the draft's features [bs, D, num_aux*h]."""
        output = self.target.forward(self.context, self._verify_metadata(batch, tree), tree.tokens.view(-1))
        shape = tree.tokens.shape
        aux = None if output.aux is None else output.aux.view(*shape, -1)
        return output.logits.view(*shape, -1), aux

    def accept(self, batch: RoundBatch, draft: Draft, logits: torch.Tensor) -> VerifyOutput:
        """Decide which nodes are emitted, up to a stop id or the length limit, and commit them."""
        verified = self._decide(batch, draft, logits, STREAM_VERIFY)
        if self.rates is not None and batch.shape.num_steps:
            draws = self.ops.uniforms(self.state.sampling["seed"][batch.rows], batch.seq_lens, STREAM_SYNTHETIC, 1)
            rates = self.rates[: batch.shape.num_steps]
            verified = self.ops.impose(verified, draft.tree, rates, draws[:, 0])
        verified = agreed(self.target.group, verified)
        verified = self.ops.trim(verified, batch.rows, self.state.stop_ids, self.state.remaining)
        for commit in self._commits[batch.shape]:
            commit(batch.slot_table, batch.rows, batch.seq_lens, verified.accept_index)
        self._keep_scores(batch.rows, logits, verified)
        return verified

    def extend(self, batch: RoundBatch, verified: VerifyOutput, aux: torch.Tensor | None) -> torch.Tensor:
        """Advance L by accept_lens, make the last token the root, and run draft extend on true features; return the
        results."""
        lines = self._emit(batch, verified, moves=True)
        if batch.is_constrained:
            assert self.feed is not None
            self.pause(partial(self.feed.mail, lines))
        if self.catch_up is None:
            self.worker.extend(batch, verified, aux)
        else:
            self.catch_up.extend(self.worker, batch, verified, aux)
        return lines

    def take_prompts(self, chunk: PrefillChunk) -> None:
        """Write the tokens of `chunk` to the history of its rows."""
        rows = torch.cat([chunk.rows, chunk.rows.new_full((1,), self.config.dummy_row)])  # the last one takes padding
        self.state.history[rows[chunk.metadata.owners()], chunk.metadata.positions] = chunk.ids.int()

    def first_tokens(self, kind: str, rows: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Choose the token after each prompt, from logits [n, V]: the row's first root. Returns results as `play`."""
        batch, logits = self.batch(kind, rows), logits.unsqueeze(1)
        if batch.is_constrained:
            assert self.feed is not None
            self.ops.constrain(logits, self.feed.masks(len(rows), 1))
        verified = self._decide(batch, self._no_draft.draft(batch), logits, STREAM_PREFILL)
        verified = agreed(self.target.group, verified)
        verified = self.ops.trim(verified, rows, self.state.stop_ids, self.state.remaining)
        self._keep_scores(rows, logits, verified)
        return self._emit(batch, verified, moves=False)  # the token is not in the cache yet: L stays

    def begin(
        self, rows: torch.Tensor, states: torch.Tensor | None = None, max_prefix: int | None = None
    ) -> torch.Tensor:
        """Pass the first roots of `rows` [n] and the draft's own states [n, h_d] to the draft; return the rows.

        See `DraftWorker.begin`; max_prefix: see `play`.
        """
        batch = self.batch(SamplingKind.GREEDY, rows, max_prefix)
        self.worker.begin(batch, states)
        if self.catch_up is not None:
            self.catch_up.begin(batch)
        return rows

    def follow(self, rows: torch.Tensor, max_prefix: int | None = None) -> torch.Tensor:
        """Run the draft over tokens that plain rounds emitted for `rows` [n], at most `CATCH_UP`; return the rows."""
        assert self.catch_up is not None
        self.catch_up.run(self.worker, self.batch(SamplingKind.GREEDY, rows, max_prefix))
        return rows

    def _guide(self, batch: RoundBatch) -> RoundBatch:
        """Return the batch with the grammars' guide for its draft."""
        assert self.feed is not None
        num_steps = batch.shape.num_steps
        self.pause(partial(self.feed.update, num_steps))
        return replace(batch, guide=Guide(*self.feed.guide(len(batch.rows), num_steps))) if num_steps else batch

    def _force(self, batch: RoundBatch, draft: Draft) -> None:
        """Draft what grammars force, if the draft cannot, and begin to tell the host what is drafted."""
        tree = draft.tree
        if batch.guide is not None:
            assert self.feed is not None
            force(tree, draft.probs, batch.guide.forced)
            self.pause(partial(self.feed.fetch, torch.stack([tree.tokens, tree.parents])))

    def _constrain(self, batch: RoundBatch, tree: Tree, logits: torch.Tensor) -> None:
        """Mask logits [bs, D, V] of all nodes by the grammars of their requests, in place."""
        assert self.feed is not None
        choices, is_told = None, self.state.logprobs is not None or self.state.digests is not None
        if batch.sampling is None and not batch.is_processed and not is_told:
            nodes = tree.tokens.reshape(-1)
            roots = self.ops.chain(nodes, nodes.new_empty(len(nodes), 0))
            choices = self.ops.verify_greedy(logits.view(len(nodes), 1, -1), roots, 0).tokens.view(tree.tokens.shape)
        self.pause(partial(self.feed.fill, logits.shape[1], choices))
        self.ops.constrain(logits, self.feed.masks(*logits.shape[:2]))

    def _verify_metadata(self, batch: RoundBatch, tree: Tree) -> AttentionMetadata:
        """D queries a request: a chain is causal, a tree sees its ancestors."""
        is_chain = batch.shape.topk == 1
        return self.context.backend.metadata.uniform(
            ForwardMode.DECODE if tree.tokens.shape[1] == 1 else ForwardMode.TARGET_VERIFY,
            batch.slot_table,
            batch.rows,
            batch.seq_lens,
            q_len=tree.tokens.shape[1],
            max_prefix=batch.max_prefix,
            depths=None if is_chain else tree.depths,
            tail_depths=None if is_chain else tree.depths,
            ancestor_bits=None if is_chain else tree.ancestor_bits,
            rope_deltas=self.context.rope_deltas,
        )

    def _decide(self, batch: RoundBatch, draft: Draft, logits: torch.Tensor, stream: int) -> VerifyOutput:
        """Return the nodes that the target accepts (logits [bs, D, V]), before stops and limits."""
        num_steps = min(batch.shape.num_steps, logits.shape[1] - 1)
        if batch.sampling is None and not batch.is_processed:
            return self.ops.verify_greedy(logits, draft.tree, num_steps)
        uniforms = None
        if batch.sampling is not None:
            uniforms = self.ops.uniforms(batch.sampling["seed"], batch.seq_lens, stream, logits.shape[1])
        size = max(1, LAW_BYTES // (4 * logits[0].numel()))
        parts = [slice(i, i + size) for i in range(0, logits.shape[0], size)]
        outputs = [self._verify_part(batch, draft, logits, uniforms, num_steps, stream, part) for part in parts]
        return outputs[0] if len(outputs) == 1 else VerifyOutput(*map(torch.cat, zip(*outputs, strict=True)))

    def _verify_part(
        self,
        batch: RoundBatch,
        draft: Draft,
        logits: torch.Tensor,
        uniforms: torch.Tensor | None,
        num_steps: int,
        stream: int,
        part: slice,
    ) -> VerifyOutput:
        """Verify the requests `part` on processed logits, or on the laws that logits make."""
        tree, scores = Tree(*(t[part] for t in draft.tree)), logits[part]
        if batch.is_processed:
            # What the root's logits follow: the prompt alone, or all up to the root.
            context = (batch.seq_lens if stream == STREAM_PREFILL else batch.seq_lens + 1)[part]
            scores = self.ops.process(scores, tree, batch.rows[part], context, self.state.processors)
        if batch.sampling is None or uniforms is None:
            return self.ops.verify_greedy(scores, tree, num_steps)
        probs = self.ops.law(scores, batch.sampling.select(part))
        if draft.probs is not None and batch.shape.topk == 1:
            return self.ops.verify_chain(probs, draft.probs[part], tree, uniforms[part])
        if draft.probs is not None:
            return self.ops.verify_spine(probs, draft.probs[part], tree, num_steps, uniforms[part])
        return self.ops.verify_tree(probs, tree, num_steps, uniforms[part])

    def _emit(self, batch: RoundBatch, verified: VerifyOutput, moves: bool) -> torch.Tensor:
        """Make the last token the root and, if it `moves`, advance L by accept_lens; return results for the host."""
        state = self.state
        arguments = (state.seq_lens, state.roots, state.remaining, state.history, moves)
        lines = self.ops.emit(verified, batch.rows, *arguments)
        width = verified.tokens.shape[1]
        if state.digests is not None:
            lines = torch.cat([lines, state.digests[batch.rows, :width]], 1)
        return lines if state.logprobs is None else append_logprobs(lines, state.logprobs[batch.rows, :width])

    def _keep_scores(self, rows: torch.Tensor, logits: torch.Tensor, verified: VerifyOutput) -> None:
        """Store log-probabilities and digests of emitted tokens by row, if computed; logits [bs, D, V] of all nodes."""
        logprobs, num_top, digests = self.state.logprobs, self.config.logprobs, self.state.digests
        if logprobs is None and digests is None:
            return
        of_path = self.ops.gather_rows(logits, verified.accept_index)  # each token follows its node of the path
        if digests is not None:
            digests[rows, : of_path.shape[1]] = row_digests(of_path)
        if logprobs is not None and num_top is not None:
            logprobs[rows, : of_path.shape[1]] = token_logprobs(of_path, verified.tokens.clamp(min=0), num_top)


def _commits(parts: Parts, shape: Shape) -> Iterator[Commit]:
    """Yield the functions that commit the accepted path of a round of `shape` in all states of the target's layers."""
    for state in parts.context.states if shape.num_steps else ():
        if shape.topk > 1 or state.commits_chains:
            yield state.committer(parts.ops)
