"""Rollouts and updates on one live model: generate → log-probabilities → update → generate, without re-attaching.

`PYTHONPATH=. python examples/rollouts.py --steps 20` trains SmolLM2 towards answers of a wanted length, in the style of
GRPO (arXiv 2402.03300): samples of a prompt are rewarded relative to their mean. The engine reads the weights that the
optimizer writes, compiled layers included. The last line is one JSON object.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import specdec
from specdec import shipped
from specdec.core.text.prompts import chat_ids
from specdec.reach.targets.pretrained import load_pretrained

QUESTIONS = ("Name three animals.", "Why is the sky blue?")


def rollouts(
    engine: specdec.Engine, prompts: Sequence[list[int]], steps: int, samples: int, new_tokens: int, lr: float
) -> Iterator[dict[str, Any]]:
    """Yield a row per step: reward, tokens per second, and the difference of the engine's log-probabilities from a
    forward's."""
    model = engine.target_module
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    batch = [prompt for prompt in prompts for _ in range(samples)]
    for step in range(steps):
        start = time.perf_counter()
        out = engine.generate(batch, max_new_tokens=new_tokens, do_sample=True, top_k=0)
        seconds = time.perf_counter() - start
        rewards = torch.tensor([-abs(len(r.tokens) - new_tokens / 2) for r in out.requests])
        advantages = rewards - rewards.view(-1, samples).mean(1).repeat_interleave(samples)
        losses, gaps = [], []
        for request, advantage in zip(out.requests, advantages.tolist(), strict=True):
            assert request.logprobs is not None, "attach with logprobs=0 or more"
            old = torch.tensor([p.logprob for p in request.logprobs], device=model.device)
            new = logprobs_of(model, request)
            gaps.append(float((new.detach() - old).abs().max()))
            losses.append(-advantage * (new - old).exp().mean())
        torch.stack(losses).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        row = {"step": step, "reward": float(rewards.mean()), "tau": round(out.stats.tau, 2)}
        yield {**row, "tok_s": round(out.stats.num_tokens / seconds, 1), "largest_gap": max(gaps)}


def logprobs_of(model: Any, request: specdec.RequestOutput) -> Tensor:
    """Return the log-probabilities [tokens] of an answer by a forward of the live model, with gradients."""
    ids = torch.tensor([request.prompt_ids + request.tokens], device=model.device)
    num_prompt = len(request.prompt_ids)
    laws = model(ids).logits[0, num_prompt - 1 : -1].float().log_softmax(-1)
    return laws.gather(1, ids[0, num_prompt:].unsqueeze(1))[:, 0]


def main() -> None:
    """Print a line per step, starting from the shipped weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--samples", type=int, default=4, help="answers to each prompt")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-2)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load_pretrained(dtype=torch.float32, device=device)
    prompts = chat_ids(list(QUESTIONS), tokenizer)
    size = len(prompts) * args.samples
    engine = specdec.attach(model, shipped.path(), tokenizer=tokenizer, max_batch=size, num_steps=2, logprobs=0)
    rows = []
    for row in rollouts(engine, prompts, args.steps, args.samples, args.new_tokens, args.lr):
        print(row)
        rows.append(row)
    engine.detach()
    print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
