"""The training corpus: prompts and answers as token ids, exactly as the target emitted them, and an answer mask.

It knows nothing about models or batches: `regenerate` fills it, `batches` reads it.
"""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from specdec.core import grouped
from specdec.reach.checkpoints.replacing import replacing

_NARROW = 1 << 16  # ids below it are stored in two bytes
_OTHER = "expected one that this target wrote; make it with `specdec train data --target`"


@dataclass(frozen=True, eq=False)
class Corpus:
    """A training corpus: concatenated token sequences, each a prompt and the target's answer.

    tokens: [num_tokens] int32. offsets: [len + 1] int64, sequence i is the half-open interval offsets[i]:offsets[i+1].
    answer: [num_tokens] bool, set on tokens that the target generated, EOS included. Target row t (whose logits predict
    token t+1) is trained iff answer[t+1]: the row of the last prompt token is, as is the row that predicts EOS; the EOS
    row itself and rows inside the prompt are not (standalone drafts can include the latter: prompt_weight).
    tokenizer: fingerprint of the tokenizer, if known. ValueError for tensors of other shapes or dtypes.
    """

    tokens: torch.Tensor
    offsets: torch.Tensor
    answer: torch.Tensor
    tokenizer: str | None = None

    def __post_init__(self) -> None:
        if self.tokens.shape != self.answer.shape or self.tokens.dim() != 1:
            raise ValueError(
                f"tokens {tuple(self.tokens.shape)} and answer {tuple(self.answer.shape)}: expected two flat tensors "
                "of one length"
            )
        if self.offsets.dim() != 1 or not len(self.offsets) or self.offsets.dtype != torch.int64:
            given = f"{self.offsets.dtype} {tuple(self.offsets.shape)}"
            raise ValueError(f"offsets {given}: expected int64, one for each sequence and one more")
        first, last = int(self.offsets[0]), int(self.offsets[-1])
        if first != 0 or last != self.tokens.numel() or bool((self.offsets.diff() <= 0).any()):
            raise ValueError(
                f"offsets run from {first} to {last}: expected 0 to {self.tokens.numel()}, strictly increasing; "
                "drop empty sequences"
            )

    @classmethod
    def of(cls, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> "Corpus":
        """Build a corpus with one sequence for each (prompt ids, answer ids)."""
        lengths = torch.tensor([len(p) + len(a) for p, a in pairs], dtype=torch.int64)
        tokens = [t for p, a in pairs for t in (*p, *a)]
        answer = [is_answer for p, a in pairs for is_answer in (*[False] * len(p), *[True] * len(a))]
        return cls(
            torch.tensor(tokens, dtype=torch.int32),
            torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
            torch.tensor(answer, dtype=torch.bool),
        )

    @classmethod
    def merge(cls, parts: Sequence["Corpus"]) -> "Corpus":
        """Concatenate `parts`, in order. ValueError if their tokenizers differ."""
        tokenizers = {part.tokenizer for part in parts} - {None}
        if len(tokenizers) > 1:
            raise ValueError("the corpora were made with different tokenizers: expected those of one target")
        parts = [cls.of([]), *parts]
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), *(part.lengths for part in parts)]).cumsum(0)
        tokens, answer = (torch.cat([getattr(part, name) for part in parts]) for name in ("tokens", "answer"))
        return cls(tokens, offsets, answer, next(iter(tokenizers), None))

    @classmethod
    def load(cls, path: str | Path) -> "Corpus":
        """Read a corpus that `save` wrote; ValueError for any other file."""
        try:
            with safe_open(str(path), "pt") as file:
                raw, noted = {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ValueError(f"corpus {str(path)!r}: {error}; `specdec train data` makes one") from error
        missing = sorted({"tokens", "offsets", "answer"} - set(raw))
        if missing:
            raise ValueError(f"{str(path)!r} is no corpus: it lacks {missing}; expected tokens, offsets and answer")
        return cls(raw["tokens"].to(torch.int32), raw["offsets"], raw["answer"].bool(), noted.get("tokenizer_sha256"))

    def save(self, path: str | Path, tokenizer: str | None = None) -> None:
        """Write one .safetensors file, atomically; ids take two bytes if all are below 2**16.

        tokenizer: its fingerprint, if the corpus does not know it.
        """
        tokenizer = tokenizer or self.tokenizer
        is_narrow = not len(self) or int(self.tokens.max()) < _NARROW
        tensors = {
            "tokens": self.tokens.to(torch.uint16 if is_narrow else torch.int32),
            "offsets": self.offsets,
            "answer": self.answer.to(torch.uint8),
        }
        path = Path(path)
        with replacing(path.parent) as partial:
            save_file(tensors, str(partial / path.name), {"tokenizer_sha256": tokenizer} if tokenizer else None)

    def __len__(self) -> int:
        return self.offsets.numel() - 1

    @property
    def lengths(self) -> torch.Tensor:
        """[len] int64: number of tokens of each sequence."""
        return self.offsets.diff()

    @property
    def num_tokens(self) -> int:
        """Number of tokens, prompts included."""
        return self.tokens.numel()

    @property
    def num_answer_tokens(self) -> int:
        """Number of tokens that the target generated."""
        return int(self.answer.sum())

    def answer_counts(self, vocab_size: int) -> torch.Tensor:
        """Return how often the target generated each id, as [vocab_size] int64."""
        return torch.bincount(self.tokens[self.answer].long(), minlength=vocab_size)

    @property
    def digest(self) -> str:
        """SHA-256 of tokens, offsets and answer mask."""
        parts = (self.tokens, self.offsets, self.answer)
        return hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in parts)).hexdigest()

    def sequence(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (tokens [n] int32, answer [n] bool) of sequence `i`."""
        span = slice(int(self.offsets[i]), int(self.offsets[i + 1]))
        return self.tokens[span], self.answer[span]

    def select(self, indices: Sequence[int]) -> "Corpus":
        """Return a corpus of the sequences `indices`, in that order."""
        chosen = torch.tensor(indices, dtype=torch.int64)
        lengths = self.lengths[chosen]
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        shift = (self.offsets[chosen] - offsets[:-1]).repeat_interleave(lengths)
        source = torch.arange(int(offsets[-1])) + shift
        return Corpus(self.tokens[source], offsets, self.answer[source], self.tokenizer)

    def check_ids(self, vocab_size: int, tokenizer: str) -> None:
        """Raise ValueError if the ids are not those of a target of `vocab_size` with the fingerprint `tokenizer`."""
        most = int(self.tokens.max()) if self.num_tokens else 0
        if most >= vocab_size or int(self.tokens.min() if self.num_tokens else 0) < 0:
            raise ValueError(f"the corpus has ids up to {most}, and the target {vocab_size} tokens: {_OTHER}")
        if self.tokenizer not in (None, tokenizer):
            raise ValueError(f"the corpus was made with another tokenizer than the target's: {_OTHER}")

    def show(self, tokenizer: Any, i: int) -> str:
        """Return sequence `i` as text, with the trained part in brackets: ⟦generated by the target⟧."""
        tokens, answer = self.sequence(i)
        cuts = [0, *(answer.int().diff().nonzero().flatten() + 1).tolist(), tokens.numel()]
        pieces = []
        for start, stop in pairwise(cuts):
            text = tokenizer.decode(tokens[start:stop].tolist(), skip_special_tokens=False)
            pieces.append(f"⟦{text}⟧" if bool(answer[start]) else text)
        return "".join(pieces)


def split_held_out(corpus: Corpus, num_held_out: int, seed: int) -> tuple[Corpus, Corpus]:
    """Split into (train, held out): at least `num_held_out` sequences held out, all answers to a prompt on one side.
    ValueError if nothing is left to train on."""

    def prompt_of(i: int) -> bytes:
        tokens, answer = corpus.sequence(i)
        return tokens[: int(answer.int().argmax())].numpy().tobytes()

    members = list(grouped(range(len(corpus)), prompt_of).values())
    order = torch.randperm(len(members), generator=torch.Generator().manual_seed(seed)).tolist()
    held_out: list[int] = []
    while len(held_out) < num_held_out and order:
        held_out += members[order.pop()]
    train = sorted(i for g in order for i in members[g])
    if not train:
        raise ValueError(
            f"the corpus has {len(corpus)} sequences of {len(members)} prompts; {num_held_out} or more sequences are "
            "held out, with all of their prompts, and nothing is left to train on. Generate from more prompts: --gsm8k "
            "with more questions, --chats, a longer --gen-minutes; `specdec train fit` takes several --corpus, and "
            "--held-out 0; `specdec train adapt` more --prompts, or a longer log"
        )
    return corpus.select(train), corpus.select(sorted(held_out))


def choose_hot_vocab(corpus: Corpus, size: int, vocab_size: int, always: Collection[int] = ()) -> torch.Tensor:
    """Choose a draft head's hot vocabulary: target ids [min(size, vocab_size)] int64, ascending.

    Takes the `always` ids (special tokens such as EOS), then the most frequent generated tokens; ties by frequency in
    prompts, then by id. vocab_size: the target's. ValueError for ids past it, or a size too small for `always`.
    """
    if len(corpus) and int(corpus.tokens.max()) >= vocab_size:
        raise ValueError(
            f"the corpus has token {int(corpus.tokens.max())}, the target's vocabulary ends at {vocab_size - 1}; "
            "use the corpus that this target generated"
        )
    size = min(size, vocab_size)
    if len(set(always)) > size:
        raise ValueError(f"draft vocabulary of {size}: expected room for {len(set(always))} special tokens; enlarge it")
    prompts = torch.bincount(corpus.tokens[~corpus.answer].long(), minlength=vocab_size)
    wanted = torch.zeros(vocab_size, dtype=torch.int64)
    wanted[sorted(set(always))] = 1
    order = torch.arange(vocab_size)
    for key in (prompts, corpus.answer_counts(vocab_size), wanted):
        order = order[key[order].argsort(descending=True, stable=True)]  # the last key weighs most
    return order[:size].sort().values
