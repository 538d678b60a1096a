"""Rows of `specdec bench acceptance`: conversations, categories, tau by position and context, definitions."""

import json
from pathlib import Path

import pytest
import torch

from specdec import attach
from specdec.core.metrics import AcceptanceStats
from specdec.core.outputs import RequestOutput
from specdec.core.text.prompt_sets import Question
from specdec.reach.heads.load import save_head
from specdec.reach.targets.pretrained import load_pretrained
from specdec.tools.measure.acceptance import acceptance
from specdec.tools.measure.conversations import Conversations, ask, rounds_of, tau_by_context, tau_by_position
from specdec.tools.measure.drafts import DraftShape
from tests.commands import run
from tests.heads import random_head
from tests.train_models import save_target, tiny_target

QUESTIONS = (("w31 w32", "w33"), ("w34 w35 w36", "w37 w38"), ("w40", "w41"))
CHAT = "{% for m in messages %}{{ ' w6 ' if m['role'] == 'user' else ' w7 ' }}{{ m['content'] }}{% endfor %} w5"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target (its template renders whole conversations), head, mt_bench.jsonl and gsm8k.jsonl."""
    root = tmp_path_factory.mktemp("conversations")
    model = tiny_target()
    save_target(model, root / "target")
    config = root / "target" / "chat_template.jinja"
    config.write_text(CHAT)
    save_head(root / "head", random_head(model), lm_head_from_target=False, dtype=torch.float32)
    lines = [{"category": "ab"[i == 2], "turns": turns} for i, turns in enumerate(QUESTIONS)]
    (root / "mt_bench.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (root / "gsm8k.jsonl").write_text("".join(json.dumps({"question": t[0]}) + "\n" for t in QUESTIONS[:2]))
    return root


def bench(capsys, monkeypatch, folder: Path, *arguments: object) -> tuple[int, list[dict], str]:
    common = ("--json", "--device", "cpu", "--target", folder / "target")
    common = (*common, "--draft", folder / "head", "--max-new-tokens", 10)
    code, lines, errors = run(capsys, monkeypatch, "bench", "acceptance", *common, *arguments)
    return code, json.loads(lines[-1])["rows"] if lines else [], errors


def test_sets_by_name_both_turns_and_categories(folder, capsys, monkeypatch):
    code, rows, _ = bench(capsys, monkeypatch, folder, "--data", folder, "--prompts", "gsm8k,mt_bench", "--by-category")
    assert code == 0
    assert [(r["prompts"], r["category"], r["turns"], r["num_prompts"], r["conversations"]) for r in rows] == [
        ("gsm8k", None, 1, 2, 2),
        ("mt_bench", None, 2, 6, 3),
        ("mt_bench", "a", 2, 4, 2),
        ("mt_bench", "b", 2, 2, 1),
    ]
    assert rows[1]["rounds"] == rows[2]["rounds"] + rows[3]["rounds"] and rows[3]["ci95"] is None
    assert rows[1]["prompts_sha"] == rows[2]["prompts_sha"] != rows[0]["prompts_sha"]
    for row in rows:
        assert row["thinking"] == "not applicable" and len(row["template_sha"]) == len(row["prompts_sha"]) == 16
        assert row["first_token"] == "from the prefill, in no round, not counted in tau"
        for key in ("tau_by_position", "tau_by_context"):
            assert sum(part["rounds"] for part in row[key]) == row["rounds"]
            emitted = sum(part["rounds"] * part["tau"] for part in row[key])
            assert emitted == pytest.approx(row["rounds"] * row["tau"], rel=1e-3)
        chained = 1.0
        for unconditional, conditional in zip(row["accept_at"], row["conditional_at"], strict=True):
            chained *= conditional
            assert chained == pytest.approx(unconditional, abs=1e-3)


def test_a_set_needs_its_folder(folder, capsys, monkeypatch):
    code, _, errors = bench(capsys, monkeypatch, folder, "--prompts", "mt_bench")
    assert code == 2 and "--prompts mt_bench: a prompt set needs --data DIR" in errors
    code, _, errors = bench(capsys, monkeypatch, folder, "--data", folder, "--prompts", "humaneval")
    assert code == 2 and "prompt set 'humaneval': none of its files" in errors and len(errors.splitlines()) == 1


def test_second_turns_follow_own_answers(folder):
    model, tokenizer = load_pretrained(folder / "target")
    asked = Conversations.render([Question(t, None, {}) for t in (*QUESTIONS, ("w44",))], tokenizer)
    engine = attach(model, tokenizer=tokenizer, max_batch=2, max_seq_len=asked.longest(6, tokenizer))
    answers = ask(engine, asked, 0.0, 6)
    assert [len(own) for own in answers.requests] == [2, 2, 2, 1]
    for turns, own in zip(QUESTIONS, answers.requests, strict=False):
        text = f"w6 {turns[0]} w7 {own[0].text} w6 {turns[1]} w5"
        assert own[1].prompt_ids == tokenizer(text, add_special_tokens=False)["input_ids"]
        (alone,) = engine.generate([own[1].prompt_ids], max_new_tokens=6, do_sample=False).requests
        assert alone.tokens == own[1].tokens
    others = Conversations.render([Question((t[0], "w50"), None, {}) for t in QUESTIONS], tokenizer)
    assert others.prompts_sha(tokenizer) != asked.prompts_sha(tokenizer)
    engine.detach()


def request(prompt: int, lens: list[int]) -> RequestOutput:
    """Return a request of `prompt` tokens whose rounds emitted `lens` tokens after the prefill's first one."""
    stats = AcceptanceStats().add(lens)
    ids = [3] * (1 + sum(lens))
    return RequestOutput([3] * prompt, ids, "", "length", stats, 0.0, 0.0, round_lens=lens)


def test_rounds_fall_where_they_begin():
    assert list(rounds_of(request(100, [3, 2]))) == [(1, 101, 3), (4, 104, 2)]
    one, two = request(100, [4] * 40), request(127, [2, 1] * 20)
    parts = tau_by_position([[one], [two]])
    assert [(p["from"], p["to"]) for p in parts] == [(0, 32), (32, 64), (64, 128), (128, 256)]
    first, last = parts[0], parts[-1]
    assert first["rounds"] == 8 + 21 and first["tau"] == pytest.approx((32 + 32) / 29, abs=1e-3)
    assert last["tau"] == 4.0 and last["ci95"] is None and first["ci95"] > 0, "one request has no interval"
    contexts = tau_by_context([[one], [two]])
    assert [(p["from"], p["to"]) for p in contexts] == [(0, 128), (128, 256), (256, 512)]
    assert contexts[0]["rounds"] == 7 and sum(p["rounds"] for p in contexts) == 80
    assert tau_by_context([[one, two]])[1]["ci95"] is None, "both turns are one conversation"
    assert tau_by_position([[request(5, [])]]) == []


def test_ids_alone_have_no_template():
    model = tiny_target()
    options = {"name": "own", "shape": DraftShape(2, 1, 3), "max_new_tokens": 6, "by_category": True}
    (row,) = acceptance(model, random_head(model), {"ids": [[5, 6, 7], [8, 9]]}, **options)
    assert (row["template_sha"], row["thinking"], row["turns"], row["category"]) == (None, "not applicable", 1, None)


def test_draft_vocabularies_beside_each_other(folder, capsys, monkeypatch):
    arguments = ("--data", folder, "--prompts", "gsm8k", "--shape", "2,3", "--draft-vocab", "0,40")
    code, rows, errors = bench(capsys, monkeypatch, folder, *arguments)
    assert code == 0
    assert [(r["steps"], r.get("draft_vocab")) for r in rows] == [(2, None), (2, 40), (3, None), (3, 40)]
    assert "head 2:1:3@40 gsm8k T=0: tau" in errors


def test_draft_vocabularies_by_frequency(folder, capsys, monkeypatch):
    arguments = ("--data", folder, "--prompts", "gsm8k", "--frequent-in", folder / "gsm8k.jsonl")
    code, (row,), _ = bench(capsys, monkeypatch, folder, *arguments, "--draft-vocab", "40")
    assert (row["draft_vocab"], row["chosen"]) == (40, "listed") and code == 0
    code, _, errors = bench(capsys, monkeypatch, folder, *arguments)
    assert code == 2 and "expected --draft-vocab" in errors
