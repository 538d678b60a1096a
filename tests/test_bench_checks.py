"""`specdec bench gsm8k` and `lossless`: correct modes pass, and one broken on purpose is found and named."""

import json
import sys
from pathlib import Path

import pytest
import torch

from specdec import SamplingParams
from specdec.core.prefill.graphs import PrefillGraphs
from specdec.reach.heads.load import save_head
from specdec.tools.measure import bitwise, gsm8k, lossless, statistics
from tests.commands import run
from tests.heads import random_head
from tests.tiny_models import tiny_model
from tests.train_models import save_target, tiny_target

SMALL = {"max_prefill_tokens": 64, "prefill_buckets": (16, 64)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target, head, and data: 12 GSM8K items whose answers are the target's first tokens, two MT-bench questions."""
    root = tmp_path_factory.mktemp("checks")
    model = tiny_target()
    save_target(model, root / "target")
    save_head(root / "head", random_head(model), lm_head_from_target=False, dtype=torch.float32)
    items = []
    for i in range(12):
        prompt = [4, 30 + i, 60 - i, 2, 5]  # the question in the chat template
        (first,) = lossless.reference(model, prompt, 1)
        items.append({"question": f"w{30 + i} w{60 - i}", "answer": f"w{30 + i} w40 w41 #### {first}"})
    write_lines(root / "gsm8k" / "test.jsonl", items)
    turns = [{"question_id": i, "category": "writing", "turns": [f"w{i} w9", "w50"]} for i in (7, 8)]
    write_lines(root / "prompts" / "mt_bench.jsonl", turns)
    return root


def write_lines(path: Path, records: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in records), "utf-8")


def gsm8k_run(capsys, monkeypatch, folder: Path, *arguments: object) -> tuple[int, dict, list[str], str]:
    monkeypatch.setattr("specdec.tools.commands.bench_checks.CPU_SETTINGS", {**SMALL, "max_seq_len": 64})
    common = ("--target", folder / "target", "--draft", folder / "head", "--data", folder, "--device", "cpu")
    counts = ("--json", "--limit", 12, "--answers", 12, "--mode", "off,breakable")
    code, lines, errors = run(capsys, monkeypatch, "bench", "gsm8k", *common, *counts, *arguments)
    return code, json.loads(lines[-1]), lines, errors


def break_mode(monkeypatch, mode: str, by: float) -> None:
    """Perturb the hidden states of the target's prefills in one mode."""
    sound = PrefillGraphs.target

    def broken(self, metadata, ids, embedded=None):
        hidden, aux = sound(self, metadata, ids, embedded)
        return (hidden + by * hidden.roll(1, -1) if self.mode == mode else hidden), aux

    monkeypatch.setattr(PrefillGraphs, "target", broken)


def test_sound_modes_pass(folder, tmp_path, capsys, monkeypatch):
    code, found, _, _ = gsm8k_run(capsys, monkeypatch, folder, "--max-new-tokens", 8, "--out", tmp_path)
    rows = found["rows"]
    assert code == 0 and found["failed"] == []
    assert [(r["mode"], r["draft"]) for r in rows] == [
        ("off", None),
        ("breakable", None),
        ("off", "eagle3"),
        ("breakable", "eagle3"),
    ]
    assert all((r["items"], r["answers"], r["equal"]) == (12, 12, 12) for r in rows)
    assert all(r["mcnemar_p"] == 1.0 and abs(r["nll_difference"]) < 1e-5 for r in rows)
    assert rows[3]["tau"] >= rows[0]["tau"] == 1.0
    (file,) = tmp_path.glob("*.json")
    assert file.name.startswith("gsm8k_target_") and json.loads(file.read_text())["rows"] == rows


def test_a_broken_mode_is_found(folder, capsys, monkeypatch):
    break_mode(monkeypatch, "breakable", 2.0)
    code, found, lines, errors = gsm8k_run(capsys, monkeypatch, folder, "--max-new-tokens", 1)
    broken = [r for r in found["rows"] if r["mode"] == "breakable"]
    assert code == 1 and len(broken) == 2
    for row in broken:
        low, high = row["nll_ci95"]
        assert (row["only_here"], row["only_base"] >= 10) == (0, True) and row["mcnemar_p"] < 0.01
        assert not low <= 0 <= high and abs(row["nll_difference"]) > gsm8k.TOLERANCE
        assert f"0 answers right only here, {row['only_base']} only in the base: McNemar p = " in row["says"]
    text = "\n".join(found["failed"])
    for name in ("breakable, plain decoding", "breakable, EAGLE-3"):
        assert f"float32 {name}: answers differ beyond chance: 0 right only here" in text
        assert f"float32 {name}: likelihoods differ beyond chance" in text
        assert any(line.startswith(f"float32 {name}: 0 answers right only here") for line in lines)
    assert "off" not in {r["mode"] for r in found["rows"] if any(f"float32 {r['mode']}," in f for f in found["failed"])}
    assert errors.count("differs: float32 breakable") == len(found["failed"])


def test_rounding_is_no_difference(folder, capsys, monkeypatch):
    """A systematic difference, so that its interval excludes 0, but below the tolerance."""
    break_mode(monkeypatch, "breakable", 1e-5)
    code, found, _, _ = gsm8k_run(capsys, monkeypatch, folder, "--draft", "none", "--max-new-tokens", 4)
    (_, row) = found["rows"]
    assert row["nll_difference"] != 0 and code == 0


def test_what_makes_a_row_fail():
    row = {"dtype": "bfloat16", "mode": "piecewise", "draft": "eagle3", "nll_difference": 0.0, "nll_ci95": [0, 0]}
    row |= {"only_here": 3, "only_base": 9, "mcnemar_p": statistics.mcnemar(3, 9), "answers": 200, "equal": 39}
    row |= {"near_ties": 161, "near_tie": 0.25, "runners": {"target_prefill": {"replays": 5}}}
    assert "piecewise, EAGLE-3: 3 answers right only here, 9 only in the base: McNemar p = 0.15" in gsm8k.in_words(row)
    assert gsm8k.problems(row) == []
    for changes, words in (
        ({"near_ties": 160}, "1 answers differ where there is no near-tie"),
        ({"dtype": "float32", "near_tie": 0.0}, "161 answers differ"),
        ({"mcnemar_p": 0.009}, "McNemar p = 0.009 < 0.01"),
        ({"nll_difference": 2e-3, "nll_ci95": [1e-3, 3e-3]}, "likelihoods differ beyond chance"),
        ({"mode": "off"}, "5 prefills were replayed"),
        ({"runners": {"target_prefill": {"replays": 0}}}, "0 prefills were replayed"),
    ):
        (problem,) = gsm8k.problems({**row, **changes})
        assert words in problem
    assert not gsm8k.problems({**row, "nll_difference": 2e-3, "nll_ci95": [-1e-3, 5e-3]}), "chance"
    assert not gsm8k.problems({**row, "nll_difference": 5e-4, "nll_ci95": [4e-4, 6e-4]}), "rounding"


def test_mcnemar_and_bootstrap():
    assert statistics.mcnemar(0, 0) == 1.0 and statistics.mcnemar(5, 5) == 1.0
    assert statistics.mcnemar(0, 10) == statistics.mcnemar(10, 0) == pytest.approx(2 / 2**10)
    values = torch.randn(400, generator=torch.Generator().manual_seed(0)).double() + 0.05
    low, high = statistics.bootstrap_interval(values.tolist())
    half = 1.96 * float(values.std()) / 20
    assert (low, high) == pytest.approx((float(values.mean()) - half, float(values.mean()) + half), abs=0.01)
    assert statistics.bootstrap_interval(values.tolist()) == (low, high), "of a fixed seed"
    assert statistics.bootstrap_interval([0.0] * 5) == (0.0, 0.0)
    with pytest.raises(ValueError, match="differences is empty"):
        statistics.bootstrap_interval([])


def test_scipy_is_asked_for_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ValueError, match=r"pip install scipy, or pip install 'specdec-toolkit\[bench\]'"):
        statistics.mcnemar(1, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gsm8k", "--mode", "fast"), "--mode 'fast': expected off, breakable, piecewise or compiled"),
        (("gsm8k", "--dtype", "int8"), "dtype='int8'"),
        (("lossless", "--batch", "x"), "--batch 'x'"),
        (("lossless", "--check", "logits"), "--check 'logits': expected any of text, bits"),
        (("lossless", "--way", "prefix"), "--way 'prefix': expected any of default, chunks, prefixes, mixed, whole"),
    ],
)
def test_mistakes_are_one_line(folder, capsys, monkeypatch, arguments, message):
    code, _, errors = run(capsys, monkeypatch, "bench", *arguments, "--data", folder, "--target", folder / "target")
    assert code == 2 and errors.startswith("specdec: ") and message in errors and len(errors.splitlines()) == 1


def test_gsm8k_needs_gold_solutions(tmp_path, folder, capsys, monkeypatch):
    write_lines(tmp_path / "gsm8k.jsonl", [{"turns": ["w7"]}])
    code, _, errors = run(capsys, monkeypatch, "bench", "gsm8k", "--data", tmp_path, "--target", folder / "target")
    assert code == 2 and "item 1 has no `question` and `answer`" in errors


def test_lossless_compares_greedy_and_sampled_text():
    """On a tiny target: equal to generate and to itself, and differences are counted."""
    model, draft, prompts = tiny_model("llama"), random_head(tiny_model("llama")), [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    settings, check = {"num_steps": 2, "max_seq_len": 64}, lossless.Check(model, prompts, 8)
    texts = [lossless.reference(model, p, 8) for p in prompts]
    row = check.greedy(draft, settings, 2, texts)
    assert (row["algo"], row["compared"], row["equal"], row["unexplained"]) == ("eagle3", 3, 3, 0)
    row = check.greedy(draft, settings, 2, [[*texts[0][:3], 99], *texts[1:]])
    assert (row["equal"], row["unexplained"]) == (2, 1)
    law = SamplingParams(temperature=1.0, seed=0)
    kinds = {"eager": {"cuda_graph": False}, "other": {"topk": 3, "sample_drafts": False}}
    same, other = check.sampled(draft, {**settings, "max_batch": 2}, kinds, law)
    assert (same["equal"], same["unexplained"], same["flips_per_token"]) == (3, 0, 0.0)
    assert other["unexplained"] > 0 and 0 < other["flips_per_token"] < 1e-4 and len(other["first_difference"]) > 0
    assert model.config._attn_implementation == "sdpa"
    assert [statistics.most_likely(m, lossless.CHANCE) for m in (0.0, 1e-4, 0.05, 4.0)] == [0, 0, 2, 11]


def test_lossless_command(folder, tmp_path, capsys, monkeypatch):
    common = ("--data", folder, "--target", folder / "target", "--draft", folder / "head", "--device", "cpu")
    counts = ("--json", "--limit", 2, "--batch", 2, "--max-new-tokens", 8)
    code, lines, _ = run(
        capsys, monkeypatch, "bench", "lossless", *common, *counts, "--temperature", 0, "--out", tmp_path
    )
    found = json.loads(lines[-1])
    assert code == 0 and (found["compared"], found["equal"], found["unexplained"]) == (8, 8, 0)
    assert [(r["draft"], r["topk"], r["batch"], r["check"]) for r in found["configs"]] == [
        ("head", 1, 2, "greedy"),
        ("head", 4, 2, "greedy"),
    ]
    (file,) = tmp_path.glob("*.json")
    assert file.name.startswith("lossless-auto-float32_target_")
    assert json.loads(file.read_text())["rows"] == found["configs"]
    chains = (*common[:4], "--draft", "lookup", *common[6:], *counts, "--temperature", 0)
    code, lines, _ = run(capsys, monkeypatch, "bench", "lossless", *chains)
    assert code == 0 and [(r["draft"], r["topk"]) for r in json.loads(lines[-1])["configs"]] == [("lookup", 1)]
    break_mode(monkeypatch, "off", 2.0)
    code, lines, _ = run(capsys, monkeypatch, "bench", "lossless", *common, *counts, "--temperature", 0)
    assert code == 1 and json.loads(lines[-1])["unexplained"] > 0


def test_tokens_and_logits_are_compared_up_to_the_first_other_token():
    def texts(tokens, digests, bits="equal"):
        return bitwise.Texts(tokens, digests, bits, {"tau": 2.0})

    plain = texts([[5, 6, 7], [8, 9, 1]], [[50, 60, 70], [80, 90, 10]])
    row = bitwise.compare(plain, plain)
    counts = ("compared", "equal", "emitted", "logits", "logits_differ", "unexplained", "bits")
    assert [row[key] for key in counts] == [2, 2, 6, 6, 0, 0, "equal"] and row["tau"] == 2.0
    other = texts([[5, 6, 7], [8, 4, 2]], [[50, 61, 70], [80, 91, 11]])
    row = bitwise.compare(other, plain)
    assert [row[key] for key in counts] == [2, 1, 6, 5, 2, 2, "equal"] and row["first_difference"] == [1]
    row = bitwise.compare(texts(plain.tokens, [[50, 60, 71], [80, 90, 10]]), plain)
    assert [row[key] for key in counts] == [2, 2, 6, 6, 1, 1, "equal"], "the same text of other logits"
    for pair in ((other._replace(bits="not checked"), plain), (other, plain._replace(bits="not checked"))):
        row = bitwise.compare(*pair)
        assert (row["equal"], row["logits_differ"], row["unexplained"], row["bits"]) == (1, 2, 0, "not checked")


def test_lossless_compares_bits(folder, tmp_path, capsys, monkeypatch):
    common = ("--data", folder, "--target", folder / "target", "--draft", f"{folder}/head,lookup", "--device", "cpu")
    counts = ("--json", "--check", "bits", "--limit", 2, "--batch", "2,1", "--max-new-tokens", 6)
    counts += ("--shape", "2:1:3,2:2:4")
    code, lines, _ = run(capsys, monkeypatch, "bench", "lossless", *common, *counts, "--out", tmp_path)
    found = json.loads(lines[-1])
    assert code == 0 and (found["compared"], found["equal"], found["emitted"]) == (4 * 15, 4 * 15, 6 * 4 * 15)
    cells = [("default", 2), ("chunks", 2), ("prefixes", 2), ("mixed", 2), ("default", 1)]
    three = ["none", "head", "head"]
    assert [(r["draft"], r["way"], r["batch"]) for r in found["configs"]] == [
        *[(draft, "default", 2) for draft in ("head", "head", "lookup")],
        *[(draft, *cell) for cell in cells[1:] for draft in three],
    ]
    assert "bits: not checked: float32 on cpu" in lines and any("rows of logits differ from plain" in s for s in lines)
    assert {r["tau"] for r in found["configs"] if r["draft"] == "none"} == {1.0}
    (file,) = tmp_path.glob("*.json")
    assert json.loads(file.read_text())["rows"] == found["configs"]


def test_lossless_fails_where_bits_differ_that_the_engine_calls_equal(folder, capsys, monkeypatch):
    common = ("--data", folder, "--target", folder / "target", "--draft", folder / "head", "--device", "cpu", "--json")
    counts = ("--check", "bits", "--limit", 1, "--batch", 1, "--way", "default", "--max-new-tokens", 4)
    counts += ("--shape", "2:1:3")
    monkeypatch.setattr("specdec.reach.assembly.assemble.check_bits", lambda core: "equal")
    for by_width, status in ((0, 0), (1, 1)):  # a digest that depends on the number of nodes per round
        digests = lambda logits, by=by_width: logits[..., 0].long() * 0 + by * logits.shape[1]  # noqa: E731
        monkeypatch.setattr("specdec.core.round.program.row_digests", digests)
        code, lines, _ = run(capsys, monkeypatch, "bench", "lossless", *common, *counts)
        found = json.loads(lines[-1])
        assert (code, found["unexplained"] > 0, found["logits_differ"] > 0) == (status, status == 1, status == 1)
        assert found["equal"] == found["compared"] == 2
