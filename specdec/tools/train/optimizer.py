"""AdamW over a module in fp32; a copy in the target's dtype runs forward and backward with inference's arithmetic."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from specdec.tools.train.config import TrainConfig

Rounding = Callable[[str, torch.Tensor], torch.Tensor]  # (name, fp32 weight) to the value in the working copy


class Optimizer:
    """Owns the optimizer's state and the working copy.

    module: fp32, updated in place; only parameters that require gradients are trained. working: a copy in `dtype`,
    through which losses are backpropagated; the module itself if it is in `dtype` already and there is no rounding.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, config: TrainConfig, rounding: Rounding | None = None):
        weight = next(module.parameters())
        self.module = module
        self.working = module if weight.dtype == dtype and rounding is None else _copy_in(module, dtype)
        self.clip = config.clip
        self._rounding = rounding
        self._adamw = _adamw(list(_trained(module).values()), config, fused=weight.is_cuda)
        self.refresh()

    def step(self, lr: float) -> None:
        """Update once from the gradients of `working`, then clear them."""
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._carry_gradients()
        nn.utils.clip_grad_norm_(_trained(self.module).values(), self.clip)
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        self.refresh()

    def state_dict(self) -> dict[str, Any]:
        """Return weights and AdamW moments."""
        return {"module": self.module.state_dict(), "adamw": self._adamw.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.module.load_state_dict(state["module"])
        self._adamw.load_state_dict(state["adamw"])
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the module's trained weights, rounded if so set, into the working copy."""
        if self.working is self.module:
            return
        exact = _trained(self.module)
        values = [self._rounding(name, p) if self._rounding else p for name, p in exact.items()]
        torch._foreach_copy_(list(_trained(self.working).values()), values)

    @torch.no_grad()
    def _carry_gradients(self) -> None:
        if self.working is self.module:
            return
        exact = _trained(self.module)
        for name, low in _trained(self.working).items():
            assert low.grad is not None, f"{name} is trained and got no gradient"
            exact[name].grad = low.grad.float()
            low.grad = None


def _adamw(trained: list[nn.Parameter], c: TrainConfig, fused: bool) -> torch.optim.AdamW:
    """Make AdamW; matrices get weight decay, norms do not."""
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": c.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=c.lr, betas=(0.9, 0.95), fused=fused)


def _copy_in(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy with parameters in `dtype`; buffers stay exact (rotary frequencies must not be rounded)."""
    working = copy.deepcopy(module)
    for p in working.parameters():
        p.data = p.data.to(dtype)
    return working


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}
