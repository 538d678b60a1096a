"""Lists the kernels of a round, with times: `python bench/round_kernels.py --shape 35b-a3b --layers 8 --batches 1`.

Random weights, imposed acceptance, rounds replayed from graphs as for users, under PyTorch's profiler, which slows them
down: use this to find causes, not for published figures. One table per batch size, the slowest kernels first; the last
line is one JSON object. On a CPU it counts operations instead of kernels, to try this file.
"""

import argparse
import json
from collections import defaultdict
from typing import Any

import torch
from launches import DEVICE, make_parser  # in this folder
from torch.profiler import ProfilerActivity, profile

from specdec import attach
from specdec.api import Engine
from specdec.tools.measure.drafts import DraftShape
from specdec.tools.measure.results import write_results
from specdec.tools.measure.shapes import make_head, make_nextn, make_target
from specdec.tools.measure.tables import table

IS_CUDA = DEVICE == "cuda"
ACTIVITY = ProfilerActivity.CUDA if IS_CUDA else ProfilerActivity.CPU
KIND = torch.autograd.DeviceType.CUDA if IS_CUDA else torch.autograd.DeviceType.CPU
PROMPT, NEW = 128, 33  # tokens

Spent = dict[str, tuple[float, int]]  # by kernel: µs, calls


def main() -> None:
    """Attach one engine, and profile its rounds at every batch size."""
    args = arguments()
    fewer = {"num_hidden_layers": args.layers} if args.layers else {}
    model = make_target(args.shape, DEVICE, **fewer)
    draft = DraftShape.parse(args.draft)
    head = None if not draft.steps else make_nextn(model) if args.algo == "nextn" else make_head(args.shape, model)
    settings = {**draft.settings(imposed=True), "max_batch": max(args.batches), "max_seq_len": 256}
    engine = attach(model, head, args.algo if draft.steps else None, graph_sampling=("greedy",), **settings)
    rows: list[dict[str, Any]] = []
    for batch in args.batches:
        spent, rounds = rounds_of(engine, batch, model.config.vocab_size)
        found = sorted(((us / rounds, calls / rounds, name) for name, (us, calls) in spent.items()), reverse=True)
        key = {"what": "kernel", "shape": args.shape, "layers": args.layers, "draft": args.draft, "batch": batch}
        rows += [{**key, "kernel": name, "us": round(us, 2), "calls": round(calls, 2)} for us, calls, name in found]
        own = rows[-len(found) :]
        total = {"us": sum(r["us"] for r in own), "calls": sum(r["calls"] for r in own), "kernel": "all"}
        title = f"{args.shape}, {args.draft}, batch {batch}: µs and calls a round"
        table(title, [*own[: args.most], total], ("us", "calls", "kernel"), None).print()
    engine.detach()
    if args.out:
        write_results(args.out, "round-kernels", args.shape, {"algo": args.algo, "new_tokens": NEW}, rows)
    print(json.dumps({"rows": len(rows)}))


def rounds_of(engine: Engine, batch: int, vocab: int) -> tuple[Spent, int]:
    """Return the kernels of a call's rounds, less those of a call for one token, and the number of rounds.

    Rounds that were launched before the host knew that the last text had ended count, too.
    """
    prompts = torch.randint(5, vocab - 5, (batch, PROMPT)).tolist()
    engine.generate(prompts, max_new_tokens=NEW, ignore_eos=True)  # not counted: kernels may still have to be loaded
    total: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    rounds = 0
    for sign, num_new in ((1, NEW), (-1, 1)):
        before = num_launched(engine)
        with profile(activities=[ACTIVITY]) as found:
            engine.generate(prompts, max_new_tokens=num_new, ignore_eos=True)
        rounds += sign * (num_launched(engine) - before)
        for event in found.events() or ():
            if event.device_type == KIND:
                us, calls = total[event.name]
                total[event.name] = us + sign * (event.device_time if IS_CUDA else event.cpu_time), calls + sign
    return total, rounds


def num_launched(engine: Engine) -> int:
    """Return how many rounds the engine has launched so far."""
    counts = engine.report().runners
    return sum(c["replays"] + c["eager"] for name, c in counts.items() if name.startswith(("round", "decode")))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--shape", default="35b-a3b", help="as `specdec bench latency` has it")
    parser.add_argument("--layers", type=int, default=None, help="fewer than the shape's")
    parser.add_argument("--algo", default="eagle3", choices=("eagle3", "nextn"))
    parser.add_argument("--draft", default="3:1:4", help="S:K:D, or plain")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--most", type=int, default=40, help="kernels to print")
    return parser.parse_args()


if __name__ == "__main__":
    main()
