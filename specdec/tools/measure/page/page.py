"""Renders result records as one self-contained HTML page: sections for the rows that exist, then definitions."""

from collections.abc import Sequence
from importlib.resources import files
from importlib.util import find_spec
from itertools import zip_longest
from typing import Any

from specdec.core import grouped
from specdec.tools.measure.page.charts import Charts
from specdec.tools.measure.page.kinds import KINDS, eager_section, kind_of
from specdec.tools.measure.page.sections import Card, Section
from specdec.tools.measure.rows import Record, Row, text
from specdec.tools.measure.tables import Table

MOST_CARDS = 6
MOST_NAMED = 3  # measurements in the title
KIND_NAMES = {
    "peers": "Ways to generate",
    "gsm8k": "GSM8K by prefill mode",
    "lossless": "Texts compared with model.generate",
    "faults": "Random faults",
}


def render(records: Sequence[Record]) -> str:
    """Return the HTML of `records`. ValueError if there are none, or a library is missing."""
    if not records:
        raise ValueError("a page needs at least one result file")
    if absent := [name for name in ("jinja2", "matplotlib") if find_spec(name) is None]:
        missing = f"{' and '.join(absent)} not installed (pip install 'specdec-toolkit[bench]')"
        raise ValueError(f"a page cannot be rendered: {missing}")
    from jinja2 import Environment, PackageLoader

    found = sections(_rows(records))
    loader = PackageLoader("specdec.tools.measure.page", ".")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("template.html.j2").render(
        title=_title(records),
        subtitle=_subtitle(records),
        imposed=_imposed(records),
        cards=_cards(found),
        sections=found,
        environment=[_environment(record, is_folded=len(records) > 2) for record in records],
        definitions=definitions(),
    )


def definitions() -> list[list[str]]:
    """Return term, meaning, and the name in other benches, of every line of definitions.md."""
    lines = files("specdec.tools.measure.page").joinpath("definitions.md").read_text("utf-8").splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")][1:]


def sections(rows: Sequence[Row]) -> list[Section]:
    """Return the non-empty sections for `rows`."""
    charts, found = Charts(), grouped(rows, kind_of)
    own = [kind.section(found[kind], charts) for kind in KINDS if kind in found]
    eager = eager_section(rows)
    return [*own, eager] if eager else own


def _cards(found: Sequence[Section]) -> list[Card]:
    """Choose the figures on top: the first of every section, then the second, and so on; in the order of sections."""
    ranked = [(rank, i, card) for i, section in enumerate(found) for rank, card in enumerate(section.cards)]
    chosen = sorted(ranked, key=lambda one: one[:2])[:MOST_CARDS]
    return [card for _, _, card in sorted(chosen, key=lambda one: (one[1], one[0]))]


def _rows(records: Sequence[Record]) -> list[Row]:
    """Return the rows of all records; those of several records name their file, by the parts of its name that
    differ."""
    if len(records) == 1:
        return list(records[0].rows)
    short = differing([record.name for record in records])
    rows = [{"file": name, **row} for name, record in zip(short, records, strict=True) for row in record.rows]
    return [{k: v for k, v in row.items() if k != "label" or str(v) not in row["file"]} for row in rows]


def differing(names: Sequence[str]) -> list[str]:
    """Return of each name the parts between underscores that not all names have; whole names if those clash."""
    parts = list(zip(*zip_longest(*(name.split("_") for name in names), fillvalue=""), strict=True))
    kept = [i for i, column in enumerate(zip(*parts, strict=True)) if len(set(column)) > 1]
    short = ["_".join(filter(None, (own[i] for i in kept))) for own in parts]
    return short if all(short) and len(set(short)) == len(names) else list(names)


def _title(records: Sequence[Record]) -> str:
    """Name the measurements and their subjects, from file names: "Latency (after moves), Acceptance of 8b and 135m"."""
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
    """Name the files with random weights and imposed acceptance; "" if there are none."""
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


def _environment(record: Record, is_folded: bool) -> Table:
    """Make a table of all keys of a record except its rows."""
    about = {key: value for key, value in record.about.items() if key not in ("config", "versions")}
    about |= {f"{name} version": value for name, value in (record.about.get("versions") or {}).items()}
    cells = [[key.replace("_", " "), text(value)] for key, value in [*about.items(), *_config(record.about).items()]]
    return Table(record.name, ["", ""], cells, [False, False], is_folded)
