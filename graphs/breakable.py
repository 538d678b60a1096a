"""Breakable CUDA graphs: a callable is captured in segments; work that cannot be captured runs between them.

During a capture, `interrupt(fn)` ends the segment, keeps `fn` and begins the next segment in the same pool. A replay
launches the segments in order and calls each `fn` in its place; other Python code runs only during the capture. No
compiler is needed. Captures in progress are tracked per thread and Capture object, so engines do not interfere.
"""

import itertools
import threading
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch

from specdec.core.errors import GraphError
from specdec.graphs.captures import Body, Capture, FullCapture, Graph, Recorded, RecordedCapture, static_copy
from specdec.graphs.pool import GraphPool

Break = Callable[[], None]


class _Thread(threading.local):
    """State of one capture on this thread. on_break: receives the breaks of the callable that runs, if one does."""

    on_break: Callable[[Break], None] | None = None
    is_breaking: bool = False


class Breakable(Capture):
    """Common part of the breakable captures: the rules for when a break is allowed."""

    def __init__(self) -> None:
        self._thread = _Thread()

    def interrupt(self, fn: Break) -> None:
        """Break the graph that this thread is capturing: every replay calls `fn` here, between two segments.

        `fn` must write its results to static buffers. It is not called during the capture itself, in which segments
        compute nothing. Outside a capture it is called at once. GraphError for a break within a break.
        """
        if self._thread.is_breaking:
            raise GraphError("a break within a break: a callable given to interrupt() must not call interrupt()")
        (self._thread.on_break or self._call)(fn)

    def _require_idle(self) -> None:
        """Raise GraphError if this thread is already capturing, or is in a break."""
        if self._thread.on_break is not None or self._thread.is_breaking:
            raise GraphError("a capture within a capture or break: breakable graphs do not nest; end that one first")

    def _run(self, body: Body, on_break: Callable[[Break], None]) -> Any:
        self._thread.on_break = on_break
        try:
            return body()
        finally:
            self._thread.on_break = None

    def _call(self, fn: Break) -> None:
        self._thread.is_breaking = True
        try:
            fn()
        finally:
            self._thread.is_breaking = False


class BreakableCapture(Breakable, FullCapture):
    """Captures a callable as CUDA graphs, one per segment between breaks, replayed in order on the current stream. A
    replay raises GraphError, which names the segment or break that failed."""

    name = "breakable"

    def __init__(self, device: torch.device, pool: GraphPool | None = None):
        Breakable.__init__(self)
        FullCapture.__init__(self, device, pool)

    def capture(self, body: Body) -> Graph:
        self._require_idle()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # two breaks with nothing between them
            return super().capture(lambda: self._run(body, self.pause))

    def divide(self) -> None:
        return None  # breaks are what divides it

    def shared(self, key: Hashable, begin: Callable[[], Any]) -> Any:
        return begin()

    def _graph_of(self, parts: list[Any], outputs: Any) -> Graph:
        return _Segmented(parts, self._call, outputs)


class _Segmented(Graph):
    """steps: graphs and breaks, alternating."""

    def __init__(self, steps: list[Any], call: Callable[[Break], None], outputs: Any):
        self._steps = [step if i % 2 else step.replay for i, step in enumerate(steps)]
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
    """Breakable capture for machines without CUDA: a replay re-runs the callable and its breaks on static inputs."""

    name = "recorded, breakable"

    def capture(self, body: Body) -> Graph:
        self._require_idle()
        return Recorded(lambda: self._rerun(body), static_copy(self._run(body, lambda fn: None)))

    def _rerun(self, body: Body) -> Any:
        """Run `body` again and call its breaks; the GraphError names the break that fails."""
        numbers = itertools.count(1, 2)

        def on_break(fn: Break) -> None:
            number = next(numbers)
            try:
                self._call(fn)
            except Exception as error:
                raise failed_segment(number, None, error) from error

        return self._run(body, on_break)


def failed_segment(index: int, total: int | None, error: Exception) -> GraphError:
    """Return the error of a replay that failed at step `index` (from 0) of `total`; graphs and breaks alternate."""
    what, number = ("break" if index % 2 else "graph"), index // 2 + 1
    of = "" if total is None else f" of {total // 2 if index % 2 else (total + 1) // 2}"
    return GraphError(f"{what} {number}{of} of a breakable graph failed: {type(error).__name__}: {error}")


def pick_breakable(device: torch.device, pool: GraphPool | None = None) -> BreakableCapture | RecordedBreakable:
    """Return the breakable capture for `device`: CUDA graphs on CUDA, recorded segments elsewhere."""
    return BreakableCapture(device, pool) if device.type == "cuda" else RecordedBreakable()
