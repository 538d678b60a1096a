"""What the routed experts of a model weigh, and how many of them a forward of n tokens reads."""

from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class ExpertWeights:
    """Routed experts of a model.

    num_experts: of a layer; per_token: those that a token uses; num_layers: layers that have such experts. num_bytes:
    of all of them; num_weights: the same in numbers.
    """

    num_experts: int
    per_token: int
    num_layers: int
    num_bytes: int
    num_weights: int

    @property
    def share_of_token(self) -> float:
        """Share of the experts' weights that one token uses."""
        return self.per_token / self.num_experts

    def distinct(self, num_tokens: float) -> float:
        """Experts of a layer that `num_tokens` tokens use together, expected under uniform random choice."""
        return self.num_experts * (1 - (1 - self.share_of_token) ** num_tokens)


def expert_modules(model: nn.Module) -> list[Any]:
    """List the modules of `model` that hold the experts of a layer: those whose product transformers lets us choose."""
    return [m for m in model.modules() if hasattr(m, "_apply_gate") and getattr(m, "down_proj", None) is not None]


def expert_weights(model: Any, config: Any) -> ExpertWeights | None:
    """Return what the routed experts of `model` weigh, which may lie on the meta device; None if it has none.

    config: the text config of a model, which says how many experts a token uses.
    """
    found = expert_modules(model)
    per_token = getattr(config, "num_experts_per_tok", None)
    if not found or not isinstance(per_token, int):
        return None
    weights = [p for module in found for p in module.parameters()]
    return ExpertWeights(
        num_experts=found[0].down_proj.shape[0],
        per_token=per_token,
        num_layers=len(found),
        num_bytes=sum(p.numel() * p.element_size() for p in weights),
        num_weights=sum(p.numel() for p in weights),
    )
