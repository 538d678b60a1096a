"""`specdec bench page` and `specdec bench compare`: result files as a page, and a comparison of two."""

from pathlib import Path
from typing import Annotated

import typer

from specdec.tools.commands.choices import Json, finish
from specdec.tools.measure.compare import THRESHOLD, compare, print_comparison
from specdec.tools.measure.page.page import write_page
from specdec.tools.measure.rows import read_record


def page_command(
    files: Annotated[list[Path], typer.Argument(help="Result files (JSON), of any age.")],
    out: Annotated[Path | None, typer.Option(help="The page; default: the first file's name with .html.")] = None,
) -> None:
    """Render result files as one HTML page that opens offline. The last line is the page's path."""
    path = out or files[0].with_suffix(".html")
    records = [read_record(file) for file in files]
    path.parent.mkdir(parents=True, exist_ok=True)
    print(write_page(records, path))


def compare_command(
    before: Annotated[Path, typer.Argument(help="Result file (JSON) to compare with.")],
    after: Annotated[Path, typer.Argument(help="Result file (JSON) of the same command, run later.")],
    threshold: Annotated[
        float, typer.Option(help="Relative change that is noise where rows have no intervals and no repeats.")
    ] = THRESHOLD,
    json: Json = False,
) -> None:
    """Say what got slower, faster or less accepted beyond noise; exit status 1 if anything got worse."""
    old, new = read_record(before), read_record(after)
    found = compare(old, new, threshold)
    print_comparison(found, old, new)
    lines = [
        {**c.case, "key": c.key, "before": c.before, "after": c.after, "verdict": c.verdict} for c in found.changes
    ]
    changed = [line for line in lines if line["verdict"] != "noise"]
    alone = {"only_before": found.only_before, "only_after": found.only_after}
    finish(json, {"judged": len(lines), "changed": changed, **alone})
    raise typer.Exit(1 if found.of("worse") else 0)
