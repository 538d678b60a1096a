"""The cache folder of Inductor's compiled code, by versions and device.

Inductor's own caches manage it: they find a piece by its graph, constants, sizes and settings, check its guards on the
number of tokens, write atomically, and recompile entries that they cannot read. The folder holds code that is executed:
one that other users own or can write to is not used.
"""

import atexit
import os
import platform
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

import torch

FOLDER = "inductor"
NOWHERE = Path("/dev/null")  # a folder that cannot be created


class Kept(NamedTuple):
    """The cache of one environment: pieces, bytes, and seconds since the epoch of the last write."""

    name: str
    num_pieces: int
    num_bytes: int
    written: float


def root() -> Path:
    """Return specdec's folder: $SPECDEC_CACHE, or `specdec` in $XDG_CACHE_HOME or ~/.cache; NOWHERE without a home."""
    given = os.environ.get("SPECDEC_CACHE")
    if given:
        return Path(given).expanduser().absolute()
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "specdec"
    except RuntimeError:  # neither HOME nor an entry for the user
        return NOWHERE


def folder(device: torch.device) -> Path:
    """Return the folder of pieces compiled for `device`; environments whose code differs have different folders."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    python = f"python-{sys.version_info.major}.{sys.version_info.minor}"
    words = "_".join([f"torch-{torch.__version__}_triton-{triton}", python, _hardware(device)])
    return root() / FOLDER / re.sub(r"[^\w.+-]+", "-", words)


def has_pieces(device: torch.device) -> bool:
    """Return whether any piece is cached for `device`."""
    return any(folder(device).glob("fxgraph/*/*"))


@contextmanager
def keeping(where: Path) -> Iterator[None]:
    """Make `where` Inductor's cache folder within the `with` block; for one thread at a time, since torch reads the
    folder's name from the environment.

    Warns if `where` cannot be written to, or if other users could write code there that we would run; then a temporary
    folder is used, which is deleted with the process.
    """
    from torch._dynamo.convert_frame import compile_lock  # slow to import
    from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

    why = _why_unusable(where)
    if why:
        warnings.warn(
            f"compiled layers are not cached for later processes: {why}. Set SPECDEC_CACHE to a folder of your own",
            stacklevel=2,
        )
        where = Path(mkdtemp(prefix="specdec-"))
        atexit.register(shutil.rmtree, where, ignore_errors=True)  # until then it may be read
    with compile_lock, temporary_cache_dir(str(where)):
        yield


def _why_unusable(where: Path) -> str:
    """Create the folder `where`, private to the user; return why it cannot be used, "" if it can. Whoever can write
    there could make us run code."""
    if NOWHERE in where.parents:
        return "there is no home folder"
    base = where.parents[where.parts[::-1].index(FOLDER)] if FOLDER in where.parts else where
    try:
        base.parent.mkdir(parents=True, exist_ok=True)
        for path in sorted({base, *(p for p in where.parents if base in p.parents), where}):
            path.mkdir(mode=0o700, exist_ok=True)
            stat = path.stat()
            if stat.st_uid != os.geteuid():
                return f"{path} belongs to another user"
            if stat.st_mode & 0o022:
                return f"{path} can be written to by other users (chmod -R go-w, or delete it)"
        os.rmdir(mkdtemp(prefix=".", dir=where))
    except OSError as error:
        return f"{where} cannot be written to ({error.strerror})"
    return ""


@contextmanager
def renewing(where: Path) -> Iterator[Path]:
    """Yield an empty folder, which then replaces `where` if possible, unless an error is raised within."""
    fresh = mkdtemp(prefix=".renewed-", dir=where.parent if os.access(where.parent, os.W_OK) else None)
    try:
        yield Path(fresh)
        with suppress(OSError):  # the next process compiles again
            shutil.rmtree(where)
            os.rename(fresh, where)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def num_found() -> int:
    """Return how many pieces this process has found in Inductor's caches so far, in any folder."""
    from torch._dynamo.utils import counters  # slow to import

    return counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]


def kept() -> list[Kept]:
    """Return the cached contents by environment; an unreadable folder counts as empty."""
    found = []
    for path in sorted(p for p in (root() / FOLDER).glob("*") if p.is_dir()):
        files = [file for file in path.rglob("*") if file.is_file()]
        num_pieces = len(list(path.glob("fxgraph/*/*")))
        stats = [file.stat() for file in files]
        written = max([s.st_mtime for s in stats], default=path.stat().st_mtime)
        found.append(Kept(path.name, num_pieces, sum(s.st_size for s in stats), written))
    return found


def clear() -> int:
    """Delete the caches of all environments, and return their bytes. OSError for files that cannot be deleted."""
    num_bytes = sum(k.num_bytes for k in kept())
    if (root() / FOLDER).exists():
        shutil.rmtree(root() / FOLDER)
    return num_bytes


def _hardware(device: torch.device) -> str:
    """Return a name of the hardware that code for `device` depends on."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)}_sm{major}{minor}_{torch.version.cuda or torch.version.hip}"
    return f"{platform.machine()}_{_cpu()}"  # Inductor's C++ is compiled for this exact processor


def _cpu() -> str:
    """Return a short hash of the processor's model and features."""
    lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines() if os.path.exists("/proc/cpuinfo") else []
    found = {line for line in lines if line.lower().startswith(("flags", "features", "model name"))}
    return sha256("\n".join(sorted(found) or [platform.processor()]).encode()).hexdigest()[:8]
