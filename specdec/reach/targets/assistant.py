"""Assistants of transformers (Gemma 4's): drafts whose layers attend to the K/V of a live target.

The assistant's own code runs, one token per sequence. Its attention calls read a layer of the target's pool: of the
target's layers of the same type, the last that computes its own K/V. `Assistant.routed` changes the model and restores
it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from specdec.backends import LayerSpec, attention
from specdec.core.errors import AttachError
from specdec.reach.targets.admission.placement import placement_reasons
from specdec.reach.targets.hf import HFTarget
from specdec.reach.targets.overrides import ConfigViews, evaluating
from specdec.reach.targets.pretrained import open_draft_model
from specdec.reach.targets.shape import LAST, TargetShape
from specdec.reach.targets.standalone import check_vocabulary

IMPLEMENTATION = "specdec_assistant"


def is_assistant(model: nn.Module) -> bool:
    """Return whether `model` is an assistant: its config says how wide its target is."""
    return isinstance(model, PreTrainedModel) and hasattr(model.config, "backbone_hidden_size")


def unscored_bytes(model: nn.Module) -> int:
    """Return the bytes of an output head with centroids that scoring one token does not read; 0 for other models."""
    own = getattr(model, "masked_embedding", None) if is_assistant(model) else None
    if own is None:
        return 0
    rows = own.vocab_size_per_centroid * (own.num_centroids - own.centroid_intermediate_top_k)
    return rows * own.hidden_size * own.centroids.weight.element_size()


def load_assistant(draft: str | Path | nn.Module, target: HFTarget, tokenizer: Any) -> "Assistant":
    """Fit an assistant to its target. A folder or Hub id is loaded in the target's dtype onto its device.

    tokenizer: the target's, if known; it is compared with the draft's own. ValueError says what does not match,
    AttachError why the model cannot be run.
    """
    model, own = open_draft_model(draft, dtype=target.dtype, device=target.device)
    if not is_assistant(model):
        raise ValueError(f"draft is a {type(model).__name__}: expected an assistant, as Gemma 4 has them")
    check_vocabulary(model, target, own, tokenizer)
    return Assistant(model, target)


class Assistant:
    """A live assistant of `target`; see `core.draft.assistant`. layers, sinks: of the target's pool, as the assistant
    reads it."""

    aux_layers = (LAST,)

    def __init__(self, model: Any, target: HFTarget):
        reasons = placement_reasons(model)
        if reasons:
            raise AttachError(f"the draft, a {type(model).__name__}", reasons)
        _check(model, target)
        self.model, self.shape = model, TargetShape.of(model)
        self._modules = list(model.modules())
        self._views = ConfigViews(self._modules, IMPLEMENTATION)
        self._read = _layers_read(model, target)
        self.layers: list[LayerSpec] = list(target.spec.layers)
        self.sinks = list(target.spec.sinks)
        attending = _attending(model)
        self.num_layers = len(attending)
        for module in attending:
            layer_id = self._read[module.layer_type]
            self.layers[layer_id] = _spec(module, target.spec.layers[layer_id])
            self.sinks[layer_id] = None

    @property
    def state_size(self) -> int:
        return self.shape.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.shape.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        return self.model.pre_projection.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.model.pre_projection.weight.device

    @contextmanager
    def routed(self) -> Iterator[None]:
        with self._views.shown(), evaluating(self.model, self._modules):
            yield

    def step(self, embeds: torch.Tensor, states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        given = self.model.pre_projection(torch.cat([embeds, states], 1)).unsqueeze(1)
        out = self.model.model(
            inputs_embeds=given,
            position_ids=positions.unsqueeze(1),
            attention_mask=dict.fromkeys(self._read),
            shared_kv_states={kind: self._stand_ins(given, i) for kind, i in self._read.items()},
            use_cache=False,
            layers_read=self._read,
        )
        return out.last_hidden_state[:, 0]

    def widened(self, states: torch.Tensor) -> torch.Tensor:
        return self.model.post_projection(states)

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Map own states [N, h_d] to logits [N, V]. A head with centroids scores the tokens of the best centroids; all
        others get a logit just below the least of these."""
        own, rows = self.model.masked_embedding, self.model.lm_head
        if own is None:
            return rows(states)
        _, best = own.centroids(states).topk(own.centroid_intermediate_top_k, 1)
        ids = own.token_ordering.long().view(own.num_centroids, -1)[best].flatten(1)  # [N, tokens of the best]
        scores = (rows.weight[ids] @ states.unsqueeze(2)).squeeze(2)
        least = scores.amin(1, keepdim=True) - 1.0
        return least.expand(-1, self.vocab_size).scatter(1, ids, scores)

    def _stand_ins(self, like: torch.Tensor, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return k and v [N, Hkv, 1, dim] that stand in for those in the pool: ones, so that outputs of `Echo` depend
        on the queries."""
        layer, one = self.layers[layer_id], like.new_ones(1)
        shape = (like.shape[0], layer.num_kv_heads, 1)
        return one.expand(*shape, layer.qk_dim), one.expand(*shape, layer.v_dim)


def _attend(
    module: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention_mask: Any = None,
    *,
    layers_read: dict[str, int],
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend through our op to a layer of the target's pool; q [N, Hq, 1, dim]."""
    out = attention(q[:, :, 0], k[:, :, 0], v[:, :, 0], layers_read[module.layer_type])
    return out.unsqueeze(1), None


AttentionInterface.register(IMPLEMENTATION, _attend)


def _attending(model: nn.Module) -> list[Any]:
    """List the attention modules of an assistant, which has no others."""
    return [module for module in model.modules() if hasattr(module, "is_kv_shared_layer")]


def _layers_read(model: nn.Module, target: HFTarget) -> dict[str, int]:
    """Return the target's layer that each type of the assistant's layers reads: the last that makes its own K/V."""
    made: dict[str, int] = {}
    for layer_id, module in enumerate(target.spec.modules):
        if not getattr(module, "is_kv_shared_layer", True):
            made[str(module.layer_type)] = layer_id
    wanted = list(dict.fromkeys(module.layer_type for module in _attending(model)))
    if missing := [kind for kind in wanted if kind not in made]:
        raise ValueError(
            f"the assistant attends to K/V of {missing} layers; the target, a {type(target.model).__name__}, has "
            f"{sorted(made) or 'no known layer types'}: use the assistant made for this target"
        )
    return {kind: made[kind] for kind in wanted}


def _spec(module: Any, read: LayerSpec) -> LayerSpec:
    """Return the spec of an assistant's attention to K/V of the target's layer `read`."""
    num_heads = module.q_proj.out_features // module.head_dim
    if module.head_dim != read.qk_dim or num_heads % read.num_kv_heads:
        raise ValueError(
            f"the assistant's {module.layer_type} layers have {num_heads} query heads of {module.head_dim}, the "
            f"target's K/V {read.num_kv_heads} heads of {read.qk_dim}; use the assistant made for this target"
        )
    # Its queries are one position past the last key, and transformers lets a window reach that much further.
    window = None if module.sliding_window is None else module.sliding_window + 1
    return replace(
        read, num_heads=num_heads, scaling=module.scaling, window=window, softcap=None, has_sinks=False, chunk=None
    )


def _check(model: Any, target: HFTarget) -> None:
    """Raise ValueError unless the assistant fits the target's width, dtype and device, and the target is not
    sharded."""
    if target.group:
        raise ValueError(
            "the model is sharded, so each rank holds only a part of the K/V that an assistant reads; use another draft"
        )
    weight = model.pre_projection.weight
    facts = {
        "hidden size": (model.config.backbone_hidden_size, target.spec.hidden_size),
        "dtype": (weight.dtype, target.dtype),
        "device": (weight.device, target.device),
    }
    problems = [f"{name} {has} where the target has {wants}" for name, (has, wants) in facts.items() if has != wants]
    if problems:
        what = f"the assistant, a {type(model).__name__}, has {', '.join(problems)}"
        raise ValueError(f"{what}; use the assistant made for this target, in its dtype and on its device")
