"""Static input buffers of captured graphs: declared, allocated once, filled and padded before every replay."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch


@dataclass(frozen=True)
class BufferSpec:
    """Declares one static input of a runner: its shape, dtype and padding.

    shape(size): its shape for `size` requests or tokens; axis: the dimension that counts them, None for an input of
    the same shape in every batch; pad: the value written before every replay to the rows past the live ones, which the
    graph computes too. ValueError for a pad that the dtype cannot hold.
    """

    name: str
    shape: Callable[[int], tuple[int, ...]]
    dtype: torch.dtype
    pad: int | float | bool
    axis: int | None = 0

    def __post_init__(self) -> None:
        try:
            stored = torch.tensor(self.pad, dtype=self.dtype, device="cpu").item()  # on the host: no sync
        except RuntimeError as error:
            raise ValueError(f"pad={self.pad!r} of input {self.name!r}: too large for {self.dtype}") from error
        if self.dtype.is_floating_point and torch.finfo(self.dtype).max < abs(self.pad) < math.inf:
            raise ValueError(f"pad={self.pad!r} of input {self.name!r}: too large for {self.dtype}")
        if stored != self.pad and not self.dtype.is_floating_point:
            held = f"{self.dtype} holds {stored!r} instead"
            raise ValueError(f"pad={self.pad!r} of input {self.name!r}: {held}; pass a value that it can hold")


class StaticBuffers:
    """Input buffers: a static tensor per BufferSpec, sized for the largest bucket; smaller ones use its first rows."""

    def __init__(
        self,
        specs: Sequence[BufferSpec],
        largest: int,
        device: torch.device,
        shared: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ):
        """largest: requests or tokens of the largest bucket. shared: tensors to use as buffers, by name; an input that
        is already in its buffer is not copied. ValueError for names that repeat, and for a shared tensor of another
        dtype or device, or smaller than its buffer."""
        self.specs = {s.name: s for s in specs}
        if len(self.specs) != len(specs):
            raise ValueError(f"inputs {[s.name for s in specs]}: expected distinct names")
        for spec in specs:
            if spec.name in shared:
                _check_shared(spec, shared[spec.name], spec.shape(largest), device)
        self.tensors = {
            s.name: shared[s.name]
            if s.name in shared
            else torch.full(s.shape(largest), s.pad, dtype=s.dtype, device=device)
            for s in specs
        }

    def views(self, size: int) -> dict[str, torch.Tensor]:
        """Return the inputs of a graph of `size` requests or tokens: views of the same memory at every call."""
        return {name: self._rows(name, 0, size) for name in self.specs}

    def load(self, inputs: Mapping[str, torch.Tensor | None], num: int, size: int) -> None:
        """Copy `num` rows of each input to its buffer and pad up to `size`.

        Inputs may be in pinned host memory. ValueError for wrong names, shapes or dtypes.
        """
        for name, value in self.check(inputs, num).items():
            buffer = self.tensors[name]
            if value.data_ptr() != buffer.data_ptr():
                self._rows(name, 0, num).copy_(value, non_blocking=True)
            elif value.stride() != buffer.stride():  # another view of it, such as its transpose
                self._rows(name, 0, num).copy_(value.clone())
            if num < size and self.specs[name].axis is not None:
                self._rows(name, num, size).fill_(self.specs[name].pad)

    def check(self, inputs: Mapping[str, torch.Tensor | None], num: int) -> dict[str, torch.Tensor]:
        """Return the inputs of a batch of `num` that are not None; ValueError for wrong names, shapes or dtypes."""
        given = {name: value for name, value in inputs.items() if value is not None}
        if given.keys() != self.specs.keys():
            raise ValueError(f"a batch gives inputs {sorted(given)}: expected {sorted(self.specs)}")
        for name, spec in self.specs.items():
            value = given[name]
            if not isinstance(value, torch.Tensor):
                raise ValueError(f"input {name!r} is {value!r}: expected a tensor")
            if value.shape != torch.Size(spec.shape(num)) or value.dtype != spec.dtype:
                raise ValueError(
                    f"input {name!r} is {value.dtype} of shape {tuple(value.shape)}: expected {spec.dtype} of shape "
                    f"{spec.shape(num)} for a size of {num}"
                )
        return given

    def _rows(self, name: str, begin: int, end: int) -> torch.Tensor:
        axis = self.specs[name].axis
        return self.tensors[name] if axis is None else self.tensors[name].narrow(axis, begin, end - begin)


def _check_shared(spec: BufferSpec, tensor: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise ValueError for a tensor that cannot be the buffer of `spec`; along its axis it may be longer."""
    fits = tensor.dtype == spec.dtype and tensor.device.type == device.type and tensor.dim() == len(shape)
    if fits and spec.axis is not None:
        tensor = tensor.narrow(spec.axis, 0, min(shape[spec.axis], tensor.shape[spec.axis]))
    if fits and tensor.shape == torch.Size(shape):
        return
    raise ValueError(
        f"the tensor shared as input {spec.name!r} is {tensor.dtype} of shape {tuple(tensor.shape)} on "
        f"{tensor.device}: expected {spec.dtype} of shape {shape} on {device}"
    )
