"""The hot vocabulary: the target tokens that a draft head scores, chosen from what the target emits."""

from collections.abc import Collection
from dataclasses import dataclass

import torch

from specdec.train.data import Corpus


@dataclass(frozen=True, eq=False)
class HotVocab:
    """The chosen ids: [dv] int64 target ids, ascending. coverage: share of the corpus's generated tokens among them.

    num_unseen: number of ids that the target never generated in the corpus, taken to fill up `size`.
    """

    ids: torch.Tensor
    coverage: float
    num_unseen: int


def choose_hot_vocab(corpus: Corpus, size: int, vocab_size: int, always: Collection[int] = ()) -> HotVocab:
    """Choose the `size` most frequent generated tokens, `always` ids first; ties by prompt frequency, then by id.

    vocab_size: the target's; a larger `size` is cut to it. always: special tokens such as EOS.
    """
    if len(corpus) and int(corpus.tokens.max()) >= vocab_size:
        raise ValueError(
            f"the corpus has token {int(corpus.tokens.max())}, the target's vocabulary ends at {vocab_size - 1}; "
            "use the corpus that this target generated"
        )
    size = min(size, vocab_size)
    if not len(set(always)) <= size:
        raise ValueError(f"draft vocabulary of {size}: expected room for {len(set(always))} special tokens; enlarge it")
    generated = _count(corpus.tokens[corpus.answer], vocab_size)
    given = _count(corpus.tokens[~corpus.answer], vocab_size)
    order = torch.arange(vocab_size)
    for key in (given, generated, _count(torch.tensor(sorted(set(always)), dtype=torch.int64), vocab_size)):
        order = order[key[order].argsort(descending=True, stable=True)]  # the last key weighs most
    ids = order[:size].sort().values
    total = int(generated.sum())
    covered = int(generated[ids].sum())
    return HotVocab(ids, covered / total if total else 0.0, int((generated[ids] == 0).sum()))


def _count(ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return how often each id occurs in `ids` [n], as [vocab_size] int64."""
    return torch.bincount(ids.long(), minlength=vocab_size)
