"""Adapters: each routes one kind of part of a live model through our ops while we run it; one row each in ADAPTERS.

An adapter finds its parts in a model, none in most models; `routed` sets the attributes they need, and restores them.
Adapters know neither engines nor each other. To support another kind of part, write one and add it here.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

from specdec.reach.targets.adapters.attention import Attention
from specdec.reach.targets.adapters.experts import Experts, Mxfp4
from specdec.reach.targets.adapters.mixers import Mixers
from specdec.reach.targets.adapters.quantised import Quantised
from specdec.reach.targets.adapters.ropes import Ropes
from specdec.reach.targets.overrides import Warnings


class Adapter(Protocol):
    """The parts of one kind in a model."""

    def routed(self) -> AbstractContextManager[None]:
        """Run those parts by our ops within the context; contexts may nest."""


ADAPTERS: tuple[Callable[[Any], Adapter], ...] = (Attention, Experts, Mxfp4, Quantised, Ropes, Mixers, Warnings)


@contextmanager
def routed(adapters: Sequence[Adapter]) -> Iterator[None]:
    """Route the parts of all `adapters` within the context."""
    with ExitStack() as stack:
        for adapter in adapters:
            stack.enter_context(adapter.routed())
        yield
