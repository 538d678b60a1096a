"""The guard of prefill graphs, rules that decide which batches may replay them, and the runner that applies it.

A prefill graph sees tokens, not the forward mode. A TARGET_VERIFY batch can have as many tokens as a prefill and would
even be computed correctly, since attention runs outside the graph on the live batch's metadata. It is refused anyway:
counters and strict mode are meaningful only if every mode has one path. So the mode is checked before any size.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from specdec.core.batch import ForwardMode
from specdec.graphs.runner import GraphRunner
from specdec.graphs.shapes import Decision

MAX_PADDING = 2.0  # tokens of a graph over live tokens, at most
MAX_BUSY_PADDING = 1.02  # the same where the device takes longer than launching


def check_mode(mode: ForwardMode) -> Decision:
    """Accept only EXTEND batches, which are prefills."""
    if mode is ForwardMode.EXTEND:
        return Decision(True)
    own = ": rounds have graphs of their own" if mode is ForwardMode.TARGET_VERIFY else ""
    return Decision(False, f"a {mode.name} batch is not a prefill{own}")


def check_padding(num_tokens: int, size: int, device_bound_from: int | None = None) -> Decision:
    """Decide whether `num_tokens` live tokens may replay a graph of `size` tokens, by the share of padding.

    device_bound_from: number of tokens from which the device takes longer than launching, so that padding costs time;
    None: never.
    """
    is_busy = device_bound_from is not None and num_tokens >= device_bound_from
    if is_busy and size > MAX_BUSY_PADDING * num_tokens:
        return Decision(False, "launches cost no time at this size, padding would")
    if size > MAX_PADDING * num_tokens:
        return Decision(False, f"the smallest graph pads more than {MAX_PADDING:g}x")
    return Decision(True)


class PrefillRunner:
    """A GraphRunner for prefills: replays only EXTEND batches, and only where padding is small.

    prepare(size, **live): called before a replay of `size` tokens, to plan the work that runs in breaks. In an eager
    run the runner gets `live` as hints. device_bound_from: see `check_padding`.
    """

    def __init__(self, runner: GraphRunner, prepare: Callable[..., None]):
        self.runner = runner
        self.device_bound_from: int | None = None
        self._prepare = prepare

    def can_run(self, mode: ForwardMode, num_tokens: int, variant: str = "") -> Decision:
        """Decide whether a batch replays; if not, the reason is the first rule that it breaks."""
        decision = check_mode(mode)
        if decision.ok:
            decision = self.runner.can_run(num_tokens, variant)
        if not decision.ok:
            return decision
        return check_padding(num_tokens, self.runner.replayed_size(num_tokens, variant), self.device_bound_from)

    def __call__(
        self, mode: ForwardMode, num_tokens: int, inputs: Mapping[str, torch.Tensor | None], **live: Any
    ) -> Any:
        """Run a batch, as GraphRunner does; GraphError under strict if it cannot replay."""
        decision = self.can_run(mode, num_tokens)
        if not decision.ok:
            return self.runner.run_eagerly(decision.reason, "", inputs, **live)
        self._prepare(self.runner.replayed_size(num_tokens), **live)
        return self.runner("", inputs)
