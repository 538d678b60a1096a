"""The EAGLE-3 worker (arXiv 2503.01840; trees as in EAGLE-2, arXiv 2406.16858).

Between rounds a row holds what the last draft-extend (or the prefill) left: the head's recycled state at position
L-1 and its logits, so drafting S deep costs S-1 forwards. Position p of the draft sees (embedding of token p+1,
feature of position p); its KV lies in a pool of its own under the target's slot numbers.
"""

from collections.abc import Callable
from typing import Any

import torch

from specdec.backends import AttentionBackend, ForwardContext, attention, forward_context
from specdec.backends.rope import Rope
from specdec.batch import AttentionMetadata, ForwardMode
from specdec.config import EngineConfig
from specdec.draft.worker import STREAM_DRAFT, Draft, DraftWorker, PrefillChunk, RoundBatch
from specdec.kv_cache import KVPool
from specdec.models.eagle3 import Eagle3Head
from specdec.round_ops import RoundOps
from specdec.sampling import process_logits
from specdec.tree import chain
from specdec.verify import Verdict


class Eagle3Worker(DraftWorker):
    """Drafts with `head` for a target whose input embedding is `embed_tokens`.

    State by row: `logits` [num_rows, dv] and `hidden` [num_rows, h_d] of the row that predicts the next token.
    """

    draws_chains = True

    def __init__(
        self,
        head: Eagle3Head,
        embed_tokens: torch.nn.Module,
        config: EngineConfig,
        backend: AttentionBackend,
        ops: RoundOps,
        total_slots: int,
        on_forward: Callable[[ForwardMode], None],
    ):
        c = head.config
        if config.topk > c.draft_vocab_size:
            raise ValueError(f"topk={config.topk}: the head scores only {c.draft_vocab_size} tokens")
        weight = head.fc.weight
        pool = KVPool([c.layer.shape], total_slots, weight.dtype, weight.device)
        self.head = head
        self.embed_tokens = embed_tokens
        self.config = config
        self.ops = ops
        self.aux_layers = c.aux_layers
        self.context: ForwardContext = ForwardContext(backend, pool, [c.layer], [None], on_forward)
        self.hidden_size = c.hidden_size
        self.hot_ids = head.hot_ids
        every_position = torch.arange(config.table_width, device=weight.device)
        self.rope_tables = torch.stack(head.rope(every_position), 1)  # [table_width, 2, head_dim]: cos, sin
        self.candidate_depths = candidate_depths(config).to(weight.device)
        self.logits = torch.zeros(config.num_rows, c.draft_vocab_size, dtype=weight.dtype, device=weight.device)
        self.hidden = torch.zeros(config.num_rows, c.hidden_size, dtype=weight.dtype, device=weight.device)

    def prefill_layers(self, ids: torch.Tensor, positions: torch.Tensor, aux: torch.Tensor | None) -> torch.Tensor:
        return self._layers(ids, positions, self.head.fuse(_needed(aux)))

    def finish_prefill(self, chunk: PrefillChunk, hidden: torch.Tensor | None) -> None:
        assert hidden is not None
        self._keep(chunk.rows, hidden[chunk.last_rows])

    def draft(self, batch: RoundBatch) -> Draft:
        return self._draft_chain(batch) if self.config.topk == 1 else self._draft_tree(batch)

    def extend(self, batch: RoundBatch, verdict: Verdict, aux: torch.Tensor | None) -> None:
        """Run a row for every token that could be accepted, on true features; the last accepted token's row is kept.

        Rows past it compute garbage into slots past the new L, where nobody looks.
        """
        width = verdict.tokens.shape[1]  # S+1, or D where the tree is too small for a path of S
        features = self.ops.gather_rows(_needed(aux), verdict.accept_index)  # [bs, width, 3*h]
        metadata = self.context.backend.metadata.uniform(
            ForwardMode.DRAFT_EXTEND, batch.slot_tables, batch.seq_lens, q_len=width, max_prefix=batch.max_prefix
        )
        ids = verdict.tokens.clamp(min=0).view(-1)
        hidden = self._forward(metadata, ids, self.head.fuse(features.flatten(0, 1))).unflatten(0, (-1, width))
        last = verdict.accept_lens.unsqueeze(1) - 1
        self._keep(batch.rows, self.ops.gather_rows(hidden, last).squeeze(1))

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        own = {"hot_ids": self.hot_ids, "rope tables": self.rope_tables, "logits": self.logits, "hidden": self.hidden}
        return {**own, **self.context.pool.tensors("cache"), **dict(self.head.named_parameters())}

    @property
    def facts(self) -> dict[str, Any]:
        c = self.head.config
        return {
            "algo": "eagle3",
            "aux_layers": c.aux_layers,
            "draft_vocab_size": c.draft_vocab_size,
            "rope_theta": c.rope_theta,
            "draft_kv_bytes": self.context.pool.num_bytes,
        }

    def _draft_chain(self, batch: RoundBatch) -> Draft:
        """K=1: the best (or a sampled) token a step."""
        hidden, logits = self.hidden[batch.rows], self.logits[batch.rows]
        tokens: list[torch.Tensor] = []
        laws: list[torch.Tensor] = []
        for step in range(self.config.num_steps):
            if step:
                metadata = self.context.backend.metadata.uniform(
                    ForwardMode.DRAFT,
                    batch.slot_tables,
                    batch.seq_lens,
                    q_len=1,
                    first_node=step - 1,
                    max_prefix=batch.max_prefix,
                )
                hidden = self._forward(metadata, tokens[-1], hidden)
                logits = self.head.logits(hidden)
            if batch.sampling is None:
                tokens.append(self.ops.best_token(logits, self.hot_ids))
            else:
                law = process_logits(logits.unsqueeze(1), batch.sampling).squeeze(1)
                draws = self.ops.uniforms(batch.sampling.seeds, batch.seq_lens, STREAM_DRAFT + step, 1)
                tokens.append(self.hot_ids[self.ops.sample(law, draws.squeeze(1))])
                laws.append(law)
        return Draft(chain(batch.roots, torch.stack(tokens, 1)), self._over_target_vocab(laws))

    def _draft_tree(self, batch: RoundBatch) -> Draft:
        """K>1: grow K branches a step by cumulative log-probability, then re-rank everything proposed (EAGLE-2)."""
        k, bs = self.config.topk, batch.rows.shape[0]
        frontier_scores, frontier_ids = self.ops.top_tokens(self.logits[batch.rows], k, self.hot_ids)  # [bs, K]
        hidden = self.hidden[batch.rows].unsqueeze(1).expand(-1, k, -1)  # [bs, K, h_d]
        names = torch.arange(k, device=batch.rows.device).expand(bs, -1)  # candidate numbers of the frontier
        bits = torch.zeros_like(names)  # draft nodes above the frontier
        tokens, scores, parents = [frontier_ids], [frontier_scores], [torch.full_like(names, -1)]
        for step in range(1, self.config.num_steps):
            bits = bits | (1 << names_of_step(step, k, names))
            hidden = self._forward(
                self._tree_metadata(batch, step, bits), frontier_ids.reshape(-1), hidden.reshape(bs * k, -1)
            )
            log_probs, child_ids = self.ops.top_tokens(self.head.logits(hidden), k, self.hot_ids)  # [bs*K, K]
            child_ids = child_ids.view(bs, k * k)
            cumulative, kept = self.ops.expand(log_probs.view(bs, k, k), frontier_scores, k)
            first_name = sum(t.shape[1] for t in tokens)
            tokens.append(child_ids)
            scores.append(cumulative)
            parents.append(names.repeat_interleave(k, 1))
            frontier_ids, frontier_scores, names = (
                child_ids.gather(1, kept),
                cumulative.gather(1, kept),
                first_name + kept,
            )
            hidden = self.ops.gather_rows(hidden.view(bs, k, -1), kept // k)
            bits = bits.gather(1, kept // k)
        tree = self.ops.build(
            batch.roots,
            torch.cat(tokens, 1),
            torch.cat(scores, 1),
            torch.cat(parents, 1),
            self.candidate_depths,
            num_draft_tokens=self.config.verify_width,
            num_steps=self.config.num_steps,
        )
        return Draft(tree, None)

    def _tree_metadata(self, batch: RoundBatch, step: int, bits: torch.Tensor) -> AttentionMetadata:
        """K queries of draft step `step` (from 1) over the K*step draft nodes so far."""
        k = self.config.topk
        return self.context.backend.metadata.uniform(
            ForwardMode.DRAFT,
            batch.slot_tables,
            batch.seq_lens,
            q_len=k,
            first_node=k * (step - 1),
            max_prefix=batch.max_prefix,
            depths=torch.full_like(bits, step - 1),
            ancestor_bits=bits,
        )

    def _forward(self, metadata: AttentionMetadata, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """One forward of the head: ids [T] int64 (token p+1), hidden [T, h_d] (feature or state at p): [T, h_d]."""
        with forward_context(self.context, metadata):
            return self._layers(ids, metadata.positions, hidden)

    def _layers(self, ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        rope = Rope(*self.rope_tables[positions].unbind(1))
        return self.head(self.embed_tokens(ids), hidden, rope, _attend)

    def _keep(self, rows: torch.Tensor, hidden: torch.Tensor) -> None:
        """Store the state [n, h_d] that predicts the next token of `rows`, and its logits."""
        self.hidden[rows] = hidden
        self.logits[rows] = self.head.logits(hidden)

    def _over_target_vocab(self, laws: list[torch.Tensor]) -> torch.Tensor | None:
        """Draft laws S x [bs, dv] as [bs, S, V]; tokens outside the hot vocabulary have probability 0."""
        if not laws:
            return None
        q = torch.stack(laws, 1)
        wide = q.new_zeros(*q.shape[:2], self.head.config.vocab_size)
        return wide.index_copy_(2, self.hot_ids, q)


def candidate_depths(config: EngineConfig) -> torch.Tensor:
    """[N] int64: depth of every tree candidate in creation order: K at depth 1, then K*K a step."""
    k = config.topk
    return torch.tensor([1] * k + [d for d in range(2, config.num_steps + 1) for _ in range(k * k)])


def names_of_step(step: int, k: int, like: torch.Tensor) -> torch.Tensor:
    """[bs, K] int64: numbers of the K draft nodes of `step` (from 1) in the draft's tail."""
    return torch.arange(k * (step - 1), k * step, device=like.device).expand_as(like)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rope: Rope) -> torch.Tensor:
    """The head's one layer through our op; the backend rotates."""
    return attention(q, k, v, 0, rope)


def _needed(aux: torch.Tensor | None) -> torch.Tensor:
    assert aux is not None, "EAGLE-3 needs the target's features"
    return aux
