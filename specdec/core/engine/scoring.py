"""Likelihoods of given continuations: several prompts packed in a prefill, the target's layers only.

It uses the turns, rows, slots and prefill graphs of generation. A group of sequences takes one turn, so other requests
go on in between. A prefix that sequences share before their first scored token, such as few-shot examples, or a
question before its answers, is prefilled once.
"""

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from specdec.core.batch import on_device
from specdec.core.cache.pages import NO_PAGES
from specdec.core.cache.prefix import num_alike, scored_keys
from specdec.core.engine.admission import adapter_number, check_ids
from specdec.core.engine.core import Core
from specdec.core.engine.packing import copy_to
from specdec.core.engine.prompts import read_prompts
from specdec.core.errors import CapacityError
from specdec.core.functional.results import token_logprobs
from specdec.core.text.inputs import check_text, prompts_to_ids

HEAD_ROWS = 512  # positions whose logits are held at once

# Results of one product of the head, for each scored token: its pair's number [n] int64, on the host; the token [n]
# int64 and the logits before it [n, V], on the device.
Scored = tuple[np.ndarray, torch.Tensor, torch.Tensor]


class Score(NamedTuple):
    """Likelihood of one continuation.

    logprob: sum over its tokens of log p(token | all before it), in nats, under the target's own logits: before
    temperature, filters and penalties. is_greedy: whether each of its tokens is the target's argmax.
    """

    logprob: float
    is_greedy: bool


class Pair(NamedTuple):
    """Prompt and continuation `number` as ids [T] int64; the tokens from `start` on are scored."""

    number: int
    ids: np.ndarray
    start: int


@dataclass(frozen=True)
class Scorable:
    """A sequence that the target runs, fed [T - 1] int64, and its pairs, which differ only in the token after it, such
    as choices of one token."""

    fed: np.ndarray
    pairs: list[Pair]

    @property
    def unscored(self) -> np.ndarray:
        """The first tokens, after which nothing is scored: their K/V may be shared."""
        return self.fed[: min(pair.start for pair in self.pairs) - 1]


class ScoredPart(NamedTuple):
    """Tokens begin..end-1 of a sequence, to run in `row`; K/V of those before is written, or will be."""

    sequence: Scorable
    row: int
    begin: int
    end: int

    @property
    def length(self) -> int:
        """Tokens to run."""
        return self.end - self.begin


def score(
    core: Core, tokenizer: Any, processor: Any, prompts: Any, continuations: Any, adapter: str | None = None
) -> list[Score]:
    """Score a continuation for every prompt; see `Engine.score`. processor: of chats, or None."""
    read = read_prompts((), tokenizer, processor, prompts, None, {}).ids  # images are refused
    pairs, number = _checked(core, read, _continuation_ids(continuations, tokenizer)), adapter_number(core, adapter)
    owners, results = [], []
    with closing(_scored(core, pairs, number)) as parts:
        for numbers, tokens, logits in parts:
            logprobs = token_logprobs(logits.unsqueeze(1), tokens.unsqueeze(1), 0)[:, 0, 0]
            owners.append(numbers)
            results.append(torch.stack([logprobs.double(), (logits.argmax(-1) != tokens).double()], 1))
    index = torch.from_numpy(np.concatenate(owners))
    sums = torch.zeros(len(pairs), 2, dtype=torch.float64, device="cpu")
    sums.index_add_(0, index, torch.cat(results).cpu())  # the only place that waits for the device
    return [Score(logprob, num_missed == 0) for logprob, num_missed in sums.tolist()]


def continuation_logits(
    core: Core, prompts: Sequence[list[int]], continuations: Sequence[list[int]]
) -> list[torch.Tensor]:
    """Return the target's logits before each token of every continuation, [n, V] fp32 on the device.

    Both are token ids. ValueError and CapacityError as for `Engine.score`.
    """
    rows: list[list[torch.Tensor]] = [[] for _ in prompts]
    with closing(_scored(core, _checked(core, prompts, continuations))) as parts:
        for owners, _tokens, logits in parts:
            for owner, row in zip(owners.tolist(), logits.float().unbind(), strict=True):
                rows[owner].append(row)
    return [torch.stack(own) for own in rows]


def _scored(core: Core, pairs: Sequence[Pair], adapter: int = 0) -> Generator[Scored, None, None]:
    """Run the target over all `pairs`; tokens of a pair come in order.

    The engine's turn and rows are held while a reader works, so it must close this if it breaks off.
    """
    core.agree("score()", ([(pair.ids.tolist(), pair.start) for pair in pairs], adapter))
    waiting, tables = deque(_grouped(pairs)), core.slot_tables
    if not tables.keeps_prefixes:  # changes of weights since the last call are not watched then
        with core.turns:
            tables.prefixes.clear()
    while waiting:
        with core.turns, on_device(core.device), torch.inference_mode():
            core.submit(())  # nothing but its checks: attached, and no weight has moved
            group = _reserve(core, waiting, adapter)
            assert group or core.has_work, "rows are taken, but no request runs"
            try:
                for _ in group:
                    waiting.popleft()
                for pieces in _prefills(group, core.config.max_prefill_tokens):
                    yield from _prefill(core, pieces, adapter)
            finally:
                for piece in group:
                    tables.release(piece.row)
        if not group:
            core.step()  # they are other requests' rows, and their callers may be in this very thread


def _checked(core: Core, befores: Sequence[list[int]], afters: Sequence[list[int]]) -> list[Pair]:
    """Return the pairs to score; ValueError (CapacityError) names the first that cannot be."""
    if len(befores) != len(afters):
        raise ValueError(f"{len(afters)} continuations for {len(befores)} prompts: expected one for each")
    most, pairs = core.config.max_seq_len, []
    for i, (before, after) in enumerate(zip(befores, afters, strict=True)):
        for what, part in (("prompt", before), ("continuation", after)):
            if not part:
                raise ValueError(f"{what} {i} is empty: expected at least one token, such as BOS")
        whole = before + after
        check_ids(core, f"prompt {i} or its continuation holds token", whole)
        num_fed = len(whole) - 1  # nothing follows the last token
        if num_fed > most:
            raise CapacityError(
                f"prompt {i} has {len(before)} tokens and its continuation {len(after)}: {num_fed} are read, "
                f"more than max_seq_len={most}; shorten the prompt, or raise max_seq_len"
            )
        core.slot_tables.check_fits(num_fed)
        pairs.append(Pair(i, np.array(whole, dtype=np.int64), len(before)))
    return pairs


def _continuation_ids(continuations: Any, tokenizer: Any) -> list[list[int]]:
    """Return ids of continuations: text by itself, without the special tokens that begin a prompt."""
    texts = [continuations] if isinstance(continuations, str) else continuations
    if isinstance(texts, Sequence) and any(isinstance(text, str) for text in texts):
        if tokenizer is None:
            raise ValueError("continuations are text, but the engine has no tokenizer; attach(..., tokenizer=...)")
        texts = [_tokenised(i, text, tokenizer) for i, text in enumerate(texts)]
    return prompts_to_ids(texts, tokenizer, name="continuation")


def _tokenised(number: int, continuation: Any, tokenizer: Any) -> Any:
    if not isinstance(continuation, str):
        return continuation
    return tokenizer(check_text(f"continuation {number}", continuation), add_special_tokens=False)["input_ids"]


def _grouped(pairs: Iterable[Pair]) -> list[Scorable]:
    """Group pairs with equal inputs of the target; sequences with the most new tokens come first, so that the others
    find these cached, and prefills have sequences of similar length."""
    found: dict[bytes, Scorable] = {}
    for pair in pairs:
        fed = pair.ids[:-1]
        found.setdefault(fed.tobytes(), Scorable(fed, [])).pairs.append(pair)
    alike = [found[key] for key in sorted(found)]  # each shares with the one before it as much as with any before
    shared = [0, *(num_alike(before.fed, after.unscored) for before, after in pairwise(alike))]
    new = [(len(sequence.fed) - count, sequence) for sequence, count in zip(alike, shared, strict=True)]
    return [sequence for _, sequence in sorted(new, key=lambda both: -both[0])]


def _reserve(core: Core, waiting: Iterable[Scorable], adapter: int) -> list[ScoredPart]:
    """Reserve rows for the first of `waiting`: as many as fit in one prefill, or one sequence that takes several.

    Shared prefixes may be written in the same prefill: all K/V of a layer is stored before it attends. The sequences
    have similar lengths, since some backends pad them all to the longest.
    """
    tables, can_share = core.slot_tables, not core.target.spec.recurrent
    group: list[ScoredPart] = []
    num_tokens = 0
    for sequence in waiting:
        shared = tables.prefixes.find(scored_keys(sequence.unscored, adapter)) if can_share else NO_PAGES
        begin, end = len(shared) * tables.page_size, len(sequence.fed)
        num_tokens += end - begin
        if group and (num_tokens > core.config.max_prefill_tokens or end - begin < group[0].length / 2):
            break
        row = tables.reserve(end, shared)
        if row is None:
            break
        if can_share:
            tables.keep(row, scored_keys(sequence.fed, adapter))
        group.append(ScoredPart(sequence, row, begin, end))
    return group


def _prefills(group: Sequence[ScoredPart], most: int) -> list[list[ScoredPart]]:
    """Cut `group` into prefills of at most `most` tokens; only a single sequence is ever longer."""
    if sum(piece.length for piece in group) <= most:
        return [list(group)] if group else []
    (piece,) = group
    begins = range(piece.begin, piece.end, most)
    return [[piece._replace(begin=at, end=min(at + most, piece.end))] for at in begins]


def _prefill(core: Core, pieces: Sequence[ScoredPart], adapter: int) -> Iterator[Scored]:
    """Run the target's layers over `pieces`, and its head where a token is scored."""
    tables, rows, lens = core.slot_tables, [p.row for p in pieces], [p.length for p in pieces]
    there = copy_to(core.device, np.array(rows))
    tables.write(there, copy_to(core.device, tables.pages_of(rows)))
    core.state.adapters.index_fill_(0, there, adapter)
    metadata = core.context.backend.metadata.prefill(tables.table, there, [p.begin for p in pieces], lens)
    ids = copy_to(core.device, np.concatenate([p.sequence.fed[p.begin : p.end] for p in pieces]))
    hidden, _aux = core.prefill.target(metadata, ids)
    found = []  # of every scored token its pair's number, the row of the packed batch that predicts it, and itself
    for piece, offset in zip(pieces, accumulate(lens, initial=0), strict=False):
        for pair in piece.sequence.pairs:
            at = np.arange(max(pair.start - 1, piece.begin), piece.end)
            found.append(np.stack([np.full(len(at), pair.number), at - piece.begin + offset, pair.ids[at + 1]]))
    owners, places, tokens = np.concatenate(found, 1)
    for begin in range(0, len(places), HEAD_ROWS):
        some = slice(begin, begin + HEAD_ROWS)
        logits = core.target.head(hidden.index_select(0, copy_to(core.device, places[some])))
        yield owners[some], copy_to(core.device, tokens[some]), logits
