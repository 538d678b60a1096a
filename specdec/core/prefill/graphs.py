"""Prefill graphs, in buckets of tokens, behind the guard: layers captured in segments around attention, and whole ones.

Of the former, head, sampling and attention itself run on the live batch, so a graph serves any number of requests.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from specdec.backends.op import ForwardContext, forward_context
from specdec.core.batch import AttentionMetadata
from specdec.core.config import EngineConfig
from specdec.core.prefill.program import PrefillProgram, Programs
from specdec.core.prefill.whole import whole_graphs
from specdec.core.round.parts import Parts
from specdec.core.round.program import Round
from specdec.core.text.embedded import EmbeddedChunk
from specdec.graphs.breakable import pick_breakable
from specdec.graphs.buffers import BufferSpec
from specdec.graphs.building import build
from specdec.graphs.captures import Capture, EagerCapture
from specdec.graphs.pool import GraphPool
from specdec.graphs.prefill import PrefillRunner
from specdec.graphs.runner import GraphRunner, Setup
from specdec.graphs.shapes import replayed_sizes, token_buckets

LOWER = "max_prefill_tokens, shorten prefill_buckets, or pass prefill_graph='off'"
# Tokens * hidden_size**2 from which the device, and not launching, is what an eager forward takes: hosts of H100s and
# H200s launch the layers of an 8B in 20 to 45 ms, in which the devices prefill 900 to 2,000 tokens.
BUSY_WORK = 2 * 10**10


class PrefillGraphs:
    """Owns the prefill runners of one engine and their graphs, which `build` makes.

    placement: positions and slots [largest] int64 that graphs read; metadata that is built there is not copied.
    whole: serves small batches from one graph each; None if there are none.
    """

    def __init__(self, parts: Parts, program: Round, pool: GraphPool | None, mode: str):
        target, config, slot_table = parts.target, parts.config, parts.tables.table
        self.mode = mode
        of_target = _device_bound_from(parts)
        self.whole = None if mode == "off" else whole_graphs(parts, program, pool, of_target)
        self._slot_table = slot_table
        self._dummy_row = config.dummy_row
        self._target, self._target_context, self._counters = target, parts.context, parts.counters
        device = slot_table.device
        breakable = None if mode == "off" else pick_breakable(device, pool)
        self._capture: Capture = breakable or EagerCapture()
        whole = () if self.whole is None else self.whole.runner.runner.buckets
        buckets = part_sizes(config, whole, of_target)
        interrupt = breakable.interrupt if breakable is not None else lambda fn: fn()
        largest = buckets[-1] if breakable is not None else 0
        self.programs = Programs(parts, largest, interrupt)
        self.placement = tuple(torch.zeros(largest, dtype=torch.int64, device=device) for _ in range(2))
        shared = dict(zip(("positions", "slots"), self.placement, strict=True))
        setup = Setup(
            capture=self._capture,
            counters=parts.counters,
            device=device,
            buckets=buckets,
            strict=config.strict and mode != "off",
            unit="tokens",
            rehearsed=() if whole else None,  # whole graphs of the same sizes have the same kernels
            shared={} if breakable is None else shared,
        )
        self.target_runner = _runner("target_prefill", self.programs.target, None, setup)
        self.target_runner.device_bound_from = of_target
        of_draft = _device_bound_from(parts, parts.worker.hidden_size)
        setup = replace(setup, buckets=part_sizes(config, whole, of_draft))
        self.draft_runners = [  # one per module
            _runner(f"draft_prefill_{module}", program, self.programs.states, setup)
            if module
            else _runner("draft_prefill", program, self.programs.features, setup)
            for module, program in enumerate(self.programs.draft)
        ]
        for prefills in self.draft_runners:
            prefills.device_bound_from = of_draft
        self._how: dict[str, Any] = {"lower": LOWER, "strict": config.strict, "settle": target.settle}

    def build(self) -> None:
        """Make the graphs of all runners, in parts last: their attention takes longest to compile."""
        if self.whole is not None:
            runner = self.whole.runner.runner
            build([runner], runner.made_by, avoid="prefill_graph='breakable'", **self._how)
        self.plan_warm_ups()
        in_parts = [r.runner for r in (self.target_runner, *self.draft_runners)]
        build(in_parts, self._capture, avoid="prefill_graph='off'", **self._how)

    def target(
        self, metadata: AttentionMetadata, ids: torch.Tensor, embedded: EmbeddedChunk | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the target's layers over a packed batch, ids [T] int64; return last hidden states [T, h], aux or None.

        Valid until the next call. embedded: read in place of ids, by the live layers.
        """
        if embedded is not None:
            name = self.target_runner.runner.name
            self._counters.count_eager(name, "prompts with images: the live layers read them")
            with forward_context(self._target_context, replace(metadata, limits=embedded.limits)):
                return self._target.embedded_layers(embedded, metadata.positions)
        inputs = _inputs(metadata, ids)
        return self.target_runner(metadata.mode, ids.shape[0], inputs, metadata=metadata)

    def draft(
        self, metadata: AttentionMetadata, ids: torch.Tensor, features: torch.Tensor | None, module: int = 0
    ) -> torch.Tensor:
        """Run the draft's layers, or those of one of its MTP modules, over a packed batch; return states [T, h_d].

        features: as for `DraftWorker.prefill_layers`. Valid until the next call.
        """
        assert self.draft_runners, "this draft has no layers"
        inputs = {**_inputs(metadata, ids), **({} if features is None else {"features": features})}
        (states,) = self.draft_runners[module](metadata.mode, ids.shape[0], inputs, metadata=metadata)
        return states

    @property
    def name(self) -> str:
        """The kinds of graphs, for reports."""
        return self.mode if self.whole is None else f"whole, {self.mode}"

    @property
    def runners(self) -> list[GraphRunner]:
        """Graph runners of the target and of the draft, and of both in one."""
        whole = [] if self.whole is None else [self.whole.runner]
        return [r.runner for r in (self.target_runner, *self.draft_runners, *whole)]

    def plan_warm_ups(self) -> None:
        """Plan a prefill of the dummy row, whose attention warm-ups run at every break, so that kernels are compiled;
        and run attention after a cached token, which uses other kernels."""
        buckets = self.target_runner.runner.buckets
        for program in (self.programs.target, *self.programs.draft[:1]) if buckets else ():
            program.plan(buckets[0], self._dummy_batch(program.context, 1, start=1))
            program.bridge.attend_planned()
            program.plan(buckets[0], self._dummy_batch(program.context, buckets[0]))

    def _dummy_batch(self, context: ForwardContext, num_tokens: int, start: int = 0) -> AttentionMetadata:
        """Return the metadata of a prefill of `num_tokens` tokens from position `start` on, all of them in slot 0."""
        width = self._slot_table.shape[1] - start
        lens = [width] * (num_tokens // width) + [num_tokens % width] * (num_tokens % width > 0)
        rows = torch.full((len(lens),), self._dummy_row, device=self._slot_table.device)
        return context.backend.metadata.prefill(self._slot_table, rows, [start] * len(lens), lens)


def part_sizes(config: EngineConfig, whole: Sequence[int], device_bound_from: int | None) -> tuple[int, ...]:
    """Return the token counts of graphs in parts; where `whole` ones of these serve most batches, no finer ones.

    device_bound_from: see `check_padding`.
    """
    sizes = token_buckets(config.prefill_tokens, config.prefill_buckets)
    if config.prefill_buckets:
        return sizes
    fine = range(whole[0] + 1, whole[-1]) if whole else ()
    return replayed_sizes([n for n in sizes if n in whole or n not in fine], device_bound_from)


def _device_bound_from(parts: Parts, hidden_size: int | None = None) -> int | None:
    """Return what `check_padding` takes, for a model of that width, by default the target's. strict pads instead."""
    width = parts.target.spec.hidden_size if hidden_size is None else hidden_size
    may_be_eager = parts.tables.table.is_cuda and not (parts.config.strict or parts.target.group)
    return -(-BUSY_WORK // width**2) if may_be_eager and width else None


def _runner(name: str, program: PrefillProgram, features: torch.Tensor | None, setup: Setup) -> PrefillRunner:
    """Return the runner of `program`, which reads `features` [largest, width] if that has any width."""
    specs = [BufferSpec(what, lambda n: (n,), torch.int64, pad=0) for what in ("ids", "positions", "slots")]
    if features is not None and features.shape[1]:
        width, dtype = features.shape[1], features.dtype
        specs.append(BufferSpec("features", lambda n: (n, width), dtype, pad=0.0))
        setup = replace(setup, shared={**setup.shared, "features": features} if setup.shared else {})
    return PrefillRunner(GraphRunner(name, program.capture, specs, setup, live=program.run), program.plan)


def _inputs(metadata: AttentionMetadata, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"ids": ids, "positions": metadata.positions, "slots": metadata.out_cache_loc}
