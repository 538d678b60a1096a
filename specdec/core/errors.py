"""Errors raised to users. User mistakes are ValueErrors, whose message names the value, what was expected and what to
do; GraphError and RankError are RuntimeErrors."""

from collections.abc import Sequence


class AttachError(ValueError):
    """A model cannot be attached; `reasons` lists every reason found, not just the first."""

    def __init__(self, what: str, reasons: Sequence[str]):
        self.reasons = tuple(reasons)
        super().__init__(f"cannot attach {what}: " + "; ".join(self.reasons))


class CheckpointError(ValueError):
    """A checkpoint of a target, draft or adapter is missing, truncated, in an unknown layout, or made for another
    target; `problems` lists every problem found."""

    def __init__(self, path: str, problems: Sequence[str]):
        self.problems = tuple(problems)
        super().__init__(f"cannot load the checkpoint {path!r}: " + "; ".join(self.problems))


class CapacityError(ValueError):
    """A request exceeds the KV pool or max_seq_len, or an engine exceeds the memory of its device."""


class DetachedError(ValueError):
    """The engine was detached from its model and cannot generate any more."""


class GraphError(RuntimeError):
    """A graph cannot be captured or replayed: under strict, where work would run eagerly; when a replay fails; or after
    a change of the model that its graphs cannot follow."""


class RankError(RuntimeError):
    """Another rank of a tensor-parallel engine failed or is gone; the message names it."""
