"""What is set on a live model while we run it, and put back: its attention, recurrent layers and experts go to our ops.

A route knows the model and no engine: whoever runs the model says, by scopes, who answers the ops.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from specdec.backends import attention
from specdec.graphs import Change, ChangeKind
from specdec.targets.exclusive import answering
from specdec.targets.experts import expert_configs, experts_routed
from specdec.targets.marks import layer_id, number_layers
from specdec.targets.mixers import mixers_routed
from specdec.targets.overrides import (
    ConfigViews,
    evaluating,
    unwarned,
    warning_models,
)
from specdec.targets.own_attention import own_replaced
from specdec.targets.probe import ModelSpec
from specdec.targets.ropes import constant_ropes, tabled_ropes, varying_ropes


def _routed_attention(
    module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention_mask: Any = None, **kw: Any
) -> tuple[torch.Tensor, None]:
    """Route HF's attention call, q/k/v [1, heads, T, dim], through our op; return [1, T, heads, v_dim]."""
    out = attention(q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1), layer_id(module))
    return out.unsqueeze(0), None


def _routed_own(module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any) -> torch.Tensor:
    """Route the attention of a module's own method, q/k/v [1, heads, T, dim]; return [1, heads, T, v_dim]."""
    return _routed_attention(module, q, k, v)[0].transpose(1, 2)


AttentionInterface.register("specdec", _routed_attention)


def _places(model: nn.Module, routed: Collection[nn.Module]) -> set[tuple[nn.Module, str]]:
    """Return where modules on the paths to `routed` stand: parent, and name in it."""
    modules = dict(model.named_modules(remove_duplicate=False))
    paths = [name.split(".") for name, module in modules.items() if name and module in routed]
    names = dict.fromkeys(".".join(path[:i]) for path in paths for i in range(1, len(path) + 1))
    return {(modules[parent], key) for parent, _, key in (name.rpartition(".") for name in names)}


class Route:
    """The way through `model`, of which `spec` is known; its attention modules are numbered from then on.

    ropes: modules whose frequencies transformers replaces when it sees a long sequence, which they may not do here.
    """

    def __init__(self, model: PreTrainedModel, spec: ModelSpec):
        self.spec = spec
        self._model = model
        self._modules = list(model.modules())
        self.ropes = varying_ropes(model)
        self._rope_tables = tabled_ropes(model, spec.max_positions)
        self._configs = ConfigViews(model, "specdec")
        self._expert_configs = expert_configs(model)
        self._warning_models = warning_models(model)
        self._turns = number_layers(spec.modules)
        self._attending = {*spec.modules, *(mixer.module for mixer in spec.mixers)}
        self._places = _places(model, self._attending)

    def relies_on(self, change: Change) -> bool:
        """Return whether attention and pools were set up from what has changed: routed modules and those around them,
        their plain attributes and sinks, and configs."""
        if change.kind is ChangeKind.MODULE:
            return (change.owner, change.key) in self._places
        if change.kind is ChangeKind.ATTRIBUTE:
            return not isinstance(change.owner, nn.Module) or change.owner in self._attending
        return change.kind is ChangeKind.TENSOR and any(change.before is sink for sink in self.spec.sinks)

    def walk(self) -> None:
        """Look again for modules that have a training mode, where some were added."""
        self._modules = list(self._model.modules())

    @contextmanager
    def routed(self) -> Iterator[None]:
        """Route the live model's attention calls, its recurrent layers and its experts' products to us within it."""
        for turns in self._turns:
            turns.begin()
        with (
            self._configs.shown(),
            experts_routed(self._expert_configs),
            constant_ropes(self.ropes, self._rope_tables),
            mixers_routed(self.spec.mixers),
            own_replaced(self.spec.own_attention, _routed_own),
            unwarned(self._warning_models),
            evaluating(self._model, self._modules),
        ):
            yield

    @contextmanager
    def only_head(self, hidden: torch.Tensor) -> Iterator[None]:
        """Let the decoder answer with last hidden states [1, N, h] within it: of the model, only the head runs."""
        answer = self.spec.stack_output(last_hidden_state=hidden)
        with (
            self._configs.shown(),
            answering(self.spec.stack, answer),
            evaluating(self._model, self._modules),
        ):
            yield
