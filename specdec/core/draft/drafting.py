"""The base of autoregressive draft models, which grow a chain or a tree step by step.

Between rounds a row holds the state from which the token after the root is scored, and which the next step takes; the
last draft-extend (or the prefill) computed it, so drafting S deep costs S-1 forwards. Chains: arXiv 2211.17192; trees
as in EAGLE-2, arXiv 2406.16858.
"""

from abc import abstractmethod
from typing import Any, NamedTuple

import torch

from specdec.backends.op import forward_context
from specdec.core.batch import ForwardMode
from specdec.core.config import EngineConfig
from specdec.core.draft.model import DraftModelWorker
from specdec.core.draft.worker import Draft, DraftParts, RoundBatch
from specdec.core.functional import spine
from specdec.core.functional.tree import Frontier, own_bits
from specdec.core.functional.verify import VerifyOutput


class Output(NamedTuple):
    """Results of a forward, both [T, h_d]: the states, and the output head's inputs."""

    states: torch.Tensor
    normed: torch.Tensor


class SteppingWorker(DraftModelWorker):
    """Drafts one step per forward.

    State by row: `hidden` [num_rows, h_d], which predicts the token after the root. is_fed_states: whether a step takes
    the state of the node before, besides its token.
    """

    is_fed_states = True

    def __init__(
        self, parts: DraftParts, *, hot_ids: torch.Tensor, vocab_size: int, state_size: int, dtype: torch.dtype
    ):
        """state_size: h_d; vocab_size V: the target's."""
        ahead = 1 - parts.spec.id_shift
        super().__init__(parts, hot_ids=hot_ids, vocab_size=vocab_size, dtype=dtype, ahead=ahead)
        config, device = parts.config, hot_ids.device
        self._commits = [s.committer(parts.ops) for s in self.context.states if s.commits_chains]
        depths = candidate_depths(config).to(device)
        self.candidate_depths, self.on_spine = self.with_lookup(depths), spine.firsts(depths)
        self.own_bits = node_bits(config).to(device)  # [S-1, K, W], or [1, K, W]
        self.first_names = torch.arange(config.topk, device=device)  # of a tree's first candidates
        self.no_parents = torch.full_like(self.first_names, -1)  # theirs
        self.node_depths = torch.arange(len(self.own_bits), device=device).repeat_interleave(config.topk)
        self.hidden = torch.zeros(config.num_rows, state_size, dtype=dtype, device=device)

    @abstractmethod
    def run(
        self,
        mode: ForwardMode,
        ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor | None,
        module: int = 0,
    ) -> Output:
        """The model's output for ids [T] at positions [T], beside hidden [T, h_d]; attention is in scope.

        ids below 0, past accepted tokens, count as any id.
        """

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        """Return the output head's inputs for states [n, h_d] that are stored by row."""
        return states

    def inputs(self, features: torch.Tensor | None) -> torch.Tensor | None:
        """Return the states that are paired with true tokens, from the target's features [T, num_aux*h]."""
        return None

    def prefill_layers(
        self, ids: torch.Tensor, positions: torch.Tensor, features: torch.Tensor | None, module: int = 0
    ) -> torch.Tensor:
        hidden = features if module else self.inputs(features)
        return self.run(ForwardMode.EXTEND, ids, positions, hidden, module).states

    def draft(self, batch: RoundBatch) -> Draft:
        batch = self.with_uniforms(batch)
        return self._draft_chain(batch) if batch.shape.topk == 1 else self._draft_tree(batch)

    def extend(self, batch: RoundBatch, verified: VerifyOutput, aux: torch.Tensor | None) -> None:
        """Run a row for every token that could be accepted, on true features; the last accepted token's row is kept.

        Rows past it write garbage to slots past the new L, which are not read.
        """
        width = verified.tokens.shape[1]  # S+1, or D where the tree is too small for a path of S
        features = None
        if aux is not None:
            features = self.inputs(self.of_path(batch, verified, aux))
        ids = verified.tokens.view(-1)
        out = self.forward(batch, ForwardMode.DRAFT_EXTEND, ids, features, q_len=width)
        states = out.states.unflatten(0, (-1, width))
        self.commit(batch, width, verified.accept_lens)
        self.ops.keep_last(states, verified.accept_lens, batch.rows, self.hidden)

    def of_path(self, batch: RoundBatch, verified: VerifyOutput, aux: torch.Tensor) -> torch.Tensor:
        """Return features aux [bs, D, n] in the order of the accepted path, [bs*(S+1), n]: a chain's are in place."""
        path = aux if batch.shape.topk == 1 else self.ops.gather_rows(aux, verified.accept_index)
        return path.flatten(0, 1)

    def forward(
        self,
        batch: RoundBatch,
        mode: ForwardMode,
        ids: torch.Tensor,
        hidden: torch.Tensor | None,
        module: int = 0,
        **shape: Any,
    ) -> Output:
        """A forward of ids [T] after the draft's committed tokens. shape: see `plan`."""
        metadata = self.plan(batch, mode, **shape)
        with forward_context(self.context, metadata):
            return self.run(mode, ids, metadata.positions, hidden, module)

    def commit(self, batch: RoundBatch, width: int, lens: torch.Tensor) -> None:
        """Commit the first lens [bs] of the `width` tokens that the last forward ran; K/V lie where they belong."""
        if not self._commits:
            return
        nodes = torch.arange(width, device=lens.device)
        path = torch.where(nodes < lens.unsqueeze(1), nodes, -1)
        for commit in self._commits:
            commit(batch.slot_table, batch.rows, batch.seq_lens + self.ahead, path)

    def keep(self, rows: torch.Tensor, states: torch.Tensor) -> None:
        """Store the states [n, h_d] that predict the next tokens of `rows`."""
        self.hidden[rows] = states.to(self.hidden.dtype)

    def tail_depths(self, ids: torch.Tensor, num_steps: int) -> torch.Tensor:
        """Return the depths [bs, K*num_steps] of the draft nodes of `num_steps` steps, ids [bs, K] each."""
        return self.node_depths[: ids.shape[1] * num_steps].expand(ids.shape[0], -1)

    def steps(self, batch: RoundBatch) -> "Steps":
        return Steps(self, batch)

    def _draft_chain(self, batch: RoundBatch) -> Draft:
        """Draft a chain (K=1): the best (or a drawn) token per step."""
        steps = self.steps(batch)

        def logits_of(step: int, last: torch.Tensor) -> torch.Tensor:
            return self.score(steps.advance(last.unsqueeze(1)) if step else self.normed(steps.root))

        return self.chain(batch, logits_of)

    def _draft_tree(self, batch: RoundBatch) -> Draft:
        """Draft a tree (K>1): grow K branches per step by cumulative log-probability, then re-rank all nodes (EAGLE-2).

        The tree of a sampled batch has a spine, which is drawn: the first child of the first branch, step by step.
        """
        k, bs, steps, has_spine = self.config.topk, batch.rows.shape[0], self.steps(batch), self.draws(batch)
        laws: list[torch.Tensor] = []
        logits = self.score(self.normed(steps.root)).unsqueeze(1)
        best, ids = (t[:, 0] for t in self._children(batch, 0, logits, laws))  # [bs, K]
        frontier = Frontier(ids, best, self.first_names.expand(bs, -1), self.own_bits[:1].expand(bs, -1, -1))
        tokens, scores, parents = [ids], [best], [self.no_parents.expand(bs, -1)]
        for step in range(1, self.config.num_steps):
            logits = self.score(steps.advance(frontier.tokens, frontier.above, frontier.bits)).view(bs, k, -1)
            log_probs, ids = self._children(batch, step, logits, laws)  # [bs, K, K]
            ids = ids.flatten(1)
            own_bits = self.own_bits[min(step, len(self.own_bits) - 1)]  # the last step's children stay leaves
            first_name = k + (step - 1) * k * k
            best, owners, frontier = self.ops.grow(log_probs, ids, frontier, own_bits, first_name, has_spine)
            tokens.append(ids)
            scores.append(best)
            parents.append(owners)
        candidates = torch.cat(tokens, 1), torch.cat(scores, 1), torch.cat(parents, 1)
        tree = self.build(batch, *candidates, self.candidate_depths)
        return Draft(tree, self.over_target_vocab(laws))

    def _children(
        self, batch: RoundBatch, step: int, logits: torch.Tensor, laws: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities and tokens [bs, n, K] of the best children of n nodes, from logits [bs, n, dv]; the
        first child of the first node is drawn where there is a spine."""
        k, (bs, n), logits = self.config.topk, logits.shape[:2], self.guided(batch, step, logits)
        found = self.ops.top_tokens(logits.flatten(0, 1), k, self.hot_ids)
        log_probs, ids = (t.view(bs, n, k) for t in found)
        if self.draws(batch):
            self.ops.put_first(self.pick(batch, step, logits[:, 0], laws), ids[:, 0], log_probs[:, 0], None)
        return log_probs, ids


class Steps:
    """The forwards of one round's draft, step by step: K new nodes each, which see their ancestors.

    root [bs, h_d]: the states that predict the tokens after the roots. module: of the head, the one whose states came
    last (see `RecyclingHead`).
    """

    def __init__(self, worker: SteppingWorker, batch: RoundBatch):
        self.worker = worker
        self.batch = batch
        self.root = worker.of_rows(worker.hidden, batch.rows)
        self.step = self.module = 0
        self._states: torch.Tensor | None = None  # [bs, K, h_d] of the last step

    def advance(
        self, ids: torch.Tensor, above: torch.Tensor | None = None, bits: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the output head's inputs [bs*K, h_d] after nodes ids [bs, K].

        above [bs, K]: their parents among the nodes of the last step.
        bits [bs, K, W]: draft nodes that each one sees, itself included; None for a chain.
        """
        self.step += 1
        shape: dict[str, Any] = {"q_len": ids.shape[1], "first_node": ids.shape[1] * (self.step - 1)}
        if bits is not None:
            depths = self.worker.tail_depths(ids, self.step)
            shape |= {"depths": depths[:, -ids.shape[1] :], "tail_depths": depths, "ancestor_bits": bits}
        inputs = self._inputs(ids.shape[1], above)
        out = self.worker.forward(self.batch, ForwardMode.DRAFT, ids.reshape(-1), inputs, self.module, **shape)
        self._states = out.states.unflatten(0, ids.shape)
        return out.normed

    def _inputs(self, k: int, above: torch.Tensor | None) -> torch.Tensor | None:
        """Return the input states of a step's nodes: their parents' states [bs*K, h_d]."""
        if not self.worker.is_fed_states:
            return None
        if self._states is None:
            return self.root if k == 1 else self.root.repeat_interleave(k, 0)
        states = self._states if above is None else self.worker.ops.gather_rows(self._states, above)
        return states.flatten(0, 1)


def candidate_depths(config: EngineConfig) -> torch.Tensor:
    """Return the depths [N] int64 of all tree candidates in creation order: K at depth 1, then K*K per step."""
    k = config.topk
    return torch.tensor([1] * k + [d for d in range(2, config.num_steps + 1) for _ in range(k * k)], device="cpu")


def node_bits(config: EngineConfig) -> torch.Tensor:
    """Return the bits [S-1, K, W] int64, S-1 at least 1, of each step's K draft nodes, numbered over the whole tail."""
    num_later = max(config.num_steps - 1, 1)
    num_nodes = config.topk * num_later
    bits = own_bits(torch.arange(num_nodes, device="cpu"), num_nodes)
    return bits.view(num_later, config.topk, bits.shape[1])
