"""The errors users can meet. User mistakes are ValueErrors: the message names the value, what was expected and what to
do. GraphError is a RuntimeError: graphs that were asked for cannot be made or replayed."""

from collections.abc import Sequence


class AttachError(ValueError):
    """A model cannot be attached; `reasons` lists every reason found, not just the first."""

    def __init__(self, what: str, reasons: Sequence[str]):
        self.reasons = tuple(reasons)
        super().__init__(f"cannot attach {what}: " + "; ".join(self.reasons))


class CheckpointError(ValueError):
    """A checkpoint, of a target, a draft or an adapter, is truncated, foreign, or made for another target; `problems`
    lists what was found."""

    def __init__(self, path: str, problems: Sequence[str]):
        self.problems = tuple(problems)
        super().__init__(f"cannot load the checkpoint {path!r}: " + "; ".join(self.problems))


class CapacityError(ValueError):
    """Something can never fit: a request in the KV pool or the context, or an engine in the memory of its device."""


class DetachedError(ValueError):
    """The engine was detached from its model and cannot generate any more."""


class GraphError(RuntimeError):
    """A batch or a phase that a strict engine must not run eagerly, a graph that fails, or one whose tensors moved."""


class RankError(RuntimeError):
    """Another rank of a tensor-parallel engine failed or is gone; the message names it."""
