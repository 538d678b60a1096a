"""Where traces, and what Inductor compiled of them, are kept between processes: a folder, by versions and device.

Inductor's own caches do the keeping: they find a piece by its graph, its constants, sizes and settings, check what its
code took for granted of the number of tokens, write atomically, and compile again what they cannot read. The folder
holds code that will be run: it must not be open to people you do not trust.
"""

import os
import platform
import re
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import NamedTemporaryFile, mkdtemp
from typing import NamedTuple

import torch

FOLDER = "inductor"
TRACES = "traces"  # within the folder of an environment


class Kept(NamedTuple):
    """What is kept for one environment: pieces, traces, bytes, and seconds since the epoch of the last write."""

    name: str
    num_pieces: int
    num_traces: int
    num_bytes: int
    written: float


@dataclass(frozen=True)
class Record:
    """A trace's place: its file, named by all that the trace depends on (`structure`), and the tensors it may read."""

    file: Path
    tensors: Mapping[str, torch.Tensor]

    def text(self) -> str:
        """Return what is kept; empty if that is nothing, or cannot be read."""
        try:
            return self.file.read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            return ""

    def keep(self, text: str) -> None:
        """Keep `text`, at once or not at all; where it cannot be written, the next process traces again."""
        with suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with NamedTemporaryFile("w", encoding="utf-8", dir=self.file.parent, prefix=".", delete=False) as out:
                out.write(text)
            os.replace(out.name, self.file)

    def forget(self) -> None:
        """Delete what is kept."""
        with suppress(OSError):
            self.file.unlink(missing_ok=True)


def root() -> Path:
    """Return specdec's folder: $SPECDEC_CACHE, or `specdec` in $XDG_CACHE_HOME or ~/.cache."""
    given = os.environ.get("SPECDEC_CACHE")
    if given:
        return Path(given).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "specdec"


def folder(device: torch.device) -> Path:
    """Return where pieces compiled for `device` are kept; no two environments that differ in code share one."""
    versions = [f"{name}-{_version(name)}" for name in ("torch", "triton")]
    python = f"python-{sys.version_info.major}.{sys.version_info.minor}"
    words = "_".join([*versions, python, _hardware(device)])
    return root() / FOLDER / re.sub(r"[^\w.+-]+", "-", words)


def has_traces(device: torch.device) -> bool:
    """Return whether any trace is kept for `device`."""
    return any((folder(device) / TRACES).glob("*.json"))


@contextmanager
def keeping(where: Path) -> Iterator[None]:
    """Within it, what Inductor compiles is looked up in `where` and kept there.

    Warns if it cannot be written to; Inductor then keeps it where it does without us, a temporary folder.
    """
    from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir  # slow to import

    try:
        where.mkdir(parents=True, exist_ok=True)
        os.rmdir(mkdtemp(prefix=".", dir=where))
    except OSError as error:
        warnings.warn(
            f"compiled layers are not kept for the next process: {where} cannot be written to ({error.strerror}). Set "
            "SPECDEC_CACHE to a folder that can",
            stacklevel=2,
        )
        yield
        return
    with temporary_cache_dir(str(where)):
        yield


@contextmanager
def renewing(where: Path) -> Iterator[Path]:
    """Yield an empty folder, which then replaces `where` if it can, unless an error is raised within."""
    try:
        fresh = mkdtemp(prefix=".renewed-", dir=where.parent)
    except OSError:
        fresh = mkdtemp(prefix="specdec-")
    try:
        yield Path(fresh)
        with suppress(OSError):  # the next process compiles what could not be kept
            shutil.rmtree(where)
            os.rename(fresh, where)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def num_found() -> int:
    """Return how many pieces this process has found in Inductor's caches so far, wherever those are."""
    from torch._dynamo.utils import counters  # slow to import

    return counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]


def kept() -> list[Kept]:
    """Return what is kept, by environment; an unreadable folder counts as empty."""
    found = []
    for path in sorted(p for p in (root() / FOLDER).glob("*") if p.is_dir()):
        files = [file for file in path.rglob("*") if file.is_file()]
        num_pieces = len(list(path.glob("fxgraph/*/*")))
        stats = [file.stat() for file in files]
        written = max([s.st_mtime for s in stats], default=path.stat().st_mtime)
        num_traces = len(list(path.glob(f"{TRACES}/*.json")))
        found.append(Kept(path.name, num_pieces, num_traces, sum(s.st_size for s in stats), written))
    return found


def clear() -> int:
    """Delete what is kept for all environments, and return its bytes. OSError for what cannot be deleted."""
    num_bytes = sum(k.num_bytes for k in kept())
    if (root() / FOLDER).exists():
        shutil.rmtree(root() / FOLDER)
    return num_bytes


def _hardware(device: torch.device) -> str:
    """Name what code for `device` depends on."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)}_sm{major}{minor}_{torch.version.cuda or torch.version.hip}"
    return f"{platform.machine()}_{_cpu()}"  # Inductor's C++ is compiled for this very processor


def _cpu() -> str:
    """Return a short hash of what the processor can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    told = [line for line in lines if line.lower().startswith(("flags", "features", "model name"))]
    return sha256("\n".join(sorted(set(told)) or [platform.processor()]).encode()).hexdigest()[:8]


def _version(package: str) -> str:
    if package == "torch":
        return torch.__version__
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
