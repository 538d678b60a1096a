"""Conversations of one measurement, and tau by where rounds begin: in the answer, and in the context."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from specdec.api import Engine
from specdec.core import grouped
from specdec.core.functional.sampling import SamplingParams
from specdec.core.metrics import AcceptanceStats, acceptance_length
from specdec.core.outputs import RequestOutput
from specdec.core.text.inputs import encode, ids_of_chat
from specdec.core.text.prompt_sets import Question
from specdec.core.text.prompts import ids_sha
from specdec.tools.measure.statistics import ratio_half_width, rounded

ANSWER_EDGE = 32  # tokens: the first bin is 0..31, then 32..63, 64..127, and so on, each as long as all before it
CONTEXT_EDGE = 128


class PlayedRound(NamedTuple):
    """begin: tokens of the answer before the round, the prefill's included; context: those and the prompt's; length:
    tokens that the round emitted."""

    begin: int
    context: int
    length: int


def rounds_of(request: RequestOutput) -> Iterator[PlayedRound]:
    """Yield the rounds of a request, in order."""
    first = len(request.tokens) - sum(request.round_lens)  # 1: the token of the prefill
    for begin, length in zip(accumulate(request.round_lens, initial=first), request.round_lens, strict=False):
        yield PlayedRound(begin, len(request.prompt_ids) + begin, length)


def tau_by_position(requests: Sequence[Sequence[RequestOutput]]) -> list[dict[str, Any]]:
    """Return tau by the tokens of the answer before a round; `requests` as for `tau_by_context`."""
    return _tau_by("begin", ANSWER_EDGE, requests)


def tau_by_context(requests: Sequence[Sequence[RequestOutput]]) -> list[dict[str, Any]]:
    """Return tau by the tokens before a round, the prompt's included: {"from", "to", "tau", "ci95", "rounds"} for every
    range from..to-1 that has rounds.

    requests: of each conversation. tau is pooled, ci95 the half width of its 95% interval over the conversations that
    have rounds there, None where there is only one.
    """
    return _tau_by("context", CONTEXT_EDGE, requests)


def _tau_by(where: str, edge: int, requests: Sequence[Sequence[RequestOutput]]) -> list[dict[str, Any]]:
    bins: dict[int, dict[int, list[int]]] = defaultdict(dict)  # doublings of the edge -> conversation -> round lengths
    for number, own in enumerate(requests):
        for one in (one for request in own for one in rounds_of(request)):
            bins[(getattr(one, where) // edge).bit_length()].setdefault(number, []).append(one.length)
    rows = []
    for doublings, lengths in sorted(bins.items()):
        emitted, num_rounds = [sum(own) for own in lengths.values()], [len(own) for own in lengths.values()]
        row = {
            "from": edge << doublings >> 1 if doublings else 0,
            "to": edge << doublings,
            "tau": round(acceptance_length(sum(emitted), sum(num_rounds)), 4),
            "ci95": rounded(ratio_half_width(emitted, num_rounds)),
            "rounds": sum(num_rounds),
        }
        rows.append(row)
    return rows


LONGER = 2  # re-tokenised text may have more tokens than were generated; so far never twice as many


@dataclass(frozen=True)
class Conversations:
    """Prompts of a run, one element per conversation. ids: the first prompts; turns: the user's messages, () if there
    are only ids; categories: None if there are none."""

    ids: list[list[int]]
    turns: list[tuple[str, ...]]
    categories: list[str | None]

    @classmethod
    def of(cls, prompts: "Sequence[Sequence[int]] | Conversations") -> "Conversations":
        """Make conversations of one turn from token ids."""
        if isinstance(prompts, Conversations):
            return prompts
        return cls([list(p) for p in prompts], [()] * len(prompts), [None] * len(prompts))

    @classmethod
    def render(cls, questions: Sequence[Question], tokenizer: Any) -> "Conversations":
        """Render each question's first turn with the chat template."""
        ids = [ids_of_chat(_messages(q.turns[:1], []), tokenizer) for q in questions]
        return cls(ids, [q.turns for q in questions], [q.category for q in questions])

    @property
    def num_turns(self) -> int:
        """Turns of the longest conversation."""
        return max(max(len(t), 1) for t in self.turns)

    def by_category(self) -> dict[str, list[int]]:
        """Return the numbers of each category's conversations, in the order in which categories appear."""
        named = [i for i, category in enumerate(self.categories) if category is not None]
        return grouped(named, lambda i: self.categories[i])

    def prompts_sha(self, tokenizer: Any) -> str:
        """Return a hash of the first prompts' ids and of the users' later turns, without answers."""
        later = [encode(tokenizer, text) for turns in self.turns for text in turns[1:]]
        return ids_sha([*self.ids, *later])

    def longest(self, max_new_tokens: int, tokenizer: Any) -> int:
        """Return the tokens that a request can have, prompt and answer."""
        most = max(map(len, self.ids)) + max_new_tokens
        for turns in self.turns:
            if len(turns) > 1:
                asked = len(ids_of_chat(_messages(turns, [""] * (len(turns) - 1)), tokenizer))
                most = max(most, asked + max_new_tokens * (LONGER * (len(turns) - 1) + 1))
        return most


@dataclass(frozen=True)
class Answers:
    """requests: of each conversation, one per turn; time_s: seconds of all."""

    requests: list[list[RequestOutput]]
    time_s: float

    @property
    def flat(self) -> list[RequestOutput]:
        """Every request, conversation by conversation."""
        return [request for own in self.requests for request in own]

    def stats(self) -> list[AcceptanceStats]:
        """Return the rounds of each conversation; conversations are independent samples."""
        return [AcceptanceStats().merge([r.acceptance for r in own]) for own in self.requests]

    def of(self, numbers: Sequence[int]) -> "Answers":
        """Return those of some conversations, by their numbers."""
        return Answers([self.requests[i] for i in numbers], self.time_s)


def ask(engine: Engine, asked: Conversations, temperature: float, max_new_tokens: int) -> Answers:
    """Generate the answers turn by turn: all first turns, then all second ones. Seeds start at 0 in each turn."""
    law = SamplingParams(temperature=temperature, seed=0)
    out = engine.generate(asked.ids, max_new_tokens=max_new_tokens, sampling=law)
    requests, time_s = [[r] for r in out.requests], out.stats.time_s
    for turn in range(1, asked.num_turns):
        those = [i for i, turns in enumerate(asked.turns) if len(turns) > turn]
        prompts = [_messages(asked.turns[i][: turn + 1], [r.text for r in requests[i]]) for i in those]
        out = engine.generate(prompts, max_new_tokens=max_new_tokens, sampling=law)
        time_s += out.stats.time_s
        for i, request in zip(those, out.requests, strict=True):
            requests[i].append(request)
    return Answers(requests, time_s)


def _messages(turns: Sequence[str], answers: Sequence[str]) -> list[dict[str, str]]:
    """Return chat messages: the user's turns and the answers between them."""
    messages = []
    for i, text in enumerate(turns):
        messages.append({"role": "user", "content": text})
        if i < len(answers):
            messages.append({"role": "assistant", "content": answers[i]})
    return messages
