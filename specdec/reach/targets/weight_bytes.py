"""Bytes of weights that forwards read: all dense weights, and those of the routed experts that their tokens use."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel


@dataclass(frozen=True)
class ExpertBytes:
    """Routed experts of a model.

    num_experts: of a layer; per_token: those that a token uses; num_layers: layers that have such experts. num_bytes:
    of all of them; num_weights: the same in numbers.
    """

    num_experts: int
    per_token: int
    num_layers: int
    num_bytes: int
    num_weights: int

    def distinct(self, num_tokens: float) -> float:
        """Experts of a layer that `num_tokens` tokens use together, expected under uniform random choice."""
        return self.num_experts * (1 - (1 - self.per_token / self.num_experts) ** num_tokens)

    def read_bytes(self, distinct: float) -> float:
        """Bytes of `distinct` experts of each layer."""
        return self.num_bytes * distinct / self.num_experts


@dataclass(frozen=True)
class VerifyCost:
    """The bytes that a verify forward of one request reads, and those of a step of one token, with routed experts.

    dense_bytes: read by every forward; num_nodes: tokens of the verify; distinct: experts of a layer that they use
    together, as measured or expected.
    """

    experts: ExpertBytes
    dense_bytes: int
    num_nodes: int
    distinct: float

    @property
    def step_bytes(self) -> float:
        """Bytes of a step of one token."""
        return self.dense_bytes + self.experts.read_bytes(self.experts.per_token)

    @property
    def ratio(self) -> float:
        """Steps that read as much as a verify: below this tau speculation cannot pay off, however cheap the draft."""
        return (self.dense_bytes + self.experts.read_bytes(self.distinct)) / self.step_bytes

    @property
    def facts(self) -> dict[str, Any]:
        """The same for reports."""
        return {
            "num_experts": self.experts.num_experts,
            "per_token": self.experts.per_token,
            "layers": self.experts.num_layers,
            "dense_bytes": self.dense_bytes,
            "expert_bytes": self.experts.num_bytes // self.experts.num_experts,
            "verify_tokens": self.num_nodes,
            "distinct": round(self.distinct, 2),
            "verify_over_step": round(self.ratio, 4),
        }


def verify_cost(model: PreTrainedModel, num_nodes: int, distinct: float | None = None) -> VerifyCost | None:
    """Return the bytes that a verify of `num_nodes` tokens reads of `model`; None if it has no routed experts.

    distinct: experts of a layer that they use together; None: as expected under uniform random choice.
    """
    experts = expert_weights(model, model.config.get_text_config())
    if experts is None:
        return None
    everything = read_bytes(model, model.get_input_embeddings(), model.get_output_embeddings())
    expected = experts.distinct(num_nodes)
    return VerifyCost(experts, everything - experts.num_bytes, num_nodes, expected if distinct is None else distinct)


def expert_modules(model: nn.Module) -> list[Any]:
    """List the modules of `model` that hold a layer's experts: those whose matmul transformers can switch."""
    return [m for m in model.modules() if hasattr(m, "_apply_gate") and getattr(m, "down_proj", None) is not None]


def expert_weights(model: nn.Module, config: Any) -> ExpertBytes | None:
    """Return the bytes of the routed experts of `model`, which may be on the meta device; None if it has none.

    config: the text config of a model, which has the number of experts per token.
    """
    found = expert_modules(model)
    per_token = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None)
    if not found or not isinstance(per_token, int):
        return None
    num_weights = sum(p.numel() for module in found for p in module.parameters())
    total = sum(map(num_bytes, found))
    return ExpertBytes(found[0].down_proj.shape[0], per_token, len(found), total, num_weights)


def num_bytes(module: nn.Module) -> int:
    """Return the bytes of its parameters, tied ones counted once."""
    return sum(p.nbytes for p in module.parameters())


def read_bytes(module: nn.Module, embedding: nn.Module | None, head: nn.Module | None) -> int:
    """Return the bytes of all but `embedding`, unless `head` is tied to it."""
    if embedding is None or (head is not None and head.weight is embedding.weight):
        return num_bytes(module)
    return num_bytes(module) - num_bytes(embedding)


@torch.no_grad()
def distinct_experts(
    model: PreTrainedModel, texts: Sequence[tuple[Sequence[int], Sequence[int]]], num_nodes: int
) -> float | None:
    """Return the mean number of experts of a layer that `num_nodes` consecutive tokens of answers use together.

    texts: pairs of a prompt and its answer (ids). A node's experts depend on its path alone, so consecutive tokens of
    an answer use the same experts as accepted nodes of a chain. None if all answers are shorter.
    """
    counts = []
    for prompt, answer in texts:
        with _choices(model) as chosen:
            model(input_ids=torch.tensor([[*prompt, *answer]], device=model.device), use_cache=False)
        for ids in chosen if len(answer) >= num_nodes else ():
            windows = ids[len(prompt) :].unfold(0, num_nodes, 1).flatten(1).sort(1).values  # [windows, num_nodes * k]
            counts.append(1 + (windows.diff(dim=1) != 0).sum(1))
    return float(torch.cat(counts).float().mean()) if counts else None


@contextmanager
def _choices(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """Make every call of a layer's experts append their ids [T, k] to the list, within the context."""
    seen: list[torch.Tensor] = []

    def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = (*args, *kwargs.values())
        ids = next(t for t in given if isinstance(t, torch.Tensor) and not t.is_floating_point())
        seen.append(ids.reshape(-1, ids.shape[-1]))

    with ExitStack() as hooks:
        for module in expert_modules(model):
            hooks.enter_context(module.register_forward_pre_hook(note, with_kwargs=True))
        yield seen
