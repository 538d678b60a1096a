"""Routes a live model's calls to our ops by its adapters, while the engine runs it.

A route knows the model and no engine: the caller's scopes determine which code answers the ops.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.core.errors import GraphError
from specdec.graphs import Change, ChangeKind
from specdec.reach.targets.adapters import Attention, routed
from specdec.reach.targets.admission.probe import ModelSpec
from specdec.reach.targets.exclusive import answering
from specdec.reach.targets.marks import number_layers
from specdec.reach.targets.overrides import evaluating, multiplying


def _places(model: nn.Module, routed: Collection[nn.Module]) -> set[tuple[nn.Module, str]]:
    """Return the places of modules on the paths to `routed`: parent, and name in it."""
    modules = dict(model.named_modules(remove_duplicate=False))
    paths = [name.split(".") for name, module in modules.items() if name and module in routed]
    names = dict.fromkeys(".".join(path[:i]) for path in paths for i in range(1, len(path) + 1))
    return {(modules[parent], key) for parent, _, key in (name.rpartition(".") for name in names)}


def _refuse_autocast(device: torch.device, dtype: torch.dtype) -> None:
    """Raise GraphError if the model's own forward has switched on autocast to another dtype than its layers ran in: the
    text would be neither the model's own nor that of its weights."""
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        lower = torch.get_autocast_dtype(device.type)
        if lower is not dtype:
            raise GraphError(
                f"the model's forward runs in torch.autocast(dtype={lower}) since attach(), as Accelerate's mixed "
                f"precision does, and its weights are {dtype}: an engine runs the model in the dtype of its weights. "
                f"Put its forward back, or detach(), convert it, model.to({lower}), and attach() again"
            )


class Route:
    """The route through `model`, described by `spec`; numbers its attention modules.

    multiplies: the output head runs on our kernels; admission does without, to avoid waiting for their compilation.
    """

    def __init__(self, model: PreTrainedModel, spec: ModelSpec):
        self.spec = spec
        self.multiplies = False
        self._model = model
        self._modules = list(model.modules())
        self._turns = number_layers(spec.modules)
        self._expansions = [*spec.adapter(Attention).expansions.values()]
        self._places = _places(model, {*spec.attending, *self._expansions})

    def relies_on(self, change: Change) -> bool:
        """Return whether attention and pools were set up from the changed object: routed modules and those around them,
        their plain attributes and sinks, and configs. Layers that would expand latents may change their weight only."""
        if any(change.owner is layer for layer in self._expansions):
            return change.key != "weight"
        if change.kind is ChangeKind.MODULE:
            return (change.owner, change.key) in self._places
        if change.kind is ChangeKind.ATTRIBUTE:
            return not isinstance(change.owner, nn.Module) or change.owner in self.spec.attending
        is_other = change.kind is ChangeKind.TENSOR and change.before is not None
        return is_other and any(change.before is sink for sink in self.spec.sinks)

    def walk(self) -> None:
        """Update the list of modules with a training mode, after some were added."""
        self._modules = list(self._model.modules())

    @contextmanager
    def routed(self) -> Iterator[None]:
        """Route the parts that the model's adapters have found to our ops within the context."""
        for turns in self._turns:
            turns.begin()
        with routed(self.spec.adapters), evaluating(self._model, self._modules):
            yield

    @contextmanager
    def only_head(self, hidden: torch.Tensor) -> Iterator[None]:
        """Make the decoder return last hidden states [1, N, h] within the context: only the model's head runs."""
        answer = self.spec.stack_output(last_hidden_state=hidden)
        with (
            self.spec.adapter(Attention).routed(),
            answering(self.spec.stack, answer, partial(_refuse_autocast, hidden.device, hidden.dtype)),
            multiplying(self._model.get_output_embeddings() if hidden.is_cuda and self.multiplies else None),
            evaluating(self._model, self._modules),
        ):
            yield
