"""What a page consists of: sections with figures, tables and cards, and how values are written in them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from specdec.measure.keys import label_of, measure_of

Row = Mapping[str, Any]


class Card(NamedTuple):
    """One of the figures on top: "3.00 ± 0.06", "tau", and of what it is."""

    value: str
    label: str
    detail: str


class Figure(NamedTuple):
    """An SVG chart, with a title above and a caption below it."""

    title: str
    svg: str
    caption: str = ""


class Table(NamedTuple):
    """Cells as text, a list a row; is_number: of each column; is_folded: shown when the reader asks; note: below it."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    is_number: list[bool]
    is_folded: bool = False
    note: str = ""


@dataclass
class Section:
    """A part of the page; `anchor` is its place in links."""

    anchor: str
    title: str
    intro: str = ""
    cards: list[Card] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


FOLDED_FROM = 16  # rows
LONG = 24  # letters of a text that is said once below a table if all rows have it


def table(title: str, rows: Sequence[Row], keys: Sequence[str] = (), *, is_folded: bool | None = None) -> Table:
    """Make a table of `rows`: of `keys` that some row has, or of every key in the order of appearance. A long text that
    all rows have is said below it."""
    present = list(dict.fromkeys(key for row in rows for key in row if key != "file" or varying(rows, ["file"])))
    wanted = [key for key in keys if key in present] or present
    said = [key for key in wanted if len(rows) > 1 and _is_long(rows[0].get(key)) and not varying(rows, [key])]
    shown = [key for key in wanted if key not in said]
    note = "; ".join(f"{label_of(key)}: {rows[0][key]}" for key in said)
    cells = [[text(row.get(key)) for key in shown] for row in rows]
    is_number = [all(_is_number(row.get(key)) for row in rows) for key in shown]
    folded = len(rows) >= FOLDED_FROM if is_folded is None else is_folded
    return Table(title, [label_of(key) for key in shown], cells, is_number, folded, note and f"In all rows: {note}.")


def rest_of(rows: Sequence[Row], keys: Sequence[str]) -> list[str]:
    """Return the keys of `rows` that are not in `keys`, so that a table loses none."""
    return [key for key in dict.fromkeys(key for row in rows for key in row) if key not in keys]


def text(value: Any) -> str:
    """Write a value as a cell of a table."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {text(one)}" for key, one in value.items()) or "–"
    if isinstance(value, list | tuple):
        return _listed(value)
    return f"{value:,}" if isinstance(value, int) and abs(value) >= 10_000 else str(value)


def number(value: float) -> str:
    """Write a number with three to four significant digits."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 100:
        return f"{value:.1f}".removesuffix(".0")
    if size >= 1:
        return f"{value:.3f}".rstrip("0").rstrip(".")
    return f"{value:.4g}"


def short(value: float) -> str:
    """Write a number with three significant digits, as cards do."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _listed(values: Sequence[Any], most: int = 12) -> str:
    if values and all(isinstance(v, float) for v in values) and max(map(abs, values)) >= 0.05:
        shown = " ".join(f"{v:.2f}" for v in values[:most])
    else:
        shown = ", ".join(text(v) for v in values[:most])
    left = len(values) - most
    return (shown or "–") + (f" … ({len(values)} in all)" if left > 0 else "")


def _is_long(value: Any) -> bool:
    return isinstance(value, str) and len(value) > LONG


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def shape_of(row: Row) -> str:
    """Name the shape of a round: "plain", "chain S=3", "tree S=5 K=8 D=32"."""
    steps = row.get("steps", row.get("num_steps"))
    if not steps:
        return "plain"
    if (row.get("topk") or 1) == 1:
        return f"chain S={steps}"
    return f"tree S={steps} K={row['topk']} D={row.get('draft_tokens', row.get('num_draft_tokens', '?'))}"


def varying(rows: Sequence[Row], keys: Sequence[str]) -> list[str]:
    """Return those of `keys` of which `rows` have more than one value."""
    return [key for key in keys if len({text(row.get(key)) for row in rows}) > 1]


def named(row: Row, keys: Sequence[str], words: Mapping[str, str] | None = None) -> str:
    """Join the values that `row` has for `keys`; `words` are put before a value, as in "batch 8"."""
    found = [f"{(words or {}).get(key, '')}{text(row[key])}" for key in keys if row.get(key) is not None]
    return ", ".join(found)


def is_measured(key: str, value: Any) -> bool:
    """Whether `key` is a measured value of its row."""
    return measure_of(key, value) is not None
