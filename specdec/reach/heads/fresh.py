"""New draft heads for a target, initialised so that their logits are meaningful before the first training step.

A head's projection passes the target's state through and its layers add little, so at first it scores that state with
the target's own output head.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.core.draft.head import DraftHead
from specdec.reach.heads.base import LayerConfig
from specdec.reach.heads.block import BlockConfig, BlockHead
from specdec.reach.heads.eagle import EagleConfig, EagleHead
from specdec.reach.heads.eagle3 import Eagle3Config, Eagle3Head, default_aux_layers
from specdec.reach.heads.nextn import NextNHead, full_attention_layer
from specdec.reach.targets.shape import TargetShape, decoder_of, vocab_size_of

DRAFT_VOCAB = 8192  # tokens that a head scores by default
FC_NOISE = 1e-3  # std; small beside the identity, enough to tell the columns of the other features apart
MOST_GAIN = 10.0  # largest gain of a norm that undoes another
MLP_WIDTHS = ("intermediate_size", "ffn_dim", "decoder_ffn_dim", "n_inner")  # names of it in configs
QUIET_OUT = 0.1  # share of the usual std for projections that add to the residual stream


def layer_config(model: PreTrainedModel, intermediate_size: int) -> LayerConfig:
    """Return the config of a draft layer with the attention heads and rope theta of `model`."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None) or max(1, config.hidden_size // 64)  # Mamba has none
    return LayerConfig(
        hidden_size=config.hidden_size,
        intermediate_size=intermediate_size,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        rms_norm_eps=float(getattr(config, "rms_norm_eps", 1e-5)),
        rope_theta=rope_theta(config),
    )


def mlp_width(model: PreTrainedModel) -> int:
    """Return the MLP width of `model`, whatever its config calls it; four times hidden_size if it has none."""
    config = model.config.get_text_config()
    widths = (getattr(config, name, None) for name in MLP_WIDTHS)
    return next((width for width in widths if isinstance(width, int)), 4 * config.hidden_size)


def eagle3_config(
    model: PreTrainedModel,
    draft_vocab_size: int | None,
    aux_layers: Sequence[int] | None = None,
    intermediate_size: int | None = None,
    num_layers: int | None = None,
) -> Eagle3Config:
    """Return the shape of an EAGLE-3 head for `model`. Default: one layer, with MLPs twice as wide as the target's.
    aux_layers: three, ascending, else ValueError; None: `default_aux_layers`."""
    shape = TargetShape.of(model)
    layers = tuple(aux_layers) if aux_layers else default_aux_layers(shape.num_layers)
    if len(layers) != 3:
        raise ValueError(f"aux_layers={layers}: expected three layers, low to high")
    return Eagle3Config(
        layer=layer_config(model, intermediate_size or 2 * mlp_width(model)),
        target_hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        draft_vocab_size=min(draft_vocab_size or DRAFT_VOCAB, shape.vocab_size),
        aux_layers=layers,
        num_layers=num_layers or 1,
    )


@torch.no_grad()
def new_eagle3(model: PreTrainedModel, config: Eagle3Config, hot_ids: torch.Tensor, seed: int) -> Eagle3Head:
    """Make an EAGLE-3 head in fp32 on the target's device. hot_ids: [dv] int64, its vocabulary, else ValueError.

    lm_head and norm start as the target's; fc passes the highest feature through.
    """
    if hot_ids.numel() != config.draft_vocab_size:
        raise ValueError(f"hot_ids has {hot_ids.numel()} ids: expected draft_vocab_size={config.draft_vocab_size}")
    head = Eagle3Head(config)
    head.set_hot_vocab(hot_ids)
    random = torch.Generator().manual_seed(seed)
    _quiet(head.midlayer, random)
    _quiet(getattr(head, "additional_layers", nn.ModuleList()), random)
    _pass_last(head.fc, random)
    rows = model.get_output_embeddings().weight
    norm, lm_head = head.norm.get_parameter("weight"), head.get_parameter("lm_head.weight")
    norm.copy_(_final_norm_weight(model, config.layer.hidden_size))
    lm_head.copy_(rows[head.hot_ids.to(rows.device)])
    return head.to(rows.device)


def hot_head(
    config_of: Callable[..., Any], new: Callable[..., DraftHead], model: Any, shape: Any, seed: int, hot_ids: Any
) -> DraftHead:
    """Make a head that scores its own choice of tokens; see `HeadFormat.fresh`."""
    config = config_of(model, shape.draft_vocab_size, shape.aux_layers, shape.intermediate_size, shape.num_layers)
    return new(model, config, hot_ids(config.draft_vocab_size), seed)


@torch.no_grad()
def with_vocab(head: DraftHead, hot_ids: torch.Tensor, rows: torch.Tensor) -> Eagle3Head:
    """Return a copy of an EAGLE-3 head with the vocabulary `hot_ids` [dv] int64, and its lm_head from `rows` [V, h].
    rows: the weight of the target's output head."""
    assert isinstance(head, Eagle3Head), "other heads score all tokens, or have more than rows for each"
    other = Eagle3Head(replace(head.config, draft_vocab_size=hot_ids.numel()))
    names = {name for name, _ in other.named_parameters()} - {"lm_head.weight"}
    other.load_state_dict({name: p for name, p in head.state_dict().items() if name in names}, strict=False)
    other.set_hot_vocab(hot_ids)
    other.get_parameter("lm_head.weight").copy_(rows[other.hot_ids.to(rows.device)])
    return other.to(rows.device)


def block_config(
    model: PreTrainedModel,
    draft_vocab_size: int | None,
    aux_layers: Sequence[int] | None = None,
    intermediate_size: int | None = None,
    num_layers: int | None = None,
) -> BlockConfig:
    """Return the shape of a block head for `model`: causal blocks of 8, a Markov term of rank 128.

    aux_layers: five spread over the target by default. intermediate_size: of its MLPs, by default the target's.
    num_layers: two by default.
    """
    shape = TargetShape.of(model)
    size = min(draft_vocab_size or DRAFT_VOCAB, shape.vocab_size)
    last = shape.num_layers - 1
    spread = [min(max(round(1 + i * (last - 3) / 4), 0), last) for i in range(5)]  # within a target of one layer, too
    layer = layer_config(model, intermediate_size or mlp_width(model))
    return BlockConfig(
        layer=replace(layer, qk_norm=True),
        target_hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        draft_vocab_size=size,
        aux_layers=tuple(aux_layers or sorted(set(spread))),
        block_size=8,
        mask_token_id=0,
        num_layers=num_layers or 2,
        causal=True,
        predicts_next=True,
        has_mask_embedding=True,
        markov_rank=128,
        own_head=size < shape.vocab_size,
    )


@torch.no_grad()
def new_block(model: PreTrainedModel, config: BlockConfig, hot_ids: torch.Tensor, seed: int) -> BlockHead:
    """Make a block head in fp32 on the target's device. hot_ids: [dv] int64, its vocabulary.

    Output head and norm start as the target's; the Markov term starts at zero.
    """
    head = BlockHead(config)
    head.set_hot_vocab(hot_ids)
    random = torch.Generator().manual_seed(seed)
    _quiet(head.layers, random)
    nn.init.normal_(head.fc.weight, std=head.fc.in_features**-0.5, generator=random)
    rows = model.get_output_embeddings().weight
    if head.mask_embedding is not None:
        head.mask_embedding.normal_(std=float(rows.float().std()), generator=random)
    if head.markov_head is not None:
        nn.init.normal_(head.markov_head.markov_w1.weight, std=config.markov_rank**-0.5, generator=random)
        nn.init.zeros_(head.markov_head.markov_w2.weight)
    head.norm.get_parameter("weight").copy_(_final_norm_weight(model, config.layer.hidden_size))
    if head.lm_head is not None:
        head.get_parameter("lm_head.weight").copy_(rows[head.hot_ids.to(rows.device)])
    return head.to(rows.device)


@torch.no_grad()
def new_eagle(model: PreTrainedModel, seed: int, intermediate_size: int | None = None) -> EagleHead:
    """Make an EAGLE-1/2 head in fp32 on the target's device; intermediate_size: of its MLP, by default the target's."""
    layer = layer_config(model, intermediate_size or mlp_width(model))
    head = EagleHead(EagleConfig(layer, vocab_size_of(model), fc_bias=False))
    random = torch.Generator().manual_seed(seed)
    _quiet(head.layers, random)
    _pass_last(head.fc, random)
    return head.to(model.get_input_embeddings().weight.device)


@torch.no_grad()
def new_nextn(model: PreTrainedModel, seed: int, copy_layer: bool = False) -> NextNHead:
    """Make a NextN head in fp32 on the target's device.

    Its out norm starts as the target's final norm and hnorm as its inverse, so the target's state passes through, plus
    the layer's small output. copy_layer: the layer starts as the target's last one with full attention; else random.
    """
    head = NextNHead(model)
    decoder: Any = model.get_decoder()
    mtp: Any = head.mtp[0]
    random = torch.Generator().manual_seed(seed)
    _initialise(mtp, decoder, seed)
    if copy_layer:
        own = decoder.layers[full_attention_layer(model.config.get_text_config())]
        mtp.layer.load_state_dict(own.state_dict())
    _scale_outputs(mtp.layer, QUIET_OUT)
    if not copy_layer:
        _quiet(mtp.layer, random)
    mtp.norm.load_state_dict(decoder.norm.state_dict())
    gain = _final_norm_weight(model, head.hidden_size)
    undone = (gain.square().mean().sqrt() / gain).nan_to_num(0.0).clamp(-MOST_GAIN, MOST_GAIN)
    mtp.hnorm.weight += undone.to(mtp.hnorm.weight) - 1  # a fresh norm's gain is one, whether its weight is 1 or 0
    _pass_last(mtp.eh_proj, random)
    return head.to(model.get_input_embeddings().weight.device)


def _initialise(module: nn.Module, decoder: Any, seed: int) -> None:
    """Initialise `module` as transformers does a new model of the decoder's kind; until then experts, routers and sinks
    are uninitialised memory. That draws from torch's own generator, whose state is restored."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        module.apply(decoder._init_weights)


def _scale_outputs(layer: nn.Module, factor: float) -> None:
    """Scale the projections that add to the residual stream."""
    for name, p in layer.named_parameters():
        if p.dim() > 1 and any(part in name for part in ("o_proj", "down_proj")):
            p.mul_(factor)


def _quiet(layers: nn.Module, random: torch.Generator) -> None:
    """Initialise linear layers at random, with small weights where they add to the residual stream."""
    for name, module in layers.named_modules():
        if isinstance(module, nn.Linear):
            quiet = QUIET_OUT if name.endswith(("o_proj", "down_proj")) else 1.0
            nn.init.normal_(module.weight, std=quiet * module.in_features**-0.5, generator=random)


def _pass_last(projection: nn.Linear, random: torch.Generator) -> None:
    """Initialise `projection` to pass its last block of input columns through; the other columns are noise."""
    nn.init.normal_(projection.weight, std=FC_NOISE, generator=random)
    projection.weight[:, -projection.out_features :] += torch.eye(projection.out_features)


def _final_norm_weight(model: PreTrainedModel, size: int) -> torch.Tensor:
    """Return the gain [size] of the decoder's final norm: an RMS norm's output on ones, which covers 1+w styles too."""
    norm = getattr(decoder_of(model), "norm", None)
    if norm is None:
        return torch.ones(size)
    weight = next(norm.parameters(), torch.ones(size))
    shown = norm(torch.ones(1, size, dtype=weight.dtype, device=weight.device))[0].float()
    return shown if bool(shown.abs().sum() > 0) else torch.ones(size)  # a norm that subtracts the mean gives zeros


def rope_theta(config: Any) -> float:
    """Return the base of the target's rotary embedding, that of its full-attention layers where layers differ."""
    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get("full_attention", parameters)
    return float(parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)
