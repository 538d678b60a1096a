"""Times what a long prompt does to requests that decode, and they to it: `python bench/mixed.py --shape 8b --out DIR`.

Some requests decode; then one with a long prompt arrives. A row a `mixed_prefill_tokens`: the times between two rounds
of the decoding ones while it is prefilled (median, longest), its time to the first token, and that without the others.
Steps a live engine through `submit` and `step`, as servers do. The last line is one JSON object.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from specdec import Engine, attach
from specdec.measure.results import write_results
from specdec.measure.shapes import acceptance_rates, make_head, make_target

SHORT = 128  # tokens of the prompts that decode


def main() -> None:
    """One engine a setting; the median of three long prompts each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="8b", help="random weights of 135m, 8b or tiny; acceptance is imposed")
    parser.add_argument("--mixed", type=int, nargs="+", default=[8192, 2048, 1024, 512, 256])
    parser.add_argument("--decoding", type=int, default=8, help="requests that decode")
    parser.add_argument("--tokens", type=int, default=8192, help="of the long prompt")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target, rows = make_target(args.shape, device), []
    head = make_head(args.shape, target)
    for mixed in args.mixed:
        engine = attach(
            target,
            head,
            num_steps=3,
            max_batch=args.decoding + 1,
            max_seq_len=args.tokens + 1024,
            mixed_prefill_tokens=mixed,
            graph_sampling=("greedy",),
            synthetic_acceptance=acceptance_rates(3),
        )
        row = {"shape": args.shape, "mixed_prefill_tokens": mixed, "decoding": args.decoding, "tokens": args.tokens}
        rows.append({**row, **measure(engine, args.decoding, args.tokens)})
        print(json.dumps(rows[-1]), flush=True)
        engine.detach()
    if args.out:
        write_results(args.out, "mixed", args.shape, vars(args), rows)
    print(json.dumps({"rows": rows}))


def measure(engine: Engine, decoding: int, num_tokens: int) -> dict[str, Any]:
    """Medians over three long prompts, after one that is not timed."""
    trials = [trial(engine, decoding, num_tokens, seed) for seed in range(4)][1:]
    alone = [first_token_ms(engine, num_tokens, seed) for seed in range(10, 13)]
    found = {key: round(median(t[key] for t in trials), 3) for key in trials[0]}
    return {**found, "ttft_alone_ms": round(median(alone), 3)}


def trial(engine: Engine, decoding: int, num_tokens: int, seed: int) -> dict[str, float]:
    """ms between rounds of requests that decode: before a long prompt arrives, and until its first token is there."""
    others = engine.submit(
        [prompt(SHORT, 100 * seed + i) for i in range(decoding)], max_new_tokens=900, ignore_eos=True
    )
    before = times_until(engine, others[0], lambda: len(others[0].tokens) > 60)
    (long,) = engine.submit([prompt(num_tokens, seed)], max_new_tokens=1, ignore_eos=True)
    during = times_until(engine, others[0], lambda: long.finish_reason is not None)
    engine.abandon(others)
    while engine.step():
        pass
    return {
        "round_ms": median(before[5:]),
        "mixed_round_ms": median(during),
        "longest_ms": max(during),
        "ttft_ms": 1000 * (long.first_token_s or 0.0),
    }


def times_until(engine: Engine, request: Any, is_over: Any) -> list[float]:
    """Step until `is_over()`; the ms between two arrivals of tokens of `request`, the last one being the end."""
    last, times, num_seen = time.perf_counter(), [], len(request.tokens)
    while not is_over():
        engine.step()
        if len(request.tokens) > num_seen or is_over():
            now = time.perf_counter()
            times.append(1000 * (now - last))
            last, num_seen = now, len(request.tokens)
    return times


def first_token_ms(engine: Engine, num_tokens: int, seed: int) -> float:
    """ms to the first token of a long prompt that is alone."""
    start = time.perf_counter()
    engine.generate([prompt(num_tokens, seed)], max_new_tokens=1, ignore_eos=True)
    return 1000 * (time.perf_counter() - start)


def prompt(num_tokens: int, seed: int) -> list[int]:
    """Random token ids, which every shape has; another prompt for another seed."""
    return torch.randint(5, 90, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


if __name__ == "__main__":
    main()
