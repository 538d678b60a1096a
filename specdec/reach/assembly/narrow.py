"""A smaller output head for a draft: over frequent tokens only (FR-Spec, arXiv 2502.14856), or with quantised weights.

A token that the draft cannot propose costs a rejected position where it is due, and nothing else: the target verifies
as before.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from specdec.backends.linear import linear
from specdec.backends.linear.fp8 import in_blocks, takes, times_blocks
from specdec.core.config import EngineConfig
from specdec.core.draft.head import DraftHead
from specdec.core.draft.worker import NarrowHead
from specdec.core.target import Target
from specdec.reach.targets.assistant import Assistant
from specdec.reach.targets.shape import eos_ids_of

TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 6e-2}  # of the largest logit; of wider types 1e-4
NUM_STATES = 4  # states that both heads score


def narrow_head(
    config: EngineConfig, draft: DraftHead | Target | Assistant | None, target: Target
) -> NarrowHead | None:
    """Return the output head of `draft` over the tokens of `EngineConfig.draft_vocab`, with the weights of
    `draft_weights`; None if neither changes it.

    ValueError for ids that the target does not have, for too few ids that the draft scores, for a draft without a
    model, and for output heads with scaling or softcaps, which rows alone cannot represent. Ranks that share `target`
    all call it.
    """
    if config.draft_vocab is None and config.draft_weights is None:
        return None
    if draft is None:
        raise ValueError(f"{_told(config)}: expected a draft with a model, whose output head it makes smaller")
    if not isinstance(draft, DraftHead):
        scored = torch.arange(draft.shape.vocab_size, device=draft.device)
        score, rows, output = draft.head, draft.shape.lm_head_rows(), draft.shape.lm_head
    else:
        scored, own = draft.hot_ids, draft.lm_head
        score = own or target.head
        rows = target.shape.lm_head_rows() if own is None else own.weight.detach()
        output = target.shape.lm_head if own is None else own
    places = _places(config, scored, target)
    is_fp8 = config.draft_weights == "fp8" and takes(len(places), rows.shape[1])
    if len(places) == len(scored) and not is_fp8:
        return None
    bias = _bias(config, output, len(scored))
    narrow = NarrowHead(scored[places], rows[places.to(rows.device)], None if bias is None else bias[places], linear)
    _check(config, narrow, score, places)
    return replace(narrow, weight=in_blocks(narrow.weight), product=times_blocks) if is_fp8 else narrow


def _told(config: EngineConfig) -> str:
    wanted = config.draft_vocab
    if wanted is None:
        return f"draft_weights={config.draft_weights!r}"
    return f"draft_vocab={wanted}" if isinstance(wanted, int) else f"draft_vocab of {len(wanted)} ids"


def _places(config: EngineConfig, scored: torch.Tensor, target: Target) -> torch.Tensor:
    """Return where in `scored` [n] int64, ascending, the wanted ids are: [dv] int64, ascending."""
    wanted, size = config.draft_vocab, target.spec.vocab_size
    if wanted is None:
        return torch.arange(len(scored), device=scored.device)
    if isinstance(wanted, int):
        ends = scored.new_tensor(eos_ids_of(target.model))  # drafts should be able to propose these
        is_wanted = (scored < wanted) | torch.isin(scored, ends)
    else:
        strange = [i for i in wanted or () if i >= size]
        if strange:
            raise ValueError(f"{_told(config)}: expected ids from 0 to {size - 1}, not {strange[:5]} ({len(strange)})")
        is_wanted = torch.isin(scored, scored.new_tensor(wanted))
    places = is_wanted.nonzero().flatten()  # a sync, as in `_check`: at attach, once
    if len(places) < max(config.topk, 2):
        raise ValueError(
            f"{_told(config)}: the draft scores {len(places)} of them; expected at least {max(config.topk, 2)}"
        )
    return places


def _bias(config: EngineConfig, output: nn.Module, num_scored: int) -> torch.Tensor | None:
    bias = getattr(output, "bias", None)
    if bias is not None and len(bias) != num_scored:
        raise ValueError(f"{_told(config)}: the output head's bias is sharded across ranks; leave it out")
    return None if bias is None else bias.detach()


@torch.no_grad()
def _check(
    config: EngineConfig, narrow: NarrowHead, score: Callable[[torch.Tensor], torch.Tensor], places: torch.Tensor
) -> None:
    """Score a few states with both heads."""
    weight = narrow.weight
    random = torch.Generator().manual_seed(0)
    states = torch.randn(NUM_STATES, weight.shape[1], generator=random, device="cpu").to(weight.device, weight.dtype)
    whole, own = score(states)[:, places].float(), narrow(states).float()
    if not (whole - own).abs().max() <= TOLERANCE.get(weight.dtype, 1e-4) * whole.abs().max():
        raise ValueError(
            f"{_told(config)}: this model's output head does more than multiply (it scales or caps logits), so rows of "
            "it score differently; leave it out"
        )
