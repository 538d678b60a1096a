"""`specdec bench compare`: regressions beyond noise are found, noise is not, and no unmatched row is hidden."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec.tools.commands import main as cli
from specdec.tools.measure.compare import compare
from specdec.tools.measure.rows import Record, identity, label_of, measure_of

RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results"


def record(name: str, *rows: dict[str, Any], **about: Any) -> Record:
    return Record(name, list(rows), about)


def latency(batch: int, ms: float, **others: Any) -> dict[str, Any]:
    return {"what": "ttft", "label": "any", "shape": "8b", "mode": "graph", "batch": batch, "ms": ms, **others}


def accepted(tau: float, ci95: float | None, **others: Any) -> dict[str, Any]:
    row = {"draft": "head", "prompts": "gsm8k", "temperature": 1.0, "tau": tau, "rounds": 100, "accept_at": [0.5]}
    return {**row, "ci95": ci95, **others}


def verdicts(before: Record, after: Record, **options: Any) -> dict[str, str]:
    """Return the verdicts by key."""
    return {change.key: change.verdict for change in compare(before, after, **options).changes}


def test_a_slow_down_is_found_and_noise_is_not():
    before = record("a", latency(1, 10.0), latency(8, 20.0), latency(32, 30.0))
    after = record("b", latency(1, 10.2), latency(8, 21.0, label="later"), latency(32, 28.0))
    found = compare(before, after)
    assert [(c.case["batch"], c.verdict) for c in found.changes] == [(1, "noise"), (8, "worse"), (32, "better")]
    (worse,) = found.of("worse")
    assert worse.ratio == pytest.approx(1.05) and worse.basis == "3.0% threshold"
    assert not compare(before, after, threshold=0.1).of("worse")
    with pytest.raises(ValueError, match=r"threshold 3.*such as 0\.03 for 3%"):
        compare(before, after, threshold=3)


def test_intervals_and_repeats_come_before_the_threshold():
    assert verdicts(record("a", accepted(3.0, 0.1)), record("b", accepted(2.8, 0.2)))["tau"] == "noise"
    assert verdicts(record("a", accepted(3.0, 0.1)), record("b", accepted(2.8, 0.1)))["tau"] == "worse"
    assert verdicts(record("a", accepted(3.0, None)), record("b", accepted(2.95, None)))["tau"] == "noise"
    steady = [latency(1, ms) for ms in (10.0, 10.01, 9.99)]
    moving = [latency(1, ms) for ms in (9.0, 10.0, 11.0)]
    slower = [latency(1, ms) for ms in (10.2, 10.21, 10.19)]
    assert verdicts(record("a", *steady), record("b", *slower)) == {"ms": "worse"}, "2%, but repeats agree"
    assert verdicts(record("a", *moving), record("b", *slower)) == {"ms": "noise"}
    (change,) = compare(record("a", *steady), record("b", *slower)).changes
    assert (change.before, change.after, change.basis) == (10.0, 10.2, "repeats")


def test_what_is_judged():
    tpot = {"what": "tpot", "batch": 1, "floor_ms": 1.0, "host_ms": 1.0, "eager": 0}
    before = record("a", {**tpot, "ms": 2.0, "round_ms": 6.0, "tau": 3.0})
    after = record("b", {**tpot, "ms": 4.0, "round_ms": 6.0, "tau": 1.5, "host_ms": 9.0, "eager": 2})
    assert verdicts(before, after) == {"round_ms": "noise", "eager": "worse"}
    score = {"what": "gsm8k", "mode": "off", "answers": 200, "nll": 1.37, "correct": 100, "equal": 200}
    found = verdicts(record("a", score), record("b", {**score, "nll": 1.372, "correct": 95, "equal": 199}))
    assert found == {"nll": "worse", "correct": "noise", "equal": "worse"}
    ways = record("a", {"way": "x", "tokens_per_s": 10.0}), record("b", {"way": "x", "error": "out of memory"})
    assert verdicts(*ways) == {"error": "worse"}
    doors = record("a", {"door": "serve", "outcome": "equal"}), record("b", {"door": "serve", "outcome": "differs"})
    assert verdicts(*doors) == {"outcome": "worse"}


def test_rows_match_by_all_that_is_not_measured():
    assert identity(latency(8, 1.0, replayed=True)) == {"what": "ttft", "shape": "8b", "mode": "graph", "batch": 8}
    assert identity(accepted(2.0, 0.1)) == {"draft": "head", "prompts": "gsm8k", "temperature": 1.0}
    for key, value, better in (("warm_ms", 1.0, "lower"), ("out_tok_s", 2.0, "higher"), ("sdpa_ms", 1.0, "")):
        measure = measure_of(key, value)
        assert measure is not None and measure.better == better
    assert measure_of("depth", 3) is None and measure_of("unheard", 0.5) is not None
    assert label_of("compile_s") == "compile (s)" and label_of("answer_s") == "answers took (s)"


def test_keys_of_a_later_version_do_not_hinder():
    old = [latency(1, 10.0), latency(8, 20.0)]
    new = [latency(1, 10.0, dtype="bfloat16"), latency(8, 20.0, dtype="bfloat16")]
    assert len(compare(record("a", *old), record("b", *new)).changes) == 2
    several = [latency(8, 20.0, dtype=name) for name in ("bfloat16", "float32")]
    with pytest.raises(ValueError, match=r"no row of a \(ttft\) is the same case as one of b \(ttft\)"):
        compare(record("a", *old), record("b", *several))


def test_what_could_not_be_matched_is_kept():
    found = compare(record("a", latency(1, 1.0), latency(2, 1.0)), record("b", latency(1, 1.0), latency(4, 1.0)))
    assert [case["batch"] for case in found.only_before] == [2]
    assert [case["batch"] for case in found.only_after] == [4]


def run(monkeypatch, capsys, *arguments: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["specdec", "bench", "compare", "--json", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "160")
    with pytest.raises(SystemExit) as stop:
        cli.main()
    printed = capsys.readouterr()
    return int(stop.value.code or 0), printed.out, printed.err


def test_command(tmp_path, monkeypatch, capsys):
    for name, ms, gpu in (("a", 10.0, "nvidia-h200"), ("b", 11.0, "cpu")):
        rows = [latency(1, ms), latency(8, 20.0), latency(16 + len(name) * (gpu == "cpu"), 1.0)]
        (tmp_path / f"{name}.json").write_text(json.dumps({"gpu": gpu, "rows": rows}))
    code, out, _ = run(monkeypatch, capsys, tmp_path / "a.json", tmp_path / "b.json")
    assert code == 1 and "worse beyond noise" in out and "+10.0%" in out
    assert "not the same gpu: nvidia-h200 against cpu" in out
    assert "2 values judged: 1 worse, 0 better, 1 within noise" in out
    assert "1 cases are in a only:" in out and "batch: 17" in out
    last = json.loads(out.splitlines()[-1])
    assert last["judged"] == 2 and [line["verdict"] for line in last["changed"]] == ["worse"]
    assert run(monkeypatch, capsys, tmp_path / "b.json", tmp_path / "a.json")[0] == 0, "it got faster"
    assert run(monkeypatch, capsys, tmp_path / "a.json", tmp_path / "b.json", "--threshold", 0.2)[0] == 0
    code, _, errors = run(monkeypatch, capsys, tmp_path / "a.json", tmp_path / "missing.json")
    assert code == 2 and "no such file" in errors


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_committed_results_equal_themselves(path, monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, path, path)
    assert code == 0 and ": 0 worse, 0 better," in out and "only:" not in out


def test_what_a_run_counted_or_said_does_not_identify_its_rows():
    gsm8k = {"what": "gsm8k", "mode": "off", "nll": 1.4, "only_here": 0, "only_base": 1, "near_tie": 0.5, "says": "x"}
    peer = {"what": "generate", "requests": 4, "tokens": 501, "tokens_per_s": 9.5}
    later = {**gsm8k, "only_here": 2, "says": "y"}, {**peer, "tokens": 512}
    assert identity(gsm8k) == identity(later[0]) and identity(peer) == identity(later[1])
    assert identity({"what": "ttft", "tokens": 128, "ms": 3.0})["tokens"] == 128
