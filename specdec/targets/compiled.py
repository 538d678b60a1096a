"""The target's layers traced and compiled: for piecewise prefills, and inside the graphs of rounds."""

import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from tqdm import tqdm

from specdec.backends.op import attention_scope
from specdec.backends.rope import Rope
from specdec.batch import ForwardMode
from specdec.config import EngineConfig
from specdec.errors import GraphError
from specdec.graphs.kept import folder, keeping, num_found, renewing
from specdec.graphs.regions import can_repeat
from specdec.graphs.trace import Traced, trace
from specdec.targets.hf import HFTarget

# Tokens of the forwards that are compared; the first is traced. At one token, the plain decode, a trace that took
# T > 1 for granted would be wrong.
EXAMPLES = ((32,), (7,), (1,) * 7)
Batch = tuple[torch.Tensor, torch.Tensor]  # ids, positions [T] int64
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # of the norm


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


def compile_layers(target: HFTarget, config: EngineConfig, prefill_mode: str) -> Outcome:
    """Compile the layers of `target` where `config` and `prefill_mode` want it.

    Layers that do not trace as one graph run as the live model's own, and a "piecewise" that "auto" chose becomes
    "breakable". compile=True warns of them, and raises GraphError, with the op, under strict; so do piecewise prefills
    that were asked for.
    """
    start, why = time.perf_counter(), why_uncompiled(config, target.device)
    is_piecewise = prefill_mode == "piecewise"
    wanted = [ForwardMode.EXTEND] * is_piecewise + [ForwardMode.DECODE] * (not why)
    # One trace serves prefills and rounds, where they run the same arithmetic.
    traces = {wanted[0]: wanted} if wanted and target.same_experts_in_all_modes else {mode: [mode] for mode in wanted}
    done: list[Traced] = []
    for mode, served in traces.items():
        try:
            traced = _trace_keeping(target, mode, config)
        except GraphError as error:
            if _must_raise(config, served):
                target.drop_compiled()
                raise GraphError(f"the layers of {type(target.model).__name__}: {error}") from error
            if config.compile is True:
                warnings.warn(
                    f"{type(target.model).__name__} runs uncompiled: {error}. Leave compile out if that is expected",
                    stacklevel=6,
                )
            if config.prefill_graph == "piecewise" and done:  # prefills are compiled; rounds were not asked to be
                return Outcome(prefill_mode, f"{_told(done, start)}; rounds are not: {error}")
            target.drop_compiled()
            return Outcome("breakable" if is_piecewise else prefill_mode, f"not compiled: {error}")
        for other in served:
            target.use_compiled(traced, for_prefills=other is ForwardMode.EXTEND)
        done.append(traced)
    return Outcome(prefill_mode, _told(done, start) if done else f"not compiled: {why}")


def _must_raise(config: EngineConfig, served: Sequence[ForwardMode]) -> bool:
    """Whether layers that do not trace are an error where they were to serve forwards of the modes `served`."""
    if config.prefill_graph == "piecewise":
        return config.compile is True or ForwardMode.EXTEND in served
    return config.strict and config.compile is True


def _told(traces: Sequence[Traced], start: float) -> str:
    num_compiled, num_found = sum(t.num_compiled for t in traces), sum(t.num_found for t in traces)
    pieces = f"{num_compiled} piece{'s' * (num_compiled > 1)}, {num_found} of them kept from before"
    return f"compiled in {time.perf_counter() - start:.1f} s ({pieces})"


def _trace_keeping(target: HFTarget, mode: ForwardMode, config: EngineConfig) -> Traced:
    """`_trace`, with what Inductor compiles kept for the next process.

    What fails with pieces that were kept is compiled anew: they may be damaged.
    """
    if config.compiler == "eager":
        return _trace(target, mode, config, None)
    where, before = folder(target.device), num_found()
    try:
        with keeping(where):
            return _trace(target, mode, config, where)
    except GraphError:
        if num_found() == before:
            raise
    with renewing(where) as fresh, keeping(fresh):
        return _trace(target, mode, config, None)


def _trace(target: HFTarget, mode: ForwardMode, config: EngineConfig, keep: Path | None) -> Traced:
    """Trace and compile the layers as they run in `mode`, and compare them with the live model's."""
    examples = _examples(target)
    # The live model runs first: transformers installs hooks on first use, which cannot be traced.
    with torch.inference_mode(), attention_scope(_Echo()), target.routed(mode):
        expected = [_outputs(target.run_layers, batches) for batches in examples]
    # The pieces of equal layers are compiled once, so most steps of the bar are short.
    bar = tqdm(total=len(target.spec.layers) + 1, desc="compile", unit="piece", leave=False, disable=None)
    with bar, target.routed(mode), target.unnumbered():
        traced = trace(
            target.run_layers,
            examples[0][0],
            torch.ops.specdec.attn.default,
            config.compiler,
            num_outputs=1 + bool(target.tapped),
            smallest=2,  # one token is compared
            largest=max(config.prefill_tokens, config.max_batch * config.verify_width),
            joins=not target.compiled,
            alike=_layers(target) if can_repeat() else (),
            numbers=range(len(target.spec.modules)),
            keep=keep,
            progress=lambda: bar.update() and None,
        )
    try:
        with torch.inference_mode(), attention_scope(_Echo()):
            for batches, outputs in zip(examples, expected, strict=True):
                _compare(_outputs(traced, batches), outputs, batches[0][0].shape[0])
    except BaseException as error:
        traced.release()
        if isinstance(error, RuntimeError) and not isinstance(error, GraphError):
            raise GraphError(f"compiled, they fail: {error}") from error
        raise
    return traced


def _layers(target: HFTarget) -> list[nn.Module]:
    """Return the modules that may be equal: elements of a list that attend once, whose forward is their class's own."""
    attending = set(target.spec.modules)
    lists = [module for module in target.spec.stack.modules() if isinstance(module, nn.ModuleList)]
    layers = [child for children in lists for child in children if len(attending.intersection(child.modules())) == 1]
    return [layer for layer in layers if "forward" not in layer.__dict__]


def _examples(target: HFTarget) -> list[list[Batch]]:
    """Return batches of the sizes of EXAMPLES; within a group, positions continue where the previous batch ends."""
    random = torch.Generator().manual_seed(0)
    groups: list[list[Batch]] = []
    for sizes in EXAMPLES:
        size = min(sizes[0], target.spec.max_positions)
        num_tokens = min(size * len(sizes), target.spec.max_positions)
        ids = torch.randint(0, target.spec.vocab_size, (num_tokens,), generator=random).to(target.device)
        positions = torch.arange(num_tokens, device=target.device)
        groups.append(list(zip(ids.split(size), positions.split(size), strict=True)))
    return groups


def _outputs(layers: Callable[..., Sequence[Any]], batches: Sequence[Batch]) -> list[torch.Tensor]:
    """Run `layers` on every batch and concatenate the rows of each output."""
    outputs = zip(*(layers(*batch) for batch in batches), strict=True)
    return [torch.cat(parts) for parts in outputs if parts[0] is not None]


def _compare(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], num_tokens: int) -> None:
    """Raise GraphError if tensors [rows, ...] of forwards of `num_tokens` differ in more than rounding.

    Medians over the rows are compared: rounding can flip an expert in single rows.
    """
    for a, b in zip(ours, theirs, strict=True):
        errors = (a.double() - b.double()).norm(dim=-1) / b.double().norm(dim=-1)
        error = float(errors.median())
        if not error <= TOLERANCE.get(b.dtype, 5e-2):
            raise GraphError(
                f"compiled, they differ from the live model's by {error:.1e} of the norm, in forwards of {num_tokens} "
                f"token{'s' * (num_tokens > 1)}"
            )


@dataclass(frozen=True)
class _Echo:
    """Attention without a cache, to compare everything else: the values, weighted by functions of q and k."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, rope: Rope | None
    ) -> torch.Tensor:
        group = q.shape[1] // v.shape[1]
        ramp = torch.arange(q.shape[2], device=q.device).cos() / q.shape[2] ** 0.5
        weight = 1 + 0.5 * torch.tanh(q.float() @ ramp) - 0.5 * torch.tanh(k.float() @ ramp).repeat_interleave(group, 1)
        weight = weight * (1 + layer_id / (layer_id + 8))  # every layer's own, so that one in another's place is seen
        return v.repeat_interleave(group, 1) * weight.unsqueeze(2).to(v.dtype)
