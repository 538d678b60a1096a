"""`specdec bench acceptance`: one command for a table of drafts, shapes, prompt files and temperatures."""

import copy
import json
from pathlib import Path

import pytest
import torch

from specdec import Engine, attach, shipped
from specdec.reach.heads.load import save_head
from specdec.tools.commands import bench as bench_command
from specdec.tools.measure.acceptance import acceptance
from specdec.tools.measure.drafts import DraftShape
from specdec.tools.measure.latency import cases, timing
from specdec.tools.measure.peers import Task, Way, timed
from specdec.tools.measure.policy import Grid, rates_of
from specdec.tools.measure.results import ResultFile, write_results
from tests.commands import run
from tests.heads import random_head
from tests.tiny_models import tiny_model
from tests.train_models import save_target, tiny_target


def prompt_file(path: Path, *questions: str) -> None:
    path.write_text("".join(json.dumps({"question": q}) + "\n" for q in questions), "utf-8")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """target, twin (a copy of it), head (random, with a trainer's report), and the prompt files a and b."""
    root = tmp_path_factory.mktemp("acceptance")
    model = tiny_target()
    save_target(model, root / "target")
    save_target(model, root / "twin")
    save_head(root / "head", random_head(model), lm_head_from_target=False, dtype=torch.float32)
    (root / "head" / "train.json").write_text('{"accept_at": [0.5, 0.25, 0.1, 0.05]}')
    prompt_file(root / "a.jsonl", "w5 w9 w17", "w20 w21", "w8")
    prompt_file(root / "b.jsonl", "w33 w40 w41 w42", "w50 w6")
    return root


def bench(capsys, monkeypatch, root: Path, *arguments: object):
    files = f"{root / 'a.jsonl'},{root / 'b.jsonl'}"
    common = ("--json", "--target", root / "target", "--prompts", files, "--max-new-tokens", 12, "--device", "cpu")
    return run(capsys, monkeypatch, "bench", "acceptance", *common, *arguments)


def test_one_command_makes_the_table(folders, tmp_path, capsys, monkeypatch):
    attached: list[object] = []

    def counting(*args, **settings):
        attached.append(settings["graph_sampling"])
        return attach(*args, **settings)

    monkeypatch.setattr("specdec.tools.measure.acceptance.attach", counting)
    drafts = ("--draft", f"{folders / 'head'},none", "--draft", folders / "twin")
    shapes = ("--shape", "2:1:3,3", "--shape", "2:3:6", "--temperature", "0,1")
    code, lines, _ = bench(capsys, monkeypatch, folders, *drafts, *shapes, "--limit", 2, "--out", tmp_path)
    rows = json.loads(lines[-1])["rows"]
    assert code == 0 and len(attached) == 3 + 1 + 3 and set(attached) == {("greedy", "sampled")}
    assert len(rows) == len(attached) * 2 * 2  # one engine per draft and shape; two files and two temperatures each
    keys = {"draft", "algo", "prompts", "steps", "topk", "draft_tokens", "temperature", "tau", "ci95", "rounds"}
    keys |= {"accept_at", "num_prompts", "max_new_tokens", "tok_s", "sample_drafts", "prompts_sha", "conditional_at"}
    keys |= {"tau_by_position", "tau_by_context", "template_sha", "thinking", "first_token"}
    assert all(keys <= set(r) for r in rows)
    assert {(r["draft"], r["algo"]) for r in rows} == {("head", "eagle3"), ("none", None), ("twin", "standalone")}
    assert {(r["steps"], r["topk"], r["draft_tokens"]) for r in rows if r["algo"]} == {(2, 1, 3), (3, 1, 4), (2, 3, 6)}
    assert {(r["prompts"], r["num_prompts"]) for r in rows} == {("a", 2), ("b", 2)}
    assert all(r["tau"] == 1.0 for r in rows if r["draft"] == "none")
    chains = [r for r in rows if r["topk"] == 1]
    assert all(r["tau"] == pytest.approx(1 + sum(r["accept_at"]), abs=1e-3) for r in chains)
    (file,) = tmp_path.glob("*.json")
    gpu = torch.cuda.get_device_name().lower().replace(" ", "-") if torch.cuda.is_available() else "cpu"
    assert file.name.startswith(f"acceptance_target_{gpu}_") and json.loads(file.read_text())["rows"] == rows


def test_a_drafter_without_a_model_is_measured_like_the_others(folders, capsys, monkeypatch):
    drafts = ("--draft", "lookup,none", "--shape", "2:1:3", "--predicted")
    code, lines, _ = bench(capsys, monkeypatch, folders, *drafts, "--limit", 2)
    rows = json.loads(lines[-1])["rows"]
    assert code == 0
    assert {(r["draft"], r["algo"], r["steps"]) for r in rows} == {("lookup", "lookup", 2), ("none", None, 0)}
    assert all(r["tau"] >= 1 for r in rows)


def test_measured_beside_predicted(folders, capsys, monkeypatch):
    drafts = ("--draft", folders / "head", "--draft", folders / "twin")
    code, lines, _ = bench(capsys, monkeypatch, folders, *drafts, "--shape", "2,2:2:4", "--predicted")
    rows = json.loads(lines[-1])["rows"]
    assert code == 0 and len(rows) == 8
    for row in rows:
        assert ("predicted_at" in row) == (row["topk"] == 1)
        if row["topk"] == 1:
            assert row["predicted_at"] == row["accept_at"], "one text, the same rounds"
            assert row["off_prediction"] == [0.0] * len(row["accept_at"])
    assert any(r["accept_at"] for r in rows)
    table = " ".join(" ".join(lines[:-1]).split())
    assert "predicted" in table and "off" in table and "1.00" in table


def test_tokens_per_second_have_intervals(folders, tmp_path, capsys, monkeypatch):
    speed = ("--draft", folders / "head", "--shape", "2:2:4", "--temperature", 1, "--speed", "1,2")
    code, lines, errors = bench(capsys, monkeypatch, folders, *speed, "--max-new-tokens", 4, "--out", tmp_path)
    rows = json.loads(lines[-1])["rows"]
    assert code == 0 and "head 2:2:4 a T=1 batch 1: " in errors
    cases = [(r["prompts"], r["batch"], r["temperature"], r["calls"]) for r in rows]
    assert cases == [("a", 1, 1, 3), ("a", 2, 1, 1), ("b", 1, 1, 2), ("b", 2, 1, 1)]
    for row in rows:
        assert row["tok_s"] > 0 and row["with_prefill_tok_s"] > 0 and row["tau"] >= 1
        assert (row["tok_s_ci95"] is None) == (row["calls"] == 1), "a single call has no interval"
    code, _, errors = bench(capsys, monkeypatch, folders, "--draft", folders / "head", "--speed", 4)
    assert code == 2 and "--speed 4: a has 3 prompts; expected at least 4" in errors


def test_greedy_drafts_are_a_setting(folders):
    model = tiny_model("llama")
    prompts = {"own": [[5, 6, 7], [8, 9]]}
    for draws in (True, False):
        options = {"temperatures": (1.0,), "max_new_tokens": 6, "sample_drafts": draws}
        (row,) = acceptance(model, copy.deepcopy(model), prompts, name="twin", **options)
        assert row["sample_drafts"] is draws and row["algo"] == "standalone"
    assert not hasattr(model, "_specdec_attached")


def test_shapes():
    assert DraftShape.parse("5:8:32@9") == (5, 8, 32, 9) and DraftShape.parse("plain") == (0, 1, 1, None)
    assert DraftShape.parse("3") == DraftShape.parse("3:1") == (3, 1, 4, None)
    assert str(DraftShape.parse("2:4")) == "2:4:21"
    for text, message in (("3:1:4:5", "S:K:D"), ("a", "S:K:D"), ("0", "drafts nothing"), ("3:1:9", "chain verifies")):
        with pytest.raises(ValueError, match=message):
            DraftShape.parse(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shape", "x"), "shape 'x': expected plain or S:K:D"),
        (("--shape", "plain"), "--shape 'plain': expected S:K:D"),
        (("--temperature", "-1"), "--temperature '-1'"),
        (("--temperature", "warm"), "--temperature 'warm'"),
        (("--shape", ","), "--shape ',': expected at least one"),
        (
            ("--draft", "lookup", "--shape", "2:1:3,2:2:5"),
            "--draft lookup with --shape 2:2:5: lookup drafts only chains",
        ),
        (("--prompts", "missing.jsonl"), "missing.jsonl"),
        (("--draft", "./missing"), "no such folder"),
    ],
)
def test_mistakes_are_one_line(folders, capsys, monkeypatch, arguments, message):
    code, _, errors = bench(capsys, monkeypatch, folders, *arguments)
    last = errors.strip().splitlines()
    assert code == 2 and len(last) == 1 and last[0].startswith("specdec: ") and message in last[0]


def test_shipped_heads_by_algorithm():
    assert shipped.path("smollm2-135m-instruct-eagle3") == shipped.for_algo("eagle3") == shipped.path()
    with pytest.raises(ValueError, match=r"no shipped head for algo='medusa'; there are heads for .*'eagle3'"):
        shipped.for_algo("medusa")
    assert shipped.find("shipped") == shipped.find("smollm2-135m-instruct-eagle3") == shipped.path()
    assert shipped.find("owner/name") == "owner/name"
    assert shipped.find("shipped-standalone") == shipped.for_algo("standalone")
    assert bench_command._drafts(["shipped", "none"]).keys() == {*shipped.available(), "none"}
    assert bench_command._drafts(["x/head", "y/head"]) == {"head": ("x/head", "auto"), "y/head": ("y/head", "auto")}
    own = bench_command.Lossless.__new__(bench_command.Lossless)
    own.draft = ["x/head", "y/head"]
    assert own._drafts() == {"head": ("x/head", "auto"), "y/head": ("y/head", "auto")}
    assert bench_command._drafts(["lookup", "none"]) == {"lookup": (None, "lookup"), "none": (None, None)}


def test_results_leave_other_runs_alone(tmp_path):
    """Two runs on one day have a file each; a run that writes again to its own path has one."""
    first = write_results(tmp_path, "x", "tiny", {}, [1])
    second = ResultFile(tmp_path, "x", "tiny", {})
    for rows in ([2], [2, 3]):
        second.write(rows)
    third = write_results(tmp_path, "x", "tiny", {}, [4])
    with pytest.raises(TypeError):
        second.write([object()])
    second = second.path
    assert [p.stem.removeprefix(first.stem) for p in (first, second, third)] == ["", "-2", "-3"]
    assert [json.loads(p.read_text())["rows"] for p in (first, second, third)] == [[1], [2, 3], [4]]
    assert len(list(tmp_path.glob("*.json"))) == 3
    assert write_results(tmp_path, "x", "owner/name", {}, []).name.startswith("x_owner-name_"), "a Hub id is no folder"
    with pytest.raises(ValueError, match=r"cannot be written: '.*json' is a file, expected a folder"):
        ResultFile(third, "x", "tiny", {})
    none = ResultFile(None, "x", "tiny", {})
    none.write([1])
    assert none.name is None


def last_line(capsys, monkeypatch, *arguments: object) -> dict:
    """Return the JSON line of `specdec bench ARGUMENTS` on a CPU."""
    code, lines, _ = run(capsys, monkeypatch, "bench", *arguments, "--device", "cpu", "--json")
    assert code == 0
    return json.loads(lines[-1])


def test_latency_through_generate(folders, tmp_path, capsys, monkeypatch):
    common = ("latency", "--shape", "tiny", "--new-tokens", 4, "--repeats", 1, "--out", tmp_path)
    drafts = ("--drafts", "plain,2:2:4", "--tokenizer", folders / "target", "--label", "before")
    found = last_line(capsys, monkeypatch, *common, *drafts)
    cells = [(r["steps"], r["batch"], r["tokenizer"], r["what"]) for r in found["rows"] if r["what"] != "attach"]
    assert sorted(cells) == sorted(
        (steps, batch, text, what)
        for steps in (0, 2)
        for batch in (1, 2)
        for text in (False, True)
        for what in ("ttft", "tpot")
    )
    assert not found["skipped"] and all(r["label"] == "before" and r["ms"] != 0 for r in found["rows"])
    assert all(r["tau"] == 1.0 for r in found["rows"] if r["what"] == "tpot" and not r["steps"])
    assert all(r["expected_tau"] == (2.4 if r["steps"] else None) for r in found["rows"] if r["what"] == "tpot")
    later = last_line(capsys, monkeypatch, *common, "--drafts", "plain", "--batches", 1, "--label", "after")
    record = json.loads(Path(later["file"]).read_text())
    assert record["rows"] == later["rows"] and record["config"]["host_probe_ms"] > 0


def test_calls_draw_imposed_acceptance_each_for_itself(capsys, monkeypatch):
    """A request draws by its seed and its length: calls with equal seeds would accept the same in every round."""
    generate, seeds = Engine.generate, []

    def watched(*args, **options):
        seeds.append([law.seed for law in options["sampling"]])
        return generate(*args, **options)

    monkeypatch.setattr(Engine, "generate", watched)
    arguments = ("--new-tokens", 3, "--repeats", 2, "--batches", "1,2", "--drafts", "2:1:3")
    rows = last_line(capsys, monkeypatch, "latency", "--shape", "tiny", *arguments)["rows"]
    assert {r["what"] for r in rows} >= {"ttft", "tpot"}
    for batch in (1, 2):
        drawn = [seed for call in seeds if len(call) == batch for seed in call]
        assert len(drawn) == len(set(drawn)) > 4 * batch
    of_ways = seeds.copy()
    last_line(capsys, monkeypatch, "peers", "--shape", "tiny", "--limit", 1, "--tokens", 5, "--new-tokens", 5)
    runs = [seed for (seed,) in seeds[len(of_ways) :]]
    assert runs and set(runs) == {0, 1}, "both runs of a way, the same for every way"


def test_latency_says_what_graphs_hold_and_what_ran_eagerly(capsys, monkeypatch):
    arguments = ("--new-tokens", 3, "--repeats", 1, "--batches", 1, "--drafts", "plain")
    attached, *rows = last_line(capsys, monkeypatch, "latency", "--shape", "tiny", *arguments)["rows"]
    assert (attached["graph_mib"], attached["num_graphs"], attached["capture"]) == (0.0, 0, "eager")
    assert set(attached["graph_mib_of"].values()) == {0.0}
    assert rows and all(r["eager"] == sum(r["why_eager"].values()) > 0 for r in rows)
    assert {"target_prefill: graphs are off", "decode: graphs are off"} <= set(rows[-1]["why_eager"])


def test_latency_of_a_real_target(folders, capsys, monkeypatch):
    """A draft from a folder has its real acceptance; prompts from a file keep their lengths."""
    where = ("latency", "--target", folders / "target", "--new-tokens", 4, "--repeats", 1, "--batches", 1)
    real = ("--draft", folders / "twin", "--drafts", "2:1:3", "--prompts", folders / "a.jsonl", "--tokenizer", "own")
    found = last_line(capsys, monkeypatch, *where, *real)
    assert {r["shape"] for r in found["rows"]} == {"target"} and len(found["rows"]) == 1 + 2 * 2
    assert all(r["tau"] == 3.0 for r in found["rows"] if r["what"] == "tpot")  # a copy of the target: all is accepted
    assert {r["tokens"] for r in found["rows"] if r["what"] == "ttft"} < set(range(3, 30))
    plain = last_line(capsys, monkeypatch, *where, "--tokens", 5, "--ttft-tokens", "", "--samplings", "greedy,filtered")
    assert {r["steps"] for r in plain["rows"]} == {0}
    assert [r.get("sampling") for r in plain["rows"]] == [None, None, None, "filtered", "filtered"]


def test_latency_of_prompts_that_the_prefix_cache_has(capsys, monkeypatch):
    monkeypatch.setitem(cases.MODES, "prefix-cache", {"compile": False, "prefix_cache": True})
    size = ("--batches", 1, "--tokens", 600, "--new-tokens", 3, "--repeats", 3, "--drafts", "plain")
    rows = last_line(capsys, monkeypatch, "latency", "--shape", "tiny", "--modes", "prefix-cache", *size)["rows"]
    miss, hit = (next(row for row in rows if row["what"] == what) for what in ("ttft", "ttft_hit"))
    assert hit["ms"] < miss["ms"] and hit["tokens"] == 600


def test_latency_stops_for_its_budget(tmp_path, capsys, monkeypatch):
    found = last_line(capsys, monkeypatch, "latency", "--shape", "tiny", "--budget", 1, "--out", tmp_path)
    assert found["rows"] == [] and len(found["skipped"]) == 4 * 2 and Path(found["file"]).is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("latency", "--shape", "huge"), "--shape 'huge': expected one of 135m, 8b, 70b, tiny"),
        (("latency", "--shape", "tiny", "--draft", "none"), "--draft 'none' with --shape tiny"),
        (("latency", "--shape", "tiny", "--batches", "1,x"), "--batches '1,x': expected whole numbers"),
        (("latency", "--shape", "tiny", "--batches", "0"), "--batches (0,): expected at least 1"),
        (("latency", "--shape", "tiny", "--modes", "fast"), "--modes 'fast': expected any of compiled"),
        (("latency", "--shape", "tiny", "--samplings", "warm"), "--samplings 'warm': expected any of greedy"),
        (("peers", "--shape", "tiny", "--target", "bundled"), "--target 'bundled' with --shape tiny"),
        (
            ("latency", "--prompts", "a", "--tokens", "8"),
            "--tokens or --ttft-tokens with --prompts: prompts have lengths of their own",
        ),
        (("peers", "--limit", "0"), "--limit 0: expected at least 1"),
        (("peers", "--new-tokens", "0"), "--new-tokens 0: expected at least 1"),
        (("policy", "--taus", "0.5"), "--taus '0.5': expected a tau from 1 to below 6"),
        (("acceptance", "--prompts", "a", "--speed", "1", "--predicted"), "--speed with --predicted or --by-category"),
        (("policy", "--cells", "8x"), "--cells '8x': expected BATCHxCONTEXT such as 8x16384"),
        (("policy", "--cells", "8x9", "--batches", "8"), "--cells with --batches: both define the cells"),
        (("policy", "--prompts", "a", "--taus", "2"), "--prompts with --taus: both define the cells"),
        (("policy", "--new-tokens", "0"), "--new-tokens 0: expected at least 8"),
        (("policy", "--drift", "0"), "--drift 0: expected at least 4"),
        (("policy", "--draft-tokens", "8"), "--draft-tokens 8 with --topk 1: only trees use it"),
        (("policy", "--draft", "none"), "--draft none: the policy needs a draft"),
    ],
)
def test_mistakes_of_latency_and_peers_are_one_line(capsys, monkeypatch, arguments, message):
    code, _, errors = run(capsys, monkeypatch, "bench", *arguments, "--device", "cpu")
    last = errors.strip().splitlines()
    assert code == 2 and len(last) == 1 and last[0].startswith("specdec: ") and message in last[0]


def test_latency_rounds_of_a_trace():
    """Idle time is taken from the last graph launches: the earlier ones are prefills."""
    events = []
    for i, ts in enumerate((0, 10, 100, 200, 300)):  # two segments of a prefill, three rounds of 60 us
        args = {"correlation": i}
        events.append({"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": ts, "dur": 1, "args": args})
        events.append({"cat": "kernel", "name": "k", "ts": ts + 5, "dur": 60 if ts >= 100 else 4, "args": args})
    found = timing.idle_between(events, 3)
    assert (found["gap_us"], found["idle_percent"]) == (40, 40.0)


def test_latency_host_time_leaves_waits_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    before = (torch.cuda.Event.synchronize, torch.cuda.CUDAGraph.replay, torch.cuda.synchronize)
    with timing._waits("cuda") as seconds:
        torch.cuda.synchronize()
        assert len(seconds) == 1
    assert before == (torch.cuda.Event.synchronize, torch.cuda.CUDAGraph.replay, torch.cuda.synchronize)


def test_latency_engines():
    """Short contexts share an engine, long ones have their own; its capacity is that of the largest cell."""
    cells = cases.cells_of([1, 8], [128, 8192], [512])
    assert [[str(c) for c in group] for group in cases.groups_of(cells)] == [
        ["1 x 128", "8 x 128", "1 x 512"],
        ["1 x 8192", "8 x 8192"],
    ]
    room = cases.capacity(cases.groups_of(cells)[1], 257)
    assert room == {"max_batch": 8, "max_seq_len": 8192 + 257, "num_slots": 8 * (8192 + 257 + cases.SPARE)}
    for text in ("plain", "3:1:4", "5:8:32@16384"):
        assert str(DraftShape.parse(text)) == text


def test_peers_say_the_same_or_why_not(folders, tmp_path, capsys, monkeypatch):
    """Every method generates `generate`'s text; one that fails gets a row that says so."""
    drafts = ("--draft", folders / "head", "--assistant", folders / "twin", "--prompts", folders / "a.jsonl")
    arguments = ("--limit", 3, "--few", 2, "--new-tokens", 6, "--out", tmp_path)
    found = last_line(capsys, monkeypatch, "peers", "--target", folders / "target", *drafts, *arguments)
    rows = {r["what"]: r for r in found["rows"]}
    assert json.loads(Path(found["file"]).read_text())["rows"] == found["rows"]
    assert rows["generate_batch, graphs"]["error"] == "RuntimeError: CUDA graphs need a CUDA device"
    ours = {"generate", "generate, static cache", "generate_batch", "prompt lookup", "assisted"}
    done = {name for name, r in rows.items() if "error" not in r}
    assert ours | {"specdec, no draft", "specdec, eagle3"} <= done
    for name in done:
        row = rows[name]
        assert row["requests"] == (2 if row["one_at_a_time"] else 3)
        assert row["version"] and row["tokens_per_s"] > 0 and row["equal"] == row["requests"], name
    assert rows["assisted"]["one_at_a_time"] and rows["specdec, eagle3"]["tau"] >= 1.0


def test_peers_with_random_weights(capsys, monkeypatch):
    """One request is enough for every method; acceptance is imposed, and texts are not compared."""
    arguments = ("--shape", "tiny", "--limit", 1, "--tokens", 5, "--new-tokens", 5)
    rows = {r["what"]: r for r in last_line(capsys, monkeypatch, "peers", *arguments)["rows"]}
    assert all(r["tokens"] == 5 for r in rows.values() if "error" not in r)
    assert rows["specdec, eagle3"]["tau"] > 1 and rows["specdec, eagle3"]["expected_tau"] == 2.85
    assert not any("equal" in r for r in rows.values())


def test_the_policy_beside_plain_decoding_and_every_fixed_shape(tmp_path, capsys, monkeypatch):
    cells = ("--cells", "2x8", "--taus", "3.5,1.2/4", "--new-tokens", 16, "--drift", 8)
    found = last_line(capsys, monkeypatch, "policy", "--shape", "tiny", *cells, "--topk", 2, "--out", tmp_path)
    *rows, last = found["rows"]
    shapes = {"plain", "1:1:2", "3:1:4", "5:1:6", "5:2:19"}
    assert [(r["batch"], r["accepts"]) for r in rows] == [(2, "3.5"), (2, "1.2/4")]
    for row in rows:
        assert set(row["of_each"]) == set(row["rounds"]) == shapes and sum(row["rounds"].values()) == pytest.approx(1)
        assert row["of_best"] == min(row["of_each"].values()) and row["of_plain"] == row["of_each"]["plain"]
    assert last["cells"] == 2 and last["least_of_best"] == min(r["of_best"] for r in rows)
    assert len(list(tmp_path.glob("policy_tiny_*.json"))) == 1


def test_the_policy_on_given_prompts(folders, capsys, monkeypatch):
    real = ("--target", folders / "target", "--draft", folders / "head", "--prompts", folders / "a.jsonl")
    (folders / "other").mkdir()
    (folders / "other" / "a.jsonl").write_text((folders / "a.jsonl").read_text())
    real += ("--prompts", folders / "other" / "a.jsonl")
    row, other, last = last_line(capsys, monkeypatch, "policy", *real, "--batches", 2, "--new-tokens", 8)["rows"]
    assert (row["prompts"], row["batch"], row["accepts"]) == ("a", 2, "what the draft gets")
    assert other["prompts"].endswith("/other/a.jsonl"), "another file of that name"
    assert row["tokens_per_s"] > 0 and set(row["of_each"]) == {"plain", "1:1:2", "3:1:4", "5:1:6"}
    assert last["cells"] == 2 and "context" not in row


def test_a_grid_has_room_for_its_largest_cell():
    grid = Grid(((2, 300), (8, 20)), ((2.0,), (1.2, 4.5)), 10, drift=5)
    room = grid.capacity({300: [[5] * 300] * 2, 20: [[5] * 20] * 8})
    assert room == {"max_batch": 8, "graph_batches": (2, 8), "max_seq_len": 320, "num_slots": 8 * (20 + 20 + 96)}
    given = Grid(((1, "a"),), ((),), 10).capacity({"a": [[5] * 9, [5] * 7]})
    assert given == {"max_batch": 1, "graph_batches": (1,), "max_seq_len": 49, "num_slots": 9 + 40 + 96 + 16}


def test_imposed_rates_have_the_tau_that_was_asked_for():
    for tau in (1.0, 1.2, 3.0, 4.5, 5.9):
        rates = rates_of(tau, 5)
        assert 1 + sum(rates) == pytest.approx(tau) and rates == sorted(rates, reverse=True)


def test_a_peer_that_fails_is_a_row():
    def broken():
        raise MemoryError("no room")

    task = Task(tiny_model("llama"), [[5, 6]], 4)
    assert timed(Way("broken", "specdec", broken), task, task.prompts) == ({"error": "MemoryError: no room"}, None)
    assert task.ends == [2] and task.cut([5, 6, 2, 0]) == [5, 6]
