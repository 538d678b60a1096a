"""Compiles, shares and watches live `transformers` models for an engine."""

import time
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.core.config import EngineConfig
from specdec.core.draft.standalone import StandaloneWorker
from specdec.core.draft.worker import DraftWorker
from specdec.core.errors import GraphError
from specdec.reach.targets.compiling.checked import Comparison
from specdec.reach.targets.compiling.draft import compile_draft
from specdec.reach.targets.compiling.target import compile_layers, why_uncompiled
from specdec.reach.targets.exclusive import make_exclusive
from specdec.reach.targets.few_rows import FewRows
from specdec.reach.targets.hf import HFTarget
from specdec.reach.targets.weights import Weights


class HFModels:
    """The target's model and the draft's, if it has one; see `specdec.core.target.LiveModels`."""

    def __init__(self, target: HFTarget, worker: DraftWorker, config: EngineConfig):
        self._target, self._worker, self._config = target, worker, config
        self.prefill_mode = resolve_prefill_mode(config, target.device)
        self.how_compiled, self.how_draft_compiled, self.compile_seconds = "", "", 0.0
        self._later: list[Comparison] = []

    def compile(self) -> None:
        """Compile the layers that `config` selects; a model that does not trace runs uncompiled, its prefills
        "breakable"."""
        self._compile(self._later)

    def _compile(self, later: list[Comparison] | None) -> None:
        """later: see `trace_checked`."""
        start, target = time.perf_counter(), self._target
        self.prefill_mode, self.how_compiled = compile_layers(target, self._config, self.prefill_mode, later)
        self.how_draft_compiled = ""
        if target.compiled:
            self.how_draft_compiled = compile_draft(self._worker, self._config, self.prefill_mode, later)
            self.compile_seconds = time.perf_counter() - start

    def check(self) -> bool:
        start, later, self._later = time.perf_counter(), self._later, []
        draft = self._worker.model if isinstance(self._worker, StandaloneWorker) else None
        for model in (self._target, draft):
            if isinstance(model, HFTarget):
                model.check_head()
        try:
            for comparison in later:
                comparison.check()
        except GraphError:
            self._target.drop_compiled()
            self._worker.drop_compiled()
            self._compile(None)
            return False
        if later:
            self.compile_seconds += time.perf_counter() - start
        return True

    def share(self, turns: AbstractContextManager[Any], is_baked: bool) -> None:
        models = [m for m in (self._target.model, self._worker.module) if m is not None]
        self._callers = ExitStack()
        for model in models:
            if isinstance(model, PreTrainedModel):
                self._callers.push(make_exclusive(model, turns))
        self._weights = Weights(self._target, self._worker.module, bool(self._target.compiled) or is_baked)
        self._few_rows = FewRows(models)
        self.follow, self.has_changed = self._weights.follow, self._weights.has_changed
        self.reread = self._weights.reread
        self.stepping = self._few_rows.active

    def close(self) -> None:
        """Stop watching the models; their callers no longer wait for turns."""
        self._weights.close()
        self._few_rows.restore()
        self._callers.close()


def resolve_prefill_mode(config: EngineConfig, device: torch.device) -> str:
    """Resolve `prefill_graph` to "piecewise", "breakable" or "off" (eager prefills, but for whole graphs)."""
    if config.prefill_graph not in ("auto", "whole"):
        return config.prefill_graph
    if config.prefill_graph == "auto" and not auto_captures(config, device):
        return "off"
    return "breakable" if why_uncompiled(config, device) else "piecewise"


def auto_captures(config: EngineConfig, device: torch.device) -> bool:
    """Return True if prefills have graphs under "auto"."""
    return device.type == "cuda" and config.cuda_graph is not False
