"""Runs attention outside a captured graph, so that the graph does not depend on live lengths.

Within the graph, K and V go to the pool at static slots and q to a static buffer; then the graph breaks. Outside, at
every replay, the planned forward attends from that buffer into another static one, which the next part of the graph
reads. Nothing else crosses a break, so no code outside ever reads memory that belongs to a graph.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from specdec.backends.base import AnyRope, AttentionCall
from specdec.backends.op import ForwardContext, adapter_scope, adapters_of_tokens, attention_scope
from specdec.core.batch import AttentionMetadata, ForwardMode

Interrupt = Callable[[Callable[[], None]], None]  # takes a callable out of the graph being captured


class AttentionBridge:
    """The static buffers of one model's attention calls, shared by all its layers and all its graphs.

    max_tokens: of the largest graph. interrupt: ends the part of the graph that is being captured, keeps the callable
    it is given for every replay, and begins the next part; outside a capture it calls it immediately. `plan` comes
    before every replay, and before graphs are made: warm-ups attend, too (to tokens of the dummy row, say).
    """

    def __init__(
        self, context: ForwardContext, max_tokens: int, dtype: torch.dtype, device: torch.device, interrupt: Interrupt
    ):
        def buffers(shapes: set[tuple[int, ...]]) -> dict[tuple[int, ...], torch.Tensor]:
            return {shape: torch.zeros(max_tokens, *shape[:2], dtype=dtype, device=device) for shape in sorted(shapes)}

        self.context = context
        self._interrupt = interrupt
        self._q = buffers({(s.num_heads, s.qk_dim) for s in context.layers})
        self._out = buffers({s.answer for s in context.layers})
        self._live: list[AttentionCall] = []  # of the replay in flight, by layer
        self._requests = None if context.state_pool is None else _Requests(context.state_pool.num_rows, device)
        self._adapters = torch.zeros(max_tokens, dtype=torch.int64, device=device)  # of the tokens of a replay

    @contextmanager
    def capturing(self, slots: torch.Tensor) -> Iterator[None]:
        """Capture a forward; k and v go to `slots` [T] int64, read at every replay, and attention breaks the graph."""
        self.context.on_forward(ForwardMode.EXTEND)
        recurrent = nullcontext() if self._requests is None else self.context.recurrent(self._requests.metadata(slots))
        adapted = nullcontext() if self.context.adapters is None else adapter_scope(self._adapters[: slots.shape[0]])
        with attention_scope(_CapturedScope(self, slots)), recurrent, adapted:
            yield

    def plan(self, metadata: AttentionMetadata, size: int) -> None:
        """Prepare a replay of `size` tokens: plan the live forward, which uses the first rows of the buffers, and zero
        the attention output of the other rows, which nothing else writes during a replay."""
        c, num_tokens = self.context, metadata.positions.shape[0]
        c.backend.plan(metadata)
        if self._requests is not None:
            self._requests.take(metadata)
        if c.adapters is not None:
            self._adapters[:num_tokens].copy_(adapters_of_tokens(c.adapters, metadata))
            self._adapters[num_tokens:size].zero_()
        if size > num_tokens:
            for answer in self._out.values():
                answer[num_tokens:size].zero_()
        q, out = ({shape: t[:num_tokens] for shape, t in own.items()} for own in (self._q, self._out))
        self._live = [
            AttentionCall(q[s.num_heads, s.qk_dim], None, None, out[s.answer], c.pool, i, s, sinks)
            for i, (s, sinks) in enumerate(zip(c.layers, c.sinks, strict=True))
        ]

    def attend_planned(self) -> None:
        """Run the attention of every layer of the planned forward."""
        for call in self._live:
            self.context.backend.attend(call)

    def attend(self, call: AttentionCall, slots: torch.Tensor) -> torch.Tensor:
        """Store K, V and q of `call` in the graph and attend outside it; return the static rows of the output."""
        layer, num_tokens = call.layer, slots.shape[0]
        self.context.backend.store(call, slots, self._q[layer.num_heads, layer.qk_dim][:num_tokens])
        self._interrupt(partial(self._attend_live, call.layer_id))
        return self._out[layer.answer][:num_tokens]

    def _attend_live(self, layer_id: int) -> None:
        """Run the attention of one layer of the planned forward."""
        if not self._live:
            raise RuntimeError("no batch is planned: call AttentionBridge.plan() before graphs are captured")
        self.context.backend.attend(self._live[layer_id])


@dataclass(frozen=True)
class _CapturedScope:
    """Answers attention calls while a graph is captured."""

    bridge: AttentionBridge
    slots: torch.Tensor

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, rope: AnyRope | None
    ) -> torch.Tensor:
        out = q  # unused: a store fills no output
        return self.bridge.attend(self.bridge.context.call(q, k, v, out, layer_id, rope), self.slots)

    def store(self, k: torch.Tensor, v: torch.Tensor, layer_id: int, rope: AnyRope | None) -> None:
        self.bridge.context.store(k, v, layer_id, rope, self.slots)


class _Requests:
    """Inputs of recurrent layers in a prefill, at fixed addresses, so that these layers need no break of the graph.

    num_rows: rows of state, which is also the most requests. Requests beyond the live ones have no tokens.
    """

    def __init__(self, num_rows: int, device: torch.device):
        self._dummy_row = num_rows - 1
        self._rows, self._prefix_lens = torch.zeros(2, num_rows, dtype=torch.int64, device=device).unbind()
        self._qo_indptr = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)

    def take(self, metadata: AttentionMetadata) -> None:
        """Copy the inputs of a live batch; of a rehearsal with more requests than rows, those of the first ones."""
        num = min(metadata.num_reqs, self._rows.shape[0])
        self._rows[:num].copy_(metadata.rows[:num])
        self._prefix_lens[:num].copy_(metadata.prefix_lens[:num])
        self._qo_indptr[: num + 1].copy_(metadata.qo_indptr[: num + 1])
        self._rows[num:].fill_(self._dummy_row)
        self._qo_indptr[num + 1 :].copy_(metadata.qo_indptr[num : num + 1].expand(self._rows.shape[0] - num))

    def metadata(self, slots: torch.Tensor) -> AttentionMetadata:
        """Return metadata for capturing a forward of as many tokens as `slots`; its attention fields are unused."""
        num_tokens = slots.shape[0]
        return AttentionMetadata(
            mode=ForwardMode.EXTEND,
            slot_table=self._qo_indptr.unsqueeze(0),  # unused by recurrent layers
            rows=self._rows,
            prefix_lens=self._prefix_lens,
            positions=slots,
            out_cache_loc=slots,
            qo_indptr=self._qo_indptr,
            q_len=num_tokens,
            tail_len=num_tokens,
            max_prefix=0,
        )
