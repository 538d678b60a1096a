"""Collectives of tensor parallelism as functional ops: `specdec::all_reduce`, `all_gather` and `broadcast`.

Dynamo sees one opaque node each, with no mutation; CUDA graphs capture them, since their buffers are registered once,
when an engine is attached, and never afterwards. An element is summed in one order, so results are bitwise equal on all
ranks. Small sums run our one-shot kernel over symmetric memory, larger ones torch's two-shot kernel; NCCL, or gloo on
CPUs, runs everything else.
"""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from specdec.backends.library import LIBRARY, define_op

PUSHED_BYTES = 2 << 20  # up to here our kernel is the fastest, on two H200s (results/all-reduce_2-ranks)
TWO_SHOT_BYTES = 16 << 20  # up to here the two-shot kernel is the fastest of the others
TWO_SHOT_DTYPES = (torch.bfloat16, torch.float32)
ALIGNMENT = 16  # bytes, per rank, of tensors that torch's kernel sums
_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch < 2.13
RELEASE_S = 20.0  # time limit for kernels to end that wait for a lost rank
LOST = 70  # exit status of a process whose device waits for a lost rank, and cannot be freed
Fields = TypeVar("Fields", bound=tuple[torch.Tensor, ...])
_COMMUNICATORS: dict[str, list["Communicator"]] = {}  # by name of process group; ops use the last one


class Communicator:
    """The collectives of one process group, on one device; used by one stream at a time.

    rank, size: of this process, and of the group. name: the group's, equal on all ranks, which ops take. shared:
    symmetric memory of all ranks, None if there is none. wait: waits until a callable returns True; set by code that
    detects lost ranks. Every rank must create one at the same point.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group = group
        self.rank, self.size, self.name = dist.get_rank(group), dist.get_world_size(group), group.group_name
        self.device = device
        self.shared = _shared_memory(group, device)
        self.wait: Callable[[Callable[[], bool]], None] | None = None
        self._is_given_up = threading.Event()
        _COMMUNICATORS.setdefault(self.name, []).append(self)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' x, a new tensor."""
        self._require_ranks()
        if self.shared is not None:
            if self.shared.pushed.takes(x):
                return self.shared.pushed(x)
            if self.shared.takes(x):
                return self.shared.two_shot(x, self.name)
        out = x.clone(memory_format=torch.contiguous_format)
        self._run(dist.all_reduce, out)
        return out

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return all ranks' x [..., n] side by side: [..., size*n]."""
        parts = x.new_empty(self.size * x.numel())
        self._run(_gather, parts, x.contiguous().view(-1))
        return parts.view(self.size, *x.shape).movedim(0, -2).flatten(-2)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Return rank 0's x, a new tensor."""
        out = x.clone(memory_format=torch.contiguous_format)
        self._run(dist.broadcast, out, group_src=0)
        return out

    def _run(self, collective: Callable[..., Any], *args: torch.Tensor, **options: Any) -> None:
        """Run a collective: queued on a GPU, awaited on a CPU."""
        self._require_ranks()
        if self.device.type == "cuda" or self.wait is None:
            collective(*args, group=self.group, **options)
            return
        work = collective(*args, group=self.group, async_op=True, **options)
        self.wait(work.is_completed)
        work.wait()  # raises what went wrong

    def settle(self) -> None:
        """Wait, by `wait`, until the device has finished all work queued so far."""
        if self.device.type == "cuda" and self.wait is not None:
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(self.device))
            self.wait(done.query)

    def give_up(self, why: str) -> None:
        """End all kernels that wait for a lost rank; their results are invalid.

        Every later collective raises RuntimeError; the process group cannot be used any more. If the device cannot be
        freed, such as while a kernel is being loaded, the process exits with status LOST and `why` on stderr. A second
        call does nothing.
        """
        if self._is_given_up.is_set():
            return
        self._is_given_up.set()
        if self.device.type == "cuda":
            threading.Thread(target=self._release, args=(why,), name="specdec-release", daemon=True).start()

    def close(self) -> None:
        """Unregister it from the ops. Its memory lives as long as the object, since a last round may be running."""
        made = _COMMUNICATORS.get(self.name, [])
        if self in made:
            made.remove(self)
        if not made:
            _COMMUNICATORS.pop(self.name, None)

    def _require_ranks(self) -> None:
        if self._is_given_up.is_set():
            raise dist.DistBackendError(f"the ranks of {self.name!r} were aborted: one of them failed or is gone")

    def _release(self, why: str) -> None:
        """End the waiting kernels, or else the process."""
        done = threading.Event()

        def drain() -> None:
            with suppress(RuntimeError):
                torch.cuda.synchronize(self.device)
            done.set()

        def abort() -> None:
            with suppress(RuntimeError, AttributeError):
                self.group._get_backend(self.device).abort()

        def play_the_others() -> None:
            while self.shared is not None and not done.is_set():
                self.shared.play_the_others()

        for part in (play_the_others, abort, drain):  # each may block on the device
            threading.Thread(target=part, name=f"specdec-{part.__name__}", daemon=True).start()
        if not done.wait(RELEASE_S):
            sys.stderr.write(f"specdec: {why}. The device waits for it and cannot be freed: this process ends\n")
            sys.stderr.flush()
            os._exit(LOST)


class _SharedMemory:
    """Symmetric memory, on each rank's device and mapped on all ranks of a group, and the sums over it."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        from torch.distributed import _symmetric_memory as symmetric

        from specdec.backends.triton.sums import PushedSum

        size, rank = dist.get_world_size(group), dist.get_rank(group)
        largest = PUSHED_BYTES // max(1, size - 1)  # every rank sends it to each of the others
        num_pushed = PushedSum.num_bytes(size, largest)
        buffer = symmetric.empty(TWO_SHOT_BYTES + num_pushed, dtype=torch.uint8, device=device)
        buffer.zero_()
        self._handle = symmetric.rendezvous(buffer, group.group_name)
        self._two_shot = buffer[:TWO_SHOT_BYTES]
        addresses = [address + TWO_SHOT_BYTES for address in self._handle.buffer_ptrs]
        self.pushed = PushedSum(buffer[TWO_SHOT_BYTES:], addresses, rank, largest)
        self._pads = [self._handle.get_signal_pad(r).view(torch.int32) for r in range(size)]
        self._zeros, self._ones = (torch.full_like(self._pads[0], value) for value in (0, 1))
        self._most = torch.full_like(self.pushed.flags, torch.iinfo(torch.int32).max)
        self._rank, self._stream = rank, torch.cuda.Stream(device)

    def takes(self, x: torch.Tensor) -> bool:
        """Return whether torch's two-shot kernel supports `x`."""
        is_aligned = x.nbytes > 0 and x.nbytes % (ALIGNMENT * len(self._pads)) == 0
        return x.nbytes <= TWO_SHOT_BYTES and is_aligned and x.dtype in TWO_SHOT_DTYPES

    def two_shot(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Return the sum of all ranks' x: each rank sums one part, in the order of ranks, and gathers the others'."""
        shared = self._two_shot[: x.nbytes].view(x.dtype).view(x.shape)
        shared.copy_(x)
        torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", name)
        return shared.clone()

    def play_the_others(self) -> None:
        """Free kernels that wait for other ranks, once, by setting their flags; by copies, as no kernel can load now.

        Torch's kernels wait until a flag that they set on another rank is cleared, and clear one that another rank sets
        here; ours wait until the other ranks have sent as many parts as this one.
        """
        with torch.cuda.stream(self._stream):
            self.pushed.flags.copy_(self._most)
            for rank, pad in enumerate(self._pads):
                pad.copy_(self._ones if rank == self._rank else self._zeros)
            self._stream.synchronize()


def _shared_memory(group: dist.ProcessGroup, device: torch.device) -> _SharedMemory | None:
    """Return symmetric memory of `group`; None without Triton or peer access."""
    if device.type != "cuda":
        return None
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # broken on some machines
    found = None
    with suppress(ImportError, RuntimeError):  # no Triton, no peer access, another version of torch
        found = _SharedMemory(group, device)
    has_all = torch.tensor([found is not None], dtype=torch.int32, device=device)
    dist.all_reduce(has_all, dist.ReduceOp.MIN, group=group)  # a barrier, too: all memory is zero before the first sum
    return found if has_all.item() else None


def _of(name: str) -> Communicator:
    if name not in _COMMUNICATORS:
        raise RuntimeError(
            f"a tensor-parallel layer ran outside its engine: no communicator for the process group {name!r}. Call "
            "engine.generate(), or detach() first"
        )
    return _COMMUNICATORS[name][-1]


def _same(x: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _gathered(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], size * x.shape[-1])


def _no_gradient(*_: Any) -> None:
    raise RuntimeError("tensor-parallel layers pass no gradients while an engine is attached; detach() first")


_OPS: dict[str, tuple[Callable[..., Any], Callable[..., torch.Tensor]]] = {  # by schema: implementation and fake
    "all_reduce(Tensor x, str group) -> Tensor": (lambda x, group: _of(group).all_reduce(x), _same),
    "all_gather(Tensor x, int size, str group) -> Tensor": (lambda x, size, group: _of(group).all_gather(x), _gathered),
    "broadcast(Tensor x, str group) -> Tensor": (lambda x, group: _of(group).broadcast(x), _same),
}
FAKES: dict[Any, Callable[..., torch.Tensor]] = {}  # by op: results of the right shape, without other ranks
for _schema, (_run, _fake) in _OPS.items():
    define_op(_schema, _run, _fake)
    _name = _schema.partition("(")[0]
    torch.library.register_autograd(f"specdec::{_name}", _no_gradient, lib=LIBRARY)
    FAKES[getattr(torch.ops.specdec, _name).default] = _fake


def all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    """Return the sum of all ranks' x: a new tensor, bitwise equal on all ranks of `group`."""
    return torch.ops.specdec.all_reduce(x, group)


def all_gather(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Return x [..., n] of all `size` ranks of `group`, by rank: [..., size*n]."""
    return torch.ops.specdec.all_gather(x, size, group)


def broadcast(x: torch.Tensor, group: str) -> torch.Tensor:
    """Return the x of the first rank of `group`."""
    return torch.ops.specdec.broadcast(x, group)


def agreed(group: str, fields: Fields) -> Fields:
    """Return rank 0's `fields`, a NamedTuple of tensors [n, ...], int64 or bool; group: "" for a single process.

    Ranks compute the same from equal sums, but libraries may choose another algorithm for a product of a replicated
    draft on some rank. With a broadcast of each tree and each verification, only K/V can differ, in the last bits.
    """
    if not group:
        return fields
    num = fields[0].shape[0]
    flat = [field.reshape(num, -1).long() for field in fields]
    parts = broadcast(torch.cat(flat, 1), group).split([part.shape[1] for part in flat], 1)
    make: Callable[..., Any] = type(fields)._make  # type: ignore[attr-defined]
    return make(part.reshape(own.shape).to(own.dtype).contiguous() for part, own in zip(parts, fields, strict=True))
