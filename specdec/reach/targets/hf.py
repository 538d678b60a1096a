"""The attach layer: runs a live `transformers` causal LM over our KV pool, and restores it afterwards.

The model's own code runs, packed [1, T], without an HF cache and without masks. Only its attention calls, the
primitives of its recurrent layers and its expert matmuls are routed to our ops, and only while the engine runs it.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from specdec.backends import ForwardContext, forward_context
from specdec.backends.comm import Communicator
from specdec.backends.differences import bound, distance
from specdec.backends.op import adapter_scope, rows_read
from specdec.backends.recurrent.state_pool import RecurrentOps, StatePool
from specdec.core.batch import AttentionMetadata, ForwardMode
from specdec.core.cache.pool import LayerState
from specdec.core.errors import AttachError
from specdec.core.target import TargetOutput
from specdec.core.text.embedded import EmbeddedChunk
from specdec.reach.parallel.sharded import Sharded, find_group, plain
from specdec.reach.parallel.trials import any_rank
from specdec.reach.targets.adapters.experts import check_fp8_experts
from specdec.reach.targets.adapters.ropes import warn_of_low_precision
from specdec.reach.targets.admission.equality import check_equality, scored
from specdec.reach.targets.admission.probe import ModelSpec, probe
from specdec.reach.targets.admission.recording import CACHE, Positions
from specdec.reach.targets.compiling.echo import echoing
from specdec.reach.targets.images import Images
from specdec.reach.targets.lora import Lora
from specdec.reach.targets.marks import ATTACHED, LAYER_ID, Mark, is_attached, owner_of
from specdec.reach.targets.route import Route
from specdec.reach.targets.shape import LAST, TargetShape
from specdec.reach.targets.taps import UNORDERED, Taps

if TYPE_CHECKING:  # it imports private parts of torch, which uncompiled engines do not need
    from specdec.graphs.compile.trace import Traced

NUM_TRIED = 7  # tokens of the forward that shows which layers can have adapters
ATTACHED_ALREADY = "it is attached already; call detach() on that engine first, which is specdec.engine_of(model)"


class HFTarget:
    """A live model, admitted by `probe`, run in two parts: its layers, and the head over the rows that need logits.

    aux_layers: indices of layers whose output the draft reads, low to high, or (LAST,) for the last hidden states.
    compiled: replaces the live model's layers, in prefills and in rounds. any_rank: returns whether something is so on
    any rank of a sharded model; all ranks call it. used_by: returns the engine that runs the model, or None; the engine
    sets it, and is not kept alive by it. lora: adapters that requests choose, if any. images: embeds prompts with
    images. keeps_latents: whether K/V of attention over latents is stored as latents.
    """

    any_rank: Callable[[bool], bool] = staticmethod(bool)
    used_by: Callable[[], Any] = staticmethod(lambda: None)
    lora: Lora | None = None

    def __init__(
        self, model: PreTrainedModel, join: Callable[[Communicator], None] | None = None, keeps_latents: bool = True
    ):
        """join: gets a sharded model's communicator before it is used, so that its ranks can wait for each other.

        keeps_latents: see the class; always off for a sharded model, whose ranks have their own heads.
        """
        self.model = model
        if is_attached(model):
            gc.collect()  # an unreferenced engine may not have been collected yet
        if is_attached(model):
            raise AttachError(type(model).__name__, [ATTACHED_ALREADY])
        self.comm: Communicator | None = None
        self._sharded: Sharded | None = None
        group = find_group(model)
        self.keeps_latents = keeps_latents and group is None
        try:
            if group is not None:
                self.comm = Communicator(group, model.device)
                if join is not None:
                    join(self.comm)
                self._sharded = plain(model, self.comm.name)
            with sdpa_kernel(SDPBackend.MATH):  # the others take seconds to load, for a dozen tokens
                self._admit(model)
        except BaseException:
            self._restore()
            raise

    def _admit(self, model: PreTrainedModel) -> None:
        """Probe the model and mark it; AttachError for one that cannot be attached."""
        self.spec: ModelSpec = probe(model, self.keeps_latents)
        if any(is_attached(module) for module in self.spec.modules):
            raise AttachError(type(model).__name__, ["some of its layers belong to a model that is attached already"])
        self.aux_layers: tuple[int, ...] = ()
        self._reads_end = False  # whether the draft reads results that depend on the last attention
        self._taps = Taps()
        self.compiled: dict[bool, Traced] = {}  # by whether it is for prefills
        self._last_position: int | None = None
        self._no_ids = torch.zeros(1, 1, dtype=torch.int64, device=self.device)  # not read by a stubbed decoder
        warn_of_low_precision(model)
        self.route = Route(model, self.spec)
        self.images = Images(model, self.spec)
        for module in self.spec.modules:
            setattr(module, ATTACHED, Mark(self))
        setattr(model, ATTACHED, Mark(self))

        def run(metadata: AttentionMetadata, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.layers(metadata.mode, ids, metadata.positions)[0])

        together = partial(any_rank, group=self.group, device=self.device) if self.group else bool
        check_fp8_experts(model)
        check_equality(model, self.spec, run, self.dtype, self.device, together)
        self.route.multiplies = True

    @torch.inference_mode()
    def check_head(self) -> None:
        """Raise AttachError if our kernels for the output head, which admission does without, give other logits."""
        random = torch.Generator().manual_seed(0)
        states = torch.randn(8, self.spec.hidden_size, generator=random, device="cpu").to(self.device, self.dtype)
        ours = self.head(states)
        self.route.multiplies = False
        theirs = self.head(states)
        self.route.multiplies = True
        error, allowed = distance(*scored(ours, theirs)), bound(self.dtype)
        if self.any_rank(not error <= allowed):
            reason = f"our matmul for its output head differs from its own by {error:.1e} (allowed: {allowed:.1e})"
            raise AttachError(type(self.model).__name__, [reason])

    @property
    def group(self) -> str:
        """The name of the process group that the model is sharded over; empty if it is whole."""
        return "" if self.comm is None else self.comm.name

    @property
    def settle(self) -> Callable[[], None] | None:
        """Return a function that waits for the device, and raises RankError if a rank is gone that the device waits
        for; None for a model that is not sharded. Queueing too much work meanwhile would block the host for good."""
        return self.comm.settle if self.comm is not None else None

    @torch.inference_mode()
    def use_lora(self, lora: Lora) -> None:
        """Enable adapters by row; AttachError if an adapted layer does not get one row per token."""
        self.lora, positions = lora, torch.arange(NUM_TRIED, device=self.device)
        ids = positions * max(1, self.spec.num_ids // NUM_TRIED) % self.spec.num_ids  # experts get some of them
        try:
            with self.routed(), adapter_scope(lora.in_turn(NUM_TRIED)), echoing():
                self.run_layers(ids, positions)
        except ValueError as error:
            raise AttachError(type(self.model).__name__, [str(error)]) from error

    @property
    def adapters(self) -> Mapping[str, int]:
        """The numbers of adapters that requests choose, by name."""
        return {} if self.lora is None else self.lora.numbers

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device  # type: ignore[return-value]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights, and so of the KV pool."""
        return self.embed_tokens.weight.dtype  # type: ignore[return-value]

    @property
    def embed_tokens(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def row_states(self, num_rows: int, max_tail: int, ops: RecurrentOps, num_kept: int) -> tuple[LayerState, ...]:
        """Make the state by row of recurrent layers, which `ops` work on, if there are any.

        max_tail: nodes that a round may have a row run; num_kept: snapshots for shared prefixes.
        """
        specs = self.spec.recurrent
        return (StatePool(specs, num_rows, max_tail, self.dtype, self.device, ops, num_kept),) if specs else ()

    @property
    def shape(self) -> TargetShape:
        """Sizes and modules that a draft head must match."""
        return replace(TargetShape.of(self.model), comm=self.comm)

    def forward(self, context: ForwardContext, metadata: AttentionMetadata, input_ids: torch.Tensor) -> TargetOutput:
        with forward_context(context, metadata):
            rotary = metadata.positions if metadata.rotary is None else metadata.rotary
            hidden, aux = self.layers(metadata.mode, input_ids, rotary)
        return TargetOutput(self.head(hidden), aux)

    def layers(
        self, mode: ForwardMode, input_ids: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `core.target.Target.layers`. Attention goes to the scope in force; rows do not interact elsewhere, so any
        T can be captured."""
        if self._last_position is not None:
            positions = positions.clamp(max=self._last_position)
        compiled = self.compiled.get(mode is ForwardMode.EXTEND)
        if compiled is not None:
            rows = None if self._reads_end else rows_read()
            hidden, aux = (*compiled(input_ids, positions, rows=rows), None)[:2]
        else:
            with self.routed():
                hidden, aux = self.run_layers(input_ids, positions)
        return hidden, hidden if self.aux_layers == (LAST,) else aux

    def embedded_layers(
        self, chunk: EmbeddedChunk, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run `layers` with the live layers, on the tokens of a prefill with images; positions [N]."""
        given = {**self._placed(positions), "inputs_embeds": chunk.embeds.unsqueeze(0)}
        if chunk.positions is not None:
            given["position_ids"] = chunk.positions.unsqueeze(1)
        if chunk.is_visual is not None:
            given |= {"visual_pos_masks": chunk.is_visual.unsqueeze(0), "deepstack_visual_embeds": chunk.deepstack}
        with self.routed():
            hidden, aux = self._run(given)
        return hidden, hidden if self.aux_layers == (LAST,) else aux

    def read_layers(self, aux_layers: tuple[int, ...]) -> None:
        """Return the outputs of `aux_layers` from `layers` from now on; AttachError for a model that has none."""
        self.aux_layers = aux_layers
        if self.tapped and not self.spec.blocks:
            raise AttachError(type(self.model).__name__, [f"the draft reads layers {self.tapped}: {UNORDERED}"])
        self._taps = Taps([self.spec.blocks[i] for i in self.tapped])
        attends = [i for i, block in enumerate(self.spec.blocks) if not self.spec.attending.isdisjoint(block.modules())]
        self._reads_end = LAST in aux_layers or any(i >= attends[-1] for i in aux_layers)

    def run_layers(self, input_ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the live model's own layers, with the outputs of `tapped`; needs `routed`. This function is traced."""
        return self._run({"input_ids": input_ids.unsqueeze(0), **self._placed(positions)})

    def _run(self, given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
        out = self.spec.stack(use_cache=False, output_hidden_states=False, **given)
        aux = self._taps.take()[0].to(self.dtype) if self.tapped else None
        return out.last_hidden_state[0].to(self.dtype), aux

    def _placed(self, positions: torch.Tensor) -> dict[str, Any]:
        """Return the arguments that pass `positions` [T] to the live model."""
        arguments: dict[str, Any] = {CACHE: Positions(positions)} if self.spec.counts_positions else {}
        if self.spec.takes_positions:
            return {"position_ids": positions.unsqueeze(0), **arguments}
        # Without a mask it would build one as long as the cache and the text.
        return {"attention_mask": torch.ones_like(positions).unsqueeze(0), **arguments}

    @property
    def tapped(self) -> tuple[int, ...]:
        """Layers whose output must be kept during a forward."""
        return tuple(i for i in self.aux_layers if i != LAST)

    @contextmanager
    def routed(self) -> Iterator[None]:
        """Route the model's calls to us within it, see `Route.routed`, and read the outputs of `tapped`."""
        with self.route.routed(), self._taps.reading(), nullcontext() if self.lora is None else self.lora.routed():
            yield

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map last hidden states [N, h] to logits [N, V], including the model's scaling and softcap."""
        ids = self._no_ids.expand(1, hidden.shape[0])
        with self.route.only_head(hidden.unsqueeze(0)):
            return self.model._call_impl(input_ids=ids, use_cache=False).logits[0]  # past what `model.compile()` set

    def expect_positions(self, count: int) -> None:
        """Prepare for rounds that reach position count-1. Positions past the model's limit, where learned position
        tables end, belong to drafts that are never emitted: they take the last position."""
        if count > self.spec.max_positions:
            self._last_position = self.spec.max_positions - 1

    @property
    def parts(self) -> list[tuple[str, torch.Tensor]]:
        """Weights, by name, that ranks share by heads: each has copies of its part, so they must not be written."""
        return [] if self._sharded is None else self._sharded.mixers.parts

    def drop_compiled(self) -> None:
        """Switch back to the live layers; every weight has a storage of its own again.

        An error (out of memory, where a weight is copied) leaves the model usable, and it can be called again.
        """
        for traced in self.compiled.values():
            traced.release()
        self.compiled.clear()

    def detach(self) -> None:
        """Remove our marks and restore the model. A second call does nothing, or continues where the first failed."""
        self.drop_compiled()
        self._restore()

    def _restore(self) -> None:
        """Remove our marks, and restore the forwards and parameters of a sharded model."""
        for module in self.model.modules():
            # Wrappers of PEFT (modules_to_save) pass on the marks of the module that they hold.
            if ATTACHED in vars(module) and owner_of(module) is self:
                delattr(module, ATTACHED)
                module.__dict__.pop(LAYER_ID, None)
        if self._sharded is not None:
            self._sharded.restore()
        if self.comm is not None:
            self.comm.close()
