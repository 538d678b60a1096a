"""The contracts between an engine and live models: `Target` runs one, `LiveModels` is what else is done with them.

`targets.hf.HFTarget` and `assembly.models` implement them for `transformers`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import nn

from specdec.backends.op import ForwardContext
from specdec.backends.recurrent.state_pool import RecurrentSpec
from specdec.core.batch import AttentionMetadata, ForwardMode

if TYPE_CHECKING:
    from specdec.core.text.embedded import EmbeddedChunk, EmbeddedPrompt


class TargetOutput(NamedTuple):
    """Output of a forward: logits [T, V], and aux [T, num_aux*h] or None."""

    logits: torch.Tensor
    aux: torch.Tensor | None


class TargetSpec(Protocol):
    """Sizes of a target. recurrent: by recurrent layer. num_ids: tokens that it can read and score."""

    @property
    def recurrent(self) -> Sequence[RecurrentSpec]: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def num_ids(self) -> int: ...


class ReadsImages(Protocol):
    """Embeds prompts with images for a target; see `targets.images.Images`."""

    names: frozenset[str]

    def embed(self, inputs: Mapping[str, Any], wants_keys: bool) -> "list[EmbeddedPrompt | None]": ...


class Target(Protocol):
    """A model that an engine runs: the target, or a standalone draft.

    model: the live module. aux_layers: layers whose outputs `layers` returns beside the last hidden states. any_rank:
    returns True if it gets True on any of the ranks that share the model, which all call it. group: name of their
    process group; "" of a whole model. settle: waits for the device where ranks wait for each other; None of a whole
    model. shape: sizes and modules that a draft must match (`targets.shape.TargetShape`). compiled: what replaces the
    live layers, by whether it serves prefills. adapters: numbers, from 1 on, of LoRA adapters that requests choose.
    """

    model: Any
    aux_layers: tuple[int, ...]
    any_rank: Callable[[bool], bool]
    compiled: dict[bool, Any]

    @property
    def images(self) -> ReadsImages: ...
    @property
    def adapters(self) -> Mapping[str, int]: ...
    @property
    def spec(self) -> TargetSpec: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def group(self) -> str: ...
    @property
    def settle(self) -> Callable[[], None] | None: ...
    @property
    def embed_tokens(self) -> nn.Module: ...
    @property
    def shape(self) -> Any: ...

    def forward(self, context: ForwardContext, metadata: AttentionMetadata, input_ids: torch.Tensor) -> TargetOutput:
        """Run layers and head on packed input_ids [T] int64, in the context of `metadata`."""

    def layers(
        self, mode: ForwardMode, input_ids: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run all but the head on input_ids, positions [T] int64: last hidden states [T, h], aux [T, num_aux*h]."""

    def embedded_layers(
        self, chunk: "EmbeddedChunk", positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run what `layers` does on tokens of a prefill with images, at `positions` [N] int64."""

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map last hidden states [N, h] to logits [N, V]."""

    def drop_compiled(self) -> None:
        """Switch back to the live layers."""

    def detach(self) -> None:
        """Leave the model as it was before the attach."""


class LiveModels(Protocol):
    """The models of target and draft, apart from the forwards that an engine runs.

    prefill_mode: "piecewise", "breakable" or "off", once they are compiled. how_compiled, how_draft_compiled: how the
    layers of either came to run as they do, in words; compile_seconds: what that took.
    """

    prefill_mode: str
    how_compiled: str
    how_draft_compiled: str
    compile_seconds: float

    def compile(self) -> None:
        """Compile layers as the engine's settings say. GraphError if compiling is required and fails."""

    def check(self) -> bool:
        """Make the comparisons with live layers and head that `compile` deferred, since kernels were being compiled.

        If layers differ, compile again, compare at once, which may end in live layers, and return False. Raises the
        errors of `compile`, and AttachError for a head that differs.
        """

    def share(self, turns: AbstractContextManager[Any], is_baked: bool) -> None:
        """Make other callers of the models wait for `turns` from now on, and watch the state that forwards read.

        is_baked: graphs or compiled layers hold parts of the models as they are now.
        """

    def follow(self) -> bool:
        """Return True if the models compute something else than at the last call, so that cached K/V is invalid.

        GraphError for a change that the engine cannot follow.
        """

    def has_changed(self) -> bool:
        """Return True if `follow` would return True, or raise."""

    def reread(self) -> None:
        """Refresh copies of weights, as after a change that `follow` does not detect."""

    def stepping(self) -> AbstractContextManager[None]:
        """Return a context for the forwards of a step."""

    def close(self) -> None:
        """Stop watching, and let others call the models without waiting."""
