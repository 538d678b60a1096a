"""Shards recurrent layers by heads: while an engine is attached, each rank runs its own heads of a gated delta rule.

HF's plans gather the inputs and outputs of such a layer: every rank runs all heads and keeps all states. But heads do
not interact before the output projection. So a rank keeps the rows and channels of its key heads and of the value heads
that read them, and their columns of the output projection: one all-reduce is left. Names of weights determine the
layout of their rows; a comparison of outputs checks it. No model is known by name.
"""

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from specdec.backends.comm import all_gather
from specdec.reach.parallel.styles import Share, is_gathered_linear, row_linear
from specdec.reach.parallel.trials import Changes, any_rank, hidden_states, is_same

COUNTS = ("num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim")  # attributes that count heads


class Cut(NamedTuple):
    """The layout of a weight by heads: along `dim`, in parts whose lengths are attributes of its mixer, each ordered by
    key head; without parts, it is one."""

    dim: int = 0
    parts: tuple[str, ...] = ()


_QKV = Cut(0, ("key_dim", "key_dim", "value_dim"))
_INNER = {"conv1d.weight": _QKV, "A_log": Cut(), "dt_bias": Cut(), "out_proj.weight": Cut(1)}
FORMS: tuple[Mapping[str, Cut], ...] = (  # all weights of a mixer, except a norm within heads
    {"in_proj_qkvz.weight": Cut(), "in_proj_ba.weight": Cut(), **_INNER},  # a key head has its q, k, v and z together
    {
        "in_proj_qkv.weight": _QKV,
        "in_proj_z.weight": Cut(),
        "in_proj_b.weight": Cut(),
        "in_proj_a.weight": Cut(),
        **_INNER,
    },
)
WITHIN = frozenset({"norm.weight"})  # [v_dim], the same for all heads
_TOLD = (
    "{}: every rank runs all heads of its recurrent layers, as transformers does. Sharded by heads, they compute "
    "something else ({}): their weights are not laid out as their names say"
)


class SharedMixers(Changes):
    """Changes of `share_mixers`, until `restore`.

    parts: weights by name that must not be written meanwhile: writes to HF's shards do not reach a rank's heads.
    wholes: the DTensor of each parameter that is a part of one: its writes are counted separately, and checkpoints
    store it.
    """

    def __init__(self, wholes: Mapping[nn.Parameter, torch.Tensor]) -> None:
        super().__init__()
        self.wholes = wholes
        self.parts: list[tuple[str, torch.Tensor]] = []
        self.on_restore(self.parts.clear)

    def replace_weight(self, name: str, module: nn.Module, key: str, own: torch.Tensor) -> None:
        """Replace parameter `key` of `module` by `own`, with the full name `name`; checkpoints saved meanwhile have the
        old one."""
        kept = module.get_parameter(key)
        whole = self.wholes.get(kept, kept)
        module._parameters[key] = new = nn.Parameter(own, requires_grad=kept.requires_grad)
        self.on_restore(_give_back, module, key, kept)
        self.on_restore(module.register_state_dict_post_hook(partial(show, {key: whole})).remove)
        self.parts += [(name, t) for t in (kept, whole, new)]


def _part(whole: torch.Tensor, cut: Cut, lengths: Mapping[str, int], share: Share) -> torch.Tensor:
    """Return this rank's part of a whole weight; lengths: the attributes of its mixer, before they are changed."""
    parts = [lengths[part] for part in cut.parts] or [whole.shape[cut.dim]]
    return torch.cat([p.chunk(share.size, cut.dim)[share.rank] for p in whole.split(parts, cut.dim)], cut.dim)


def _all_rows(rows: torch.Tensor, share: Share) -> torch.Tensor:
    """Return all ranks' rows [n, ...], by rank: [size*n, ...]."""
    return all_gather(rows.reshape(-1), share.size, share.group).view(-1, *rows.shape[1:])


@torch.no_grad()
def share_mixers(model: nn.Module, share: Share, shared: SharedMixers) -> None:
    """Make each rank run only its own heads of the known mixers of `model`, until `shared.restore()`, which also undoes
    a call that raised partway. Other mixers keep all their heads.

    model: with plain forwards. If a mixer's outputs change on any rank, all mixers stay as they were, with a warning.
    Every rank calls this at the same point.
    """
    found = [(name, module, cuts) for name, module in model.named_modules() if (cuts := _cuts(module, share.size))]
    others = [name for name, module, cuts in found if not _share(name, module, cuts, share, shared)]
    if found and any_rank(bool(others), share.group, found[0][1].get_parameter("A_log").device):
        shared.restore()
        warnings.warn(_TOLD.format(type(model).__name__, ", ".join(others[:3]) or "on another rank"), stacklevel=7)


def form_of(module: nn.Module, size: int) -> Mapping[str, Cut]:
    """Return how to cut the weights of `module` for `size` ranks; {} unless it is a mixer whose heads they can share.
    Its forwards are not checked."""
    names = {name for name, _ in module.named_parameters()} - WITHIN
    if not all(count in vars(module) for count in COUNTS) or vars(module)["num_k_heads"] % size:
        return {}
    return next((form for form in FORMS if form.keys() == names), {})


def _cuts(module: nn.Module, size: int) -> Mapping[str, Cut]:
    """Return how to cut the weights of `module`; {} if it cannot be shared, or is not gathered."""
    cuts = form_of(module, size)
    return cuts if all(is_gathered_linear(child) for child in _projections(module, cuts).values()) else {}


def _projections(module: nn.Module, cuts: Mapping[str, Cut]) -> dict[str, Any]:
    """Return the projections of a mixer by their weights' names, the output projection last."""
    return {name: module.get_submodule(name.removesuffix(".weight")) for name in cuts if "proj" in name}


def _share(name: str, module: nn.Module, cuts: Mapping[str, Cut], share: Share, shared: SharedMixers) -> bool:
    """Cut the mixer `module`, named `name`; return whether its outputs stay the same."""
    projections = _projections(module, cuts)
    weight = module.get_parameter(next(iter(projections)))
    x = hidden_states(weight.shape[1], weight)
    before = module(x)
    lengths = {count: vars(module)[count] for count in COUNTS}
    for key, cut in cuts.items():
        weight = module.get_parameter(key)
        own = _part(_all_rows(weight, share) if key in projections else weight, cut, lengths, share)
        owner, _, short = key.rpartition(".")
        shared.replace_weight(f"{name}.{key}", module.get_submodule(owner), short, own)
    for count, length in lengths.items():
        shared.replace(vars(module), count, length // share.size)
    *inner, out = projections.values()
    for projection in inner:
        shared.replace_forward(projection, vars(projection)["forward"].args[0])  # not gathered
    shared.replace_forward(out, partial(row_linear, out, share.group))
    return is_same(module(x), before)


def _give_back(module: nn.Module, key: str, kept: nn.Parameter) -> None:
    """Restore `kept`, on the device and in the dtype of the parameter that replaced it."""
    current = module.get_parameter(key)
    kept.data = kept.data.to(current.device, current.dtype)
    module._parameters[key] = kept
    kept.requires_grad_(current.requires_grad)


def show(weights: Mapping[str, torch.Tensor], _: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
    """Put the original weights into a state dict: a hook of modules whose weights are replaced."""
    state.update({prefix + key: weight.detach() for key, weight in weights.items()})
