"""Times requests with lengths of a chat trace on one pool, by pages on demand and with all slots reserved at admission.

    python bench/pages.py --shape 8b
    python bench/pages.py                        # SmolLM2 with its EAGLE-3 head

More requests wait than run. A request may be as long as a limit, which is what the engine books for, and ends after its
own length: prompts of 161 and texts of 338 tokens on average, lognormal, as ShareGPT's (`specdec bench serve`). Rows:
requests that run at once, tokens/s, requests/s, preemptions and tokens prefilled again for them. A row's window begins
`--warm-up` seconds after the first step.
"""

import argparse
import json
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

import torch

from specdec import attach, shipped
from specdec.api import Engine
from specdec.core.engine import scheduler
from specdec.core.engine.request import Request
from specdec.reach.targets.pretrained import load_pretrained
from specdec.tools.measure.load import Load
from specdec.tools.measure.results import write_results
from specdec.tools.measure.shapes import acceptance_rates, make_head, make_target

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WAYS = ("reserved", "on demand")
STEPS = 3


def main() -> None:
    """One engine; every limit and way with all pages free."""
    args, rows = arguments(), list[dict[str, Any]]()
    warnings.filterwarnings("ignore", message="synthetic_acceptance is on")
    with engine_of(args) as engine:
        for limit in args.limits:
            for way in WAYS:
                rows.append({"limit": limit, "way": way, **measured(engine, limit, way, args)})
                print(rows[-1], flush=True)
    if args.out:
        write_results(args.out, "pages", args.shape or "135m", {**vars(args), "out": None}, rows)
    print(json.dumps({"rows": rows}))


def engine_of(args: argparse.Namespace) -> Engine:
    """Attach a draft to SmolLM2, or to random weights with acceptance imposed."""
    settings: dict[str, Any] = {"num_steps": STEPS, "graph_sampling": "greedy", "max_batch": args.max_batch}
    settings |= {"num_slots": args.slots, "max_seq_len": args.longest}
    if args.shape is None:
        dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
        model, tokenizer = load_pretrained(dtype=dtype, device=DEVICE)
        return attach(model, shipped.find("shipped"), tokenizer=tokenizer, **settings)
    model = make_target(args.shape, DEVICE)
    return attach(model, make_head(args.shape, model), synthetic_acceptance=acceptance_rates(STEPS), **settings)


def measured(engine: Engine, limit: int, way: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the row of a limit and a way."""
    law = Load("", "", 0, 0, args.longest - 1, vocab=engine.target_module.config.vocab_size)
    bodies = [law.body(number) for number in range(args.requests)]
    lengths, at_once = [body["max_tokens"] for body in bodies], list[int]()
    with booked(engine, limit, way):
        requests = engine.submit([body["prompt"] for body in bodies], max_new_tokens=lengths, ignore_eos=True)
        queue = engine._attached().scheduler
        play(engine, args.warm_up)
        before = state(engine, requests)
        play(engine, args.seconds, at_once)
        assert queue.waiting, f"limit {limit}, {way}: all {args.requests} were admitted; give more --requests"
        after = state(engine, requests)
        engine.abandon(requests)
        while engine.step():
            pass
    changes = {name: after[name] - before[name] for name in after}
    seconds = changes.pop("seconds")
    found = {"at_once": round(mean(at_once), 1), "tokens_per_s": round(changes.pop("tokens") / seconds, 1)}
    return {**found, "requests_s": round(changes.pop("finished") / seconds, 2), **changes, "seconds": round(seconds, 2)}


def play(engine: Engine, seconds: float, at_once: list[int] | None = None) -> None:
    """Step for so many seconds, while requests wait; append to `at_once` how many run."""
    queue, end = engine._attached().scheduler, time.perf_counter() + seconds
    while queue.waiting and time.perf_counter() < end:
        engine.step()
        if at_once is not None:
            at_once.append(len(queue.running))


def state(engine: Engine, requests: Sequence[Request]) -> dict[str, float]:
    """Return the time, tokens and finished requests so far, and what preemption has cost."""
    tokens, finished = sum(len(r.tokens) for r in requests), sum(r.finish_reason is not None for r in requests)
    return {"seconds": time.perf_counter(), "tokens": tokens, "finished": finished, **engine.report().preemption}


@contextmanager
def booked(engine: Engine, limit: int, way: str) -> Iterator[None]:
    """Within, the engine takes it that texts may have `limit` tokens, and reserves slots for all if that is the way."""
    longest = engine.config.max_seq_len

    def most_slots(queue: scheduler.Scheduler, request: Request) -> int:
        num = len(request.prompt_ids)
        return queue.slots_needed(num, min(limit, longest - num))

    growth = longest if way == "reserved" else scheduler.GROWTH
    with patch.object(scheduler.Scheduler, "_most_slots", most_slots), patch.object(scheduler, "GROWTH", growth):
        yield


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", help="random weights of a named shape; default: SmolLM2")
    parser.add_argument("--slots", type=int, default=65536, help="KV slots of the pool")
    parser.add_argument("--longest", type=int, default=8192, help="tokens of the longest request, prompt and text")
    parser.add_argument("--limits", type=int, nargs="+", default=[2048, 8192], help="new tokens that are allowed")
    parser.add_argument("--max-batch", type=int, default=256, help="requests that decode together at most")
    parser.add_argument("--requests", type=int, default=4000, help="of a row, more than end in its time")
    parser.add_argument("--warm-up", type=float, default=6.0, help="seconds before a row's window")
    parser.add_argument("--seconds", type=float, default=12.0, help="of a row's window")
    parser.add_argument("--out", type=Path, help="folder of the result file; default: none is written")
    return parser.parse_args()


if __name__ == "__main__":
    main()
