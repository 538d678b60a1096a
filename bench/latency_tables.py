"""Tables of bench/latency.py: one run as a table, and several runs side by side."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

KEY = ("what", "shape", "mode", "steps", "topk", "draft_tokens", "batch", "tokens", "tokenizer")
WIDTH = 150


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """A line a row."""
    numbers = ("ms", "round_ms", "tau", "floor_ms", "host_ms", "idle_percent", "eager")
    table = Table("what", "mode", "S:K:D", "batch", "tokens", "text", *numbers)
    for row in rows:
        table.add_row(*_cells(row), *(_shown(row.get(name)) for name in numbers))
    Console(width=WIDTH).print(table)


def print_comparison(files: Sequence[Path]) -> None:
    """Rows that several labels have, side by side; each label's ratio to the first. The last line is one JSON object.

    Of tpot the ms of a round are compared: how many tokens a round gave is chance, and the same on no two engines.
    """
    runs: dict[str, dict[tuple[Any, ...], Mapping[str, Any]]] = {}
    hosts: dict[str, Any] = {}
    for file in files:
        record = json.loads(file.read_text("utf-8"))
        for row in record["rows"]:
            label = row.get("label", file.stem)
            runs.setdefault(label, {})[tuple(row.get(name) for name in KEY)] = row
            hosts[label] = record["config"].get("host_probe_ms")
    if len(runs) < 2:
        raise SystemExit(f"--compare: expected result files of at least two labels, got {sorted(runs)}")
    first, *others = runs
    columns = [name for label in runs for name in (label, "host ms", "idle %")]
    table = Table("what", "mode", "S:K:D", "batch", "tokens", "text", *columns, *(f"{o}/{first}" for o in others))
    pairs = []
    for key in dict.fromkeys(key for rows in runs.values() for key in rows):
        rows = [own.get(key) for own in runs.values()]
        if sum(row is not None for row in rows) < 2:
            continue
        known = dict(zip(KEY, key, strict=True))
        ms = {label: row.get("round_ms", row["ms"]) for label, row in zip(runs, rows, strict=True) if row is not None}
        ratios = {o: round(ms[o] / ms[first], 3) for o in others if o in ms and ms.get(first)}
        numbers = [
            _shown(value)
            for label, row in zip(runs, rows, strict=True)
            for value in (ms.get(label), *((row or {}).get(name) for name in ("host_ms", "idle_percent")))
        ]
        table.add_row(*_cells(known), *numbers, *(_shown(ratios.get(o)) for o in others))
        pairs.append({**known, "ms": ms, "ratio": ratios})
    console = Console(width=WIDTH)
    console.print(table)
    console.print("ttft: ms to the first token; tpot: ms of a round", highlight=False)
    console.print(f"host_probe_ms: {', '.join(f'{label} {ms}' for label, ms in hosts.items())}", highlight=False)
    print(json.dumps({"host_probe_ms": hosts, "rows": pairs}))


def _cells(row: Mapping[str, Any]) -> list[str]:
    draft = f"{row['steps']}:{row['topk']}:{row['draft_tokens']}" if row["steps"] else "plain"
    text = {True: "yes", False: "no", None: "-"}[row.get("tokenizer")]
    return [row["what"], row["mode"], draft, str(row["batch"]), str(row["tokens"]), text]


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
