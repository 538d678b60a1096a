"""The attach layer: runs a live `transformers` causal LM over our KV pool, and leaves it as it was afterwards.

The model's own code runs, packed [1, T], without an HF cache and without masks; only its attention calls are routed,
and only while we run it (the implementation name is set on its configs inside `forward` and put back).
"""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from specdec.backends import ForwardContext, attention, forward_context
from specdec.batch import AttentionMetadata, ForwardMode
from specdec.errors import AttachError
from specdec.models.loader import TargetShape
from specdec.models.probe import (
    ModelSpec,
    attention_configs,
    attention_implementation,
    batched_experts,
    probe,
    waiting_configs,
)

ATTACHED = "_specdec_attached"
LAYER_ID = "_specdec_layer_id"


@dataclass(frozen=True)
class TargetOutput:
    """logits [N, V] of the rows asked for; aux [T, num_aux*h] of all rows, or None."""

    logits: torch.Tensor
    aux: torch.Tensor | None


def _routed_attention(
    module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **kw: Any
) -> tuple[torch.Tensor, None]:
    """HF's attention call, q/k/v [1, heads, T, dim]: through our op, [1, T, heads, v_dim] back."""
    out = attention(q[0].transpose(0, 1), k[0].transpose(0, 1), v[0].transpose(0, 1), getattr(module, LAYER_ID))
    return out.unsqueeze(0), None


AttentionInterface.register("specdec", _routed_attention)


class HFTarget:
    """A live model, admitted by `probe`. `aux_layers`: indices of layers whose output the draft wants, low to high."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        if getattr(model, ATTACHED, False):
            raise AttachError(type(model).__name__, ["it is attached already; call detach() on that engine first"])
        self.spec: ModelSpec = probe(model)
        self.aux_layers: tuple[int, ...] = ()
        self._configs = attention_configs(model)
        self._waiting = waiting_configs(self._configs, self.dtype)
        _warn_about_rotary(model)
        for i, module in enumerate(self.spec.modules):
            setattr(module, LAYER_ID, i)
        setattr(model, ATTACHED, True)

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        return self.embed_tokens.weight.device  # type: ignore[return-value]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights, and so of the KV pool."""
        return self.embed_tokens.weight.dtype  # type: ignore[return-value]

    @property
    def embed_tokens(self) -> nn.Module:
        """The input embedding, which EAGLE heads share."""
        return self.model.get_input_embeddings()

    @property
    def shape(self) -> TargetShape:
        """What a draft head must match."""
        return TargetShape(
            hidden_size=self.spec.hidden_size,
            vocab_size=self.spec.vocab_size,
            num_layers=len(self.spec.layers),
            embed_tokens=self.embed_tokens,
            lm_head=self.model.get_output_embeddings(),
        )

    def forward(
        self,
        context: ForwardContext,
        metadata: AttentionMetadata,
        input_ids: torch.Tensor,
        logits_to_keep: torch.Tensor | slice | None,
    ) -> TargetOutput:
        """One packed forward of input_ids [T]. logits_to_keep [N] int64 rows get logits; None: all rows."""
        wanted: Any = list(self.aux_layers) or False
        keep = 0 if logits_to_keep is None else logits_to_keep
        # A round must not wait for the host; `generate` decodes on a GPU with batched experts, too.
        waiting = () if metadata.mode is ForwardMode.EXTEND or not input_ids.is_cuda else self._waiting
        with (
            attention_implementation(self._configs, "specdec"),
            batched_experts(waiting),
            forward_context(context, metadata),
        ):
            out = self.model(
                input_ids=input_ids.unsqueeze(0),
                position_ids=metadata.positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=keep,
                output_hidden_states=wanted,
            )
        aux = torch.cat([out.hidden_states[i][0] for i in self.aux_layers], -1) if self.aux_layers else None
        return TargetOutput(out.logits[0], aux)

    def detach(self) -> None:
        """Take our marks off the model; it is as it was."""
        for module in self.spec.modules:
            delattr(module, LAYER_ID)
        delattr(self.model, ATTACHED)


def _warn_about_rotary(model: nn.Module) -> None:
    """Rotary frequencies in low precision change every text a little; `model.to(dtype)` makes them so."""
    exact = (torch.float32, torch.float64)
    low = [name for name, b in model.named_buffers() if name.endswith("inv_freq") and b.dtype not in exact]
    if low:
        warnings.warn(
            f"{low[0]} is in low precision: model.to(dtype) rounded the rotary frequencies. The engine reproduces the "
            "model as it is; load with from_pretrained(..., dtype=...) to keep them in fp32.",
            stacklevel=4,
        )
