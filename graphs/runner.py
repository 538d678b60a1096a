"""A runner: one callable, its static input buffers, and its graphs by bucket and variant."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from specdec.core.batch import ForwardMode
from specdec.core.errors import GraphError
from specdec.core.outputs import GraphCost
from specdec.graphs.buffers import BufferSpec, StaticBuffers
from specdec.graphs.captures import Capture, Graph
from specdec.graphs.counters import Counters, PathCounters
from specdec.graphs.once import equal_parts_once
from specdec.graphs.shapes import Decision, ShapeKey


class Phase(Enum):
    """Phases of a runner, in order. A sealed runner captures nothing more: a batch without a graph runs eagerly."""

    WARM_UP = auto()
    CAPTURE = auto()
    SEALED = auto()


@dataclass(frozen=True)
class Captured:
    """A captured graph, the number of its forwards by mode, and its cost in seconds and device bytes."""

    graph: Graph
    forwards: Counter[ForwardMode]
    seconds: float
    num_bytes: int


@dataclass(frozen=True)
class Setup:
    """Settings that the runners of one engine share.

    buckets: sizes to capture, ascending, in requests or tokens (`unit`). variants: a graph is captured for each, per
    bucket. strict: raise GraphError instead of running eagerly. shared: tensors to use as input buffers, by name.
    rehearsed: variants whose kernels differ between sizes (see `rehearse`); None: all. ValueError for invalid buckets.
    """

    capture: Capture
    counters: Counters
    device: torch.device
    buckets: Sequence[int]
    variants: Sequence[str] = ("",)
    strict: bool = False
    unit: str = "requests"
    shared: Mapping[str, torch.Tensor] = field(default_factory=dict)
    rehearsed: Sequence[str] | None = None

    def __post_init__(self) -> None:
        sizes = list(self.buckets)
        if sizes != sorted(set(sizes)) or min(sizes, default=1) < 1:
            raise ValueError(f"buckets={self.buckets!r}: expected sizes of at least 1, ascending")


class GraphRunner:
    """Runs body(variant, **inputs) by replaying graphs, captured by bucket of requests or tokens and by variant.

    body: returns tensors (or NamedTuples of them, or None) with requests or tokens on axis 0. It may read and write
        tensors that outlive it; its work may depend only on the shapes of its inputs and on `variant`. Graphs hold no
        backward pass: it runs without gradients in them.
    inputs: specs of its inputs. live: called in eager runs instead of the body, as live(variant, **inputs, **hints)
        with hints, host values that a capture cannot have, given by the caller; None: the body, which must take them.
    """

    def __init__(
        self,
        name: str,
        body: Callable[..., Any],
        inputs: Sequence[BufferSpec],
        setup: Setup,
        *,
        live: Callable[..., Any] | None = None,
    ):
        self.name = name
        self.phase = Phase.WARM_UP
        self.captured: dict[ShapeKey, Captured] = {}
        self.failures: dict[ShapeKey, str] = {}
        self.buckets = () if setup.capture.refusal else tuple(setup.buckets)
        self.variants = tuple(setup.variants)
        self.rehearsed = self.variants if setup.rehearsed is None else tuple(setup.rehearsed)
        self._body = body
        self._live = live or body
        self._setup = setup
        self._warm: set[ShapeKey] = set()
        self._buffers = StaticBuffers(inputs, max(self.buckets, default=0), setup.device, setup.shared)
        self._found: dict[tuple[int, str], ShapeKey | None] = {}  # graphs by batch, once sealed
        setup.counters.runners[name] = PathCounters()

    def __call__(self, variant: str, inputs: Mapping[str, torch.Tensor | None], **hints: Any) -> Any:
        """Run a batch, from the smallest graph that holds it or eagerly; outputs are valid until the next call.

        Raises GraphError under strict if it cannot replay, ValueError for inputs of wrong names, shapes or dtypes.
        """
        size = self._size_of(inputs)
        key = self._captured_key(size, variant)
        if key is None:
            return self.run_eagerly(self.can_run(size, variant).reason, variant, inputs, **hints)
        captured = self.captured[key]
        with torch.no_grad():  # a capture that re-runs Python would add every replay to the history of its outputs
            self._buffers.load(inputs, size, key.size)
            with self._setup.counters.recording():  # nor must such a capture count its forwards as eager
                captured.graph.replay()
        self._setup.counters.count_replay(self.name, captured.forwards)
        if size == key.size:
            return captured.graph.outputs
        return tree_map_only(torch.Tensor, lambda t: t[:size], captured.graph.outputs)

    def run_eagerly(self, reason: str, variant: str, inputs: Mapping[str, Any], **hints: Any) -> Any:
        """Run a batch without a graph and count `reason`; GraphError under strict."""
        if self._setup.strict:
            size = self._size_of(inputs)
            raise GraphError(f"strict: {self.name} of {size} {self._setup.unit} cannot replay: {reason}")
        self._buffers.check(inputs, self._size_of(inputs))
        self._setup.counters.count_eager(self.name, reason)
        return self._live(variant, **inputs, **hints)

    def replayed_size(self, size: int, variant: str = "") -> int:
        """Return the bucket of the graph that a batch of `size` replays; there must be one, see `can_run`."""
        key = self._captured_key(size, variant)
        assert key is not None, "a batch that cannot replay"
        return key.size

    def can_run(self, size: int, variant: str = "") -> Decision:
        """Decide whether a batch of `size` requests or tokens replays a graph."""
        if self._setup.capture.refusal:
            return Decision(False, self._setup.capture.refusal)
        if self._captured_key(size, variant) is not None:
            return Decision(True)
        if self.phase is not Phase.SEALED:
            return Decision(False, "its graphs are not made yet: build() makes them")
        bucket = next((b for b in self.buckets if b >= size), None)
        if bucket is None:
            return Decision(False, "the batch is larger than the largest bucket")
        return Decision(False, self.failures.get(self._key(bucket, variant), f"variant '{variant}' was not captured"))

    @property
    def made_by(self) -> Capture:
        """The capture that makes its graphs."""
        return self._setup.capture

    @property
    def costs(self) -> list[GraphCost]:
        """Capture time and memory of each graph, in the order of capture."""
        unit = self._setup.unit
        return [GraphCost(k.runner, k.size, unit, k.variant, c.seconds, c.num_bytes) for k, c in self.captured.items()]

    @property
    def keys(self) -> list[ShapeKey]:
        """Keys of all graphs to capture."""
        return [self._key(bucket, variant) for bucket in self.buckets for variant in self.variants]

    def warm_up(self, key: ShapeKey) -> None:
        """Run the body on padding, as `capture` will, but its repeated parts only once."""
        self.rehearse(key)
        self._warm.add(key)

    @torch.no_grad()
    def rehearse(self, key: ShapeKey) -> None:
        """Run what a warm-up of `key` runs, without counting as one."""
        self._require(Phase.WARM_UP)
        with self._setup.counters.recording(), equal_parts_once():
            self._setup.capture.warm_up(self._bound_body(key))

    @torch.no_grad()
    def capture(self, key: ShapeKey) -> None:
        """Capture the graph of `key`, on padding."""
        if self.phase is Phase.WARM_UP:
            self.phase = Phase.CAPTURE
        self._require(Phase.CAPTURE)
        assert key in self._warm, f"{key} was not warmed up"
        start, before = time.perf_counter(), self._setup.capture.used_bytes()
        with self._setup.counters.recording() as forwards:
            graph = self._setup.capture.capture(self._bound_body(key))
        num_bytes, seconds = self._setup.capture.used_bytes() - before, time.perf_counter() - start
        self.captured[key] = Captured(graph, forwards, seconds, num_bytes)

    def fail(self, key: ShapeKey, reason: str) -> None:
        """Record why `key` has no graph."""
        self.failures[key] = reason

    def seal(self) -> None:
        """End capturing; nothing is captured from now on."""
        self.phase = Phase.SEALED

    def _key(self, bucket: int, variant: str) -> ShapeKey:
        return ShapeKey(self.name, bucket, variant)

    def _captured_key(self, size: int, variant: str) -> ShapeKey | None:
        """Return the smallest captured graph that holds `size` of `variant`, None if there is none."""
        if (size, variant) not in self._found:
            fitting = (self._key(b, variant) for b in self.buckets if b >= size)
            found = next((key for key in fitting if key in self.captured), None)
            if self.phase is not Phase.SEALED:
                return found
            self._found[size, variant] = found
        return self._found[size, variant]

    def _bound_body(self, key: ShapeKey) -> Callable[[], Any]:
        return partial(self._body, key.variant, **self._buffers.views(key.size))

    def _size_of(self, inputs: Mapping[str, torch.Tensor | None]) -> int:
        for name, spec in self._buffers.specs.items():
            value = inputs.get(name)
            if value is not None and spec.axis is not None:
                if not isinstance(value, torch.Tensor) or value.dim() <= spec.axis:
                    raise ValueError(
                        f"input {name!r} of {self.name} is {value!r}: expected a tensor with axis {spec.axis}"
                    )
                return value.shape[spec.axis]
        raise ValueError(f"{self.name} got none of its inputs {sorted(self._buffers.specs)}: expected all of them")

    def _require(self, phase: Phase) -> None:
        if self.phase is not phase:
            raise GraphError(
                f"{self.name} is in phase {self.phase.name}, expected {phase.name}: graphs are made once; make a new "
                "runner"
            )
