"""Rows of `specdec bench peers`: every way twice, the second time counts; what fails is a row with its error.

Engines come right after `generate`, which their texts are compared with: a run that is cut short has both.
"""

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specdec import __version__
from specdec.measure.peers import by_engine, by_packages, by_transformers
from specdec.measure.peers.way import Task, Texts, Way

ERROR_WIDTH = 40  # characters of an error in the table; the rows have more

Row = dict[str, Any]


def measure(task: Task, *, compile: bool = False) -> Iterator[Row]:
    """Yield a row for every way: `generate`, engines, transformers' other ways, other libraries.

    `tokens` are those before EOS, of all requests; `tokens_per_s` is their number by the wall clock, prefill included.
    `first_s`: seconds that setting up and the first run took, compiling and capturing included. `equal`: how many of
    the row's texts are those of `generate`, on a real target.
    """
    reference: list[list[int]] | None = None
    plain, *others = by_transformers.ways(task)
    for way in (plain, *by_engine.ways(task, compile=compile), *others, *by_packages.ways(task)):
        num = min(task.few, len(task.prompts)) if way.one_at_a_time else len(task.prompts)
        row: Row = {"what": way.what, "package": way.package, "version": _version(way.package)}
        row |= {"requests": num, "new_tokens": task.new_tokens, "one_at_a_time": way.one_at_a_time, **way.facts}
        found, texts = timed(way, task, task.prompts[:num])
        row |= found
        if reference is None:
            reference = [] if texts is None else texts
        if texts is not None and reference and not task.is_random:
            row["equal"] = sum(a == b for a, b in zip(texts, reference, strict=False))
        yield row


def timed(way: Way, task: Task, prompts: list[list[int]]) -> tuple[Row, list[list[int]] | None]:
    """Return the numbers of one way and its texts, up to EOS; or an error and None."""
    if _version(way.package) is None:
        return {"error": "not installed"}, None
    try:
        begun = time.perf_counter()
        with way.make() as run:
            _run(run, task, prompts)
            first = time.perf_counter() - begun
            seconds, out = _run(run, task, prompts)
        texts = [task.cut(text) for text in out.tokens]
        assert len(texts) == len(prompts), f"{len(texts)} texts of {len(prompts)} requests"
    except Exception as error:  # a way that does not work here is a fact to report
        return {"error": f"{type(error).__name__}: {error}"[:300]}, None
    finally:
        if task.is_cuda:  # graphs and caches of one way are not there for the next
            gc.collect()
            torch.cuda.empty_cache()
    num = sum(map(len, texts))
    row = {"tokens": num, "seconds": round(seconds, 4), "tokens_per_s": round(num / seconds, 1)}
    return row | {"first_s": round(first, 2), "tau": None if out.tau is None else round(out.tau, 3)}, texts


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a line a way, with its speed in multiples of `generate`'s."""
    table = Table("way", "version", "requests", "tokens/s", "of generate", "tau", "equal texts, or why not")
    base = next((r["tokens_per_s"] for r in rows if r["what"] == "generate" and "error" not in r), None)
    for r in rows:
        requests = f"{r['requests']}, one by one" if r["one_at_a_time"] else str(r["requests"])
        start = (r["what"], r["version"] or "-", requests)
        if "error" in r:
            table.add_row(*start, "-", "-", "-", escape(r["error"][:ERROR_WIDTH]))
            continue
        ratio = f"{r['tokens_per_s'] / base:.2f}x" if base else "-"
        equal = f"{r['equal']} of {r['requests']}" if "equal" in r else "-"
        tau = "-" if r["tau"] is None else f"{r['tau']:.2f}"
        table.add_row(*start, f"{r['tokens_per_s']:.1f}", ratio, tau, equal)
    Console(width=120).print(table)


def _run(run: Any, task: Task, prompts: list[list[int]]) -> tuple[float, Texts]:
    """Return seconds of one run, the device's work included, and its texts."""
    if task.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    texts = run(prompts)
    if task.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start, texts


def _version(package: str) -> str | None:
    """Return the version of an installed package, else None."""
    if package == "specdec":  # its distribution may have another name
        return __version__
    return version(package) if find_spec(package) is not None else None
