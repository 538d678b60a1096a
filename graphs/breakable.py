"""Breakable CUDA graphs: a callable is captured in segments, and work that cannot be captured runs between them.

While a callable is captured, `interrupt(fn)` ends the segment, keeps `fn` and begins the next segment in the same pool;
a replay launches the segments in order and calls each `fn` in its place. No compiler is needed, and Python between
breaks runs only during the capture. Captures in flight are tracked per thread and per capture, so engines never clash.
"""

import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from specdec.errors import GraphError
from specdec.graphs.captures import Body, Capture, FullCapture, Graph, RecordedCapture, static_copy, write_outputs
from specdec.graphs.pool import GraphPool

Break = Callable[[], None]


class _InFlight(threading.local):
    """State of one capture on this thread."""

    recording: "_Recording | None" = None
    is_breaking: bool = False


class _Recording(ABC):
    """A callable that is being captured or re-run; it receives the callable's breaks."""

    @abstractmethod
    def break_with(self, fn: Break) -> None:
        """End the current segment, keep `fn`, begin the next segment."""


class Breakable(Capture):
    """Common part of the breakable captures: the rules for when a break is allowed."""

    def __init__(self) -> None:
        self._in_flight = _InFlight()

    def interrupt(self, fn: Break) -> None:
        """Run `fn` at this point of every replay, outside the graph that this thread is capturing. It must write its
        results to static buffers. It is not called during the capture, when segments compute nothing; outside a capture
        it runs immediately.

        Raises GraphError for a break within a break.
        """
        if self._in_flight.is_breaking:
            raise GraphError("a break within a break: what runs between two segments must not break the graph itself")
        if self._in_flight.recording is None:
            self._call(fn)
        else:
            self._in_flight.recording.break_with(fn)

    def _require_idle(self) -> None:
        """Raise GraphError if this thread is already capturing, or is in a break."""
        if self._in_flight.recording is not None or self._in_flight.is_breaking:
            raise GraphError("a capture within a capture: breakable graphs do not nest")

    def _record(self, recording: _Recording, body: Body) -> Any:
        """Run `body` and pass its breaks to `recording`."""
        self._in_flight.recording = recording
        try:
            return body()
        finally:
            self._in_flight.recording = None

    def _call(self, fn: Break) -> None:
        self._in_flight.is_breaking = True
        try:
            fn()
        finally:
            self._in_flight.is_breaking = False


class BreakableCapture(Breakable, FullCapture):
    """Captures segments as CUDA graphs, replayed in order on the current stream."""

    name = "breakable"

    def __init__(self, device: torch.device, pool: GraphPool | None = None):
        Breakable.__init__(self)
        FullCapture.__init__(self, device, pool)

    def capture(self, body: Body) -> Graph:
        self._require_idle()
        torch.cuda.synchronize(self.pool.device)
        with self.pool.on_stream(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # two breaks with nothing between them
            segments = _CudaSegments(self.pool)
            try:
                outputs = self._record(segments, body)
                segments.end()
            except BaseException:
                self.pool.give_up(segments.open)
                raise
        return _Segmented(segments.steps, self._call, outputs)


class _CudaSegments(_Recording):
    """Segments captured so far. steps: graphs and breaks, alternating; `open`: the graph being captured."""

    def __init__(self, pool: GraphPool):
        self.steps: list[torch.cuda.CUDAGraph | Break] = []
        self._pool = pool
        self.open = pool.begin()

    def break_with(self, fn: Break) -> None:
        self.end()
        self.steps.append(fn)
        self.open = self._pool.begin()

    def end(self) -> None:
        """End the segment."""
        self.open.capture_end()
        self.steps.append(self.open)


class _Segmented(Graph):
    def __init__(self, steps: list[Any], call: Callable[[Break], None], outputs: Any):
        self._steps = [step.replay if isinstance(step, torch.cuda.CUDAGraph) else step for step in steps]
        self._call = call
        self.outputs = outputs

    def replay(self) -> None:
        for i, step in enumerate(self._steps):
            try:
                if i % 2:
                    self._call(step)
                else:
                    step()
            except Exception as error:
                raise failed_segment(i, len(self._steps), error) from error


class RecordedBreakable(Breakable, RecordedCapture):
    """For machines without CUDA: a replay re-runs the callable on its static inputs, breaks included."""

    name = "recorded, breakable"

    def capture(self, body: Body) -> Graph:
        self._require_idle()
        return _RecordedSegments(self, body, static_copy(self._record(_Skipping(), body)))

    def rerun(self, body: Body) -> Any:
        """Run `body` again and call its breaks; the GraphError names the break that fails."""
        return self._record(_Calling(self._call), body)


class _Skipping(_Recording):
    """Recording of a capture, which computes nothing, so breaks are not called."""

    def break_with(self, fn: Break) -> None:
        return None


class _Calling(_Recording):
    """Recording of a replay: breaks are called."""

    def __init__(self, call: Callable[[Break], None]):
        self._num_breaks = 0
        self._call = call

    def break_with(self, fn: Break) -> None:
        self._num_breaks += 1
        try:
            self._call(fn)
        except Exception as error:
            raise failed_segment(2 * self._num_breaks - 1, None, error) from error


class _RecordedSegments(Graph):
    def __init__(self, capture: RecordedBreakable, body: Body, outputs: Any):
        self._capture = capture
        self._body = body
        self.outputs = outputs

    def replay(self) -> None:
        write_outputs(self.outputs, self._capture.rerun(self._body))


def failed_segment(index: int, total: int | None, error: Exception) -> GraphError:
    """Return the error of a replay that failed at step `index` (from 0) of `total`; graphs and breaks alternate."""
    what, number = ("break" if index % 2 else "graph"), index // 2 + 1
    of = "" if total is None else f" of {total // 2 if index % 2 else (total + 1) // 2}"
    return GraphError(f"{what} {number}{of} of a breakable graph failed: {type(error).__name__}: {error}")


def pick_breakable(device: torch.device, pool: GraphPool | None = None) -> BreakableCapture | RecordedBreakable:
    """Return the breakable capture for `device`: CUDA graphs on CUDA, recorded segments elsewhere."""
    return BreakableCapture(device, pool) if device.type == "cuda" else RecordedBreakable()
