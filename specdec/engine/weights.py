"""Watches over what an engine reads of live models: weights that moved, were converted or changed, replaced modules."""

from collections.abc import Sequence

from torch import nn

from specdec.errors import GraphError
from specdec.graphs import ChangeWatch, GraphRunner, KindWatch, ModuleWatch
from specdec.targets.hf import HFTarget
from specdec.targets.ropes import varying_ropes


class Weights:
    """Those of a target and of its draft's module, if it has one.

    runners: of all its graphs; keeps_kv: whether K/V outlives requests, and so must be forgotten with its weights.
    """

    def __init__(
        self, target: HFTarget, draft: nn.Module | None, runners: Sequence[GraphRunner], keeps_kv: bool = False
    ):
        self._target = target
        self._runners = runners
        modules = [module for module in (target.model, draft) if module is not None]
        free = [rope for module in modules for rope in varying_ropes(module)]  # their original frequencies are read
        has_graphs = any(runner.captured for runner in runners)
        self._places = ModuleWatch(modules, free) if target.compiled or has_graphs else None
        self._kinds = KindWatch(modules)
        self._changes = ChangeWatch(modules, free) if keeps_kv else None

    def check(self) -> None:
        """GraphError if a weight that graphs or compiled layers read has been replaced or moved, one was changed of
        which ranks read copies, a module was replaced that calls our ops, or parameters were converted."""
        self._target.check_shares()
        self._target.check_routed()
        if self._places is not None and self._places.is_intact():
            return
        self._kinds.check()
        if self._places is None:
            return
        self._target.check_compiled()
        for runner in self._runners:
            runner.check_addresses()
        moved = self._places.moved()
        raise GraphError(
            f"{', '.join(moved[:3])} moved since graphs were captured or layers compiled ({len(moved)} in all): they "
            "would use what was there before. Do not replace parts of a model while an engine is attached; detach() "
            "and attach() again"
        )

    def have_changed(self) -> bool:
        """Return whether K/V that is kept is of other weights: they were changed since the last call."""
        return self._changes is not None and self._changes.has_changed()
