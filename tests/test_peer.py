"""An exported EAGLE-3 folder in another library, economize: the same drafts in every round, and the target's text.

The folder is complete: shipped heads leave out `lm_head.weight`, which only our loader takes from the target.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import specdec
from specdec import shipped
from specdec.core.text.prompts import chat_ids
from specdec.reach.heads.load import save_head
from specdec.tools.commands.demo import PROMPTS
from tests.heads import random_head
from tests.test_attach import greedy, ragged_prompts
from tests.tiny_models import VOCAB, tiny_model

economize = pytest.importorskip("economize", reason="pip install --no-deps -c constraints.txt economize")

NUM_STEPS = 4
NUM_TOKENS = 16

# A request's text, and for each of its rounds: the number of tokens before the root; the root and the drafts.
Run = tuple[list[int], list[tuple[int, list[int]]]]


def our_runs(model: Any, draft: Any, folder: Path, prompts: list[list[int]], monkeypatch: Any) -> list[Run]:
    """Return our engine's texts and drafts; save its complete head to `folder`."""
    engine = specdec.attach(model, draft, num_steps=NUM_STEPS, max_batch=1, cuda_graph=False)
    worker = engine._core.round.worker
    save_head(folder, worker.head, lm_head_from_target=False, dtype=torch.float32)
    rounds: list[tuple[int, list[int]]] = []
    make_draft = worker.draft

    def recorded(batch: Any) -> Any:
        out = make_draft(batch)
        rounds.append((int(batch.seq_lens[0]), out.tree.tokens[0].tolist()))
        return out

    monkeypatch.setattr(worker, "draft", recorded)
    runs = []
    try:
        for prompt in prompts:
            text = engine.generate([prompt], max_new_tokens=NUM_TOKENS).tokens[0]
            runs.append((text, rounds.copy()))
            rounds.clear()
    finally:
        engine.detach()
    return runs


def their_runs(model: Any, folder: Path, prompts: list[list[int]]) -> list[Run]:
    """Return economize's texts and drafts with the head in `folder`."""
    peer = economize.load(model, folder)
    runs = []
    try:
        for prompt in prompts:
            rounds: list[tuple[int, list[int]]] = []
            decoder = peer.decoder(economize.DecodeConfig(cycle_length=NUM_STEPS + 1))
            propose = decoder.drafter.propose

            def recorded(request: Any, propose: Any = propose, rounds: Any = rounds) -> Any:
                out = propose(request)
                root = request.ends[0] - 1
                rounds.append((root, [int(request.seq[0, root]), *out.tokens[0].tolist()]))
                return out

            decoder.drafter.propose = recorded
            stop = model.generation_config.eos_token_id
            with torch.inference_mode():
                text = decoder.decode(torch.tensor(prompt), NUM_TOKENS, stop=stop).tokens.tolist()
            runs.append((text, rounds))
    finally:
        peer.detach()
    return runs


def test_the_shipped_head_drafts_the_same(smollm2, tmp_path, monkeypatch):
    model, tokenizer = smollm2
    prompts = chat_ids(list(PROMPTS[:2]), tokenizer)
    ours = our_runs(model, shipped.path(), tmp_path, prompts, monkeypatch)
    theirs = their_runs(model, tmp_path, prompts)
    assert theirs == ours
    assert [text for text, _ in theirs] == [greedy(model, p, NUM_TOKENS) for p in prompts]
    assert max(len(rounds) for _, rounds in theirs) > 4  # later rounds start from the state that earlier ones leave
    assert sum(len(rounds) for _, rounds in theirs) < 0.7 * NUM_TOKENS * len(prompts)  # and drafts are accepted


@pytest.mark.parametrize(
    ("name", "draft_vocab_size"),
    [("llama", 64), ("llama", VOCAB), ("gemma3", 64), ("gpt_oss", 64), ("deepseek_v3", 64)],
)
def test_random_heads_draft_the_same(name, draft_vocab_size, tmp_path, monkeypatch):
    """Random heads for targets of several kinds; with a full draft vocabulary `d2t` is all zeros."""
    model, prompts = tiny_model(name), ragged_prompts()
    ours = our_runs(model, random_head(model, draft_vocab_size), tmp_path, prompts, monkeypatch)
    theirs = their_runs(model, tmp_path, prompts)
    assert theirs == ours
    assert [text for text, _ in theirs] == [greedy(model, p, NUM_TOKENS) for p in prompts]
