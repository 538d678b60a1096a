"""The worker of block drafters, which propose all tokens of a round in one pass: DFlash (arXiv 2602.06036) and its kin.

The draft's K/V of a committed token follow from the target's features of it, by products alone: a prompt needs no pass
of the draft. A block has the root and masked rows at the positions after it. It is causal, or its rows see each other,
as the head was trained. Its K/V are written past L and lost. A head with a Markov term (DSpark, arXiv 2607.05147) knows
which token comes before: chains are drawn token by token, trees are walks through a trellis.
"""

from itertools import chain
from typing import Any

import torch

from specdec.backends.op import forward_context, store
from specdec.backends.rope import Rope
from specdec.core.batch import ForwardMode
from specdec.core.config import EngineConfig, num_words
from specdec.core.draft.head import BlockDraftHead
from specdec.core.draft.model import DraftModelWorker, attend
from specdec.core.draft.worker import Draft, DraftParts, RoundBatch
from specdec.core.functional import spine, trellis
from specdec.core.functional.verify import VerifyOutput


class BlockWorker(DraftModelWorker):
    """Drafts with a block head. Only K/V is carried from one round to the next."""

    def __init__(self, parts: DraftParts, head: BlockDraftHead):
        super().__init__(parts, hot_ids=head.hot_ids, vocab_size=head.vocab_size, dtype=head.weight.dtype, ahead=0)
        self.has_begin = self.config.auto_steps is not None  # then prompts that it has seen are noted
        self.head = self.module = head
        self.target = target = parts.target
        self.own_head = lambda normed: head.project(normed, target.head)
        self.embed_tokens = head.embed_tokens if head.embed_tokens is not None else target.embed_tokens
        self.aux_layers = head.aux_layers
        self.first = 0 if head.predicts_next else 1  # the row of the first draft
        device = head.weight.device
        self.rope_tables = torch.stack(head.rope(torch.arange(self.config.table_width, device=device)), 1)
        steps = self.config.num_steps
        head.check_steps(steps)
        self.mask_ids = torch.full((steps,), head.mask_token_id, dtype=torch.int64, device=device)
        self.width = trellis.width_of(self.config.verify_width)
        depths = self._candidate_depths().to(device)
        self.candidate_depths, self.on_spine = self.with_lookup(depths), spine.firsts(depths)
        self.head_ids = head.hot_ids  # what the head scores by itself; the worker's own are some of them
        self.places = torch.searchsorted(self.head_ids, self.hot_ids) if self.narrow is not None else None

    def prefill_layers(
        self, ids: torch.Tensor, positions: torch.Tensor, features: torch.Tensor | None, module: int = 0
    ) -> torch.Tensor:
        """Write the K/V of features [T, num_aux*h]; there are no states, [T, 0]."""
        assert features is not None, "a block head reads features"
        self._inject(features, positions)
        return features[:, :0]

    def extend(self, batch: RoundBatch, verified: VerifyOutput, aux: torch.Tensor | None) -> None:
        assert aux is not None, "a block head reads features"
        metadata = self.plan(batch, ForwardMode.DRAFT_EXTEND, q_len=verified.accept_index.shape[1])
        with forward_context(self.context, metadata):
            self._inject(self.ops.gather_rows(aux, verified.accept_index).flatten(0, 1), metadata.positions)

    def draft(self, batch: RoundBatch) -> Draft:
        batch, states = self.with_uniforms(batch), self.states(batch)
        logits = self.score(states.flatten(0, 1)).unflatten(0, states.shape[:2])
        if batch.shape.topk > 1:
            return self._draft_tree(batch, states, logits)
        return self.chain(batch, lambda step, last: logits[:, step] + self._bias(last, states[:, step]))

    def states(self, batch: RoundBatch) -> torch.Tensor:
        """Run the block: normed states [bs, S, h_d] of the rows that predict the next S tokens."""
        num_steps, bs = batch.shape.num_steps, batch.rows.shape[0]
        num_rows = num_steps + self.first
        ids = torch.cat([batch.roots.clamp(min=0).unsqueeze(1), self.mask_ids[: num_rows - 1].expand(bs, -1)], 1)
        metadata = self.plan(batch, ForwardMode.DRAFT, q_len=num_rows, first_node=0, **self._mask(bs, num_rows))
        with forward_context(self.context, metadata):
            (states,) = self.compiled.get("block", self.run_live)(ids.view(-1), metadata.positions)
        return states.unflatten(0, (bs, num_rows))[:, self.first :]

    def run_live(self, ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor]:
        """Normed states [T, h_d] of block rows ids [T] at `positions` [T]; attention is in scope."""
        embeds = self.embed_tokens(ids)
        if self.head.mask_embedding is not None:
            embeds = torch.where((ids == self.head.mask_token_id).unsqueeze(1), self.head.mask_embedding, embeds)
        states = self.head(embeds, Rope(*self.rope_tables[positions].unbind(1)), attend)
        return (self.head.normed(states),)

    def keys_values_live(self, features: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """k and v [T, Hkv, d] of layer 0, of layer 1, ... of the target's features [T, num_aux*h]."""
        return tuple(chain.from_iterable(self.head.keys_values(self.head.fuse(features))))

    @property
    def facts(self) -> dict[str, Any]:
        return {**super().facts, **self.head.traits}

    def _inject(self, features: torch.Tensor, positions: torch.Tensor) -> None:
        rope = Rope(*self.rope_tables[positions].unbind(1))
        made = self.compiled.get("keys_values", self.keys_values_live)(features.contiguous())
        for layer, (k, v) in enumerate(zip(made[::2], made[1::2], strict=True)):
            store(k, v, layer, rope)

    def _mask(self, bs: int, num_rows: int) -> dict[str, Any]:
        """Return the metadata options by which rows of a block see each other; none if it is causal."""
        if self.head.causal:
            return {}
        depths = torch.arange(num_rows, device=self.hot_ids.device).expand(bs, -1).contiguous()
        bits = depths.new_full((bs, num_rows, num_words(num_rows)), -1)
        return {"depths": depths, "ancestor_bits": bits, "tail_depths": depths}

    def _draft_tree(self, batch: RoundBatch, states: torch.Tensor, logits: torch.Tensor) -> Draft:
        k, (bs, num_steps), markov = self.config.topk, states.shape[:2], self.head.markov
        if markov is not None:
            logits = torch.cat([(logits[:, 0] + self._bias(batch.roots, states[:, 0])).unsqueeze(1), logits[:, 1:]], 1)
        steps = range(num_steps if batch.guide is not None else 0)
        logits = torch.cat([self.guided(batch, s, logits[:, s : s + 1]) for s in steps], 1) if steps else logits
        best, names = (t.view(bs, num_steps, k) for t in self.ops.top_tokens(logits.flatten(0, 1), k, self.hot_ids))
        laws: list[torch.Tensor] = []
        if self.draws(batch):
            self._put_drawn(batch, states, logits, best, names, laws)
        bias = None
        if markov is not None:
            before = markov.after(names[:, :-1], states[:, 1:, None].expand(-1, -1, k, -1))  # [bs, S-1, K, r]
            places = torch.searchsorted(self.head_ids, names[:, 1:].contiguous())
            bias = before @ markov.rows(places).transpose(2, 3)
        first, moves = best[:, 0], trellis.transitions(best, bias)
        if laws:
            first = spine.ranked(first)
            moves = torch.cat([spine.ranked(moves[:, :, :1]), moves[:, :, 1:]], 2)
        candidates = trellis.walk(self.ops, names, first, moves, self.width, bool(laws))
        tree = self.build(batch, *candidates, self.candidate_depths)
        return Draft(tree, self.over_target_vocab(laws))

    def _put_drawn(
        self,
        batch: RoundBatch,
        states: torch.Tensor,
        logits: torch.Tensor,
        best: torch.Tensor,
        names: torch.Tensor,
        laws: list[torch.Tensor],
    ) -> None:
        """Draw a path, and put its tokens in front of the candidates, names and log-probabilities best [bs, S, K]."""
        last, found = batch.roots, []
        for step in range(names.shape[1]):
            own = logits[:, step]  # that of depth 1 knows the root already
            last = self.pick(batch, step, own + self._bias(last, states[:, step]) if step else own, laws)
            found.append(last)
        drawn = torch.stack(found, 1)
        places = torch.searchsorted(self.hot_ids, torch.stack([drawn, names[:, :, 0]], 2))
        own, top = logits.gather(2, places).float().unbind(2)
        self.ops.put_first(
            drawn.flatten(), names.flatten(0, 1), best.flatten(0, 1), (best[:, :, 0] + own - top).flatten()
        )

    def _bias(self, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor | float:
        """Return the term of the previous tokens [bs] in the logits [bs, dv] of states [bs, h_d]."""
        markov = self.head.markov
        if markov is None:
            return 0.0
        bias = markov.bias(markov.after(tokens.clamp(min=0), states))
        return bias if self.places is None else bias[:, self.places]

    def _candidate_depths(self) -> torch.Tensor:
        """Return the depths of a tree's candidates; ValueError if they are too few."""
        config = self.config
        depths = trellis.depths(config.num_steps, config.topk, self.width)
        if config.topk > 1 and config.verify_width > len(depths) + 1:
            raise ValueError(
                f"num_draft_tokens={config.verify_width}: {config.num_steps} steps of a block give {len(depths)} "
                f"candidates; expected at most {len(depths) + 1}"
            )
        return depths


def mask_words(head: BlockDraftHead, config: EngineConfig) -> int:
    """Return the words of ancestor bits in a block of `head`: 0 if it is causal."""
    return 0 if head.causal else num_words(config.num_steps + 1)
