"""NextN / MTP heads (DeepSeek-V3, arXiv 2412.19437, eq. 21-24): a decoder layer of the target's own class.

The layer is made from the classes of the live target (its decoder layer, norm and rotary embedding), so it has the
family's own attention and experts; only the combination of embedding and hidden state is ours.
"""

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from specdec.backends.base import LayerSpec
from specdec.backends.rope import Rope
from specdec.core.draft.head import Attend, RecyclingHead
from specdec.reach.heads.base import OutputHead
from specdec.reach.targets.adapters.experts import Experts
from specdec.reach.targets.admission.recording import attention_spec
from specdec.reach.targets.shape import LAST, vocab_size_of
from specdec.reach.targets.taps import hidden_of

SHARED = "shared_kv_states"  # an argument of Gemma 4's layers
IMPLEMENTATION = "specdec_head"  # attention of a head's layers: calls the `attend` that its attention module was given


@dataclass(frozen=True)
class NextNConfig:
    """Options of a NextN / MTP head.

    num_layers: MTP modules; draft step j runs module min(j, num_layers-1) on the previous step's state.
    hidden_first: the projection reads [hidden, embedding] (MiMo) instead of [embedding, hidden]. recycles_normed: a
    step feeds back the state after the out norm (serving engines found this to draft better). own_embedding, own_head:
    the head has its own, not the target's.
    """

    num_layers: int = 1
    hidden_first: bool = False
    recycles_normed: bool = True
    own_embedding: bool = False
    own_head: bool = False


def _handed_attention(
    module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **kw: Any
) -> tuple[torch.Tensor, None]:
    """Route HF's attention call, q/k/v [B, heads, T, dim], to the callable of the current forward."""
    spec = attention_spec(q, k, v, kw)
    heads_last = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return module.specdec_attend(*heads_last, spec, kw.get("s_aux")), None  # type: ignore[operator]


AttentionInterface.register(IMPLEMENTATION, _handed_attention)


class NextNLayer(nn.Module):
    """An MTP module: enorm, hnorm, the projection eh_proj, a decoder layer of the target's class, and the out norm."""

    def __init__(self, decoder: nn.Module, config: Any, layer_idx: int):
        super().__init__()
        model: Any = decoder
        size, norm = config.hidden_size, type(model.norm)
        eps = getattr(config, "rms_norm_eps", 1e-6)
        self.enorm, self.hnorm, self.norm = norm(size, eps=eps), norm(size, eps=eps), norm(size, eps=eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.layer = type(model.layers[layer_idx])(config, layer_idx)


class NextNHead(RecyclingHead):
    """A NextN / MTP head for a live `target`; its weights are random until a loader or the trainer sets them.
    ValueError for a target whose decoder lacks the needed modules."""

    algo = "nextn"
    aux_layers = (LAST,)

    def __init__(self, target: PreTrainedModel, config: NextNConfig | None = None):
        super().__init__()
        self.config = c = config or NextNConfig()
        decoder, text = target.get_decoder(), target.config.get_text_config()
        missing = [name for name in ("layers", "norm", "rotary_emb") if getattr(decoder, name, None) is None]
        if missing:
            raise ValueError(f"{type(target).__name__}'s decoder has no {', '.join(missing)}: no NextN layer fits it")
        if SHARED in signature(type(decoder.layers[0]).forward).parameters:
            what = f"layers of {type(target).__name__} take {SHARED}, keys and values of others"
            raise ValueError(f"{what}: no NextN layer fits them; use eagle or eagle3")
        self.hf_config = copy.deepcopy(text)
        self.hf_config._attn_implementation = IMPLEMENTATION
        self.num_modules = c.num_layers
        self.hidden_size = self.target_hidden_size = text.hidden_size
        self.vocab_size = vocab_size_of(target)
        self.recycles_normed = c.recycles_normed
        like = full_attention_layer(text)
        self.mtp = nn.ModuleList([NextNLayer(decoder, self.hf_config, like) for _ in range(c.num_layers)])
        self._experts = Experts(self.mtp)
        with torch.device(target.get_input_embeddings().weight.device):  # a head on the meta device has angles, too
            self.rotary = type(decoder.rotary_emb)(config=self.hf_config)
        differs = "layer_type" in signature(self.rotary.forward).parameters  # one rotary for several kinds of layers
        self._rope_kind = {"layer_type": "full_attention"} if differs else {}
        self.embed_tokens = nn.Embedding(self.vocab_size, self.hidden_size) if c.own_embedding else None
        self.lm_head = OutputHead(self.hidden_size, self.vocab_size, bias=False) if c.own_head else None
        self._seen: list[tuple[LayerSpec, torch.Tensor | None]] = []

    @property
    def attention_layers(self) -> Sequence[LayerSpec]:
        return [spec for spec, _ in self._probe()]

    @property
    def sinks(self) -> Sequence[torch.Tensor | None]:
        return [sinks for _, sinks in self._probe()]

    def routed(self) -> AbstractContextManager[None]:
        return self._experts.routed()

    def rope(self, positions: torch.Tensor) -> Rope:
        like = torch.empty(0, dtype=self.weight.dtype, device=positions.device)
        rows = positions.reshape(1, -1)
        if hasattr(self.rotary, "mrope_section"):  # three grids, all the same for text
            rows = rows.expand(3, *rows.shape)
        cos, sin = self.rotary(like, rows, **self._rope_kind)
        return Rope(cos.reshape(*positions.shape, -1), sin.reshape(*positions.shape, -1))

    def out_norm(self, module: int = 0) -> nn.Module:
        return self.mtp[module].norm  # type: ignore[return-value]

    def run_layers(
        self, embeds: torch.Tensor, hidden: torch.Tensor, rope: Rope, attend: Attend, module: int = 0
    ) -> torch.Tensor:
        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> torch.Tensor:
            if is_flat:
                return attend(q[0], k[0], v[0], None, module).unsqueeze(0)
            return attend(q, k, v, None, module)

        is_flat = embeds.dim() == 2
        return self._run(embeds, hidden, rope, call, module)

    def _run(self, embeds: torch.Tensor, hidden: torch.Tensor, rope: Rope, call: Any, module: int) -> torch.Tensor:
        """Run one MTP module on embeds and hidden, both [T, h] or [B, T, h]."""
        m = self.mtp[module]
        parts = [m.enorm(embeds), m.hnorm(hidden)]  # type: ignore[operator]
        x = m.eh_proj(torch.cat(parts[::-1] if self.config.hidden_first else parts, -1))  # type: ignore[operator]
        shape = x.shape
        cos, sin = (t.reshape(-1, shape[-2], t.shape[-1]) for t in rope)
        layer: Any = m.layer
        attention = next(a for a in layer.modules() if getattr(a, "config", None) is not None and a is not layer)
        attention.specdec_attend = call
        try:
            out = layer(
                x.reshape(-1, *shape[-2:]), attention_mask=None, position_embeddings=(cos, sin), use_cache=False
            )
        finally:
            del attention.specdec_attend
        return hidden_of(out).reshape(shape)

    @torch.no_grad()
    def _probe(self) -> list[tuple[LayerSpec, torch.Tensor | None]]:
        """Return spec and sinks of every module's attention, recorded in a forward of two rows."""

        def record(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *seen: Any) -> torch.Tensor:
            self._seen.append(seen)
            return q.new_zeros(*q.shape[:3], v.shape[3])

        if not self._seen:
            rows = self.weight.new_zeros(2, self.hidden_size)
            rope = self.rope(torch.arange(2, device=rows.device))
            for module in range(self.num_modules):
                self._run(rows, rows, rope, record, module)
        if len(self._seen) != self.num_modules:
            times = f"{len(self._seen) / self.num_modules:g} times through AttentionInterface, expected 1"
            what = f"a {type(self.mtp[0].layer).__name__} attends {times}"
            raise ValueError(f"{what}: no NextN layer fits; use eagle or eagle3")
        return self._seen


def full_attention_layer(config: Any) -> int:
    """Return the index of the target's last layer with full attention, the model of MTP layers; ValueError if none."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    if "full_attention" not in kinds:
        raise ValueError(
            f"layer_types={sorted(set(kinds))}: expected a full-attention layer, the model of an MTP layer"
        )
    return len(kinds) - 1 - kinds[::-1].index("full_attention")
