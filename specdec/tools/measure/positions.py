"""Acceptance by where a round begins: by position in the answer, and by length of the context before it."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from specdec.core.metrics import acceptance_length
from specdec.core.outputs import RequestOutput
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
    first = len(request.tokens) - sum(request.round_lens)  # 1: the prefill's own token
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
