"""The page's section on acceptance: tau by draft and shape, acceptance by position, tau along answers and contexts."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from specdec.measure.page import charts
from specdec.measure.page.palette import Palette
from specdec.measure.page.parts import Card, Figure, Row, Section, number, rest_of, shape_of, table, varying
from specdec.measure.statistics import conditional, wilson

TABLE = (
    *("file", "draft", "algo", "prompts", "shape", "temperature", "num_prompts", "tau", "ci95", "rounds"),
    *("accept_at", "conditional_at", "tok_s", "predicted_at", "off_prediction"),
)
SERIES = ("file", "draft")
GREEDY = ", greedy drafts"
BUCKETS = (("tau_by_position", "position in the answer (tokens)"), ("tau_by_context", "context length (tokens)"))


def is_acceptance(row: Row) -> bool:
    """Whether `row` is one of `specdec bench acceptance`."""
    return {"accept_at", "tau", "rounds", "draft_tokens"} <= row.keys()


def acceptance_section(rows: Sequence[Row], names: Callable[[str], str], palette: Palette) -> Section:
    """Make the section. names: what a draft is called on the page."""
    own = [_completed(row, names) for row in rows]
    series = varying(own, SERIES) or ["draft"]
    section = Section("acceptance", "Acceptance")
    section.intro = (
        "How many tokens a round emits (tau, the bonus token included), and how often each draft position is accepted. "
        "It depends on target, draft, prompts and sampling, not on the machine. Bars are 95% intervals over prompts."
    )
    drafted = [row for row in own if row["shape"] != "plain"]
    section.cards = _cards(drafted)
    if drafted:
        section.figures = [*_tau(drafted, series, palette), *_positions(drafted, series, palette)]
        for key, axis in BUCKETS:
            section.figures += _buckets([row for row in drafted if row.get(key)], key, axis, series, palette)
    hidden = ("steps", "topk", "draft_tokens", "sample_drafts", *(key for key, _ in BUCKETS))
    keys = [*TABLE, *(key for key in rest_of(own, TABLE) if key not in hidden)]
    section.tables = [table("Every acceptance row", own, keys, is_folded=len(own) > 12)]
    section.tables += [_bucket_table(own, key) for key, _ in BUCKETS if any(row.get(key) for row in own)]
    return section


def series_names(rows: Sequence[Row], names: Callable[[str], str]) -> list[str]:
    """Return the names of all series of the section's charts; names: what a draft is called."""
    own = [_completed(row, names) for row in rows]
    series = varying(own, SERIES) or ["draft"]
    return [_name(row, series) for row in own]


def _completed(row: Row, names: Callable[[str], str]) -> dict[str, Any]:
    """Add the shape's name, which says how sampled chains are drafted, and conditional rates."""
    draft = names(str(row.get("draft") or row.get("algo") or "plain"))
    is_greedy = row.get("sample_drafts") is False and bool(row.get("temperature")) and row.get("topk") == 1
    shape = shape_of(row) + GREEDY * is_greedy
    found = {"conditional_at": conditional(row["accept_at"]), **row, "draft": draft, "shape": shape}  # old rows lack it
    found.setdefault("temperature", 0.0)
    found.setdefault("prompts", "prompts")
    return found


def _name(row: Row, series: Sequence[str]) -> str:
    return ", ".join(str(row[key]) for key in series if row.get(key))


def _cards(rows: Sequence[Row]) -> list[Card]:
    """Make cards of the largest tau of chains and trees, greedy and sampled."""
    cards = []
    for temperature, at_one in _by(rows, "temperature"):
        for kind in ("chain", "tree"):
            own = [row for row in at_one if row["shape"].startswith(kind)]
            if own:
                best = max(own, key=lambda row: row["tau"])
                half = f" ± {best['ci95']:.2f}" if best.get("ci95") else ""
                what = f"{best['draft']}, {best['shape']}, {best['prompts']}"
                cards.append(Card(f"{best['tau']:.2f}{half}", f"largest tau of {kind}s, T={temperature:g}", what))
    return cards


def _tau(rows: Sequence[Row], series: Sequence[str], palette: Palette) -> Iterable[Figure]:
    """Make a chart of tau for each temperature: a panel for each set of prompts."""
    for temperature, own in _by(rows, "temperature"):
        panels = {
            f"{prompts}, T={temperature:g}": [
                charts.Dot(r["shape"], _name(r, series), r["tau"], r.get("ci95")) for r in of_prompts
            ]
            for prompts, of_prompts in _by(own, "prompts")
        }
        title = f"tau by draft and shape, T={temperature:g}"
        yield Figure(title, charts.dots(panels, "tau (tokens per round)", palette, y="shape of a round"))


def _positions(rows: Sequence[Row], series: Sequence[str], palette: Palette) -> Iterable[Figure]:
    """Make a chart of a_j of the deepest chain and of the deepest tree: a panel for each prompts and temperature."""
    for kind in ("chain", "tree"):
        own = [r for r in rows if r["shape"].startswith(kind) and not r["shape"].endswith(GREEDY) and r["accept_at"]]
        if not own:
            continue
        shape = max(own, key=lambda row: (row["steps"], row["draft_tokens"]))["shape"]
        panels: dict[str, list[charts.Line]] = {}
        for temperature, at_one in _by([row for row in own if row["shape"] == shape], "temperature"):
            for row in at_one:
                panels.setdefault(f"{row['prompts']}, T={temperature:g}", []).append(_rates(row, series))
        caption = "Unconditional rates a_j: the share of rounds in which position j was accepted and kept."
        caption += "" if any(r.get("accept_ci95") for r in own) else " Intervals take rounds as independent."
        svg = charts.lines(panels, "draft position j", "accepted, a_j (share of rounds)", palette)
        yield Figure(f"Acceptance by position, {shape}", svg, caption)


def _rates(row: Row, series: Sequence[str]) -> charts.Line:
    rates = row["accept_at"]
    given = row.get("accept_ci95")
    ends = [wilson(a, row.get("rounds", 0)) for a in rates]
    if given:
        ends = [(a - half, a + half) if half is not None else (a, a) for a, half in zip(rates, given, strict=True)]
    low, high = zip(*ends, strict=True)
    return charts.Line(_name(row, series), range(1, len(rates) + 1), rates, low, high)


def _buckets(rows: Sequence[Row], key: str, axis: str, series: Sequence[str], palette: Palette) -> Iterable[Figure]:
    """Make a chart of tau in buckets of tokens, of the lowest temperature and the deepest shape that has them."""
    if not rows:
        return
    temperature = min(row["temperature"] for row in rows)
    shape = max((row["steps"], row["topk"] == 1, row["shape"]) for row in rows)[-1]
    panels: dict[str, list[charts.Line]] = {}
    for row in rows:
        if row["temperature"] == temperature and row["shape"] == shape:
            panels.setdefault(row["prompts"], []).append(_bucket_line(row, key, series))
    if not any(len(line.x) > 1 for own in panels.values() for line in own):
        return  # one range: the table says it
    svg = charts.lines(panels, axis, "tau (tokens per round)", palette)
    caption = "Each point is a range of tokens, drawn at its middle; its 95% interval is over prompts."
    yield Figure(f"tau by {axis.partition(' (')[0]}, {shape}, T={temperature:g}", svg, caption)


def _bucket_line(row: Row, key: str, series: Sequence[str]) -> charts.Line:
    parts = [part for part in row[key] if part.get("tau") is not None]
    middles = [(part["from"] + (part["to"] if part["to"] is not None else 2 * part["from"])) / 2 for part in parts]
    halves = [part.get("ci95") or 0.0 for part in parts]
    taus = [part["tau"] for part in parts]
    low = [tau - half for tau, half in zip(taus, halves, strict=True)]
    high = [tau + half for tau, half in zip(taus, halves, strict=True)]
    return charts.Line(_name(row, series), middles, taus, low, high)


def _bucket_table(rows: Sequence[Row], key: str) -> Any:
    """Make a table with a line for each row that has buckets, and a column for each bucket."""
    lines = []
    for row in rows:
        line = {name: row[name] for name in ("file", "draft", "prompts", "shape", "temperature") if name in row}
        for part in row.get(key) or []:
            half = f" ± {number(part['ci95'])}" if part.get("ci95") is not None else ""
            to = "" if part["to"] is None else part["to"]
            line[f"{part['from']}–{to}"] = "–" if part.get("tau") is None else f"{part['tau']:.2f}{half}"
        if row.get(key):
            lines.append(line)
    return table(key.replace("_", " "), lines, is_folded=len(lines) > 8)


def _by(rows: Sequence[Row], key: str) -> list[tuple[Any, list[Row]]]:
    """Group rows by the value of `key`: numbers in their order, names in the order of appearance."""
    values = list(dict.fromkeys(row[key] for row in rows))
    ordered = sorted(values) if all(isinstance(value, int | float) for value in values) else values
    return [(value, [row for row in rows if row[key] == value]) for value in ordered]
