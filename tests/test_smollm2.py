"""The main use on the real target with the shipped drafts: equal text, real acceptance, the demo's last line."""

import json
from pathlib import Path

import pytest
import torch

from specdec import attach, shipped
from specdec.core.text.prompts import chat_ids, read_questions
from specdec.reach.assembly.algorithms import algorithms
from specdec.tools.commands.choices import Drafting
from specdec.tools.commands.demo import PROMPTS, run_demo
from specdec.tools.measure.acceptance import acceptance
from specdec.tools.measure.drafts import DraftShape

NUM_TOKENS = 32 if torch.cuda.is_available() else 12
CONFIGS = ({"num_steps": 3}, {"num_steps": 4, "topk": 4, "num_draft_tokens": 16})


@pytest.fixture(scope="module")
def references(smollm2):
    """Prompts (ids), and the text of HF's greedy `generate` for them."""
    model, tokenizer = smollm2
    prompts = chat_ids(list(PROMPTS), tokenizer)
    out = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        full = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False)
        out.append(full[0, len(prompt) :].tolist())
    return prompts, out


CASES = [("eagle3", config, batch) for config in CONFIGS for batch in (1, 4)]
if not torch.cuda.is_available():  # only two: the suite has ten minutes
    CASES = CASES[1:3]
CASES += [(algo, CONFIGS[i % 2], 4) for i, algo in enumerate(("eagle", "nextn", "standalone"))]


def test_shipped_drafts_are_of_every_algorithm_and_small():
    untrained = {"block", "assistant"}
    with_model = {name for name, row in algorithms().items() if row.has_model} - untrained
    assert {path.name.rpartition("-")[2] for path in map(shipped.path, shipped.available())} == with_model
    assert sum(f.stat().st_size for f in shipped.HERE.glob("*/*")) <= 36e6


@pytest.mark.parametrize(("algo", "config", "batch"), CASES, ids=[f"{a}-K{c.get('topk', 1)}-{b}" for a, c, b in CASES])
def test_greedy_speculation_equals_generate(smollm2, references, algo, config, batch):
    model, tokenizer = smollm2
    prompts, expected = references
    engine = attach(model, shipped.for_algo(algo), tokenizer=tokenizer, max_batch=batch, **config)
    try:
        out = engine.generate(prompts, max_new_tokens=NUM_TOKENS)
        engine.check_integrity()
    finally:
        engine.detach()
    assert out.tokens == expected
    assert out.stats.tau > 1.5  # a head with shifted features or ids accepts almost nothing


def test_demo_reports_equal_outputs(smollm2):
    model, tokenizer = smollm2
    drafting = Drafting(shipped.path(), "auto", {"num_steps": 2})
    last = run_demo(model, tokenizer, drafting, max_new_tokens=12, prompts=PROMPTS[:2])
    assert set(last) == {"hf_tok_s", "plain_tok_s", "spec_tok_s", "tau", "equal"}
    assert last["equal"] is True


def test_acceptance_row(smollm2, tmp_path: Path):
    model, tokenizer = smollm2
    file = tmp_path / "own.jsonl"
    file.write_text("\n".join(json.dumps({"question": p}) for p in PROMPTS[:2]))
    prompts = chat_ids(read_questions(file), tokenizer)
    (row,) = acceptance(
        model, shipped.path(), {"own": prompts}, name="e3", shape=DraftShape(2, 1, 3), max_new_tokens=16
    )
    assert row["tau"] == pytest.approx(1 + sum(row["accept_at"]), abs=1e-3)
    assert row["draft_tokens"] == 3


@pytest.mark.parametrize(
    ("text", "message"), [("", "holds no prompts"), ("{", "not JSON"), ('{"a": 1}', "none of"), (None, "no such file")]
)
def test_bad_prompt_files(tmp_path: Path, text: str | None, message: str):
    file = tmp_path / "p.jsonl"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_questions(file)
