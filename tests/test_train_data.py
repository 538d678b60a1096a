"""Corpora: which sequences are kept, which rows are trained, what the target generates, and the hot vocabulary."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from specdec.core.functional.sampling import SamplingParams
from specdec.core.text.inputs import encode
from specdec.core.text.prompts import chat_ids, read_questions
from specdec.tools.train.adapt import read_log
from specdec.tools.train.batches import Batches
from specdec.tools.train.data import Corpus, choose_hot_vocab, split_held_out
from specdec.tools.train.regenerate import (
    Budget,
    answer,
    answer_jobs,
    self_chat_prompts,
    user_turn_frame,
)

CPU = torch.device("cpu")


class WordTokenizer:
    """One id for each character; `<e>` ends a turn. Its template strips the user's text, as many do."""

    eos_token_id = 0

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize and add_generation_prompt
        return "sys|u:" + messages[0]["content"].strip() + "\0|a:"

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))


@dataclass
class StubOutput:
    tokens: list[list[int]]
    finish_reasons: list[str]


class StubEngine:
    """Returns one scripted text per request; records its calls."""

    def __init__(self, texts: Sequence[str]):
        self.texts = list(texts)
        self.calls: list[dict[str, object]] = []

    def generate(self, prompts: list[list[int]], **options: object) -> StubOutput:
        self.calls.append({"prompts": prompts, **options})
        said = [self.texts.pop(0) for _ in prompts]
        return StubOutput([[ord(c) for c in s] for s in said], ["eos" if s.endswith("\0") else "length" for s in said])


def test_save_load_merge_and_select(tmp_path: Path) -> None:
    one = Corpus.of([([5, 6, 7], [8, 2]), ([9], [70000])])
    two = Corpus.of([([1, 1], [3])])
    merged = Corpus.merge([one, two])
    merged.save(tmp_path / "c.safetensors")
    back = Corpus.load(tmp_path / "c.safetensors")
    (tmp_path / "new").touch()
    assert len({file.stat().st_mode for file in tmp_path.iterdir()}) == 1, "readable by whom other new files are"
    assert (len(back), back.num_tokens, back.num_answer_tokens) == (3, 10, 4)
    assert back.tokens.dtype == torch.int32 and back.tokens.tolist() == merged.tokens.tolist()
    picked = back.select([2, 0])
    assert [picked.sequence(i)[0].tolist() for i in range(2)] == [[1, 1, 3], [5, 6, 7, 8, 2]]
    assert picked.sequence(1)[1].tolist() == [False, False, False, True, True]
    assert len(Corpus.merge([])) == 0


def test_small_ids_take_two_bytes(tmp_path: Path) -> None:
    corpus = Corpus.of([([1] * 500, [65535] * 500)])
    corpus.save(tmp_path / "c.safetensors")
    assert (tmp_path / "c.safetensors").stat().st_size < 1000 * 3 + 500
    assert Corpus.load(tmp_path / "c.safetensors").tokens.max() == 65535


def test_bad_corpora_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="strictly increasing"):
        Corpus.of([([], [])])
    tensors = {"tokens": torch.tensor([5, 6, 7]), "answer": torch.tensor([0, 1, 1])}
    for offsets in (torch.zeros(0, dtype=torch.int64), torch.tensor([[0, 3]]), torch.tensor([0.0, 3.0])):
        save_file({**tensors, "offsets": offsets}, tmp_path / "x.safetensors")
        with pytest.raises(ValueError, match=r"offsets torch.* expected int64, one for each sequence and one more"):
            Corpus.load(tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"nowhere.*specdec train data"):
        Corpus.load(tmp_path / "nowhere.safetensors")


def test_a_corpus_knows_its_tokenizer(tmp_path: Path) -> None:
    path, other = tmp_path / "c.safetensors", tmp_path / "other.safetensors"
    Corpus.of([([3], [4])]).save(path, "sha")
    Corpus.of([([5], [6])]).save(other)
    merged = Corpus.merge([Corpus.load(other), Corpus.load(path)])
    assert merged.tokenizer == merged.select([0]).tokenizer == "sha" and merged.digest == merged.select([0, 1]).digest
    merged.check_ids(7, "sha")
    with pytest.raises(ValueError, match=r"another tokenizer than the target's: .* train data --target"):
        merged.check_ids(7, "else")
    with pytest.raises(ValueError, match="ids up to 6, and the target 6 tokens: expected one that this target wrote"):
        merged.check_ids(6, "sha")
    Corpus.load(other).save(other, "else")
    with pytest.raises(ValueError, match="were made with different tokenizers"):
        Corpus.merge([Corpus.load(other), merged])


def test_show_brackets_what_was_generated() -> None:
    corpus = Corpus.of([([ord(c) for c in "ask:"], [ord(c) for c in "yes."])])
    assert corpus.show(WordTokenizer(), 0) == "ask:⟦yes.⟧"


def test_trained_rows_include_the_boundary_row_and_eos() -> None:
    # prompt 10 11 12 13, answer 20 21 2(EOS); a shorter neighbour is padded
    corpus = Corpus.of([([10, 11, 12, 13], [20, 21, 2]), ([10, 11, 12], [30, 2])])
    batches = Batches(corpus, num_steps=2, tokens_per_batch=64, max_len=99, device=CPU)
    batch = batches.build(batches.plan(None)[0])
    first = batch.tokens[0, 0:7].tolist()
    long, short = (0, 1) if first[3] == 13 else (1, 0)
    rows = {(int(r) // batch.length, int(r) % batch.length) for r in batch.rows}
    # Target row t predicts the token after t: 3 (the boundary row: last prompt token) predicts 20, 5 EOS; 6 is EOS.
    assert rows == {(long, 3), (long, 4), (long, 5), (short, 2), (short, 3)}
    # A chain starts at column i when its root (token i+1) and the next one were generated: roots 20, 21 and 30.
    starts = {(int(s) // batch.length, int(s) % batch.length) for s in batch.starts}
    assert starts == {(long, 3), (long, 4), (short, 2)}
    # all other rows that are followed by a real token
    given = {(int(r) // batch.length, int(r) % batch.length) for r in batch.prompt_rows}
    assert given == {(long, 0), (long, 1), (long, 2), (short, 0), (short, 1)}
    assert batch.num_tokens == 12


def test_batches_cover_an_epoch_once_and_stay_in_budget() -> None:
    corpus = Corpus.of([([1] * (5 + i % 40), [3, 2]) for i in range(100)])
    batches = Batches(corpus, 3, 256, 99, CPU)
    plan = batches.plan(7)
    assert sorted(i for part in plan for i in part) == list(range(100))
    assert [p.tolist() for p in plan] == [p.tolist() for p in batches.plan(7)]
    assert [p.tolist() for p in plan] != [p.tolist() for p in batches.plan(8)]
    assert len(plan) == len(batches.plan(8))
    for part in plan:
        batch = batches.build(part)
        assert len(part) * batch.length <= 256 and batch.tokens.shape == (len(part), batch.length + 3)
    with pytest.raises(ValueError, match="tokens_per_batch=16"):
        Batches(corpus, 3, 16, 99, CPU)


def test_long_sequences_are_cut() -> None:
    batches = Batches(Corpus.of([([1] * 10, [3] * 50)]), 2, 256, 20, CPU)
    batch = batches.build(batches.plan(None)[0])
    assert batch.num_tokens == 20 and batch.rows.tolist() == list(range(9, 19))


def test_sequences_without_a_row_to_train_are_left_out() -> None:
    """A prompt longer than max_len used to widen its whole batch, and gave no row."""
    corpus = Corpus.of([([1] * 6, [3] * 5), ([1] * 30, [3] * 5), ([1], [3])])
    for takes_prompts, planned in ((False, [0]), (True, [0, 1, 2])):
        batches = Batches(corpus, 2, 256, 20, CPU, takes_prompts=takes_prompts)
        assert sorted(int(i) for part in batches.plan(0) for i in part) == planned


def test_held_out_keeps_samples_of_a_prompt_together() -> None:
    corpus = Corpus.of([([k, k, k], [s]) for s in range(3) for k in range(20)])
    train, held = split_held_out(corpus, 4, seed=0)
    prompts = [{int(c.sequence(i)[0][0]) for i in range(len(c))} for c in (train, held)]
    assert not prompts[0] & prompts[1] and len(held) == 6 and len(train) + len(held) == 60


def test_hot_vocab_takes_frequent_answers_and_specials() -> None:
    corpus = Corpus.of([([50, 51, 51], [7, 7, 7, 9, 9, 4, 2])])
    hot = choose_hot_vocab(corpus, 3, 100, always=[0])
    assert hot.tolist() == [0, 7, 9] and corpus.answer_counts(100)[hot].tolist() == [0, 3, 2]
    ties = choose_hot_vocab(corpus, 4, 100)
    assert ties.tolist() == [2, 4, 7, 9]
    filled = choose_hot_vocab(corpus, 7, 100, always=[0])  # then prompt tokens by frequency, then low ids
    assert filled.tolist() == [0, 2, 4, 7, 9, 50, 51]
    assert choose_hot_vocab(corpus, 500, 60).tolist() == list(range(60))
    with pytest.raises(ValueError, match="token 51"):
        choose_hot_vocab(corpus, 3, 20)


def test_the_frame_is_found_for_any_template(tmp_path: Path) -> None:
    tokenizer = WordTokenizer()
    assert user_turn_frame(tokenizer) == ("sys|u:", "\0|a:")
    bare = SimpleNamespace(apply_chat_template=lambda messages, **_: messages[0]["content"])
    with pytest.raises(ValueError, match="writes nothing before or after a user turn"):
        user_turn_frame(bare)
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"question": "1+1?", "answer": "2"}) + "\n", "utf-8")
    assert chat_ids(read_questions(path), tokenizer) == [encode(tokenizer, "sys|u:1+1?\0|a:")]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"question": ', r"train.jsonl:3: not JSON \(Expecting value"),
        ('{"text": "1+1?"}', r"train.jsonl:3: not a prompt \(.*in \['text'\]\); expected one of .*'question'"),
        ("[1]", "train.jsonl:3: not a prompt"),
        ('{"question": 5}', "train.jsonl:3: not a prompt"),
        ('{"question": " "}', "train.jsonl:3: not a prompt"),
        pytest.param("[" * 10**5, "train.jsonl:3: not JSON", id="nested"),
        ("\udce9", "train.jsonl: expected UTF-8 text"),
        (None, "holds no prompts; expected one of"),
    ],
)
def test_bad_questions_are_named_by_their_line(tmp_path: Path, line: str | None, said: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text("" if line is None else f'{{"question": "1+1?"}}\n\n{line}\n', "utf-8", "surrogateescape")
    with pytest.raises(ValueError, match=said):
        chat_ids(read_questions(path), WordTokenizer())


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt_token_ids": [3]}', r"log:3: {'prompt_token_ids': \[3\]}: expected an object with lists of ids"),
        ("3", "log:3: 3: expected an object"),
        ('{"prompt_token_ids": "12", "token_ids": [3]}', "log:3: prompt_token_ids='12': expected a list of token ids"),
        ('{"prompt_token_ids": [3], "token_ids": [4.5]}', r"log:3: token_ids=\[4.5\] \(item 0 is 4.5\): expected"),
        ('{"prompt_token_ids": [-1], "token_ids": [3]}', r"item 0 is -1\): expected"),
        ('{"prompt_token_ids": [3], "token_ids": [Infinity]}', r"item 0 is inf\): expected"),
        ('{"prompt_token_ids": [2147483648], "token_ids": [3]}', r"item 0 is 2147483648\): expected"),
        ("\udce9", "expected UTF-8 text"),
    ],
)
def test_bad_lines_of_a_log_are_named(tmp_path: Path, line: str, said: str) -> None:
    good = '{"prompt_token_ids": [3, 4], "token_ids": [5], "note": "\u2028"}\n'
    (tmp_path / "log").write_text(good + "\n", "utf-8-sig")
    assert len(read_log(tmp_path / "log")) == 1
    (tmp_path / "log").write_text(good + "\n" + line, "utf-8", "surrogateescape")
    with pytest.raises(ValueError, match=said):
        read_log(tmp_path / "log")
    with pytest.raises(ValueError, match="nolog': no such file; expected what `specdec serve --log` writes"):
        read_log(tmp_path / "nolog")


def test_the_target_writes_user_turns() -> None:
    tokenizer = WordTokenizer()
    # kept; too short; cut off; repeated; kept; not requested any more
    engine = StubEngine(["hello\0", "a\0", "endless", "hello\0", "other\0", "third\0"])
    prompts = self_chat_prompts(engine, tokenizer, 2, seed=3, max_new_tokens=9, chunk=3)
    assert prompts == [encode(tokenizer, f"sys|u:{turn}\0|a:") for turn in ("hello", "other")]
    laws = [law for call in engine.calls for law in call["sampling"]]  # type: ignore[attr-defined]
    assert all(law.temperature == 1.0 for law in laws) and len({law.seed for law in laws}) == 6
    assert engine.calls[0]["stop_token_ids"] == [0] and engine.calls[0]["prompts"][0] == encode(tokenizer, "sys|u:")


def test_answers_keep_ids_and_mix_temperatures() -> None:
    prompts = [[1, 2, 3], [4, 5, 6]]
    jobs = answer_jobs(prompts, [0.0, 1.0], 3, seed=0)
    # the third sample would repeat prompt 0's greedy answer and gives prompt 1 a second sampled one
    assert [(j.prompt, j.sampling.temperature) for j in jobs] == [
        ([1, 2, 3], 0.0),
        ([4, 5, 6], 1.0),
        ([1, 2, 3], 1.0),
        ([4, 5, 6], 0.0),
        ([4, 5, 6], 1.0),
    ]
    assert len({j.sampling.seed for j in jobs}) == 5 and jobs[0].sampling == SamplingParams(seed=jobs[0].sampling.seed)
    corpus = answer(StubEngine(["ab\0", "", "c", "d\0", "e"]), jobs, 4, chunk=2)
    assert len(corpus) == 4 and corpus.sequence(0)[0].tolist() == [1, 2, 3, 97, 98, 0]
    assert corpus.num_answer_tokens == 3 + 1 + 2 + 1


def test_a_spent_budget_stops_cleanly() -> None:
    budget = Budget(minutes=0.0)
    corpus = answer(StubEngine([]), answer_jobs([[1, 2]], [0.0], 1, 0), 4, budget=budget)
    assert len(corpus) == 0 and budget.report()["requests"] == 0


def test_a_budget_plans_by_the_pace_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    budget, now = Budget(minutes=10, began=0.0), [0.0]
    monkeypatch.setattr("specdec.tools.train.regenerate.time.monotonic", lambda: now[0])
    assert Budget().affordable(80) == 80 and budget.affordable(80) == 20  # a quarter, to measure the pace
    budget.num_requests, now[0] = 20, 60.0  # 3 s per request
    assert budget.affordable(80) == 80
    now[0], budget.num_requests = 540.0, 180
    assert budget.affordable(80) == 20 and budget.affordable(400) == 0


def test_what_there_is_is_saved_after_every_chunk() -> None:
    sizes: list[int] = []
    jobs = answer_jobs([[1], [2], [3]], [0.0], 1, 0)
    answer(StubEngine(["a", "b", "c"]), jobs, 4, chunk=2, keep=lambda c: sizes.append(len(c)))
    assert sizes == [2, 3]
