"""The contract between the engine's round and a draft worker, and the data they exchange."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from specdec.backends.op import ForwardContext
from specdec.core.batch import AttentionMetadata
from specdec.core.config import MAX_TAIL, EngineConfig, Shape
from specdec.core.functional.ops import RoundOps
from specdec.core.functional.sampling import Guide, SamplingBatch
from specdec.core.functional.tree import Tree
from specdec.core.functional.verify import VerifyOutput
from specdec.core.target import Target

# Random streams of one round; a counter (L) is used by one round only, so (seed, L, stream) never repeats.
STREAM_VERIFY = 0  # + node number, node 0 draws the bonus
STREAM_DRAFT = MAX_TAIL  # + draft step
STREAM_PREFILL = 2 * MAX_TAIL
STREAM_SYNTHETIC = 2 * MAX_TAIL + 1


@dataclass(frozen=True)
class RoundBatch:
    """The requests of one round, gathered from the engine's state. L is constant during the round.

    rows [bs]: rows in the engine's state, in slot_table and in history (tokens by position, the last one the root),
    [num_rows, width] both, which are int32 and not gathered;
    seq_lens [bs]: L; roots [bs]: token at L; sampling: None if every request is greedy; max_prefix: host upper bound of
    L; shape: what the round drafts; is_processed: logits are processed before they are judged (drafts are not);
    is_constrained: grammars mask them first; guide: the grammars' masks and forced tokens for the draft; uniforms
    [bs, S] float64: random numbers, if the worker draws drafts. All other tensors int64.
    """

    rows: torch.Tensor
    slot_table: torch.Tensor
    history: torch.Tensor
    seq_lens: torch.Tensor
    roots: torch.Tensor
    sampling: SamplingBatch | None
    max_prefix: int
    shape: Shape
    is_processed: bool = False
    is_constrained: bool = False
    guide: Guide | None = None
    uniforms: torch.Tensor | None = None


@dataclass(frozen=True)
class AlgoSpec:
    """Inputs of a draft algorithm from the target. Sources: arXiv 2401.15077, 2503.01840, 2412.19437, 2211.17192.

    What differs between checkpoints of one algorithm (order of combination, norms, what is recycled, hot vocabulary) is
    a head's own configuration, in the layouts that `specdec.reach.heads.load` reads.

    features: target hidden states it reads: "aux" (outputs of layers that the head names), "last" (after the final
        norm) or "none".
    id_shift: row i of the draft holds token i+1 (EAGLE family) or token i (standalone, block).
    """

    name: str
    features: str = "none"
    id_shift: int = 0


@dataclass(frozen=True)
class NarrowHead:
    """An output head over the target's tokens `ids` [dv] int64, ascending: weight [dv, h_d], bias [dv] or None.

    Both are copies: what a trainer writes to the whole head is not seen. product: of states, weight and bias; it says
    what form weight has.
    """

    ids: torch.Tensor
    weight: Any
    bias: torch.Tensor | None
    product: Callable[[torch.Tensor, Any, torch.Tensor | None], torch.Tensor] = F.linear

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """Map states [N, h_d] to logits [N, dv]."""
        return self.product(states, self.weight, self.bias)


@dataclass(frozen=True)
class DraftParts:
    """The parts of a draft worker besides its model.

    ops: those that go with its backend; context: its attention layers and K/V pool, None if it has no layers; narrow:
    its output head, if that is not its own.
    """

    spec: AlgoSpec
    target: Target
    config: EngineConfig
    ops: RoundOps
    context: ForwardContext | None
    narrow: NarrowHead | None = None


class Draft(NamedTuple):
    """The proposed nodes, and q [bs, S, V] where a chain's tokens, or a tree's spine, were drawn from it."""

    tree: Tree
    probs: torch.Tensor | None


@dataclass(frozen=True)
class PrefillChunk:
    """A packed piece of prompts for the draft. `next_ids` [T] holds the token AFTER each row (ids shifted left).

    ids [T]: the rows' own; rows [n]: state rows of the requests; last_rows [n]: packed indices of their last rows.
    """

    metadata: AttentionMetadata
    rows: torch.Tensor
    ids: torch.Tensor
    next_ids: torch.Tensor
    last_rows: torch.Tensor


class RunPrefill(Protocol):
    """Runs a forward of a draft prefill, from a graph if there is one; see `DraftWorker.prefill_layers`."""

    def __call__(
        self, metadata: AttentionMetadata, ids: torch.Tensor, features: torch.Tensor | None, module: int = 0
    ) -> torch.Tensor: ...


class DraftWorker(ABC):
    """Proposes tokens. A worker owns its model's KV and per-row state; it knows no scheduler and no graphs."""

    aux_layers: tuple[int, ...] = ()
    draws_chains: bool = False  # drafts of sampled requests, or a tree's spine, are drawn, and have laws
    context: ForwardContext | None = None  # the draft's attention layers, if it has any
    dtype: torch.dtype | None = None  # of its states and K/V; None: the target's
    hidden_size: int = 0  # h_d, of what `prefill_layers` returns
    id_shift: int = 1  # its prefill takes the token after each row (1), or the row's own (0)
    has_begin: bool = False  # `begin` does something
    module: nn.Module | None = None  # the draft's own model
    prefills: bool = False  # its layers run over prompts
    num_modules: int = 1  # forwards of a prefill, one after the other: MTP modules
    reads_history: bool = False  # it reads `RoundBatch.history`, prompts included

    @property
    def looks_ahead(self) -> int:
        """Tokens after a position on which the draft's K/V there depends."""
        return 0 if self.context is None else self.id_shift

    def prefill_layers(
        self, ids: torch.Tensor, positions: torch.Tensor, features: torch.Tensor | None, module: int = 0
    ) -> torch.Tensor:
        """One forward of a draft prefill: states [T, h_d] of tokens [T].

        features: of the target, [T, num_aux*h]; for the MTP modules after the first the states [T, h_d] of the module
        before. ids [T] are as the algorithm takes them (see `id_shift`). Attention goes to the scope in force; rows do
        not see each other elsewhere, so any T can be captured.
        """
        raise NotImplementedError(f"{type(self).__name__} has a context, so it needs prefill_layers")

    def prefill(self, chunk: PrefillChunk, aux: torch.Tensor | None, run: RunPrefill) -> torch.Tensor | None:
        """Take a chunk of prompts, whose features are aux [T, num_aux*h]; return what `begin` takes."""
        states = aux
        if self.prefills:
            states = run(chunk.metadata, chunk.next_ids if self.id_shift else chunk.ids, aux)
        return self.finish_prefill(chunk, states, run)

    def finish_prefill(self, chunk: PrefillChunk, hidden: torch.Tensor | None, run: RunPrefill) -> torch.Tensor | None:
        """Return what `begin` takes of the states [T, h_d] of `chunk`; of a draft that does not prefill, those are the
        target's features [T, num_aux*h], None if it reads none.

        run: runs the modules after the first, of a draft that has any. Returns states [n, h_d], None if h_d is 0.
        """
        return hidden.index_select(0, chunk.last_rows) if hidden is not None and self.hidden_size else None

    def begin(self, batch: RoundBatch, states: torch.Tensor | None) -> None:
        """Prepare the first round of requests whose prompts are done: their roots and `finish_prefill`'s states."""
        return None

    def drop_compiled(self) -> None:
        """Switch back to live layers, if a model of its own was compiled."""
        return None

    def close(self) -> None:
        """Leave whatever the worker was attached to as it was."""
        return None

    @abstractmethod
    def draft(self, batch: RoundBatch) -> Draft:
        """Propose the nodes of one round."""

    def extend(self, batch: RoundBatch, verified: VerifyOutput, aux: torch.Tensor | None) -> None:
        """Take what the target decided; aux [bs, D, num_aux*h] are its features of the verified nodes."""
        return None

    @property
    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return the worker's facts for `Engine.report()`."""


class NoDraft(DraftWorker):
    """Verifies the root alone: plain decoding, of algo=None or of a round that does not draft."""

    def __init__(self, ops: RoundOps):
        self.ops = ops

    def draft(self, batch: RoundBatch) -> Draft:
        no_drafts = batch.roots.new_empty(batch.roots.shape[0], 0)
        return Draft(self.ops.chain(batch.roots, no_drafts), None)

    @property
    def facts(self) -> dict[str, Any]:
        return {"algo": None}
