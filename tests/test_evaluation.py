"""`Engine.score` compared with forwards of transformers; lm-eval on an engine compared with lm-eval's own HFLM."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import specdec
from specdec import shipped
from specdec.tools.commands.main import main
from tests.heads import random_draft
from tests.recurrent_models import recurrent_model
from tests.test_text import TOKENIZER
from tests.test_threads import join
from tests.tiny_models import DEVICE, tiny_model
from tests.train_models import target_with_words

PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16, 17, 18, 19], [3, 4]]
AFTER = [[8, 9], [10, 11, 12, 13, 14], [20], [44, 45, 46]]


def expected_scores(model, prompts, continuations):
    """Return scores by one forward of transformers per pair."""
    scores = []
    for before, after in zip(prompts, continuations, strict=True):
        ids = torch.tensor([before + after], device=model.device)
        with torch.no_grad():
            logits = model(ids).logits[0, len(before) - 1 : -1].float()
        wanted = ids[0, len(before) :]
        logprob = logits.log_softmax(-1).gather(1, wanted.unsqueeze(1)).sum()
        scores.append((float(logprob), bool((logits.argmax(-1) == wanted).all())))
    return scores


def assert_equal(got, expected):
    assert [g for _, g in got] == [g for _, g in expected]
    assert [s for s, _ in got] == pytest.approx([s for s, _ in expected], abs=1e-3)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama").to(DEVICE)


SETTINGS = {
    "one prefill": {},
    "a prefill for each": {"max_prefill_tokens": 9},
    "prompts in chunks": {"max_prefill_tokens": 4},
    "one row": {"max_batch": 1},
    "few slots": {"num_slots": 40, "page_size": 4},
    "recorded graphs": {"prefill_graph": "breakable", "prefill_buckets": (8, 16, 32), "cuda_graph": True},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_scores_equal_a_forward_of_transformers(model, name):
    settings = {"max_batch": 3, "max_seq_len": 32, "num_steps": 2, **SETTINGS[name]}
    engine = specdec.attach(model, random_draft(model, "eagle3").to(model.device), **settings)
    greedy = engine.generate(PROMPTS[0], max_new_tokens=4, ignore_eos=True).tokens
    prompts, after = [*PROMPTS, PROMPTS[0]], [*AFTER, greedy[0]]
    got = engine.score(prompts, after)
    assert_equal(got, expected_scores(model, prompts, after))
    assert got[-1].is_greedy and got[-1].logprob < 0
    assert engine.score(prompts, after) == got
    engine.check_integrity()
    if name == "recorded graphs":
        assert engine.report().runners["target_prefill"]["replays"] > 0
    engine.detach()


def test_choices_of_one_token_share_a_prefill(engine, model, monkeypatch):
    prompts, after = [[5, 6, 7]] * 3 + [[5, 6]] * 2, [[8], [9], [8], [7, 8], [8, 8]]  # all but the last read 5, 6, 7
    sizes, run = [], engine._core.prefill.target
    monkeypatch.setattr(engine._core.prefill, "target", lambda m, ids: sizes.append(len(ids)) or run(m, ids))
    got = engine.score(prompts, after)
    assert sizes == [5], "and the last one the first token of the others"
    assert_equal(got, expected_scores(model, prompts, after))


@pytest.fixture(scope="module")
def engine(model):
    engine = specdec.attach(model, algo="lookup", max_batch=2, max_seq_len=24)
    yield engine
    engine.detach()


@pytest.mark.parametrize(
    ("prompts", "after", "message"),
    [
        ([[5], []], [[6], [7]], "prompt 1 is empty"),
        ([[5], [6]], [[6], []], "continuation 1 is empty"),
        ([[5], [6]], [[6]], "1 continuations for 2 prompts"),
        ([[5]], [[10**6]], "holds token 1000000; the target's vocabulary"),
        ([[5] * 20], [[6] * 6], "prompt 0 has 20 tokens and its continuation 6: 25 are read, more than max_seq_len=24"),
        ([[5]], [], r"continuations=\[\]: expected"),
        ([[5]], ["text"], "continuations are text, but the engine has no tokenizer"),
    ],
)
def test_what_cannot_be_scored_is_named(engine, prompts, after, message):
    with pytest.raises(ValueError, match=message):
        engine.score(prompts, after)
    assert len(engine.score([[5] * 20], [[6] * 5])) == 1, "the longest that fits"
    engine.check_integrity()


def test_a_continuation_that_no_tokenizer_reads_is_named():
    engine = specdec.attach(tiny_model("llama"), tokenizer=TOKENIZER, max_seq_len=32)
    with pytest.raises(ValueError, match=r"continuation 1=.*surrogates not allowed"):
        engine.score(["a", "b"], ["c", "\ud800"])


def test_a_prefill_that_fails_gives_its_rows_back(engine, model, monkeypatch):
    def fail(*args):
        raise RuntimeError("no such luck")

    with monkeypatch.context() as patch:
        patch.setattr(engine._core.prefill, "target", fail)
        with pytest.raises(RuntimeError, match="no such luck"):
            engine.score(PROMPTS, AFTER)
    engine.check_integrity()
    assert engine._core.slot_tables.num_free_rows == 2
    assert_equal(engine.score(PROMPTS, AFTER), expected_scores(model, PROMPTS, AFTER))


def test_requests_that_hold_all_rows_are_let_end(engine, model):
    requests = engine.submit([[5, 6], [7, 8]], max_new_tokens=9, ignore_eos=True)
    engine.step()
    assert engine._core.slot_tables.num_free_rows == 0
    assert_equal(engine.score(PROMPTS, AFTER), expected_scores(model, PROMPTS, AFTER))
    while engine.step():
        pass
    assert [len(r.tokens) for r in requests] == [9, 9]
    engine.check_integrity()


def test_threads_score_and_generate_beside_one_another(engine, model):
    expected, texts = expected_scores(model, PROMPTS, AFTER), engine.generate(PROMPTS, max_new_tokens=12).tokens
    scores, others = [], []
    threads = [
        threading.Thread(target=lambda: scores.extend(engine.score(PROMPTS, AFTER) for _ in range(4))),
        threading.Thread(target=lambda: others.append(engine.generate(PROMPTS, max_new_tokens=12).tokens)),
    ]
    join(threads)
    assert len(scores) == 4 and others == [texts]
    for got in scores:
        assert_equal(got, expected)
    engine.check_integrity()


def test_a_detached_engine_scores_nothing():
    model = tiny_model("llama")
    engine = specdec.attach(model, max_batch=1, max_seq_len=16)
    engine.detach()
    with pytest.raises(specdec.DetachedError):
        engine.score([[5]], [[6]])


def test_lm_eval_and_ray_are_imported_by_nobody_else():
    code = "import sys, specdec.api, specdec.tools.commands.main; assert not {'lm_eval', 'ray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


QUESTIONS = [
    ("Tom has 3 apples and buys 4 more. How many apples has he?", "He has 3 + 4 = 7 apples.\n#### 7"),
    ("A box holds 6 eggs. How many eggs are in 2 boxes?", "2 boxes hold 2 * 6 = 12 eggs.\n#### 12"),
    ("Ann reads 5 pages a day. How many pages does she read in 3 days?", "She reads 5 * 3 = 15 pages.\n#### 15"),
]
COMMON = {"dataset_path": "json", "test_split": "test", "metadata": {"version": 1.0}}
TASKS: dict[str, dict[str, Any]] = {
    "toy_gsm8k": {
        "output_type": "generate_until",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["Question:", "<|im_end|>", "Now<|im_end|>"], "max_gen_toks": 20},
        "metric_list": [{"metric": "exact_match"}],
    },
    "toy_sampled": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["."], "do_sample": True, "temperature": 0.7, "top_k": 1, "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}],
    },
    "toy_choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_choice": ["7", "12", "15", "It cannot be said."],
        "doc_to_target": 0,
        "metric_list": [{"metric": "acc"}],
    },
    "toy_rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}} {{answer}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
}
LENGTH = 48  # so short that rolling windows are needed, and contexts lose their first tokens


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of task files with their data, in GSM8K's format."""
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "test.jsonl"
    data.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in QUESTIONS), "utf-8")
    for name, task in TASKS.items():
        files = {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")}
        whole = {"task": name, **COMMON, "dataset_kwargs": files, **task}
        (folder / f"{name}.yaml").write_text(json.dumps(whole), "utf-8")  # JSON is YAML
    return folder


def responses(lm: Any, folder: Path) -> dict[str, list[Any]]:
    """Return a model's answers to the items of every task."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    out = lm_eval.simple_evaluate(lm, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0, verbosity="ERROR")
    return {name: [sample["resps"] for sample in samples] for name, samples in out["samples"].items()}


def test_lm_eval_answers_equal_those_of_its_own_model(smollm2, tasks):
    pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM

    from specdec.tools.doors.evaluation import EngineLM

    model, tokenizer = smollm2
    for length in (1024, LENGTH):
        expected = responses(HFLM(model, tokenizer=tokenizer, max_length=length, batch_size=3), tasks)
        settings = {"max_batch": 2, "num_steps": 2, "max_prefill_tokens": 256, "prefix_cache": length > LENGTH}
        engine = specdec.attach(model, shipped.path(), tokenizer=tokenizer, max_seq_len=length, **settings)
        got = responses(EngineLM(engine), tasks)
        engine.check_integrity()
        assert engine.report().acceptance.num_rounds > 0
        assert (engine.report().prefix_cache.get("found", 0) > 0) == (length > LENGTH)
        engine.detach()
        assert got["toy_gsm8k"] == expected["toy_gsm8k"] and got["toy_sampled"] == expected["toy_sampled"]
        for ours, theirs in zip(got["toy_choices"], expected["toy_choices"], strict=True):
            assert_equal([r[0] for r in ours], [r[0] for r in theirs])
        rolling = [[r[0][0] for r in out["toy_rolling"]] for out in (got, expected)]
        assert rolling[0] == pytest.approx(rolling[1], abs=1e-3)
    assert all(r[0][0] for r in got["toy_gsm8k"]), "there are texts to compare"


def test_specdec_eval_is_lm_eval_with_the_model(smollm2, tasks, tmp_path, monkeypatch, capsys):
    pytest.importorskip("lm_eval")
    import specdec.evaluation

    asked = []
    monkeypatch.setattr(specdec.evaluation, "load", lambda *args: asked.append(args) or smollm2)
    settings = "pretrained=bundled,draft=shipped,max_length=128,max_batch=2,num_steps=2,dtype=float32"
    arguments = ["--model_args", settings, "--tasks", "toy_choices", "--include_path", str(tasks), "--limit", "2"]
    out = tmp_path / "results"
    monkeypatch.setattr(sys, "argv", ["specdec", "eval", *arguments, "--device", "cpu", "--output_path", str(out)])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    assert asked == [("bundled", "float32", "cpu")]
    assert "specdec" in capsys.readouterr().out
    (file,) = out.rglob("results_*.json")
    results = json.loads(file.read_text("utf-8"))
    assert results["config"]["model"] == "specdec" and 0 <= results["results"]["toy_choices"]["acc,none"] <= 1


def test_mistakes_in_model_args_are_named(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    import specdec.evaluation

    target = target_with_words(tmp_path)
    monkeypatch.setattr(specdec.evaluation, "load", lambda *args: target)
    make = specdec.evaluation.SpecdecLM
    with pytest.raises(ValueError, match=r"max_length=64 and max_seq_len"):
        make(max_length=64, max_seq_len=64)
    with pytest.raises(ValueError, match=r"batch_size='many': expected auto or an integer"):
        make(batch_size="many")
    with pytest.raises(ValueError, match="num_step=2: attach"):
        make(num_step=2)
    lm = make(algo="lookup", max_length=32, max_batch=1)
    with pytest.raises(ValueError, match="max_gen_toks=40 leaves no room"):
        lm._generate([("text", {"max_gen_toks": 40})])
    with pytest.raises(ValueError, match="a continuation has 40 tokens, the engine reads 32"):
        lm._loglikelihood_tokens([(None, [5], [6] * 40)])
    assert lm.engine.report().prefix_cache
    lm.engine.detach()
    lm = make(algo="lookup", max_length=32, prefix_cache=False)
    assert not lm.engine.report().prefix_cache
    lm.engine.detach()
    engine = specdec.attach(target[0], max_batch=1, max_seq_len=16)
    with pytest.raises(ValueError, match="the engine has no tokenizer"):
        specdec.tools.doors.evaluation.EngineLM(engine)
    engine.detach()


def test_a_reader_that_breaks_off_leaves_turn_and_rows(monkeypatch):
    """Even while its traceback, and with it every frame, is kept."""
    engine = specdec.attach(tiny_model("llama"), max_batch=2)
    free = engine.report().num_free_pages
    with monkeypatch.context() as patch:
        patch.setattr("specdec.core.engine.scoring.token_logprobs", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError) as kept:
            engine.score([[5, 6, 7]], [[8, 9]])
    assert not torch.is_inference_mode_enabled()
    with ThreadPoolExecutor(1) as other:
        assert len(other.submit(engine.generate, [[5, 6]], max_new_tokens=3).result(timeout=60).tokens[0]) == 3
    assert kept.value is not None and engine.report().num_free_pages == free


STEM = [5, 6, 7, 11, 12, 13, 14, 15, 16, 17, 18, 19]
CHOICES = [[3, 4], [3, 9, 9], [20]]
ALIKE = {  # prompts with common prefixes: settings, and tokens read of prompts and continuations
    "one prefill": ({}, 33),
    "pages": ({"page_size": 4}, 48),
    "a prefill for each": ({"max_batch": 1}, 33),
    "prompts in chunks": ({"max_prefill_tokens": 5}, 33),
    "few slots": ({"num_slots": 24, "max_batch": 3}, None),
    "beside a prefix cache": ({"prefix_cache": True}, 33),
}


@pytest.mark.parametrize("name", ALIKE)
def test_what_prompts_have_in_common_is_read_once(name, monkeypatch):
    """Questions after the same examples, and answers of one or more tokens to each."""
    model = tiny_model("llama").to(DEVICE)
    questions = [[*STEM, *rest] for rest in ([8, 9], [8, 10, 21, 22], [8, 9, 30])]
    prompts, after = [[q for q in questions for _ in CHOICES], CHOICES * len(questions)]
    settings, expected = ALIKE[name]
    engine = specdec.attach(model, algo="lookup", max_seq_len=24, **{"max_batch": 8, **settings})
    engine.generate([STEM], max_new_tokens=2)
    sizes, run = [], engine._core.prefill.target
    monkeypatch.setattr(engine._core.prefill, "target", lambda m, ids: sizes.append(len(ids)) or run(m, ids))
    assert_equal(engine.score(prompts, after), expected_scores(model, prompts, after))
    whole = sum(len({tuple(q + c[:-1]) for c in CHOICES}) for q in questions)
    assert len(sizes) <= whole
    assert sum(sizes) == expected or (expected is None and sum(sizes) < 0.7 * sum(len(q) + 2 for q in prompts))
    engine.check_integrity()
    first, sizes[:] = sum(sizes), []
    assert_equal(engine.score(prompts, after), expected_scores(model, prompts, after))
    assert sum(sizes) < first if name == "beside a prefix cache" else sum(sizes) == first, "kept from call to call"
    engine.detach()


def test_weights_that_change_are_read_anew():
    """Between two calls; within one call the caller must not change them."""
    model = tiny_model("llama").to(DEVICE)
    prompts, after = [STEM, STEM], [[3, 4], [8]]
    for prefix_cache in (False, True):
        engine = specdec.attach(model, algo=None, max_batch=2, max_seq_len=24, prefix_cache=prefix_cache)
        assert_equal(engine.score(prompts, after), expected_scores(model, prompts, after))
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
        assert_equal(engine.score(prompts, after), expected_scores(model, prompts, after))
        engine.detach()


@pytest.mark.usefixtures("python_sigint")
def test_a_call_that_ends_between_two_turns_leaves_nothing_to_the_next(monkeypatch):
    """Ctrl-C takes effect between turns, where no turn is interrupted."""
    model = tiny_model("llama").to(DEVICE)
    prompts, after = [STEM, STEM], [[3, 4], [8, 9]]
    engine = specdec.attach(model, algo=None, max_batch=1, max_seq_len=24)
    run = engine._core.prefill.target
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine._core.prefill, "target", lambda *args: (signal.raise_signal(signal.SIGINT), run(*args))[1])
        engine.score(prompts, after)
    assert engine._core.slot_tables.prefixes.num_pages > 0
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    assert_equal(engine.score(prompts, after), expected_scores(model, prompts, after))
    engine.detach()


def test_recurrent_targets_read_everything():
    model = recurrent_model("qwen3_next").to(DEVICE)
    engine = specdec.attach(model, algo=None, max_batch=4, max_seq_len=24)
    prompts = [STEM] * len(CHOICES)
    assert_equal(engine.score(prompts, CHOICES), expected_scores(model, prompts, CHOICES))
    assert engine._core.slot_tables.prefixes.num_pages == 0
    engine.detach()
