"""Times sums over ranks, replayed from CUDA graphs: `torchrun --nproc-per-node 2 bench/all_reduce.py --out DIR`.

A row a size: µs a sum by the kernel of `specdec::all_reduce` (here at every size, without its limit), by NCCL, and by
torch's two-shot kernel with the copies it needs; whether ranks get equal bits. Each graph holds 20 sums. On a CPU it
only runs. The last line of rank 0 is one JSON object.
"""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from specdec.backends import comm
from specdec.measure.results import write_results

KIB = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)
REPEATS, ROUNDS = 20, 20


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
    comm.ONE_SHOT_BYTES = (KIB[-1] << 10) if is_cuda else comm.ONE_SHOT_BYTES
    ours = comm.Communicator(dist.group.WORLD, device)
    rows = [row(ours, kib) for kib in (KIB if is_cuda else KIB[:5])]
    if dist.get_rank() == 0:
        if args.out:
            write_results(args.out, "all-reduce", f"{ours.size}-ranks", vars(args) | {"symm": ours.why_no_symm}, rows)
        print(json.dumps({"rows": rows}))
    dist.destroy_process_group()


def row(ours: comm.Communicator, kib: int) -> dict[str, Any]:
    """Time the ways to sum `kib` KiB of bf16."""
    x = torch.randn(kib << 9, device=ours.device).to(torch.bfloat16)
    y = torch.empty_like(x)
    found: dict[str, Any] = {"what": "all_reduce", "kib": kib, "ranks": ours.size}
    found["nccl_us"] = timed(lambda: (y.copy_(x), dist.all_reduce(y, group=ours.group)), x.device)
    found["one_kernel_us"] = timed(lambda: ours.all_reduce(x), x.device)
    if ours.symmetric is not None:
        shared = ours.symmetric[: x.nbytes].view(x.dtype)
        two_shot = torch.ops.symm_mem.two_shot_all_reduce_
        found["two_shot_us"] = timed(
            lambda: (shared.copy_(x), two_shot(shared, "sum", ours.name), y.copy_(shared)), x.device
        )
    mine = ours.all_reduce(x)
    parts = [torch.empty_like(mine) for _ in range(ours.size)]
    dist.all_gather(parts, mine, group=ours.group)
    found["says"] = "equal bits" if all(torch.equal(parts[0], part) for part in parts) else "bits differ"
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
