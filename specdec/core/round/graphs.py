"""Graphs of rounds, of the first tokens of prompts, and of a draft's begin."""

import warnings
from dataclasses import replace
from functools import partial

import torch

from specdec.core.config import EngineConfig, Shape
from specdec.core.round.parts import Parts
from specdec.core.round.program import Round
from specdec.core.sampling_params import SamplingKind
from specdec.graphs.buffers import BufferSpec
from specdec.graphs.building import build
from specdec.graphs.captures import pick_capture
from specdec.graphs.pool import GraphPool
from specdec.graphs.runner import GraphRunner, Setup
from specdec.graphs.shapes import batch_buckets

LOWER = "max_batch, graph_batches or num_draft_tokens, leave kinds out of graph_sampling, or pass cuda_graph=False"


class RoundGraphs:
    """Owns the runners of one engine and their graphs, which `build` makes.

    rows [num_rows] int64: the input of rounds; what lies in its front already is not copied there.
    """

    def __init__(self, program: Round, parts: Parts, pool: GraphPool | None):
        config = parts.config
        self._config = config
        device = program.slot_table.device
        self.capture = pick_capture(config.cuda_graph, device, pool)
        program.pause = self.capture.pause
        if config.strict and self.capture.refusal:
            raise ValueError(f"strict=True on {device.type}, where {self.capture.refusal}; leave strict out")
        buckets = batch_buckets(config.max_batch, config.graph_batches)
        if config.strict and buckets[-1] < config.max_batch:
            warnings.warn(
                f"strict=True with graphs of {buckets[-1]} requests at most: larger batches, up to "
                f"max_batch={config.max_batch}, will raise; lower max_batch or raise graph_batches",
                stacklevel=7,
            )
        rows = BufferSpec("rows", lambda n: (n,), torch.int64, pad=config.dummy_row)
        setup = Setup(
            capture=self.capture,
            counters=parts.counters,
            device=device,
            buckets=buckets,
            variants=config.graph_kinds,
            rehearsed=config.graph_kinds[:1],  # kernels that sample are the same at every size
            strict=config.strict,
        )
        self._names = {shape: runner_name(shape, config) for shape in config.shapes}
        target, worker = program.target, program.worker

        def spec(name: str, width: int, dtype: torch.dtype) -> BufferSpec:
            return BufferSpec(name, lambda n: (n, width), dtype, pad=0.0)

        def first_tokens(kind: str, rows: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
            return program.first_tokens(kind, rows, target.head(hidden))

        hidden = spec("hidden", target.spec.hidden_size, target.dtype)
        num_rows = max(config.max_batch, *buckets)
        self.rows = torch.full((num_rows,), config.dummy_row, dtype=torch.int64, device=device)
        playing = replace(setup, shared={"rows": self.rows})
        made = [
            *(GraphRunner(name, partial(program.play, shape=s), [rows], playing) for s, name in self._names.items()),
            GraphRunner("first_token", first_tokens, [rows, hidden], setup),
        ]
        once = replace(setup, variants=config.graph_kinds[:1])  # what samples nothing: one kind serves all
        if worker.has_begin:
            states = [spec("states", worker.hidden_size, worker.dtype or target.dtype)] if worker.hidden_size else []
            made.append(GraphRunner("draft_begin", lambda _, **given: program.begin(**given), [rows, *states], once))
        if program.catch_up is not None:
            made.append(GraphRunner("catch_up", lambda _, **given: program.follow(**given), [rows], once))
        self.runners = {runner.name: runner for runner in made}
        self._settle = parts.target.settle

    def build(self) -> None:
        """Make the graphs of all runners."""
        runners = list(self.runners.values())
        build(runners, self.capture, lower=LOWER, strict=self._config.strict, settle=self._settle)

    def play(self, kind: SamplingKind, rows: torch.Tensor, max_prefix: int, shape: Shape) -> torch.Tensor:
        """Run a round of `rows`; see `Round.play`. The results are valid until the next call."""
        return self.runners[self._names[shape]](self._served_as(kind), {"rows": rows}, max_prefix=max_prefix)

    def first_tokens(self, kind: SamplingKind, rows: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Sample the tokens after prompts from the target's last hidden states [n, h]; see `Round.first_tokens`."""
        return self.runners["first_token"](self._served_as(kind), {"rows": rows, "hidden": hidden})

    def begin(self, rows: torch.Tensor, states: torch.Tensor | None, max_prefix: int) -> None:
        """Run `Round.begin` for `rows`."""
        inputs = {"rows": rows} if states is None else {"rows": rows, "states": states}
        self.runners["draft_begin"](self._config.graph_kinds[0], inputs, max_prefix=max_prefix)

    def catch_up(self, rows: torch.Tensor, max_prefix: int) -> None:
        """Run `Round.follow` for `rows`."""
        self.runners["catch_up"](self._config.graph_kinds[0], {"rows": rows}, max_prefix=max_prefix)

    def _served_as(self, kind: SamplingKind) -> SamplingKind:
        """Return the least kind that was captured and serves `kind`; if there is none, `kind` itself."""
        captured = [SamplingKind(k) for k in self._config.graph_kinds if not self.capture.refusal]
        alike = (k for k in captured if k.is_constrained == kind.is_constrained)
        return next((k for k in alike if k.serves(kind)), kind)


def runner_name(shape: Shape, config: EngineConfig) -> str:
    """Return the name of the runner of rounds of `shape`."""
    if not shape.num_steps:
        return "decode"
    return "round" if config.auto_steps is None else f"round {shape}"
