"""Feeds masks and forced tokens of a batch to its rounds, which read them from buffers on the device.

A round stops three times for the host. Before the draft, the host reads the previous round's results, so that matchers
are up to date, and gives the draft its guide: forced tokens, and the masks of tokens that may follow them. After
launching the verification, it computes masks of the tree, which has been drafted by then, while the device verifies.
After acceptance, results are mailed to the host, which reads them while the draft extends. Rounds of batches without a
grammar have no stops.

The device waits for the host's work at the first stop, and for the launches after it. So drafts get no more masks once
it has waited for `GUIDE_S`; and if guides force nothing, rounds have none until matchers come to forced text: results
are read at the second stop then, and the launches between the two stops are made ahead.

Masks of a batch may take longer than the verification that hides them. So after it, the remaining greedy requests get
masks only where the token that they would choose is forbidden. A chain is one walk of the library. Trees have many
nodes off the path: while the device verifies, matchers follow their first children, and the host waits for choices.
"""

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from specdec.core.batch import ints_to_device, to_device
from specdec.core.config import EngineConfig
from specdec.core.grammar.matcher import Constraint

PATIENCE_S = 5e-4  # time of the host on masks, after which threads help
GUIDE_S = 2e-4  # time that the device may wait for guides
FREE_S = 1e-5  # time that it may wait for guides that force nothing
NUM_UNFORCED, MOST_RESTS = 2, 15  # consecutive guides that force nothing before rounds go without; most such rounds

Found = list[tuple[Constraint, int]]  # of requests, with their places in the batch


class Constrained(Protocol):
    """The fields of a request that a feed reads."""

    constraint: Constraint | None
    finish_reason: str | None


class MaskFeed:
    """Masks [max_batch * D * W] int32 and the guide of the draft on the device, by place in the batch.

    read_results: hands out what earlier launches have emitted; set by the core.
    """

    def __init__(self, config: EngineConfig, vocab_size: int, device: torch.device):
        max_batch, num_nodes = config.max_batch, max(shape.num_draft_tokens for shape in config.shapes)
        self.num_words = -(-vocab_size // 32)
        self.read_results: Callable[[], None] = lambda: None
        self._device = device
        is_cuda = device.type == "cuda"
        size = max_batch * num_nodes * self.num_words
        self._masks = torch.full((size,), -1, dtype=torch.int32, device=device)
        self._forced = torch.full((max_batch, config.num_steps), -1, dtype=torch.int64, device=device)
        self._first = torch.full((max_batch, self.num_words), -1, dtype=torch.int32, device=device)
        self._host_first = torch.full(self._first.shape, -1, dtype=torch.int32, device="cpu", pin_memory=is_cuda)
        self._host_masks = torch.full((size,), -1, dtype=torch.int32, device="cpu", pin_memory=is_cuda)
        num = max_batch * num_nodes
        self._tree = self._host_tree = torch.zeros(2 * num, dtype=torch.int64, device="cpu", pin_memory=is_cuda)
        # of this round, and of the previous one, whose results may be unread
        self._host_choices = torch.zeros(2, num, dtype=torch.int64, device="cpu", pin_memory=is_cuda)
        self._copies = torch.cuda.Stream(device) if is_cuda else None
        self._has_tree, self._has_choices = (torch.cuda.Event() if is_cuda else None for _ in range(2))
        self._marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)] if is_cuda else []
        self._requests: Sequence[Constrained] = ()
        self._post: Callable[[torch.Tensor], None] | None = None
        self._threads = ThreadPoolExecutor(min(8, os.cpu_count() or 1), "grammar")
        self._is_guided = False  # the device has a guide that is not empty
        self._guide_s = 0.0  # time that the device waited for the last guide
        self._num_unforced = self._num_rests = 0  # consecutive guides that forced nothing, and rounds without a guide
        self._num_forcing = 0  # places up to the last that has forced tokens on the device
        self._num_masked = 0  # words up to the last mask on the device that forbids something
        self._num_rounds = self._num_forced = 0
        self.num_trusted = self.num_undone = 0  # rounds without masks, and requests that these sent back
        self._mask_s = self._wait_s = self._late_s = 0.0

    def masks(self, num_requests: int, num_nodes: int) -> torch.Tensor:
        """Masks [n, D, W] that a round of n requests and D nodes reads: the same memory at every call."""
        return _view(self._masks, num_requests, num_nodes, self.num_words)

    def guide(self, num_requests: int, num_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the draft's inputs, the same memory at every call: forced tokens [n, S], -1 past the last, and masks
        [n, W] of what may follow them."""
        return self._forced[:num_requests, :num_steps], self._first[:num_requests]

    def begin(self, requests: Sequence[Constrained], post: Callable[[torch.Tensor], None]) -> None:
        """Feed the rounds that are launched from now on, of `requests`; post: takes their results, as they are made."""
        if requests != self._requests:
            self._num_unforced = 0
        self._requests, self._post = requests, post

    def write_first(self, requests: Sequence[Constrained]) -> None:
        """Write the masks of the first tokens of `requests`: of the beginning of their grammars."""
        masks = torch.full((len(requests), 1, self.num_words), -1, dtype=torch.int32, device="cpu")
        self._fill(self._constrained(requests), [[0]] * len(requests), [[0]] * len(requests), masks.numpy())
        self.masks(len(requests), 1).copy_(to_device(masks, self._device))
        self._num_masked = max(self._num_masked, masks.numel())

    def update(self, num_steps: int) -> None:
        """First stop of a round that drafts `num_steps` deep."""
        if not self._requests:
            return
        waited_s = self._count_late(2, 3)
        if self._is_guided and not self._is_free:
            self._guide_s = waited_s
        self._mark(2)
        if num_steps and not self._rests():
            self.read_results()
            start = time.perf_counter()
            self._advise(num_steps)
            self._mask_s += time.perf_counter() - start
        self._mark(3)

    @property
    def _is_free(self) -> bool:
        """True if the device waited for the last guides, and they forced nothing."""
        return self._guide_s > FREE_S and self._num_unforced >= NUM_UNFORCED

    def _rests(self) -> bool:
        """Return whether the draft does without a guide; if so, take away the one of the round before."""
        is_over = not self._is_free or self._num_rests == MOST_RESTS
        if is_over or any(constraint.is_forced for constraint, _ in self._constrained(self._requests)):
            self._num_rests = 0
            return False
        self._num_rests += 1
        if self._is_guided:
            self._first.fill_(-1)
            self._forced.fill_(-1)
            self._is_guided, self._num_forcing = False, 0
        return True

    def _advise(self, num_steps: int) -> None:
        num = len(self._requests)
        masks = self._host_first[:num]  # its last copy is done, as in `fill`
        forced: list[list[int]] = [[] for _ in range(num)]
        found, own = self._constrained(self._requests), masks.numpy()
        own.fill(-1)  # torch's own would wake threads
        is_late = self._lateness(2)
        for constraint, i in found:
            forced[i] = constraint.forced(num_steps)
        first = self._num_rounds % max(len(found), 1)  # where there is no time for all, they take turns
        for constraint, i in (*found[first:], *found[:first]):
            if self._is_free or is_late():
                break
            if len(forced[i]) < num_steps:
                constraint.fill_next(forced[i], own[i])
        self._first[:num].copy_(masks, non_blocking=True)
        self._is_guided = True
        last = max((i + 1 for i, tokens in enumerate(forced) if tokens), default=0)
        if count := max(last, self._num_forcing):
            forced += [[] for _ in range(count - num)]
            width = self._forced.shape[1]
            rows = [[*tokens, *[-1] * (width - len(tokens))] for tokens in forced[:count]]
            self._forced[:count] = ints_to_device(rows, self._device)
        self._num_forcing = last
        self._num_forced += sum(map(len, forced))
        self._num_unforced = 0 if last else self._num_unforced + 1

    def fetch(self, tree: torch.Tensor) -> None:
        """Start the copy of a tree's tokens and parents [2, n, D] to the host."""
        self._tree = self._host_tree[: tree.numel()].view(tree.shape)
        self._tree.copy_(tree, non_blocking=True)
        if self._has_tree is not None:
            self._has_tree.record()

    def fill(self, num_nodes: int, choices: torch.Tensor | None = None) -> None:
        """Second stop: write the masks of all nodes of the tree that was fetched; a root alone needs none.

        choices [n, D]: of the tokens of every node the one with the largest logit, if that is what requests choose.
        """
        if not self._requests:
            return
        self._count_late(0, 1)
        self._mark(0)
        num = len(self._requests)
        if choices is not None:
            self._own_choices(choices).copy_(choices, non_blocking=True)
            if self._has_choices is not None:
                self._has_choices.record()
        self.read_results()  # of the round before, if they were not read at the first stop
        self._host_masks.numpy()[: self._num_masked].fill(-1)  # its last copy is done: those results came after it
        if self._has_tree is not None and num_nodes > 1:
            self._wait(self._has_tree)
        start, waited_s = time.perf_counter(), self._wait_s
        tokens, parents = self._tree[:, :num].tolist() if num_nodes > 1 else ([[0]] * num,) * 2
        host = _view(self._host_masks, num, num_nodes, self.num_words).numpy()
        if choices is None:
            last = self._fill(self._constrained(self._requests), tokens, parents, host)
        else:
            last = self._correct(tokens, parents, host, self._own_choices(choices).numpy())
        self._copy_masks(last * num_nodes * self.num_words)
        self._mark(1)
        self._num_rounds += 1
        self._mask_s += time.perf_counter() - start - (self._wait_s - waited_s)

    def mail(self, lines: torch.Tensor) -> None:
        """Third stop: begin to tell the host what the round emits, lines [n, W+3] and padding."""
        if self._post is not None:
            self._post(lines[: len(self._requests)])

    @property
    def facts(self) -> dict[str, Any]:
        """Return the contents of `Report.grammar`."""
        if not self._num_rounds:
            return {}
        late_s = self._late_s if self._marks else self._mask_s
        seconds = {"mask_ms": self._mask_s, "wait_ms": self._wait_s, "late_ms": late_s}
        counts = {"rounds": self._num_rounds, "forced_tokens": self._num_forced}
        counts |= {"trusted_rounds": self.num_trusted, "undone": self.num_undone}
        return {**counts, **{name: 1e3 * spent / self._num_rounds for name, spent in seconds.items()}}

    def _mark(self, which: int) -> None:
        """Mark where the device has verified (0), has masks (1), is about to draft (2), and has its guide (3)."""
        if self._marks:
            self._marks[which].record()

    def _wait(self, event: torch.cuda.Event) -> None:
        start = time.perf_counter()
        event.synchronize()
        self._wait_s += time.perf_counter() - start

    def _count_late(self, first: int, last: int) -> float:
        """Return, and count, the seconds that the device waited between two marks of the round before."""
        if not self._marks or not self._num_rounds:
            return 0.0
        self._marks[last].synchronize()
        waited_s = self._marks[first].elapsed_time(self._marks[last]) / 1e3
        self._late_s += waited_s
        return waited_s

    def _fill(self, found: Found, tokens: list[list[int]], parents: list[list[int]], masks: np.ndarray) -> int:
        """Write masks of requests with grammars to masks [n, D, W], which allow all; return places up to the last."""
        if _is_chain(parents[0]):
            self._run([partial(c.fill_chain, tokens[i], masks[i]) for c, i in found])
        else:
            self._run([partial(c.fill_tree, tokens[i], parents[i], masks[i]) for c, i in found])
        return found[-1][1] + 1 if found else 0

    def _own_choices(self, choices: torch.Tensor) -> torch.Tensor:
        """Return what this round's choices [n, D] are copied to."""
        return self._host_choices[self._num_rounds % 2, : choices.numel()].view(choices.shape)

    def _correct(
        self, tokens: list[list[int]], parents: list[list[int]], masks: np.ndarray, choices: np.ndarray
    ) -> int:
        """Fill masks as `_fill` does; once choices are known, only where they require masks."""
        found, last, is_chain = self._constrained(self._requests), 0, _is_chain(parents[0])
        for constraint, i in found:
            if not is_chain:
                constraint.foresee(tokens[i], parents[i])
            elif self._has_choices is None or self._has_choices.query():
                break
            else:
                constraint.fill_chain(tokens[i], masks[i], choices[i])
                last = i + 1
        if not found or last > found[-1][1]:
            return last
        if self._has_choices is not None:
            self._wait(self._has_choices)
        known = choices.tolist()
        for constraint, i in found:
            if i >= last and constraint.fill_choices(tokens[i], parents[i], known[i], masks[i]):
                last = i + 1
        return last

    def _copy_masks(self, count: int) -> None:
        """Copy the first `count` words of masks, and those of the round before, beside the verification."""
        written, self._num_masked = max(count, self._num_masked), count
        with torch.cuda.stream(self._copies) if self._copies else nullcontext():
            self._masks[:written].copy_(self._host_masks[:written], non_blocking=True)
        if self._copies:
            torch.cuda.current_stream(self._device).wait_stream(self._copies)

    def _constrained(self, requests: Sequence[Constrained]) -> Found:
        """Return the constraints of requests that go on and have one, with their places."""
        found = ((r.constraint, i) for i, r in enumerate(requests) if r.finish_reason is None)
        return [(constraint, i) for constraint, i in found if constraint is not None]

    def _lateness(self, which: int) -> Callable[[], bool]:
        """Return a function that says whether the device has waited for `GUIDE_S` at a mark; a CPU never does."""
        deadline = math.inf

        def is_late() -> bool:
            nonlocal deadline
            if deadline == math.inf and self._marks and self._marks[which].query():
                deadline = time.perf_counter() + GUIDE_S
            return time.perf_counter() > deadline

        return is_late

    def _run(self, jobs: list[Callable[[], None]]) -> None:
        """Run jobs here for `PATIENCE_S`, and what is left on threads: they help where a mask takes long, since
        libraries let others run then, and cost more than most masks take."""
        end = time.perf_counter() + PATIENCE_S
        while jobs and (len(jobs) == 1 or time.perf_counter() < end):
            jobs.pop()()
        list(self._threads.map(lambda job: job(), jobs))


def _is_chain(parents: list[int]) -> bool:
    return parents == [0, *range(len(parents) - 1)]


def _view(masks: torch.Tensor, *shape: int) -> torch.Tensor:
    return masks[: math.prod(shape)].view(shape)
