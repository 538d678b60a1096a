"""The guard of prefill graphs: which batches may replay them, rule by rule, and the runner that asks it.

A prefill graph sees tokens and nothing else: it cannot tell what the tokens are for. A TARGET_VERIFY batch is as many
tokens as a prefill, but its nodes form a tree and its K/V go to a tail; replayed as a prefill it would be attended
causally, and silently wrong. So the first rule looks at the mode alone, before any size.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from specdec.batch import ForwardMode
from specdec.graphs.runner import GraphRunner
from specdec.graphs.shapes import Decision, bucket_for

MAX_PADDING = 2.0  # a replay may cover this many times the live tokens
MAX_BUSY_PADDING = 1.02  # where launches are hidden anyway


class HiddenCapture(IntEnum):
    """Which of a forward's hidden states are needed, or captured; a graph that captured more serves as well."""

    NULL = 0
    LAST = 1  # of each request's last token
    FULL = 2  # of every token, the aux layers' included


@dataclass(frozen=True)
class PrefillShape:
    """What the guard knows of a batch, all of it on the host.

    hidden: what is needed of it; has_embeds: its inputs are embeddings, not token ids.
    """

    mode: ForwardMode
    num_tokens: int
    hidden: HiddenCapture = HiddenCapture.NULL
    has_embeds: bool = False


def reject_target_verify(shape: PrefillShape) -> Decision:
    """The first rule of every prefill runner: a TARGET_VERIFY batch is never a prefill, whatever its size."""
    if shape.mode is ForwardMode.TARGET_VERIFY:
        return Decision(False, "a TARGET_VERIFY batch is not a prefill: its nodes would be attended causally")
    return Decision(True)


@dataclass(frozen=True)
class PrefillLimits:
    """What the graphs of a runner hold.

    hidden: captured hidden states; buckets: sizes to replay, ascending, in tokens; busy_from: from this many tokens on
    the device is busy longer than launching takes, so that padding costs time; None: never.
    """

    hidden: HiddenCapture
    buckets: tuple[int, ...]
    busy_from: int | None = None


def decide(shape: PrefillShape, limits: PrefillLimits) -> Decision:
    """Whether a batch may replay; the first rule that it breaks is the reason."""
    verify = reject_target_verify(shape)
    if not verify.ok:
        return verify
    if shape.mode is not ForwardMode.EXTEND:
        return Decision(False, f"a {shape.mode.name} batch is not a prefill")
    if shape.hidden > limits.hidden:
        return Decision(False, f"needs {shape.hidden.name} hidden states, {limits.hidden.name} were captured")
    if shape.has_embeds:
        return Decision(False, "inputs given as embeddings")
    bucket = bucket_for(shape.num_tokens, limits.buckets)
    if bucket is None:
        return Decision(False, "more tokens than the largest bucket")
    if bucket > MAX_PADDING * shape.num_tokens:
        return Decision(False, f"the smallest graph pads more than {MAX_PADDING:g}x")
    is_busy = limits.busy_from is not None and shape.num_tokens >= limits.busy_from
    if is_busy and bucket > MAX_BUSY_PADDING * shape.num_tokens:
        return Decision(False, "launches are hidden at this size, padding would not be")
    return Decision(True)


class PrefillRunner:
    """A GraphRunner over tokens behind the guard.

    prepare(size, **live) is called before a replay of `size` tokens: what the breaks will need. The runner's body gets
    `live` as hints where it runs eagerly. hidden: what its graphs capture.
    """

    def __init__(self, runner: GraphRunner, hidden: HiddenCapture, prepare: Callable[..., None]):
        self.runner = runner
        self.hidden = hidden
        self.busy_from: int | None = None
        self._prepare = prepare

    def can_run(self, shape: PrefillShape) -> Decision:
        """Whether a batch replays, and if not, why."""
        if not self.runner.buckets:
            verify = reject_target_verify(shape)
            return self.runner.can_run(shape.num_tokens) if verify.ok else verify
        decision = decide(shape, self.limits)
        return self.runner.can_run(shape.num_tokens) if decision.ok else decision

    def __call__(self, shape: PrefillShape, inputs: Mapping[str, torch.Tensor | None], **live: Any) -> Any:
        """Run a batch, as GraphRunner does; GraphError under strict if it cannot replay."""
        decision = self.can_run(shape)
        if not decision.ok:
            return self.runner.run_eagerly(decision.reason, "", inputs, **live)
        self._prepare(self.runner.replayed_size(shape.num_tokens), **live)
        return self.runner("", inputs)

    @property
    def limits(self) -> PrefillLimits:
        """What the guard holds a batch against."""
        return PrefillLimits(self.hidden, self.runner.buckets, self.busy_from)
