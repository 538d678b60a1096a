"""Time of the trainer's loss over the whole vocabulary, eager and compiled: the goal of a batch once, then one step.

    python bench/train_losses.py --rows 24576 --vocab 49152 --hidden 576

The last line is one JSON object; compiled results are compared with eager ones first.
"""

import argparse
import json
import time
from collections.abc import Callable

import torch

from specdec.train.losses import OutputHead, RowMath, imitation_loss


def main() -> None:
    """Time both ways; the table comes last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=24576)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--chunk-rows", type=int, default=4096)
    parser.add_argument("--train-head", action="store_true", help="the output head gets gradients, as a standalone's")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    hidden, states = (torch.randn(args.rows, args.hidden, device=device).bfloat16() for _ in range(2))
    weight = (torch.randn(args.vocab, args.hidden, device=device) * 0.1).bfloat16().requires_grad_(args.train_head)
    states.requires_grad_()
    report, losses = {**vars(args), "device": device}, []
    for name, math in (("eager", RowMath(args.chunk_rows)), ("compiled", RowMath(args.chunk_rows, compiled=True))):

        def goal(math: RowMath = math) -> object:
            return math.goal(hidden @ weight.detach().T)

        aim = math.goal(hidden @ weight.detach().T)

        def step(math: RowMath = math, aim=aim) -> torch.Tensor:  # type: ignore[no-untyped-def]
            loss, _ = imitation_loss(math, states, OutputHead(weight), aim, aim.weights)
            loss.backward()
            return loss.detach()

        losses.append(float(step()))
        report[name] = {"goal_ms": milliseconds(goal, device), "step_ms": milliseconds(step, device)}
    assert abs(losses[0] - losses[1]) < 1e-3 * abs(losses[0]), losses
    products = (6 if args.train_head else 4) * args.rows * args.vocab * args.hidden
    report["step_tflop"] = products / 1e12
    print(json.dumps({name: str(v) if not isinstance(v, int | float | dict) else v for name, v in report.items()}))


def milliseconds(function: Callable[[], object], device: str, repeats: int = 5) -> float:
    """Mean time of a call after one to warm up."""
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    if device == "cuda":
        torch.cuda.synchronize()
    return round(1e3 * (time.perf_counter() - start) / repeats, 3)


if __name__ == "__main__":
    main()
