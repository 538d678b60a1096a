"""What a run of `specdec bench latency` measures: drafts, cells of batch and context, groups that share an engine."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from specdec.config import EngineConfig
from specdec.measure.latency.timing import SAMPLINGS
from specdec.measure.roofline import kv_bytes, row_bytes
from specdec.measure.shapes import acceptance_rates
from specdec.measure.sizes import SHAPES

MODES: dict[str, dict[str, Any]] = {
    "compiled": {"compile": True},
    "graph": {"compile": False},
    **{name: {"backend": name, "compile": False} for name in ("torch", "triton", "flashinfer", "triton+flashinfer")},
}
DRAFTS = ("plain", "3:1:4", "5:1:6", "5:8:32")
FULL = {"drafts": DRAFTS, "ttft_tokens": (128, 512, 2048), "new_tokens": 257, "repeats": 7}
GRIDS: dict[str, dict[str, Any]] = {
    "quick": {
        "batches": (1, 4),
        "tokens": (128,),
        "ttft_tokens": (32,),
        "modes": ("graph",),
        "drafts": ("plain", "3:1:4"),
        "new_tokens": 33,
        "repeats": 3,
    },
    "small": {**FULL, "batches": (1, 8, 32), "tokens": (128,), "modes": ("compiled",)},
    "full": {**FULL, "batches": (1, 8, 32, 128), "tokens": (128, 8192, 32768), "modes": ("compiled", "graph")},
    "tiny": {**FULL, "batches": (1, 2), "tokens": (8,), "ttft_tokens": (), "modes": ("graph",)},
}
SHORT = (
    EngineConfig.max_seq_len
)  # contexts up to here share an engine of the default max_seq_len; each longer one has its own
SPARE = 256  # KV slots a request beside its tokens: more than two rounds of any draft write ahead
KV_SHARE = 0.8  # of the free memory that KV may take: graphs, compiling and prefills need room, too


@dataclass(frozen=True)
class Draft:
    """How rounds draft: S steps, K branches, D nodes verified; S = 0 is plain decoding.

    vocab: `EngineConfig.draft_vocab`, None for all tokens.
    """

    steps: int = 0
    topk: int = 1
    width: int = 1
    vocab: int | None = None

    @classmethod
    def parse(cls, text: str) -> "Draft":
        """Parse "plain", "S:K:D" or "S:K:D@VOCAB"; ValueError says what was expected."""
        if text == "plain":
            return cls()
        found = re.fullmatch(r"([1-9]\d*):([1-9]\d*):([1-9]\d*)(?:@([1-9]\d*))?", text)
        if found is None:
            raise ValueError(
                f"--drafts {text!r}: expected plain or S:K:D, such as 3:1:4 (a chain) or 5:8:32 (a tree), or with "
                "@VOCAB behind it, to draft from so many tokens"
            )
        return cls(*(None if part is None else int(part) for part in found.groups()))  # type: ignore[arg-type]

    def settings(self, imposed: bool) -> dict[str, Any]:
        """For `attach`. imposed: random weights are timed at an acceptance length that trained ones have."""
        if not self.steps:
            return {}
        shape: dict[str, Any] = {"num_steps": self.steps, "topk": self.topk, "num_draft_tokens": self.width}
        shape["draft_vocab"] = self.vocab
        return {**shape, "synthetic_acceptance": acceptance_rates(self.steps)} if imposed else shape

    def __str__(self) -> str:
        of = "" if self.vocab is None else f"@{self.vocab}"
        return f"{self.steps}:{self.topk}:{self.width}{of}" if self.steps else "plain"


@dataclass(frozen=True)
class Cell:
    """`batch` prompts of `tokens` tokens. has_tpot: whether the time a token is measured beside that of the first."""

    batch: int
    tokens: int
    has_tpot: bool = True

    def __str__(self) -> str:
        return f"{self.batch} x {self.tokens}"


@dataclass(frozen=True)
class Plan:
    """All that a run measures: every mode and draft at every batch and context.

    label: of the rows, such as before or after. tokens, ttft_tokens: prompt lengths; of the latter only the time to
    the first token is measured, at batch 1. new_tokens: emitted by the calls that give the time of a token. repeats:
    of the first token. budget: seconds after which nothing new begins. every_kind: capture graphs of every kind of
    sampling, instead of those measured. samplings: how tokens are drawn, of SAMPLINGS.
    """

    batches: tuple[int, ...]
    tokens: tuple[int, ...]
    ttft_tokens: tuple[int, ...]
    modes: tuple[str, ...]
    drafts: tuple[str, ...]
    new_tokens: int
    repeats: int
    label: str = "now"
    budget: float = 1e9
    every_kind: bool = False
    samplings: tuple[str, ...] = ("greedy",)

    def __post_init__(self) -> None:
        for text in self.drafts:
            Draft.parse(text)
        for mode in self.modes:
            if mode not in MODES:
                raise ValueError(f"--modes {mode!r}: expected of {', '.join(MODES)}")
        for name in self.samplings:
            if name not in SAMPLINGS:
                raise ValueError(f"--samplings {name!r}: expected of {', '.join(SAMPLINGS)}")
        for name, least in (("batches", 1), ("tokens", 1), ("ttft_tokens", 1), ("repeats", 1), ("new_tokens", 2)):
            value = getattr(self, name)
            if min(value if isinstance(value, tuple) else (value,), default=least) < least:
                option = name.replace("_", "-")
                raise ValueError(f"--{option} {value}: expected at least {least}")

    @property
    def groups(self) -> list[list[Cell]]:
        """The cells, by the engine that serves them."""
        return groups_of(cells_of(self.batches, self.tokens, self.ttft_tokens))


def plan_of(grid: str, **given: Any) -> Plan:
    """Return the plan of a grid, with what is `given` (not None) in place of its own; ValueError for a wrong value."""
    if grid not in GRIDS:
        raise ValueError(f"--grid {grid!r}: expected one of {', '.join(GRIDS)}")
    return Plan(**{**GRIDS[grid], **{name: value for name, value in given.items() if value is not None}})


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
    most = {"max_batch": max(c.batch for c in cells), "num_slots": max(_slots(c, new_tokens) for c in cells)}
    return {**most, "max_seq_len": longest} if longest > SHORT else most  # left open, it fits models of few positions


def split_by_memory(
    shape: str, cells: Sequence[Cell], new_tokens: int, device: str, ranks: int = 1
) -> tuple[list[Cell], list[Cell]]:
    """`cells` whose KV and states, a rank's part of them, fit the device beside all that is on it, and those whose do
    not.

    Known of named shapes on CUDA; of others, attaching says what does not fit.
    """
    if device != "cuda" or shape not in SHAPES:
        return list(cells), []
    free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    token, row = kv_bytes(shape, ranks=ranks), row_bytes(shape, 1, ranks)
    num_bytes = {c: _slots(c, new_tokens) * token + c.batch * row for c in cells}
    most = KV_SHARE * free
    return [c for c in cells if num_bytes[c] <= most], [c for c in cells if num_bytes[c] > most]


def _slots(cell: Cell, new_tokens: int) -> int:
    return cell.batch * (cell.tokens + new_tokens + SPARE)
