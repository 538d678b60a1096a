"""The worker of heads with several MTP modules (DeepSeek-V3, arXiv 2412.19437, eq. 21-24).

Module m at position p reads the embedding of token p+1 beside the state that module m-1 has at position p-1 (module 0:
the target's feature at p). So every module keeps K/V of its own over all positions, and draft step j asks module j
about all nodes drafted so far; steps past the last module go on with that one alone, as heads of one module do.
"""

import torch

from specdec.core.batch import ForwardMode
from specdec.core.draft.drafting import Steps
from specdec.core.draft.eagle import HeadWorker
from specdec.core.draft.head import RecyclingHead
from specdec.core.draft.worker import DraftParts, PrefillChunk, RoundBatch, RunPrefill
from specdec.core.functional.verify import VerifyOutput


class ModulesWorker(HeadWorker):
    """Drafts with a head of several modules.

    State by row: `last` [num_rows, num_modules, h_d], every module's state at the row that predicts the next token.
    """

    def __init__(self, parts: DraftParts, head: RecyclingHead):
        super().__init__(parts, head)
        self.last = self.hidden.new_zeros(self.hidden.shape[0], self.head.num_modules, self.hidden.shape[1])

    def steps(self, batch: RoundBatch) -> Steps:
        return ModuleSteps(self, batch)

    def finish_prefill(self, chunk: PrefillChunk, hidden: torch.Tensor | None, run: RunPrefill) -> torch.Tensor:
        """Module 0's states [T, h_d] are there; the other modules run over the chunk now."""
        assert hidden is not None
        metadata, states = chunk.metadata, [hidden[chunk.last_rows]]
        owners = metadata.owners().clamp(max=metadata.num_reqs - 1)
        places = torch.arange(owners.shape[0], device=owners.device)
        is_first = (places == metadata.qo_indptr[owners]).unsqueeze(1)
        begins = (metadata.prefix_lens > 0).unsqueeze(1)  # position 0 has no state before it
        for module in range(1, self.head.num_modules):
            at_start = torch.where(begins, self.last[chunk.rows, module - 1], 0.0)
            before = torch.where(is_first, at_start[owners], hidden.roll(1, 0))
            hidden = run(metadata, chunk.next_ids, before, module)
            states.append(hidden[chunk.last_rows])
        self.last[chunk.rows] = torch.stack(states, 1)
        return states[0]

    def extend(self, batch: RoundBatch, verified: VerifyOutput, aux: torch.Tensor | None) -> None:
        assert aux is not None, "a head reads features"
        width = verified.tokens.shape[1]
        inputs = self.inputs(self.of_path(batch, verified, aux))
        ids, before = verified.tokens.view(-1), self.last[batch.rows]
        end, ends = verified.accept_lens.unsqueeze(1) - 1, []
        for module in range(self.head.num_modules):
            out = self.forward(batch, ForwardMode.DRAFT_EXTEND, ids, inputs, module, q_len=width)
            wide = out.states.unflatten(0, (-1, width))
            ends.append(self.ops.gather_rows(wide, end).squeeze(1))
            inputs = torch.cat([before[:, module : module + 1], wide[:, :-1]], 1).flatten(0, 1)
        self.last[batch.rows] = torch.stack(ends, 1)
        self.keep(batch.rows, ends[0])


class ModuleSteps(Steps):
    """Step j runs module j over the nodes of all steps so far, while there are modules."""

    worker: ModulesWorker

    def __init__(self, worker: ModulesWorker, batch: RoundBatch):
        super().__init__(worker, batch)
        self._ids: list[torch.Tensor] = []  # [bs, K] a step
        self._bits: list[torch.Tensor] = []  # [bs, K, W] a step
        self._above: list[torch.Tensor] = []  # parents of the nodes of steps 2.., numbered over all nodes

    def advance(
        self, ids: torch.Tensor, above: torch.Tensor | None = None, bits: torch.Tensor | None = None
    ) -> torch.Tensor:
        head, k = self.worker.head, ids.shape[1]
        if self.step + 1 >= head.num_modules:
            self.module = head.num_modules - 1
            return super().advance(ids, above, bits)
        self.step += 1
        self.module = self.step
        self._ids.append(ids)
        if self.step > 1:
            self._above.append((torch.zeros_like(ids) if above is None else above) + k * (self.step - 2))
        inputs = self._inputs_of_all(k)
        shape: dict[str, object] = {"q_len": k * self.step, "first_node": 0}
        if bits is not None:
            self._bits.append(bits)
            depths = self.worker.tail_depths(ids, self.step)
            shape |= {"depths": depths, "tail_depths": depths, "ancestor_bits": torch.cat(self._bits, 1)}
        every_id = torch.cat(self._ids, 1).reshape(-1)
        out = self.worker.forward(self.batch, ForwardMode.DRAFT, every_id, inputs, self.module, **shape)
        self._all, normed = (t.unflatten(0, (ids.shape[0], -1)) for t in out)
        self._states = self._all[:, -k:]
        return normed[:, -k:].flatten(0, 1)

    def _inputs_of_all(self, k: int) -> torch.Tensor:
        """States of the module before at the parents of all nodes: the root's for those of the first step."""
        root = self.worker.last[self.batch.rows, self.module - 1].unsqueeze(1).expand(-1, k, -1)
        if not self._above:
            return root.flatten(0, 1)
        rest = self.worker.ops.gather_rows(self._all, torch.cat(self._above, 1))
        return torch.cat([root, rest], 1).flatten(0, 1)
