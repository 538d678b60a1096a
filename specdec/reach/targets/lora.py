"""LoRA adapters that requests choose by name: adapted layers add each row's own low-rank product.

Matrices of all adapters are stacked, one stack per layer; graphs and compiled layers read them there. Adapters that are
loaded in the model are copied again when it changes, so that they can be trained while an engine runs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.pytorch_utils import Conv1D

from specdec.backends.linear.lora import MAX_RANK, RANKS, lora
from specdec.backends.op import adapters_by
from specdec.graphs import Change
from specdec.reach.checkpoints.lora import CURE, LowRank, config_reasons, read_lora
from specdec.reach.targets.admission.quantised import is_quantised_linear
from specdec.reach.targets.overrides import replaced

WRONG_PLACE = "not a linear layer below the output head"
MERGED = "is merged into the model's weights; call unmerge_adapter() first"


class Stack(NamedTuple):
    """All adapters' matrices for a layer, 0 for adapters without it: a [n, R, K], b [n, N, R], scales [n] float32."""

    a: torch.Tensor
    b: torch.Tensor
    scales: torch.Tensor


class Lora:
    """The adapters of one engine. numbers: of each name, from 1 on.

    adapters: names of adapters that PEFT has loaded in the model, or a mapping from names to folders or Hub ids. The
    adapters that are active in the model have no effect: rows without an adapter use the model without any. stack: the
    part of the model below its output head.
    """

    def __init__(self, model: PreTrainedModel, stack: nn.Module, adapters: Iterable[str] | Mapping[str, str | Path]):
        self._model, self._stack = model, stack
        files = adapters if isinstance(adapters, Mapping) else {}
        self.numbers = {name: i for i, name in enumerate(dict.fromkeys(adapters), 1)}
        self._loaded = [name for name in self.numbers if name not in files]
        found = {name: _placed(model, stack, name, read_lora(source)) for name, source in files.items()}
        self._placed = {layer for of_one in found.values() for layer in of_one}
        found |= {name: _loaded(model, stack, name) for name in self._loaded}
        rank = max(len(low.a) for of_one in found.values() for low in of_one.values())
        if rank > MAX_RANK:
            raise ValueError(f"adapters have ranks up to {rank}: expected {MAX_RANK} at most; {CURE}")
        self._rank = next(r for r in RANKS if r >= rank)
        shapes = {layer: low for of_one in found.values() for layer, low in of_one.items()}
        self.stacks = {layer: self._empty(low) for layer, low in shapes.items()}
        self._fill(found)

    def refresh(self) -> None:
        """Copy the matrices of adapters that are loaded in the model again. ValueError for one that cannot be read, and
        if layers that file adapters belong to are no longer in the model."""
        if not self._placed <= {*self._model.modules()}:
            raise ValueError("adapters read from files belong to layers that are gone")
        self._fill({name: _loaded(self._model, self._stack, name) for name in self._loaded})

    def follows(self, change: Change) -> bool:
        """Return whether `refresh` follows `change`: a change of adapters, or of which are active."""
        is_module = isinstance(change.owner, nn.Module)  # a config has no hash
        return is_module and change.owner in self._parts and change.key != "base_layer"

    @contextmanager
    def routed(self) -> Iterator[None]:
        """Make layers add only the product of each row's adapter within the context; contexts do not nest."""
        forwards = {layer: partial(_adapted, _inner(layer), stack) for layer, stack in self.stacks.items()}
        bypasses = {layer: _inner(layer) for layer in self._bypassed}
        with replaced((vars(layer), "forward", forward) for layer, forward in {**forwards, **bypasses}.items()):
            yield

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Make a trace see stacks as buffers of their layers, and give rows the adapters in turn, within the
        context."""
        buffers = [
            (layer._buffers, f"_specdec_lora_{name}", tensor)
            for layer, stack in self.stacks.items()
            for name, tensor in stack._asdict().items()
        ]
        with replaced(buffers), adapters_by(self.in_turn):
            yield

    def in_turn(self, num_rows: int) -> torch.Tensor:
        """Return adapter numbers of rows [num_rows]: each in turn, then 0, and so on."""
        return torch.arange(1, num_rows + 1, device=self._model.device) % (len(self.numbers) + 1)

    def _empty(self, low: LowRank) -> Stack:
        (_, K), (N, _), n = low.a.shape, low.b.shape, len(self.numbers)
        like = self._model.get_input_embeddings().weight
        zeros = partial(torch.zeros, device=like.device, dtype=like.dtype)
        return Stack(zeros(n, self._rank, K), zeros(n, N, self._rank), zeros(n, dtype=torch.float32))

    @torch.no_grad()
    @torch.inference_mode(False)
    def _fill(self, found: Mapping[str, Mapping[nn.Module, LowRank]]) -> None:
        layers = [layer for layer in self._model.modules() if _is_lora(layer)]
        self._bypassed = [layer for layer in layers if layer not in self.stacks]
        self._parts = {part for layer in layers for part in _parts(layer)}
        for name, of_one in found.items():
            unknown = [low for layer, low in of_one.items() if layer not in self.stacks or len(low.a) > self._rank]
            if unknown:
                raise ValueError(f"adapter {name!r} has other layers or a larger rank than at attach()")
            for layer, (a, b, scales) in self.stacks.items():
                i, low = self.numbers[name] - 1, of_one.get(layer)
                for stack in (a, b, scales):
                    stack[i].zero_()
                if low is not None:
                    a[i, : len(low.a)].copy_(low.a)
                    b[i, :, : len(low.a)].copy_(low.b)
                    scales[i] = low.scale


def _adapted(inner: Callable[..., torch.Tensor], stack: Stack, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return lora(x, inner(x, *args, **kwargs), [stack.a], [stack.b], [stack.scales])


def _inner(layer: nn.Module) -> Callable[..., Any]:
    """Return the function that computes the layer without adapters, looked up now, since others replace forwards,
    too."""
    return layer.base_layer if _is_lora(layer) else layer.forward  # type: ignore[return-value]


def _is_lora(module: nn.Module) -> bool:
    """Return whether `module` is one of PEFT's layers with LoRA adapters by name."""
    return isinstance(getattr(module, "lora_A", None), nn.ModuleDict) and hasattr(module, "base_layer")


def _parts(layer: nn.Module) -> set[nn.Module]:
    """Return a LoRA layer and its submodules, except the layer that it adapts."""
    return {*layer.modules()} - {*layer.base_layer.modules()}  # type: ignore[union-attr]


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D) or is_quantised_linear(module)


def _loaded(model: PreTrainedModel, stack: nn.Module, name: str) -> dict[nn.Module, LowRank]:
    """Return the products that PEFT's adapter `name` adds to layers of `model`; ValueError if it is not plain LoRA on
    linear layers."""
    layers: dict[str, Any] = {path: m for path, m in model.named_modules() if _is_lora(m)}
    config, inside = getattr(model, "peft_config", {}).get(name), {*stack.modules()}
    reasons = [] if config is None else list(config_reasons(vars(config)))
    is_loaded = any(name in m.lora_A or name in getattr(m, "lora_embedding_A", ()) for m in layers.values())
    if not is_loaded and not reasons:
        known = dict.fromkeys(n for m in layers.values() for n in m.lora_A)
        there = f"it has {', '.join(map(repr, known))}" if known else "it has none"
        raise ValueError(
            f"adapters: the model has no LoRA adapter {name!r} loaded ({there}); load it, or pass {{{name!r}: FOLDER}}"
        )
    for path, layer in layers.items():
        has_it = name in layer.lora_A or name in getattr(layer, "lora_embedding_A", ())
        if has_it and not (layer in inside and _is_linear(layer.base_layer)):
            reasons.append(f"{path} is {WRONG_PLACE}; {CURE}")
        if name in getattr(layer, "lora_variant", ()):
            variant = type(layer.lora_variant[name]).__name__
            reasons.append(f"{path} is more than a low-rank product ({variant}); {CURE}")
        if name in getattr(layer, "merged_adapters", ()):
            reasons.append(f"{path} {MERGED}")
    if reasons:
        raise ValueError(f"adapter {name!r}: {reasons[0]} ({len(reasons)} in all)")
    return {
        layer: LowRank(layer.lora_A[name].weight, layer.lora_B[name].weight, float(layer.scaling[name]))
        for layer in layers.values()
        if name in layer.lora_A
    }


def _placed(
    model: PreTrainedModel, stack: nn.Module, name: str, read: Mapping[str, LowRank]
) -> dict[nn.Module, LowRank]:
    """Return the `read` products by the layers of `model` they belong to; ValueError for one that does not fit."""
    modules, inside = dict(model.named_modules()), {*stack.modules()}
    renamings: list[Any] = []  # of layers whose names in the file come from older releases of transformers
    if not read.keys() <= modules.keys():
        renamings = [way for way in get_model_conversion_mapping(model) if isinstance(way, WeightRenaming)]
    found: dict[nn.Module, LowRank] = {}
    for path, low in read.items():
        renamed = rename_source_key(f"{path}.weight", renamings, [])[0].removesuffix(".weight")
        layer = modules.get(path, modules.get(renamed))
        base: Any = layer.base_layer if layer is not None and _is_lora(layer) else layer
        if layer not in inside or not _is_linear(base):
            what = "which the model does not have" if layer is None else WRONG_PLACE
            raise ValueError(f"adapter {name!r} is for {path}, {what}; {CURE}")
        sizes = tuple(base.weight.shape) if isinstance(base, Conv1D) else (base.in_features, base.out_features)
        if sizes != (low.a.shape[1], low.b.shape[0]):
            given = low.a.shape[1], low.b.shape[0]
            raise ValueError(
                f"adapter {name!r} is of another model: {path} has {sizes} inputs and outputs, the adapter {given}"
            )
        found[layer] = low
    return found
