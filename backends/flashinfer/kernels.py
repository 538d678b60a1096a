"""FlashInfer's compiled modules: which ones layers need, whether they are built, building and loading them.

`import flashinfer` happens inside functions: it is optional, creates its cache folder and queries the GPU.
"""

import os
import threading
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from specdec.backends.base import LayerSpec
from specdec.backends.flashinfer.variant import variant
from specdec.core.errors import AttachError

SUPPORTED = ("0.6.18.post1",)  # `tables` writes the plans of this version
HEAD_DIMS = frozenset({64, 128, 256})
C_TYPES = {torch.bfloat16: "nv_bfloat16", torch.float16: "half"}


class Kernel(NamedTuple):
    """One module. family: "fa2" or "fa3", FlashInfer's own, or FA2 with a variant of `variant`, "tree" or "wide"."""

    family: str
    dtype: torch.dtype
    head_dim: int
    has_window: bool
    has_softcap: bool

    def __str__(self) -> str:
        flags = " window" * self.has_window + " softcap" * self.has_softcap
        return f"{self.family} d{self.head_dim} {str(self.dtype).removeprefix('torch.')}{flags}"


def version_problem() -> str | None:
    """Return why the installed FlashInfer cannot be used; None if it can."""
    try:
        found = version("flashinfer-python")
    except PackageNotFoundError:
        return "flashinfer is not installed: pip install 'specdec-toolkit[flashinfer]'"
    if found in SUPPORTED or os.environ.get("SPECDEC_FLASHINFER_ANY") == "1":
        return None
    return (
        f"flashinfer-python {found} is not {' or '.join(SUPPORTED)}, whose tables are known; install that one, or set "
        "SPECDEC_FLASHINFER_ANY=1 to try this one: attach compares its results with the torch backend's"
    )


def import_problem() -> str | None:
    """Return why an installed FlashInfer does not import; None if it does."""
    try:
        import flashinfer.jit.attention.modules  # noqa: F401
    except Exception as error:  # the import queries drivers and creates folders: anything can go wrong
        return f"flashinfer does not import: {type(error).__name__}: {error}"
    return None


def kernel_for(family: str, layer: LayerSpec, dtype: torch.dtype) -> Kernel:
    """Return the module of a family that runs `layer`."""
    return Kernel(family, dtype, layer.qk_dim, layer.window is not None, layer.softcap is not None)


def has_fa3(device: torch.device) -> bool:
    """Return whether FlashInfer's Hopper kernels run on `device`."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def uniform_family(layer: LayerSpec, mask_words: int) -> str:
    """Return the family that runs a layer in decode-shaped forwards; mask_words: of ancestor bits, 0 for a chain."""
    if mask_words > 1:
        return "wide"
    return "tree" if mask_words or layer.has_sinks else "fa2"


def prefill_family(layer: LayerSpec, device: torch.device) -> str:
    """Return the family that runs a layer in prefills."""
    if layer.has_sinks:
        return "tree"
    return "fa3" if has_fa3(device) else "fa2"


def kernels_for(
    layers: Iterable[LayerSpec], dtype: torch.dtype, device: torch.device, mask_words: int = 1
) -> list[Kernel]:
    """Return the modules that run `layers` on every path, in the order in which layers first need them."""
    families = [
        (layer, family)
        for layer in layers
        for words in dict.fromkeys((0, mask_words))
        for family in (uniform_family(layer, words), prefill_family(layer, device))
    ]
    return list(dict.fromkeys(kernel_for(family, layer, dtype) for layer, family in families))


def spec_of(kernel: Kernel) -> Any:
    """Return FlashInfer's JitSpec of a kernel; writes its sources, compiles nothing."""
    from flashinfer.jit.attention.modules import gen_batch_prefill_module, gen_customize_batch_prefill_module

    types, dim = (kernel.dtype, kernel.dtype, kernel.dtype, torch.int32), kernel.head_dim
    if kernel.family in ("fa2", "fa3"):
        return gen_batch_prefill_module(
            kernel.family, *types, dim, dim, 0, kernel.has_window, kernel.has_softcap, False
        )
    own = variant(C_TYPES[kernel.dtype], dim, kernel.has_softcap, kernel.has_window, kernel.family == "wide")
    return gen_customize_batch_prefill_module(
        "fa2",
        own.name,
        *types,
        dim,
        dim,
        list(own.tensors),
        list(own.tensors.values()),
        list(own.scalars),
        list(own.scalars.values()),
        own.struct,
        own.source,
    )


def unbuilt(kernels: Iterable[Kernel]) -> list[Kernel]:
    """Return those of `kernels` that are not compiled yet."""
    return [k for k in kernels if not spec_of(k).is_compiled]


def folder() -> Path:
    """Return the folder of FlashInfer's compiled kernels; $FLASHINFER_WORKSPACE_BASE moves it."""
    from flashinfer.jit import env

    return env.FLASHINFER_JIT_DIR


def build(kernels: Sequence[Kernel]) -> float:
    """Compile those that are not built yet, in parallel, with a progress bar; return the seconds it took.

    AttachError if the compiler fails or is missing.
    """
    from flashinfer.jit.core import build_jit_specs

    missing = unbuilt(kernels)
    if not missing:
        return 0.0
    specs, began = [spec_of(k) for k in missing], time.monotonic()
    failures: list[BaseException] = []

    def compile_all() -> None:
        try:
            build_jit_specs(specs)
        except BaseException as error:
            failures.append(error)

    def num_done() -> int:
        return sum(len([*s.build_dir.glob("*.o"), *s.build_dir.glob("*.so")]) for s in specs)

    worker = threading.Thread(target=compile_all, name="flashinfer-build", daemon=True)
    title = f"flashinfer: compiling {', '.join(map(str, missing))}"
    with tqdm(total=sum(len(s.sources) + 1 for s in specs), desc=title, unit="file") as bar:
        worker.start()
        while worker.is_alive():
            worker.join(0.5)
            bar.n = min(num_done(), bar.total)
            bar.refresh()
    if failures:
        lines = [line.strip() for line in str(failures[0]).splitlines() if line.strip()]
        telling = [line for line in lines if "error" in line.lower() or "not found" in line.lower()] or lines
        raise AttachError("with FlashInfer: its kernels do not compile", [line[:300] for line in telling[-3:]])
    return time.monotonic() - began


def load(kernels: Iterable[Kernel]) -> dict[Kernel, Any]:
    """Load built kernels, without a compiler: modules with `plan` and `paged_run`. AttachError if a file is broken."""
    modules = {}
    for kernel in kernels:
        spec = spec_of(kernel)
        try:
            modules[kernel] = spec.load(spec.get_library_path())
        except Exception as error:
            where = spec.get_library_path()
            raise AttachError(f"with FlashInfer: delete {where} and build it again", [f"{kernel}: {error}"]) from error
    return modules
