"""The target's layers traced and compiled: for piecewise prefills, and inside the graphs of rounds."""

import os
import time
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from specdec.backends.state_pool import ConvSpec, ScanSpec
from specdec.batch import ForwardMode
from specdec.config import EngineConfig
from specdec.errors import GraphError
from specdec.graphs.alike import alike
from specdec.graphs.kept import has_pieces
from specdec.targets.checked import ATTENTION, CONV, EXAMPLES, SCAN, Batch, Subject, trace_checked
from specdec.targets.hf import HFTarget
from specdec.targets.probe import ModelSpec

if TYPE_CHECKING:
    from specdec.graphs.trace import Traced


class Outcome(NamedTuple):
    """The prefill mode to use, and how the layers came to run as they do, in words."""

    prefill_mode: str
    told: str


def why_uncompiled(config: EngineConfig, device: torch.device) -> str:
    """Return why rounds are not to be compiled, whatever the model; empty if they are."""
    if config.compile != "auto":
        return "" if config.compile else "compile=False"
    if device.type != "cuda":
        return f"compile='auto' on {device.type}"
    if config.cuda_graph is False:
        return "compile='auto' without graphs"
    return "SPECDEC_COMPILE=0" if os.environ.get("SPECDEC_COMPILE") == "0" else ""


def start_compilers(config: EngineConfig, device: torch.device) -> None:
    """Start what compiles, where a first attach is going to compile: it takes seconds to come up."""
    if config.compiler == "inductor" and not why_uncompiled(config, device) and not has_pieces(device):
        from specdec.graphs.pieces import start_workers  # imports private parts of torch

        start_workers(device)


def compile_layers(target: HFTarget, config: EngineConfig, prefill_mode: str) -> Outcome:
    """Compile the layers of `target` where `config` and `prefill_mode` want it.

    Layers that do not trace as one graph run as the live model's own, and a "piecewise" that "auto" chose becomes
    "breakable". compile=True warns of them, and raises GraphError, with the op, under strict; so do piecewise prefills
    that were asked for.
    """
    start, why = time.perf_counter(), why_uncompiled(config, target.device)
    is_piecewise = prefill_mode == "piecewise"
    served = [ForwardMode.EXTEND] * is_piecewise + [ForwardMode.DECODE] * (not why)
    if not served:
        return Outcome(prefill_mode, f"not compiled: {why}")
    try:
        traced = trace_checked(_subject(target, config), config, target.device)
    except GraphError as error:
        if config.prefill_graph == "piecewise" or (config.strict and config.compile is True):
            raise GraphError(f"the layers of {type(target.model).__name__}: {error}") from error
        if config.compile is True:
            warnings.warn(
                f"{type(target.model).__name__} runs uncompiled: {error}. Leave compile out if that is expected",
                stacklevel=6,
            )
        return Outcome("breakable" if is_piecewise else prefill_mode, f"not compiled: {error}")
    for mode in served:  # one trace serves prefills and rounds
        target.use_compiled(traced, for_prefills=mode is ForwardMode.EXTEND)
    return Outcome(prefill_mode, _told(traced, start))


def _told(traced: "Traced", start: float) -> str:
    pieces = (
        f"{traced.num_compiled} piece{'s' * (traced.num_compiled > 1)}, {traced.num_found} of them kept from before"
    )
    return f"compiled in {time.perf_counter() - start:.1f} s ({pieces})"


def _subject(target: HFTarget, config: EngineConfig) -> Subject:
    """The layers as they run in forwards of every mode."""

    return Subject(
        run=target.run_layers,
        examples=_examples(target),
        ready=target.routed,
        num_outputs=1 + bool(target.tapped),
        num_layers=len(target.spec.layers) + len(target.spec.recurrent),
        largest=max(config.prefill_tokens, config.max_batch * config.verify_width),
        alike=_alike(target),
        numbers=_numbers(target.spec),
        any_rank=target.any_rank,
    )


def _numbers(spec: ModelSpec) -> dict[Any, Sequence[int]]:
    """Return the layer ids of a forward's calls of each op, in their order."""
    recurrent = list(enumerate(spec.recurrent))
    ids = {op: [i for i, s in recurrent if isinstance(s, kind)] for op, kind in ((CONV, ConvSpec), (SCAN, ScanSpec))}
    return {ATTENTION: range(len(spec.layers)), **ids}


def _alike(target: HFTarget) -> list[list[nn.Module]]:
    """Return groups of equal layers: elements of a list that attend once, or have one recurrent module, whose forward
    is their class's own."""
    attending = {*target.spec.modules, *(mixer.module for mixer in target.spec.mixers)}
    lists = [list(module) for module in target.spec.stack.modules() if isinstance(module, nn.ModuleList)]
    groups = [group for layers in lists for group in alike(layers)]
    return [
        [m for m in g if len(attending.intersection(m.modules())) == 1 and "forward" not in vars(m)] for g in groups
    ]


def _examples(target: HFTarget) -> list[list[Batch]]:
    """Return batches of the sizes of EXAMPLES; within a group, positions continue where the previous batch ends."""
    random = torch.Generator().manual_seed(0)
    groups: list[list[Batch]] = []
    for sizes in EXAMPLES:
        size = min(sizes[0], target.spec.max_positions)
        num_tokens = min(size * len(sizes), target.spec.max_positions)
        ids = torch.randint(0, target.spec.vocab_size, (num_tokens,), generator=random, device="cpu").to(target.device)
        positions = torch.arange(num_tokens, device=target.device)
        groups.append(list(zip(ids.split(size), positions.split(size), strict=True)))
    return groups
