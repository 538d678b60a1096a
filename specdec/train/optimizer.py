"""AdamW over a module kept in fp32, while a copy in the target's dtype does the work with inference's arithmetic."""

import copy
from typing import Any

import torch
from torch import nn

from specdec.train.config import TrainConfig


class Optimizer:
    """Owns the optimizer's state and the working copy.

    module: fp32, updated in place; what of it requires gradients is trained. working: the module itself where it is in
    `dtype`, else a copy in `dtype`; losses are backpropagated through it.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype, config: TrainConfig):
        weight = next(module.parameters())
        self.module = module
        self.working = module if weight.dtype == dtype else copy.deepcopy(module).to(dtype)
        self.clip = config.clip
        self._adamw = _adamw(_trained(module), config, fused=weight.is_cuda)

    def step(self, lr: float) -> None:
        """One update from the gradients of `working`, which are taken away."""
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._carry_gradients()
        nn.utils.clip_grad_norm_(_trained(self.module), self.clip)
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        self._refresh()

    def state_dict(self) -> dict[str, Any]:
        """Weights and moments."""
        return {"module": self.module.state_dict(), "adamw": self._adamw.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self.module.load_state_dict(state["module"])
        self._adamw.load_state_dict(state["adamw"])
        self._refresh()

    @torch.no_grad()
    def _refresh(self) -> None:
        if self.working is not self.module:
            torch._foreach_copy_([*_trained(self.working)], [*_trained(self.module)])

    @torch.no_grad()
    def _carry_gradients(self) -> None:
        if self.working is self.module:
            return
        for low, full in zip(_trained(self.working), _trained(self.module), strict=True):
            assert low.grad is not None, "a trained weight got no gradient"
            full.grad = low.grad.float()
            low.grad = None


def _adamw(trained: list[nn.Parameter], c: TrainConfig, fused: bool) -> torch.optim.AdamW:
    """AdamW; matrices decay, norms do not."""
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": c.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=c.lr, betas=(0.9, 0.95), fused=fused)


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]
