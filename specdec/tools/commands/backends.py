"""`specdec backends`: which attention backends this machine can run, and compiling kernels before they are needed."""

import time
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specdec.api import attach
from specdec.backends import BACKENDS
from specdec.backends.flashinfer import kernels
from specdec.reach.targets.pretrained import BUNDLED
from specdec.tools.commands.choices import draft_of
from specdec.tools.commands.env import unusable
from specdec.tools.train.cli import Device, Dtype, Target
from specdec.tools.train.target import load

app = typer.Typer(help="Attention backends of this machine.", no_args_is_help=True)


@app.command("list")
def list_backends() -> None:
    """Show every attention backend, and why it cannot run here if it cannot."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    table = Table("backend", f"on {device.type}")
    for name in BACKENDS:
        table.add_row(name, escape(unusable(name, device) or "usable"))
    Console().print(table)


@app.command()
def build(
    target: Target = BUNDLED,
    draft: Annotated[str, typer.Option(help="Head that will draft: folder, Hub id or shipped name.")] = "none",
    backend: Annotated[str, typer.Option(help="'triton+flashinfer', which 'auto' can pick, or 'flashinfer'.")] = (
        "triton+flashinfer"
    ),
    nodes: Annotated[
        int, typer.Option(help="With 'flashinfer': kernels for draft trees of up to 64 nodes, or of more; 0: for none.")
    ] = 64,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Compile and check the kernels that a backend needs for a model; `attach` then finds them.

    FlashInfer's take a minute or two; they need nvcc, and stay where the last line says.
    """
    model, _tokenizer = load(target, dtype, device)
    small: dict[str, Any] = {"max_batch": 1, "max_seq_len": 64, "cuda_graph": False, "prefill_graph": "off"}
    source, algo = draft_of(draft)
    if algo is not None and nodes > 0:
        small |= {"topk": 2, "num_steps": 2} if nodes <= 64 else {"topk": 16, "num_steps": 6, "num_draft_tokens": nodes}
    began = time.monotonic()
    engine = attach(model, source, algo, backend=backend, **small)
    seconds, report = time.monotonic() - began, engine.report()
    engine.detach()
    typer.echo(f"{report.backend} is ready for {report.model}: built and checked in {seconds:.1f} s")
    for mode in ("EXTEND", "TARGET_VERIFY"):
        typer.echo(f"  {mode}: {report.paths[mode]['attention']}")
    typer.echo(f"kernels are kept in {kernels.folder()}")
