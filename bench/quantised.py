"""Times quantised models of random weights: `PYTHONPATH=. python bench/quantised.py --out DIR`.

Rows are plain steps and rounds of S=3 with imposed acceptance, through `generate`: ms of a launch without the first
token, the median of five pairs of calls; "fp8" rows have a draft with `draft_weights="fp8"`; `own` rows run the
modules' own forward. Forms: bf16; FP8 blocks in transformers' own modules, with torch arithmetic in place of their
kernel from the Hub; FP8 by channel in transformers' modules for compressed-tensors, whose own forward is `scaled_mm`;
int4 groups of 128 in modules with gptqmodel's tensors and a forward in torch; NF4 in modules with bitsandbytes'
tensors; MXFP4 experts of GPT-OSS-20B's shape in transformers' modules. First, kernels are compared with their twins on
a layer's shapes, single rows with rows together, and timed. The last line is one JSON object.
"""

import argparse
import gc
import json
import time
from collections.abc import Iterator
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from launches import DEVICE, DRAFTS, launch_ms, make_parser  # in this folder

from specdec import attach
from specdec.backends.experts.quantised import grouped_mxfp4, pack_mxfp4
from specdec.backends.linear import fp8, packed
from specdec.backends.triton.launch.ahead import compiling_ahead
from specdec.backends.triton.linear import fp8 as fp8_kernels
from specdec.backends.triton.linear import packed as packed_kernels
from specdec.tools.measure.results import ResultFile
from specdec.tools.measure.shapes import make_head, make_target
from tests import quantised_models

FLOORS = {"bf16": 3.54, "fp8": 1.89, "channels": 1.89, "int4": 1.10, "nf4": 1.12, "mxfp4": 0.87}  # ms, at 4.24 TB/s
DRAFTS = {**DRAFTS, "3:1:4 fp8": {**DRAFTS["3:1:4"], "draft_weights": "fp8"}}
MAKE = {"fp8": quantised_models.fp8, "channels": quantised_models.channels}
MAKE |= {"int4": quantised_models.gptq, "nf4": quantised_models.nf4}
FP8 = ("fp8", "channels")
GPT_OSS = "gpt-oss-20b"
PRODUCTS = {"qkv": (4096, (4096, 1024, 1024)), "o": (4096, (4096,)), "gate_up": (4096, (14336, 14336))}
PRODUCTS |= {"down": (14336, (4096,))}
CYCLED = 200 << 20  # bytes of copies between which a timed product alternates: more than a cache holds


def main() -> None:
    """Compare, then time engine by engine."""
    args = arguments()
    rows: list[dict[str, Any]] = []
    file = ResultFile(args.out, "quantised", args.shape, {**vars(args), "out": None})
    with quantised_models.without_the_hub():
        for row in measured(args):
            print(row, flush=True)
            rows.append(row)
            file.write(rows)
    print(json.dumps({"rows": rows}))


def measured(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of products, then of engines."""
    if not args.no_products:
        yield from checks()
        yield from products() if DEVICE == "cuda" else ()
    if "mxfp4" in args.forms:
        yield from experts()
    for form in filter(None, args.forms.split(",")):
        yield from timed(args, form)


def timed(args: argparse.Namespace, form: str) -> Iterator[dict[str, Any]]:
    """Yield a row for every draft and batch of a form, and for plain steps with its modules' own forward."""
    shape = GPT_OSS if form == "mxfp4" else args.shape
    model = make_target(shape, DEVICE)
    if form == "mxfp4":
        quantised_models.mxfp4(model)
    elif form in MAKE:
        quantised_models.quantised(model, MAKE[form])
    gc.collect()
    prompts = torch.randint(5, model.config.vocab_size - 5, (32, args.tokens)).tolist()
    own = "specdec.reach.targets.adapters.quantised.has_kernels"
    batches = [int(batch) for batch in args.batches.split(",")]
    has_own = form in ("channels", "int4") and 1 in batches
    ways = [("ours", draft) for draft in args.drafts.split(",")] + [("own", "plain")] * has_own
    for how, draft in ways:
        head = make_head(shape, model) if DRAFTS[draft] else None
        limits = {"max_batch": 32, "max_seq_len": args.tokens + args.new_tokens + 64, "graph_sampling": "greedy"}
        start = time.perf_counter()
        with patch(own, lambda like, how=how: how == "ours" and like.is_cuda):
            engine = attach(model, head, **limits, **DRAFTS[draft])
        attach_s = time.perf_counter() - start
        with engine:
            for batch in (1,) if how == "own" else batches:
                key = {"what": "quantised", "form": form, "how": how, "draft": draft, "batch": batch}
                ms = launch_ms(engine, prompts[:batch], args.new_tokens)
                eager = sum(path["eager"] for path in engine.report().paths.values())
                yield {**key, "ms": ms, "floor_ms": FLOORS[form], "eager": eager, "attach_s": round(attach_s, 1)}
        del engine
        gc.collect()


def weights(form: str, K: int, sizes: tuple[int, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return random weights of a product, and their scales."""
    if form in FP8:
        made = [torch.randn(N, K, device=DEVICE).to(torch.float8_e4m3fn) for N in sizes]
        if form == "channels":
            return made, [torch.rand(N, device=DEVICE) * 0.01 for N in sizes]
        return made, [torch.rand(-(-N // 128), K // 128, device=DEVICE) * 0.01 for N in sizes]
    words = [torch.randint(-(2**31), 2**31, (K // 128, N, 16), device=DEVICE).int() for N in sizes]
    if form == "nf4":
        return words, [torch.rand(K // 64, N, device=DEVICE) * 0.01 for N in sizes]
    scales = [torch.rand(N, K // 128, device=DEVICE).bfloat16() * 0.01 for N in sizes]
    return words, [packed.pack(torch.zeros(N, K, device=DEVICE), s)[1] for N, s in zip(sizes, scales, strict=True)]


def experts() -> Iterator[dict[str, Any]]:
    """Yield the difference of MXFP4 expert matmuls from their twin, with GPT-OSS-20B's sizes, and their times."""
    blocks = torch.randint(0, 256, (32, 5760, 1440), dtype=torch.uint8, device=DEVICE)
    scales = torch.randint(118, 122, (32, 5760, 90), dtype=torch.uint8, device=DEVICE)
    packs = [pack_mxfp4(*of_one) for of_one in zip(blocks, scales, strict=True)]
    words, exponents = (torch.stack(parts) for parts in zip(*packs, strict=True))
    bias = torch.randn(32, 5760, device=DEVICE)
    x, ids = torch.randn(600, 2880, device=DEVICE).bfloat16(), torch.rand(600, 32, device=DEVICE).argsort(1)[:, :4]
    theirs = grouped_mxfp4.twin(x, ids, words, exponents, bias, "swigluoai").float()
    for num_tokens in (1, 4, 8, 32, 128, 600):
        given = (x[:num_tokens], ids[:num_tokens], words, exponents, bias, "swigluoai")
        ours, own = grouped_mxfp4(*given), theirs[: 4 * num_tokens]
        off = round(float((ours.float() - own).norm() / own.norm()), 6)
        same = ours.equal(grouped_mxfp4(x, ids, *given[2:])[: 4 * num_tokens])
        us = in_a_graph([lambda given=given: grouped_mxfp4(*given)] * 8) if DEVICE == "cuda" else None
        yield {"what": "experts", "tokens": num_tokens, "off": off, "same_bits": same, "us": us}


def product(form: str, x: torch.Tensor, made: Any, activation: str) -> Any:
    """Return a call of the kernel that first quantises its rows."""
    if form in FP8:
        quantised, scales = fp8_kernels.quantise(x, form == "channels")
        return lambda: fp8_kernels.fp8_linear(quantised, scales, *made, [], torch.bfloat16, activation)
    return lambda: packed_kernels.packed_linear(x, *made, [], activation)


def checks() -> Iterator[dict[str, Any]]:
    """Yield the difference of kernels from their twins, relative to the norm, and whether single rows have equal
    bits."""
    for form in MAKE:
        for name, (K, sizes) in PRODUCTS.items():
            activation = "silu" if name == "gate_up" else ""
            made = weights(form, K, sizes)
            x = torch.randn(300, K, device=DEVICE).bfloat16()
            if form in FP8:
                rows = fp8.quantise.twin(x, form == "channels")
                same = all(map(torch.equal, fp8.quantise(x, form == "channels"), rows))
                yield {"what": "check", "form": form, "product": f"rows of {name}", "off": 0.0, "same_bits": same}
                theirs = fp8.fp8_linear.twin(*rows, *made, [], x.dtype, activation).float()
            else:
                theirs = packed.packed_linear.twin(x, *made, [], activation).float()
            results = {n: product(form, x[:n], made, activation)() for n in (1, 4, 16, 32, 50, 64, 128, 300)}
            off = max(float((ours.float() - theirs[:n]).norm() / theirs[:n].norm()) for n, ours in results.items())
            same = all(ours.equal(results[300][:n]) for n, ours in results.items())
            yield {"what": "check", "form": form, "product": name, "off": round(off, 6), "same_bits": same}


def products() -> Iterator[dict[str, Any]]:
    """Yield the microseconds of every product, and its TB/s."""
    for form in MAKE:
        for name, (K, sizes) in PRODUCTS.items():
            activation = "silu" if name == "gate_up" else ""
            one = weights(form, K, sizes)
            size = sum(t.nbytes for t in (*one[0], *one[1]))
            copies = [weights(form, K, sizes) for _ in range(max(2, CYCLED // size))]
            tried = {}
            for num_rows in (1, 4, 8, 16, 32, 64, 128, 512):
                x = torch.randn(num_rows, K, device=DEVICE).bfloat16()
                tried[num_rows] = [product(form, x, made, activation) for made in copies]
            with compiling_ahead(copies[0][0][0].device):
                for calls in tried.values():
                    calls[0]()
            for num_rows, calls in tried.items():
                us = in_a_graph(calls)
                row = {"what": "product", "form": form, "product": name, "rows": num_rows}
                yield {**row, "us": us, "tb_s": round(size / us / 1e6, 2)}


def in_a_graph(calls: list[Any]) -> float:
    """Return the microseconds of one of `calls`, captured together."""
    graph, times = torch.cuda.CUDAGraph(), []
    calls[0]()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return round(median(times), 2)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--shape", default="8b", help="as `specdec bench latency` has it")
    parser.add_argument("--drafts", default=",".join(DRAFTS), help="some of these")
    parser.add_argument("--forms", default="bf16,fp8,channels,int4,nf4,mxfp4")
    parser.add_argument("--batches", default="1,8,32", help="requests at once, up to 32")
    parser.add_argument("--tokens", type=int, default=128, help="of prompts")
    parser.add_argument("--new-tokens", type=int, default=129)
    parser.add_argument("--no-products", action="store_true", help="leave out what comes before engines")
    return parser.parse_args()


if __name__ == "__main__":
    main()
