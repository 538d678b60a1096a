"""Round graphs: the whole round as one graph, or draft, target verify and draft extend as separate graphs.

Separate graphs cost two more launches and copies of their outputs; they are for backends that plan on the host.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from specdec.config import EngineConfig, num_words
from specdec.draft.worker import Draft
from specdec.functional.sampling import SamplingKind
from specdec.functional.tree import Tree
from specdec.functional.verify import VerifyOutput
from specdec.graphs import BufferSpec, GraphPool, GraphRunner, Setup, batch_buckets, build, pick_capture, rehearse
from specdec.outputs import GraphCost
from specdec.round.parts import Parts
from specdec.round.program import LAW_BYTES, Round

LOWER = "max_batch, graph_batches or num_draft_tokens, leave kinds out of graph_sampling, or pass cuda_graph=False"
Runners = list[tuple[str, Callable[..., Any], list[BufferSpec]]]  # name, body, inputs
# For `estimate_bytes`; set so that it is close to what bench/rounds.py measures on an H200 (Llama and SmolLM2 shapes).
NODE_BYTES = 5 << 10  # of a kernel in an instantiated graph
NODES_A_LAYER, NODES_A_STEP, NODES_A_ROUND = 24, 60, 200
LIVE_ROWS = 24  # hidden-sized activations of a token that live at once
LIVE_LAWS = 11  # copies of the probabilities that live at once in sampling


class RoundGraphs:
    """Owns the runners of one engine and their graphs."""

    def __init__(self, program: Round, parts: Parts, pool: GraphPool | None):
        config = parts.config
        self._program = program
        self._config = config
        device = program.slot_table.device
        self.capture = pick_capture(config.cuda_graph, device, pool)
        if config.strict and self.capture.refusal:
            raise ValueError(f"strict=True on {device.type}, where {self.capture.refusal}; leave strict out")
        buckets = batch_buckets(config.max_batch, config.graph_batches)
        if config.strict and buckets[-1] < config.max_batch:
            warnings.warn(
                f"strict=True with graphs of {buckets[-1]} requests at most: larger batches, up to "
                f"max_batch={config.max_batch}, will raise; lower max_batch or raise graph_batches",
                stacklevel=6,
            )
        rows = BufferSpec("rows", lambda n: (n,), torch.int64, pad=config.dummy_row)
        setup = Setup(
            capture=self.capture,
            counters=parts.counters,
            device=device,
            buckets=buckets,
            variants=config.graph_sampling,
            strict=config.strict,
        )
        self._name = "round" if config.num_steps else "decode"
        self._is_apart = config.num_steps > 0 and (config.round_graph is False or not parts.may_merge)
        runners = self._apart(rows) if self._is_apart else self._whole(rows)
        width = program.target.spec.hidden_size
        hidden = BufferSpec("hidden", lambda n: (n, width), program.target.dtype, pad=0.0)
        runners.append(("first_token", partial(first_token_part, program), [rows, hidden]))
        self.runners = {name: GraphRunner(name, body, specs, setup) for name, body, specs in runners}
        if program.worker.has_begin:  # it samples nothing, so one kind serves all
            begin_specs = [rows, *self._state_specs()]
            once = replace(setup, variants=config.graph_sampling[:1])
            self.runners["draft_begin"] = GraphRunner("draft_begin", partial(begin_part, program), begin_specs, once)
        with torch.inference_mode():
            made = list(self.runners.values())
            rehearse(made, parts.compiling_kernels())
            build(made, self.capture, lower=LOWER, strict=config.strict, settle=parts.target.settle)

    def _whole(self, rows: BufferSpec) -> Runners:
        return [(self._name, self._program.play, [rows])]

    def _apart(self, rows: BufferSpec) -> Runners:
        return [
            ("draft", partial(draft_part, self._program), [rows]),
            ("target_verify", partial(verify_part, self._program), [rows, *self._tree_specs()]),
            ("draft_extend", partial(extend_part, self._program), [rows, *self._output_specs()]),
        ]

    def play(self, kind: SamplingKind, rows: torch.Tensor, max_prefix: int) -> torch.Tensor:
        """Run a round of `rows`; see `Round.play`. The results are valid until the next call."""
        kind, hints = self._served_as(kind), {"max_prefix": max_prefix}
        if not self._is_apart:
            return self.runners[self._name](kind, {"rows": rows}, **hints)
        # Buffers have the names of the fields of Tree and VerifyOutput.
        draft: Draft = self.runners["draft"](kind, {"rows": rows}, **hints)
        inputs = {"rows": rows, **draft.tree._asdict(), "probs": draft.probs}
        verified, aux = self.runners["target_verify"](kind, inputs, **hints)
        return self.runners["draft_extend"](kind, {"rows": rows, **verified._asdict(), "aux": aux}, **hints)

    def first_tokens(self, kind: SamplingKind, rows: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Sample the tokens after prompts from the target's last hidden states [n, h]; see `Round.first_tokens`."""
        return self.runners["first_token"](self._served_as(kind), {"rows": rows, "hidden": hidden})

    def begin(self, rows: torch.Tensor, states: torch.Tensor | None, max_prefix: int) -> None:
        """Run `Round.begin` for `rows`."""
        inputs = {"rows": rows} if states is None else {"rows": rows, "states": states}
        self.runners["draft_begin"](self._config.graph_sampling[0], inputs, max_prefix=max_prefix)

    def _served_as(self, kind: SamplingKind) -> SamplingKind:
        """Return the least kind that was captured and serves `kind`; if there is none, `kind` itself."""
        captured = [SamplingKind(k) for k in self._config.graph_sampling if not self.capture.refusal]
        return next((k for k in captured if k.serves(kind)), kind)

    @property
    def costs(self) -> list[GraphCost]:
        """Time and memory that each graph took to capture, runner by runner in the order of capture."""
        return [cost for runner in self.runners.values() for cost in runner.costs]

    def _state_specs(self) -> list[BufferSpec]:
        """Return the spec of the states that the draft's prefill passes to its begin, if it has any."""
        worker = self._program.worker
        dtype, width = worker.dtype or self._program.target.dtype, worker.hidden_size
        return [BufferSpec("states", lambda n: (n, width), dtype, pad=0.0)] if width else []

    def _tree_specs(self) -> Iterator[BufferSpec]:
        """Yield the specs of what draft passes to verify. The pad is a tree of roots that see node 0 (and 64, ..)."""
        num_nodes = self._config.verify_width
        for name in Tree._fields:
            if name != "ancestor_bits":
                yield BufferSpec(name, lambda n: (n, num_nodes), torch.int64, pad=0)
        words = num_words(num_nodes)
        yield BufferSpec("ancestor_bits", lambda n: (n, num_nodes, words), torch.int64, pad=1)
        if self._program.worker.draws_chains and self._config.topk == 1:
            law = (self._config.num_steps, self._program.target.spec.vocab_size)
            sampled = tuple(kind for kind in SamplingKind if not kind.is_greedy)
            yield BufferSpec("probs", lambda n: (n, *law), torch.float32, pad=0.0, variants=sampled)

    def _output_specs(self) -> Iterator[BufferSpec]:
        """Yield the specs of what verify passes to extend. The pad is a request that emits nothing."""
        width = min(self._config.num_steps + 1, self._config.verify_width)
        yield BufferSpec("accept_index", lambda n: (n, width), torch.int64, pad=-1)
        yield BufferSpec("accept_lens", lambda n: (n,), torch.int64, pad=0)
        yield BufferSpec("tokens", lambda n: (n, width), torch.int64, pad=-1)
        yield BufferSpec("invalid", lambda n: (n,), torch.bool, pad=False)
        target = self._program.target
        if target.aux_layers:
            features = (self._config.verify_width, len(target.aux_layers) * target.spec.hidden_size)
            yield BufferSpec("aux", lambda n: (n, *features), target.dtype, pad=0.0)


def draft_part(program: Round, kind: str, rows: torch.Tensor, max_prefix: int | None = None) -> Draft:
    """Run the draft part of Round.play."""
    return program.draft(program.batch(kind, rows, max_prefix))


def verify_part(
    program: Round,
    kind: str,
    rows: torch.Tensor,
    probs: torch.Tensor | None = None,
    max_prefix: int | None = None,
    **tree: torch.Tensor,
) -> tuple[VerifyOutput, torch.Tensor | None]:
    """Run Round.play from the draft (fields of Tree, and the laws its chains were drawn from) to what is accepted."""
    batch = program.batch(kind, rows, max_prefix)
    draft = Draft(Tree(**tree), probs)
    logits, aux = program.verify(batch, draft.tree)
    return program.accept(batch, draft, logits), aux


def extend_part(
    program: Round,
    kind: str,
    rows: torch.Tensor,
    aux: torch.Tensor | None = None,
    max_prefix: int | None = None,
    **verified: torch.Tensor,
) -> torch.Tensor:
    """Run Round.play from what was accepted (fields of VerifyOutput) and the target's features to the results."""
    return program.extend(program.batch(kind, rows, max_prefix), VerifyOutput(**verified), aux)


def first_token_part(program: Round, kind: str, rows: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Run the head over the last rows of prompts, then Round.first_tokens."""
    return program.first_tokens(kind, rows, program.target.head(hidden))


def begin_part(
    program: Round,
    kind: str,
    rows: torch.Tensor,
    states: torch.Tensor | None = None,
    max_prefix: int | None = None,
) -> torch.Tensor:
    """Run Round.begin, which is the same for every kind."""
    return program.begin(rows, states, max_prefix)


def estimate_bytes(
    config: EngineConfig, hidden_size: int, vocab_size: int, num_layers: int, itemsize: int, draft_layers: int = 1
) -> int:
    """Estimate the device bytes of the graphs of `config`: scratch of the largest, and the nodes of all."""
    num_reqs, *_smaller = reversed(batch_buckets(config.max_batch, config.graph_batches))
    tokens = num_reqs * config.verify_width
    logits_bytes = tokens * vocab_size * itemsize
    if config.logprobs is not None:  # the rows of the path, and a column of them in fp32
        logits_bytes += num_reqs * vocab_size * ((config.num_steps + 1) * itemsize + 2 * 4)
    activation_bytes = tokens * hidden_size * itemsize * LIVE_ROWS
    law_bytes = 0
    if any(not SamplingKind(kind).is_greedy for kind in config.graph_sampling):
        law_bytes = LIVE_LAWS * min(LAW_BYTES, 4 * tokens * vocab_size)
        if config.topk == 1:  # the draft's laws, as the head gives them and over the target's vocabulary
            law_bytes += 2 * 4 * num_reqs * config.num_steps * vocab_size
    num_graphs = (1 + len(_smaller)) * len(config.graph_sampling)
    layers = num_layers + (draft_layers - 1) * config.num_steps  # one of the draft's is in NODES_A_STEP
    nodes = layers * NODES_A_LAYER + config.num_steps * NODES_A_STEP + NODES_A_ROUND
    return logits_bytes + activation_bytes + law_bytes + num_graphs * nodes * NODE_BYTES
