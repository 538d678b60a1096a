"""Cost of prefills and their graphs, mode by mode: `python bench/prefill.py`.

It steps the core, to find causes; `specdec bench latency` measures the latency that users see.

--shape 135m or 8b: random weights of that shape, or --target a real one; a draft head is attached, so that its features
are computed. ms: wall clock from queueing the prompts to the host holding the first token of all of them, median over
--repeats. Sizes between buckets are measured too. The last line is one JSON object.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from round_cases import target_and_head

import specdec
from specdec.measure.results import write_results
from specdec.measure.roofline import COPY_BYTES_PER_MS, FLOPS_PER_MS, target_weights
from specdec.prefill.graphs import estimate_prefill_bytes

MODES: dict[str, dict[str, Any]] = {
    "eager": {"prefill_graph": "off"},
    "breakable": {"prefill_graph": "breakable"},
    "piecewise eager": {"prefill_graph": "piecewise", "compiler": "eager"},
    "piecewise inductor": {"prefill_graph": "piecewise", "compiler": "inductor"},
}
TOKENS = (16, 64, 128, 256, 512, 1024, 2048)
BETWEEN = (23, 150, 700, 1100, 1900)  # tokens that no bucket has


def main() -> None:
    """Time every mode; the table comes last."""
    args = _arguments()
    model, head = target_and_head(args.shape, args.target, args.draft)
    rows: list[dict[str, Any]] = []
    for mode in args.modes:
        for attempt in ("cold", "warm"):
            engine, row = attach(model, head, args, mode, attempt)
            rows.append(row)
            print(json.dumps(row), flush=True)
            if attempt == "warm" or mode == "eager":
                for tokens in args.tokens:
                    for batch in args.batches:
                        rows.append(ttft_row(engine, args, mode, tokens, batch))
                        print(json.dumps(rows[-1]), flush=True)
                rows.append({"what": "paths", "mode": mode, "runners": engine.report().runners})
            engine.detach()
            if mode == "eager":
                break
    print_table(rows)
    path = write_results(args.out, "prefill", args.shape, {"target": args.target or "random weights"}, rows)
    print(json.dumps({"file": path.name, "rows": rows}))


def attach(model: Any, head: Any, args: argparse.Namespace, mode: str, attempt: str) -> tuple[Any, dict[str, Any]]:
    """An engine of `mode`, and what attaching it cost; cold: the first of its kind on this machine."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before, start = torch.cuda.mem_get_info()[0], time.perf_counter()
    settings = {"max_batch": max(args.batches), "max_seq_len": 2 * max(args.tokens), "graph_sampling": "greedy"}
    engine = specdec.attach(model, head, num_steps=3, compile=False, **settings, **MODES[mode])
    torch.cuda.synchronize()
    report = engine.report()
    own = [g for g in report.graphs if g.unit == "tokens"]
    row = {
        "what": "build",
        "shape": args.shape,
        "mode": mode,
        "attempt": attempt,
        "attach_s": round(time.perf_counter() - start, 2),
        "compile_s": round(report.compile_seconds, 2),
        "capture_s": round(sum(g.seconds for g in own), 2),
        "num_graphs": len(own),
        "graph_mib": round(sum(g.num_bytes for g in own) / 2**20),
        "estimated_mib": round(estimate(engine) / 2**20) if own else 0,
        "attach_mib": round((before - torch.cuda.mem_get_info()[0]) / 2**20),
        "device_bound_from": engine._core.prefill.target_runner.device_bound_from,
    }
    return engine, row


def estimate(engine: Any) -> int:
    """Bytes of prefill graphs as guessed before anything is allocated."""
    target = engine._core.target
    return estimate_prefill_bytes(engine.config, target.spec, len(target.aux_layers), target.dtype.itemsize)


def ttft_row(engine: Any, args: argparse.Namespace, mode: str, tokens: int, batch: int) -> dict[str, Any]:
    """Median ms to the first tokens of `batch` prompts of `tokens` tokens, prefilled together."""
    core = engine._core
    generator = torch.Generator().manual_seed(0)
    before = core.counters.runners["target_prefill"].replays
    times = []
    for _ in range(args.repeats + 2):
        prompts = torch.randint(0, core.target.spec.vocab_size, (batch, tokens), generator=generator).tolist()
        torch.cuda.synchronize()
        start = time.perf_counter()
        requests = engine.submit(prompts, max_new_tokens=8, ignore_eos=True)
        while any(r.first_token_s is None for r in requests):
            engine.step()
        times.append(1e3 * (time.perf_counter() - start))
        engine.abandon(requests)
        torch.cuda.synchronize()
    replays = core.counters.runners["target_prefill"].replays - before
    weights = target_weights(args.shape)
    floor = max(2 * weights / COPY_BYTES_PER_MS, 2 * weights * batch * tokens / FLOPS_PER_MS)
    row = {"what": "ttft", "shape": args.shape, "mode": mode, "tokens": tokens, "batch": batch}
    return {**row, "ms": round(median(times[2:]), 3), "floor_ms": round(floor, 3), "replayed": replays > 0}


def print_table(rows: list[dict[str, Any]]) -> None:
    """A line a size: ms by mode; * where no graph was replayed."""
    modes = list(dict.fromkeys(r["mode"] for r in rows))
    table = Table("tokens", "batch", *modes, "floor")
    timed = {(r["tokens"], r["batch"], r["mode"]): r for r in rows if r["what"] == "ttft"}
    for tokens, batch in dict.fromkeys((t, b) for t, b, _ in timed):
        own = [timed[tokens, batch, mode] for mode in modes]
        cells = [f"{r['ms']:.2f}{'' if r['replayed'] else '*'}" for r in own]
        table.add_row(str(tokens), str(batch), *cells, str(own[0]["floor_ms"]))
    Console(width=120).print(table)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("135m", "8b"), default="135m")
    parser.add_argument("--target", default=None, help="a real target of that shape; default: random weights")
    parser.add_argument("--draft", default=None, help="its head; default: random weights")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=sorted({*TOKENS, *BETWEEN}))
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
