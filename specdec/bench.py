"""`specdec bench`: measurements on real prompts. Today: acceptance length, which does not depend on the machine."""

import json
import math
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from specdec.api import attach
from specdec.metrics import AcceptanceStats
from specdec.outputs import RequestOutput
from specdec.sampling import SamplingParams


def acceptance(
    model: Any,
    draft: Any,
    prompts: Sequence[Sequence[int]],
    *,
    name: str,
    num_steps: int,
    topk: int = 1,
    num_draft_tokens: int | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    max_batch: int = 8,
) -> dict[str, Any]:
    """One acceptance row for `prompts` (token ids), called `name` in the row."""
    longest = max(map(len, prompts)) + max_new_tokens
    engine = attach(
        model,
        draft,
        num_steps=num_steps,
        topk=topk,
        num_draft_tokens=num_draft_tokens,
        max_batch=max_batch,
        max_seq_len=longest,
    )
    try:
        out = engine.generate(
            [list(p) for p in prompts], max_new_tokens=max_new_tokens, sampling=SamplingParams(temperature=temperature)
        )
        return {
            "algo": engine.report().draft["algo"],
            "prompts": name,
            "steps": num_steps,
            "topk": topk,
            "draft_tokens": engine.config.verify_width,
            "temperature": temperature,
            "max_new_tokens": max_new_tokens,
            "num_prompts": len(prompts),
            "tau": round(out.stats.tau, 4),
            "ci95": round(ci95(out.requests), 4),
            "rounds": out.stats.num_rounds,
            "accept_at": [round(a, 4) for a in out.stats.acceptance_at],
            "tok_s": round(out.stats.tokens_per_s, 1),
        }
    finally:
        engine.detach()


def ci95(requests: Sequence[RequestOutput]) -> float:
    """Half width of the 95% interval of tau over prompts: the ratio estimator, linearised."""
    parts: list[AcceptanceStats] = [r.acceptance for r in requests]
    total = AcceptanceStats().merge(parts)
    if len(parts) < 2 or not total.num_rounds:
        return math.inf
    residual = sum((p.num_emitted - total.tau * p.num_rounds) ** 2 for p in parts)
    n = len(parts)
    return 1.96 * math.sqrt(residual * n / (n - 1)) / total.num_rounds


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """A short table of acceptance rows."""
    table = Table("prompts", "S", "K", "D", "T", "tau", "±95%", "rounds", "accepted at 1, 2, …")
    for r in rows:
        rates = " ".join(f"{a:.2f}" for a in r["accept_at"])
        cells = (r["prompts"], r["steps"], r["topk"], r["draft_tokens"], r["temperature"])
        table.add_row(*map(str, cells), f"{r['tau']:.3f}", f"{r['ci95']:.3f}", str(r["rounds"]), rates)
    Console().print(table)


def write_results(folder: str | Path, what: str, shape: str, config: dict[str, Any], rows: Sequence[Any]) -> Path:
    """Write `<what>_<shape>_<gpu>_<date>.json` with the command, versions and rows; returns its path."""
    gpu = torch.cuda.get_device_name().lower().replace(" ", "-") if torch.cuda.is_available() else "cpu"
    path = Path(folder) / f"{what}_{shape}_{gpu}_{datetime.now(UTC):%Y-%m-%d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    record = {"command": command, "versions": versions, "gpu": gpu, "config": config, "rows": list(rows)}
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path
