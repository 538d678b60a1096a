"""The trainer predicts what the engine measures: the same rounds, on the same text."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import specdec
from specdec.core.metrics import AcceptanceStats
from specdec.reach.heads.fresh import block_config, new_block, new_eagle, new_nextn
from specdec.tools.train.acceptance import outcomes, play_rounds
from specdec.tools.train.batches import Batches
from specdec.tools.train.config import recipe
from specdec.tools.train.data import Corpus
from specdec.tools.train.losses import Goal
from specdec.tools.train.objectives import HeadObjective, Outcome
from specdec.tools.train.trainer import Trainer
from tests.train_models import AUX, tiny_corpus, tiny_head, tiny_target

CPU = torch.device("cpu")
STEPS = 3


def small_block(model):
    """A fresh block head: three features from five layers, blocks of 4."""
    config = replace(block_config(model, 64, AUX), block_size=4, markov_rank=8)
    return new_block(model, config, torch.arange(0, 96, 3)[:32].repeat_interleave(2) + torch.tensor([0, 1] * 32), 0)


HEADS = {
    "eagle": lambda m: new_eagle(m, 0),
    "eagle3": tiny_head,
    "nextn": lambda m: new_nextn(m, 0),
    "block": small_block,
}


def test_rounds_begin_where_the_last_one_ended():
    """One sequence of 3 + 7 tokens; the draft predicts all but tokens 5 and 8."""
    batches = Batches(Corpus.of([([3, 4, 5], list(range(10, 17)))]), 2, 64, 99, CPU)
    batch = batches.build(batches.plan(None)[0])
    best = torch.arange(batch.rows.numel())
    wrong = torch.isin(batch.rows, torch.tensor([4, 7]))  # they predict tokens 5 and 8
    drafted = torch.where(wrong, best + 1, best)
    stats = play_rounds([(batch, Outcome(best, Goal(best, best, best), [], [drafted, drafted]))])
    # roots are tokens 3, 5, 8: one draft right and the bonus; token 6 and 7 right and the bonus; the end
    assert stats == AcceptanceStats(3, 6, [2, 1])


@pytest.mark.parametrize("algo", HEADS)
def test_prediction_equals_the_engine(algo):
    model = tiny_target()
    corpus = tiny_corpus(model, 8)
    objective = HeadObjective(
        model, HEADS[algo](model), recipe(algo, num_steps=STEPS, max_steps=25, tokens_per_batch=512)
    )
    Trainer(objective, corpus, corpus).fit()
    prompts = [corpus.sequence(i)[0][:8].tolist() for i in range(len(corpus))]
    head = objective.draft.eval().requires_grad_(False)
    engine = specdec.attach(model, head, num_steps=STEPS, max_seq_len=64)
    out = engine.generate(prompts, max_new_tokens=21, ignore_eos=True)
    engine.detach()
    batches = Batches(Corpus.of(list(zip(prompts, out.tokens, strict=True))), STEPS, 512, 99, CPU)
    assert out.stats.tau > 1.2, "the test needs drafts that are right at times"
    assert play_rounds(outcomes(objective, batches)) == out.stats.acceptance
