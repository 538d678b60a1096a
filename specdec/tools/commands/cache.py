"""`specdec cache`: what Inductor compiled at attach, kept for the next process, and deleting it."""

from datetime import datetime
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from specdec.graphs.compile import kept
from specdec.tools.commands.choices import Json, finish


def command(
    clear: Annotated[bool, typer.Option("--clear", help="Delete all of it; the next attach compiles again.")] = False,
    json: Json = False,
) -> None:
    """Show what attach keeps of compiled layers, by environment, and where.

    SPECDEC_CACHE names another folder.
    """
    if clear:
        try:
            freed = kept.clear()
        except OSError as error:
            raise ValueError(f"{error.filename} cannot be deleted: {error.strerror}; delete it yourself") from error
        print(f"{freed / 2**20:.1f} MiB deleted")
    found = kept.kept()
    table = Table("environment", "pieces", "MiB", "last written")
    for k in found:
        written = datetime.fromtimestamp(k.written).strftime("%Y-%m-%d %H:%M")
        table.add_row(k.name, str(k.num_pieces), f"{k.num_bytes / 2**20:.1f}", written)
    if found:
        Console().print(table)
    sums = {"pieces": sum(k.num_pieces for k in found), "bytes": sum(k.num_bytes for k in found)}
    if not json:
        print(f"folder: {kept.root()}")
    finish(json, {"folder": str(kept.root()), **sums, "environments": [k.name for k in found]})
