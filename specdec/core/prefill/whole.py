"""A prefill as one graph: the target's layers with attention inside, first tokens, the draft's prefill and its begin.

The host passes only each request's number of tokens; the device computes placement and attention plans from these,
within fixed bounds: a graph serves up to T tokens of up to MOST_REQUESTS requests. So a prompt costs a few launches,
even on a slow host: a graph of many layers is divided, so that the device runs a part while the host launches the next.
With a draft it pauses after first tokens: they are copied to the host while the draft is prefilled. Requests whose
prompt continues in a later chunk are replaced by the dummy row where first tokens are drawn.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
import torch

from specdec.backends.op import forward_context
from specdec.core.batch import AttentionMetadata, ForwardMode
from specdec.core.config import EngineConfig
from specdec.core.draft.worker import PrefillChunk
from specdec.core.functional.results import first_tokens
from specdec.core.round.parts import Parts
from specdec.core.round.program import Round
from specdec.core.sampling_params import SamplingKind
from specdec.graphs.buffers import BufferSpec
from specdec.graphs.captures import Capture, pick_capture
from specdec.graphs.pool import GraphPool
from specdec.graphs.prefill import PrefillRunner
from specdec.graphs.runner import GraphRunner, Setup
from specdec.graphs.shapes import Decision, replayed_sizes, token_buckets

MOST_REQUESTS = 8
KINDS = (SamplingKind.GREEDY, SamplingKind.FILTERED)  # of sampling; prefills with penalties and bans run in parts
HEAD = 4 * MOST_REQUESTS  # numbers that describe the requests
PARTS = (16, 4)  # a graph is divided after this share of its layers: launching one takes 1 µs or more a kernel
FRESH = ", fresh"  # suffix of a kind: no prompt has cached tokens, so short ones need no split-KV
# Token counts of whole graphs under "auto": few, since each holds all layers; larger prefills are the device's anyway.
WHOLE_SIZES = (8, 16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048)

SHORT_SIZES = (1, 2, 4)  # added if most of a prompt may be cached

ROOM = 4096  # numbers that may be appended to the copy of a prefill's inputs
NO_NUMBERS = np.zeros(0, dtype=np.int64)
Beside = tuple[np.ndarray, Callable[[torch.Tensor], None]]


class Piece(NamedTuple):
    """A request in a prefill: its row, its number of cached tokens, ids [n] and next_ids [n] int64 on the host.

    next_ids: see `PrefillChunk`. is_done: its prompt is complete then, so that its first token is drawn.
    """

    row: int
    start: int
    ids: np.ndarray
    next_ids: np.ndarray
    is_done: bool


class WholeProgram:
    """The device work of a whole prefill, captured or not, with the `divide` and `pause` of `capture`.

    post: takes the results of the next prefill, once, as soon as they are launched; None if they are not needed.
    """

    def __init__(self, parts: Parts, program: Round, capture: Capture):
        self.post: Callable[[torch.Tensor], None] | None = None
        self._parts = parts
        self._round = program
        self._capture = capture
        self._uncounted = replace(parts.context, on_forward=lambda mode: None)
        self._divided_at = {len(parts.context.layers) // part for part in PARTS} - {0}

    def run(self, variant: str, tokens: torch.Tensor, requests: torch.Tensor) -> torch.Tensor:
        """Prefill and begin: results [n, W+3] as `Round.first_tokens` gives them, of which the done requests' count.

        variant: a kind of KINDS, with FRESH or without. tokens [T, 2] int64: ids, and the ids after them. requests
        [4, n] int64: rows, the same with the dummy row for those that are not done, both counted from the dummy row;
        starts and numbers of tokens. So padding is 0 everywhere.
        """
        worker = self._parts.worker
        kind, is_fresh = variant.removesuffix(FRESH), variant.endswith(FRESH)
        key = tokens.shape[0], is_fresh  # all kinds of sampling have the target's forward in common
        taken = self._capture.shared(key, partial(self._take, tokens, requests, is_fresh))
        self._parts.context.on_forward(ForwardMode.EXTEND)
        chunk, done_rows, logits, aux = taken
        packed = self._round.first_tokens(kind, done_rows, logits)
        if worker.prefills or worker.has_begin:
            self._capture.pause(partial(self.mail, packed))  # the host can read them while the draft takes the prompt
        is_done = done_rows != self._parts.config.dummy_row
        chunk = replace(chunk, next_ids=_with_first(chunk, is_done, first_tokens(packed)))
        states = worker.prefill(chunk, aux, self._draft)
        if worker.has_begin:
            self._round.begin(done_rows, states)
        return packed

    def _take(
        self, tokens: torch.Tensor, requests: torch.Tensor, is_fresh: bool
    ) -> tuple[PrefillChunk, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Run the target: the chunk, the rows of requests that are done [n], logits after each prompt [n, V], aux."""
        target, context = self._parts.target, self._parts.context
        rows, done_rows = requests[:2] + self._parts.config.dummy_row
        starts, q_lens = requests[2:]
        ids, next_ids = tokens.t().contiguous()
        table, most_cached = self._parts.tables.table, 0 if is_fresh else self._parts.tables.table.shape[1]
        metadata = context.backend.metadata.packed(table, rows, starts, q_lens, ids.shape[0], most_cached)
        last_rows = (metadata.qo_indptr[1:].long() - 1).clamp(min=0)
        metadata = replace(metadata, read_rows=last_rows)
        chunk = PrefillChunk(metadata, rows, ids, next_ids, last_rows)
        if self._parts.worker.reads_history:
            self._round.take_prompts(chunk)
        with forward_context(self._uncounted, metadata, self._before_layer):
            hidden, aux = target.layers(ForwardMode.EXTEND, ids, metadata.positions)
        return chunk, done_rows, target.head(hidden.index_select(0, last_rows)), aux

    def mail(self, lines: torch.Tensor) -> None:
        """Post the results, if not done yet."""
        post, self.post = self.post, None
        if post is not None:
            post(lines)

    def _before_layer(self, layer_id: int) -> None:
        if layer_id in self._divided_at:
            self._capture.divide()

    def _draft(
        self, metadata: AttentionMetadata, ids: torch.Tensor, features: torch.Tensor | None, module: int = 0
    ) -> torch.Tensor:
        """Run the draft's layers, or those of one of its modules; see `DraftWorker.prefill_layers`."""
        worker = self._parts.worker
        assert worker.context is not None
        with forward_context(worker.context, metadata):
            return worker.prefill_layers(ids, metadata.positions, features, module)


class WholePrefill:
    """Runs prefills from whole graphs. `runner` is the guard; what it refuses is prefilled in parts."""

    def __init__(self, program: WholeProgram, setup: Setup, dummy_row: int):
        """setup: its buckets are the token counts, its variants what is captured: kinds, alone or with FRESH."""
        self._program = program
        self._dummy_row = dummy_row
        self._counters = setup.counters
        self._variants = {key: _variant_for(*key, setup.variants) for key in product(SamplingKind, (False, True))}
        # Both inputs are views of one tensor, so that one copy transfers them, and what goes along behind them.
        behind = HEAD + 2 * max(setup.buckets)
        self._inputs = torch.zeros(behind + ROOM, dtype=torch.int64, device=setup.device)
        self._host: torch.Tensor | None = None  # zeros for the next copy
        self._requests, self._tokens = self._inputs[:HEAD].view(4, -1), self._inputs[HEAD:behind].view(-1, 2)
        setup = replace(setup, shared={"tokens": self._tokens, "requests": self._requests})
        specs = [
            BufferSpec("tokens", lambda n: (n, 2), torch.int64, pad=0),
            BufferSpec("requests", lambda n: (4, MOST_REQUESTS), torch.int64, pad=0, axis=None),
        ]
        runner = GraphRunner("whole_prefill", program.run, specs, setup)
        self.runner = PrefillRunner(runner, lambda size: None)

    def can_run(self, kind: SamplingKind, starts: Sequence[int], num_tokens: int) -> Decision:
        """Decide whether a batch of pieces from `starts` on, the done ones of which sample by `kind`, replays."""
        if len(starts) > MOST_REQUESTS:
            return Decision(False, f"more than {MOST_REQUESTS} requests")
        variant = self._variants[kind, any(starts)]
        if variant is None:
            why = "tokens are cached already" if self._variants[kind, False] else f"sampling of kind '{kind}'"
            return Decision(False, f"{why}: prefilled in parts")
        return self.runner.can_run(ForwardMode.EXTEND, num_tokens, variant)

    def takes(self, kind: SamplingKind, starts: Sequence[int], num_tokens: int) -> bool:
        """Return whether a batch replays (see `can_run`); where it does not, count the reason."""
        decision = self.can_run(kind, starts, num_tokens)
        if not decision.ok:
            self._counters.count_reject(self.runner.runner.name, decision.reason)
        return decision.ok

    def __call__(
        self,
        kind: SamplingKind,
        pieces: Sequence[Piece],
        post: Callable[[torch.Tensor], None] | None,
        beside: Beside | None = None,
    ) -> None:
        """Prefill `pieces`, which `can_run` has accepted; `post` gets a line of results each before the draft has taken
        their prompts, valid until the next call.

        Lines of pieces that are not done say nothing. beside: up to ROOM numbers that go along in the copy, and what
        takes them on the device before the prefill begins.
        """
        others, take = beside or (NO_NUMBERS, None)
        variant = self._variants[kind, any(piece.start for piece in pieces)]
        assert variant is not None
        runner = self.runner.runner
        size = runner.replayed_size(sum(len(p.ids) for p in pieces), variant)
        behind = HEAD + 2 * size
        zeros, self._host = self._host, None  # the copy may last: what it reads is used once
        host = (self._new_host() if zeros is None else zeros)[: behind + others.size]
        numbers = host.numpy()
        requests, tokens = numbers[:HEAD].reshape(4, -1), numbers[HEAD:behind].reshape(-1, 2)  # views
        begin = 0
        for i, piece in enumerate(pieces):
            end, row = begin + len(piece.ids), piece.row - self._dummy_row
            tokens[begin:end, 0], tokens[begin:end, 1] = piece.ids, piece.next_ids
            requests[:, i] = row, row if piece.is_done else 0, piece.start, end - begin
            begin = end
        numbers[behind:] = others.reshape(-1)
        there = self._inputs[: len(host)]
        there.copy_(host, non_blocking=True)
        if take is not None:
            take(there[behind:].view(others.shape))
        self._program.post = post
        self._program.mail(runner(variant, {"tokens": self._tokens[:size], "requests": self._requests}))
        self._host = self._new_host()  # now: the device works

    def _new_host(self) -> torch.Tensor:
        is_pinned = self._inputs.device.type == "cuda"
        return torch.zeros(len(self._inputs), dtype=torch.int64, device="cpu", pin_memory=is_pinned)


def _variant_for(kind: SamplingKind, has_cached: bool, variants: Sequence[str]) -> str | None:
    """Return the first of `variants` that serves, None if there is none."""
    kinds = [k for k in KINDS if k.serves(kind)]
    wanted = [f"{k}{FRESH}" for k in kinds] * (not has_cached) + [str(k) for k in kinds]
    return next((variant for variant in wanted if variant in variants), None)


def whole_graphs(
    parts: Parts, program: Round, pool: GraphPool | None, device_bound_from: int | None
) -> WholePrefill | None:
    """Return the whole graphs of `parts`, not built yet, if they are wanted; ValueError if they are but cannot be.

    device_bound_from: see `check_padding`.
    """
    config = parts.config
    sizes = whole_sizes(config, device_bound_from)
    if not sizes:
        return None
    reason = _why_not_whole(parts)
    if reason and config.prefill_graph == "whole":
        raise ValueError(f"prefill_graph='whole': {reason}; leave prefill_graph out")
    kinds = [kind for kind in KINDS if kind in config.graph_sampling]
    variants = tuple(f"{kind}{FRESH}" for kind in kinds)
    if reason or not variants:
        return None
    if config.prefill_graph == "whole" or config.prefix_cache:
        variants += tuple(variant.removesuffix(FRESH) for variant in variants)
    capture = pick_capture(True, parts.tables.table.device, pool)
    setup = Setup(
        capture=capture,
        counters=parts.counters,
        device=parts.tables.table.device,
        buckets=sizes,
        variants=variants,
        rehearsed=[v for v in variants if v.removesuffix(FRESH) == kinds[0]],  # as those of rounds
        unit="tokens",
    )
    made = WholePrefill(WholeProgram(parts, program, capture), setup, config.dummy_row)
    made.runner.device_bound_from = device_bound_from
    return made


def _why_not_whole(parts: Parts) -> str:
    """Return why a prefill cannot be one graph; empty if it can."""
    contexts = [c for c in (parts.context, parts.worker.context) if c is not None]
    on_host = [c.backend.name for c in contexts if not c.backend.capabilities.packed_prefill]
    return f"{on_host[0]} plans prefills on the host" if on_host else ""


def whole_sizes(config: EngineConfig, device_bound_from: int | None = None) -> tuple[int, ...]:
    """Return the token counts of whole graphs: all buckets if they are asked for, under "auto" those that gain."""
    if config.prefill_graph == "whole":
        return token_buckets(config.prefill_tokens, config.prefill_buckets)
    if config.prefill_graph != "auto":
        return ()
    sizes = config.prefill_buckets or (SHORT_SIZES if config.prefix_cache else ()) + WHOLE_SIZES
    fitting = tuple(n for n in sizes if n <= min(config.prefill_tokens, WHOLE_SIZES[-1]))
    return fitting if config.prefill_buckets else replayed_sizes(fitting, device_bound_from)


def _with_first(chunk: PrefillChunk, is_done: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Return the chunk's next ids, after each prompt that is done (is_done [n]) its first token (first [n])."""
    owners = chunk.metadata.owners().clamp(max=first.shape[0] - 1)
    places = torch.arange(owners.shape[0], device=owners.device)
    is_last = places == chunk.last_rows[owners]
    return torch.where(is_last & is_done[owners], first[owners], chunk.next_ids)
