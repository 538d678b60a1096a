"""Launches the prefill or round that the scheduler has chosen, and mails its results; knows no callers."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from specdec.core.draft.worker import PrefillChunk
from specdec.core.engine.mailbox import Mailbox
from specdec.core.engine.packing import (
    copy_to,
    pack_chunk,
    pack_images,
    pack_piece,
    pack_requests,
    pack_rows,
    rewrite_requests,
    rewrite_row,
    write_rest,
    write_rows,
)
from specdec.core.engine.request import Request
from specdec.core.engine.scheduler import Scheduler
from specdec.core.engine.tiers import Played, Tiers
from specdec.core.functional.results import first_tokens
from specdec.core.prefill.graphs import PrefillGraphs
from specdec.core.prefill.whole import NO_NUMBERS, ROOM
from specdec.core.round.graphs import RoundGraphs
from specdec.core.round.parts import Parts
from specdec.core.round.program import Round
from specdec.core.sampling_params import SamplingKind
from specdec.graphs.building import rehearse
from specdec.graphs.captures import collection_paused
from specdec.graphs.pool import GraphPool

PREFIX_STEP = 32  # host bounds of L are rounded up to this, so that shapes of eager rounds seldom change


class StepBatch(NamedTuple):
    """Requests of a round, their rows [n] int64 on the device, and the kind of sampling that they need."""

    requests: list[Request]
    rows: torch.Tensor
    kind: SamplingKind


def kind_of(requests: Sequence[Request]) -> SamplingKind:
    """Return the least kind of sampling that serves all of `requests`."""
    kind = SamplingKind.of(r.sampling for r in requests)
    return kind.constrained if any(r.constraint is not None for r in requests) else kind


class Launcher:
    """Launches prefills and rounds of running requests from their graphs, or eagerly.

    is_launching: the state of running requests may be half written. tiers: picks the shape of each round.
    """

    def __init__(self, parts: Parts, scheduler: Scheduler, mailbox: Mailbox):
        self._scheduler = scheduler
        self._mailbox = mailbox
        self._state = parts.state
        self._slot_tables = parts.tables
        self._round_width = parts.config.num_steps + 1  # tokens that a round emits, at most
        contexts = [c for c in (parts.context, parts.worker.context) if c is not None]
        self._states = [c.state_pool for c in contexts if c.state_pool is not None]
        self._first_kept = parts.config.num_rows  # the row of the first snapshot
        self._context = parts.context
        self._device = parts.target.device
        config = parts.config
        reports_logits = config.logprobs is not None or config.digests  # those under masks
        self._may_trust = not self._states and not reports_logits and config.synthetic_acceptance is None
        self.program = Round(parts)
        self.feed = parts.feed

        def launch_outside_graphs() -> None:
            rewrite_row(parts.state, parts.tables, parts.ops, parts.config.dummy_row)
            mailbox.warm_up()

        def prepare() -> None:
            launch_outside_graphs()
            self.prefills.plan_warm_ups()

        pool = GraphPool(self._device) if self._device.type == "cuda" else None
        with collection_paused():
            parts.models.compile()
            is_checked = False
            while not is_checked:  # layers that compute wrong results are replaced
                self.prefills = PrefillGraphs(parts, self.program, pool, parts.models.prefill_mode)
                self.rounds = RoundGraphs(self.program, parts, pool)
                runners = [*self.prefills.runners, *self.rounds.runners.values()]
                with torch.inference_mode():
                    rehearse(runners, parts.compiling_kernels(), prepare)
                is_checked = parts.models.check()
            with torch.inference_mode():
                launch_outside_graphs()
                self.prefills.build()
                self.rounds.build()
        catch_up = self.program.catch_up
        self.tiers = Tiers(parts.config.shapes, None if catch_up is None else catch_up.features is not None)
        self._batch = StepBatch([], torch.empty(0, device=self._device), SamplingKind.GREEDY)
        self.is_launching = False
        self._packed = NO_NUMBERS  # see `fill`
        self._write_rows = partial(write_rows, parts.state, parts.tables, parts.ops)

    @property
    def tokens_in_flight(self) -> int:
        """Return the most tokens of a request that launches in flight may have emitted."""
        return self._mailbox.num_pending * self._round_width

    def fill(self) -> None:
        """Pack constants and slot tables of newly admitted requests, for a prefill or `admit`, and write the state that
        only some of them need."""
        admitted = self._scheduler.admitted
        try:
            constants = pack_requests(admitted)
        except Exception as error:  # admission checks arguments, so there should be none; the others go on
            self._scheduler.fail(list(admitted), error)
            return
        self._packed = pack_rows(self._state, self._slot_tables, admitted, constants)
        write_rest(self._state, admitted, self.program.worker.reads_history, self._context.rope_deltas)
        self._copy_states(
            {r.row: self._first_kept + r.state for r in admitted if r.row is not None and r.state is not None}
        )
        self.tiers.note_admission()

    def admit(self) -> None:
        """Write the state that `fill` has packed and no prefill has written yet, in a copy of its own."""
        if self._scheduler.admitted:
            self._write_rows(copy_to(self._device, self._packed))
            self._scheduler.admitted = []

    def rewind(self, requests: Sequence[Request]) -> None:
        """Take `requests` back to the text that the host knows. K/V and history stay valid up to there, but not the
        draft's states, so acceptance may be lower for a round."""
        for request in requests:
            request.rewind()
        rewrite_requests(self._state, self._slot_tables, self.program.ops, requests)
        assert self.feed is not None
        self.feed.num_undone += len(requests)

    def prefill(self, pieces: list[tuple[Request, int]]) -> bool:
        """Prefill prompt pieces, target and draft, and sample the first token of every complete prompt.

        Preempted requests, whose text goes on, need none. Returns whether first tokens were sampled.
        """
        done = [i for i, (r, n) in enumerate(pieces) if r.num_prefilled + n == r.num_to_prefill]
        finished = [pieces[i][0] for i in done]
        new = [r for r in finished if not r.tokens]
        self.tiers.disturb()
        kind = kind_of(new) if new else SamplingKind.GREEDY
        if new == finished and self._takes_whole(pieces, kind):
            self._prefill_whole(pieces, finished, kind)
        else:
            self.admit()
            self._prefill_in_parts(pieces, done, kind)
        self.is_launching = False
        for request in finished:
            self._scheduler.sharing.keep(request)
        self._keep_states([r for r, _ in pieces])
        return bool(new)

    def _keep_states(self, requests: Sequence[Request]) -> None:
        """Take snapshots of recurrent layers where prefills of `requests` have come to."""
        kept: dict[int, int] = {}
        for request in requests:
            place = self._scheduler.sharing.keep_state(request)
            if place is not None and request.row is not None:
                kept[self._first_kept + place] = request.row  # of two snapshots in one place, the second one stays
        self._copy_states(kept)

    def _copy_states(self, source_of: Mapping[int, int]) -> None:
        """Copy states of recurrent layers between rows and snapshots. source_of: by target."""
        if source_of:
            target, source = copy_to(self._device, np.array([[*source_of], [*source_of.values()]], dtype=np.int64))
            for pool in self._states:
                pool.copy(source, target)

    def round(self, requests: list[Request]) -> None:
        """Launch one round of all `requests`; the host reads its tokens one launch later."""
        batch = self.batch_of(requests)
        bound = self._len_bound(requests)
        self.is_launching = True
        played = self.tiers.begin(requests)
        kind, is_trusted = batch.kind, self._trusts(batch)
        if is_trusted:
            kind = SamplingKind.GREEDY
        if self.feed is not None:
            self.feed.num_trusted += is_trusted
        if kind.is_constrained:
            assert self.feed is not None
            self.feed.begin(requests, partial(self.post, requests, played=played))
        for _ in range(played.catch_ups):
            self.rounds.catch_up(batch.rows, bound)
        packed = self.rounds.play(kind, batch.rows, bound, self.tiers.shapes[played.tier])
        if not kind.is_constrained:  # else it is posted within the round
            self.post(requests, packed, played, is_masked=not is_trusted)
        self.is_launching = False

    def _trusts(self, batch: StepBatch) -> bool:
        """Return whether a round needs no masks: `Delivery` checks what it emits, and where a token is forbidden the
        request is taken back, see `rewind`."""
        if not self._may_trust or batch.kind is not SamplingKind.CONSTRAINED_GREEDY:
            return False
        return all(r.constraint is None or r.constraint.is_trusted for r in batch.requests)

    def batch_of(self, requests: list[Request]) -> StepBatch:
        """Return the batch of a round; rows are copied to the device only if they differ from the last round's."""
        if requests != self._batch.requests:
            rows = self.rounds.rows[: len(requests)]
            rows.copy_(copy_to(self._device, np.array([r.row for r in requests], dtype=np.int64)))
            self._batch = StepBatch(requests, rows, kind_of(requests))
        return self._batch

    def forget_rows(self) -> None:
        """Copy the rows of the next round even if its requests are those of the last: one may have changed rows."""
        self._batch = self._batch._replace(requests=[])

    def post(
        self, requests: list[Request], packed: torch.Tensor, played: Played | None = None, is_masked: bool = True
    ) -> None:
        """Mail results to the host, see `Results`; every request in them has got at least one token, or ends."""
        self._mailbox.post(requests, packed, played, is_masked)
        for request in requests:
            request.num_certain += 1

    def _begin(self, pieces: list[tuple[Request, int]]) -> None:
        """Record that the state of running requests may be half written from here on."""
        self.is_launching = True
        for request, n in pieces:
            request.num_prefilled += n

    def _takes_whole(self, pieces: list[tuple[Request, int]], kind: SamplingKind) -> bool:
        """Return whether one graph prefills target and draft and draws first tokens."""
        if self.prefills.whole is None or pieces[0][0].embedded is not None:
            return False
        starts, num_tokens = [r.num_prefilled for r, _ in pieces], sum(n for _, n in pieces)
        return self.prefills.whole.takes(kind, starts, num_tokens)

    def _prefill_whole(self, pieces: list[tuple[Request, int]], finished: list[Request], kind: SamplingKind) -> None:
        assert self.prefills.whole is not None
        assert finished == [r for r, _ in pieces[: len(finished)]], "only the last piece can be a part of its prompt"
        packed = [pack_piece(r, n) for r, n in pieces]
        if self._packed.size > ROOM:
            self.admit()
        self._begin(pieces)
        beside = (self._packed, self._write_rows) if self._scheduler.admitted else None
        post = (lambda lines: self.post(finished, lines[: len(finished)])) if finished else None
        self.prefills.whole(kind, packed, post, beside)
        self._scheduler.admitted = []

    def _prefill_in_parts(self, pieces: list[tuple[Request, int]], done: list[int], kind: SamplingKind) -> None:
        """Prefill the target, draw first tokens of the pieces `done`, prefill the draft: a runner each."""
        builder, worker = self._context.backend.metadata, self.program.worker
        chunk = pack_chunk(pieces, self._slot_tables.table, builder, self.prefills.placement)
        embedded = pack_images(pieces, chunk, self.program.target.embed_tokens)
        self._begin(pieces)
        if worker.reads_history:
            self.program.take_prompts(chunk)
        hidden, aux = self.prefills.target(chunk.metadata, chunk.ids, embedded)
        if new := [i for i in done if not pieces[i][0].tokens]:
            self._draw_first_tokens(pieces, new, kind, chunk, hidden)
        states = worker.prefill(chunk, aux, self.prefills.draft)
        if done and worker.has_begin:
            places, bound = self._places(done, len(pieces)), self._len_bound([pieces[i][0] for i in done])
            self.rounds.begin(chunk.rows[places], None if states is None else states[places], bound)

    def _draw_first_tokens(
        self,
        pieces: list[tuple[Request, int]],
        new: list[int],
        kind: SamplingKind,
        chunk: PrefillChunk,
        hidden: torch.Tensor,
    ) -> None:
        """Draw the first token of the pieces `new` from the target's states `hidden` [T, h]; the draft reads them."""
        places = self._places(new, len(pieces))
        if kind.is_constrained:
            assert self.feed is not None
            self.feed.write_first([pieces[i][0] for i in new])
        rows, last_rows = chunk.rows[places], chunk.last_rows[places]
        packed = self.rounds.first_tokens(kind, rows, hidden.index_select(0, last_rows))
        self.post([pieces[i][0] for i in new], packed)
        chunk.next_ids.index_copy_(0, last_rows, first_tokens(packed))

    def _places(self, chosen: list[int], count: int) -> slice | torch.Tensor:
        """Return the index of those `chosen` of `count` requests."""
        return slice(None) if len(chosen) == count else copy_to(self._device, np.array(chosen))

    def _len_bound(self, requests: list[Request]) -> int:
        """Return a host bound of L of all `requests`, what launches on their way may have emitted included."""
        longest = max([len(r.prompt_ids) + len(r.tokens) for r in requests]) - 1 + self.tokens_in_flight
        return min(-(-longest // PREFIX_STEP) * PREFIX_STEP, self._slot_tables.table.shape[1])
