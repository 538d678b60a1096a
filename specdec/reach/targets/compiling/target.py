"""The target's layers traced and compiled: for piecewise prefills, and inside the graphs of rounds."""

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.backends.experts import has_triton
from specdec.backends.recurrent.state_pool import ConvSpec, ScanSpec
from specdec.core.config import EngineConfig
from specdec.core.errors import GraphError
from specdec.graphs.compile.alike import alike
from specdec.reach.targets.admission.probe import ModelSpec
from specdec.reach.targets.compiling.checked import (
    ATTENTION,
    CONV,
    NUM_TOKENS,
    SCAN,
    Batch,
    Comparison,
    Subject,
    trace_checked,
)
from specdec.reach.targets.hf import HFTarget

if TYPE_CHECKING:
    from specdec.graphs.compile.trace import Traced


PRELOADING = threading.Lock()


def why_uncompiled(config: EngineConfig, device: torch.device) -> str:
    """Return why rounds are not compiled, whatever the model; "" if they are."""
    if config.compile != "auto":
        return "" if config.compile else "compile=False"
    if device.type != "cuda":
        return f"compile='auto' on {device.type}"
    if config.cuda_graph is False:
        return "compile='auto' without graphs"
    return "SPECDEC_COMPILE=0" if os.environ.get("SPECDEC_COMPILE") == "0" else ""


@contextmanager
def preloading(config: EngineConfig, model: PreTrainedModel, *beside: object) -> Iterator[None]:
    """Import compilation's modules on a thread while the model is examined, since the host waits for disks. Within the
    context, worker processes compile kernels the first time that the model is attached on a machine with this config
    and the same draft and adapters `beside` it."""
    device = model.device
    if not why_uncompiled(config, device):
        threading.Thread(target=_preload, args=(device,), name="specdec-preload").start()
    if device.type != "cuda" or not has_triton():
        yield
        return
    from specdec.backends.triton.launch.workers import compile_workers

    gpu = torch.cuda.get_device_name(device)
    with compile_workers(repr((gpu, config, model.config.to_json_string(), *beside))):
        yield


def _preload(device: torch.device) -> None:
    with PRELOADING, suppress(Exception):  # importing them where they are used raises again
        if device.type == "cuda" and has_triton():
            import triton

            triton.runtime.driver.active.get_current_target()  # has a C compiler build the driver, on a new machine
            triton.runtime.cache.triton_key()  # hashes Triton's compiler, once per process
        import specdec.graphs.compile.trace  # noqa: F401


def compile_layers(
    target: HFTarget, config: EngineConfig, prefill_mode: str, later: list[Comparison] | None
) -> tuple[str, str]:
    """Compile the layers of `target` that `config` and `prefill_mode` select; return the prefill mode to use, and in
    words how the layers run. later: see `trace_checked`.

    If layers do not trace as one graph, the live model's own run, and a "piecewise" that "auto" chose becomes
    "breakable"; an explicit one raises GraphError. See `compiled_or_why`.
    """
    why, is_piecewise = why_uncompiled(config, target.device), prefill_mode == "piecewise"
    if why and not is_piecewise:
        return prefill_mode, f"not compiled: {why}"

    def make() -> list["Traced"]:
        with PRELOADING:
            pass  # two threads that import each other's modules would get them half-initialised
        with nullcontext() if target.lora is None else target.lora.traced():
            traced = trace_checked(_subject(target, config), config, target.device, later)
        for for_prefills in [True] * is_piecewise + [False] * (not why):  # one trace serves both
            target.compiled[for_prefills] = traced
        return [traced]

    name, is_wanted = type(target.model).__name__, config.prefill_graph == "piecewise"
    how = compiled_or_why(make, config, (f"the layers of {name}", name), is_wanted)
    return ("breakable" if is_piecewise and not target.compiled else prefill_mode), how


def compiled_or_why(
    make: Callable[[], Sequence["Traced"]], config: EngineConfig, names: tuple[str, str], is_wanted: bool = False
) -> str:
    """Compile with `make` and return in words how the layers run; if they do not trace, they run uncompiled.

    compile=True warns of that, and raises GraphError, with the op, under strict or if it `is_wanted`. names: of the
    layers, and of the whole.
    """
    start = time.perf_counter()
    try:
        traced = make()
    except GraphError as error:
        if is_wanted or (config.strict and config.compile is True):
            raise GraphError(f"{names[0]}: {error}") from error
        if config.compile is True:
            message = f"{names[1]} runs uncompiled: {error}. Leave compile out if that is expected"
            warnings.warn(message, stacklevel=9)
        return f"not compiled: {error}"
    total, count, found = (sum(getattr(t, f"num_{of}") for t in traced) for of in ("pieces", "compiled", "found"))
    pieces = f"{total} pieces, {count} by {config.compiler}, {found} of them kept from before"
    return f"compiled in {time.perf_counter() - start:.1f} s ({pieces})"


def _subject(target: HFTarget, config: EngineConfig) -> Subject:
    """Return the layers as they run in forwards of every mode."""
    return Subject(
        run=target.run_layers,
        module=target.model,
        inputs=random_tokens(min(NUM_TOKENS, target.spec.max_positions), target.spec.num_ids, target.device),
        ready=target.routed,
        num_outputs=1 + bool(target.tapped),
        num_layers=len(target.spec.layers) + len(target.spec.recurrent),
        largest=max(config.prefill_tokens, config.max_batch * config.verify_width),
        alike=_alike(target),
        numbers=_numbers(target.spec),
        any_rank=target.any_rank,
    )


def random_tokens(count: int, vocab_size: int, device: torch.device) -> Batch:
    """Return ids and positions [count], int64."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab_size, (count,), generator=random, device="cpu").to(device)
    return ids, torch.arange(count, device=device)


def _numbers(spec: ModelSpec) -> dict[Any, Sequence[int]]:
    """Return the layer ids of a forward's calls of each op, in their order."""
    recurrent = list(enumerate(spec.recurrent))
    ids = {op: [i for i, s in recurrent if isinstance(s, kind)] for op, kind in ((CONV, ConvSpec), (SCAN, ScanSpec))}
    return {ATTENTION: range(len(spec.layers)), **ids}


def _alike(target: HFTarget) -> list[list[nn.Module]]:
    """Return groups of equal layers: elements of a list that attend once, or have one recurrent module, and have their
    class's own forward."""
    attending = target.spec.attending
    lists = [list(module) for module in target.spec.stack.modules() if isinstance(module, nn.ModuleList)]
    groups = [group for layers in lists for group in alike(layers)]
    return [
        [m for m in g if len(attending.intersection(m.modules())) == 1 and "forward" not in vars(m)] for g in groups
    ]
