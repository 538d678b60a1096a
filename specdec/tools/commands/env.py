"""`specdec env`: what a bug report should say of the machine and its packages."""

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from specdec.backends import BACKENDS
from specdec.tools.commands.choices import Json, finish

PACKAGES = (
    *("specdec-toolkit", "torch", "triton", "transformers", "flashinfer-python"),
    *("safetensors", "gguf", "accelerate", "numpy"),
)


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


def command(json: Json = False) -> None:
    """Print versions, devices and usable backends, for bug reports."""
    found = environment()
    backends = [f"{name}: {reason or 'usable'}" for name, reason in found["backends"].items()]
    table = Table(show_header=False)
    for name, value in {**found, "devices": "\n".join(found["devices"]), "backends": "\n".join(backends)}.items():
        table.add_row(name, escape(str(value or ("none" if name == "cuda" else "not installed"))))
    Console().print(table)
    finish(json, found)


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
