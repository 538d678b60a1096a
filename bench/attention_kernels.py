"""Compares our attention kernels with SDPA, FlexAttention, FlashInfer: `python bench/attention_kernels.py --out DIR`.

Every row is one attention layer of one forward, for ours including the K/V write, replayed from a graph that runs
enough layers in sequence to fill 256 MB of K/V, so that nothing is read from a warm cache; all paths of a context and
batch read the same pool. The floor is the K/V that must be read once, over the measured copy rate. The peers get their
best layout: SDPA and FlexAttention a dense K/V without a gather, FlashInfer pages of 16. Plans, made once per forward,
are not in `ms`; `plan_ms` is ours (a difference of two timings, if K/V are small enough for that). Ours is checked
against the torch backend; the tests compare both with float64. With `--backends triton flashinfer` our backend on
FlashInfer's kernels, its tables written in the graph, stands beside Triton's and beside stock FlashInfer.
`--cases windowed` times sliding windows over 8k tokens, without peers. The last line is one JSON object.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from attention_cases import (
    BATCHES,
    CONTEXTS,
    DEVICE,
    DTYPE,
    LAYERS,
    PAGE,
    PATHS,
    SHAPES,
    WINDOWED,
    WINDOWED_PATHS,
    Case,
    measured_copy_rate,
    replay_ms,
)
from attention_peers import PEERS, peers
from rich.console import Console
from rich.table import Table

from specdec.backends import BACKENDS, AttentionCall, LayerSpec, TorchBackend
from specdec.backends.triton.compiles import counted_compiles
from specdec.measure.results import write_results


def main() -> None:
    """Time all cells, print a short table and write the result file."""
    args = _arguments()
    copy_rate = measured_copy_rate()
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        with counted_compiles() as compiled:
            for shape in args.shapes:
                warm_up(LAYERS[shape], args.paths)
        num_variants = sum(name.startswith("specdec.") for name in compiled)
        assert num_variants > 0, "the count of compilations counts nothing"
        with counted_compiles() as compiled:
            for shape in args.shapes:
                case = None
                for path, context, batch in cells(args):
                    like = case if case and (case.context, case.batch) == (context, batch) else None
                    case = Case(LAYERS[shape], path, context, batch, args.page, like=like)
                    row = {"what": path, "shape": shape, "batch": batch, "context": context, "q_len": case.q_len}
                    rows.append({**row, **measure(case, copy_rate)})
                    if "flashinfer" in args.backends:
                        own = measure(case, copy_rate, "flashinfer")
                        rows[-1] |= {f"on_flashinfer_{k}": own[k] for k in ("ms", "plan_ms")}
                    rows[-1].update({} if case.layer.window else peers(case, args.peers))
                    print(json.dumps(rows[-1]), flush=True)
                    case.like = None
            ours = [name for name in compiled if name.startswith("specdec.")]
    config = {
        "copy_rate_tb_s": round(copy_rate / 1e12, 3),
        "compiled_in_warm_up": num_variants,
        "compiled_after_warm_up": ours,
        "dtype": "bfloat16",
    }
    print_rows(rows)
    if args.out:
        write_results(args.out, "attention", "-".join(args.shapes), config, rows)
    print(json.dumps({**config, "rows": len(rows)}))


def cells(args: argparse.Namespace) -> Iterator[tuple[str, int, int]]:
    """(path, context, batch) of every row; all paths of a context and batch read the same pool, so they compare."""
    for context in args.contexts:
        for batch in args.batches:
            for path in args.paths:
                if not (
                    path in ("prefill", "prompt") and batch * context > 64 * 8192
                ):  # more than a scheduler packs together
                    yield path, context, batch


def measure(case: Case, copy_rate: float, name: str = "triton") -> dict[str, Any]:
    """Our row on a backend: checked, timed, with the floor and the bytes of metadata and scratch."""
    backend, bits, out = BACKENDS[name]()(), case.bits(), torch.full_like(case.q, float("nan"))
    backend.prepare_for([case.layer], DTYPE, DEVICE)
    metadata = case.plan(backend, bits)

    def run(layers: int) -> None:
        for i in range(layers):
            backend.run(AttentionCall(case.q, case.k, case.v, out, case.pool, i, case.layer))

    def plan_and_run() -> None:
        backend.plan(metadata)
        run(1)

    plan_and_run()
    ms = replay_ms(lambda: run(case.num_layers)) / case.num_layers
    plan_ms = None
    if case.kv_bytes < 1 << 24 and (name == "triton" or case.path not in ("prefill", "prompt")):  # else on the host
        plan_ms = max(0.0, replay_ms(plan_and_run) - replay_ms(lambda: run(1)))
    if case.batch * case.context * case.q_len <= 1 << 26:
        out.fill_(float("nan"))
        run(case.num_layers)
        check(case, bits, out)
    floor = case.kv_bytes / copy_rate * 1e3
    per_token = [metadata.positions, metadata.out_cache_loc, metadata.qo_indptr, metadata.prefix_lens]
    per_token += [t for t in (bits, metadata.tail_positions) if t is not None]
    return {
        "mode": name,
        "ms": round(ms, 5),
        "floor_ms": round(floor, 5),
        "plan_ms": None if plan_ms is None else round(plan_ms, 5),
        "of_copy_rate": round(floor / ms, 3),
        "tflops": round(case.flops / ms / 1e9, 1),
        "metadata_bytes": sum(t.numel() * t.element_size() for t in per_token),
        "scratch_bytes": backend.scratch_bytes,  # of Triton's plan
    }


def check(case: Case, bits: torch.Tensor | None, out: torch.Tensor) -> None:
    """Stop if our last layer differs from the torch backend's by more than bf16 explains."""
    backend, want = TorchBackend(), torch.empty_like(out)
    backend.plan(case.plan(backend, bits))
    backend.run(AttentionCall(case.q, case.k, case.v, want, case.pool, case.num_layers - 1, case.layer))
    error = float((out.float() - want.float()).norm() / want.float().norm())
    if not error < 1e-2:
        raise SystemExit(f"{case.path} at batch {case.batch}, context {case.context}: relative error {error:.2e}")


def warm_up(layer: LayerSpec, paths: Sequence[str]) -> None:
    """Run every path once at the smallest size: what this compiles is all there is to compile."""
    for path in paths:
        case = Case(layer, path, 512, 2)
        measure(case, 1.0)


def print_rows(rows: list[dict[str, Any]]) -> None:
    """One line a cell: ours, the floor, and the peers as multiples of ours."""
    peers = {
        "ours on FlashInfer": "on_flashinfer_ms",
        "FlashInfer": "flashinfer_ms",
        "SDPA": "sdpa_ms",
        "Flex": "flex_ms",
    }
    table = Table("path", "shape", "batch", "context", "ms", "of copy rate", "TFLOP/s", *peers)
    for r in rows:
        ratios = [f"{r[k] / r['ms']:.2f}x" if k in r else "-" for k in peers.values()]
        cells = (r["what"], r["shape"], r["batch"], r["context"])
        table.add_row(*map(str, cells), f"{r['ms']:.4f}", f"{r['of_copy_rate']:.2f}", f"{r['tflops']:.0f}", *ratios)
    Console(width=130).print(table)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", default="all", choices=("all", "windowed"), help="windowed: Gemma's layers, 8k tokens"
    )
    parser.add_argument("--shapes", nargs="+", choices=LAYERS)
    parser.add_argument("--paths", nargs="+", choices=(*PATHS, "prompt"))
    parser.add_argument("--contexts", nargs="+", type=int)
    parser.add_argument("--batches", nargs="+", type=int)
    parser.add_argument("--peers", nargs="*", default=["sdpa", "flex", "flashinfer"], choices=PEERS)
    parser.add_argument("--backends", nargs="+", default=["triton"], choices=("triton", "flashinfer"))
    parser.add_argument("--page", type=int, default=PAGE, help="slots a page whose order in the pool is shuffled")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    args = parser.parse_args()
    windowed = args.cases == "windowed"
    args.shapes = args.shapes or list(WINDOWED if windowed else SHAPES)
    args.paths = args.paths or (WINDOWED_PATHS if windowed else PATHS)
    args.contexts = args.contexts or ((8192,) if windowed else CONTEXTS)
    args.batches = args.batches or ((1,) if windowed else BATCHES)
    return args


if __name__ == "__main__":
    main()
