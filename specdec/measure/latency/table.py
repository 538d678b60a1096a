"""The rows of `specdec bench latency` as a table, and what ran eagerly below it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

WIDTH = 150
NUMBERS = ("ms", "round_ms", "tau", "floor_ms", "host_ms", "idle_percent", "graph_mib", "eager")


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a line a row, then how often each path ran without its graph, and why."""
    table = Table("what", "mode", "S:K:D", "batch", "tokens", "text", *NUMBERS)
    eager: Counter[str] = Counter()
    for row in rows:
        table.add_row(*_cells(row), *(_shown(row.get(name)) for name in NUMBERS))
        eager.update(row.get("why_eager", {}))
    console = Console(width=WIDTH)
    console.print(table)
    for reason, times in eager.most_common():
        console.print(f"ran eagerly {times} times: {reason}", markup=False, highlight=False)


def _cells(row: Mapping[str, Any]) -> list[str]:
    draft = f"{row['steps']}:{row['topk']}:{row['draft_tokens']}" if row["steps"] else "plain"
    text = {True: "yes", False: "no", None: "-"}[row.get("tokenizer")]
    what = row["what"] if "sampling" not in row else f"{row['what']}, {row['sampling']}"
    return [what, row["mode"], draft, str(row["batch"]), str(row["tokens"]), text]


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
