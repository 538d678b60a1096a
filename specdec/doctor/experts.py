"""Experts that verify forwards use, measured on the target's own text in eager forwards."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.targets.weight_bytes import VerifyCost, expert_modules, verify_cost


def measure_verify(
    model: PreTrainedModel, texts: Sequence[tuple[Sequence[int], Sequence[int]]], num_nodes: int
) -> VerifyCost | None:
    """Return the VerifyCost of chains of `num_nodes` tokens on `texts`, pairs of a prompt and its answer (ids).

    A node's choice depends on its path alone, so that neighbouring tokens of an answer choose what they would as
    accepted nodes. None if the model has no routed experts.
    """
    if verify_cost(model, num_nodes) is None:
        return None
    counts = [count for prompt, answer in texts for count in _distinct(model, prompt, answer, num_nodes)]
    distinct = float(torch.cat(counts).float().mean()) if counts else None
    return verify_cost(model, num_nodes, distinct)


def remark(cost: VerifyCost, break_even: float) -> str:
    """Say what a verify costs, and whether any draft can pay. break_even: tau at which it does, by bytes, with this
    draft."""
    experts = cost.experts
    what = (
        f"a verify of {cost.num_nodes} tokens reads {cost.distinct:.1f} of {experts.num_experts} experts a layer "
        f"({experts.distinct(cost.num_nodes):.1f} if choices were random; a step {experts.per_token}), "
        f"{cost.ratio:.2f} times the bytes of a step: at batch 1 this draft cannot pay below tau {break_even:.2f}, nor "
        f"any draft below {cost.ratio:.2f}"
    )
    if break_even < cost.num_nodes:
        return what
    return f"{what}; a round yields {cost.num_nodes} at most, so that speculation of this depth cannot pay"


@torch.no_grad()
def _distinct(
    model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int], num_nodes: int
) -> Iterator[torch.Tensor]:
    """Yield, of each layer, [windows] int64: experts that each `num_nodes` neighbouring tokens of the answer use."""
    with _choices(model) as chosen:
        model(input_ids=torch.tensor([[*prompt, *answer]], device=model.device), use_cache=False)
    for ids in chosen:
        own = ids[len(prompt) :]
        if len(own) >= num_nodes:
            windows = own.unfold(0, num_nodes, 1).flatten(1).sort(1).values  # [windows, num_nodes * k]
            yield 1 + (windows.diff(dim=1) != 0).sum(1)


@contextmanager
def _choices(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """Within it, every call of a layer's experts adds their ids [T, k] to the list."""
    seen: list[torch.Tensor] = []

    def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = (*args, *kwargs.values())
        ids = next(t for t in given if isinstance(t, torch.Tensor) and not t.is_floating_point())
        seen.append(ids.reshape(-1, ids.shape[-1]))

    hooks = [m.register_forward_pre_hook(note, with_kwargs=True) for m in expert_modules(model)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
