"""Prefills through graph runners: the layers of the target and of the draft, captured in segments around attention.

A graph holds layers only, in buckets of tokens; the head, sampling and attention itself run on the live batch, so a
graph serves any number of requests. What the graphs leave behind lies in static tensors that all buckets share.
"""

import time
from collections.abc import Mapping
from typing import Any

import torch

from specdec.backends import AttentionBridge, ForwardContext, forward_context
from specdec.backends.checks import is_debug
from specdec.batch import AttentionMetadata, ForwardMode
from specdec.config import EngineConfig
from specdec.draft.worker import DraftWorker
from specdec.graphs import (
    BufferSpec,
    Capture,
    Counters,
    EagerCapture,
    GraphPool,
    GraphRunner,
    HiddenCapture,
    PrefillRunner,
    PrefillShape,
    Setup,
    build,
    pick_breakable,
    token_buckets,
)
from specdec.graphs.build import is_out_of_memory
from specdec.models.hf import HFTarget
from specdec.models.probe import ModelSpec
from specdec.outputs import GraphCost

LOWER = "max_prefill_tokens, shorten prefill_buckets, or pass prefill_graph='off'"
# For `estimate_prefill_bytes`; set so that it comes near what bench/prefill.py measures on an H200.
NODE_BYTES, NODES_A_LAYER = 5 << 10, 40
LIVE_ROWS = 12  # hidden-sized activations of a token that live at once
BUSY = 1.3  # the device is the slower one where a forward takes this many times as long as launching it


class PrefillGraphs:
    """Owns the prefill runners of one engine and their graphs; slot_table [num_rows, width] int64 as in `Round`."""

    def __init__(
        self,
        target: HFTarget,
        worker: DraftWorker,
        context: ForwardContext,
        config: EngineConfig,
        counters: Counters,
        slot_table: torch.Tensor,
        pool: GraphPool | None,
        mode: str,
    ):
        self.mode = mode
        self._target, self._worker, self._context = target, worker, context
        self._counters = counters
        self._dummy_table = slot_table[config.dummy_row :]
        self._is_debug = is_debug()
        device = slot_table.device
        capture = EagerCapture() if mode == "off" else pick_breakable(device, pool)
        self._capture: Capture = capture
        buckets = token_buckets(config.prefill_tokens, config.prefill_buckets)
        most = 0 if capture.refusal else buckets[-1]
        interrupt = getattr(capture, "interrupt", _call)
        self._bridge = AttentionBridge(context, most, target.dtype, device, interrupt)
        self._draft_bridge = None
        width = target.spec.hidden_size
        self._hidden = torch.zeros(most, width, dtype=target.dtype, device=device)
        self._aux = torch.zeros(most, len(target.aux_layers) * width, dtype=target.dtype, device=device)
        self._draft_hidden = torch.zeros(most, worker.hidden_size, dtype=target.dtype, device=device)
        setup = Setup(
            capture=capture,
            counters=counters,
            device=device,
            buckets=buckets,
            watched=self._watched,
            strict=config.strict and mode != "off",
            unit="tokens",
            shared={} if capture.refusal else {"aux": self._aux},
        )
        tokens = [BufferSpec(name, lambda n: (n,), torch.int64, pad=0) for name in ("ids", "positions", "slots")]
        hidden = HiddenCapture.FULL if target.aux_layers else HiddenCapture.LAST
        runner = GraphRunner("target_prefill", self._target_layers, tokens, setup)
        self.target_runner = PrefillRunner(runner, hidden, self._before_target)
        self.draft_runner: PrefillRunner | None = None
        if worker.context is not None:
            self._draft_bridge = AttentionBridge(worker.context, most, target.dtype, device, interrupt)
            aux = BufferSpec("aux", lambda n: (n, self._aux.shape[1]), target.dtype, pad=0.0)
            runner = GraphRunner(
                "draft_prefill", self._draft_layers, [*tokens, aux] if target.aux_layers else tokens, setup
            )
            self.draft_runner = PrefillRunner(runner, HiddenCapture.LAST, self._before_draft)
        with torch.inference_mode():
            self._build(config)

    def target(
        self, metadata: AttentionMetadata, ids: torch.Tensor, inputs_embeds: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The target's layers over a packed batch: last hidden states [T, h], aux [T, num_aux*h] or None.

        ids [T] int64, or inputs_embeds [T, h] in their place. Good until the next call.
        """
        hidden = HiddenCapture.FULL if self._target.aux_layers else HiddenCapture.LAST
        shape = PrefillShape(metadata.mode, ids.shape[0], hidden, inputs_embeds is not None)
        inputs = {"ids": ids, "positions": metadata.positions, "slots": metadata.out_cache_loc}
        live = {"metadata": metadata} if inputs_embeds is None else {"metadata": metadata, "embeds": inputs_embeds}
        return self.target_runner(shape, inputs, **live)

    def draft(self, metadata: AttentionMetadata, ids: torch.Tensor, aux: torch.Tensor | None) -> torch.Tensor:
        """The draft's layers over a packed batch: states [T, h_d]. Good until the next call."""
        assert self.draft_runner is not None, "this draft has no layers"
        shape = PrefillShape(metadata.mode, ids.shape[0], HiddenCapture.LAST)
        inputs = {"ids": ids, "positions": metadata.positions, "slots": metadata.out_cache_loc}
        if aux is not None:
            inputs["aux"] = aux
        return self.draft_runner(shape, inputs, metadata=metadata)

    @property
    def runners(self) -> list[GraphRunner]:
        """Those there are."""
        return [r.runner for r in (self.target_runner, self.draft_runner) if r is not None]

    def check_addresses(self) -> None:
        """GraphError if a tensor that the graphs read has been replaced or moved."""
        for runner in self.runners:
            runner.check_addresses()

    @property
    def costs(self) -> list[GraphCost]:
        """What every graph took to make, in the order of capture."""
        every = [item for runner in self.runners for item in runner.captured.items()]
        return [GraphCost(key.runner, key.size, "tokens", "", c.seconds, c.num_bytes) for key, c in every]

    def _target_layers(
        self,
        variant: str,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        metadata: AttentionMetadata | None = None,
        embeds: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """With metadata: a live forward. Without: one to be captured, which leaves its results in static tensors."""
        if metadata is not None:
            with forward_context(self._context, metadata):
                return self._target.layers(metadata.mode, ids, positions, embeds)
        with self._bridge.capturing(slots):
            hidden, aux = self._target.layers(ForwardMode.EXTEND, ids, positions)
        kept = self._hidden[: ids.shape[0]].copy_(hidden)
        return kept, None if aux is None else self._aux[: ids.shape[0]].copy_(aux)

    def _draft_layers(
        self,
        variant: str,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        aux: torch.Tensor | None = None,
        metadata: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        """As `_target_layers`, of the draft."""
        assert self._worker.context is not None and self._draft_bridge is not None
        if metadata is not None:
            with forward_context(self._worker.context, metadata):
                return self._worker.prefill_layers(ids, positions, aux)
        with self._draft_bridge.capturing(slots):
            hidden = self._worker.prefill_layers(ids, positions, aux)
        return self._draft_hidden[: ids.shape[0]].copy_(hidden)

    def _before_target(self, num_tokens: int, size: int, metadata: AttentionMetadata) -> None:
        """What the breaks of a replay need: the live batch planned."""
        if self._is_debug:
            self.check_addresses()
        self._bridge.plan(metadata, size)

    def _before_draft(self, num_tokens: int, size: int, metadata: AttentionMetadata) -> None:
        assert self._draft_bridge is not None
        self._draft_bridge.plan(metadata, size)

    def _build(self, config: EngineConfig) -> None:
        """Capture everything. Warm-ups attend a few tokens of the dummy row, so that kernels are compiled."""
        few = 0 if self._capture.refusal else self.target_runner.runner.buckets[0]
        for bridge in (self._bridge, self._draft_bridge) if few else ():
            if bridge is not None:
                bridge.plan(self._dummy_batch(bridge.context, few), few)
        build(self.runners, self._capture, lower=LOWER, avoid="prefill_graph='off'", strict=config.strict)
        if not config.strict and few and self._hidden.is_cuda:
            with self._counters.recording():
                self.target_runner.busy_from = self._find_busy()

    def _dummy_batch(self, context: ForwardContext, num_tokens: int) -> AttentionMetadata:
        """A prefill of `num_tokens` tokens, all of which lie in slot 0."""
        num_reqs = -(-num_tokens // self._dummy_table.shape[1])
        lens = [self._dummy_table.shape[1]] * (num_reqs - 1)
        lens.append(num_tokens - sum(lens))
        tables = self._dummy_table.expand(num_reqs, -1).contiguous()
        return context.backend.metadata.prefill(tables, [0] * num_reqs, lens)

    def _find_busy(self) -> int | None:
        """The smallest captured size from which on running the layers takes clearly longer than launching them."""
        busy = None
        for size in sorted((key.size for key in self.target_runner.runner.captured), reverse=True):
            metadata = self._dummy_batch(self._context, size)
            try:
                share = min(self._launch_and_wait(metadata) for _ in range(3))
            except RuntimeError as error:
                if is_out_of_memory(error):  # larger than what an eager run has room for beside the graphs
                    continue
                raise
            if share < BUSY:
                break
            busy = size
        return busy

    def _launch_and_wait(self, metadata: AttentionMetadata) -> float:
        """How many times as long as launching it an eager forward of the target's layers takes."""
        ids = torch.zeros_like(metadata.positions)
        torch.cuda.synchronize(ids.device)
        start = time.perf_counter()
        self._target_layers("", ids, metadata.positions, metadata.out_cache_loc, metadata)
        launched = time.perf_counter() - start
        torch.cuda.synchronize(ids.device)
        return (time.perf_counter() - start) / launched

    def _watched(self) -> Mapping[str, torch.Tensor]:
        """By name, what the graphs read besides their inputs."""
        model = self._target.model
        own: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        own |= {
            **self._context.pool.tensors("target"),
            **self._bridge.tensors,
            "hidden": self._hidden,
            "aux": self._aux,
        }
        if self._draft_bridge is not None:
            own |= {f"draft {name}": t for name, t in self._draft_bridge.tensors.items()}
        return {**own, **{f"draft {name}": t for name, t in self._worker.tensors.items()}}


def estimate_prefill_bytes(config: EngineConfig, spec: ModelSpec, num_aux: int, itemsize: int) -> int:
    """Device bytes that prefill graphs of `config` will take, roughly: static rows, scratch of the largest, nodes."""
    buckets = token_buckets(config.prefill_tokens, config.prefill_buckets)
    attention = max(s.num_heads * (s.qk_dim + s.v_dim) for s in spec.layers)
    static_row = (2 + 2 * num_aux) * spec.hidden_size + attention  # the target's, and what a draft of its width has
    row_bytes = (static_row + LIVE_ROWS * spec.hidden_size) * itemsize
    return buckets[-1] * row_bytes + len(buckets) * len(spec.layers) * NODES_A_LAYER * NODE_BYTES


def resolve_prefill_mode(config: EngineConfig, device: torch.device) -> str:
    """What `prefill_graph` comes to on `device`."""
    if config.prefill_graph != "auto":
        return config.prefill_graph
    if device.type != "cuda" or config.cuda_graph is False:
        return "off"
    return "piecewise" if config.compile else "breakable"


def _call(fn: Any) -> None:
    fn()
