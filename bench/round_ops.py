"""Times the round's operations besides attention, torch and Triton on one GPU: `python bench/round_ops.py --out DIR`.

Both sets of `specdec.functional.ops`, each call replayed from a graph, for a tree of K=8, S=5, D=32 (chains for
`verify_chain`) and the vocabularies of SmolLM2 and Llama-3.1. `--filters` times top-k and top-p alone: torch (a sort of
the vocabulary), ours (a radix selection) and FlashInfer's renormalising kernels, and counts the laws of both that keep
other tokens than torch's (of up to 8 requests). The last line is one JSON object.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from attention_cases import DEVICE, SHAPES, replay_ms
from rich.console import Console
from rich.table import Table

from specdec.backends.triton.backend import TritonBackend
from specdec.config import EngineConfig
from specdec.draft.drafting import candidate_depths
from specdec.functional.ops import TORCH_OPS, RoundOps, pick_ops
from specdec.functional.sampling import SamplingBatch, SamplingParams, process_logits
from specdec.functional.tree import Frontier, chain
from specdec.kv_cache import KVPool
from specdec.measure.results import write_results

CONFIG = EngineConfig(num_steps=5, topk=8, num_draft_tokens=32)
VOCABS = {"135m": (49152, 30, 576), "8b": (128256, 32, 4096)}  # V, layers, hidden size
COUNTED = 8  # requests whose laws are compared token by token
HOT = {"135m": 8192, "8b": 32000}  # the draft's vocabulary


def main() -> None:
    """Time every operation of both sets at batch 1, 8 and 32."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    parser.add_argument("--filters", action="store_true", help="only top-k and top-p; needs FlashInfer")
    args = parser.parse_args()
    if args.filters:
        compare_filters(args.out)
        return
    rows: list[dict[str, Any]] = []
    sets = (TORCH_OPS, pick_ops(TritonBackend.capabilities))
    with torch.inference_mode():
        for shape in VOCABS:
            for batch in (1, 8, 32):
                torch_calls, triton_calls = (calls(ops, shape, batch) for ops in sets)
                for what, call in torch_calls.items():
                    row = {"what": what, "shape": shape, "batch": batch}
                    times = {"torch_ms": round(replay_ms(call), 5), "ms": round(replay_ms(triton_calls[what]), 5)}
                    rows.append({**row, **times})
    table = Table("operation", "shape", "batch", "torch ms", "Triton ms", "ratio")
    for r in rows:
        cells = (r["what"], r["shape"], r["batch"], r["torch_ms"], r["ms"], f"{r['torch_ms'] / r['ms']:.1f}x")
        table.add_row(*map(str, cells))
    Console(width=100).print(table)
    if args.out:
        write_results(args.out, "round-ops", "-".join(VOCABS), {"steps": 5, "topk": 8, "draft_tokens": 32}, rows)
    print(json.dumps({"rows": len(rows)}))


@torch.inference_mode()
def compare_filters(out: Path | None) -> None:
    """Laws of 4 positions a request under top_k=50, top_p=0.9: ours, the same without filters, FlashInfer's."""
    from flashinfer.sampling import top_k_renorm_probs, top_p_renorm_probs

    start = perf_counter()
    top_p_renorm_probs(top_k_renorm_probs(torch.rand(1, 64, device=DEVICE).softmax(-1), 5), 0.9)
    torch.cuda.synchronize()
    print(json.dumps({"flashinfer_first_call_s": round(perf_counter() - start, 1)}), flush=True)  # compiles with nvcc
    rows: list[dict[str, Any]] = []
    ours = pick_ops(TritonBackend.capabilities).law
    for shape, (vocab, _layers, _hidden) in VOCABS.items():
        for batch in (1, 8, 32):
            generator = torch.Generator(DEVICE).manual_seed(0)
            logits = 4 * torch.randn(batch, 4, vocab, device=DEVICE, generator=generator).bfloat16()
            filtered = SamplingBatch.stack([SamplingParams(temperature=0.9, top_k=50, top_p=0.9)] * batch, DEVICE)
            plain = SamplingBatch.stack([SamplingParams(temperature=0.9)] * batch, DEVICE)

            def theirs(logits: torch.Tensor = logits, plain: SamplingBatch = plain) -> torch.Tensor:
                law = process_logits(logits, plain).flatten(0, 1)
                return top_p_renorm_probs(top_k_renorm_probs(law, 50), 0.9)

            counted = min(batch, COUNTED)  # requests
            few, few_plain, few_filtered = (
                logits[:counted],
                plain.select(slice(counted)),
                filtered.select(slice(counted)),
            )
            kept = process_logits(few, few_filtered).flatten(0, 1) > 0
            row = {"what": "top_k, top_p", "shape": shape, "batch": batch, "laws": 4 * counted}
            row["other_tokens"] = _num_other(theirs(few, few_plain), kept)
            row["ours_other_tokens"] = _num_other(ours(few, few_filtered).flatten(0, 1), kept)
            timed = {"torch_ms": partial(process_logits, logits, filtered), "flashinfer_ms": theirs}
            timed |= {"ms": partial(ours, logits, filtered), "law_ms": partial(ours, logits, plain)}
            row |= {name: round(replay_ms(call), 4) for name, call in timed.items()}
            rows.append(row)
            print(json.dumps(row), flush=True)
    if out:
        write_results(out, "filters", "-".join(VOCABS), {"top_k": 50, "top_p": 0.9, "temperature": 0.9}, rows)


def _num_other(laws: torch.Tensor, kept: torch.Tensor) -> int:
    """How many of `laws` [n, V] have other tokens than `kept` [n, V] bool."""
    return int(((laws > 0) != kept).any(-1).sum())


def calls(ops: RoundOps, shape: str, batch: int) -> dict[str, Callable[[], Any]]:
    """Every operation of `ops` on random inputs of one shape; the same inputs for every set."""
    vocab, num_layers, hidden = VOCABS[shape]
    k, num_steps, width = CONFIG.topk, CONFIG.num_steps, CONFIG.verify_width
    generator = torch.Generator(DEVICE).manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.rand(*size, device=DEVICE, generator=generator)

    def ids(high: int, *size: int) -> torch.Tensor:
        return torch.randint(0, high, size, device=DEVICE, generator=generator)

    depths = candidate_depths(CONFIG).to(DEVICE)
    first = torch.arange(CONFIG.num_candidates, device=DEVICE) < k
    parents = torch.where(first, -1, ids(k, batch, CONFIG.num_candidates))
    scores = -random(batch, CONFIG.num_candidates) - depths
    candidates = (ids(vocab, batch), ids(vocab, batch, CONFIG.num_candidates), scores, parents, depths)
    tree = ops.build(*candidates, num_draft_tokens=width, num_steps=num_steps)
    line = chain(ids(vocab, batch), ids(vocab, batch, num_steps))
    probs, laws = random(batch, width, vocab).softmax(-1), random(batch, num_steps, vocab).softmax(-1)
    seeds, lens = ids(1 << 40, batch), torch.full((batch,), 100, device=DEVICE)
    uniforms = random(batch, width).double()
    pool = KVPool([SHAPES[shape].shape] * num_layers, batch * 200, torch.bfloat16, DEVICE)
    table = torch.arange(batch * 200, dtype=torch.int32, device=DEVICE).view(batch, 200)
    path = torch.tensor([[0, 2, 5, 9, -1, -1]], device=DEVICE).repeat(batch, 1)
    commit, features = ops.committer(pool), random(batch, width, 3 * hidden).bfloat16()
    rows, stop_ids = torch.arange(batch, device=DEVICE), torch.full((batch, 16), -1, device=DEVICE)
    remaining, roots = torch.full((batch,), 1 << 40, device=DEVICE), ids(vocab, batch)
    verified, grown = ops.verify_greedy(probs, tree, num_steps), lens.clone()
    history = torch.zeros(batch + 1, 200, dtype=torch.int32, device=DEVICE)
    logits, warm = random(batch, width, vocab).bfloat16(), SamplingParams(temperature=1.0)
    plain = SamplingBatch.stack([warm] * batch, DEVICE)
    filtered = SamplingBatch.stack([SamplingParams(1.0, top_k=50, top_p=0.9)] * batch, DEVICE)
    num_hot = HOT[shape]
    names = torch.randperm(vocab, device=DEVICE, generator=generator)[:num_hot]
    hot, hot_rows = random(batch, num_hot).bfloat16(), random(batch * k, num_hot).bfloat16()
    log_probs, children = -random(batch, k, k), ids(vocab, batch, k * k)
    bits = ids(1 << 40, batch, k, 1)
    frontier = Frontier(ids(vocab, batch, k), -random(batch, k), ids(k, batch, k), bits)
    return {
        "best_token": lambda: ops.best_token(hot, names),
        "top_tokens": lambda: ops.top_tokens(hot_rows, k, names),
        "chain": lambda: ops.chain(line.tokens[:, 0], line.tokens[:, 1:]),
        "grow": lambda: ops.grow(log_probs, children, frontier, bits[0], k),
        "build": lambda: ops.build(*candidates, num_draft_tokens=width, num_steps=num_steps),
        "verify_greedy": lambda: ops.verify_greedy(probs, tree, num_steps),
        "verify_tree": lambda: ops.verify_tree(probs, tree, num_steps, uniforms),
        "verify_chain": lambda: ops.verify_chain(
            probs[:, : num_steps + 1], laws, line, uniforms[:, : num_steps + 1].contiguous()
        ),
        "law": lambda: ops.law(logits, plain),
        "law, filtered": lambda: ops.law(logits, filtered),
        "uniforms": lambda: ops.uniforms(seeds, lens, 0, width),
        "sample": lambda: ops.sample(probs[:, 0], uniforms[:, 0].contiguous()),
        "gather_rows": lambda: ops.gather_rows(features, path),
        "commit": lambda: commit(table, rows, lens, path),
        "trim": lambda: ops.trim(verified, rows, stop_ids, remaining),
        "emit": lambda: ops.emit(verified, rows, grown, roots, remaining, history, True),
    }


if __name__ == "__main__":
    main()
