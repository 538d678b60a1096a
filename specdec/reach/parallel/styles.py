"""HF's styles of tensor parallelism on local tensors: for each style a forward that computes the same.

Forwards are functions of their modules and use only our collectives, so they can be traced and captured. `sharded`
refuses styles and options that have no such forward.
"""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from specdec.backends.comm import all_gather, all_reduce

HF_STYLES = "transformers.distributed.tensor_parallel"  # the module of HF's styles and of their hooks

Forward = Callable[..., Any]


class Share(NamedTuple):
    """This rank among the `size` ranks of a process group, `group` by name."""

    group: str
    rank: int
    size: int

    def first(self, total: int) -> int:
        """Return where this rank's part of `total` rows or columns begins, as DTensors are cut."""
        return self.rank * -(-total // self.size)


class Layer(NamedTuple):
    """A module with a closure, as the function of its style takes it."""

    module: nn.Module
    style: Any
    original: Forward
    share: Share


def is_sharded(parameter: object) -> bool:
    """Return whether ranks have different parts of `parameter`."""
    return isinstance(parameter, DTensor) and not parameter.placements[0].is_replicate()


def plain_forward(layer: Layer) -> Forward | None:
    """Return the local-tensor equivalent of HF's forward of `layer`; None if its style is unknown."""
    kind = type(layer.style)
    make = _PLAIN.get(kind.__name__) if kind.__module__ == HF_STYLES else None
    return None if make is None else make(layer)


def is_gathered_linear(module: nn.Module) -> bool:
    """Return whether the plain forward of `module` is a linear layer's over some of its rows, whose outputs are
    gathered."""
    forward = vars(module).get("forward")
    if not isinstance(forward, partial) or forward.func is not _gathered:
        return False
    return getattr(forward.args[0], "__func__", None) is nn.Linear.forward


def is_summed(module: nn.Module) -> bool:
    """Return whether the plain forward of `module` all-reduces the outputs of a rank's part of the weights."""
    forward = vars(module).get("forward")
    return isinstance(forward, partial) and forward.func is _summed


def part_forward(module: nn.Module, size: int) -> Forward | None:
    """Return a forward whose results on `size` ranks add up to those of `module`; None if it does not end in a sum."""
    forward: Any = vars(module).get("forward")
    kind = forward.func if isinstance(forward, partial) else None
    if kind is _summed:
        return forward.args[0]
    if kind is not row_linear:
        return None
    linear = forward.args[0]
    return MethodType(nn.Linear.forward, linear) if linear.bias is None else partial(_row_part, linear, size)


# ---- forwards of modules, whose own arguments come last; x is [..., features], the same on all ranks unless stated
# otherwise


def _gathered(original: Forward, size: int, group: str, *args: Any, **kwargs: Any) -> torch.Tensor:
    return all_gather(original(*args, **kwargs), size, group)


def _summed(original: Forward, group: str, *args: Any, **kwargs: Any) -> torch.Tensor:
    return all_reduce(original(*args, **kwargs), group)


def row_linear(module: nn.Linear, group: str, x: torch.Tensor) -> torch.Tensor:
    """Return the linear product of an x that is sharded along its features, as the weight is; the bias is added
    once."""
    out = all_reduce(F.linear(x, module.weight), group)
    return out if module.bias is None else out + module.bias


def _row_part(module: nn.Linear, size: int, x: torch.Tensor) -> torch.Tensor:
    """Return a rank's part of `row_linear`, including the bias."""
    return F.linear(x, module.weight, module.bias / size)


def _whole_row_linear(module: nn.Linear, first: int, group: str, x: torch.Tensor) -> torch.Tensor:
    """Return `row_linear` of a whole x; first: this rank's first feature."""
    return row_linear(module, group, x[..., first : first + module.weight.shape[1]])


def _vocabulary(
    module: nn.Embedding, original: Forward, first: int, group: str, input_ids: torch.Tensor
) -> torch.Tensor:
    """Return the embeddings of input_ids [...]; first: the first id of this rank's rows."""
    local = input_ids - first
    is_foreign = (local < 0) | (local >= module.weight.shape[0])
    out = original(local.masked_fill(is_foreign, 0))
    return all_reduce(out.masked_fill(is_foreign.unsqueeze(-1), 0), group)


def _divided(original: Forward, size: int, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return original(x / size, *args, **kwargs)


def _local_experts(original: Forward, first: int, count: int, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """Return a router's logits, scores [T, top_k] and indices [T, top_k] with experts numbered as on this rank.

    Its experts are [first, first + count). Choices of other ranks' experts get the score 0 and the index `count`.
    """
    logits, scores, indices, *rest = original(*args, **kwargs)
    local = indices - first
    is_foreign = (local < 0) | (local >= count)
    return logits, scores.masked_fill(is_foreign, 0), local.masked_fill(is_foreign, count), *rest


# ---- plain forwards of HF's styles; None: these options of the style are not known


def _column(layer: Layer) -> Forward | None:
    style = layer.style
    if style.input_layouts != Replicate() or not style.use_local_output:
        return None
    gathered: Forward = partial(_gathered, layer.original, layer.share.size, layer.share.group)
    forwards: dict[Any, Forward] = {Shard(-1): layer.original, Replicate(): gathered}
    return forwards.get(style.output_layouts)


def _row(layer: Layer) -> Forward | None:
    style, module = layer.style, layer.module
    if style.output_layouts != Replicate() or not style.use_local_output:
        return None
    is_whole = style.input_layouts == Replicate()
    if isinstance(module, nn.Embedding) and is_whole:
        return partial(_vocabulary, module, layer.original, layer.share.first(module.num_embeddings), layer.share.group)
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        return None  # it is unknown where a bias is added
    if not is_whole and style.input_layouts != Shard(-1):
        return None
    if is_whole:
        return partial(_whole_row_linear, module, layer.share.first(module.weight.shape[1]), layer.share.group)
    return partial(row_linear, module, layer.share.group)


def _sum(layer: Layer) -> Forward | None:
    return partial(_summed, layer.original, layer.share.group)


def _experts(layer: Layer) -> Forward | None:
    return _sum(layer) if any(map(is_sharded, layer.module.parameters())) else layer.original


def _router(layer: Layer) -> Forward | None:
    config = getattr(layer.module, "config", None)
    total = getattr(layer.module, "num_experts", None) or getattr(config, "num_experts", None)
    if not total or total % layer.share.size:
        return None
    return partial(_local_experts, layer.original, layer.share.first(total), total // layer.share.size)


_PLAIN: dict[str, Callable[[Layer], Forward | None]] = {  # by the name of HF's class
    "ColwiseParallel": _column,
    "PackedColwiseParallel": lambda layer: layer.original if layer.style.use_local_output else None,
    "RowwiseParallel": _row,
    "AllReduceParallel": _sum,
    "MlaKvAProjParallel": lambda layer: layer.original,
    "MoeExpertsParallel": _experts,
    "MoeIdentityParallel": lambda layer: partial(_divided, layer.original, layer.share.size),
    "EpRouterParallel": _router,
}
