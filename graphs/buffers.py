"""The tensors a captured graph reads: declared, allocated once, filled and padded before every replay."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch


@dataclass(frozen=True)
class BufferSpec:
    """One input of a runner.

    shape(size): its shape for `size` requests or tokens; axis: the one that counts them; pad: what the rows past the
    live ones hold on every replay, whatever lay there before; it must be a value that is safe to compute with.
    variants: those that take this input; empty: all. The body gets None for it in the others.
    """

    name: str
    shape: Callable[[int], tuple[int, ...]]
    dtype: torch.dtype
    pad: int | float | bool
    axis: int = 0
    variants: tuple[str, ...] = ()

    def is_used_by(self, variant: str) -> bool:
        """Whether graphs of `variant` read this input."""
        return not self.variants or variant in self.variants


class StaticBuffers:
    """One tensor a spec, as large as the largest bucket; smaller buckets use the front of it."""

    def __init__(
        self,
        specs: Sequence[BufferSpec],
        largest: int,
        device: torch.device,
        shared: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ):
        """shared: tensors that serve as buffers of that name; an input that lies there already is not copied."""
        self.specs = {s.name: s for s in specs}
        assert len(self.specs) == len(specs), "two inputs of one name"
        self.tensors = {
            s.name: shared[s.name]
            if s.name in shared
            else torch.full(s.shape(largest), s.pad, dtype=s.dtype, device=device)
            for s in specs
        }

    def views(self, size: int, variant: str) -> dict[str, torch.Tensor | None]:
        """What a graph of `size` reads; the same memory at every call."""
        return {
            name: self.tensors[name].narrow(spec.axis, 0, size) if spec.is_used_by(variant) else None
            for name, spec in self.specs.items()
        }

    def load(self, inputs: Mapping[str, torch.Tensor | None], num: int, size: int, variant: str) -> None:
        """Copy `num` rows of the inputs in and pad them up to `size`; ValueError for wrong names or shapes."""
        used = {name for name, spec in self.specs.items() if spec.is_used_by(variant)}
        given = {name for name, value in inputs.items() if value is not None}
        if given != used:
            raise ValueError(f"a batch of variant {variant!r} gives inputs {sorted(given)}: expected {sorted(used)}")
        for name in used:
            spec, buffer, value = self.specs[name], self.tensors[name], inputs[name]
            assert value is not None
            if value.shape != torch.Size(spec.shape(num)) or value.dtype != spec.dtype:
                raise ValueError(
                    f"input {name!r} is {value.dtype} of shape {tuple(value.shape)}: expected {spec.dtype} of shape "
                    f"{spec.shape(num)} for a size of {num}"
                )
            if value.data_ptr() != buffer.data_ptr():
                buffer.narrow(spec.axis, 0, num).copy_(value, non_blocking=True)
            if num < size:
                buffer.narrow(spec.axis, num, size - num).fill_(spec.pad)
