"""The engine: one target, one draft worker, and the round they play.

    step():  admit → prefill → draft → verify → accept → commit → extend → read the results

The engine owns all device state, the scheduler owns requests; the engine knows token ids only. Nothing between the
start of a round and its end looks at the device from the host; results come back in one pinned copy, on CUDA a round
late.
"""

import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.backends import AttentionBackend, ForwardContext
from specdec.batch import AttentionMetadata, ForwardMode, ints_to_device
from specdec.config import EngineConfig
from specdec.draft.worker import STREAM_PREFILL, STREAM_VERIFY, Draft, DraftWorker, PrefillChunk, RoundBatch
from specdec.graphs.counters import Counters
from specdec.kv_cache import KVPool, SlotTables
from specdec.models.hf import HFTarget
from specdec.round_ops import RoundOps
from specdec.sampling import SamplingBatch, SamplingParams, process_logits
from specdec.scheduler import Request, Scheduler
from specdec.tree import Tree, chain
from specdec.verify import Verdict, trim

MAX_STOP_IDS = 16
PREFIX_STEP = 32  # host bounds of L are rounded up to this, so that shapes seldom change


@dataclass
class EngineState:
    """Per-row device state, all [max_batch] unless said; the round reads and writes it, admission fills it.

    seq_lens: L; roots: the token at L; remaining: tokens the request may still emit, 0 once it is over;
    stop_ids [max_batch, MAX_STOP_IDS], -1 padded; sampling: parameters by row.
    """

    seq_lens: torch.Tensor
    roots: torch.Tensor
    remaining: torch.Tensor
    stop_ids: torch.Tensor
    sampling: SamplingBatch

    @classmethod
    def empty(cls, max_batch: int, device: torch.device) -> "EngineState":
        """All rows idle."""

        def zeros() -> torch.Tensor:
            return torch.zeros(max_batch, dtype=torch.int64, device=device)

        stop_ids = torch.full((max_batch, MAX_STOP_IDS), -1, dtype=torch.int64, device=device)
        sampling = SamplingBatch.stack([SamplingParams()] * max_batch, device)
        return cls(zeros(), zeros(), zeros(), stop_ids, sampling)


@dataclass(frozen=True)
class Results:
    """What one launch emitted, still on its way to the host: tokens [n, W], accept_lens [n], invalid [n]."""

    requests: tuple[Request, ...]
    host: torch.Tensor  # [n, W+2] int64: tokens, accept_lens, invalid
    ready: torch.cuda.Event | None
    is_round: bool


class Core:
    """The stepping machine behind `Engine`: state, pools and the round."""

    def __init__(
        self,
        target: HFTarget,
        config: EngineConfig,
        worker: DraftWorker,
        backend: AttentionBackend,
        ops: RoundOps,
        slot_tables: SlotTables,
        counters: Counters,
    ):
        device = target.device
        self.target = target
        self.config = config
        self.worker = worker
        self.counters = counters
        self.slot_tables = slot_tables
        self.scheduler = Scheduler(slot_tables, config.tail_reserve)
        self.state = EngineState.empty(config.max_batch, device)
        self.device = device
        layers, sinks = target.spec.layers, target.spec.sinks
        pool = KVPool([s.shape for s in layers], slot_tables.total_slots, target.dtype, device)
        slot_tables.check_pool(pool)
        self.context = ForwardContext(backend, pool, layers, sinks, counters.count_eager)
        self.ops = ops
        self._move_path = self.ops.committer(pool)
        target.aux_layers = worker.aux_layers
        self._pending: deque[Results] = deque()
        self._lag = 1 if device.type == "cuda" else 0  # launches the host may run ahead of its reading

    @torch.inference_mode()
    def step(self) -> None:
        """Launch a prefill or a round, then hand out the results of the launches that have come back."""
        self.scheduler.admit()
        pieces = self.scheduler.next_prefill(self.config.max_prefill_tokens)
        decoding = self.scheduler.decoding()
        if pieces:
            self._prefill(pieces)
        elif decoding:
            self._round(decoding)
        allowed = self._lag if (pieces or decoding) else 0
        while len(self._pending) > allowed:
            self._read(self._pending.popleft())

    def abandon(self, requests: Sequence[Request]) -> None:
        """Forget `requests`, whatever they are at; their rows and slots return."""
        for request in requests:
            self.scheduler.release(request)

    # -- prefill ----------------------------------------------------------------------------------------------------

    def _prefill(self, pieces: list[tuple[Request, int]]) -> None:
        """One packed prefill forward over prompt pieces, then the first token of every prompt that is complete."""
        starts = [r.num_prefilled for r, _ in pieces]
        lens = [n for _, n in pieces]
        ids = [r.prompt_ids[s : s + n] for (r, n), s in zip(pieces, starts, strict=True)]
        rows = self._tensor([r.row for r, _ in pieces])
        for (request, n), start in zip(pieces, starts, strict=True):
            if start == 0:
                self._fill_row(request)
            request.num_prefilled += n
        last_rows = self._tensor(lens).cumsum(0) - 1
        metadata = self.context.backend.metadata.prefill(self.slot_tables.table[rows], starts, lens)
        packed_ids = self._tensor([t for piece in ids for t in piece])
        output = self.target.forward(self.context, metadata, packed_ids, last_rows)
        done = [i for i, (r, _) in enumerate(pieces) if r.is_prefilled]
        next_ids = self._tensor(_shifted(pieces, starts))
        if done:
            finished = [pieces[i][0] for i in done]
            first = self._first_tokens(finished, output.logits[self._tensor(done)])
            next_ids[last_rows[self._tensor(done)]] = first
        self.worker.prefill(PrefillChunk(metadata, rows, next_ids, last_rows), output.aux)

    def _fill_row(self, request: Request) -> None:
        """Write a new request's constants into its row."""
        row, state = request.row, self.state
        stops = self._tensor([*request.stop_ids, *[-1] * (MAX_STOP_IDS - len(request.stop_ids))])
        state.stop_ids[row] = stops
        state.seq_lens[row] = len(request.prompt_ids)
        state.remaining[row] = request.max_new_tokens
        one = SamplingBatch.stack([request.sampling], self.device)
        for field in ("temperature", "top_k", "top_p", "min_p", "seeds"):
            getattr(state.sampling, field)[row] = getattr(one, field)[0]
        request.max_len_bound = len(request.prompt_ids)

    def _first_tokens(self, requests: list[Request], logits: torch.Tensor) -> torch.Tensor:
        """Choose the token after each prompt from logits [n, V]; it becomes the row's first root. Returns it [n]."""
        batch = self._batch(requests)
        root_only = chain(batch.roots, batch.roots.new_empty(len(requests), 0))
        verdict = self._decide(batch, Draft(root_only, None), logits.unsqueeze(1), STREAM_PREFILL)
        self._advance(batch, verdict, moves=0)
        self._send(requests, verdict, is_round=False)
        return verdict.tokens[:, 0].clamp(min=0)

    # -- the round --------------------------------------------------------------------------------------------------

    def _round(self, requests: list[Request]) -> None:
        """draft → verify → accept → commit → extend for all `requests`, without looking at the device."""
        batch = self._batch(requests)
        draft = self.worker.draft(batch)
        output = self.target.forward(
            self.context, self._verify_metadata(batch, draft.tree), draft.tree.tokens.view(-1), None
        )
        shape = draft.tree.tokens.shape
        verdict = self._decide(batch, draft, output.logits.view(*shape, -1), STREAM_VERIFY)
        self._commit(batch, verdict)
        aux = None if output.aux is None else output.aux.view(*shape, -1)
        self.worker.extend(batch, verdict, aux)
        self._advance(batch, verdict, moves=1)
        self._send(requests, verdict, is_round=True)

    def _batch(self, requests: list[Request]) -> RoundBatch:
        """Gather what a round needs to know of `requests`."""
        rows = self._tensor([r.row for r in requests])
        longest = max(r.max_len_bound for r in requests)
        is_greedy = all(r.sampling.is_greedy for r in requests)
        has_filters = any(r.sampling.has_filters for r in requests)
        bound = -(-longest // PREFIX_STEP) * PREFIX_STEP
        return RoundBatch(
            rows=rows,
            slot_tables=self.slot_tables.table[rows],
            seq_lens=self.state.seq_lens[rows],
            roots=self.state.roots[rows],
            sampling=None if is_greedy else self.state.sampling.select(rows, has_filters),
            max_prefix=min(bound, self.slot_tables.table.shape[1]),
        )

    def _verify_metadata(self, batch: RoundBatch, tree: Tree) -> AttentionMetadata:
        """D queries a request: a chain is causal, a tree sees its ancestors."""
        is_chain = self.config.topk == 1
        return self.context.backend.metadata.uniform(
            ForwardMode.DECODE if tree.tokens.shape[1] == 1 else ForwardMode.TARGET_VERIFY,
            batch.slot_tables,
            batch.seq_lens,
            q_len=tree.tokens.shape[1],
            max_prefix=batch.max_prefix,
            depths=None if is_chain else tree.depths,
            tail_depths=None if is_chain else tree.depths,
            ancestor_bits=None if is_chain else tree.ancestor_bits,
        )

    def _decide(self, batch: RoundBatch, draft: Draft, logits: torch.Tensor, stream: int) -> Verdict:
        """Which nodes the target accepts (logits [bs, D, V]), trimmed at stop ids and length."""
        num_nodes = logits.shape[1]
        num_steps = min(self.config.num_steps, num_nodes - 1)
        if batch.sampling is None:
            verdict = self.ops.verify_greedy(logits, draft.tree, num_steps)
        else:
            probs = process_logits(logits, batch.sampling)
            uniforms = self.ops.uniforms(batch.sampling.seeds, batch.seq_lens, stream, num_nodes)
            if draft.probs is not None:
                verdict = self.ops.verify_chain(probs, draft.probs, draft.tree, uniforms)
            else:
                verdict = self.ops.verify_tree(probs, draft.tree, num_steps, uniforms)
        verdict, finished = trim(verdict, self.state.stop_ids[batch.rows], self.state.remaining[batch.rows])
        left = self.state.remaining[batch.rows] - verdict.accept_lens
        self.state.remaining[batch.rows] = left.masked_fill(finished, 0)
        return verdict

    def _commit(self, batch: RoundBatch, verdict: Verdict) -> None:
        """Move the accepted path's target KV to L..; a chain's lies there already. Rejected slots are simply past L."""
        if self.config.topk > 1:
            self._move_path(batch.slot_tables, batch.seq_lens, verdict.accept_index)

    def _advance(self, batch: RoundBatch, verdict: Verdict, moves: int) -> None:
        """L += accept_lens (the prefill's token is not in the cache yet: `moves` 0); the last token is the new root."""
        last = (verdict.accept_lens - 1).clamp(min=0).unsqueeze(1)
        self.state.roots[batch.rows] = verdict.tokens.gather(1, last).squeeze(1).clamp(min=0)
        self.state.seq_lens[batch.rows] = batch.seq_lens + moves * verdict.accept_lens

    # -- results ----------------------------------------------------------------------------------------------------

    def _send(self, requests: list[Request], verdict: Verdict, is_round: bool) -> None:
        """Start the copy of what was emitted to the host."""
        packed = torch.cat([verdict.tokens, verdict.accept_lens.unsqueeze(1), verdict.invalid.unsqueeze(1).long()], 1)
        ready = None
        if self.device.type == "cuda":
            host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            host.copy_(packed, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
        else:
            host = packed
        for request in requests:
            request.max_len_bound += self.config.num_steps + 1 if is_round else 0
        self._pending.append(Results(tuple(requests), host, ready, is_round))

    def _read(self, results: Results) -> None:
        """Hand arrived tokens to their requests; finished ones give back rows and slots."""
        if results.ready is not None:
            results.ready.synchronize()  # the copy of an earlier launch; on CUDA the next one is already running
        for request, (*tokens, accept_len, invalid) in zip(results.requests, results.host.tolist(), strict=True):
            if results.is_round:
                request.max_len_bound -= self.config.num_steps + 1 - accept_len
            if not request.is_running or accept_len == 0:
                continue
            if invalid:
                message = f"a request ended: the target's logits are not finite after {len(request.tokens)} tokens"
                warnings.warn(message, stacklevel=4)
                request.finish_reason = "error"
            else:
                num_before = len(request.tokens)
                request.take(tokens[:accept_len])
                if results.is_round:
                    request.acceptance.add(len(request.tokens) - num_before)
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
