"""Facts about a draft before it runs: features, shapes, vocabulary, tokenizer, sizes, and problems of its weights."""

from copy import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.core.draft.head import DraftHead, RecyclingHead
from specdec.reach.checkpoints.fitting import is_copy, weight_doubts
from specdec.reach.heads.base import LayerConfig
from specdec.reach.heads.nextn import NextNHead
from specdec.reach.targets.shape import LAST, vocab_size_of
from specdec.reach.targets.weight_bytes import num_bytes

SHAPE = {  # our name to the config's
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate": "intermediate_size",
}


def facts_of(draft: DraftHead | PreTrainedModel, model: PreTrainedModel) -> dict[str, Any]:
    """Return the facts of a loaded draft and its target `model`."""
    facts: dict[str, Any] = {"shape": shape_of(draft), "target_shape": shape_of(model)}
    facts["target_vocab"] = vocab_size_of(model)
    for name, module in (("draft", draft), ("target", model)):
        facts[f"{name}_parameters"] = sum(p.numel() for p in module.parameters())
        facts[f"{name}_bytes"] = num_bytes(module)
    if not isinstance(draft, DraftHead):
        return {**facts, "draft_vocab": vocab_size_of(draft)}
    rows, shares_rows = draft.hot_ids.numel(), _has_targets_rows(draft, model)
    if draft.lm_head is not None and shares_rows:
        facts["draft_parameters"] -= sum(p.numel() for p in draft.lm_head.parameters())
        facts["draft_bytes"] -= num_bytes(draft.lm_head)
    own = {"embedding": draft.embed_tokens is not None, "output head": not shares_rows}
    words = {"output head": f"{rows:,} rows of the output head"} if rows < draft.vocab_size else {}
    return facts | {
        "draft_vocab": rows,
        "reads": "last hidden state" if draft.aux_layers == (LAST,) else "outputs of aux layers",
        "aux_layers": [i for i in draft.aux_layers if i != LAST],
        "recycles": _recycles(draft),
        "own": [name for name, is_own in own.items() if is_own],
        "from_target": [words.get(name, name) for name, is_own in own.items() if not is_own],
    }


def _recycles(head: DraftHead) -> str:
    if not isinstance(head, RecyclingHead):
        return "nothing"
    return f"state {'after' if head.recycles_normed else 'before'} the out norm"


def _has_targets_rows(head: DraftHead, model: PreTrainedModel) -> bool:
    """Return whether the head scores with rows of the target's output head: with that head, or with a copy of rows, as
    EAGLE-3 heads without their own lm_head are loaded."""
    if head.lm_head is None:
        return True
    ours, theirs = head.lm_head.weight, model.get_output_embeddings().weight
    hot = head.hot_ids
    if ours.shape[1] != theirs.shape[1] or int(hot.min()) < 0 or int(hot.max()) >= theirs.shape[0]:
        return False
    return is_copy(ours.detach().cpu(), theirs[hot.to(theirs.device)])


def shape_of(module: nn.Module) -> dict[str, int]:
    """Return hidden, layers, heads, kv_heads, head_dim and intermediate of a head or a model, as far as its config has
    them."""
    layer = getattr(getattr(module, "config", None), "layer", None)
    if isinstance(layer, LayerConfig) and isinstance(module, DraftHead):
        sizes = (layer.hidden_size, len(module.attention_layers), layer.num_heads, layer.num_kv_heads)
        return dict(zip(SHAPE, (*sizes, layer.head_dim, layer.intermediate_size), strict=True))
    config: Any = module.hf_config if isinstance(module, NextNHead) else module.config.get_text_config()  # type: ignore
    config = copy(config)
    config.allow_global_per_layer_attribute_access = True  # if layers differ, as in Gemma 4, take the common values
    found = {ours: getattr(config, theirs, None) for ours, theirs in SHAPE.items()}
    found["head_dim"] = found["head_dim"] or config.hidden_size // config.num_attention_heads
    if isinstance(module, DraftHead):
        found["layers"] = len(module.attention_layers)
    return {name: value for name, value in found.items() if value is not None}


def weight_problems(draft: DraftHead | PreTrainedModel, model: PreTrainedModel) -> list[str]:
    """List the problems that are visible in its weights and maps alone."""
    problems = [f"{doubt}: the training diverged, or the export is broken" for doubt in weight_doubts(draft)]
    if not isinstance(draft, DraftHead):
        return problems
    hot, size = draft.hot_ids, vocab_size_of(model)
    if int(hot.min()) < 0 or int(hot.max()) >= size:
        problems.append(f"d2t leads to target ids {int(hot.min())} to {int(hot.max())}; the target has 0 to {size - 1}")
    elif hot.unique().numel() != hot.numel():
        problems.append(f"d2t leads to {hot.unique().numel()} distinct target ids; expected {hot.numel()}")
    return problems


def embedding_likeness(draft: DraftHead, model: PreTrainedModel) -> float | None:
    """Correlate its own embedding with the target's over all entries; None without one of the same shape."""
    if draft.embed_tokens is None:
        return None
    own, theirs = draft.embed_tokens.get_parameter("weight"), model.get_input_embeddings().get_parameter("weight")
    if own.shape != theirs.shape:
        return None
    both = torch.stack([own.detach().float().flatten(), theirs.detach().float().flatten()])
    return float(torch.corrcoef(both)[0, 1].nan_to_num())  # a constant has no correlation


def untouched_norm(draft: DraftHead) -> str | None:
    """Return the name of a norm whose weights are equal within 1%, as initialised: training would change them."""
    norms = ((name, p.float()) for name, p in draft.named_parameters() if "norm" in name and p.dim() == 1)
    return next((name for name, p in norms if bool(((p - p[0]).abs() <= 0.01 * p[0].abs()).all())), None)
