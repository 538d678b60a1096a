"""Engine settings: frozen, validated once, derived with `dataclasses.replace`. Knows nothing about models."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from specdec.core.ranges import FLAG, TOKEN, Range, check_fields, either, list_of, one_of, optional, real, whole

MAX_TOP = 128  # most likely tokens whose log-probabilities are returned
MAX_TOPK = 64  # branches per step: one program ranks their K*K children
MAX_TAIL = 256  # nodes of ancestor masks: four words of 64 bits; kernels handle a tree in one program
AUTO = "auto"
AUTO_STEPS = (1, 3, 5)  # chain lengths that num_steps="auto" chooses among
CATCH_UP = 32  # plain rounds that a draft may fall behind; one forward over their tokens catches up
GRAPH_SAMPLING = ("greedy", "sampled", "filtered", "processed_greedy", "processed")
CONSTRAINED = ("constrained_greedy", "constrained")  # kinds of sampling under grammars
PREFILL_GRAPHS = ("auto", "whole", "piecewise", "breakable", "off")
AUTO_OR_FLAG = (AUTO, True, False)
COMPILERS = ("inductor", "eager")
GRAMMARS = (None, "auto", "llguidance", "xgrammar")
DRAFT_WEIGHTS = (None, "fp8")


def num_words(num_nodes: int) -> int:
    """Return the number of 64-bit words that hold one bit for each of `num_nodes` nodes: the W of ancestor bits."""
    return -(-num_nodes // 64)


class Shape(NamedTuple):
    """Shape of a round's draft; the fields are those of `EngineConfig`. (0, 1, 1) is plain decoding."""

    num_steps: int
    topk: int
    num_draft_tokens: int

    def __str__(self) -> str:
        return f"{self.num_steps}:{self.topk}:{self.num_draft_tokens}" if self.num_steps else "plain"


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine: drafting, capacity, backend and graphs.

    num_steps S: draft depth, tokens on the longest drafted path (0 without a draft). "auto": every round takes the
        shape with the most expected tokens per ms, as measured at attach and since: no draft, a chain of one of
        `auto_steps`, or the tree if topk > 1. S is then the longest. Greedy text does not depend on it; sampled text
        keeps its distribution, but depends on when shapes changed, not only on its seed.
    topk K: branches kept per step; 1 drafts a chain.
    num_draft_tokens D: nodes verified per request and round, root included; a chain has S+1.
    auto_steps: lengths of the chains that num_steps="auto" chooses among, (1, 3, 5) unless given; None: S is fixed.
    max_batch: requests decoded together; others wait. From 16 on, up to max_batch / 8 of the waiting requests are
        prefilled ahead of their turn.
    max_seq_len: longest prompt plus output of one request, in tokens.
    num_slots: KV slots (tokens) of the pool; None holds `max_batch` requests of `max_seq_len`.
    page_size: KV slots allocated together.
    prefix_cache: whether K/V of served text is kept while there is room, so that a prompt that shares a prefix with it
        (turns of a chat, many samples of one prompt, few-shot examples) is prefilled only past that prefix. "auto":
        where the draft allows it. Models with recurrent layers resume from snapshots of their states, kept at multiples
        of 64 tokens, as many as max_batch (4 at least). A change of the model empties the cache, except one through
        `.data` or `numpy()`, which is not detected: call `Engine.clear_prefix_cache` after it.
    max_prefill_tokens: prompt tokens of one prefill forward; longer prompts are prefilled in chunks.
    mixed_prefill_tokens: the same while earlier requests decode: a decoding round follows each such forward, so that a
        long prompt slows them down but does not stop them. Prompts submitted together are all prefilled first.
    sample_drafts: whether chains of sampled requests, and one path of every tree, are sampled from the draft's
        distribution, which raises acceptance; False drafts the most likely tokens. Both are lossless.
    lookup: whether trees also hold the tokens that followed an earlier occurrence of the last tokens, as algo="lookup"
        drafts: for texts that repeat themselves, such as edited code.
    draft_vocab: target tokens that a draft may propose, among those it scores: their ids, or n for all ids below n and
        the model's EOS; None: all. The draft's output head keeps only these rows (FR-Spec, arXiv 2502.14856).
    draft_weights: "fp8": a draft head and its output head use FP8 copies of their weights, made at attach (blocks of
        128 x 128; activations are quantised, too): rounds take less time, and slightly fewer drafts may be accepted.
        None: the weights as loaded.
    backend: attention backend, "auto" or a name in `specdec.backends`.
    latents: whether MLA layers store latents as K/V, where backend and layers allow it. False stores K and V of each
        head, as transformers does: prefills take fewer multiplications, K/V more memory.
    cuda_graph: whether rounds replay from graphs; None: on CUDA. True elsewhere records and re-runs, for tests.
    graph_batches: batch sizes to capture; None: `graphs.batch_buckets` up to max_batch.
    graph_sampling: kinds of sampling to capture, of "greedy", "sampled" (no filters), "filtered", and, for requests
        with penalties, bans or biases, "processed_greedy" and "processed".
    grammar: library for requests with a grammar, "llguidance" or "xgrammar"; "auto": the first that is installed.
        Graphs of constrained greedy rounds are captured, and of constrained sampled ones if `graph_sampling` has a
        sampled kind. None: requests with a grammar are refused.
    prefill_graph: graphs of prefills: "breakable" (captured in segments around attention), "piecewise" (the same, of
        traced and compiled pieces), "whole" (one launch, with attention, first tokens and the draft's prefill; other
        batches take "piecewise" where layers are compiled, else "breakable"), "off", or "auto": on CUDA "whole" up to
        2048 tokens and the others above, "off" elsewhere.
    prefill_buckets: token counts to capture for prefills; None: a default set up to max_prefill_tokens.
    compile: whether the target's layers are traced and compiled, for rounds and prefills; attaching then takes longer,
        most of all the first time on a machine. "auto": on CUDA, where rounds have graphs; a model that cannot be
        traced runs as it is, and `Engine.report()` says why. True warns of such a model, or raises GraphError under
        strict. SPECDEC_COMPILE=0 in the environment turns "auto" off.
    compiler: compiler of traced pieces, "inductor" or "eager" (none; for tests).
    strict: raise GraphError where a round, or a prefill that has graphs, cannot replay, instead of running it eagerly.
    check_kernels: whether attach first compares the kernels of attention, recurrent layers and experts with their torch
        references, at the model's own sizes; AttachError names each wrong one. It also compares the bits of logits
        where attach does not do so anyway (`Report.bits`).
    logprobs: number n of most likely tokens whose log-probabilities are returned beside each emitted token's own (0:
        its own alone); None: none are computed. Costs a pass over the logits of emitted tokens in every round.
    digests: returns, for every emitted token, a checksum of the bits of the target's logits that it was chosen from
        (`RequestOutput.digests`), to compare engines, as `specdec bench lossless` does.
    synthetic_acceptance: for speed measurements only: share of rounds in which draft position 1, 2, .. S is accepted,
        whatever the target predicts; the text is then meaningless.

    Raises ValueError, which names the field, its value and what was expected.
    """

    num_steps: int = 3
    topk: int = 1
    num_draft_tokens: int | None = None
    auto_steps: tuple[int, ...] | None = None
    max_batch: int = 8
    max_seq_len: int = 2048
    num_slots: int | None = None
    page_size: int = 1
    prefix_cache: bool | str = False
    max_prefill_tokens: int = 8192
    mixed_prefill_tokens: int = 1024
    sample_drafts: bool = True
    lookup: bool = False
    draft_vocab: int | tuple[int, ...] | None = None
    draft_weights: str | None = None
    backend: str = "auto"
    latents: bool = True
    cuda_graph: bool | None = None
    graph_batches: tuple[int, ...] | None = None
    graph_sampling: tuple[str, ...] = GRAPH_SAMPLING
    grammar: str | None = None
    prefill_graph: str = "auto"
    prefill_buckets: tuple[int, ...] | None = None
    compile: bool | str = "auto"
    compiler: str = "inductor"
    strict: bool = False
    check_kernels: bool = False
    logprobs: int | None = None
    digests: bool = False
    synthetic_acceptance: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        check_fields(self, _RANGES)
        self._read_auto()
        if self.lookup and self.topk == 1:
            raise ValueError("lookup=True with topk=1: chains hold no second draft; set topk > 1, or algo='lookup'")
        if self.num_steps == 0 and self.topk > 1:
            raise ValueError(f"topk={self.topk} with num_steps=0: trees need num_steps of at least 1; or set topk=1")
        if self.topk * max(self.num_steps - 1, 1) > MAX_TAIL:
            raise ValueError(
                f"topk={self.topk}, num_steps={self.num_steps}: topk*(num_steps-1) draft nodes exceed {MAX_TAIL}; "
                "lower one of them"
            )
        if self.num_draft_tokens is None:
            default = self.num_steps + 1 if self.topk == 1 else min(self.num_candidates + 1, 32)
            object.__setattr__(self, "num_draft_tokens", default)
        self._check_draft_tokens()
        if self.num_slots is not None and self.num_slots < self.page_size:
            raise ValueError(f"num_slots={self.num_slots}: expected at least page_size={self.page_size}")
        if self.strict and self.cuda_graph is False:
            raise ValueError("strict=True with cuda_graph=False: strict refuses to run eagerly; leave one of them out")
        object.__setattr__(self, "graph_sampling", tuple(k for k in GRAPH_SAMPLING if k in self.graph_sampling))
        if self.synthetic_acceptance is not None:
            if self.grammar is not None:
                raise ValueError(
                    f"grammar={self.grammar!r} with synthetic_acceptance: its text follows no grammar; leave one out"
                )
            self._check_rates(self.synthetic_acceptance)

    def _read_auto(self) -> None:
        """Replace num_steps="auto" by the longest of `auto_steps`."""
        is_auto = str(self.num_steps) == AUTO
        if not is_auto and self.auto_steps is None:
            return
        steps = tuple(sorted(set(self.auto_steps or AUTO_STEPS)))
        if not is_auto and self.num_steps != steps[-1]:
            raise ValueError(f"auto_steps={steps} with num_steps={self.num_steps}: expected num_steps='auto'")
        object.__setattr__(self, "auto_steps", steps)
        object.__setattr__(self, "num_steps", steps[-1])

    def _check_rates(self, rates: tuple[float, ...]) -> None:
        if len(rates) != self.num_steps or any(a < b for a, b in pairwise(rates)):
            raise ValueError(
                f"synthetic_acceptance={rates!r}: expected num_steps={self.num_steps} non-increasing shares of "
                "rounds from 1 to 0 (position j is accepted only if j-1 is)"
            )
        if any(rates[self.verify_width - 1 :]):
            raise ValueError(
                f"synthetic_acceptance={rates}: with num_draft_tokens={self.verify_width} no more than "
                f"{self.verify_width - 1} drafts can be accepted; the rates after that must be 0"
            )

    def _check_draft_tokens(self) -> None:
        d = self.verify_width
        if self.topk == 1:
            if d != self.num_steps + 1:
                raise ValueError(
                    f"num_draft_tokens={d} with topk=1: a chain verifies num_steps+1={self.num_steps + 1} nodes; "
                    "leave num_draft_tokens out, or set topk > 1 for a tree"
                )
            return
        least = 2 if self.auto_steps is None else self.num_steps + 1  # the longest chain must fit, too
        most = min(MAX_TAIL, self.num_candidates + 1)
        if not least <= d <= most:
            raise ValueError(
                f"num_draft_tokens={d}: expected {least}..{most} for topk={self.topk}, num_steps={self.num_steps} "
                f"({self.num_candidates} candidates and the root, {MAX_TAIL} nodes at most)"
            )

    @property
    def shape(self) -> Shape:
        """The shape of a round; with "auto" the largest."""
        return Shape(self.num_steps, self.topk, self.verify_width)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """All shapes that a round may have: plain decoding first if there are several, `shape` last."""
        chains = [Shape(n, 1, n + 1) for n in (0, *self.auto_steps)] if self.auto_steps else []
        return tuple(dict.fromkeys([*chains, self.shape]))

    @property
    def graph_kinds(self) -> tuple[str, ...]:
        """Kinds of sampling to capture, constrained kinds included if `grammar` is set."""
        if self.grammar is None:
            return self.graph_sampling
        is_greedy = all(kind.endswith("greedy") for kind in self.graph_sampling)
        return (*self.graph_sampling, *(CONSTRAINED[:1] if is_greedy else CONSTRAINED))

    @property
    def tree_words(self) -> int:
        """Words of ancestor bits of the nodes verified, 0 for a chain."""
        return num_words(self.verify_width) if self.topk > 1 else 0

    @property
    def draft_words(self) -> int:
        """Words of ancestor bits of the K·(S-1) nodes that a draft model runs in a round, 0 for a chain."""
        return num_words(self.topk * (self.num_steps - 1)) if self.topk > 1 else 0

    @property
    def num_candidates(self) -> int:
        """Nodes the draft proposes before the re-rank: K + (S-1)·K²; a chain has S."""
        return self.topk + (self.num_steps - 1) * self.topk**2 if self.num_steps else 0

    @property
    def verify_width(self) -> int:
        """D: nodes verified per request and round, root included."""
        assert self.num_draft_tokens is not None
        return self.num_draft_tokens

    @property
    def draft_tail(self) -> int:
        """Most nodes of a draft model's forwards in a round: max(K·(S-1), D, S+1), with "auto" at least CATCH_UP."""
        most = max(self.topk * (self.num_steps - 1), self.verify_width, self.num_steps + 1)
        return max(most, CATCH_UP) if self.auto_steps else most

    @property
    def tail_reserve(self) -> int:
        """KV slots a round may write past L: `draft_tail`, and one for drafts that are a token ahead."""
        return self.draft_tail + 1

    @property
    def prefill_tokens(self) -> int:
        """Tokens of the largest prefill forward: a chunk, or all prompts that can run together."""
        return min(self.max_prefill_tokens, self.max_running * (self.max_seq_len - 1), self.pool_slots)

    @property
    def max_running(self) -> int:
        """Most requests that hold a row: `max_batch` that decode, and from 16 on up to an eighth more, prefilled ahead
        of their turn, so that prefills of a large batch come in batches while all its rows decode."""
        return self.max_batch + self.max_batch // 16 * 2

    @property
    def dummy_row(self) -> int:
        """The row of per-request state that padding of captured batches points to."""
        return self.max_running

    @property
    def num_rows(self) -> int:
        """Rows of per-request state, the dummy row included."""
        return self.max_running + 1

    @property
    def num_kept_states(self) -> int:
        """Snapshots of recurrent states that the prefix cache has room for."""
        return max(4, self.max_batch) if self.prefix_cache else 0

    @property
    def table_width(self) -> int:
        """Positions in a row of the slot table: the longest request's and one round's tail."""
        return self.max_seq_len + self.tail_reserve

    @property
    def pool_slots(self) -> int:
        """KV slots of the pool, the dummy page not counted."""
        if self.num_slots is not None:
            return self.num_slots
        per_request = self.max_seq_len + 2 * self.tail_reserve + self.page_size
        return self.max_batch * per_request


_KIND = one_of(*GRAPH_SAMPLING)
_KINDS = list_of(_KIND, f"one or more of {GRAPH_SAMPLING}", low=1)
_RANGES: Mapping[str, Range] = MappingProxyType(
    {
        "num_steps": either(one_of(AUTO), whole(0, MAX_TAIL - 1)),
        "topk": whole(1, MAX_TOPK),
        "num_draft_tokens": optional(whole(1, MAX_TAIL)),
        "auto_steps": optional(list_of(whole(1, MAX_TAIL - 1), "draft steps of at least 1", low=1)),
        "max_batch": whole(1),
        "max_seq_len": whole(2),
        "num_slots": optional(whole(1)),
        "page_size": whole(1),
        "prefix_cache": one_of(*AUTO_OR_FLAG),
        "max_prefill_tokens": whole(1),
        "mixed_prefill_tokens": whole(1),
        "sample_drafts": FLAG,
        "lookup": FLAG,
        "draft_vocab": optional(either(whole(2), list_of(TOKEN, "token ids of at least 0", low=1)), " for all"),
        "draft_weights": one_of(*DRAFT_WEIGHTS),
        "latents": FLAG,
        "cuda_graph": one_of(None, True, False),
        "graph_batches": optional(list_of(whole(1), "batch sizes of at least 1", low=1), " for the usual ones"),
        "graph_sampling": either(Range(_KIND.expected, lambda value: (_KIND.read(value),)), _KINDS),
        "grammar": one_of(*GRAMMARS),
        "prefill_graph": one_of(*PREFILL_GRAPHS),
        "prefill_buckets": optional(list_of(whole(1), "token counts of at least 1", low=1), " for the usual ones"),
        "compile": one_of(*AUTO_OR_FLAG),
        "compiler": one_of(*COMPILERS),
        "strict": FLAG,
        "check_kernels": FLAG,
        "logprobs": optional(whole(0, MAX_TOP)),
        "digests": FLAG,
        "synthetic_acceptance": optional(list_of(real(0, 1), "shares of rounds from 1 to 0, one per draft step")),
    }
)
