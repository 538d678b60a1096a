"""The target's layers traced and compiled: for piecewise prefills, and inside the graphs of rounds."""

import warnings
from dataclasses import dataclass

import torch
from tqdm import tqdm

from specdec.backends.op import attention_scope
from specdec.backends.rope import Rope
from specdec.batch import ForwardMode
from specdec.config import EngineConfig
from specdec.errors import GraphError
from specdec.graphs.trace import Traced, trace
from specdec.models.hf import HFTarget

EXAMPLE = 32  # tokens of the forward that is traced and compared
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # of the norm


def compile_layers(target: HFTarget, config: EngineConfig, prefill_mode: str) -> str:
    """Give `target` compiled layers where `config` and `prefill_mode` want them; returns the prefill mode to use.

    Layers that do not trace as one graph are warned about: rounds run the live model's own, and what "auto" had made
    "piecewise" becomes "breakable". GraphError, with the op, where piecewise graphs were asked for or under strict.
    """
    is_piecewise = prefill_mode == "piecewise"
    wanted = [ForwardMode.EXTEND] * is_piecewise + [ForwardMode.DECODE] * config.compile
    if target.is_uniform:  # one trace serves prefills and rounds
        traces = {wanted[0]: wanted} if wanted else {}
    else:
        traces = {mode: [mode] for mode in wanted}
    for mode, served in traces.items():
        try:
            traced = _trace(target, mode, config.compiler)
        except GraphError as error:
            if config.strict or config.prefill_graph == "piecewise":
                raise GraphError(f"the layers of {type(target.model).__name__}: {error}") from error
            warnings.warn(
                f"{type(target.model).__name__} runs uncompiled: {error}. Leave compile out if that is expected",
                stacklevel=7,
            )
            return "breakable" if is_piecewise else prefill_mode
        for other in served:
            target.compiled[other is ForwardMode.EXTEND] = traced
    return prefill_mode


def _trace(target: HFTarget, mode: ForwardMode, compiler: str) -> Traced:
    """The layers as they run in `mode`, traced, compiled and held against the live model's."""
    ids = torch.randint(0, target.spec.vocab_size, (EXAMPLE,), device=target.device)
    positions = torch.arange(EXAMPLE, device=target.device)
    # Live first: what `transformers` sets up in a first forward (hooks, behind a lock) cannot be traced.
    with torch.inference_mode(), attention_scope(_Echo()), target.routed(mode):
        expected, _aux = target.run_layers(ids, positions)
    # The pieces of equal layers are compiled once, so most steps of the bar are short.
    bar = tqdm(total=len(target.spec.layers) + 1, desc="compile", unit="piece", leave=False, disable=None)
    with bar, target.routed(mode):
        op = torch.ops.specdec.attn.default
        traced = trace(target.run_layers, (ids, positions), op, compiler, lambda: bar.update() and None)
    with torch.inference_mode(), attention_scope(_Echo()):
        hidden, *_ = traced(ids, positions)
    error = float((hidden.double() - expected.double()).norm() / expected.double().norm())
    if not error <= TOLERANCE.get(target.dtype, 5e-2):
        traced.merged.part()
        raise GraphError(f"compiled, they differ from the live model's by {error:.1e} of the norm")
    return traced


@dataclass(frozen=True)
class _Echo:
    """Attention that answers with the values, which needs no cache: for a comparison of everything else."""

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, rope: Rope | None
    ) -> torch.Tensor:
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)
