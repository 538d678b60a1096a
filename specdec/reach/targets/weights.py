"""The watch over live models: which changes an engine follows, and which it refuses."""

from collections.abc import Sequence

from torch import nn
from transformers import PretrainedConfig

from specdec.core.errors import GraphError
from specdec.graphs import Change, ChangeKind, Watch
from specdec.reach.targets.adapters.quantised import Quantised
from specdec.reach.targets.adapters.ropes import varying_ropes
from specdec.reach.targets.admission.quantised import pack_layers, quantised_linears
from specdec.reach.targets.hf import HFTarget
from specdec.reach.targets.marks import HOLDER

# Attributes of modules and configs that no forward reads, or that only change unread results.
_OF_MODELS = ("generate", "generation_config", "gradient_checkpointing", "_gradient_checkpointing_func", "name_or_path")
_OF_CONFIGS = ("use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "output_router_logits")
NEUTRAL = frozenset(
    {*vars(PretrainedConfig()), *_OF_MODELS, *_OF_CONFIGS, "warnings_issued", "_is_hf_initialized", HOLDER}
)
# These keep outputs of layers, or make them require gradients, for checkpointing in transformers and PEFT. No numbers
# change.
PASSIVE = ("transformers.utils.output_capturing", "make_inputs_require_grads", "make_inputs_require_grad")
BAKED = "graphs and compiled layers still use the value at attach()"
POOLS = "the engine's KV pools were allocated for the old value"
ROUTED = "attention and KV pools were set up for the value at attach()"
SHARED = "each rank keeps the copy of its heads made at attach()"


class Weights:
    """Weights of a target and its draft; see `core.target.LiveModels`. is_baked: graphs or compiled layers exist."""

    def __init__(self, target: HFTarget, draft: nn.Module | None, is_baked: bool):
        self._target, self._is_baked = target, is_baked
        self._parts = {id(tensor) for _, tensor in target.parts}
        roots = {"": target.model, **({} if draft is None else {"the draft's ": draft})}
        self._watch = Watch(
            roots,
            free=[rope for root in roots.values() for rope in varying_ropes(root)],  # initial frequencies are read
            tensors=target.parts,
            neutral=NEUTRAL,
            passive=PASSIVE,
        )
        self.close = self._watch.close

    def follow(self) -> bool:
        """See `LiveModels.follow`; undoing a refused change resolves the error."""
        changes = self._watch.changes()
        refused = [(change, why) for change in changes if (why := self._why_refused(change))]
        if refused:
            self._refuse(refused[0][1], [change for change, _ in refused])
        if changes and self._target.lora is not None:
            try:
                self._target.lora.refresh()
            except ValueError as error:
                self._refuse(str(error), changes)
        if changes:
            new = {c.owner for c in changes if c.kind is ChangeKind.TENSOR and isinstance(c.owner, nn.Module)}
            model = self._target.model
            pack_layers([m for m in quantised_linears(model) if m in new], model.get_input_embeddings().weight)
            self._target.spec.adapter(Quantised).refresh({c.owner for c in changes if isinstance(c.owner, nn.Module)})
            self._watch.accept(changes)
            self._target.route.walk()
        return bool(changes)

    def reread(self) -> None:
        if self._target.lora is not None:
            self._target.lora.refresh()

    def has_changed(self) -> bool:
        return bool(self._watch.changes())

    def _why_refused(self, change: Change) -> str:
        if change.kind is ChangeKind.CONVERTED:
            return POOLS
        if change.kind is ChangeKind.WRITTEN:
            return SHARED if id(change.before) in self._parts else ""
        if self._target.lora is not None and self._target.lora.follows(change):
            return ""
        if self._is_baked:
            return BAKED
        return ROUTED if self._target.route.relies_on(change) else ""

    def _refuse(self, why: str, changes: Sequence[Change]) -> None:
        names = list(dict.fromkeys(map(str, changes)))
        raise GraphError(
            f"the model has changed since attach(): {', '.join(names[:3])}; {len(names)} in all: {why}. "
            "Put it back, or detach() and attach() again"
        )
