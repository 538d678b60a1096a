"""Times one layer's experts, replayed from CUDA graphs: `python bench/experts.py --shape 30b-a3b --out DIR`.

A row a number of tokens: µs a layer (both products, gate and weighted sum) as the engine runs them, by transformers'
`grouped_mm` and `batched_mm`, and the floor: the bytes of the experts in use at the rate that a copy reaches here.
Weights and choices are random. Results are compared first. --layers sets of weights take turns, so that none is found
in a cache. On a CPU it only runs, on tiny sizes. The last line is one JSON object.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Qwen3MoeConfig
from transformers.integrations.moe import batched_mm_experts_forward, grouped_mm_experts_forward
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from specdec.measure.results import write_results
from specdec.targets.experts import experts_forward

SHAPES = {  # experts, experts a token, hidden size, intermediate size of an expert
    "30b-a3b": (128, 8, 2048, 768),
    "35b-a3b": (256, 8, 2048, 512),
    "tiny": (8, 2, 64, 48),
}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)
MOST_GATHERED = 32  # tokens: batched_mm copies an expert a row, 19 MB each of the bf16 ones of 30b-a3b
ROUNDS = 20
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
Call = Callable[[nn.Module], torch.Tensor]


def main() -> None:
    """One row a number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="30b-a3b", help="a CPU takes tiny")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--tokens", type=int, nargs="+", default=None, help="numbers of tokens")
    parser.add_argument("--layers", type=int, default=4, help="sets of weights that take turns")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        args.shape, args.tokens = "tiny", args.tokens or TOKENS[:4]
    layers = [layer(args.shape, DTYPES[args.dtype], device, seed) for seed in range(args.layers)]
    with torch.inference_mode():
        bytes_a_us = copy_rate(device)
        rows = [row(args.shape, layers, num_tokens, bytes_a_us) for num_tokens in args.tokens or TOKENS]
    for found in rows:
        print("  ".join(f"{key} {value}" for key, value in found.items() if key not in ("what", "shape", "dtype")))
    if args.out:
        write_results(args.out, "experts", args.shape, vars(args) | {"copy_gb_s": round(bytes_a_us / 1e3)}, rows)
    print(json.dumps({"rows": rows}))


def layer(shape: str, dtype: torch.dtype, device: torch.device, seed: int) -> nn.Module:
    """Return random experts of `shape`."""
    num_experts, k, hidden, inner = SHAPES[shape]
    config = Qwen3MoeConfig(
        hidden_size=hidden, moe_intermediate_size=inner, num_experts=num_experts, num_experts_per_tok=k
    )
    with torch.device(device):
        made = Qwen3MoeExperts(config).to(dtype)
    random = torch.Generator(device).manual_seed(seed)
    for parameter in made.parameters():
        parameter.data.normal_(0, parameter.shape[-1] ** -0.5, generator=random)
    return made.eval()


def row(shape: str, layers: Sequence[nn.Module], num_tokens: int, bytes_a_us: float) -> dict[str, Any]:
    """Time the ways to run `num_tokens` tokens through the experts."""
    num_experts, k, hidden, inner = SHAPES[shape]
    weight = next(layers[0].parameters())
    random = torch.Generator(weight.device).manual_seed(num_tokens)
    x = torch.randn(num_tokens, hidden, device=weight.device, generator=random).to(weight.dtype)
    ids = torch.rand(num_tokens, num_experts, device=weight.device, generator=random).topk(k).indices
    scores = torch.rand(num_tokens, k, device=weight.device, generator=random).softmax(-1).to(weight.dtype)
    in_use = ids.unique().numel()
    num_bytes = in_use * 3 * hidden * inner * weight.element_size() + 2 * x.nbytes
    found: dict[str, Any] = {"what": "experts", "shape": shape, "dtype": str(weight.dtype).removeprefix("torch.")}
    found |= {"tokens": num_tokens, "experts_in_use": in_use}
    found["floor_us"] = round(num_bytes / bytes_a_us, 2) if bytes_a_us else 0.0
    ways = {"ours_us": experts_forward}
    waits = weight.is_cuda and weight.dtype is not torch.bfloat16  # for the host: it cannot be captured
    ways |= {} if waits else {"hf_grouped_us": grouped_mm_experts_forward}
    ways |= {"hf_batched_us": batched_mm_experts_forward} if num_tokens <= MOST_GATHERED else {}
    calls: dict[str, Call] = {name: lambda m, way=way: way(m, x, ids, scores) for name, way in ways.items()}
    found["says"] = compared([call(layers[0]) for call in calls.values()])
    return found | {name: timed(call, layers) for name, call in calls.items()}


def compared(results: Sequence[torch.Tensor]) -> str:
    """Return in words how far the first result is from the others, in shares of their norm; raise if that is far."""
    ours, *others = (result.double() for result in results)
    shares = [float((ours - other).norm() / other.norm()) for other in others]
    bound = 1e-5 if results[0].dtype is torch.float32 else 2e-2
    assert all(share < bound for share in shares), f"ours differs from transformers' by {shares} of its norm"
    return f"off by {max(shares):.1e}" if shares else "not compared"


def timed(call: Call, layers: Sequence[nn.Module]) -> float:
    """Return the median µs of a call, of which a graph holds one a layer, five times; 0 on a CPU."""
    if next(layers[0].parameters()).device.type == "cpu":
        call(layers[0])
        return 0.0
    return in_graph(lambda: [call(module) for module in layers], 5) / len(layers)


def copy_rate(device: torch.device) -> float:
    """Return the bytes that a copy of 1 GiB reads and writes in a µs; 0 on a CPU."""
    if device.type == "cpu":
        return 0.0
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / in_graph(lambda: target.copy_(source), 5)


def in_graph(call: Callable[[], object], repeats: int) -> float:
    """Return the median µs of `call`, replayed from a graph of `repeats` of them."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / repeats)
    return round(sorted(times)[ROUNDS // 2], 2)


if __name__ == "__main__":
    main()
