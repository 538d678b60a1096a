"""`specdec demo`: the same prompts with HF `generate`, plain decoding and speculation, live, then a small table."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from specdec.api import Engine, attach
from specdec.prompts import chat_ids

PROMPTS = (
    "A baker sells 24 rolls in the morning and half as many in the afternoon. Each roll costs $2. "
    "How much money does she earn in the day?",
    "Tom reads 15 pages a day. His book has 180 pages and he has already read 60. How many more days does he need?",
    "Explain in a few sentences why the sky is blue.",
    "A train travels 60 miles per hour for 3 hours and then 40 miles per hour for 2 hours. How far does it go?",
)


@dataclass
class Run:
    """Tokens and seconds of one way to generate, over all prompts."""

    name: str
    tokens: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    tau: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens per second, prefill included."""
        return sum(map(len, self.tokens)) / self.seconds


def run_demo(
    model: Any,
    tokenizer: Any,
    draft: Any,
    *,
    num_steps: int,
    topk: int = 1,
    num_draft_tokens: int | None = None,
    max_new_tokens: int = 96,
    prompts: tuple[str, ...] = PROMPTS,
) -> dict[str, Any]:
    """Show the three ways; prints the table and one JSON line, and returns what the line holds."""
    console = Console()
    ids = chat_ids(list(prompts), tokenizer)
    hf = _run_hf(model, ids, max_new_tokens)
    console.rule("plain decoding")
    plain = _run_engine("plain", lambda: attach(model, tokenizer=tokenizer), ids, max_new_tokens, console)
    console.rule("speculative decoding")

    def speculative() -> Engine:
        return attach(
            model, draft, tokenizer=tokenizer, num_steps=num_steps, topk=topk, num_draft_tokens=num_draft_tokens
        )

    spec = _run_engine("speculative", speculative, ids, max_new_tokens, console)
    equal = hf.tokens == plain.tokens == spec.tokens
    _print_table(console, [hf, plain, spec], equal)
    result = {
        "hf_tok_s": round(hf.tokens_per_s, 2),
        "plain_tok_s": round(plain.tokens_per_s, 2),
        "spec_tok_s": round(spec.tokens_per_s, 2),
        "tau": round(spec.tau or 0.0, 3),
        "equal": equal,
    }
    print(json.dumps(result))
    return result


def _run_hf(model: Any, prompts: list[list[int]], max_new_tokens: int) -> Run:
    """`model.generate`, one prompt at a time, after a short warm-up."""
    run = Run("HF generate")
    _hf_tokens(model, prompts[0], 4)
    for prompt in prompts:
        start = time.perf_counter()
        run.tokens.append(_hf_tokens(model, prompt, max_new_tokens))
        run.seconds += time.perf_counter() - start
    return run


def _hf_tokens(model: Any, prompt: list[int], max_new_tokens: int) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False)
    return out[0, len(prompt) :].tolist()


def _run_engine(
    name: str, make: Callable[[], Engine], prompts: list[list[int]], max_new_tokens: int, console: Console
) -> Run:
    """Stream every prompt through a fresh engine, showing text as it comes."""
    run, engine = Run(name), make()
    try:
        engine.generate(prompts[0], max_new_tokens=4)
        num_emitted = num_rounds = 0
        for prompt in prompts:
            start = time.perf_counter()
            pieces = engine.stream(prompt, max_new_tokens=max_new_tokens)
            output = _show(pieces, console)
            run.seconds += time.perf_counter() - start
            run.tokens.append(output.tokens)
            num_emitted += output.acceptance.num_emitted
            num_rounds += output.acceptance.num_rounds
        run.tau = num_emitted / max(num_rounds, 1)
    finally:
        engine.detach()
    return run


def _show(pieces: Any, console: Console) -> Any:
    """Print the pieces of a stream; returns the RequestOutput that ends it."""
    while True:
        try:
            console.out(next(pieces), end="", highlight=False)
        except StopIteration as stop:
            console.out("\n")
            return stop.value


def _print_table(console: Console, runs: list[Run], equal: bool) -> None:
    table = Table("", "tokens/s", "against HF", "tau")
    for run in runs:
        tau = "-" if run.tau is None else f"{run.tau:.2f}"
        table.add_row(run.name, f"{run.tokens_per_s:.1f}", f"{run.tokens_per_s / runs[0].tokens_per_s:.2f}x", tau)
    console.print(table)
    console.print(f"outputs equal, token for token: {'yes' if equal else 'NO'}")
