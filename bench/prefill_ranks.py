"""Piecewise prefills of a sharded target, with the sums over ranks in the graphs or outside of them:
`torchrun --nproc-per-node 2 bench/prefill_ranks.py --shape 8b --out DIR`.

A row a way and a size: ms of the first token through `generate`, batch 1. "ours": `specdec::all_reduce` in the graph;
"nccl": the same op, but NCCL at every size; "outside": every graph ends before a sum and another begins after it, as
engines do whose sums cannot be captured. The last line of rank 0 is one JSON object.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from specdec import Engine, attach
from specdec.backends import comm
from specdec.graphs.breakable import Breakable
from specdec.measure.results import write_results
from specdec.measure.shapes import fewer_layers, make_target, shard
from specdec.measure.together import device_of_rank, is_first, num_ranks

SIZES = (16, 64, 128, 256, 512, 1024, 2048)


def main() -> None:
    """One engine a way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b", help="random weights of 8b, 70b or tiny")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    args = parser.parse_args()
    device = device_of_rank("cuda" if torch.cuda.is_available() else "cpu")
    is_cpu, ranks = device == "cpu", num_ranks()
    target = shard(make_target(args.shape, device, **fewer_layers(args.shape, ranks)), args.shape, ranks)
    settings: dict[str, Any] = {"prefill_graph": "piecewise", "max_batch": 1, "max_seq_len": 2 * max(args.sizes)}
    settings |= {"prefill_buckets": tuple(args.sizes), "max_prefill_tokens": max(args.sizes), "strict": True}
    settings |= {"compiler": "eager", "cuda_graph": True} if is_cpu else {}
    rows = []
    for way in args.ways:
        with WAYS[way]():
            engine = attach(target, None, compile=True, graph_sampling=("greedy",), **settings)
            for size in args.sizes:
                row = {"what": "ttft", "shape": args.shape, "tp": ranks, "way": way, "tokens": size}
                row |= {"ms": round(first_token_ms(engine, size, args.repeats), 3)}
                rows.append(row | {"graphs": launches(engine, size)})
                if is_first():
                    print(json.dumps(rows[-1]), flush=True)
            engine.detach()
    if is_first():
        if args.out:
            write_results(args.out, "prefill-ranks", args.shape, vars(args), rows)
        print(json.dumps({"rows": rows}))
    dist.barrier()
    dist.destroy_process_group()


def first_token_ms(engine: Engine, size: int, repeats: int) -> float:
    """Median ms of calls for one token, of prompts never seen before."""
    found, random = [], torch.Generator().manual_seed(0)
    for _ in range(repeats + 2):
        prompt = torch.randint(5, 90, (size,), generator=random).tolist()
        start = time.perf_counter()
        engine.generate([prompt], max_new_tokens=1, ignore_eos=True)
        found.append(1000 * (time.perf_counter() - start))
    return median(found[2:])


def launches(engine: Engine, size: int) -> int:
    """Graphs that a prefill of `size` tokens replays; 0 where none is a CUDA graph."""
    graphs = engine._core.prefill.target_runner.runner.captured
    steps = next((getattr(c.graph, "_steps", ()) for key, c in graphs.items() if key.size == size), ())
    return len(steps[::2])


@contextmanager
def ours() -> Iterator[None]:
    """As it is."""
    yield


@contextmanager
def nccl() -> Iterator[None]:
    """NCCL for every sum."""
    with mock.patch.object(comm, "_shared_memory", lambda *_: (None, "not wanted")):
        yield


@contextmanager
def outside() -> Iterator[None]:
    """NCCL for every sum, between two graphs."""
    captures: list[Breakable] = []
    record = Breakable._record

    def noted(self: Breakable, recording: Any, body: Callable[[], Any]) -> Any:
        captures.append(self)
        try:
            return record(self, recording, body)
        finally:
            captures.pop()

    def all_reduce(self: comm.Communicator, x: torch.Tensor) -> torch.Tensor:
        out = x.clone(memory_format=torch.contiguous_format)
        if captures:
            captures[-1].interrupt(lambda: self._run(dist.all_reduce, out))
        else:
            self._run(dist.all_reduce, out)
        return out

    with (
        nccl(),
        mock.patch.object(Breakable, "_record", noted),
        mock.patch.object(comm.Communicator, "all_reduce", all_reduce),
    ):
        yield


WAYS: dict[str, Callable[[], Any]] = {"ours": ours, "nccl": nccl, "outside": outside}

if __name__ == "__main__":
    main()
