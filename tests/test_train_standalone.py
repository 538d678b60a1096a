"""Distilled LMs: the loss, the initial weights, resumption, and what a GGUF file gives back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from specdec.core.text.prompts import tokenizer_fingerprint
from specdec.reach.targets.pretrained import load_draft
from specdec.tools.train.acceptance import Tally
from specdec.tools.train.batches import Batches
from specdec.tools.train.config import HeadShape, TrainConfig
from specdec.tools.train.data import Corpus
from specdec.tools.train.standalone import (
    StandaloneObjective,
    new_student,
    project,
    rounded,
    write_gguf,
    write_note,
    write_safetensors,
)
from specdec.tools.train.trainer import Trainer
from tests.train_models import VOCAB, tiny_corpus, tiny_student, tiny_target

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return tiny_target()


@pytest.fixture(scope="module")
def corpus(target: LlamaForCausalLM) -> Corpus:
    return tiny_corpus(target, 12)


def trainer(
    target: LlamaForCausalLM, corpus: Corpus, seed: int = 1, embed_type: str | None = None, **changes: object
) -> Trainer:
    base = TrainConfig(num_steps=3, tokens_per_batch=128, max_steps=8, lr=3e-3, chunk_rows=7, log_every=4)
    settings = replace(base, **changes)  # type: ignore[arg-type]
    objective = StandaloneObjective(target, tiny_student(target, corpus, seed), settings, embed_type)
    return Trainer(objective, corpus, corpus)


@pytest.mark.parametrize("prompt_weight", [0.0, 0.25])
def test_the_loss_is_that_of_the_whole_law(target: LlamaForCausalLM, corpus: Corpus, prompt_weight: float) -> None:
    objective = trainer(target, corpus, prompt_weight=prompt_weight).objective
    batches = Batches(corpus, 3, 128, 99, CPU)
    batch = batches.build(batches.plan(None)[0])
    outcome = objective.forward(batch, None)
    tokens, student = batch.tokens[:, : batch.length], objective.optimizer.module
    p = target(tokens).logits.softmax(-1).flatten(0, 1)
    each = -(p * student(tokens).logits.flatten(0, 1).log_softmax(-1)).sum(-1)
    weights = torch.zeros_like(each)
    weights[batch.prompt_rows] = prompt_weight
    weights[batch.rows] = 1.0
    expected = (weights * each).sum() / weights.sum()
    torch.testing.assert_close(outcome.loss, expected)
    params = list(student.parameters())
    got = torch.autograd.grad(outcome.loss, params)
    for ours, theirs in zip(got, torch.autograd.grad(expected, params), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-3)
    right = student(tokens).logits.flatten(0, 1)[batch.rows].argmax(-1)
    assert all(d.tolist() == right.tolist() for d in outcome.drafted) and len(outcome.drafted) == 3
    assert outcome.goal.best.tolist() == p[batch.rows].argmax(-1).tolist()


@pytest.mark.parametrize("embed_type", [None, "Q4_0"])
def test_overfits_one_batch(target: LlamaForCausalLM, corpus: Corpus, embed_type: str | None) -> None:
    few = corpus.select(range(4))
    run = trainer(target, few, embed_type=embed_type, max_steps=120, tokens_per_batch=256, lr=1e-2)
    result = run.fit()
    assert min(result["acc"]) > 0.9 and len(set(result["acc"])) == 1 and result["accept_at"][1] > 0.75


def test_a_student_starts_in_the_principal_directions(target: LlamaForCausalLM, corpus: Corpus) -> None:
    rows, counts = torch.randn(50, 4) @ torch.randn(4, 16), torch.arange(50)
    small = project(rows, counts, 4)
    weights = (counts + 1.0) / (counts + 1.0).sum()
    centred = rows - (weights.unsqueeze(1) * rows).sum(0)
    scale = (weights * centred.square().sum(-1)).sum()
    torch.testing.assert_close(small @ small.T, centred @ centred.T / scale, atol=1e-4, rtol=1e-3)
    student = tiny_student(target, corpus)
    assert student.lm_head.weight is student.model.embed_tokens.weight
    assert student.config.rope_parameters["rope_theta"] == 5000.0 and student.config.max_position_embeddings == 256
    for wrong, message in (
        (HeadShape(hidden_size=128, num_heads=2), "hidden_size=128"),
        (HeadShape(hidden_size=32, num_heads=5), "num_heads=5"),
    ):
        with pytest.raises(ValueError, match=message):
            new_student(target, wrong, torch.ones(VOCAB), 0)
    with pytest.raises(ValueError, match=r"soft_weight=0\.5 for 'standalone': expected 1\.0"):
        trainer(target, corpus, soft_weight=0.5)


def test_resumed_run_equals_the_uninterrupted_one(target: LlamaForCausalLM, corpus: Corpus, tmp_path: Path) -> None:
    whole, first, second = (trainer(target, corpus, seed, "Q4_0") for seed in (1, 1, 2))
    whole.fit()
    tally = Tally(3, CPU)
    for _ in range(5):
        first.train_step(first.progress, tally)
    first.save(tmp_path / "run.pt")
    second.resume(tmp_path / "run.pt")
    second.fit()
    weights = [t.objective.optimizer.module.state_dict() for t in (whole, second)]
    assert all(torch.equal(a, b) for a, b in zip(weights[0].values(), weights[1].values(), strict=True))


def test_a_student_works_in_the_targets_dtype_with_exact_rotary(corpus: Corpus) -> None:
    run = trainer(tiny_target().bfloat16(), corpus, max_steps=2)
    run.fit()
    working, student = run.objective.optimizer.working, run.objective.optimizer.module
    assert working.lm_head.weight is working.model.embed_tokens.weight
    assert working.lm_head.weight.dtype == torch.bfloat16 and student.lm_head.weight.dtype == torch.float32
    assert torch.equal(working.model.rotary_emb.inv_freq, student.model.rotary_emb.inv_freq)


@pytest.mark.parametrize("kind", ["F32", "Q4_0", "Q5_0", "Q8_0"])
def test_rounding_is_that_of_the_format(kind: str) -> None:
    quants = pytest.importorskip("gguf.quants")
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    weight[3] = 0.0
    type_ = pytest.importorskip("gguf").GGMLQuantizationType[kind]
    there_and_back = quants.dequantize(quants.quantize(weight.numpy(), type_), type_)
    assert torch.equal(rounded(weight, kind), torch.from_numpy(there_and_back).view(40, 64))


@torch.no_grad()
@pytest.mark.parametrize(("embed_type", "bits"), [("Q4_0", 4.5), ("Q8_0", 8.5)])
def test_a_gguf_file_comes_back_as_it_was_trained(
    target: LlamaForCausalLM, corpus: Corpus, tmp_path: Path, embed_type: str, bits: float
) -> None:
    pytest.importorskip("gguf")
    optimizer = trainer(target, corpus, embed_type=embed_type).objective.optimizer
    student, working = optimizer.module, optimizer.working
    tokens = torch.randint(3, VOCAB, (2, 20), generator=torch.Generator().manual_seed(0))
    write_gguf(tmp_path, student, embed_type)
    back, tokenizer = load_draft(tmp_path, dtype=torch.float32, device="cpu")
    assert tokenizer is None and isinstance(back, LlamaForCausalLM)
    assert back.config.tie_word_embeddings and back.config.rope_parameters["rope_theta"] == 5000.0
    torch.testing.assert_close(back(tokens).logits, working(tokens).logits, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(back(tokens).logits, student(tokens).logits, rtol=1e-3)
    layers = sum(p.numel() for n, p in student.named_parameters() if p.dim() > 1 and "embed" not in n)
    norms = sum(p.numel() for p in student.parameters() if p.dim() == 1)
    payload = VOCAB * 32 * bits / 8 + layers * 8.5 / 8 + 4 * norms
    assert payload < (tmp_path / "draft.gguf").stat().st_size < payload + 4096


def test_safetensors_and_the_note(target: LlamaForCausalLM, corpus: Corpus, tmp_path: Path) -> None:
    student = tiny_student(target, corpus)
    before = student.lm_head.weight.clone()
    write_safetensors(tmp_path, student, torch.bfloat16)
    write_note(tmp_path, "T", VOCAB, "abc")
    back = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(back.lm_head.weight, before.bfloat16()) and torch.equal(student.lm_head.weight, before)
    note = json.loads((tmp_path / "specdec.json").read_text("utf-8"))
    assert note == {"algo": "standalone", "target": "T", "vocab_size": VOCAB, "tokenizer_sha256": "abc"}


def test_fingerprints_tell_tokenizers_apart() -> None:
    class Words:
        def __init__(self, words: dict[str, int]):
            self.get_vocab = lambda: words

    one = tokenizer_fingerprint(Words({"a": 0, "b": 1}))
    assert one == tokenizer_fingerprint(Words({"b": 1, "a": 0})) and len(one) == 64
    assert one != tokenizer_fingerprint(Words({"a": 1, "b": 0})) != tokenizer_fingerprint(Words({"a": 0}))
