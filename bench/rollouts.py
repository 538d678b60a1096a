"""The loop of examples/rollouts.py, timed: `PYTHONPATH=. python bench/rollouts.py --shape 8b --compile`.

Generate → log-probabilities → an optimizer's step → generate, on one model and one engine that is never attached again.
A row for the loop: tokens/s of generation (median of a step), the largest gap between the engine's log-probabilities
and a forward's, and the weights that moved in memory. Nothing is called between an update and the next generation:
the engine reads the memory that the optimizer writes. 135m is the real SmolLM2 with its head; other shapes have random
weights and an imposed acceptance, under which log-probabilities are those of the emitted tokens all the same. The last
line is one JSON object.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import specdec
from examples.rollouts import QUESTIONS, rollouts
from specdec import shipped
from specdec.measure.results import write_results
from specdec.measure.shapes import acceptance_rates, make_head, make_target
from specdec.targets.pretrained import load_pretrained
from specdec.text.prompts import chat_ids

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    """Run the loop, and write its row."""
    args = _arguments()
    dtype = getattr(torch, args.dtype)
    settings: dict[str, Any] = {"num_steps": args.num_steps, "logprobs": 0, "compile": args.compile}
    if args.shape == "135m":
        model, tokenizer = load_pretrained(dtype=dtype, device=DEVICE)
        prompts = chat_ids(list(QUESTIONS), tokenizer)
        head: Any = shipped.path()
        settings["tokenizer"] = tokenizer
    else:
        model = make_target(args.shape, DEVICE, dtype)
        prompts = torch.randint(3, model.config.vocab_size, (2, 64)).tolist()
        head = make_head(args.shape, model)
        settings["synthetic_acceptance"] = acceptance_rates(args.num_steps)
    engine = specdec.attach(model, head, max_batch=len(prompts) * args.samples, **settings)
    places = {name: p.data_ptr() for name, p in model.named_parameters()}
    steps = list(rollouts(engine, prompts, args.steps, args.samples, args.new_tokens, args.lr))
    moved = [name for name, p in model.named_parameters() if p.data_ptr() != places[name]]
    rates = sorted(row["tok_s"] for row in steps[1:])
    row: dict[str, Any] = {"what": "rollouts", "shape": args.shape, "dtype": args.dtype, "compile": args.compile}
    row |= {"steps": args.steps, "requests": len(prompts) * args.samples, "tok_s": rates[len(rates) // 2]}
    row |= {"moved_weights": len(moved), "tau": steps[-1]["tau"]}
    row["largest_gap"] = max(step["largest_gap"] for step in steps)
    engine.detach()
    config = {"lr": args.lr, "new_tokens": args.new_tokens}
    path = write_results(args.out, "rollouts", args.shape, config, [row, *steps])
    print(json.dumps({"file": path.name, "rows": [row]}))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("135m", "8b", "tiny"), default="135m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--compile", action="store_true", help="compile the target's layers")
    parser.add_argument("--num-steps", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20, help="of the optimizer")
    parser.add_argument("--samples", type=int, default=4, help="answers to each of two prompts")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
