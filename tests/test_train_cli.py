"""`specdec train` end to end on a tiny target: corpora in shards, drafts of every algorithm, cards, resumption."""

from __future__ import annotations

import json
import math
import os
import re
from itertools import chain, count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from specdec import shipped
from specdec.api import attach
from specdec.core.errors import CheckpointError
from specdec.core.text.prompts import tokenizer_fingerprint
from specdec.reach.heads.load import detect_algo, save_head
from specdec.reach.targets.pretrained import load_draft, load_pretrained
from specdec.tools.commands.train import app, print_json
from specdec.tools.train import generation
from specdec.tools.train.adapt import LOGGED
from specdec.tools.train.data import Corpus
from specdec.tools.train.fit import checkpoint_of
from specdec.tools.train.generation import Generation, prepare, shard_jobs
from specdec.tools.train.objectives import survival_weights
from specdec.tools.train.trainer import LossWatch, Trainer
from tests.heads import random_block
from tests.train_models import save_target, tiny_corpus, tiny_target

SHORT = ["--tokens-per-batch", "256", "--chunk-rows", "64", "--dtype", "float32", "--device", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds target/, two corpora and questions.jsonl."""
    path = tmp_path_factory.mktemp("train")
    model = tiny_target()
    save_target(model, path / "target")
    for name, seed in (("a", 0), ("b", 1)):
        tiny_corpus(model, 20, seed).save(path / f"{name}.safetensors")
    questions = [{"question": " ".join(f"w{(7 * i + j) % 90 + 6}" for j in range(8)), "answer": ""} for i in range(6)]
    (path / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)), "utf-8")
    return path


def invoke(*args: object) -> dict[str, Any]:
    """Return the command's report, which is its last line."""
    result = CliRunner().invoke(app, [str(a) for a in args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.splitlines()[-1])


def fit(folder: Path, algo: str, out: Path, *more: object) -> dict[str, Any]:
    corpora = ["--corpus", folder / "a.safetensors", "--corpus", folder / "b.safetensors"]
    return invoke("fit", *corpora, "--out", out, "--algo", algo, "--target", folder / "target", *SHORT, *more)


HEADS = [
    ("eagle", ["--intermediate-size", "48"]),
    ("eagle3", ["--draft-vocab-size", "64", "--aux-layers", "0,1,3", "--num-layers", "2"]),
    ("nextn", ["--max-tokens", "2000", "--copy-layer"]),
    ("block", ["--num-steps", "3", "--draft-vocab-size", "64", "--aux-layers", "0,1,3", "--lr", "3e-3"]),
]


@pytest.mark.parametrize(("algo", "options"), HEADS)
def test_a_head_is_fitted_exported_and_drafts(folder: Path, tmp_path: Path, algo: str, options: list[str]) -> None:
    out = tmp_path / "head"
    report = fit(folder, algo, out, "--epochs", 4, *options)
    assert report["algo"] == algo and report["sequences"] == 38 and report["tau"] > 1 and report["steps"] > 2
    assert report["exported_bytes"] == (out / "model.safetensors").stat().st_size
    card = (out / "README.md").read_text("utf-8")
    assert "draft head for" in card and "simulated tau" in card and "{" not in card
    assert detect_algo(out) == algo
    layers = [name for name in load_file(out / "model.safetensors") if name.endswith("o_proj.weight")]
    assert len(layers) == {"eagle3": 2, "block": 2}.get(algo, 1)
    drafts_the_targets_text(load_pretrained(folder / "target")[0], folder, out)


def drafts_the_targets_text(model: Any, folder: Path, draft: Path) -> None:
    engine = attach(model, draft, num_steps=2, max_batch=2, max_seq_len=64)
    prompt = Corpus.load(folder / "a.safetensors").sequence(0)[0][:8].tolist()
    said = engine.generate([prompt], max_new_tokens=12, ignore_eos=True)
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert said.tokens[0] == expected[0, 8:].tolist()
    engine.detach()


SMALL = ["--hidden-size", "32", "--num-heads", "2", "--num-layers", "2", "--intermediate-size", "64"]


@pytest.mark.parametrize("file_format", ["gguf", "safetensors"])
def test_a_small_model_is_distilled_exported_and_drafts(folder: Path, tmp_path: Path, file_format: str) -> None:
    pytest.importorskip("gguf")
    out = tmp_path / "draft"
    options = [*SMALL, "--file-format", file_format, "--prompt-weight", "0.1"]
    report = fit(folder, "standalone", out, "--epochs", 4, *options)
    assert report["algo"] == "standalone" and report["tau"] > 1 and report["layers"] == 2
    assert "Standalone draft model" in (out / "README.md").read_text("utf-8") and detect_algo(out) == "standalone"
    note = json.loads((out / "specdec.json").read_text("utf-8"))
    model, tokenizer = load_pretrained(folder / "target")
    assert note["tokenizer_sha256"] == tokenizer_fingerprint(tokenizer) and note["vocab_size"] == 96
    drafts_the_targets_text(model, folder, out)
    again = ["--init", out, "--max-steps", 1, "--lr", "1e-9", "--file-format", "safetensors", "--prompt-weight", "0.1"]
    assert fit(folder, "standalone", tmp_path / "again", *again)["loss"] == pytest.approx(report["loss"], rel=1e-3)


def test_a_fit_goes_on_from_its_checkpoint_and_from_a_head(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "head"
    first = fit(folder, "eagle", out, "--max-steps", 3)
    second = fit(folder, "eagle", out, "--max-steps", 5, "--resume")
    assert (first["steps"], second["steps"]) == (3, 5)
    with pytest.raises(ValueError, match=r"holds config.json, model.safetensors already: .*--overwrite"):
        fit(folder, "eagle3", out, "--max-steps", 1)
    with pytest.raises(ValueError, match=r"holds config.json, model.safetensors already: .*--overwrite"):
        invoke("run", "--out", out, "--max-steps", 1, "--chats", 1, "--target", folder / "target")
    small = [*SMALL, "--max-steps", 1, "--overwrite", "--file-format", "safetensors"]
    other = tmp_path / "other"
    for algo, more in (("nextn", ["--max-steps", 1]), ("standalone", small)):
        fit(folder, algo, other, *more)
        assert detect_algo(other) == algo
    tuned = fit(folder, "eagle", tmp_path / "tuned", "--max-steps", 1, "--lr", "1e-9", "--init", out)
    assert tuned["loss"] == pytest.approx(second["loss"], rel=1e-3)


def test_a_head_goes_on_with_another_draft_vocabulary(folder: Path, tmp_path: Path) -> None:
    fit(folder, "eagle3", tmp_path / "head", "--max-steps", 1, "--draft-vocab-size", 40, "--aux-layers", "0,1,3")
    again = ["--max-steps", 1, "--lr", "1e-9", "--init", tmp_path / "head", "--draft-vocab-size", 64]
    report = fit(folder, "eagle3", tmp_path / "wider", *again)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("head", "wider"))
    assert report["draft_vocab_size"] == len(after["d2t"]) == 64 and len(before["d2t"]) == 40
    assert "lm_head.weight" not in after  # the target has these rows
    torch.testing.assert_close(after["fc.weight"], before["fc.weight"], atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match=r"num_layers=0: expected"):
        fit(folder, "eagle3", tmp_path / "no", "--max-steps", 1, "--num-layers", 0)
    with pytest.raises(ValueError, match=r"intermediate_size: .* takes only draft_vocab_size"):
        fit(folder, "eagle3", tmp_path / "no", *again, "--intermediate-size", 8)
    after["lm_head.weight"] = torch.zeros(64, load_pretrained(folder / "target")[0].config.hidden_size)
    save_file(after, tmp_path / "wider" / "model.safetensors")
    with pytest.raises(ValueError, match="draft_vocab_size=40: the output head of the draft has rows of its own"):
        fit(folder, "eagle3", tmp_path / "no", "--max-steps", 1, "--init", tmp_path / "wider", "--draft-vocab-size", 40)


def test_a_head_is_adapted_and_never_ends_worse(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head, log = tmp_path / "head", tmp_path / "log.jsonl"
    fit(folder, "eagle", head, "--max-steps", 2)
    stored = load_file(head / "model.safetensors")
    noise = torch.randn(stored["fc.weight"].shape, generator=torch.Generator().manual_seed(0))
    save_file(stored | {"fc.weight": 0.1 * noise}, head / "model.safetensors")  # as if made for another model
    corpus = Corpus.merge([Corpus.load(folder / f"{name}.safetensors") for name in "ab"])
    texts = [corpus.sequence(i) for i in range(len(corpus))]
    lines = [{"prompt_token_ids": t[~a].tolist(), "token_ids": t[a].tolist()} for t, a in texts]
    log.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    common = ["--dtype", "float32", "--device", "cpu"]
    target, good = folder / "target", tmp_path / "better"
    better = invoke("adapt", target, head, *common, "--from-log", log, "--minutes", 0.03, "--out", good, "--lr", 1e-2)
    assert better["is_better"] and better["tau"] > better["tau_before"]
    prompts = ["--prompts", folder / "questions.jsonl", "--max-new-tokens", 8]
    short = ["--from-log", tmp_path / "short", "--minutes", 0.01, "--out", tmp_path / "none"]
    short[1].write_text("\n".join(json.dumps({name: [5 + i] for name in LOGGED}) for i in range(9)), "utf-8")
    with pytest.raises(ValueError, match=r"no held-out answer has two tokens after the first num_steps=3 .*: expected"):
        invoke("adapt", target, head, *common, *short)
    for log_now in (short[1].read_text("utf-8"), f"{short[1].read_text('utf-8')}\n{log.read_text('utf-8')}"):  # it grew
        short[1].write_text(log_now, "utf-8")
        with pytest.raises(ValueError, match=r"lr=0\.0: expected a finite number above 0"):
            invoke("adapt", target, head, *common, *short, "--lr", 0)
    assert len(Corpus.load(tmp_path / "none.corpus.safetensors")) == 9 + len(corpus)
    evaluate, worse = Trainer.evaluate, count()

    def grows_worse(trainer: Trainer) -> dict[str, Any]:
        found = evaluate(trainer)
        return {**found, "tau": found["tau"] - next(worse)}

    monkeypatch.setattr(Trainer, "evaluate", grows_worse)
    ruined = invoke("adapt", target, good, *common, *prompts, "--minutes", 0.01, "--out", tmp_path / "as", "--lr", 0.3)
    assert next(worse) == 2
    assert not ruined["is_better"] and ruined["tau"] == ruined["tau_before"]
    kept, given = (load_file(path / "model.safetensors") for path in (tmp_path / "as", good))
    assert all(torch.equal(kept[name], given[name]) for name in given)
    with pytest.raises(ValueError, match="neither of prompts"):
        invoke("adapt", target, head, *common, "--out", tmp_path / "none")


def test_the_card_tells_no_acceptance_that_was_not_measured(folder: Path, tmp_path: Path) -> None:
    """Without held-out text it used to say that tau is 0."""
    fit(folder, "eagle", tmp_path / "h", "--max-steps", 1, "--held-out", 0)
    card = (tmp_path / "h" / "README.md").read_text("utf-8")
    assert "| held out sequences | 0 |" in card and "tau" not in card and "draft step" not in card


@pytest.mark.parametrize("command", ["fit", "run", "adapt"])
def test_a_draft_does_not_replace_its_target(command: str, folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    save_target(tiny_target(), target)
    weights, short = (target / "model.safetensors").read_bytes(), ["--algo", "eagle", "--max-steps", 1]
    source = {
        "fit": ["--target", target, "--corpus", folder / "a.safetensors", *short],
        "run": ["--target", target, "--gsm8k", folder / "questions.jsonl", "--max-new-tokens", 12, *short],
        "adapt": [target, shipped.path("smollm2-135m-instruct-eagle3"), "--prompts", folder / "questions.jsonl"],
    }
    with pytest.raises(ValueError, match=r"target' is the folder of the target: expected another one"):
        invoke(command, *source[command], "--out", target, "--overwrite")
    assert (target / "model.safetensors").read_bytes() == weights


def test_blocks_shorter_than_the_recipe_are_adapted_and_longer_steps_refused_before_generating(
    folder: Path, tmp_path: Path
) -> None:
    target, prompts = folder / "target", [folder / "questions.jsonl", "--max-new-tokens", 12, *SHORT[-4:]]
    head = random_block(tiny_target(), block_size=5, predicts_next=False, markov_rank=0)
    save_head(tmp_path / "head", head, dtype=torch.float32, num_layers=5)
    got = invoke("adapt", target, tmp_path / "head", "--prompts", *prompts, "--minutes", 0.005, "--out", tmp_path / "a")
    assert len(got["accept_at"]) == 4 and got["recipe"].startswith("4 steps")
    new = ["--algo", "block", "--num-steps", 9, "--max-steps", 1, "--out", tmp_path / "new"]
    with pytest.raises(ValueError, match="num_steps=9: the head drafts blocks of 8 rows; expected at most 8"):
        invoke("run", "--target", target, "--gsm8k", *prompts, *new)
    assert not (tmp_path / "new.corpus.safetensors").exists()


def test_a_small_model_that_gguf_cannot_hold_is_adapted_as_it_is(folder: Path, tmp_path: Path) -> None:
    """Such as Llama 3.2 with its scaled ropes: our GGUF files have no scaling, so exported drafts lost it."""
    rope = {"rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "original_max_position_embeddings": 32}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    sizes = dict(vocab_size=96, hidden_size=48, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    config = LlamaConfig(**sizes, max_position_embeddings=256, tie_word_embeddings=True, rope_parameters=rope)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "small")
    prompts = ["--prompts", folder / "questions.jsonl", "--max-new-tokens", 8, "--minutes", 0.005, *SHORT[-4:]]
    invoke("adapt", folder / "target", tmp_path / "small", *prompts, "--out", tmp_path / "out")
    assert load_draft(tmp_path / "out", dtype=torch.float32, device="cpu")[0].config.rope_parameters == rope
    for changes, said in (({}, "hidden_size=48: GGUF's"), ({"hidden_size": 64}, r"rope_type='llama3': .* safetensors")):
        LlamaForCausalLM(LlamaConfig(**{**config.to_dict(), **changes, "head_dim": 24})).save_pretrained(tmp_path / "s")
        with pytest.raises(ValueError, match=said):
            fit(folder, "standalone", tmp_path / "no", "--max-steps", 1, "--init", tmp_path / "s")


def test_a_corpus_that_would_be_empty_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "self_chat_prompts", lambda *args, **options: [])
    with pytest.raises(ValueError, match=r"of 2 chats of shard 0/1 the target wrote no user turn that can be kept"):
        prepare(tmp_path / "c", Generation(chats=2, max_new_tokens=4), target=str(folder / "target"), device="cpu")
    assert not (tmp_path / "c").exists()


def test_what_a_run_left_is_not_overwritten_unasked(folder: Path, tmp_path: Path) -> None:
    """An interrupted run has no draft yet: only its corpus and its checkpoint."""
    corpus, checkpoint = tmp_path / "h.corpus.safetensors", tmp_path / "h.checkpoint.pt"
    for file in (corpus, checkpoint):
        file.write_bytes(b"hours of work")
    run = ["run", "--out", tmp_path / "h", "--max-steps", 1, "--chats", 1, "--target", folder / "target"]
    for args in (run, ["fit", "--corpus", folder / "a.safetensors", *run[1:5]]):
        with pytest.raises(
            ValueError, match=r"h.checkpoint.pt' is a checkpoint of another run: .*--resume.*--overwrite"
        ):
            invoke(*args)
    with pytest.raises(ValueError, match=r"checkpoint .*h.checkpoint.pt' cannot be read"):
        fit(folder, "eagle", tmp_path / "h", "--max-steps", 1, "--resume")
    checkpoint.unlink()
    for args in (run, ["data", "--out", corpus, *run[5:]]):
        with pytest.raises(ValueError, match=r"exists already: train on it with .*fit --corpus.*--overwrite"):
            invoke(*args)
    with pytest.raises(ValueError, match=r"there is no checkpoint .* to resume"):
        invoke("fit", "--corpus", "nowhere", *run[1:5], "--resume")
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({name: [5, 6] for name in LOGGED}), "utf-8")
    fit(folder, "eagle", tmp_path / "head", "--max-steps", 1)
    with pytest.raises(ValueError, match=r"h.corpus.safetensors' exists already"):
        invoke("adapt", folder / "target", tmp_path / "head", "--from-log", log, "--out", tmp_path / "h")
    assert corpus.read_bytes() == b"hours of work"
    (tmp_path / "mine" / "custom_generate").mkdir(parents=True)
    for name in ("custom_generate/generate.py", "README.md"):
        (tmp_path / "mine" / name).write_text("mine")
        with pytest.raises(ValueError, match=rf"holds .*{name}.* already: .*--overwrite"):
            fit(folder, "eagle", tmp_path / "mine", "--max-steps", 1)


def test_what_cannot_be_trained_is_told_before(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"no answer has a token after the first num_steps=3 .* before max_len=8"):
        fit(folder, "eagle", tmp_path / "a", "--max-len", 8, "--max-steps", 1)
    for options, said in (
        (["--num-heads", 0], "num_heads=0: expected an integer of at least 1"),
        (["--num-heads", 2, "--num-kv-heads", 3], "num_kv_heads=3: expected a divisor of num_heads=2"),
        (
            ["--num-heads", 2, "--hidden-size", 30, "--file-format", "safetensors"],
            "hidden_size=30: expected a multiple of twice num_heads=2",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            fit(folder, "standalone", tmp_path / "b", "--max-steps", 1, *options)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="is a checkpoint of another run"):
        checkpoint_of(Path()).touch()
        fit(folder, "eagle", Path(), "--max-steps", 1)


def test_a_draft_that_cannot_be_made_is_told_before_its_corpus_is(folder: Path, tmp_path: Path) -> None:
    """Generating the corpus may take hours."""
    where = ["--target", folder / "target", *SHORT[-4:], "--out", tmp_path / "h"]
    questions = ["--max-new-tokens", 12, "--max-steps", 1, "--gsm8k", folder / "questions.jsonl"]
    for options, said in (
        (["--algo", "standalone"], "64 wide; use that or less"),
        (["--algo", "eagle3"], "name three in aux_layers"),
    ):
        with pytest.raises(ValueError, match=said):
            invoke("run", *options, *questions, *where)
        assert not list(tmp_path.iterdir())
    foreign = shipped.path()
    with pytest.raises(CheckpointError, match="another target"):
        invoke("adapt", folder / "target", foreign, "--prompts", folder / "questions.jsonl", *SHORT[-4:], *where[-2:])
    assert not list(tmp_path.iterdir())


def test_steps_of_which_no_row_is_trained_weigh_alike() -> None:
    """A batch of prompts that are longer than max_len."""
    assert survival_weights(torch.zeros(3, 0, dtype=torch.bool)).isfinite().all()


def contents(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_run_that_diverges_ends_with_its_step_and_leaves_the_older_draft(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "head"
    fit(folder, "eagle", out, "--max-steps", 1)
    before = contents(tmp_path)
    told = r"the loss is not finite at step 2, so .*lower lr=1e\+37.*--lr 2\.5e\+36.*Nothing was exported, and a draft"
    with pytest.raises(FloatingPointError, match=told):
        fit(folder, "eagle", out, "--max-steps", 3, "--lr", "1e37", "--overwrite")
    with pytest.raises(FloatingPointError, match=r"the held-out loss is not finite after step 1, so .*lower lr"):
        fit(folder, "eagle", out, "--max-steps", 1, "--lr", "1e37", "--overwrite")
    assert contents(tmp_path) == before, "the draft and its checkpoint"


def test_a_start_that_is_not_finite_is_not_blamed_on_the_learning_rate() -> None:
    watch = LossWatch(1e-3, torch.device("cpu"))
    for step, loss in enumerate([1.0, math.inf, 1.0, math.nan], 1):
        watch.note(step, torch.tensor(loss))
    with pytest.raises(FloatingPointError, match=r"at step 2, .*lower lr=0\.001"):
        watch.check(4, [torch.ones(2)])
    broken = LossWatch(1e-3, torch.device("cpu"))
    broken.check(0, [torch.ones(2)])
    broken.note(1, torch.tensor(math.nan))
    with pytest.raises(FloatingPointError, match="at step 1, so the training was ended; no update came before it"):
        broken.check(1, [torch.ones(2)])
    with pytest.raises(FloatingPointError, match=r"the weights are not finite after step 3, .*lower lr"):
        LossWatch(1e-3, torch.device("cpu")).check(3, [torch.ones(2), torch.tensor([1.0, math.nan])])


def test_the_last_line_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"loss": [math.nan, 1.5], "data": {"pace": -math.inf, "name": "NaN"}, "steps": 3})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    said = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert said == {"loss": [None, 1.5], "data": {"pace": None, "name": "NaN"}, "steps": 3}


def test_a_corpus_is_made_in_disjoint_shards(folder: Path, tmp_path: Path) -> None:
    common = ["--gsm8k", folder / "questions.jsonl", "--target", folder / "target", "--max-new-tokens", 6]
    common += ["--samples-per-question", 2, "--max-batch", 4, "--chats", 4, "--temperatures", "0,1", "--device", "cpu"]
    made = []
    for shard in ("0/2", "1/2"):
        out = tmp_path / f"{shard[0]}.safetensors"
        report = invoke("data", "--out", out, "--shard", shard, *common)
        made.append(Corpus.load(out))
        assert report["shard"] == shard and report["answers"]["gen_tokens_per_s"] > 0 and report["questions"] == 6
    seen = [{tuple(c.sequence(i)[0].tolist()) for i in range(len(c))} for c in made]
    assert not seen[0] & seen[1] and len(seen[0]) >= 6


def test_shards_share_out_the_same_jobs() -> None:
    questions = [[i, i + 1, i + 2] for i in range(7)]
    whole = Generation(chats=5, samples_per_question=2)
    parts = [Generation(chats=5, samples_per_question=2, shard=f"{i}/3") for i in range(3)]
    jobs = [shard_jobs(part, questions, []) for part in parts]
    assert sorted(map(repr, chain.from_iterable(jobs))) == sorted(map(repr, shard_jobs(whole, questions, [])))
    assert [part.num_chats for part in parts] == [2, 2, 1] and len({part.turn_seed for part in parts}) == 3
    for wrong in ("3/3", "1", "-1/2", 1):
        with pytest.raises(ValueError, match="expected i/n"):
            Generation(chats=1, shard=wrong)
    with pytest.raises(ValueError, match="nothing to generate"):
        Generation()


def test_run_says_what_its_user_can_do_about_too_few_prompts(folder: Path, tmp_path: Path) -> None:
    questions = (folder / "questions.jsonl").read_text("utf-8").splitlines()
    (tmp_path / "few.jsonl").write_text("\n".join(questions[:1]), "utf-8")
    options = ["--algo", "eagle", "--max-new-tokens", 4, "--max-steps", 1, "--target", folder / "target", *SHORT[-4:]]
    with pytest.raises(ValueError, match=r"of 1 prompts; .*: --gsm8k with more questions") as told:
        invoke("run", "--gsm8k", tmp_path / "few.jsonl", "--out", tmp_path / "h", *options)
    run = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).stdout
    named = re.findall(r"--[a-z0-9-]+", str(told.value).partition("`specdec train fit`")[0])
    assert len(named) == 3 and all(option in run for option in named)


def test_places_that_cannot_be_written_are_named_before_any_work(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation, file = Generation(gsm8k=folder / "questions.jsonl"), folder / "questions.jsonl"
    with pytest.raises(ValueError, match=r"out='.*' is a folder: expected a file for the corpus"):
        prepare(tmp_path, generation, target="nowhere", overwrite=True)
    with pytest.raises(ValueError, match=r"cannot be written: '.*questions.jsonl' is a file, expected a folder"):
        prepare(file / "c.safetensors", generation, target="nowhere")
    with pytest.raises(ValueError, match=r"cannot be written: '.*questions.jsonl' is a file, expected a folder"):
        fit(folder, "eagle", file / "head", "--max-steps", 1)
    with pytest.raises(ValueError, match="held_out=-1: expected an integer of at least 0"):
        fit(folder, "eagle", tmp_path / "head", "--held-out", -1, "--max-steps", 1)
    (tmp_path / "theirs" / "ours").mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "theirs")  # root may write everywhere
    with pytest.raises(ValueError, match=r"c' cannot be written: no permission to write to '.*theirs'"):
        prepare(tmp_path / "theirs" / "c", generation, target="nowhere")
    for out in ("new", "ours"):  # the checkpoint is written next to the folder
        with pytest.raises(ValueError, match=r"cannot be written: no permission to write to '.*theirs'"):
            fit(folder, "eagle", tmp_path / "theirs" / out, "--max-steps", 1)


def test_run_generates_and_fits(folder: Path, tmp_path: Path) -> None:
    options = ["--gsm8k", folder / "questions.jsonl", "--max-new-tokens", 12, "--max-batch", 8, "--max-steps", 2]
    with pytest.raises(ValueError, match=r"the longest prompt has \d+ tokens, and max_new_tokens=256: .* up to 256"):
        invoke("data", "--out", tmp_path / "c", *options[:2], "--target", folder / "target")
    bad = {"chats": -1, "max_batch": 0, "gen_minutes": 0.0, "num_questions": 0, "temperatures": 0.7}
    for name, value in bad.items():
        with pytest.raises(ValueError, match=f"{name}={value}: expected"):
            Generation(**{"chats": 1, name: value})
    report = invoke(
        "run", "--out", tmp_path / "h", "--algo", "nextn", *options, "--target", folder / "target", *SHORT[-4:]
    )
    assert report["steps"] == 2 and report["data"]["sequences"] > 0
    assert (tmp_path / "h.corpus.safetensors").is_file() and (tmp_path / "h" / "config.json").is_file()
