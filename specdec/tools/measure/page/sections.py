"""Sections of a page, as data, by kind of rows; charts, cards and tables are made from them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from specdec.core import grouped
from specdec.tools.measure.page.charts import Charts, Point
from specdec.tools.measure.rows import Row, label_of, measure_of, number
from specdec.tools.measure.tables import Table, named, table, varying

Rows = list[dict[str, Any]]
CASE = ("file", "label", "shape", "dtype", "mode", "speculation", "what", "batch", "tokens")
PANELS = ("shape", "tokenizer", "sampling", "prompts", "temperature", "tokens", "file")
DRAWN = ("prompts", "temperature", "shape")
ENGINE = ("shape", "mode", "rounds_of", "batch", "tokens", "floor_ms")


class Card(NamedTuple):
    """One of the figures at the top: "3.00 ± 0.06", "tau", and its subject."""

    value: str
    label: str
    detail: str


class Figure(NamedTuple):
    """An SVG chart, with a title above and a caption below it."""

    title: str
    svg: str
    caption: str = ""


@dataclass
class Section:
    """A part of the page; `anchor` is its place in links."""

    anchor: str
    title: str
    intro: str = ""
    cards: list[Card] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


class Chart(NamedTuple):
    """A chart of a section. form: the method of `Charts` that draws it; x, y: keys of its rows, several of y are parts
    of a bar; rows: selects rows, and expands them if needed.

    A panel is drawn for each value of the PANELS that vary; the others are in the title.
    """

    title: str
    form: str
    x: str
    y: str | tuple[str, ...]
    rows: Callable[[Rows], Rows] = lambda rows: rows
    log: str = ""
    caption: str = ""
    axis: str = ""  # of y, if not its key's label

    def figure(self, kind: "RowKind", rows: Rows, charts: Charts) -> Figure | None:
        """Draw `rows`; None if no row has the keys, or a line would have a single place."""
        parts = (self.y,) if isinstance(self.y, str) else self.y
        drawn = [(row, key) for row in self.rows(rows) for key in parts if row.get(key) is not None]
        if len({row[self.x] for row, _ in drawn}) <= (self.form == "lines"):
            return None
        shown = (*kind.series, *(kind.cases if self.x[0] == "_" else ()))
        keys = [key for key in PANELS if key not in shown and key not in self.x]
        panels = varying([row for row, _ in drawn], keys)
        points = [
            Point(
                named(row, panels),
                row["_series"] if key == self.y else label_of(key),
                *(row[self.x], row[key], _ends(row, key), row.get(f"_{key}_floor")),
            )
            for row, key in drawn
        ]
        axes = label_of(self.x), self.axis or label_of(parts[0])
        svg = getattr(charts, self.form)(points, *(axes if self.form == "lines" else reversed(axes)), self.log)
        fixed = named(drawn[0][0], [key for key in keys if key not in panels and key in DRAWN])
        return Figure(", ".join(filter(None, (self.title, fixed))), svg, self.caption)


def _ends(row: Row, key: str) -> Any:
    """Return the ends of the 95% interval of `key`, or None."""
    measure = measure_of(key, None)
    found = row.get(f"_{key}_ends", row.get(measure.ci) if measure else None)
    return (row[key] - found, row[key] + found) if isinstance(found, int | float) else found


class Best(NamedTuple):
    """A card of the row with the largest `key`, or the one that `pick` chooses; by: a key, each of whose values has a
    card.

    of: keys that describe the row.
    """

    key: str
    label: str
    of: tuple[str, ...] = ENGINE
    unit: str = ""
    pick: Callable[..., dict[str, Any]] = max
    by: str = "_all"

    def cards(self, rows: Rows) -> Iterator[Card]:
        own = [row for row in rows if row.get(self.key) is not None]
        for name, group in sorted(grouped(own, lambda row: str(row.get(self.by, ""))).items()):
            row = self.pick(group, key=lambda row: row[self.key])
            value = plus_minus(row) if self.key == "tau" else number(row[self.key]) + self.unit
            yield Card(value, f"{self.label} {name}".strip(), named(row, self.of))


@dataclass(frozen=True, eq=False)
class RowKind:
    """Rows that `takes` accepts, and the section that shows them.

    complete: copies the rows and adds computed values. series, cases: keys; the values of those that vary become the
    "_series" and the "_case" of a row. columns: the keys that come first in the table; brief: those of the table on a
    terminal.
    """

    anchor: str
    title: str
    intro: str
    takes: Callable[[Row], bool]
    complete: Callable[[Sequence[Row]], Rows] = lambda rows: [dict(row) for row in rows]
    series: tuple[str, ...] = ()
    cases: tuple[str, ...] = CASE
    charts: tuple[Chart, ...] = ()
    best: tuple[Best, ...] = ()
    columns: str = ""
    brief: str = ""
    hidden: str = ""
    tables: Callable[[Rows], list[Table]] = lambda rows: []

    def section(self, rows: Sequence[Row], charts: Charts) -> Section:
        own = self.complete(rows)
        for name, keys in (("_series", self.series), ("_case", self.cases)):
            chosen = varying(own, keys) or [key for key in keys if any(row.get(key) for row in own)][:1]
            for row in own:
                row[name] = named(row, chosen)
        figures = [figure for chart in self.charts if (figure := chart.figure(self, own, charts))]
        cards = [card for best in self.best for card in best.cards(own)]
        tables = [table("Every row", own, self.columns.split(), self.hidden.split())] if self.columns else []
        return Section(self.anchor, self.title, self.intro, cards, figures, [*tables, *self.tables(own)])


def plus_minus(row: Row) -> str:
    """Write the tau of a row or of a bucket, with its 95% interval."""
    return f"{row['tau']:.2f}" + (f" ± {number(round(row['ci95'], 2))}" if row.get("ci95") else "")
