"""The page of result records: every kind of row is shown, charts are readable, and it loads nothing external."""

import itertools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

from markupsafe import escape
from matplotlib.figure import Figure
from matplotlib.text import Text

from specdec import shipped
from specdec.tools.measure.page import charts, page
from specdec.tools.measure.results import without_paths, write_results
from specdec.tools.measure.rows import Record, read_record
from specdec.tools.measure.statistics import conditional, wilson
from specdec.tools.measure.tables import shortener, table
from tests.commands import run

ROOT = Path(__file__).resolve().parents[1]
COMMITTED = sorted((ROOT / "bench" / "results").glob("*.json"))


def buckets(start: float) -> list[dict[str, Any]]:
    return [
        {"from": 0, "to": 64, "tau": start, "ci95": 0.1, "rounds": 90},
        {"from": 64, "to": 128, "tau": start - 0.2, "ci95": 0.2, "rounds": 60},
        {"from": 128, "to": None, "tau": None, "ci95": None, "rounds": 0},
    ]


def acceptance_row(draft: str, temperature: float, tau: float, **others: Any) -> dict[str, Any]:
    shape = {"steps": 3, "topk": 1, "draft_tokens": 4}
    row = {"draft": draft, "algo": "eagle3", "prompts": "gsm8k", **shape, "temperature": temperature}
    row |= {"tau": tau, "ci95": 0.05, "rounds": 400, "accept_at": [0.8, 0.5, 0.3], "num_prompts": 8, "tok_s": 20.0}
    return {**row, **others}


def latency_row(what: str, steps: int, batch: int, tokens: int, ms: float) -> dict[str, Any]:
    shape = {"steps": steps, "topk": 1, "draft_tokens": steps + 1}
    row = {"label": "now", "shape": "8b", "mode": "compiled", **shape, "batch": batch, "tokens": tokens}
    row |= {"tokenizer": True, "what": what, "ms": ms, "floor_ms": ms / 2, "eager": 0}
    return row | ({"round_ms": ms * (3 if steps else 1), "tau": 3.0 if steps else 1.0} if what == "tpot" else {})


def attach_row(mode: str, mib: float) -> dict[str, Any]:
    row = {"what": "attach", "shape": "8b", "mode": mode, "steps": 3, "topk": 1, "draft_tokens": 4, "ms": 40_000}
    return {**row, "compile_s": 30.0, "capture_s": 1.5, "num_graphs": 154, "graph_mib": mib}


def gsm8k_row(mode: str, speculation: bool, difference: float) -> dict[str, Any]:
    row = {"what": "gsm8k", "dtype": "bfloat16", "mode": mode, "speculation": speculation, "nll": 1.37048}
    row |= {"nll_difference": difference, "nll_ci95": [difference - 1e-4, difference + 1e-4], "mcnemar_p": 0.4}
    row |= {"answers": 200, "correct": 90, "equal": 150, "gaps": [0.1], "near_ties": 50}
    reasons = {"target_prefill": {"replays": 3, "eager": 7, "rejects": {"graphs are off": 7}}}
    return {**row, "runners": reasons}


ROWS: list[dict[str, Any]] = [
    acceptance_row("small-eagle3", 0.0, 3.0, tau_by_position=buckets(3.0), tau_by_context=buckets(3.1)),
    acceptance_row("small-nextn", 0.0, 2.3, tau_by_position=buckets(2.3)),
    acceptance_row("small-eagle3", 1.0, 2.4, sample_drafts=False),
    acceptance_row("none", 0.0, 1.0, algo=None, steps=0, draft_tokens=1, accept_at=[]),
    *(latency_row("ttft", steps, 1, tokens, tokens / 20) for steps in (0, 3) for tokens in (128, 2048)),
    *(latency_row("ttft", steps, 8, 128, 25.0) for steps in (0, 3)),
    *(latency_row("tpot", steps, batch, 128, 5.0 - steps + batch / 10) for steps in (0, 3) for batch in (1, 8)),
    attach_row("compiled", 300.0),
    attach_row("a mode with a name that is so long that no chart can hold all of it", 100.0),
    gsm8k_row("off", False, 0.0),
    gsm8k_row("piecewise", True, 2e-4),
    {
        "check": "greedy",
        "against": "generate",
        "batch": 4,
        "compared": 60,
        "equal": 58,
        "near_ties": 1,
        "unexplained": 1,
    },
    {"what": "generate", "version": "5.17.0", "requests": 32, "new_tokens": 128, "tokens_per_s": 812.5},
    {"what": "specdec, S=3", "version": "0.1.0", "requests": 32, "new_tokens": 128, "tokens_per_s": 7200.0},
    {"what": "economize", "version": "not installed", "requests": 32, "error": "not installed"},
    {"what": "hf", "prompts": "mt_bench", "steps": 0, "tok_s": 24.3, "tau": None, "equal": True},
    {"what": "lookup", "prompts": "mt_bench", "steps": 2, "tok_s": 27.3, "tau": 1.3, "equal": True},
    {"what": "clients", "clients": 8, "requests_s": 109.0, "tok_s": 1744.6, "ttft_ms_p50": 36.4},
    {"what": "a kind of next year", "colour": "mauve-unheard-of", "depth_ms": 3.25},
    {"value": "<b>not markup</b>"},
]
ABOUT = {
    "command": "specdec bench all --prompts gsm8k.jsonl",
    "versions": {"torch": "2.13.0", "specdec": "0.1.0"},
    "gpu": "nvidia-h200",
    "commit": "abc1234+",
    "config": {"prompts_sha256": {"gsm8k": "d34db33f"}, "thinking": False},
}


@pytest.fixture(scope="module")
def rendered() -> Iterator[tuple[str, list[Figure]]]:
    """The page of ROWS, and its figures as matplotlib objects."""
    figures: list[Figure] = []
    plain = charts._svg

    def keeping(figure: Figure) -> str:
        figures.append(figure)
        return plain(figure)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charts, "_svg", keeping)
        yield page.render([Record("all_tiny_cpu_2026-01-01", ROWS, ABOUT)]), figures


def test_every_section_is_there(rendered):
    html, figures = rendered
    anchors = re.findall(r'<section id="([\w-]+)">', html)
    expected = ["acceptance", "latency", "peers", "gsm8k", "lossless", "serving", "graphs"]
    assert anchors == [*expected, "others", "eager", "environment", "definitions"]
    assert re.findall(r'<a href="#([\w-]+)"', html) == anchors
    assert html.count("<svg") == len(figures) == html.count("<figure>")
    titles = ("tau by position, chain S=3, gsm8k, T=0", "tau by context", "Acceptance by position")
    titles += ("Prefill: time to the first token", "A round and its floor", "Tokens/s against batch")
    titles += ("Memory of captured graphs", "Tokens/s by way", "Correct answers by mode")
    titles += ("Likelihood against the first mode", "Attaching")
    titles += ("tau by draft and shape",)
    assert [title for title in titles if title not in html] == []
    assert 3 <= html.count('class="card"') <= 6


def test_nothing_is_dropped_and_nothing_is_markup(rendered):
    html, _ = rendered
    for part in ("mauve-unheard-of", "3.25", "not installed", "graphs are off: 7", "1.370480", "d34db33f", "abc1234+"):
        assert part in html, part
    assert "<b>not markup</b>" not in html and "&lt;b&gt;not markup" in html
    assert re.search(r">2\.8</td><td[^>]*>0\.2</td>", html), "buckets keep their intervals"
    assert "Break-even is the dashed line" in html


def test_the_page_needs_nothing_from_outside(rendered):
    html, _ = rendered
    assert not re.search(r"""(?:src|href|url|@import)\s*[=(]?\s*["']?\s*(?:https?:)?//""", html)
    assert not re.search(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"(?!data:,)", html)
    assert len(html) < 600_000


def test_every_axis_has_a_label_and_no_text_lies_on_another(rendered):
    _, figures = rendered
    assert len(figures) >= 13
    for figure in figures:
        figure.canvas.draw()
        for axes in figure.axes:
            assert axes.get_xlabel(), axes.get_title()
        name = figure.axes[0].yaxis.label
        assert name.get_text() and _is_inside(name.get_window_extent(), figure), name
        boxes = [(t.get_text(), t.get_window_extent()) for t in figure.findobj(Text) if t.get_visible()]
        shown = [(words, box) for words, box in boxes if words.strip() and box.width and _is_inside(box, figure)]
        overlaps = [(a, b) for (a, one), (b, other) in itertools.combinations(shown, 2) if _overlap(one, other)]
        assert not overlaps, (figure.axes[0].get_title(), overlaps)
        for legend in figure.legends:
            box = legend.get_window_extent()
            assert not any(_overlap(box, axes.get_window_extent()) for axes in figure.axes), "legend over data"


def _is_inside(box: Any, figure: Figure) -> bool:
    """Return whether a text is drawn: those of ticks beyond the ends of an axis are not."""
    wide = figure.bbox.x0 - 1 <= box.x0 and box.x1 <= figure.bbox.x1 + 1
    return bool(wide and figure.bbox.y0 - 1 <= box.y0 and box.y1 <= figure.bbox.y1 + 1)


def _overlap(one: Any, other: Any) -> bool:
    wide = min(one.x1, other.x1) - max(one.x0, other.x0)
    high = min(one.y1, other.y1) - max(one.y0, other.y0)
    return bool(wide > 1 and high > 1)


def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Collect the figures as matplotlib objects; write none."""
    kept: list[Figure] = []
    monkeypatch.setattr(charts, "_svg", lambda figure: kept.append(figure) or "")
    return kept


def test_a_shared_axis_holds_the_longest_bar_of_all_panels(monkeypatch):
    kept = drawn(monkeypatch)
    charts.Charts().bars([charts.Point("short", "ms", "a", 1.0), charts.Point("long", "ms", "a", 9.0)], "ms", "case")
    assert [axes.get_xlim()[0] for axes in kept[0].axes] == [0, 0]
    assert all(axes.get_xlim()[1] >= 9 for axes in kept[0].axes)


def test_panels_share_limits_that_hold_all_points(monkeypatch):
    kept = drawn(monkeypatch)
    points = [charts.Point("a", "s", x, y, (y - 0.1, y + 0.2)) for x, y in ((1, 3.0), (2, 3.6))]
    charts.Charts().lines([*points, charts.Point("b", "s", 1, 1.6, (1.5, 1.7))], "j", "tau")
    for axes in kept[0].axes:
        assert axes.get_ylim()[0] == 0.0 and axes.get_ylim()[1] > 3.8


@pytest.fixture
def without_charts(monkeypatch):
    for name in ("lines", "dots", "bars"):
        monkeypatch.setattr(charts.Charts, name, lambda *_, **__: "<svg></svg>")


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_results_render(path, without_charts):
    """Files of any age; every row is in a section that names it. The test below draws charts."""
    record = read_record(path)
    html = page.render([record])
    found = page.sections(record.rows)
    lines = sum(len(table.rows) for section in found for table in section.tables if section.anchor != "eager")
    assert lines >= len(record.rows) and record.name in html


def test_several_records_say_which_file_a_row_is_of():
    """One with interval charts, one with floors."""
    names = ("acceptance-s2k1_135m", "latency-after-moves_8b")
    html = page.render([read_record(path) for path in COMMITTED if path.name.startswith(names)])
    assert "2 result files" in html and "Acceptance (s2k1), Latency (after moves) of 135m and 8b" in html
    assert html.count("<svg") >= 4
    drafts = ("x-eagle", "x-eagle3")
    both = [Record(f"accept_cpu_2026-11-2{i}", [acceptance_row(d, 0.0, 2.0)], {}) for i, d in enumerate(drafts)]
    html, names = page.render(both), ["eagle, 2026-11-20", "eagle3, 2026-11-21"]
    assert all(f">{name}<" in html for name in names), "by what differs in the files' names"
    assert page.differing(["a_b_1", "a_c_1"]) == ["b", "c"] and page.differing(["a", "a"]) == ["a", "a"]
    assert page.render([Record(f"kind{i}_x", [{"a": 1}], {}) for i in range(5)]).count("5 measurements of x") == 2


def test_imposed_acceptance_is_said(without_charts):
    rows = [latency_row("tpot", 3, 1, 128, 5.0)]
    for command, is_said in (("specdec bench latency --shape 8b", True), ("specdec bench latency", False)):
        html = page.render([Record("latency-now_8b_cpu_2026-01-01", rows, {"command": command})])
        assert ("Weights are random and acceptance is imposed:" in html) is is_said


def test_the_worst_row_is_shown_and_reasons_are_counted(without_charts):
    compared = {"check": "greedy", "compared": 30, "near_ties": 0}
    rows = [{**compared, "equal": equal, "unexplained": 30 - equal} for equal in (29, 0)]
    rows.append({**latency_row("tpot", 3, 1, 128, 5.0), "eager": 3, "why_eager": {"decode: graphs are off": 3}})
    html = page.render([Record("lossless_135m_cpu_2026-01-01", rows, {})])
    for value, label in (("0", "texts equal, at least"), ("30", "differences unexplained, at most")):
        assert re.search(rf">{value}<[^>]*>\s*<[^>]*>{label}<", html), label
    assert "decode: graphs are off: 3" in html


def test_what_all_rows_say_at_length_stands_below_the_table():
    rows = [{"a": number, "b": "a text of more than two dozen letters", "c": "short"} for number in range(2)]
    found = table("t", rows)
    assert found.columns == ["a", "c"] and "a text of more than" in found.note
    assert "b" in table("t", [rows[0], {**rows[1], "b": "another text of as many letters"}]).columns


def test_rates_and_intervals():
    assert conditional([0.8, 0.4, 0.0]) == [0.8, 0.5, 0.0] and conditional([]) == []
    assert conditional([0.0, 0.0]) == [0.0, 0.0]
    low, high = wilson(0.5, 100)
    assert (round(low, 3), round(high, 3)) == (0.404, 0.596) and wilson(0.0, 10)[0] == pytest.approx(0)


def test_one_look_for_each_name():
    drawing = charts.Charts()
    names = ["own-head", "smollm2-135m-instruct-nextn", "eagle3", "plain", *(f"mode {i}" for i in range(9))]
    looks = {name: drawing.look(name) for name in names}
    assert len(set(map(str, looks.values()))) == len(names)
    assert looks["plain"] == charts.Charts().look("plain") and {name: drawing.look(name) for name in names} == looks
    cut = shortener(shipped.available())
    short = [cut(name) for name in (*shipped.available(), "lookup")]
    assert short == ["eagle", "eagle3", "nextn", "standalone", "lookup"]


def test_every_definition_has_three_parts(rendered):
    found = page.definitions()
    assert [one[0] for one in found][:2] == ["tau", "the first token"] and {len(one) for one in found} == {3}
    assert all(f"<td>{escape(one[0])}</td>" in rendered[0] for one in found)


def test_results_name_no_path_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "tool"), "--prompts", f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl"])
    rows = [acceptance_row(str(tmp_path / "head"), 0.0, 2.0)]
    path = write_results(tmp_path, "acceptance", "tiny", {"target": str(tmp_path / "model")}, rows)
    record = json.loads(path.read_text())
    assert record["command"] == "tool --prompts a.jsonl,b.jsonl" and record["config"] == {"target": "model"}
    assert str(tmp_path) not in path.read_text() and record["rows"][0]["draft"] == "head"
    assert "2.00 ± 0.05" in page.render([read_record(path)])


def test_missing_libraries_are_told(monkeypatch):
    monkeypatch.setattr("specdec.tools.measure.page.page.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"cannot be rendered: jinja2 and matplotlib not installed \(pip install"):
        page.render([Record("a", [], {})])


def test_paths_of_this_machine_are_cut():
    home = Path(__file__).resolve()
    assert without_paths({"a": [f"see {home}: line 3", 1, None]}) == {"a": [f"see {home.name}: line 3", 1, None]}
    for text in ("/v1/completions", "3/4", "a/b.json", "hub.io/x", "x:y/z", "5 / 7"):
        assert without_paths(text) == text


def test_page_command(tmp_path, capsys, monkeypatch):
    file = next(path for path in COMMITTED if path.name.startswith("demo"))
    out = tmp_path / "new" / "page.html"
    code, lines, _ = run(capsys, monkeypatch, "bench", "page", file, "--out", out)
    assert code == 0 and lines == [str(out)] and "<h1>Demo of 135m</h1>" in out.read_text()
    (tmp_path / "bad.json").write_text("[1]")
    (tmp_path / "deep.json").write_text("[" * 10**5)
    wrong = {"none": "no such file", "bad": "expected an object with a list of 'rows'", "deep": "not JSON (maximum"}
    for bad, message in ((f"{name}.json", said) for name, said in wrong.items()):
        code, _, errors = run(capsys, monkeypatch, "bench", "page", tmp_path / bad)
        assert code == 2 and message in errors


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OVERLAPS = """
<script>
const found = [], boxes = [];
document.querySelectorAll("details").forEach(one => { one.open = true; });
document.querySelectorAll("svg text, h1, h2, h3, p, th, td, .card b, .card span, .card small, figcaption, nav a")
  .forEach(one => { const box = one.getBoundingClientRect();
    if (box.width && one.textContent.trim()) boxes.push([one, box]); });
boxes.forEach(([one, a], i) => boxes.slice(i + 1).forEach(([other, b]) => {
  if (one.contains(other) || other.contains(one)) return;
  const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
  const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
  if (wide > 2 && high > 2) found.push(one.textContent + " | " + other.textContent); }));
const sideways = document.documentElement.scrollWidth > document.documentElement.clientWidth;
document.title = JSON.stringify({boxes: boxes.length, overlaps: found, sideways});
</script>
"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize("width", [1200, 500])
def test_in_a_browser(rendered, tmp_path, width):
    """A screenshot that is not empty; at no width do texts overlap or does the page scroll sideways."""
    html, _ = rendered
    file, picture = tmp_path / "page.html", tmp_path / "page.png"
    file.write_text(html.replace("</body>", f"{OVERLAPS}</body>"))
    common = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},3000"]
    options = {"capture_output": True, "text": True, "timeout": 120, "check": True}
    subprocess.run([*common, f"--user-data-dir={tmp_path}/a", f"--screenshot={picture}", file.as_uri()], **options)
    assert picture.stat().st_size > 40_000
    dom = subprocess.run([*common, f"--user-data-dir={tmp_path}/b", "--dump-dom", file.as_uri()], **options).stdout
    title = re.search(r"<title>(.*?)</title>", dom, re.DOTALL)
    assert title is not None
    found = json.loads(title[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))
    assert found["boxes"] > 300 and found["overlaps"] == [] and not found["sideways"]
