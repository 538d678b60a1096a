"""HF's tensor parallelism, replaced by plain tensors and our collectives while an engine is attached.

Transformers makes every sharded parameter a DTensor and replaces a module's forward by a closure over its style.
Neither can be traced, captured or merged. `plain` replaces each DTensor by its local tensor, and each closure by a
forward that does the same with our collectives; `Sharded.restore` restores both. So no other code handles DTensors. It
knows no engine: the caller provides the communicator that the forwards need.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from specdec.core.errors import AttachError
from specdec.reach.parallel.deferred_sums import defer_sums
from specdec.reach.parallel.mixer_ranks import SharedMixers, share_mixers, show
from specdec.reach.parallel.styles import HF_STYLES, Forward, Layer, Share, is_sharded, plain_forward
from specdec.reach.parallel.trials import Changes

CELLS = frozenset({"self", "original_forward", "mesh", "module"})  # variables of these closures, by name
OTHER_WAYS = frozenset({"pp", "fsdp"})  # names of HF's meshes for other kinds of parallelism
_ONLY = "only from_pretrained(..., distributed_config=DistributedConfig(tp_size=n)) is supported"


class _Closure(NamedTuple):
    """Contents of the closure by which HF replaces a module's forward."""

    style: Any
    original: Forward
    mesh: DeviceMesh
    module: nn.Module

    @classmethod
    def of(cls, module: nn.Module) -> "_Closure | None":
        """Return the closure of `module`, or None if its forward is not one of HF's."""
        forward = module.__dict__.get("forward")
        names = getattr(getattr(forward, "__code__", None), "co_freevars", ())
        if forward is None or not CELLS.issubset(names):
            return None
        cells = {name: cell.cell_contents for name, cell in zip(names, forward.__closure__, strict=True)}
        return cls(cells["self"], cells["original_forward"], cells["mesh"], cells["module"])


def find_group(model: nn.Module) -> dist.ProcessGroup | None:
    """Return the process group that shares `model` by HF's tensor parallelism, or None if it is whole.

    Raises AttachError for models that are shared in another way: in stages, by FSDP, over meshes of two dimensions, or
    over several meshes.
    """
    meshes = set(_meshes(model))
    own = getattr(model, "_device_mesh", None)  # HF's own mark, which stages have, too
    reasons = [
        f"it is distributed over the device mesh {mesh}; {_ONLY}"
        for mesh in (meshes | {own} if isinstance(own, DeviceMesh) else meshes)
        if mesh.ndim > 1 or OTHER_WAYS.intersection(mesh.mesh_dim_names or ())
    ]
    if len(meshes) > 1:
        reasons.append(f"its parameters are distributed over {len(meshes)} device meshes; {_ONLY}")
    if reasons:
        raise AttachError(type(model).__name__, reasons)
    return next(iter(meshes)).get_group() if meshes else None


def _meshes(model: nn.Module) -> Iterator[DeviceMesh]:
    for module in model.modules():
        yield from (dtensor.device_mesh for dtensor in _dtensors(module).values())
        closure = _Closure.of(module)
        if closure is not None:
            yield closure.mesh


def _dtensors(module: nn.Module) -> dict[str, DTensor]:
    parameters: dict[str, Any] = module._parameters
    return {name: p for name, p in parameters.items() if isinstance(p, DTensor)}


class Sharded(Changes):
    """Replacements that `plain` made in a model, until `restore`.

    Meanwhile the local tensor of every DTensor is the parameter that replaces it. So weights are stored once, and
    writes to one change the other, except for those of `mixers`, which hold other parts. wholes: the DTensors, by the
    parameters that replace them.
    """

    def __init__(self, share: Share):
        super().__init__()
        self.share = share
        self.wholes: dict[nn.Parameter, Any] = {}
        self.mixers, self.sums = SharedMixers(self.wholes), Changes()

    @torch.inference_mode(False)
    def restore(self) -> None:
        """Restore HF's parameters, forwards and hooks. A second call does nothing, or continues where one failed."""
        self.sums.restore()
        self.mixers.restore()
        super().restore()

    def _make_plain(self, module: nn.Module, forward: Forward | None) -> None:
        """Replace HF's forward by `forward`, if any, and DTensors by local parameters."""
        # HF's backward hooks, through which Dynamo does not trace.
        hooks = {k: hook for k, hook in module._backward_hooks.items() if getattr(hook, "__module__", "") == HF_STYLES}
        self.on_restore(module._backward_hooks.update, hooks)
        for key in hooks:
            del module._backward_hooks[key]
        if forward is not None:
            self.replace_forward(module, forward)
            if isinstance(module, nn.Embedding):  # F.embedding compares it with the number of local rows
                self.replace(vars(module), "padding_idx", None)
        self._replace_parameters(module)

    def _replace_parameters(self, module: nn.Module) -> None:
        """Replace each DTensor by a local parameter, the same one where modules share it."""
        sharded = _dtensors(module)
        for name, dtensor in sharded.items():
            local: Any = dtensor._local_tensor
            if local not in self.wholes:
                local = nn.Parameter(_own(local), requires_grad=dtensor.requires_grad)
                self.wholes[local] = dtensor
            self.on_restore(_put_back, module, name, dtensor)
            module._parameters[name] = dtensor._local_tensor = local
        if sharded:  # a checkpoint saved meanwhile has whole weights: HF gathers only DTensors
            self.on_restore(module.register_state_dict_post_hook(partial(show, sharded)).remove)


@torch.inference_mode(False)
def plain(model: nn.Module, name: str) -> Sharded:
    """Replace HF's tensor parallelism in `model`, for which `find_group` returns a group, until `restore`.

    name: of the group, as our ops take it; forwards need its Communicator. They are for inference: no gradient passes.
    Raises AttachError that names every module whose style is unknown, and leaves `model` unchanged.
    """
    group = find_group(model)
    assert group is not None, "the model is whole; ask find_group() first"
    share = Share(name, dist.get_rank(group), dist.get_world_size(group))
    sharded, forwards = Sharded(share), _forwards(model, share)
    try:
        for module in model.modules():
            sharded._make_plain(module, forwards.get(module))
        share_mixers(model, share, sharded.mixers)
        defer_sums(model, share, sharded.sums)
    except BaseException:
        sharded.restore()
        raise
    return sharded


def _forwards(model: nn.Module, share: Share) -> dict[nn.Module, Forward]:
    """Return the plain forward of every module with a closure. AttachError lists those that have none."""
    forwards: dict[nn.Module, Forward] = {}
    reasons: list[str] = []
    for name, module in model.named_modules():
        closure = _Closure.of(module)
        if closure is None:
            reasons += _unexplained(name, module)
            continue
        layer = Layer(module, closure.style, closure.original, share)
        forward = plain_forward(layer) if closure.module is module else None
        if forward is None:
            reasons.append(_unknown(name, module, closure))
        else:
            forwards[module] = forward
    if reasons:
        raise AttachError(type(model).__name__, reasons)
    return forwards


def _unexplained(name: str, module: nn.Module) -> list[str]:
    """Return the reasons why sharded parameters of a module whose forward is its own cannot be used."""
    return [
        f"{name}.{key} is sharded ({p.placements[0]}), but its forward is not one of HF's tensor parallelism: a "
        f"wrapper hides that, or another library sharded it; {_ONLY}"
        for key, p in _dtensors(module).items()
        if is_sharded(p)
    ]


def _unknown(name: str, module: nn.Module, closure: _Closure) -> str:
    if closure.module is not module:
        return f"{name} is a copy whose forward runs the module it was copied from: load the model again instead"
    style = closure.style
    options = ", ".join(f"{key}={value}" for key, value in vars(style).items())
    return (
        f"{name} ({type(module).__name__}) is parallel in an unknown style, "
        f"{type(style).__name__}({options}): load it with a tp_plan in which this module has another style, or none"
    )


def _own(local: torch.Tensor) -> torch.Tensor:
    """Return `local`, or a copy if it is a part of its storage: joining weights needs separate storages."""
    is_all = local.untyped_storage().nbytes() == local.nbytes and local.is_contiguous()
    return local.detach() if is_all else local.detach().clone(memory_format=torch.contiguous_format)


def _put_back(module: nn.Module, name: str, dtensor: DTensor) -> None:
    """Restore `dtensor` as a parameter; the one that replaced it becomes its local tensor."""
    current: Any = module._parameters.get(name)
    if current is dtensor:
        return
    if current is None or current.shape != dtensor._local_tensor.shape:  # not a weight of the same layer any more
        current = dtensor._local_tensor
    local = current.detach()
    if (local.dtype, local.device) == (dtensor.dtype, dtensor.device):
        dtensor._local_tensor = local
    else:  # it was converted or moved
        mesh, places = dtensor.device_mesh, dtensor.placements
        new = DTensor.from_local(local, mesh, places, run_check=False, shape=dtensor.shape, stride=dtensor.stride())
        torch.utils.swap_tensors(dtensor, nn.Parameter(new))
    module._parameters[name] = dtensor.requires_grad_(current.requires_grad)  # type: ignore[assignment]
