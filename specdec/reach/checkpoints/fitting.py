"""Checks that tensors fit a head and its target: problems in words, with shapes found and expected, and why."""

import warnings
from collections.abc import Callable, Mapping

import torch
from torch import nn

from specdec.reach.checkpoints.tensors import FLOATS, Shapes

INIT_STD = 0.02  # of embeddings that transformers initialises
ABSOLUTE = "d2t holds absolute target ids; expected offsets (target id = draft id + d2t[draft id])"


def tensor_problems(
    wanted: Mapping[str, tuple[int, ...]],
    optional: Mapping[str, tuple[int, ...]],
    found: Shapes,
    named: Callable[[str], str],
    why: Callable[[str, tuple[int, ...] | None], str],
) -> list[str]:
    """List missing, unexpected, misshapen and quantised tensors; keys are our names, and `named` gives the file's.

    why: the likely cause for a tensor of ours and the shape it has; "" if none is known.
    """
    known = {**optional, **wanted}
    has = {name: shape for name, (shape, _) in found.items()}
    missing = [n for n in wanted if n not in has]
    problems = [_because(f"missing tensor {named(n)} of shape {wanted[n]}", why(n, None)) for n in missing]
    problems += [_because(f"unexpected tensor {named(n)}", why(n, has[n])) for n in has if n not in known]
    problems += [
        _because(f"{named(n)} has shape {has[n]}, expected {shape}", why(n, has[n]))
        for n, shape in known.items()
        if has.get(n, shape) != shape
    ]
    odd = [n for n in known if n in found and found[n][1] not in FLOATS and n not in ("d2t", "t2d")]
    if odd:
        what = f"{named(odd[0])} and {len(odd) - 1} more" if len(odd) > 1 else named(odd[0])
        kinds = ", ".join(sorted({str(found[n][1]) for n in odd}))
        problems.append(f"{what} stored as {kinds}: quantised weights; expected float16, bfloat16 or float32")
    return problems


def _because(problem: str, cause: str) -> str:
    return f"{problem}: {cause}" if cause else problem


def vocab_problems(d2t: torch.Tensor, t2d: torch.Tensor) -> list[str]:
    """List problems of d2t [dv] and t2d [V]: d2t must hold offsets to the ids set in t2d, not absolute ids."""
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool:
        return [f"d2t is {d2t.dtype} and t2d {t2d.dtype}; expected torch.int64 and torch.bool"]
    ids = target_ids(d2t)
    if bool(t2d.all()) and not bool(d2t.any()):
        return [
            f"t2d marks all {t2d.numel()} target tokens and d2t is all zeros: no hot vocabulary was set before export"
        ]
    if t2d.sum() != d2t.numel():
        return [f"t2d marks {int(t2d.sum())} target tokens, d2t has {d2t.numel()} draft tokens"]
    if ids.min() >= 0 and ids.max() < t2d.numel() and bool(t2d[ids].all()) and bool((ids.diff() > 0).all()):
        return []
    if d2t.min() >= 0 and d2t.max() < t2d.numel() and bool(t2d[d2t].all()):
        return [ABSOLUTE]
    return ["d2t does not map the draft vocabulary onto the tokens that t2d marks"]


def full_vocab_problems(d2t: torch.Tensor | None, t2d: torch.Tensor | None) -> list[str]:
    """List problems of d2t and t2d of a head that scores all V tokens: d2t zero or a permutation, t2d all or no ids."""
    problems = []
    marked = 0 if t2d is None else int((t2d != 0).sum())
    if t2d is not None and 0 < marked < t2d.numel():
        problems.append(f"t2d marks {marked} target tokens, but the head scores all {t2d.numel()}: expected all")
    if d2t is None or not bool((d2t != 0).any()):
        return problems
    all_ids = torch.arange(d2t.numel())
    if d2t.is_floating_point() or d2t.dtype == torch.bool:
        problems.append(f"d2t is {d2t.dtype}; expected torch.int64")
    elif not target_ids(d2t).sort().values.equal(all_ids):
        lost = f"d2t does not lead to each of the {d2t.numel()} target tokens once, and the head scores them all"
        problems.append(ABSOLUTE if d2t.long().sort().values.equal(all_ids) else lost)
    return problems


def target_ids(d2t: torch.Tensor) -> torch.Tensor:
    """Return the target id of each draft id, [dv] int64, from offsets d2t [dv]."""
    return d2t.long() + torch.arange(d2t.numel())


def weight_doubts(module: nn.Module) -> list[str]:
    """List weights that no training produces: non-finite ones, and an output head of zeros.

    One pass over the weights, and one device sync at the end.
    """
    named = [(name, p) for name, p in module.named_parameters() if p.dtype in FLOATS]  # others are quantised
    heads = [(name, p) for name, p in named if name.endswith("lm_head.weight")]
    if not named or any(p.is_meta for _, p in named):
        return []
    flags = [torch.isfinite(p).all() for _, p in named] + [p.any() for _, p in heads]
    good = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()
    broken = [name for (name, _), is_good in zip(named, good, strict=False) if not is_good]
    empty = [name for (name, _), is_good in zip(heads, good[len(named) :], strict=True) if not is_good]
    many = f"{len(broken)} tensors hold NaN or infinity, first " if len(broken) > 1 else ""
    doubts = [many + broken[0] if many else f"{broken[0]} holds NaN or infinity"] if broken else []
    return doubts + [f"{name} is all zeros, so that every token is as likely as any other" for name in empty]


def warn_of_weights(module: nn.Module, where: str) -> None:
    """Warn of the weights that `weight_doubts` lists. Text stays correct, since drafts are verified."""
    for doubt in weight_doubts(module):
        warnings.warn(
            f"{where}: {doubt}; its drafts will be rejected. Use another export, or train it again", stacklevel=4
        )


def is_copy(stored: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether `stored` [V, h] equals `weight`, up to rounding to another float type."""
    if stored.shape != weight.shape:
        return False
    low = min((stored.dtype, weight.dtype), key=lambda dtype: torch.finfo(dtype).bits)
    pairs = zip(stored.split(8192), weight.detach().split(8192), strict=True)
    return all(torch.equal(a.to(low), b.cpu().to(low)) for a, b in pairs)


def warn_if_random(stored: torch.Tensor, weight: torch.Tensor, where: str) -> None:
    """Warn of an embedding `stored` [V, h] that is uncorrelated with the target's `weight`: exported untrained."""
    rows = slice(0, 4096)
    a, b = stored[rows].float(), weight.detach()[rows].float().cpu()
    if a.shape != b.shape or abs(float(a.std()) / INIT_STD - 1) > 0.05:
        return
    correlation = float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])
    if abs(correlation) < 0.05:
        warnings.warn(
            f"{where}: its own embedding has std {float(a.std()):.4f} and nothing in common with the target's "
            f"(correlation {correlation:.3f}), as if it had been exported before training; drafts will be poor",
            stacklevel=4,
        )
