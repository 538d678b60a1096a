"""Cuts a corpus into batches of sequences of similar length and marks the rows to train. All on the host."""

from dataclasses import dataclass

import numpy as np
import torch

from specdec.tools.train.data import Corpus

PAD_TO = 16  # columns; lengths are rounded up to a multiple of this


@dataclass(frozen=True, eq=False)
class Batch:
    """A training batch: B right-padded sequences of T columns, which need no padding mask under causal attention.

    tokens: [B, T + num_steps] int64, so that every step's shifted tokens exist.
    rows: [N] int64, flat indices b*T+t of the target rows to imitate; draft column row-1-j imitates one at step j.
    starts: [S] int64, flat columns where a draft chain could start in inference: its root and next token are generated.
    prompt_rows: [M] int64, flat indices of the other rows that a real token follows. num_tokens: padding not counted.
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    starts: torch.Tensor
    prompt_rows: torch.Tensor
    length: int
    num_tokens: int


class Batches:
    """Batches of `corpus` of at most `tokens_per_batch` padded tokens; sequences are cut at `max_len` tokens.

    Sequences without a row to train, such as those cut within the prompt, are left out, unless takes_prompts.
    ValueError if the longest sequence does not fit a batch.
    A target row before `num_steps` has no column at the last step and is not trained (prompts are longer than that).
    """

    def __init__(
        self,
        corpus: Corpus,
        num_steps: int,
        tokens_per_batch: int,
        max_len: int,
        device: torch.device,
        takes_prompts: bool = False,
    ):
        self.num_steps = num_steps
        self.tokens_per_batch = tokens_per_batch
        self.device = device
        self._tokens = corpus.tokens.numpy()
        self._answer = corpus.answer.numpy()
        self._starts = corpus.offsets[:-1].numpy()
        self._lengths = np.minimum(corpus.lengths.numpy(), max_len)
        self._takes_prompts = takes_prompts
        widest = int(self._padded(self._lengths).max(initial=0))
        if widest > tokens_per_batch:
            raise ValueError(
                f"tokens_per_batch={tokens_per_batch}: the longest sequence has {widest} tokens (padded); raise it, "
                "or lower max_len"
            )

    @property
    def num_rows(self) -> int:
        """Number of rows trained in an epoch."""
        return int(self._rows_of_each().sum())

    def _rows_of_each(self) -> np.ndarray:
        counts = np.diff([*self._starts, len(self._tokens)])
        places = np.arange(len(self._tokens)) - self._starts.repeat(counts)
        is_trained = self._answer & (places > self.num_steps) & (places < self._lengths.repeat(counts))
        return np.bincount(np.arange(len(counts)).repeat(counts)[is_trained], minlength=len(counts))

    def plan(self, seed: int | None) -> list[np.ndarray]:
        """Return the sequence indices of each batch of an epoch, shuffled by `seed`; None: longest first."""
        random = np.random.default_rng(seed)
        count = len(self._lengths)
        order = np.arange(count) if seed is None else random.permutation(count)
        padded = self._padded(self._lengths)
        if not self._takes_prompts:
            order = order[self._rows_of_each()[order] > 0]
        order = order[np.argsort(padded[order], kind="stable")[::-1]]  # a batch is as wide as its first sequence
        plan = []
        while len(order):
            size = self.tokens_per_batch // int(padded[order[0]])
            plan.append(order[:size])
            order = order[size:]
        if seed is not None:
            random.shuffle(plan)
        return plan

    def build(self, indices: np.ndarray) -> Batch:
        """Build the batch of the sequences `indices` on the device; copies do not block the host."""
        lengths = self._lengths[indices][:, None]
        length = int(self._padded(lengths).max())
        columns = np.arange(length + self.num_steps)
        is_real = columns < lengths
        source = np.where(is_real, self._starts[indices][:, None] + columns, 0)
        tokens = np.where(is_real, self._tokens[source], 0)
        answer = self._answer[source] & is_real
        is_row = answer[:, 1 : length + 1].copy()
        is_row[:, : self.num_steps] = False
        rows = np.flatnonzero(is_row)
        starts = np.flatnonzero(is_row & answer[:, :length]) - 1
        prompt_rows = np.flatnonzero(is_real[:, 1 : length + 1] & ~answer[:, 1 : length + 1])
        ids, *index = (self._send(array) for array in (tokens, rows, starts, prompt_rows))
        return Batch(ids, index[0], index[1], index[2], length, int(lengths.sum()))

    def _send(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array.astype(np.int64, copy=False))
        if self.device.type != "cuda":
            return tensor.to(self.device)
        return tensor.pin_memory().to(self.device, non_blocking=True)

    @staticmethod
    def _padded(lengths: np.ndarray) -> np.ndarray:
        return -(-lengths // PAD_TO) * PAD_TO
