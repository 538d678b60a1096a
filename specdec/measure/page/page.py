"""Renders result records as one HTML page that needs nothing else: sections where there are rows, then definitions."""

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import Any

from specdec.measure.definitions import DEFINITIONS
from specdec.measure.page import acceptance, checks, others, speed
from specdec.measure.page.libraries import missing_libraries
from specdec.measure.page.palette import Palette
from specdec.measure.page.parts import Card, Row, Section, Table, text
from specdec.measure.records import Record

MOST_CARDS = 6
MOST_NAMED = 3  # measurements in the title
KIND_NAMES = {
    "peers": "Ways to generate",
    "gsm8k": "GSM8K by prefill mode",
    "lossless": "Texts beside model.generate",
    "faults": "Random faults",
}
KINDS: dict[str, Callable[[Row], bool]] = {  # the first that says yes has the row
    "acceptance": acceptance.is_acceptance,
    "gsm8k": checks.is_gsm8k,
    "lossless": checks.is_lossless,
    "latency": speed.is_latency,
    "start": speed.is_start_up,
    "rounds": speed.is_round,
    "serving": others.is_serving,
    "peers": others.is_peer,
    "lookup": others.is_lookup,
    "others": lambda row: True,
}


def write_page(records: Sequence[Record], path: Path) -> Path:
    """Write the page of `records` to `path`, whole or not at all."""
    html = render(records)
    half = path.with_name(f".{path.name}.part")
    half.write_text(html, "utf-8")
    half.replace(path)
    return path


def render(records: Sequence[Record]) -> str:
    """Return the HTML of `records`. ValueError where there are none, or where a library is missing."""
    if not records:
        raise ValueError("a page needs at least one result file")
    missing = missing_libraries()
    if missing:
        raise ValueError(f"a page cannot be rendered: {missing}")
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup

    rows = _rows(records)
    found = sections(rows)
    loader = PackageLoader("specdec.measure.page", ".")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["svg"] = Markup
    return environment.get_template("template.html.j2").render(
        title=_title(records),
        subtitle=_subtitle(records),
        imposed=_imposed(records),
        cards=_cards(found),
        sections=found,
        environment=_environment(records),
        definitions=DEFINITIONS,
    )


def sections(rows: Sequence[Row]) -> list[Section]:
    """Return the sections of `rows`, those that there are rows for."""
    kinds: dict[str, list[Row]] = {kind: [] for kind in KINDS}
    for row in rows:
        kinds[kind_of(row)].append(row)
    names = shortener([str(row.get("draft", "")) for row in kinds["acceptance"]])
    palette = Palette(_names(kinds, names))
    makers: dict[str, Callable[[Sequence[Row]], Section]] = {
        "acceptance": lambda own: acceptance.acceptance_section(own, names, palette),
        "latency": lambda own: speed.latency_section(own, palette),
        "rounds": speed.rounds_section,
        "peers": others.peers_section,
        "lookup": lambda own: others.lookup_section(own, palette),
        "gsm8k": lambda own: checks.gsm8k_section(own, palette),
        "lossless": checks.lossless_section,
        "serving": others.serving_section,
        "start": speed.start_section,
        "others": others.plain_section,
    }
    found = [make(kinds[kind]) for kind, make in makers.items() if kinds[kind]]
    eager = others.eager_section(rows)
    return [*found, eager] if eager else found


def _cards(found: Sequence[Section]) -> list[Card]:
    """Choose the figures on top: the first of every section, then the second, and so on; in the order of sections."""
    ranked = [(rank, i, card) for i, section in enumerate(found) for rank, card in enumerate(section.cards)]
    chosen = sorted(ranked, key=lambda one: one[:2])[:MOST_CARDS]
    return [card for _, _, card in sorted(chosen, key=lambda one: (one[1], one[0]))]


def kind_of(row: Row) -> str:
    """Return the kind of `row`, which says the section that it is shown in."""
    return next(kind for kind, is_one in KINDS.items() if is_one(row))


def shortener(names: Iterable[str]) -> Callable[[str], str]:
    """Return what cuts the beginning that all of `names` with dashes share, up to a dash."""
    own = [name.split("-") for name in dict.fromkeys(names) if "-" in name]
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*own, strict=False)) if len(own) > 1 else ()
    prefix = "".join(f"{parts[0]}-" for parts in shared)
    return lambda name: name.removeprefix(prefix)


def _names(kinds: dict[str, list[Row]], names: Callable[[str], str]) -> list[str]:
    """Return all that gets a colour, drafts first."""
    drafts = acceptance.series_names(kinds["acceptance"], names)
    modes = [row.get("mode", "mode") for row in kinds["gsm8k"]]
    ways = [row["what"] for row in kinds["lookup"]]
    return [*drafts, *speed.series_names(kinds["latency"]), *map(str, [*modes, *ways])]


def _rows(records: Sequence[Record]) -> list[Row]:
    """Return the rows of all records; those of several say their file, by the parts of its name that differ."""
    if len(records) == 1:
        return list(records[0].rows)
    short = differing([record.name for record in records])
    return [{"file": name, **row} for name, record in zip(short, records, strict=True) for row in record.rows]


def differing(names: Sequence[str]) -> list[str]:
    """Return of each name the parts between underscores that the others do not all have; whole names if those clash."""
    parts = list(zip(*zip_longest(*(name.split("_") for name in names), fillvalue=""), strict=True))
    kept = [i for i, column in enumerate(zip(*parts, strict=True)) if len(set(column)) > 1]
    short = ["_".join(filter(None, (own[i] for i in kept))) for own in parts]
    return short if all(short) and len(set(short)) == len(names) else list(names)


def _title(records: Sequence[Record]) -> str:
    """Name what was measured, and of what, by the files' names: "Latency (after moves), Acceptance of 8b and 135m"."""
    parts = [record.name.split("_") for record in records]
    measured, targets = (list(dict.fromkeys(p[i] for p in parts if len(p) > i)) for i in range(2))
    named = [_measurement(name) for name in measured]
    if len(named) > MOST_NAMED:
        named = [f"{len(named)} measurements"]
    return ", ".join(named) + (f" of {' and '.join(targets)}" if targets else "")


def _measurement(name: str) -> str:
    """Write the first part of a file's name as words: "latency-after-moves" is "Latency (after moves)"."""
    kind, _, label = name.partition("-")
    words = KIND_NAMES.get(kind, kind.replace("-", " ").capitalize())
    return f"{words} ({label.replace('-', ' ')})" if label else words


def _imposed(records: Sequence[Record]) -> str:
    """Say of which files weights are random and acceptance is imposed; "" if of none."""
    speed = [record for record in records if record.name.startswith(("latency", "peers"))]
    found = [r.name for r in speed if "--shape" in str(r.about.get("command")) or "acceptance" in _config(r.about)]
    of = "" if len(found) == len(records) else f" in {', '.join(found)}"
    return f"Weights are random and acceptance is imposed{of}: tau says nothing about a trained draft." if found else ""


def _subtitle(records: Sequence[Record]) -> str:
    about = [record.about for record in records]
    gpus = dict.fromkeys(str(a["gpu"]) for a in about if a.get("gpu"))
    commits = dict.fromkeys(str(c) for a in about if (c := a.get("commit") or _config(a).get("commit")))
    files = f"{len(records)} result files" if len(records) > 1 else records[0].name
    return " · ".join([files, *gpus, *(f"commit {commit}" for commit in commits)])


def _config(about: dict[str, Any]) -> dict[str, Any]:
    config = about.get("config")
    return config if isinstance(config, dict) else {}


def _environment(records: Sequence[Record]) -> list[Table]:
    """Make a table for each record of all that it says about itself."""
    tables = []
    for record in records:
        lines = [(key, value) for key, value in record.about.items() if key not in ("config", "versions")]
        lines += [(f"{name} version", value) for name, value in (record.about.get("versions") or {}).items()]
        lines += list(_config(record.about).items())
        cells = [[key.replace("_", " "), text(value)] for key, value in lines]
        tables.append(Table(record.name, ["", ""], cells, [False, False], len(records) > 2))
    return tables
