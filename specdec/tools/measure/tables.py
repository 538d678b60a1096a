"""Tables of rows, for terminals and pages alike, and how rows are named in them."""

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from rich import table as rich_table
from rich.console import Console
from rich.markup import escape

from specdec.tools.measure.rows import Row, label_of, text

FOLDED_FROM = 16  # rows
LONG = 24  # letters of a text that is written once below a table if all rows have it
WIDTH = 150  # least columns of a table outside a terminal
WORDS = {"batch": "batch ", "tokens": "tokens ", "requests": "requests ", "tokenizer": "with text: "}
WORDS |= {"speculation": "speculation: ", "temperature": "T=", "floor_ms": "floor "}


class Table(NamedTuple):
    """Cells as text, a list per row; is_number: per column; is_folded: shown on demand; note: below it."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    is_number: list[bool]
    is_folded: bool = False
    note: str = ""

    def print(self, console: Console | None = None, style: str = "") -> None:
        """Print it on a terminal, or for pipes and files as wide as needed."""
        if console is None:
            console = Console()
            console.width = console.width if console.is_terminal else max(console.width, WIDTH)
        shown = rich_table.Table(title=escape(self.title) or None, title_style=style, title_justify="left")
        for label, is_number in zip(self.columns, self.is_number, strict=True):
            shown.add_column(escape(label), justify="right" if is_number else "left", overflow="fold")
        for row in self.rows:
            shown.add_row(*map(escape, row))
        console.print(shown)
        if self.note:
            console.print(self.note, markup=False, highlight=False)


def table(title: str, rows: Sequence[Row], keys: Iterable[str] = (), hidden: Iterable[str] | None = ()) -> Table:
    """Make a table of `rows`: columns of `keys` first, then of all other keys except `hidden`; None: of no others.

    A long text that all rows have is written below it. Keys that begin with "_" are for pages only.
    """
    present = dict.fromkeys(key for row in rows for key in row if key != "file" or varying(rows, ["file"]))
    others = () if hidden is None else present
    hidden = [key for key in present if all(row.get(key) is None for row in rows)] if hidden is None else hidden
    wanted = [key for key in dict.fromkeys([*keys, *others]) if key in present.keys() - {*hidden} and key[0] != "_"]
    texts = [key for key in wanted if len(rows) > 1 and isinstance(rows[0].get(key), str)]
    said = [key for key in texts if len(rows[0][key]) > LONG and not varying(rows, [key])]
    shown = [key for key in wanted if key not in said]
    note = "; ".join(f"{label_of(key)}: {rows[0][key]}" for key in said)
    cells = [[text(row.get(key)) for key in shown] for row in rows]
    is_number = [all(_is_number(row.get(key)) for row in rows) for key in shown]
    labels = [label_of(key) for key in shown]
    return Table(title, labels, cells, is_number, len(rows) >= FOLDED_FROM, note and f"In all rows: {note}.")


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


def varying(rows: Sequence[Row], keys: Iterable[str]) -> list[str]:
    """Return those of `keys` for which `rows` have more than one value."""
    return [key for key in keys if len({text(row.get(key)) for row in rows}) > 1]


def named(row: Row, keys: Iterable[str]) -> str:
    """Join the values that `row` has for `keys`; WORDS precede a value, as in "batch 8"."""
    return ", ".join(f"{WORDS.get(key, '')}{text(row[key])}" for key in keys if row.get(key) is not None)


def numbered(names: Sequence[str]) -> list[str]:
    """Number equal names to distinguish them."""
    return [f"{name} ({names[: i + 1].count(name)})" if names.count(name) > 1 else name for i, name in enumerate(names)]


def shortener(names: Iterable[str]) -> Callable[[str], str]:
    """Return a function that cuts the prefix that all of `names` with dashes share, up to a dash."""
    own = [name.split("-") for name in dict.fromkeys(names) if "-" in name]
    shared = takewhile(lambda parts: len(set(parts)) == 1, zip(*own, strict=False)) if len(own) > 1 else ()
    prefix = "".join(f"{parts[0]}-" for parts in shared)
    return lambda name: name.removeprefix(prefix)
