"""What `specdec bench latency` measures: a named shape with random weights, or a real target, and its draft."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoTokenizer

from specdec.measure.latency.cases import Cell
from specdec.measure.shapes import fewer_layers, make_head, make_nextn, make_target, shard

REPLACEMENT = "\ufffd"  # what half a character decodes to


class Prompts(Protocol):
    """Prompts, as token ids, for a call that measures `cell`."""

    def __call__(self, cell: Cell) -> list[list[int]]: ...


class RandomPrompts:
    """Random prompts of the ids that may be used, never the same twice."""

    def __init__(self, ids: torch.Tensor):
        self.ids = ids
        self._generator = torch.Generator().manual_seed(1)

    def __call__(self, cell: Cell) -> list[list[int]]:
        picks = torch.randint(0, len(self.ids), (cell.batch, cell.tokens), generator=self._generator)
        return self.ids[picks].tolist()


class GivenPrompts:
    """The next ones of a list, from its start again at its end; their lengths are their own."""

    def __init__(self, prompts: Sequence[list[int]]):
        self.longest = max(map(len, prompts))
        self._next = cycle(prompts)

    def __call__(self, cell: Cell) -> list[list[int]]:
        return list(islice(self._next, cell.batch))


@dataclass(frozen=True)
class Subject:
    """A target and its draft. shape: its name in rows; draft, algo: as `attach` takes them.

    is_random: weights are random, so acceptance is imposed and floors are known. tokenizer: for rows with text. ranks:
    that share the target.
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
) -> Subject:
    """Return a target, shared by so many ranks, and a head of `shape`; with a tokenizer, they say only what decodes to
    text. algo: eagle3, or nextn for a layer of the target's own kind."""
    model = make_target(shape, device, dtype, **fewer_layers(shape, num_ranks))
    vocab_size = model.config.vocab_size
    ids = torch.arange(vocab_size) if tokenizer is None else text_ids(tokenizer, vocab_size)
    if len(ids) < vocab_size:
        silence_others(model, ids)
    if num_ranks > 1:
        model = shard(model, shape, num_ranks)
        free(model.device.type)
    head = make_nextn(model) if algo == "nextn" else make_head(shape, model, ids)
    return Subject(shape, model, head, algo, RandomPrompts(ids), tokenizer, is_random=True, ranks=num_ranks)


def free(device: str) -> None:
    """Give the memory of a device of that kind back that nothing refers to any more."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def read_tokenizer(source: str | None) -> Any:
    """Return the tokenizer of a folder, or the bundled target's; None for None."""
    if source is None:
        return None
    if source == "bundled":
        from specdec.targets.pretrained import load_pretrained  # reads the model too: it takes seconds

        return load_pretrained()[1]
    if not Path(source).is_dir():
        raise ValueError(f"--tokenizer {source!r}: expected 'bundled' or a folder that save_pretrained wrote")
    return AutoTokenizer.from_pretrained(source)


def text_ids(tokenizer: Any, vocab_size: int) -> torch.Tensor:
    """Ids that each decode to text by themselves. A random model says the others as often as any; no real one does."""
    special = set(tokenizer.all_special_ids)
    texts = ((i, tokenizer.decode([i])) for i in range(min(vocab_size, len(tokenizer))) if i not in special)
    return torch.tensor([i for i, text in texts if text.strip() and REPLACEMENT not in text])


@torch.no_grad()
def silence_others(model: Any, ids: torch.Tensor) -> None:
    """Make a random target say nothing but `ids`: the others' logits become 0, and some of `ids` lie above."""
    weight = model.get_output_embeddings().weight
    others = torch.ones(weight.shape[0], dtype=torch.bool, device=weight.device)
    others[ids.to(weight.device)] = False
    weight[others] = 0
