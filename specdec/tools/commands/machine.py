"""`specdec backends`, `specdec cache` and `specdec env`: what this machine can run, has compiled, and has installed."""

import platform
import time
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specdec.api import attach
from specdec.backends import BACKENDS
from specdec.backends.flashinfer import kernels
from specdec.graphs.compile import kept
from specdec.tools.commands.choices import OnTarget, Reported, draft_of
from specdec.tools.options import command_of, flag, option

PACKAGES = (
    *("specdec-toolkit", "torch", "triton", "transformers", "flashinfer-python"),
    *("safetensors", "gguf", "accelerate", "numpy"),
)
app = typer.Typer(help="List attention backends, or build their kernels.", no_args_is_help=True)


@app.command("list")
def list_backends() -> None:
    """List the attention backends; for those that cannot run here, give the reason."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    table = Table("backend", f"on {device.type}")
    for name in BACKENDS:
        table.add_row(name, escape(unusable(name, device) or "usable"))
    Console().print(table)


class Build(OnTarget):
    """Compile and check the kernels that a backend needs for a model; `attach` then finds them.

    FlashInfer's kernels take a minute or two and need nvcc; the last line says where they are.
    """

    draft: str = option("Draft head: folder, Hub id or shipped name.", "none")
    backend: str = option("'triton+flashinfer', which 'auto' can pick, or 'flashinfer'.", "triton+flashinfer")
    nodes: int = option("With 'flashinfer': kernels for draft trees of up to 64 nodes, or of more; 0: for none.", 64)

    def run(self) -> None:
        model, _tokenizer = self.load()
        small: dict[str, Any] = {"max_batch": 1, "max_seq_len": 64, "cuda_graph": False, "prefill_graph": "off"}
        source, algo = draft_of(self.draft)
        if algo is not None and self.nodes > 0:
            large = {"topk": 16, "num_steps": 6, "num_draft_tokens": self.nodes}
            small |= {"topk": 2, "num_steps": 2} if self.nodes <= 64 else large
        began = time.monotonic()
        with attach(model, source, algo, backend=self.backend, **small) as engine:
            seconds, report = time.monotonic() - began, engine.report()
        print(f"{report.backend} is ready for {report.model}: built and checked in {seconds:.1f} s")
        for mode in ("EXTEND", "TARGET_VERIFY"):
            print(f"  {mode}: {report.paths[mode]['attention']}")
        print(f"kernels are kept in {kernels.folder()}")


app.command("build")(command_of(Build))


class Cache(Reported):
    """Show the cache of compiled layers: its folder, and its size by environment.

    SPECDEC_CACHE sets another folder.
    """

    clear: bool = flag("Delete the cache; the next attach compiles again.")

    def run(self) -> None:
        if self.clear:
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
        if not self.json:
            print(f"folder: {kept.root()}")
        self.finish({"folder": str(kept.root()), **sums, "environments": [k.name for k in found]})


class Env(Reported):
    """Print versions, devices and usable backends, for bug reports."""

    def run(self) -> None:
        found = environment()
        backends = [f"{name}: {reason or 'usable'}" for name, reason in found["backends"].items()]
        table = Table(show_header=False)
        for name, value in {**found, "devices": "\n".join(found["devices"]), "backends": "\n".join(backends)}.items():
            table.add_row(name, escape(str(value or ("none" if name == "cuda" else "not installed"))))
        Console().print(table)
        self.finish(found)


cache, env = command_of(Cache), command_of(Env)


def environment() -> dict[str, Any]:
    """Return versions, devices, and for each attention backend None or the reason why it cannot run here."""
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    device = torch.device("cuda" if devices else "cpu")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "devices": devices or [platform.processor() or "cpu"],
        "backends": {name: unusable(name, device) for name in BACKENDS},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def unusable(backend: str, device: torch.device) -> str | None:
    """Return why an attention backend cannot run on `device`; None if it can."""
    try:
        return BACKENDS[backend]().unusable_on(device)
    except ImportError as error:
        return str(error)
