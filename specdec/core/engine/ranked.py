"""The core of one rank of a tensor-parallel engine: ranks make the same calls, and errors name a rank that fails."""

from collections.abc import Sequence

from specdec.core.engine.calls import Waits
from specdec.core.engine.core import Core
from specdec.core.engine.ranks import ATTACH_TIMEOUT_S, Ranks
from specdec.core.engine.request import Request
from specdec.core.round.parts import Parts
from specdec.graphs.runner import GraphRunner


class RankedCore(Core):
    """A `Core` whose ranks take the same steps; see `Ranks` for how they communicate."""

    def __init__(self, parts: Parts, ranks: Ranks):
        self._ranks = ranks
        self._is_to_forget = False
        super().__init__(parts)
        self.mailbox.wait = lambda event: ranks.wait(event.query, "a round")
        agree_on_graphs(ranks, self.runners)

    def submit(self, requests: Sequence[Request], steps_next: bool = False, looks: bool = True) -> None:
        """As `Core.submit`, if all ranks submit the same; seeds are rank 0's. ValueError if not."""
        if any(r.deadline is not None for r in requests):
            raise ValueError("deadline: the clocks of ranks differ; leave it out with a sharded model")
        self._is_to_forget |= self.models.has_changed()  # until the others know: ranks may not agree this time
        own = [[r.sampling.seed for r in requests], self._is_to_forget]
        given = self._ranks.same("generate()", [told_of(r) for r in requests], own)
        self._is_to_forget = False
        for request, seed in zip(requests, given[0][0], strict=True):
            request.sampling = request.sampling.with_seed(seed)
        if any(is_to_forget for _, is_to_forget in given):
            self.forget_prefixes()
        with self._ranks.reporting():
            super().submit(requests, steps_next, looks)

    def agree(self, what: str, value: object) -> None:
        """As `Core.agree`: all ranks meet, and raise ValueError where they differ."""
        self._ranks.same(what, value)

    def clear_prefixes(self) -> None:
        """As `Core.clear_prefixes`, on all ranks at their next call: what one has kept, all have."""
        self._is_to_forget = True

    def step(self, caller: Waits | None = None) -> None:
        """As `Core.step`; RankError if another rank fails in it, or is gone."""
        with self._ranks.reporting():
            super().step(caller)

    def close(self) -> None:
        """As `Core.close`; the others are not waited for."""
        self._ranks.close()
        super().close()


def told_of(request: Request) -> tuple[object, ...]:
    """Return all facts of a request that affect launches, except its seed."""
    r = request
    stops = r.stop_ids, sorted(r.eos_ids), r.string_ids, r.detokenizer.stop_strings
    return r.prompt_ids, r.max_new_tokens, r.sampling.with_seed(0), stops, r.priority


def agree_on_graphs(ranks: Ranks, runners: Sequence[GraphRunner]) -> None:
    """Keep the graphs that all ranks have captured: a batch must replay on all of them, or on none."""
    captured = {runner.name: sorted(map(str, runner.captured)) for runner in runners}
    everywhere = ranks.meet("attach(): graphs", captured, ATTACH_TIMEOUT_S)
    for runner in runners:
        for key in list(runner.captured):
            missing = [rank for rank, theirs in enumerate(everywhere) if str(key) not in theirs[runner.name]]
            if missing:
                del runner.captured[key]
                runner.fail(key, f"rank {', '.join(map(str, missing))} could not capture it")
