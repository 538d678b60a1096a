"""Drafts for tests: random ones of every algorithm, and an oracle that proposes the right tokens most of the time."""

from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from specdec.core.draft.worker import Draft, DraftWorker, PrefillChunk, RoundBatch, RunPrefill
from specdec.core.functional.tree import build, chain
from specdec.core.functional.verify import VerifyOutput
from specdec.reach.heads.base import LayerConfig
from specdec.reach.heads.block import BlockConfig, BlockHead
from specdec.reach.heads.eagle import EagleConfig, EagleHead
from specdec.reach.heads.eagle3 import Eagle3Config, Eagle3Head
from specdec.reach.heads.nextn import NextNConfig, NextNHead
from tests.tiny_models import HEAD_DIM, tiny_model

ALGOS = ("eagle", "eagle3", "nextn", "block", "standalone")
MODULES = "nextn of 3 modules"


def random_head(model: Any, draft_vocab_size: int = 64, aux: tuple[int, int, int] = (0, 1, 2), seed: int = 0):
    """Return an EAGLE-3 head for `model` with random weights."""
    c = model.config.get_text_config()
    h, vocab = c.hidden_size, c.vocab_size
    torch.manual_seed(seed)
    head = Eagle3Head(Eagle3Config(LayerConfig(h, 64, 4, 2, HEAD_DIM), h, vocab, draft_vocab_size, aux))
    head.set_hot_vocab(torch.randperm(vocab)[:draft_vocab_size])
    return noisy(head)


def random_draft(model: Any, algo: str) -> Any:
    """Return a random draft of `algo` for `model`, on its device; the standalone one is a model of another shape."""
    return _random_draft(model, algo).to(model.device, model.dtype)


def _random_draft(model: Any, algo: str) -> Any:
    c = model.config.get_text_config()
    torch.manual_seed(0)
    if algo == "eagle3":
        return random_head(model)
    if algo == "eagle":
        layer = LayerConfig(c.hidden_size, 48, 4, 2, HEAD_DIM)
        return noisy(EagleHead(EagleConfig(layer, c.vocab_size)))
    if algo == "block":
        return random_block(model)
    if algo in ("nextn", MODULES):
        return noisy(NextNHead(model, NextNConfig(num_layers=3 if algo == MODULES else 1)))
    return tiny_model("qwen3" if type(model).__name__ != "Qwen3ForCausalLM" else "llama", 7)


def random_block(model: Any, seed: int = 0, **changes: Any):
    """Return a random causal block head for `model`, of two layers with a Markov term."""
    c = model.config.get_text_config()
    torch.manual_seed(seed)
    config = BlockConfig(
        LayerConfig(c.hidden_size, 48, 4, 2, HEAD_DIM, qk_norm=True), c.hidden_size, c.vocab_size, c.vocab_size, (0, 2),
        block_size=9, mask_token_id=1, num_layers=2, causal=True, predicts_next=True, markov_rank=8,
    )  # fmt: skip
    config = replace(config, **changes)
    head = BlockHead(config)
    head.set_hot_vocab(torch.randperm(c.vocab_size)[: config.draft_vocab_size])
    return noisy(head)


def noisy(head: Any) -> Any:
    """Fill the matrices of `head` with random numbers; return it ready to draft."""
    for p in head.parameters():
        if p.dim() > 1:
            p.data = torch.randn_like(p) * 0.1
    return head.eval().requires_grad_(False)


def poison(engine: Any) -> None:
    """Fill every KV slot of target and draft with NaN."""
    contexts = [engine._core.context, engine._core.round.worker.context]
    for plane in (plane for context in contexts for plane in context.pool.planes):
        plane.fill_(float("nan"))


class OracleWorker(DraftWorker):
    """Knows the continuation of every prompt, by the prompt's length, and proposes it; one token in four is wrong.

    With topk > 1 the right token takes a random rank among its siblings, so that accepted paths are not straight lines.
    """

    def __init__(self, config: Any, texts: list[list[int]], vocab_size: int):
        self.config = config
        self.texts = texts  # prompt + continuation; the prompts have distinct lengths
        self.vocab_size = vocab_size
        self.owner: dict[int, list[int]] = {}
        self.random = torch.Generator().manual_seed(0)

    def finish_prefill(self, chunk: PrefillChunk, hidden: torch.Tensor | None, run: RunPrefill) -> None:
        ends = [int(chunk.metadata.positions[i]) + 1 for i in chunk.last_rows.tolist()]
        first = chunk.next_ids[chunk.last_rows].tolist()
        for row, end, token in zip(chunk.rows.tolist(), ends, first, strict=True):
            matches = [t for t in self.texts if len(t) > end and t[end] == token]
            self.owner[row] = matches[0]

    def register(self, row: int, text: list[int]) -> None:
        self.owner[row] = text

    def draft(self, batch: RoundBatch) -> Draft:
        num_steps, k, _ = batch.shape
        true = torch.tensor(
            [
                [self._true(row, length + d) for d in range(1, num_steps + 1)]
                for row, length in zip(batch.rows.tolist(), batch.seq_lens.tolist(), strict=True)
            ]
        )
        spoilt = torch.rand(true.shape, generator=self.random) < 0.25
        tokens = torch.where(spoilt, (true + 1) % self.vocab_size, true)
        roots = batch.roots.cpu()
        tree = chain(roots, tokens) if k == 1 else self._tree(roots, tokens, k)
        return Draft(tree_map_only(torch.Tensor, lambda t: t.to(batch.roots.device), tree), None)

    def extend(self, batch: RoundBatch, verified: VerifyOutput, aux: torch.Tensor | None) -> None:
        return None

    @property
    def facts(self) -> dict[str, Any]:
        return {"algo": "oracle"}

    def _true(self, row: int, position: int) -> int:
        text = self.owner.get(row, [])  # the dummy row has none
        return text[position] if position < len(text) else 3

    def _tree(self, roots: torch.Tensor, line: torch.Tensor, k: int):
        """Draft K children per step, of the right node only; the right token takes a random rank."""
        bs, num_steps = line.shape
        tokens, parents, scores, depths = [], [], [], []
        parent = torch.full((bs,), -1)
        for step in range(num_steps):
            rank = torch.randint(0, k, (bs,), generator=self.random)
            offsets = (torch.arange(k) - rank.unsqueeze(1)) * 7  # 0 at the right token's rank: siblings stay distinct
            tokens.append((line[:, step : step + 1] + offsets) % self.vocab_size)
            parents.append(parent.unsqueeze(1).expand(-1, k))
            scores.append(-torch.full((bs, k), float(step + 1)))
            depths += [step + 1] * k
            parent = step * k + rank
        return build(
            roots,
            torch.cat(tokens, 1),
            torch.cat(scores, 1),
            torch.cat(parents, 1),
            torch.tensor(depths),
            num_draft_tokens=self.config.verify_width,
            num_steps=num_steps,
        )
