"""The page's other sections: other ways to the same text, the server, what ran eagerly, and rows of unknown kinds."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from specdec.measure.page import charts
from specdec.measure.page.palette import Palette
from specdec.measure.page.parts import Card, Figure, Row, Section, is_measured, named, number, rest_of, table, varying

RATES = ("tokens_per_s", "tok_s")
CASE = ("file", "label", "shape", "dtype", "mode", "speculation", "what", "batch", "tokens")


def is_peer(row: Row) -> bool:
    """Whether `row` is one of the ways that `specdec bench peers` times; one that failed has an error instead."""
    return ("way" in row or "what" in row) and "requests" in row and bool({*RATES, "error", "missing"} & row.keys())


def is_lookup(row: Row) -> bool:
    """Whether `row` is a way to generate for a set of prompts, as `bench/lookup.py` times them."""
    return {"what", "prompts", "tok_s", "equal"} <= row.keys()


def is_serving(row: Row) -> bool:
    """Whether `row` is of the server's bench."""
    return row.get("what") in ("clients", "soak")


def peers_section(rows: Sequence[Row]) -> Section:
    """Make the section of other ways to the same text, fastest first; what is not installed is said."""
    section = Section("peers", "Other ways to the same text")
    section.intro = (
        "The same requests by transformers' own ways, by other libraries, and by engines; second run of two."
    )
    of, names = (varying(rows, key) for key in (("file", "shape"), ("requests",)))
    panels: dict[str, dict[str, float]] = {}
    for row in rows:
        rate = next((row[key] for key in RATES if row.get(key)), None)
        if rate:
            way = named({"way": _way(row), **row}, ["way", *names], {"requests": "requests: "})
            panels.setdefault(named(row, of[:1]), {})[way] = rate
    if panels:
        bars = {
            title: {way: {"tokens/s": rate} for way, rate in sorted(rates.items(), key=lambda pair: -pair[1])}
            for title, rates in panels.items()
        }
        svg = charts.stacks(bars, "tokens/s of all requests", {"tokens/s": "#0072B2"}, y="way")
        section.figures = [Figure("Tokens/s by way", svg)]
        for title, rates in panels.items():
            way = max(rates, key=lambda name: rates[name])
            section.cards.append(
                Card(f"{rates[way]:,.0f}", "tokens/s, fastest way", ", ".join(filter(None, (way, title))))
            )
    own = [{"way": _way(row), **{k: v for k, v in row.items() if k not in ("what", "way")}} for row in rows]
    first = ("file", "way", "version", "shape", "requests", "new_tokens", *RATES, "seconds", "error")
    section.tables = [table("Every way", own, [*first, *rest_of(own, first)])]
    return section


def _way(row: Row) -> str:
    return str(row.get("way") or row["what"])


def lookup_section(rows: Sequence[Row], palette: Palette) -> Section:
    """Make the section of ways to generate, by set of prompts."""
    section = Section("lookup", "Speed by set of prompts")
    section.intro = "One prompt at a time. “hf” is the target's own generate; all texts are held against its text."
    panel = varying(rows, ("file",)) or ["steps"]
    panels: dict[str, list[charts.Dot]] = {}
    for row in rows:
        title = named(row, panel) if panel == ["file"] else ""
        panels.setdefault(title, []).append(charts.Dot(str(row["prompts"]), str(row["what"]), row["tok_s"]))
    svg = charts.dots(panels, "tokens/s", palette, y="prompts", is_log=True)
    section.figures = [Figure("Tokens/s by set of prompts", svg)]
    best = max(rows, key=lambda row: row["tok_s"])
    section.cards = [
        Card(number(best["tok_s"]), "tokens/s, one prompt at a time", f"{best['what']}, {best['prompts']}")
    ]
    first = ("file", "what", "prompts", "steps", "num_prompts", "tok_s", "tau", "equal")
    section.tables = [table("Every way", rows, [*first, *rest_of(rows, first)])]
    return section


def serving_section(rows: Sequence[Row]) -> Section:
    """Make the section of the server: throughput and waiting times by number of clients."""
    section = Section("serving", "The server")
    section.intro = "Streams of requests from another process; p50 and p99 over requests."
    for what, own in _by_what(rows):
        title = "Clients at once" if what == "clients" else "Clients that vanish and bad requests"
        section.tables.append(table(title, own))
    busy = [row for row in rows if row.get("requests_s")]
    if busy:
        best = max(busy, key=lambda row: row["requests_s"])
        waited = f"TTFT {number(best['ttft_ms_p50'])} ms (p50)" if "ttft_ms_p50" in best else ""
        section.cards = [Card(number(best["requests_s"]), "requests/s", f"{best['clients']} clients, {waited}")]
    return section


def eager_section(rows: Sequence[Row]) -> Section | None:
    """Make the section of what ran eagerly and why; None where no row counts that."""
    counted = [row for row in rows if "eager" in row or "runners" in row]
    keys = varying(counted, CASE) or ["what"]
    lines = [line for row in counted for line in _eager_lines(row, keys)]
    if not counted:
        return None
    section = Section("eager", "What ran eagerly, and why")
    num = sum(line["eager runs"] for line in lines)
    section.intro = "Forwards that no graph replayed, with the engine's reason where rows have one."
    section.cards = [Card(str(num), "eager runs", f"in {len(counted)} rows that count them")]
    if lines:
        section.tables = [table("Eager runs", lines)]
    else:
        section.intro = f"Nothing: in all {len(counted)} rows that count eager runs, graphs replayed every forward."
    return section


def _eager_lines(row: Row, keys: Sequence[str]) -> list[dict[str, Any]]:
    """Return a line for each runner of `row` that ran eagerly, or one for the row. keys: what tells rows apart."""
    case = named(row, keys, {"batch": "batch ", "tokens": "tokens ", "speculation": "speculation: "})
    runners = row.get("runners")
    if isinstance(runners, Mapping):
        return [
            {"row": case, "runner": name, "eager runs": counts["eager"], "replays": counts.get("replays"), "why": why}
            for name, counts in runners.items()
            if counts.get("eager")
            for why in [", ".join(f"{reason}: {n}" for reason, n in counts.get("rejects", {}).items()) or None]
        ]
    if isinstance(row.get("eager"), int) and row["eager"]:
        return [{"row": case, "eager runs": row["eager"], "why": row.get("reasons") or row.get("notes")}]
    return []


def plain_section(rows: Sequence[Row]) -> Section:
    """Make the section of all other rows: a table for each kind, nothing left out."""
    section = Section("others", "Other measurements")
    for what, own in _by_what(rows):
        keys = list(dict.fromkeys(key for row in own for key in row))
        keys.sort(key=lambda key: any(is_measured(key, row[key]) for row in own if key in row))
        section.tables.append(table(what, own, keys))
    return section


def _by_what(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Group rows by `what`, or else by their keys."""
    ordered = sorted(rows, key=_kind)
    return [(kind, list(own)) for kind, own in groupby(ordered, key=_kind)]


def _kind(row: Row) -> str:
    return str(row["what"]) if "what" in row else ", ".join(list(row)[:3])
