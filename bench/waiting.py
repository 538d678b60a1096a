"""Operations by which the host waits for a CUDA device, as errors on a CPU.

`torch.cuda.set_sync_debug_mode("error")` needs a GPU. Here the operations tell: those that read values of tensors, or
have a shape that depends on them, and copies between device and host that are not `non_blocking`. All tensors count as
the device's but those that are made within, with no device named or "cpu", and what is computed from them alone. Custom
ops are not looked into: on a GPU, others than a CPU's run in them.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Arguments = tuple[Any, ...]
Test = Callable[..., bool]

TORCH = str(Path(torch.__file__).parent)
HOST = "_specdec_is_on_host"  # attribute of tensors
READS = ("tolist", "numpy", "cpu", "__array__", "__repr__", "__format__")  # of tensors, beside what dispatches
MASKS = (torch.bool, torch.uint8)  # dtypes of indices that are masks, whose `nonzero` is taken


class HostWait(RuntimeError):
    """An operation within `waits_raise` by which the host would wait for the device: what, and where."""

    def __init__(self, what: str):
        super().__init__(f"{what} at {_place()}")


@contextmanager
def waits_raise() -> Iterator[None]:
    """HostWait within it, in this thread, where an operation would make the host wait for a CUDA device.

    In inference mode, where composite operations arrive whole: some of them read values on a CPU alone.
    """
    with torch.inference_mode(), _Calls(), _Operations():
        yield


def is_on_host(value: Any) -> bool:
    """Return whether `value` is a tensor that would be on the host."""
    return isinstance(value, torch.Tensor) and getattr(value, HOST, False)


def _is_on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not getattr(value, HOST, False)


def _place() -> str:
    """Return file and line of the innermost frame that is neither torch's nor this module's."""
    frame = sys._getframe(2)
    while frame.f_back and (frame.f_code.co_filename.startswith(TORCH) or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    return f"{'/'.join(Path(frame.f_code.co_filename).parts[-2:])}:{frame.f_lineno}"


class _Calls(TorchFunctionMode):
    """What is called from Python: it says where tensors are made, and reads them in ways that dispatch nothing."""

    def __torch_function__(
        self, func: Any, types: Any, args: Arguments = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in READS and _is_on_device(args[0]):
            raise HostWait(f"Tensor.{name}")
        if func in (torch.Tensor.to, torch.Tensor.type_as):
            return self._move(func, args, kwargs)
        if func is torch.Tensor.new_tensor and _is_on_device(args[0]):
            raise HostWait("a copy from the host (Tensor.new_tensor)")
        out = func(*args, **kwargs)
        if func in _device_constructors() and isinstance(out, torch.Tensor):
            return self._made(name, out, args, kwargs)
        return out

    def _made(self, name: str, out: torch.Tensor, args: Arguments, kwargs: Mapping[str, Any]) -> torch.Tensor:
        """Note where a tensor is that was just made."""
        data = args[0] if args and name in ("tensor", "as_tensor", "asarray") else None
        if isinstance(data, list | tuple) and any(map(_is_on_device, tree_leaves(data))):
            raise HostWait(f"torch.{name} of tensors")
        if kwargs.get("device") in (None, "cpu"):
            setattr(out, HOST, not _is_on_device(data))
        elif data is not None and not _is_on_device(data):
            raise HostWait(f"a copy from the host (torch.{name})")
        return out

    def _move(self, func: Any, args: Arguments, kwargs: Mapping[str, Any]) -> torch.Tensor:
        """Move a tensor, if there is anywhere to move it."""
        tensor, targets = args[0], [*args[1:], *kwargs.values()]
        if _is_on_device(tensor) and "cpu" in [t for t in targets if isinstance(t, str)]:
            raise HostWait("Tensor.to('cpu')")
        is_moved = any(isinstance(t, torch.device | str) or _is_on_device(t) for t in targets)
        if not is_on_host(tensor) or not is_moved:
            return func(*args, **kwargs)
        if not kwargs.get("non_blocking"):
            raise HostWait("a copy from the host (Tensor.to)")
        moved = tensor.clone().to(*args[1:], **kwargs)
        setattr(moved, HOST, False)
        return moved


class _Operations(TorchDispatchMode):
    """What is dispatched, composite operations in their parts."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Arguments = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        is_host_work = bool(tensors) and all(map(is_on_host, tensors))
        test = _test_of(func)
        if test is None and _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if not is_host_work:
            _check(func, test, tensors, args, kwargs)
        out = func(*args, **kwargs)
        if is_host_work or func is torch.ops.aten.lift_fresh.default:
            for tensor in tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    setattr(tensor, HOST, True)
        return out


def _test_of(func: Any) -> Test | None:
    """Return what tells whether a call of an operator waits; None: none does."""
    name = func._schema.name.removeprefix("aten::").removesuffix("_")
    return WAIT_IF.get(f"{name}.{func._overloadname}", WAIT_IF.get(name))


def _is_composite(func: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


def _check(
    func: Any, test: Test | None, tensors: Sequence[torch.Tensor], args: Arguments, kwargs: Mapping[str, Any]
) -> None:
    """HostWait if a call would wait; where tensors of both sides meet, it would wait for a copy, or fail."""
    if test is not None:
        if test(*args, **kwargs):
            raise HostWait(str(func))
    elif any(is_on_host(t) and t.dim() for t in tensors):
        raise HostWait(f"{func} of a tensor on the host and one on the device")


def _always(*_: Any, **__: Any) -> bool:
    return True


def _index(tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> bool:
    """A mask becomes its `nonzero`, indices on the host are copied."""
    return any(is_on_host(i) or i.dtype in MASKS for i in indices if i is not None)


def _index_put(
    tensor: torch.Tensor, indices: Sequence[torch.Tensor | None], value: torch.Tensor, *_: Any, **__: Any
) -> bool:
    """A number goes where one mask is, as by `masked_fill`; anywhere else it is copied."""
    given = [i for i in indices if i is not None]
    if is_on_host(value) and value.numel() == 1 and len(given) == 1 and given[0].dtype in MASKS:
        return is_on_host(given[0])
    return is_on_host(value) or _index(tensor, indices)


def _fill(*args: Any) -> bool:
    """A value that is read: `masked_fill` of a mask, `index_fill` of a dimension and indices."""
    return _is_on_device(args[-1])


def _copy(tensor: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> bool:
    return is_on_host(tensor) != is_on_host(source) and not non_blocking


def _repeat_interleave(repeats: torch.Tensor, *, output_size: int | None = None) -> bool:
    return output_size is None


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> bool:
    return num_classes == -1


def _histc(tensor: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> bool:
    return min == max


def _isin(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> bool:
    """Many are sorted, and made unique unless they are (aten/src/ATen/native/TensorCompare.cpp)."""
    if assume_unique or not all(isinstance(t, torch.Tensor) for t in (elements, test_elements)):
        return False
    return test_elements.numel() >= 10 * elements.numel() ** 0.145


# By operators, of which an in-place one has the name of the other: whether a call waits on CUDA. From what the CUDA
# and composite functions of aten/src/ATen/native do; those that decompose into others are not named.
WAIT_IF: Mapping[str, Test] = MappingProxyType(
    {
        **dict.fromkeys(("_local_scalar_dense", "equal", "allclose", "nonzero", "masked_select", "bincount"), _always),
        **dict.fromkeys(("_unique", "_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"), _always),
        **dict.fromkeys(("multinomial", "normal.Tensor_Tensor", "normal.float_Tensor", "embedding_renorm"), _always),
        **dict.fromkeys(("_linalg_check_errors", "_linalg_svd", "linalg_matrix_exp"), _always),
        **dict.fromkeys(("masked_fill.Tensor", "index_fill.int_Tensor"), _fill),
        "index.Tensor": _index,
        "index_put": _index_put,
        "_index_put_impl": _index_put,
        "copy": _copy,
        "repeat_interleave.Tensor": _repeat_interleave,
        "one_hot": _one_hot,
        "histc": _histc,
        "isin": _isin,
    }
)
