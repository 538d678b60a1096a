"""Distinct experts that neighbouring tokens of a text use, counted in eager forwards of the live model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.targets.weight_bytes import expert_modules


def distinct_experts(
    model: PreTrainedModel, texts: Sequence[tuple[Sequence[int], Sequence[int]]], num_nodes: int
) -> float | None:
    """Return the mean number of experts of a layer that `num_nodes` neighbouring tokens of answers use together.

    texts: pairs of a prompt and its answer (ids). A node's choice depends on its path alone, so that neighbouring
    tokens of an answer choose what they would as accepted nodes of a chain. None if all answers are shorter.
    """
    counts = [count for prompt, answer in texts for count in _distinct(model, prompt, answer, num_nodes)]
    return float(torch.cat(counts).float().mean()) if counts else None


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
