"""Cases of bench/latency.py: drafts, cells of batch and context, groups that share an engine, and their floors."""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from round_cases import (
    COPY_BYTES_PER_MS,
    DEVICE,
    Case,
    acceptance_rates,
    attention_sizes,
    floor_ms,
    target_weights,
)

MODES: dict[str, dict[str, Any]] = {
    "compiled": {"compile": True},
    "graph": {},
    **{name: {"backend": name} for name in ("torch", "triton", "flashinfer", "triton+flashinfer")},
}
GRIDS: dict[str, dict[str, Any]] = {
    "small": {"batches": [1, 8, 32], "tokens": [128], "modes": ["compiled"]},
    "full": {"batches": [1, 8, 32, 128], "tokens": [128, 8192, 32768], "modes": ["compiled", "graph"]},
    "tiny": {"batches": [1, 2], "tokens": [8], "modes": ["graph"]},
}
DRAFTS = ["plain", "3:1:4", "5:1:6", "5:8:32"]
FLOPS_PER_MS = 0.79e12  # dense bf16 products of an H200, as measured for 2048 rows
SHORT = 2048  # contexts up to here share an engine of the default max_seq_len; each longer one has its own
SPARE = 256  # KV slots a request beside its tokens: more than two rounds of any draft write ahead
KV_SHARE = 0.8  # of the free memory that KV may take: graphs, compiling and prefills need room, too


@dataclass(frozen=True)
class Draft:
    """How rounds draft: S steps, K branches, D nodes verified; S = 0 is plain decoding."""

    steps: int = 0
    topk: int = 1
    width: int = 1

    @classmethod
    def parse(cls, text: str) -> "Draft":
        """From "plain" or "S:K:D"."""
        if text == "plain":
            return cls()
        parts = text.split(":")
        if len(parts) != 3 or not all(p.isdecimal() and int(p) for p in parts):
            raise ValueError(f"--drafts {text!r}: expected plain or S:K:D, such as 3:1:4 (a chain) or 5:8:32 (a tree)")
        return cls(*map(int, parts))

    @property
    def settings(self) -> dict[str, Any]:
        """For `attach`; acceptance is imposed, so that random weights are timed at a real acceptance length."""
        if not self.steps:
            return {}
        shape = {"num_steps": self.steps, "topk": self.topk, "num_draft_tokens": self.width}
        return {**shape, "synthetic_acceptance": acceptance_rates(self.steps)}

    def __str__(self) -> str:
        return f"{self.steps}:{self.topk}:{self.width}" if self.steps else "plain"


@dataclass(frozen=True)
class Cell:
    """`batch` prompts of `tokens` tokens. has_tpot: whether the time a token is measured beside that of the first."""

    batch: int
    tokens: int
    has_tpot: bool = True

    def __str__(self) -> str:
        return f"{self.batch} x {self.tokens}"


def cells_of(batches: Sequence[int], tokens: Sequence[int], ttft_tokens: Sequence[int]) -> list[Cell]:
    """Every batch at every context, and the contexts of which only the time to the first token is asked, at batch 1."""
    grid = [Cell(batch, context) for context in tokens for batch in batches]
    there = {(c.batch, c.tokens) for c in grid}
    return grid + [Cell(1, context, has_tpot=False) for context in ttft_tokens if (1, context) not in there]


def groups_of(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Cells that one engine serves, shortest contexts first. Capacity costs time: long and short do not share."""

    def room(cell: Cell) -> int:
        return max(SHORT, cell.tokens)

    ordered = sorted(cells, key=lambda c: (room(c), c.tokens, c.batch))
    return [list(group) for _, group in groupby(ordered, key=room)]


def capacity(cells: Sequence[Cell], new_tokens: int) -> dict[str, int]:
    """For `attach`: an engine that holds every one of `cells`."""
    longest = max(c.tokens for c in cells) + new_tokens
    return {
        "max_batch": max(c.batch for c in cells),
        "max_seq_len": max(SHORT, longest),
        "num_slots": max(_slots(c, new_tokens) for c in cells),
    }


def split_by_memory(shape: str, cells: Sequence[Cell], new_tokens: int) -> tuple[list[Cell], list[Cell]]:
    """`cells` whose KV fits the device beside all that is on it, and those whose KV does not."""
    if DEVICE != "cuda":
        return list(cells), []
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    most = KV_SHARE * free / _kv_bytes(shape)
    return [c for c in cells if _slots(c, new_tokens) <= most], [c for c in cells if _slots(c, new_tokens) > most]


def token_floor_ms(shape: str, draft: Draft, cell: Cell, new_tokens: int, tau: float) -> float | None:
    """ms a token of the slower of reading, weights and the KV of the mean context, and multiplying; of an H200."""
    if DEVICE != "cuda":
        return None
    case = Case(shape, cell.batch, draft.steps, draft.topk, draft.width)
    kv = cell.batch * (cell.tokens + new_tokens / 2) * _kv_bytes(shape) / COPY_BYTES_PER_MS
    products = 2 * target_weights(shape) * cell.batch * draft.width / FLOPS_PER_MS
    return round(max(floor_ms(case) + kv, products) / tau, 4)


def first_floor_ms(shape: str, cell: Cell) -> float | None:
    """ms to the first token of the slower of reading the weights once and multiplying, attention too; of an H200."""
    if DEVICE != "cuda":
        return None
    layers, num_heads, _, head_dim = attention_sizes(shape)
    attention = 2 * layers * num_heads * head_dim * cell.tokens**2  # q·k and p·v of the causal half
    products = 2 * target_weights(shape) * cell.tokens
    reading = 2 * target_weights(shape) / COPY_BYTES_PER_MS
    return round(max(reading, cell.batch * (products + attention) / FLOPS_PER_MS), 3)


def _slots(cell: Cell, new_tokens: int) -> int:
    return cell.batch * (cell.tokens + new_tokens + SPARE)


def _kv_bytes(shape: str) -> int:
    """Of one token: keys and values of the target's layers and of one draft layer."""
    layers, _, num_kv_heads, head_dim = attention_sizes(shape)
    return 2 * 2 * (layers + 1) * num_kv_heads * head_dim


def arguments(doc: str | None) -> argparse.Namespace:
    """The command line, what a grid leaves open filled in."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("135m", "8b", "tiny"), default="135m" if DEVICE == "cuda" else "tiny")
    parser.add_argument("--label", default="now", help="of these rows, such as before or after")
    parser.add_argument("--grid", choices=list(GRIDS), default=None, help="default small; tiny for --shape tiny")
    parser.add_argument("--batches", type=int, nargs="+", default=None)
    parser.add_argument("--tokens", type=int, nargs="+", default=None, help="prompt lengths")
    parser.add_argument("--ttft-tokens", type=int, nargs="*", default=None, help="at batch 1; default 128 512 2048")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=None)
    parser.add_argument("--drafts", nargs="+", default=DRAFTS, help="plain, or S:K:D")
    parser.add_argument("--tokenizer", default=None, help="folder of a tokenizer, or 'bundled'; adds rows with text")
    parser.add_argument("--every-kind", action="store_true", help="capture every kind of sampling; else greedy alone")
    parser.add_argument("--new-tokens", type=int, default=257)
    parser.add_argument("--repeats", type=int, default=7, help="of the first token")
    parser.add_argument("--budget", type=float, default=1e9, metavar="SECONDS", help="stop before this much has passed")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--compare", type=Path, nargs="+", metavar="FILE", help="pair rows of result files by label")
    args = parser.parse_args()
    grid = GRIDS[args.grid or ("tiny" if args.shape == "tiny" else "small")]
    for name, value in grid.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.ttft_tokens is None:
        args.ttft_tokens = [] if args.shape == "tiny" else [128, 512, 2048]
    if args.new_tokens < 2 or min(args.batches + args.tokens + args.ttft_tokens + [args.repeats]) < 1:
        parser.error("--batches, --tokens, --ttft-tokens, --repeats: expected at least 1, --new-tokens at least 2")
    try:
        [Draft.parse(text) for text in args.drafts]
    except ValueError as error:
        parser.error(str(error))
    return args
