"""`specdec bench acceptance`: acceptance lengths on real prompts, which do not depend on the machine."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from specdec.api import Engine, attach
from specdec.config import EngineConfig
from specdec.functional.sampling import SamplingParams
from specdec.metrics import AcceptanceStats
from specdec.outputs import GenerationOutput, RequestOutput
from specdec.train.predict import predict


class Shape(NamedTuple):
    """Shape of a round: S draft steps, K branches, D nodes verified."""

    num_steps: int
    topk: int
    num_draft_tokens: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """Parse "S:K:D"; "S" and "S:K" take defaults of `EngineConfig` for the rest. ValueError says what is wrong."""
        parts = text.split(":")
        if not 1 <= len(parts) <= 3 or not all(p.strip().isdecimal() for p in parts):
            raise ValueError(f"shape {text!r}: expected S:K:D, such as 3:1:4 (a chain) or 5:8:32 (a tree)")
        names = ("num_steps", "topk", "num_draft_tokens")
        given: dict[str, Any] = {name: int(p) for name, p in zip(names, parts, strict=False)}
        config = EngineConfig(**given)
        if config.num_steps == 0:
            raise ValueError(f"shape {text!r}: it drafts nothing; expected S of at least 1 (plain decoding: no draft)")
        return cls(config.num_steps, config.topk, config.verify_width)

    def __str__(self) -> str:
        return ":".join(map(str, self))


CHAIN = Shape(3, 1, 4)


def acceptance(
    model: Any,
    draft: Any,
    prompts: Mapping[str, Sequence[Sequence[int]]],
    *,
    name: str,
    algo: str | None = "auto",
    shape: Shape = CHAIN,
    temperatures: Sequence[float] = (0.0,),
    tokenizer: Any = None,
    max_new_tokens: int = 256,
    max_batch: int = 8,
    sample_drafts: bool = True,
    predicted: bool = False,
) -> Iterator[dict[str, Any]]:
    """Yield acceptance rows of `draft`, called `name` in them: one per file of `prompts` (token ids) and temperature.

    One engine serves them all, since attaching captures graphs. draft, algo: as `attach` takes them; without both it
    measures plain decoding, and `shape` is ignored. tokenizer: the target's, compared with a standalone draft's.
    predicted: rows of greedy chains also get what the trainer simulates on the same text.
    """
    longest = max(len(p) for file in prompts.values() for p in file) + max_new_tokens
    settings: dict[str, Any] = {"max_batch": max_batch, "max_seq_len": longest, "sample_drafts": sample_drafts}
    settings["graph_sampling"] = tuple(dict.fromkeys("sampled" if t else "greedy" for t in temperatures))
    if draft is not None or algo not in (None, "auto"):
        settings.update(shape._asdict())
    engine = attach(model, draft, algo, tokenizer=tokenizer, **settings)
    try:
        for file, ids in prompts.items():
            for temperature in temperatures:
                yield {"draft": name, **_measure(engine, file, ids, temperature, max_new_tokens, predicted)}
    finally:
        engine.detach()


def _measure(
    engine: Engine,
    file: str,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    max_new_tokens: int,
    predicted: bool,
) -> dict[str, Any]:
    """Measure one acceptance row; request i of a file is sampled with seed i."""
    law = SamplingParams(temperature=temperature, seed=0)
    out = engine.generate([list(p) for p in prompts], max_new_tokens=max_new_tokens, sampling=law)
    config, half_width = engine.config, ci95(out.requests)
    row = {
        "algo": engine.report().draft["algo"],
        "prompts": file,
        "steps": config.num_steps,
        "topk": config.topk,
        "draft_tokens": config.verify_width,
        "temperature": temperature,
        "sample_drafts": config.sample_drafts,
        "max_new_tokens": max_new_tokens,
        "num_prompts": len(prompts),
        "tau": round(out.stats.tau, 4),
        "ci95": round(half_width, 4) if math.isfinite(half_width) else None,
        "rounds": out.stats.num_rounds,
        "accept_at": [round(a, 4) for a in out.stats.acceptance_at],
        "tok_s": round(out.stats.tokens_per_s, 1),
    }
    if predicted and not temperature and config.topk == 1 and engine.draft_module is not None:
        return _beside_prediction(row, engine, out)
    return row


def ci95(requests: Sequence[RequestOutput]) -> float:
    """Return the half width of the 95% interval of tau over prompts: the ratio estimator, linearised."""
    parts: list[AcceptanceStats] = [r.acceptance for r in requests]
    total = AcceptanceStats().merge(parts)
    if len(parts) < 2 or not total.num_rounds:
        return math.inf
    residual = sum((p.num_emitted - total.tau * p.num_rounds) ** 2 for p in parts)
    n = len(parts)
    return 1.96 * math.sqrt(residual * n / (n - 1)) / total.num_rounds


def _beside_prediction(row: dict[str, Any], engine: Engine, out: GenerationOutput) -> dict[str, Any]:
    """Add to `row` the a_j that the trainer simulates on the generated text, and how far the measured ones are off."""
    draft = engine.draft_module
    assert draft is not None
    if getattr(draft, "num_modules", 1) > 1:  # the trainer knows heads of one module
        return row
    text = [(r.prompt_ids, r.tokens) for r in out.requests]
    stats = predict(engine.target_module, draft, text, row["steps"])
    pairs = zip_longest(out.stats.acceptance_at, stats.acceptance_at, fillvalue=0.0)
    off = [round(m / p - 1, 4) if p else None for m, p in pairs]
    return {**row, "predicted_at": [round(p, 4) for p in stats.acceptance_at], "off_prediction": off}


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a short table of acceptance rows for each draft, and what its trainer predicted."""
    console = Console()
    for draft in dict.fromkeys(r["draft"] for r in rows):
        own = [r for r in rows if r["draft"] == draft]
        title = f"{draft} ({own[0]['algo'] or 'plain decoding'})"
        table = Table("prompts", "S:K:D", "T", "tau", "±95%", "rounds", "accepted at 1, 2, …", title=title)
        for r in own:
            half_width = "-" if r["ci95"] is None else f"{r['ci95']:.3f}"
            cells = (r["prompts"], f"{r['steps']}:{r['topk']}:{r['draft_tokens']}", f"{r['temperature']:g}")
            table.add_row(*cells, f"{r['tau']:.3f}", half_width, str(r["rounds"]), _rates(r["accept_at"]))
        console.print(table)
        for r in own:
            if "predicted_at" in r:
                off = " ".join("-" if d is None else f"{d:+.0%}" for d in r["off_prediction"])
                console.print(f"{r['prompts']}, S={r['steps']}: predicted {_rates(r['predicted_at'])}, off by {off}")


def _rates(rates: Sequence[float]) -> str:
    return " ".join(f"{a:.2f}" for a in rates)
