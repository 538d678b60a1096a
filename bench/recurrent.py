"""Times the kernels of recurrent layers, replayed from CUDA graphs: `python bench/recurrent.py --shape gdn --out DIR`.

A row a case, µs a layer beside the floor, its bytes at the rate that a copy reaches here: `conv_tail`, `scan_tail` and
`fold` (of an accepted path of all nodes) at each batch and number of nodes; `conv_step` and `scan_step`, which take
their place in plain decoding; `conv_extend` and `scan_extend` of a prompt of each length. Inputs are random. Results
are compared with the torch twins' first. Layers take turns until their states exceed what caches hold. On a CPU it
only runs, on tiny sizes. The last line is one JSON object.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from experts import copy_rate, in_graph

from specdec.backends.metadata import TORCH_METADATA
from specdec.backends.recurrent import pick_recurrent
from specdec.backends.recurrent_ref import TORCH_RECURRENT
from specdec.backends.state_pool import ConvSpec, RecurrentOps, ScanInputs, ScanSpec, StatePool
from specdec.batch import AttentionMetadata, ForwardMode
from specdec.measure.results import write_results

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CACHED_BYTES = 2 << 27  # of states that take turns: more than caches hold
PREFIX = 256  # tokens before a round's nodes
MOST_COMPARED = 512  # tokens of a prompt that are compared: the twins are slow
BATCHES, NODES, TOKENS = (1, 8, 32), (1, 4, 8, 16), (128, 512, 2048, 8192)
BOUND = 2e-2  # share of the norm by which results may differ


class Shape(NamedTuple):
    """A layer's convolution and scan, and the dtype of q and k; all else is fp32, as models in bf16 give it."""

    conv: ConvSpec
    scan: ScanSpec
    key_dtype: torch.dtype


SHAPES = {
    "gdn": Shape(ConvSpec(8192, 4), ScanSpec(32, 32, 128, 128, "head", is_corrected=True), torch.bfloat16),
    "ssd": Shape(ConvSpec(5376, 4), ScanSpec(80, 1, 128, 64, "head", is_corrected=False), torch.bfloat16),
    "s6": Shape(ConvSpec(8192, 4), ScanSpec(1, 1, 16, 8192, "state", is_corrected=False), torch.float32),
    "tiny": Shape(ConvSpec(24, 4), ScanSpec(2, 2, 8, 4, "head", is_corrected=True), torch.float32),
}


class Inputs(NamedTuple):
    """Of T tokens: x [T, channels] with the convolution's weight, and the arguments of `StatePool.scan`."""

    x: torch.Tensor
    weight: torch.Tensor
    scan: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    decays: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]  # g, beta, rates

    def first(self, num: int) -> "Inputs":
        """Return those of the first `num` tokens."""
        g, beta, rates = self.decays
        q, k, v = (t[:num] for t in self.scan)
        return Inputs(self.x[:num], self.weight, (q, k, v), (g[:num], None if beta is None else beta[:num], rates))


def main() -> None:
    """One row a case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="gdn", help="a CPU takes tiny")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES, help="nodes of a round a request")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS, help="prompt lengths")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    args = parser.parse_args()
    if DEVICE.type == "cpu":
        args.shape, args.batches, args.nodes, args.tokens = "tiny", (1, 2), (1, 3), (20,)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        rate = copy_rate(DEVICE)
        for batch in args.batches:
            rows += [row for nodes in args.nodes for row in round_rows(args.shape, batch, nodes, rate)]
            rows += step_rows(args.shape, batch, rate)
        rows += [row for tokens in args.tokens for row in prompt_rows(args.shape, tokens, rate)]
    for row in rows:
        print("  ".join(f"{key} {value}" for key, value in row.items() if key != "shape"))
    if args.out:
        write_results(args.out, "recurrent", args.shape, vars(args) | {"copy_gb_s": round(rate / 1e3)}, rows)
    print(json.dumps({"rows": rows}))


def round_rows(shape: str, batch: int, nodes: int, rate: float) -> list[dict[str, Any]]:
    """Time a round of `nodes` nodes a request: the operations on tails, and the commit of all nodes."""
    ours, twin = (make_pool(shape, batch, nodes, ops, num) for ops, num in ((our_ops(), None), (TORCH_RECURRENT, 1)))
    metadata = nodes_of(batch, nodes)
    inputs = random_inputs(SHAPES[shape], batch * nodes)
    index = torch.arange(nodes, device=DEVICE).expand(batch, -1).contiguous()
    commits = [pool.committer(None) for pool in (ours, twin)]
    key = {"shape": shape, "batch": batch, "draft_tokens": nodes}
    rows = [
        {"what": f"{kind}_tail", **key, **timed(kind, ours, twin, inputs, metadata, rate)} for kind in ("conv", "scan")
    ]
    for commit in commits:
        commit(metadata.slot_table, metadata.rows, metadata.prefix_lens, index)
    says = compared([(ours.layers[i].state, twin.layers[i].state) for i in (0, 1)])
    call = lambda: commits[0](metadata.slot_table, metadata.rows, metadata.prefix_lens, index)  # noqa: E731
    found = {"us": round(in_graph(call, 5) / num_layers(ours), 2)} if rate else {"us": 0.0}
    floor = sum(2 * used(ours.layers[i].state, batch) + tail_bytes(ours, i, batch) for i in (0, 1))
    return [*rows, {"what": "fold", **key, **found, "floor_us": at_rate(floor, rate), "says": says}]


def step_rows(shape: str, batch: int, rate: float) -> list[dict[str, Any]]:
    """Time a plain step."""
    ours, twin = (make_pool(shape, batch, 1, ops, num) for ops, num in ((our_ops(), None), (TORCH_RECURRENT, 1)))
    inputs, metadata = random_inputs(SHAPES[shape], batch), nodes_of(batch, 1, ForwardMode.DECODE)
    key = {"shape": shape, "batch": batch, "draft_tokens": 1}
    return [
        {"what": f"{kind}_step", **key, **timed(kind, ours, twin, inputs, metadata, rate)} for kind in ("conv", "scan")
    ]


def prompt_rows(shape: str, tokens: int, rate: float) -> list[dict[str, Any]]:
    """Time the prefill of one prompt."""
    ours, twin = (make_pool(shape, 1, 1, ops, num) for ops, num in ((our_ops(), 4), (TORCH_RECURRENT, 1)))
    inputs, key = random_inputs(SHAPES[shape], tokens), {"shape": shape, "batch": 1, "tokens": tokens}
    return [
        {"what": f"{kind}_extend", **key, **timed(kind, ours, twin, inputs, prompt_of(tokens), rate)}
        for kind in ("conv", "scan")
    ]


def timed(
    kind: str, ours: StatePool, twin: StatePool, inputs: Inputs, metadata: AttentionMetadata, rate: float
) -> dict[str, Any]:
    """Return µs a layer of `kind`, conv or scan, the floor, and how far results are from the twin's."""
    ids = range(("conv", "scan").index(kind), len(ours.layers), 2)
    is_prompt, is_step = metadata.mode is ForwardMode.EXTEND, metadata.mode is ForwardMode.DECODE
    num = min(MOST_COMPARED, len(inputs.x)) if is_prompt else len(inputs.x)
    some, shown = (inputs.first(num), prompt_of(num)) if is_prompt else (inputs, metadata)
    pairs = [tuple(run(pool, ids[0], some, shown) for pool in (ours, twin))]
    pairs += [(ours.layers[ids[0]].state.clone(), twin.layers[ids[0]].state)] if is_prompt or is_step else []
    out = run(ours, ids[0], inputs, metadata)
    tensors = (inputs.x, inputs.weight) if kind == "conv" else (*inputs.scan, *inputs.decays)
    num_bytes = sum(t.nbytes for t in (out, *tensors) if t is not None)
    num_bytes += (2 if is_step else 1) * used(ours.layers[ids[0]].state, metadata.num_reqs)
    num_bytes += 0 if is_prompt or is_step else tail_bytes(ours, ids[0], metadata.num_reqs)
    found = {"floor_us": at_rate(num_bytes, rate), "says": compared(pairs)}
    if not rate:
        return {"us": 0.0, **found}
    repeats = 5 if len(inputs.x) <= MOST_COMPARED else 1
    us = in_graph(lambda: [run(ours, i, inputs, metadata) for i in ids], repeats) / len(ids)
    return {"us": round(us, 2), **found}


def run(pool: StatePool, layer_id: int, inputs: Inputs, metadata: AttentionMetadata) -> torch.Tensor:
    """Run a layer."""
    if isinstance(pool.layers[layer_id].spec, ConvSpec):
        return pool.conv(inputs.x, inputs.weight, None, layer_id, metadata)
    return pool.scan(ScanInputs(*inputs.scan, *inputs.decays), layer_id, metadata)


def our_ops() -> RecurrentOps:
    """Return the set under test: the one that goes with the Triton backend; on a CPU the twins."""
    if DEVICE.type == "cpu":
        return TORCH_RECURRENT
    from specdec.backends.triton.backend import TritonBackend

    return pick_recurrent(TritonBackend.capabilities)


def make_pool(shape: str, batch: int, max_tail: int, ops: RecurrentOps, layers: int | None) -> StatePool:
    """Make a pool of so many layers, a convolution and a scan each, by default enough to leave caches; its states are
    random, equal in every pool's first layer."""
    found = SHAPES[shape]
    specs = (found.conv, found.scan)
    if layers is None:
        row = StatePool.bytes_for(specs, 1, 0, torch.bfloat16)
        layers = max(2, -(-CACHED_BYTES // (batch * row))) if DEVICE.type == "cuda" else 2
    pool = StatePool(specs * layers, batch + 1, max_tail, torch.bfloat16, DEVICE, ops)
    random = torch.Generator(DEVICE).manual_seed(0)
    for layer in pool.layers:
        layer.state.normal_(0, 0.1, generator=random)
    return pool


def random_inputs(shape: Shape, num: int) -> Inputs:
    """Return inputs of `num` tokens; k is normalised and decays are weak, so that states neither grow nor vanish."""
    conv, scan = shape.conv, shape.scan
    random = torch.Generator(DEVICE).manual_seed(num)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device=DEVICE, generator=random)

    q, k = normal(2, num, scan.key_heads, scan.k_dim)
    k = k / k.norm(dim=-1, keepdim=True)
    g = 0.05 * torch.rand(num, *scan.decay_shape, device=DEVICE, generator=random)
    rates = -normal(scan.heads, scan.k_dim, scan.v_dim).abs() if scan.decay == "state" else None
    beta = normal(num, scan.heads).sigmoid() if scan.is_corrected else None
    x, weight = normal(num, conv.channels).bfloat16(), normal(conv.channels, conv.kernel).bfloat16()
    v = normal(num, scan.heads, scan.v_dim)
    q, k = ((t * scan.k_dim**-0.5).to(shape.key_dtype) for t in (q, k * scan.k_dim**0.5))
    return Inputs(x, weight, (q, k, v), (g if rates is not None else -g, beta, rates))


def nodes_of(batch: int, nodes: int, mode: ForwardMode = ForwardMode.TARGET_VERIFY) -> AttentionMetadata:
    """Describe chains of `nodes` nodes behind PREFIX tokens, one a row."""
    table = torch.zeros(batch + 1, PREFIX + nodes, dtype=torch.int32, device=DEVICE)
    rows = torch.arange(batch, device=DEVICE)
    lens = torch.full((batch,), PREFIX, dtype=torch.int64, device=DEVICE)
    return TORCH_METADATA.uniform(mode, table, rows, lens, q_len=nodes, max_prefix=PREFIX)


def prompt_of(tokens: int) -> AttentionMetadata:
    """Describe the prefill of a prompt in row 0, whose length only the device knows, as graphs have it."""
    table = torch.zeros(2, tokens, dtype=torch.int32, device=DEVICE)
    zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    return TORCH_METADATA.packed(table, zero, zero, zero + tokens, tokens, 0)


def compared(pairs: Sequence[tuple[torch.Tensor, ...]]) -> str:
    """Return in words how far results are from the twins', in shares of their norm; raise if that is far."""
    shares = [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs]
    assert all(share < BOUND for share in shares), f"results differ from the twins' by {shares} of their norm"
    return f"off by {max(shares):.1e}"


def used(state: torch.Tensor, batch: int) -> int:
    """Bytes of the states of `batch` rows."""
    return state[:batch].nbytes


def tail_bytes(pool: StatePool, layer_id: int, batch: int) -> int:
    """Bytes of a layer's full tails of `batch` rows."""
    layer = pool.layers[layer_id]
    tails = [layer.tail] if hasattr(layer, "tail") else [layer.k, layer.u, layer.cum]
    return sum(t[:batch].nbytes for t in tails)


def num_layers(pool: StatePool) -> int:
    """Layers of a convolution and a scan."""
    return len(pool.layers) // 2


def at_rate(num_bytes: int, rate: float) -> float:
    """µs that `num_bytes` take at `rate`, bytes a µs; 0 where that is not known."""
    return round(num_bytes / rate, 2) if rate else 0.0


if __name__ == "__main__":
    main()
