"""Times sums over ranks, replayed from CUDA graphs: `torchrun --nproc-per-node 2 bench/all_reduce.py --out DIR`.

A row a size: µs a sum as `specdec::all_reduce` does it, by NCCL, by our kernel up to 2 MB, by torch's one-shot kernel,
and by its two-shot kernel with the copies it needs; whether ranks get the bits of a sum in fp32. Each graph holds 20
sums. On a CPU it only runs. The last line of rank 0 is one JSON object.
"""

import argparse
import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from specdec.backends import comm
from specdec.backends.triton.sums import PushedSum
from specdec.measure.results import write_results

KIB = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)
REPEATS, ROUNDS = 20, 20
PUSHED_KIB = 2048  # up to where our kernel is timed
CHOSEN = comm.TWO_SHOT_BYTES, comm.PUSHED_BYTES


def main() -> None:
    """One row a size, on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    args = parser.parse_args()
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_cuda else "gloo", device_id=device if is_cuda else None)
    if is_cuda:
        comm.TWO_SHOT_BYTES, comm.PUSHED_BYTES = KIB[-1] << 10, PUSHED_KIB << 10
    ours = comm.Communicator(dist.group.WORLD, device)
    rows = [row(ours, kib) for kib in (KIB if is_cuda else KIB[:5])]
    if dist.get_rank() == 0:
        if args.out:
            write_results(
                args.out, "all-reduce", f"{ours.size}-ranks", vars(args) | {"no_memory": ours.why_not_shared}, rows
            )
        print(json.dumps({"rows": rows}))
    dist.barrier()
    dist.destroy_process_group()


def row(ours: comm.Communicator, kib: int) -> dict[str, Any]:
    """Time the ways to sum `kib` KiB of bf16."""
    x = torch.randn(kib << 9, device=ours.device).to(torch.bfloat16)
    y = torch.empty_like(x)
    found: dict[str, Any] = {"what": "all_reduce", "kib": kib, "ranks": ours.size}
    found["nccl_us"] = timed(lambda: (y.copy_(x), dist.all_reduce(y, group=ours.group)), x.device)
    memory, takes_nothing = ours.shared, mock.patch.object(PushedSum, "takes", lambda *_: False)
    with mock.patch.object(comm, "TWO_SHOT_BYTES", CHOSEN[0]), takes_nothing if x.nbytes > CHOSEN[1] else nullcontext():
        found["ours_us"] = timed(lambda: ours.all_reduce(x), x.device)
    made = [ours.all_reduce(x) for _ in range(5)]
    if memory is not None and memory.pushed.takes(x):
        found["pushed_us"] = timed(lambda: memory.pushed(x), x.device)
    if memory is not None:
        found["two_shot_us"] = timed(lambda: memory.two_shot(x, ours.name), x.device)
        place, one_shot = memory._two_shot[: x.nbytes].view(x.dtype), torch.ops.symm_mem.one_shot_all_reduce_copy_out
        found["one_shot_us"] = timed(lambda: one_shot(place, x, "sum", ours.name, y), x.device)
    parts = [torch.empty_like(x) for _ in range(ours.size)]
    dist.all_gather(parts, x, group=ours.group)
    twin = sum(part.float() for part in parts).to(x.dtype)
    found["says"] = "equal bits" if all(torch.equal(twin, one) for one in made) else "bits differ"
    return found


def timed(fn: Callable[[], Any], device: torch.device) -> float:
    """Return the median µs of a call, of which a graph holds REPEATS; 0 on a CPU, where it is only called."""
    if device.type != "cuda":
        fn()
        return 0.0
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            fn()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(REPEATS):
            fn()
    times = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / REPEATS)
    return round(sorted(times)[ROUNDS // 2], 2)


if __name__ == "__main__":
    main()
