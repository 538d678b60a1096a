"""The trainer: unrolling equals inference, losses equal autograd, runs resume bit for bit, heads reload."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from specdec.backends.metadata import TORCH_METADATA
from specdec.backends.op import ForwardContext, attention, forward_context
from specdec.backends.rope import Rope
from specdec.backends.torch_ref import TorchBackend
from specdec.batch import ForwardMode
from specdec.kv_cache import KVPool
from specdec.models.eagle3 import Eagle3Head
from specdec.models.loader import load_eagle3, save_eagle3
from specdec.train.batches import Batch, Batches
from specdec.train.card import write_card
from specdec.train.data import Corpus
from specdec.train.losses import Goal, goal_of, imitation_loss
from specdec.train.schedule import learning_rate, progress
from specdec.train.tally import Tally, accepted_prefixes
from specdec.train.teacher import Teacher, target_shape
from specdec.train.trainer import TrainConfig, Trainer
from specdec.train.ttt import TTTAttention, unroll
from tests.train_models import AUX, tiny_corpus, tiny_head, tiny_target

CPU = torch.device("cpu")
STEPS = 4


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny_target()


@pytest.fixture(scope="module")
def corpus(target: LlamaForCausalLM) -> Corpus:
    return tiny_corpus(target, 12)


def loud_head(target: LlamaForCausalLM) -> Eagle3Head:
    """A head whose attention and MLP matter: a fresh one barely uses them."""
    head = tiny_head(target)
    with torch.no_grad():
        for weight in (head.midlayer.self_attn.o_proj.weight, head.midlayer.mlp.down_proj.weight):
            weight.mul_(10.0)
    return head


def config(**changes: object) -> TrainConfig:
    base = TrainConfig(num_steps=3, tokens_per_batch=128, max_steps=8, lr=3e-3, chunk_rows=7, log_every=4)
    return replace(base, **changes)  # type: ignore[arg-type]


def naive_attention(qs: list[torch.Tensor], ks: list[torch.Tensor], vs: list[torch.Tensor]) -> torch.Tensor:
    """The last step's attention, a row at a time; qs, ks, vs: [B, T, H, d] of each step so far."""
    q = qs[-1]
    out = torch.zeros_like(q)
    group = q.shape[2] // ks[0].shape[2]
    for b in range(q.shape[0]):
        for i in range(q.shape[1]):
            for h in range(q.shape[2]):
                g = h // group
                keys = torch.stack([*ks[0][b, : i + 1, g], *[k[b, i, g] for k in ks[1:]]])
                values = torch.stack([*vs[0][b, : i + 1, g], *[v[b, i, g] for v in vs[1:]]])
                out[b, i, h] = (keys @ q[b, i, h] * q.shape[3] ** -0.5).softmax(0) @ values
    return out


def test_attention_equals_rows_one_by_one() -> None:
    torch.manual_seed(0)
    attend, qs, ks, vs = TTTAttention(), [], [], []
    still = Rope(torch.ones(2, 7, 8), torch.zeros(2, 7, 8))  # rotates nothing
    for _ in range(STEPS):
        qs.append(torch.randn(2, 7, 6, 8))
        ks.append(torch.randn(2, 7, 3, 8))
        vs.append(torch.randn(2, 7, 3, 8))
        got = attend(qs[-1], ks[-1], vs[-1], still, 0)
        torch.testing.assert_close(got, naive_attention(qs, ks, vs), atol=1e-5, rtol=1e-5)


def test_tokens_must_reach_the_last_step(target: LlamaForCausalLM) -> None:
    with pytest.raises(ValueError, match="pad to 9"):
        tokens, aux = torch.ones(1, 8).long(), torch.ones(1, 6, 192)
        next(unroll(tiny_head(target), target.get_input_embeddings(), tokens, aux, 3))


class Incremental:
    """The head as inference runs it: rows appended to a KV pool through the attention op."""

    def __init__(self, head: Eagle3Head, embed: torch.nn.Module):
        c = head.config
        spec = c.layer.attention
        pool = KVPool([spec.shape], 64, torch.float32, CPU)
        self.context = ForwardContext(TorchBackend(), pool, [spec], [None], lambda mode: None)
        self.head, self.embed, self.length = head, embed, 0

    def append(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """tokens [n], hidden [n, h_d], causal among themselves: recycled states [n, h_d]."""
        metadata = TORCH_METADATA.uniform(
            ForwardMode.DRAFT,
            torch.arange(1, 64).unsqueeze(0),
            torch.tensor([self.length]),
            q_len=tokens.numel(),
            max_prefix=self.length,
        )
        self.length += tokens.numel()
        with forward_context(self.context, metadata):
            embeds, rope = self.embed(tokens), self.head.rope(metadata.positions)
            return self.head(embeds, hidden, rope, lambda q, k, v, rope, layer: attention(q, k, v, layer, rope))


@torch.no_grad()
def test_unrolling_equals_the_draft_chain_of_inference(target: LlamaForCausalLM) -> None:
    head, embed = loud_head(target), target.get_input_embeddings()
    tokens = torch.randint(3, 96, (2, 12 + STEPS), generator=torch.Generator().manual_seed(5))
    out = target(tokens[:, :12], use_cache=False, output_hidden_states=list(AUX))
    aux = torch.cat([out.hidden_states[i] for i in AUX], -1)
    unrolled = [head.logits(state) for state in unroll(head, embed, tokens, aux, STEPS)]
    for b in range(2):
        row_by_row = Incremental(head, embed)
        for i in range(12):
            one = row_by_row.append(tokens[b, i + 1 : i + 2], head.fuse(aux[b, i : i + 1]))
            torch.testing.assert_close(unrolled[0][b, i], head.logits(one)[0], atol=1e-5, rtol=1e-5)
            chain = Incremental(head, embed)
            state = chain.append(tokens[b, 1 : i + 2], head.fuse(aux[b, : i + 1]))[-1:]
            for j in range(1, STEPS):
                state = chain.append(tokens[b, i + 1 + j : i + 2 + j], state)
                torch.testing.assert_close(unrolled[j][b, i], head.logits(state)[0], atol=1e-5, rtol=1e-5)


def test_the_teacher_reads_the_rows_that_are_asked_for(target: LlamaForCausalLM, corpus: Corpus) -> None:
    head = tiny_head(target)
    batches = Batches(corpus, 3, 128, 99, CPU)
    batch = batches.build(batches.plan(None)[0])
    aux, goal = Teacher(target, AUX).read(batch, head.hot_ids, chunk_rows=5)
    full = target(batch.tokens[:, : batch.length], output_hidden_states=True)
    # classic numbering counts from the embedding: hidden_states[k] is the output of layer k-1
    torch.testing.assert_close(aux, torch.cat([full.hidden_states[i + 1] for i in AUX], -1))
    logits = full.logits.flatten(0, 1)[batch.rows]
    torch.testing.assert_close(goal.logits, logits[:, head.hot_ids])
    best = torch.where(goal.best >= 0, head.hot_ids[goal.best], -1)
    expected = torch.where(head.t2d[logits.argmax(-1)], logits.argmax(-1), -1)
    assert best.tolist() == expected.tolist() and 0 < int(goal.is_trained.sum()) < goal.best.numel()
    with pytest.raises(ValueError, match="ascending layers"):
        Teacher(target, (0, 1, 4))


@pytest.mark.parametrize("lk_weight", [0.0, 0.5])
def test_chunked_loss_equals_autograd(lk_weight: float) -> None:
    torch.manual_seed(0)
    states = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    lm_head = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    target_logits = 2 * torch.randn(11, 20, dtype=torch.float64)
    hot = torch.tensor([0, 2, 3, 5, 8, 9, 13, 18, 19])
    goal = goal_of(target_logits, torch.arange(11), hot, 4)
    loss, best = imitation_loss(states, lm_head, goal, lk_weight, chunk_rows=4)
    got = torch.autograd.grad(2 * loss, [states, lm_head])
    q = (states @ lm_head.T).softmax(-1)
    p = target_logits[:, hot].softmax(-1)
    rows = -(p * q.log()).sum(-1) - lk_weight * torch.minimum(p, q).sum(-1).log()
    is_hot = torch.isin(target_logits.argmax(-1), hot)
    expected = rows[is_hot].mean()
    assert 0 < int(is_hot.sum()) < 11 and best.tolist() == q.argmax(-1).tolist()
    torch.testing.assert_close(loss.double(), expected, atol=1e-5, rtol=1e-5)
    for ours, theirs in zip(got, torch.autograd.grad(2 * expected, [states, lm_head]), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_acceptance_counts_prefixes_from_chain_starts() -> None:
    # one sequence, 3 prompt tokens, 4 answer tokens (3..6): rows 2..5, starts at columns 2, 3, 4
    batch = Batch(torch.zeros(1, 18).long(), torch.tensor([2, 3, 4, 5]), torch.tensor([2, 3, 4]), 16, 2, 7)
    right = torch.tensor([[True, True, False, True], [True, True, True, False]])  # [step, row]
    prefixes = accepted_prefixes(batch, right)
    # column i is right at step j if row i+1+j is: (3, 4), (4, 5), (5, beyond the end)
    assert prefixes.tolist() == [[True, False, True], [True, False, False]]
    tally = Tally.zero(2, CPU)
    goal = Goal(torch.zeros(4, 3), torch.tensor([0, 1, 2, -1]))
    drafted = [torch.where(row, goal.best, 9) for row in right]
    tally.add(batch, goal, [torch.tensor(1.0), torch.tensor(3.0)], drafted)
    rates = tally.read()
    assert rates["accept_at"] == pytest.approx([2 / 3, 1 / 3]) and rates["tau"] == pytest.approx(2.0)
    assert rates["acc"] == [0.75, 0.75] and rates["argmax_coverage"] == 0.75 and rates["loss"] == [1.0, 3.0]


def test_a_miss_of_the_hot_vocabulary_is_never_right() -> None:
    batch = Batch(torch.zeros(1, 17).long(), torch.tensor([4]), torch.tensor([3]), 16, 4, 7)
    tally = Tally.zero(1, CPU)
    tally.add(batch, Goal(torch.zeros(1, 3), torch.tensor([-1])), [torch.tensor(0.0)], [torch.tensor([0])])
    assert tally.read()["acc"] == [0.0]


def test_schedule_follows_whichever_share_is_larger() -> None:
    assert progress(5, 10, 30, 300) == 0.5 and progress(5, None, 270, 300) == 0.9 and progress(99, 10, 0, None) == 1
    assert learning_rate(1.0, 0.01, 0.02) == 0.5 and learning_rate(1.0, 1.0, 0.02) == pytest.approx(0.0)
    assert learning_rate(1.0, 0.51, 0.02) == pytest.approx(0.5)
    with pytest.raises(ValueError, match="one at least"):
        TrainConfig()


@pytest.mark.parametrize("lk_weight", [0.0, 0.3])
def test_overfits_one_batch(target: LlamaForCausalLM, corpus: Corpus, lk_weight: float) -> None:
    few = corpus.select(range(4))
    head = tiny_head(target, draft_vocab_size=96)
    trainer = Trainer(target, head, few, few, config(max_steps=60, tokens_per_batch=256, lk_weight=lk_weight))
    result = trainer.fit()
    # a chain that starts near the end of an answer is cut there, so a_j has a ceiling below 1
    assert min(result["acc"]) > 0.9 and result["accept_at"][0] > 0.9 and result["steps"] == 60
    assert result["argmax_coverage"] == 1.0 and math.isclose(result["tau"], 1 + sum(result["accept_at"]))


def test_lm_head_stays_the_targets_unless_asked(target: LlamaForCausalLM, corpus: Corpus) -> None:
    for train_lm_head in (False, True):
        head = tiny_head(target)
        Trainer(target, head, corpus, corpus, config(max_steps=2, train_lm_head=train_lm_head)).fit()
        rows = target.lm_head.weight[head.hot_ids]
        assert torch.equal(head.lm_head.weight, rows) is not train_lm_head


def test_resumed_run_equals_the_uninterrupted_one(target: LlamaForCausalLM, corpus: Corpus, tmp_path: Path) -> None:
    whole = Trainer(target, tiny_head(target), corpus, corpus, config())
    expected = whole.fit()
    path = tmp_path / "run.pt"
    first = Trainer(target, tiny_head(target), corpus, corpus, config(save_every=5), path)
    first._began, first.max_steps = 0.0, 8
    tally = Tally.zero(3, CPU)
    for _ in range(5):
        first.train_step(first.progress, tally)
    first.save(path)
    second = Trainer(target, tiny_head(target, seed=1), corpus, corpus, config())
    second.resume(path)
    result = second.fit()
    assert (second.step, second.epoch, second.cursor) == (whole.step, whole.epoch, whole.cursor)
    for (name, a), b in zip(whole.head.state_dict().items(), second.head.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert {k: v for k, v in result.items() if k != "minutes"} == {k: v for k, v in expected.items() if k != "minutes"}
    with pytest.raises(ValueError, match=r"another run.*lr: 0.003 there, 0.001 here"):
        Trainer(target, tiny_head(target), corpus, corpus, config(lr=1e-3)).resume(path)


def test_low_precision_targets_train_a_head_in_fp32(corpus: Corpus) -> None:
    target = tiny_target().bfloat16()
    head = tiny_head(target)
    before = head.midlayer.self_attn.q_proj.weight.clone()
    trainer = Trainer(target, head, corpus, corpus, config(max_steps=3))
    trainer.fit()
    q = "midlayer.self_attn.q_proj.weight"
    assert head.fc.weight.dtype == torch.float32 and trainer.draft.fc.weight.dtype == torch.bfloat16
    assert not torch.equal(before, head.state_dict()[q])
    assert torch.equal(trainer.draft.state_dict()[q], head.state_dict()[q].bfloat16())


@pytest.mark.parametrize("from_target", [True, False])
def test_export_comes_back_with_the_same_logits(target: LlamaForCausalLM, tmp_path: Path, from_target: bool) -> None:
    head = loud_head(target)
    save_eagle3(tmp_path, head, lm_head_from_target=from_target, dtype=torch.float32)
    back = load_eagle3(tmp_path, target_shape(target), torch.float32, CPU)
    tokens = torch.randint(3, 96, (1, 9 + STEPS), generator=torch.Generator().manual_seed(0))
    aux = torch.randn(1, 9, 192, generator=torch.Generator().manual_seed(0))
    embed = target.get_input_embeddings()
    pairs = zip(unroll(head, embed, tokens, aux, STEPS), unroll(back, embed, tokens, aux, STEPS), strict=True)
    for ours, theirs in pairs:
        assert torch.equal(head.logits(ours), back.logits(theirs))
    assert torch.equal(head.d2t, back.d2t) and back.config == head.config


def test_card_has_facts_and_tables(tmp_path: Path) -> None:
    facts = {"target": "T", "tokens": 12345, "coverage": 0.987, "acc": [0.5, 0.4], "accept_at": [0.5, 0.2]}
    text = write_card(tmp_path, facts, [{"prompts": "gsm8k", "tau": 2.5}]).read_text("utf-8")
    assert "head for T" in text and "| tokens | 12,345 |" in text and "| 2 | 0.4 | 0.2 |" in text
    assert "| gsm8k | 2.5 |" in text and "{" not in text
    assert "bench acceptance" not in write_card(tmp_path, facts).read_text("utf-8")
