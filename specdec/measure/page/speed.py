"""The page's sections on speed: first token, rounds beside their floor, throughput, start-up and graphs."""

from collections.abc import Iterable, Sequence
from typing import Any

from specdec.measure.page import charts
from specdec.measure.page.palette import Palette
from specdec.measure.page.parts import Card, Figure, Row, Section, named, rest_of, shape_of, short, table, varying

LATENCY = frozenset({"ttft", "tpot"})
START_UP = frozenset({"attach", "build", "capture"})
PHASES = ("draft", "verify", "accept", "extend")
ROUNDS = frozenset({*PHASES, "round", "plain_step"})
SERIES = ("file", "label", "mode", "rounds of")
PANELS = ("shape", "tokenizer", "sampling")
WORDS = {"batch": "batch ", "tokens": "prompt ", "tokenizer": "with text: "}
SHAPE_KEYS = ("steps", "topk", "draft_tokens")  # of which "rounds of" is made
PHASE_COLOURS = {"draft": "#E69F00", "verify": "#0072B2", "accept": "#CC79A7", "extend": "#009E73", "round": "#888888"}
START_COLOURS = {"compiling": "#E69F00", "capturing graphs": "#0072B2", "the rest of attaching": "#BBBBBB"}


def is_latency(row: Row) -> bool:
    """Whether `row` is a time to the first token or per token."""
    return row.get("what") in LATENCY and "ms" in row


def is_start_up(row: Row) -> bool:
    """Whether `row` says what attaching an engine took."""
    return row.get("what") in START_UP and bool({"capture_s", "attach_s"} & row.keys())


def is_round(row: Row) -> bool:
    """Whether `row` is a phase of a round, stepped without the engine's door."""
    return row.get("what") in ROUNDS and "ms" in row and "sampling" in row


def series_names(rows: Iterable[Row]) -> list[str]:
    """Return the names of the series of speed rows, for the palette."""
    own = _completed(rows)
    keys = _series(own)
    return list(dict.fromkeys(_name(row, keys) for row in own))


def latency_section(rows: Sequence[Row], palette: Palette) -> Section:
    """Make the section of TTFT and TPOT rows, the first of `bench latency` and of `bench/prefill.py`."""
    own = _completed(rows)
    section = Section("latency", "Time to the first token and of a round")
    section.intro = (
        "TTFT is a call with one new token; a round is the time per token (TPOT) times tau. The floor is what reading "
        "weights and keys once, or multiplying, takes at best on this device."
    )
    section.figures = [*_prefill(own, palette), *_beside_floor(own, palette), *_throughput(own, palette)]
    section.cards = _cards(own)
    keys = ["file", "label", "shape", "mode", "rounds of", "batch", "tokens", "tokenizer", "what", "ms", "round_ms"]
    keys += ["tau", "floor_ms", "tokens/s", "pays from tau", "host_ms", "idle_percent", "gap_us", "eager", "replayed"]
    shown = [*keys, *rest_of(own, (*keys, *SHAPE_KEYS))]
    section.tables = [table("Every latency row", own, shown)]
    return section


def _completed(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Add the shape's name, tokens/s of all requests, the floor of a round, and the tau at which it pays."""
    found = [{**row, "rounds of": shape_of(row)} if "steps" in row else dict(row) for row in rows]
    for row in found:
        if row["what"] == "tpot" and row["ms"]:
            row["tokens/s"] = round(row.get("batch", 1) * 1000 / row["ms"], 1)
            plain = _plain_of(row, found)
            if plain and row.get("round_ms") and row is not plain:
                row["pays from tau"] = round(row["round_ms"] / plain["ms"], 2)
    return found


def _plain_of(row: Row, rows: Iterable[Row]) -> Row | None:
    """Return the row of plain decoding that `row` is held against: the same file, model, mode, batch and prompts."""
    keys = ("file", "label", "shape", "mode", "batch", "tokens", "tokenizer", "what")
    alike = (r for r in rows if r.get("steps") == 0 and all(r.get(key) == row.get(key) for key in keys))
    return next(alike, None)


def _series(rows: Sequence[Row]) -> list[str]:
    return varying(rows, SERIES) or [next((k for k in ("rounds of", "mode") if any(k in r for r in rows)), "what")]


def _name(row: Row, keys: Sequence[str]) -> str:
    return named(row, keys) or "engine"


def _panel(row: Row, keys: Sequence[str]) -> str:
    words = {True: "with a tokenizer", False: "token ids only"}
    return ", ".join(words.get(row[k], str(row[k])) for k in keys if row.get(k) is not None)


def _prefill(rows: Sequence[Row], palette: Palette) -> Iterable[Figure]:
    """Make a chart of the time to the first token over prompt tokens, of single prompts."""
    own = [row for row in rows if row["what"] == "ttft" and row.get("batch", 1) == 1]
    if len({row["tokens"] for row in own}) < 2:
        return
    series, panel = _series(rows), varying(own, PANELS)
    panels: dict[str, list[charts.Line]] = {}
    for title in dict.fromkeys(_panel(row, panel) for row in own):
        here = [row for row in own if _panel(row, panel) == title]
        panels[title] = [
            _over(here, name, series, "tokens", "ms") for name in dict.fromkeys(_name(r, series) for r in here)
        ]
        floors = {row["tokens"]: row["floor_ms"] for row in here if row.get("floor_ms")}
        if floors:
            panels[title].append(charts.Line("floor", sorted(floors), [floors[t] for t in sorted(floors)], style=":"))
    svg = charts.lines(panels, "prompt (tokens)", "time to the first token (ms)", palette, log="xy")
    yield Figure("Prefill: time to the first token of one prompt", svg)


def _over(rows: Sequence[Row], name: str, series: Sequence[str], x: str, y: str) -> charts.Line:
    own = sorted((r for r in rows if _name(r, series) == name), key=lambda r: r[x])
    return charts.Line(name, [r[x] for r in own], [r[y] for r in own], style="--" if own[0].get("steps") == 0 else "-")


def _beside_floor(rows: Sequence[Row], palette: Palette) -> Iterable[Figure]:
    """Make charts of the first token of several prompts and of a round, a line for each batch and prompt."""
    several = [row for row in rows if row["what"] == "ttft" and row.get("batch", 1) > 1]
    rounds = [row for row in rows if row["what"] == "tpot" and row.get("round_ms") is not None]
    first = "First token of several prompts at once, beside its floor"
    for title, own, key, x in (
        (first, several, "ms", "time to the first token (ms)"),
        ("A round beside its floor", rounds, "round_ms", "a round (ms)"),
    ):
        series, panel = _series(rows), varying(own, PANELS)
        panels: dict[str, list[charts.Dot]] = {}
        for row in sorted(own, key=lambda r: (r["batch"], r["tokens"])):
            floor = row.get("floor_ms")
            if floor is not None and row["what"] == "tpot":
                floor *= row.get("tau") or 1.0  # rows give it per token
            case = f"{row['batch']} × {row['tokens']}"
            dot = charts.Dot(case, _name(row, series), row[key], None, floor)
            panels.setdefault(_panel(row, panel), []).append(dot)
        if panels:
            yield Figure(title, charts.dots(panels, x, palette, y="batch × prompt tokens", is_log=True, floor="floor"))


def _throughput(rows: Sequence[Row], palette: Palette) -> Iterable[Figure]:
    """Make a chart of tokens/s over the batch, where plain decoding is the line to be above."""
    own = [row for row in rows if row["what"] == "tpot" and row.get("tokens/s")]
    if len({row["batch"] for row in own}) < 2:
        return
    series, panel = _series(rows), [*varying(own, PANELS), *varying(own, ("tokens",))]
    panels: dict[str, list[charts.Line]] = {}
    for title in dict.fromkeys(_panel(row, panel) for row in own):
        here = [row for row in own if _panel(row, panel) == title]
        names = dict.fromkeys(_name(row, series) for row in here)
        shown = f"{title.rpartition(', ')[0] or title}" if "tokens" not in panel else f"{title} tokens"
        panels[shown if shown not in panels else title] = [_over(here, n, series, "batch", "tokens/s") for n in names]
    has_plain = any(row.get("steps") == 0 for row in own)
    caption = "Break-even is the dashed line of plain decoding: speculation pays above it."
    missing = "There is no plain decoding in these rows, so break-even is not known."
    svg = charts.lines(panels, "batch (requests)", "tokens/s of all requests", palette, log="xy")
    yield Figure("Tokens/s against batch", svg, caption if has_plain else missing)


def _cards(rows: Sequence[Row]) -> list[Card]:
    cards = []
    first = [row for row in rows if row["what"] == "ttft"]
    if first:
        best = min(first, key=lambda row: row["ms"])
        cards.append(Card(f"{short(best['ms'])} ms", "shortest TTFT", _case(best)))
    rounds = [row for row in rows if row["what"] == "tpot" and row.get("tokens/s")]
    if rounds:
        alone = min(rounds, key=lambda row: (row["batch"], row["ms"]))
        cards.append(Card(f"{short(alone['ms'])} ms", f"per token (TPOT), batch {alone['batch']}", _case(alone)))
        most = max(rounds, key=lambda row: row["tokens/s"])
        cards.append(Card(f"{most['tokens/s']:,.0f}", "tokens/s at most", _case(most)))
        paying = [row for row in rounds if "pays from tau" in row]
        if paying:
            gain = max(paying, key=lambda row: row["tau"] / row["pays from tau"])
            cards.append(Card(f"{gain['tau'] / gain['pays from tau']:.2f}×", "of plain decoding", _case(gain)))
    return cards


def _case(row: Row) -> str:
    floor = f", floor {short(row['floor_ms'])}" if row.get("floor_ms") else ""
    return named(row, ("shape", "mode", "rounds of", "batch", "tokens"), WORDS) + floor


def rounds_section(rows: Sequence[Row]) -> Section:
    """Make the section of rounds stepped phase by phase."""
    own = [{**row, "rounds of": shape_of(row)} for row in rows]
    section = Section("rounds", "Phases of a round")
    section.intro = "The core stepped without the door: draft, verify, accept and extend, timed one by one."
    keys = ["file", "shape", "mode", "rounds of", "sampling", "batch", "tokens"]
    cases = varying(own, keys) or ["rounds of"]
    bars: dict[str, dict[str, float]] = {}
    floors: dict[str, float] = {}
    for row in own:
        case = named(row, cases, WORDS)
        if row["what"] in PHASES:
            bars.setdefault(case, {})[row["what"]] = row["ms"]
        elif row["what"] == "round" and row.get("floor_ms"):
            floors[case] = row["floor_ms"]
    if bars:
        svg = charts.stacks({"": bars}, "time (ms)", PHASE_COLOURS, y="case", marks=floors)
        section.figures = [Figure("Milliseconds by phase", svg, "The black mark is the floor of the whole round.")]
    whole = [row for row in own if row["what"] == "round"]
    if whole:
        best = min(whole, key=lambda row: row["ms"])
        section.cards = [Card(f"{short(best['ms'])} ms", "shortest round", _case(best))]
    shown = [*keys, "what", "ms", "floor_ms", "tau"]
    section.tables = [table("Every phase", own, [*shown, *rest_of(own, (*shown, *SHAPE_KEYS))])]
    return section


def start_section(rows: Sequence[Row]) -> Section:
    """Make the section of attaching: seconds of compiling and capturing, MiB of graphs."""
    own = [{**row, "rounds of": shape_of(row)} if "steps" in row else dict(row) for row in rows]
    section = Section("graphs", "Start-up and graphs")
    section.intro = "What attaching an engine took, once, and what its captured graphs hold on the device."
    cases = varying(own, ("file", "label", "shape", "mode", "rounds of", "batch", "tokens", "attempt")) or ["what"]
    if all(str(row.get("label")) in str(row.get("file")) for row in own):
        cases = [key for key in cases if key != "label"]
    words = {"batch": "batch ", "tokens": "tokens "}
    cases.sort(key=lambda key: key != "rounds of")  # first, as the middle of a long name is left out
    names = _numbered([named(row, cases, words) for row in own])
    parts = {name: _start_parts(row) for name, row in zip(names, own, strict=True)}
    svg = charts.stacks({"": parts}, "time (s)", START_COLOURS, y="engine")
    section.figures = [Figure("Seconds of attaching", svg)]
    memory = {n: {"graphs": float(r["graph_mib"])} for n, r in zip(names, own, strict=True) if r.get("graph_mib")}
    if memory:
        svg = charts.stacks({"": memory}, "graph memory (MiB)", {"graphs": "#0072B2"}, y="engine")
        section.figures.append(Figure("Memory of captured graphs", svg))
    slowest = max(own, key=_attach_s)
    section.cards = [Card(f"{short(_attach_s(slowest))} s", "attaching, at most", named(slowest, cases, words))]
    section.tables = [table("Every engine", own)]
    return section


def _start_parts(row: Row) -> dict[str, float]:
    compiling, capturing = float(row.get("compile_s") or 0), float(row.get("capture_s") or 0)
    rest = max(_attach_s(row) - compiling - capturing, 0.0)
    return dict(zip(START_COLOURS, (compiling, capturing, rest), strict=True))


def _attach_s(row: Row) -> float:
    return float(row["attach_s"] if "attach_s" in row else row.get("ms", 0) / 1000)


def _numbered(names: Sequence[str]) -> list[str]:
    """Tell equal names apart by a number."""
    return [f"{name} ({names[: i + 1].count(name)})" if names.count(name) > 1 else name for i, name in enumerate(names)]
