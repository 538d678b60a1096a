"""Collectives of tensor parallelism as functional ops: `specdec::all_reduce`, `all_gather` and `broadcast`.

Dynamo sees one opaque node each, with no mutation; CUDA graphs capture them, since their buffers are registered once,
when an engine is attached, and never afterwards. Every rank sums in the order of ranks, so results are bitwise equal
on all of them. Small sums are one kernel over symmetric memory; NCCL, or gloo on CPUs, does what that does not take.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

ONE_SHOT_BYTES = 512 << 10  # up to here one kernel is the faster one, by what others have published
ONE_SHOT_DTYPES = (torch.bfloat16, torch.float32)
ALIGNMENT = 16  # bytes, of what one kernel sums
_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch < 2.13
RELEASE_S = 30.0  # after which kernels that wait for a rank that is gone are left to wait
_COMMUNICATORS: dict[str, list["Communicator"]] = {}  # by name of process group, as ops find them: the last made


class Communicator:
    """The collectives of one process group, on one device; used by one stream at a time.

    rank, size: of this process, and of the group. name: the group's, equal on all ranks: ops take it. symmetric: bytes
    that all ranks can reach, None if there are none; why_no_symm: why. wait: waits until what it is given returns True;
    set by who can tell that a rank is gone. Every rank makes one at the same point.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group = group
        self.rank, self.size, self.name = dist.get_rank(group), dist.get_world_size(group), group.group_name
        self.device = device
        self.symmetric, self._handle, self.why_no_symm = _symmetric_bytes(group, device)
        self.wait: Callable[[Callable[[], bool]], None] | None = None
        self._is_given_up = threading.Event()
        _COMMUNICATORS.setdefault(self.name, []).append(self)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' x, a new tensor."""
        self._require_ranks()
        num_bytes = x.numel() * x.element_size()
        is_small = num_bytes <= ONE_SHOT_BYTES and num_bytes % ALIGNMENT == 0 and x.dtype in ONE_SHOT_DTYPES
        if self.symmetric is not None and is_small and num_bytes:
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
            shared = self.symmetric[:num_bytes].view(x.dtype).view(x.shape)
            op = torch.ops.symm_mem.one_shot_all_reduce_copy_out
            op(shared, x.contiguous(), "sum", self.name, out)
            return out
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
        """Run a collective; a device queues it, a CPU waits for it."""
        self._require_ranks()
        if self.device.type == "cuda" or self.wait is None:
            collective(*args, group=self.group, **options)
            return
        work = collective(*args, group=self.group, async_op=True, **options)
        self.wait(work.is_completed)
        work.wait()  # raises what went wrong

    def settle(self) -> None:
        """Wait until the device has done what it was given so far, as `wait` does."""
        if self.device.type == "cuda" and self.wait is not None:
            done = torch.cuda.Event()
            done.record(torch.cuda.current_stream(self.device))
            self.wait(done.query)

    def give_up(self) -> None:
        """A rank is gone: let what waits for it on the device come to an end, with void results.

        Every later collective is a RuntimeError; the process group is of no use any more. A second call does nothing.
        """
        if self._is_given_up.is_set():
            return
        self._is_given_up.set()
        if self.device.type == "cuda":
            threading.Thread(target=self._release, name="specdec-release", daemon=True).start()

    def close(self) -> None:
        """Take it from the ops' sight. Its bytes live as long as it does: a last round may be running."""
        made = _COMMUNICATORS.get(self.name, [])
        if self in made:
            made.remove(self)
        if not made:
            _COMMUNICATORS.pop(self.name, None)

    def _require_ranks(self) -> None:
        if self._is_given_up.is_set():
            raise dist.DistBackendError(f"the ranks of {self.name!r} were given up: one of them failed or is gone")

    def _release(self) -> None:
        """End the kernels that wait: NCCL has a way to; in symmetric memory we play the part of the others.

        There a kernel sets a flag at each of the others, once that is taken away, and takes away what they set here:
        flags [blocks, ranks], by who set them.
        """
        done = threading.Event()

        def drain() -> None:
            with suppress(RuntimeError):
                torch.cuda.synchronize(self.device)
            done.set()

        with suppress(RuntimeError, AttributeError):
            self.group._get_backend(self.device).abort()
        threading.Thread(target=drain, name="specdec-drain", daemon=True).start()
        if self._handle is None:
            return
        pads = [self._handle.get_signal_pad(rank).view(torch.int32) for rank in range(self.size)]
        flags = [pad[: len(pad) // self.size * self.size].view(-1, self.size) for pad in pads]
        end, stream = time.monotonic() + RELEASE_S, torch.cuda.Stream(self.device)
        with torch.cuda.stream(stream):
            while not done.is_set() and time.monotonic() < end:
                for rank in range(self.size):
                    if rank != self.rank:
                        flags[self.rank][:, rank].fill_(1)
                        flags[rank][:, self.rank].fill_(0)
                stream.synchronize()


def _symmetric_bytes(group: dist.ProcessGroup, device: torch.device) -> tuple[torch.Tensor | None, Any, str]:
    """Return a buffer that all ranks of `group` can read and torch's handle of it, or why there is none."""
    if device.type != "cuda":
        return None, None, f"the ranks are on {device.type}"
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # not every machine has it in order
    try:
        from torch.distributed import _symmetric_memory as symmetric

        buffer = symmetric.empty(ONE_SHOT_BYTES, dtype=torch.uint8, device=device)
        return buffer, symmetric.rendezvous(buffer, group.group_name), ""
    except (ImportError, RuntimeError) as error:  # no peer access, another version of torch
        return None, None, f"no symmetric memory: {type(error).__name__}: {str(error).strip().splitlines()[0]}"


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
    raise RuntimeError("no gradient passes a tensor-parallel layer while an engine is attached; detach() first")


_OPS: dict[str, tuple[Callable[..., Any], Callable[..., torch.Tensor]]] = {  # schemas: what runs, and its fake
    "all_reduce(Tensor x, str group) -> Tensor": (lambda x, group: _of(group).all_reduce(x), _same),
    "all_gather(Tensor x, int size, str group) -> Tensor": (lambda x, size, group: _of(group).all_gather(x), _gathered),
    "broadcast(Tensor x, str group) -> Tensor": (lambda x, group: _of(group).broadcast(x), _same),
}
_LIBRARY = torch.library.Library("specdec", "FRAGMENT")
for _schema, (_run, _fake) in _OPS.items():
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_schema.partition("(")[0], _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"specdec::{_schema.partition('(')[0]}", _fake, lib=_LIBRARY)
    torch.library.register_autograd(f"specdec::{_schema.partition('(')[0]}", _no_gradient, lib=_LIBRARY)


def all_reduce(x: torch.Tensor, group: str) -> torch.Tensor:
    """Return the sum of all ranks' x: a new tensor, bitwise equal on all ranks of `group`."""
    return torch.ops.specdec.all_reduce(x, group)


def all_gather(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Return x [..., n] of all `size` ranks of `group`, by rank: [..., size*n]."""
    return torch.ops.specdec.all_gather(x, size, group)


def broadcast(x: torch.Tensor, group: str) -> torch.Tensor:
    """Return the x of the first rank of `group`."""
    return torch.ops.specdec.broadcast(x, group)
