"""The base of workers with a draft model: its scope, its forwards, and the laws that it draws from.

The model has a KV pool of its own under the target's slot numbers.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch

from specdec.backends.op import ForwardContext, attention
from specdec.backends.rope import Rope
from specdec.core.batch import AttentionMetadata, ForwardMode
from specdec.core.draft.worker import STREAM_DRAFT, Draft, DraftParts, DraftWorker, RoundBatch
from specdec.core.functional import spine
from specdec.core.functional.tree import Tree

MAX_MERGED_NGRAM = 16  # tokens of a match; continuations of longer matches are more likely to repeat


class Compiled(Protocol):
    """A traced part of a draft."""

    def __call__(self, *inputs: torch.Tensor, rows: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Run the compiled form of a live method. rows: see `AttentionMetadata.read_rows`."""

    def release(self) -> None:
        """Give joined weights their own storage again."""


class DraftModelWorker(DraftWorker):
    """Drafts with a model that scores the target tokens `hot_ids` [dv] int64, or those of a narrow head.

    ahead: tokens that the draft has seen more than the target before a round: the root, or none. compiled: traced parts
    that replace live ones, by names of the worker's own.
    """

    context: ForwardContext
    own_head: Callable[[torch.Tensor], torch.Tensor]  # of the draft's model: read where there is no narrow head
    on_spine: torch.Tensor  # [N] bool: which candidates of a tree are drawn, see `spine.firsts`
    prefills = True

    def __init__(self, parts: DraftParts, *, hot_ids: torch.Tensor, vocab_size: int, dtype: torch.dtype, ahead: int):
        """vocab_size V: the target's."""
        self.narrow, config = parts.narrow, parts.config
        hot_ids = hot_ids if self.narrow is None else self.narrow.ids
        if config.topk > hot_ids.numel():
            raise ValueError(f"topk={config.topk}: the draft scores only {hot_ids.numel()} tokens")
        assert parts.context is not None, "a model has attention layers"
        self.spec = parts.spec
        self.id_shift = parts.spec.id_shift
        self.ahead = ahead
        self.config = config
        self.ops = parts.ops
        self.dtype = dtype
        self.hot_ids = hot_ids
        self.vocab_size = vocab_size
        self.draws_chains = config.sample_drafts
        self.context = parts.context
        self.reads_history = config.lookup
        self.compiled: dict[object, Compiled] = {}

    def drop_compiled(self) -> None:
        """Switch back to the live modules; every weight has a storage of its own again."""
        for traced in self.compiled.values():
            traced.release()
        self.compiled.clear()

    def close(self) -> None:
        self.drop_compiled()

    def score(self, normed: torch.Tensor) -> torch.Tensor:
        """Return logits [T, dv] over `hot_ids`, from the output head's inputs [T, h_d]."""
        return self.own_head(normed) if self.narrow is None else self.narrow(normed)

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "algo": self.spec.name,
            "features": self.spec.features,
            "aux_layers": self.aux_layers,
            "draft_vocab_size": self.hot_ids.numel(),
            "draft_kv_bytes": self.context.pool.num_bytes if self.context.stores else 0,
        }

    def plan(self, batch: RoundBatch, mode: ForwardMode, **shape: Any) -> AttentionMetadata:
        """Describe a forward of tokens after the draft's committed ones. shape: see `MetadataBuilder.uniform`."""
        return self.context.backend.metadata.uniform(
            mode,
            batch.slot_table,
            batch.rows,
            batch.seq_lens + self.ahead if self.ahead else batch.seq_lens,
            max_prefix=min(batch.max_prefix + self.ahead, batch.slot_table.shape[1]),
            **shape,
        )

    def of_rows(self, values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the lines of values [num_rows, n] that belong to `rows`."""
        return self.ops.gather_rows(values.unsqueeze(0), rows.unsqueeze(0)).squeeze(0)

    def draws(self, batch: RoundBatch) -> bool:
        """Return whether the drafts of `batch`, or the spine of their tree, are drawn from the draft's own law."""
        return batch.sampling is not None and self.draws_chains

    def with_uniforms(self, batch: RoundBatch) -> RoundBatch:
        """Return `batch` with the random numbers that its drafts are drawn by, if they are drawn."""
        if not self.draws(batch):
            return batch
        assert batch.sampling is not None
        draws = batch.sampling["seed"], batch.seq_lens, STREAM_DRAFT, batch.shape.num_steps
        return replace(batch, uniforms=self.ops.uniforms(*draws))

    def guided(self, batch: RoundBatch, step: int, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits [bs, n, dv] of draft step `step`, with tokens masked that grammars are known to forbid."""
        return logits if batch.guide is None else self.ops.guided(logits, batch.guide, step, self.hot_ids)

    def pick(self, batch: RoundBatch, step: int, logits: torch.Tensor, laws: list[torch.Tensor]) -> torch.Tensor:
        """Return the best (or a drawn) token [bs] of draft step `step` from logits [bs, dv]; a law drawn from [bs, dv]
        is appended to `laws`."""
        if not self.draws(batch):
            return self.ops.best_token(logits, self.hot_ids)
        assert batch.sampling is not None and batch.uniforms is not None
        laws.append(self.ops.law(logits.unsqueeze(1), batch.sampling).squeeze(1))
        return self.ops.sample(laws[-1], batch.uniforms[:, step], self.hot_ids)

    def chain(self, batch: RoundBatch, logits_of: Callable[[int, torch.Tensor], torch.Tensor]) -> Draft:
        """Draft a chain. logits_of: maps a draft step and the tokens [bs] before it to logits [bs, dv]."""
        last = batch.roots
        tokens: list[torch.Tensor] = []
        laws: list[torch.Tensor] = []
        for step in range(batch.shape.num_steps):
            logits = self.guided(batch, step, logits_of(step, last).unsqueeze(1)).squeeze(1)
            last = self.pick(batch, step, logits, laws)
            tokens.append(last)
        return Draft(self.ops.chain(batch.roots, torch.stack(tokens, 1)), self.over_target_vocab(laws))

    def build(
        self, batch: RoundBatch, tokens: torch.Tensor, scores: torch.Tensor, parents: torch.Tensor, depths: torch.Tensor
    ) -> Tree:
        """Make the tree of candidates, see `tree.build`, and of tokens from prompt lookup, if that is on.

        scores: the spine's are overwritten. depths: `with_lookup`.
        """
        config = self.config
        if self.draws(batch):
            scores.masked_fill_(self.on_spine, spine.KEPT)
        if config.lookup:
            found, lengths = self.ops.look_up(
                batch.history, batch.rows, batch.seq_lens, config.num_steps, MAX_MERGED_NGRAM
            )
            tokens, scores, parents = self.ops.merge(tokens, scores, parents, found, lengths)
        sizes = {"num_draft_tokens": config.verify_width, "num_steps": config.num_steps}
        return self.ops.build(batch.roots, tokens, scores, parents, depths, **sizes)

    def with_lookup(self, depths: torch.Tensor) -> torch.Tensor:
        """Return the depths of a tree's candidates, and of those that `build` adds to them."""
        if not self.config.lookup:
            return depths
        return torch.cat([depths, torch.arange(1, self.config.num_steps + 1, device=depths.device)])

    def over_target_vocab(self, laws: list[torch.Tensor]) -> torch.Tensor | None:
        """Return draft laws, S x [bs, dv], as [bs, S, V]; tokens outside the hot vocabulary have probability 0."""
        if not laws:
            return None
        q = torch.stack(laws, 1)
        if q.shape[2] == self.vocab_size:
            return q
        wide = q.new_zeros(*q.shape[:2], self.vocab_size)
        return wide.index_copy_(2, self.hot_ids, q)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rope: Rope | None, layer: int) -> torch.Tensor:
    """Attend in a layer of a head by our op; the backend rotates what comes un-rotated."""
    return attention(q, k, v, layer, rope)
