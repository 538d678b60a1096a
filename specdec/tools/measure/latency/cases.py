"""Cases of a run of `specdec bench latency`: a target and its draft, cells of batch and context, shapes of rounds.

Named shapes have random weights; their prompts are random ids, which decode to text if there is a tokenizer.
"""

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, groupby, islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from specdec.core.config import EngineConfig
from specdec.core.functional.sampling import SamplingParams
from specdec.core.text.detokenizer import REPLACEMENT
from specdec.tools.measure.drafts import DraftShape
from specdec.tools.measure.shapes import (
    block_layers,
    fewer_layers,
    make_block,
    make_head,
    make_nextn,
    make_target,
    shard,
)

MODES: dict[str, dict[str, Any]] = {
    "compiled": {"compile": True},
    "fp8-draft": {"compile": True, "draft_weights": "fp8"},
    "prefix-cache": {"compile": True, "prefix_cache": True},
    "graph": {"compile": False},
    **{name: {"backend": name, "compile": False} for name in ("torch", "triton", "flashinfer", "triton+flashinfer")},
}
SAMPLINGS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=1.0),
    "filtered": SamplingParams(temperature=1.0, top_k=50, top_p=0.9),
}
DRAFTS = ("plain", "3:1:4", "5:1:6", "5:8:32")
FULL = {"drafts": DRAFTS, "ttft_tokens": (128, 512, 2048), "new_tokens": 257, "repeats": 7}
QUICK = {"drafts": ("plain", "3:1:4"), "ttft_tokens": (32,), "new_tokens": 33, "repeats": 3}
GRIDS: dict[str, dict[str, Any]] = {
    "quick": {**QUICK, "batches": (1, 4), "tokens": (128,), "modes": ("graph",)},
    "small": {**FULL, "batches": (1, 8, 32), "tokens": (128,), "modes": ("compiled",)},
    "tiny": {**FULL, "batches": (1, 2), "tokens": (8,), "ttft_tokens": (), "modes": ("graph",)},
}
SHORT = EngineConfig.max_seq_len  # contexts up to here share an engine; each longer one has its own
SPARE = 256  # extra KV slots per request: more than two rounds of any draft write ahead


@dataclass(frozen=True)
class Cell:
    """`batch` prompts of `tokens` tokens. has_tpot: also measure the time per token, not only to the first."""

    batch: int
    tokens: int
    has_tpot: bool = True

    @property
    def reach(self) -> int:
        """The context length that its engine must hold."""
        return max(SHORT, self.tokens)

    def __str__(self) -> str:
        return f"{self.batch} x {self.tokens}"


@dataclass(frozen=True)
class Plan:
    """The plan of a run: every mode and draft at every batch and context.

    label: of the rows, such as before or after. tokens, ttft_tokens: prompt lengths; for the latter only the time to
    the first token is measured, at batch 1. new_tokens: emitted by calls that measure the time per token. repeats: of
    the first token. budget: seconds after which nothing new begins. samplings: kinds of sampling, of SAMPLINGS.
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
    samplings: tuple[str, ...] = ("greedy",)

    def __post_init__(self) -> None:
        for text in self.drafts:
            DraftShape.parse(text)
        for option, known in (("modes", MODES), ("samplings", SAMPLINGS)):
            for name in getattr(self, option):
                if name not in known:
                    raise ValueError(f"--{option} {name!r}: expected any of {', '.join(known)}")
        for name, least in (("batches", 1), ("tokens", 1), ("ttft_tokens", 1), ("repeats", 1), ("new_tokens", 2)):
            value = getattr(self, name)
            if min(value if isinstance(value, tuple) else (value,), default=least) < least:
                raise ValueError(f"--{name.replace('_', '-')} {value}: expected at least {least}")

    @classmethod
    def of(cls, grid: str, **given: Any) -> "Plan":
        """Return the plan of a grid, changed by the `given` values that are not None; ValueError for a wrong value."""
        return cls(**{**GRIDS[grid], **{name: value for name, value in given.items() if value is not None}})

    @property
    def groups(self) -> list[list[Cell]]:
        """The cells, by the engine that serves them."""
        return groups_of(cells_of(self.batches, self.tokens, self.ttft_tokens))


def cells_of(batches: Sequence[int], tokens: Sequence[int], ttft_tokens: Sequence[int]) -> list[Cell]:
    """Every batch at every context, and at batch 1 the contexts for which only the time to the first token is
    measured."""
    grid = [Cell(batch, context) for context in tokens for batch in batches]
    return grid + [Cell(1, n, has_tpot=False) for n in ttft_tokens if Cell(1, n) not in grid]


def groups_of(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Group cells by engine, shortest contexts first. Capacity costs time, so long contexts get their own engines."""
    ordered = sorted(cells, key=lambda c: (c.reach, c.tokens, c.batch))
    return [list(group) for _, group in groupby(ordered, key=lambda c: c.reach)]


def capacity(cells: Sequence[Cell], new_tokens: int) -> dict[str, int]:
    """Return settings of `attach` for an engine that holds every one of `cells`."""
    longest = max(c.tokens for c in cells) + new_tokens
    slots = max(c.batch * (c.tokens + new_tokens + SPARE) for c in cells)
    most = {"max_batch": max(c.batch for c in cells), "num_slots": slots}
    return {**most, "max_seq_len": longest} if longest > SHORT else most  # left open, it suits models of few positions


Prompts = Callable[[Cell], list[list[int]]]  # returns token ids for a call that measures a cell


def random_prompts(ids: torch.Tensor) -> Prompts:
    """Return random prompts of the given ids, never the same twice."""
    generator = torch.Generator().manual_seed(1)
    return lambda cell: ids[torch.randint(0, len(ids), (cell.batch, cell.tokens), generator=generator)].tolist()


def given_prompts(prompts: Sequence[list[int]]) -> Prompts:
    """Return the next prompts of a list, cyclically, with their own lengths."""
    following = cycle(prompts)
    return lambda cell: list(islice(following, cell.batch))


@dataclass(frozen=True)
class Timed:
    """A target and its draft. shape: its name in rows; draft, algo: as `attach` takes them.

    is_random: weights are random, so acceptance is imposed and floors are known. tokenizer: for rows with text. ranks:
    the number that share the target.
    """

    shape: str
    model: Any
    draft: Any
    algo: str | None
    prompts: Prompts
    tokenizer: Any = None
    is_random: bool = False
    ranks: int = 1

    @property
    def device(self) -> str:
        """Kind of the target's device, such as cuda."""
        return self.model.device.type


def random_subject(
    shape: str, device: str, dtype: torch.dtype | None, tokenizer: Any, num_ranks: int = 1, algo: str = "eagle3"
) -> Timed:
    """Return a target, shared by `num_ranks` ranks, and a head of `shape`; with a tokenizer, they emit only ids that
    decode to text. algo: eagle3, nextn for a layer of the target's own kind, or block:N for a block head of N
    layers."""
    model = make_target(shape, device, dtype, **fewer_layers(shape, num_ranks))
    vocab_size = model.config.vocab_size
    ids = torch.arange(vocab_size) if tokenizer is None else text_ids(tokenizer, vocab_size)
    if len(ids) < vocab_size:
        silence_others(model, ids)
    if num_ranks > 1:
        model = shard(model, shape, num_ranks)
        free(model.device.type)
    if num_layers := block_layers(algo):
        head: Any = make_block(shape, model, ids, num_layers)
    else:
        head = make_nextn(model) if algo == "nextn" else make_head(shape, model, ids)
    return Timed(shape, model, head, algo, random_prompts(ids), tokenizer, is_random=True, ranks=num_ranks)


def free(device: str) -> None:
    """Free unreferenced memory of a device of that kind."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def read_tokenizer(source: str | None) -> Any:
    """Return the tokenizer of a folder, or the bundled target's; None for None."""
    if source is None:
        return None
    if source == "bundled":
        from specdec.reach.targets.pretrained import load_pretrained  # also reads the model, which takes seconds

        return load_pretrained()[1]
    if not Path(source).is_dir():
        raise ValueError(f"--tokenizer {source!r}: expected 'bundled' or a folder that save_pretrained wrote")
    return AutoTokenizer.from_pretrained(source)


def text_ids(tokenizer: Any, vocab_size: int) -> torch.Tensor:
    """Return the ids that decode to text alone. A random model emits the others as often; no real one does."""
    special = set(tokenizer.all_special_ids)
    texts = ((i, tokenizer.decode([i])) for i in range(min(vocab_size, len(tokenizer))) if i not in special)
    return torch.tensor([i for i, text in texts if text.strip() and REPLACEMENT not in text])


@torch.no_grad()
def silence_others(model: Any, ids: torch.Tensor) -> None:
    """Make a random target emit only `ids`: the others' logits become 0, and some of `ids` are above."""
    weight = model.get_output_embeddings().weight
    others = torch.ones(weight.shape[0], dtype=torch.bool, device=weight.device)
    others[ids.to(weight.device)] = False
    weight[others] = 0
