"""The engine's host side: who prefills, who plays a round, and what came back.

    step():  admit → prefill or round (draft → verify → accept → commit → extend) → hand out what has arrived

The scheduler owns requests, `Round` the device program, `RoundGraphs` its graphs; the engine knows token ids only. On
CUDA the host runs one launch ahead: it launches round r+1 before it reads what round r emitted.
"""

import time
import warnings
from collections.abc import Sequence
from itertools import accumulate

import torch

from specdec.backends import AttentionBackend, ForwardContext
from specdec.batch import ints_to_device, on_device
from specdec.config import EngineConfig
from specdec.draft.worker import DraftWorker, PrefillChunk
from specdec.graphs import Counters, GraphPool
from specdec.kv_cache import KVPool, SlotTables
from specdec.models.compiled import compile_layers
from specdec.models.hf import HFTarget
from specdec.prefill_graphs import PrefillGraphs, resolve_prefill_mode
from specdec.round import Round
from specdec.round_graphs import RoundGraphs
from specdec.round_ops import RoundOps
from specdec.sampling import SamplingKind
from specdec.scheduler import Request, Scheduler
from specdec.state import EngineState, Mailbox, Results

PREFIX_STEP = 32  # host bounds of L are rounded up to this, so that shapes of eager rounds seldom change


class Core:
    """The stepping machine behind `Engine`."""

    def __init__(
        self,
        target: HFTarget,
        config: EngineConfig,
        worker: DraftWorker,
        backend: AttentionBackend,
        ops: RoundOps,
        slot_tables: SlotTables,
        counters: Counters,
        *,
        may_merge: bool,
    ):
        device = target.device
        self.target = target
        self.config = config
        self.counters = counters
        self.slot_tables = slot_tables
        self.scheduler = Scheduler(slot_tables, config.tail_reserve)
        self.state = EngineState.empty(config.num_rows, config.table_width, target.spec.vocab_size, device)
        self.device = device
        layers, sinks = target.spec.layers, target.spec.sinks
        pool = KVPool([s.shape for s in layers], slot_tables.total_slots, target.dtype, device)
        slot_tables.check_pool(pool)
        self.context = ForwardContext(backend, pool, layers, sinks, counters.count_forward)
        self.round = Round(target, config, worker, self.context, ops, slot_tables.table, self.state)
        graph_pool = GraphPool(device) if device.type == "cuda" else None
        start = time.perf_counter()
        mode = compile_layers(target, config, resolve_prefill_mode(config, target, worker.prefill_syncs))
        self.compile_seconds = time.perf_counter() - start if target.compiled else 0.0
        self.prefill = PrefillGraphs(
            target, worker, self.context, config, counters, slot_tables.table, graph_pool, mode
        )
        self.graphs = RoundGraphs(self.round, config, counters, graph_pool, may_merge=may_merge)
        self._mailbox = Mailbox(device, most=config.max_batch * (config.num_steps + 4))
        self._rows: tuple[tuple[int, ...], torch.Tensor] = ((), torch.empty(0))
        self._lag = 1 if device.type == "cuda" else 0  # launches the host may run ahead of its reading

    @torch.inference_mode()
    def step(self) -> None:
        """Launch a prefill or a round, then hand out the results of the launches that have come back.

        What goes wrong comes out, and ends every running request: a launch that broke off has left their state half
        written. The engine can serve the next ones.
        """
        with on_device(self.device):
            try:
                self._step()
            except BaseException as error:
                self._fail(error)
                raise

    def _step(self) -> None:
        self.scheduler.admit()
        pieces = self.scheduler.next_prefill(self.config.max_prefill_tokens)
        decoding = self.scheduler.decoding()
        has_posted = False
        if pieces:
            has_posted = self._prefill(pieces)
        elif decoding:
            self._round(decoding)
            has_posted = True
        for results, rows in self._mailbox.take(self._lag if has_posted else 0):
            self._hand_out(results, rows)

    @torch.inference_mode()
    def abandon(self, requests: Sequence[Request]) -> None:
        """Forget `requests`, whatever they are at; their rows and slots return."""
        with on_device(self.device):
            for request in requests:
                self.scheduler.release(request)

    def _fail(self, error: BaseException) -> None:
        """End all running requests with `error`, and forget what is on its way to them."""
        for request in list(self.scheduler.running):
            request.finish_reason, request.failure = request.finish_reason or "error", error
            self.scheduler.release(request)
        self._mailbox.clear()

    def check_addresses(self) -> None:
        """GraphError if a tensor that graphs read has been replaced or moved."""
        self.target.check_compiled()
        self.prefill.check_addresses()
        self.graphs.check_addresses()

    def close(self) -> None:
        """Take our marks off the model, and wait for what is on its way: one round may be."""
        try:
            self.target.detach()
        finally:
            self.round.worker.close()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _prefill(self, pieces: list[tuple[Request, int]]) -> bool:
        """One packed prefill forward over prompt pieces, then the first token of every prompt that is complete.

        Returns whether there are such tokens.
        """
        starts = [r.num_prefilled for r, _ in pieces]
        for request, n in pieces:
            if request.num_prefilled == 0:
                assert request.row is not None
                self.state.fill(request.row, request)
                request.max_len_bound = len(request.prompt_ids)
            request.num_prefilled += n
        chunk, ids = self._chunk(pieces, starts)
        hidden, aux = self.prefill.target(chunk.metadata, ids)
        done = [i for i, (r, _) in enumerate(pieces) if r.is_prefilled]
        if done:
            places = slice(None) if len(done) == len(pieces) else self._tensor(done)
            rows, last_rows = chunk.rows[places], chunk.last_rows[places]
            finished = [pieces[i][0] for i in done]
            kind = SamplingKind.of(r.sampling for r in finished)
            packed = self.graphs.first_tokens(kind, rows, hidden[last_rows])
            self._mailbox.post(finished, packed, is_round=False)
            chunk.next_ids[last_rows] = packed[:, 0].clamp(min=0)
        worker = self.round.worker
        states = None
        if worker.context is not None:
            states = self.prefill.draft(chunk.metadata, chunk.next_ids if worker.id_shift else ids, aux)
        worker.finish_prefill(chunk, states, self.prefill.draft)
        if done and worker.has_begin:
            self.graphs.begin(rows, self._len_bound(finished))
        return bool(done)

    def _chunk(self, pieces: list[tuple[Request, int]], starts: list[int]) -> tuple[PrefillChunk, torch.Tensor]:
        """The packed chunk that `pieces` make from `starts` on, and its ids [T]; one copy brings all of it over."""
        lens = [n for _, n in pieces]
        ids = [t for (r, n), s in zip(pieces, starts, strict=True) for t in r.prompt_ids[s : s + n]]
        last_rows = [end - 1 for end in accumulate(lens)]
        lists = ([r.row for r, _ in pieces], last_rows, starts, lens, ids, _shifted(pieces, starts))
        packed = self._tensor([value for values in lists for value in values])
        rows, last, starts_there, lens_there, ids_there, next_ids = packed.split([len(values) for values in lists])
        table, there = self.slot_tables.table, (starts_there, lens_there)
        metadata = self.context.backend.metadata.prefill(table, rows, starts, lens, there)
        return PrefillChunk(metadata, rows, next_ids, last), ids_there

    def _round(self, requests: list[Request]) -> None:
        """One round of all `requests`; the host learns a launch later what it emitted."""
        kind = SamplingKind.of(r.sampling for r in requests)
        packed = self.graphs.play(kind, self._rows_of(requests), self._len_bound(requests))
        for request in requests:
            request.max_len_bound += self.config.num_steps + 1
        self._mailbox.post(requests, packed, is_round=True)

    def _len_bound(self, requests: Sequence[Request]) -> int:
        """A host bound of L of all `requests`."""
        longest = max(r.max_len_bound for r in requests)
        return min(-(-longest // PREFIX_STEP) * PREFIX_STEP, self.slot_tables.table.shape[1])

    def _rows_of(self, requests: list[Request]) -> torch.Tensor:
        """Rows of `requests` [n] int64 on the device, copied only where the batch has changed."""
        numbers = tuple(r.row for r in requests if r.row is not None)
        if numbers != self._rows[0]:
            self._rows = (numbers, self._tensor(numbers))
        return self._rows[1]

    def _hand_out(self, results: Results, rows: list[list[int]]) -> None:
        """Hand arrived tokens to their requests; finished ones give back rows and slots."""
        for request, (*tokens, accept_len, invalid, finished) in zip(results.requests, rows, strict=True):
            if results.is_round:
                request.max_len_bound -= self.config.num_steps + 1 - accept_len
            if not request.is_running:
                continue  # a round that was launched before the host knew that the request is over
            assert accept_len, "a running request emitted nothing: host and device disagree on who runs"
            if invalid:
                request.finish_reason = "error"
                message = f"a request ended: the target's logits are not finite after {len(request.tokens)} tokens"
                warnings.warn(message, stacklevel=5)
            else:
                num_before = len(request.tokens)
                request.take(tokens[:accept_len])
                if results.is_round:
                    request.acceptance.add(len(request.tokens) - num_before)
                    request.round_lens.append(len(request.tokens) - num_before)
            # Stop strings, which only text shows, are the one end that the device does not see.
            is_over = request.finish_reason not in (None, "stop_string")
            assert is_over == bool(finished) or request.finish_reason == "stop_string", "host and device disagree"
            if request.finish_reason:
                self.scheduler.release(request)

    def _tensor(self, values: Sequence[int | None]) -> torch.Tensor:
        return ints_to_device(values, self.device)


def _shifted(pieces: list[tuple[Request, int]], starts: list[int]) -> list[int]:
    """Ids one to the left: the token after each prefilled one, the next chunk's first included; unknown ones are 0."""
    ids: list[int] = []
    for (request, n), start in zip(pieces, starts, strict=True):
        following = request.prompt_ids[start + 1 : start + n + 1]
        ids += following + [0] * (n - len(following))
    return ids
