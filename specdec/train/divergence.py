"""Watches over a run without a sync a step, so that one that diverged ends with a reason and exports nothing."""

import math
from collections.abc import Iterable

import torch


class Watch:
    """Knows the first step, counted from 1, whose loss was not finite. It stays on the device until `check`."""

    def __init__(self, lr: float, device: torch.device):
        self.lr = lr
        self._first = torch.zeros((), dtype=torch.int64, device=device)  # 0: none

    def note(self, step: int, loss: torch.Tensor) -> None:
        """Take note of the loss, a scalar, of step number `step`."""
        self._first += step * (~loss.isfinite() & (self._first == 0))

    def check(self, step: int, weights: Iterable[torch.Tensor]) -> None:
        """Raise FloatingPointError if a loss up to `step` was not finite, or if one of `weights` is not after it."""
        is_good = torch.stack([weight.isfinite().all() for weight in weights]).all()
        first, are_finite = torch.stack([self._first, is_good.to(self._first)]).tolist()
        if first:
            raise self._diverged(f"the loss is not finite at step {first}", first)
        if not are_finite:
            raise self._diverged(f"the weights are not finite after step {step}", step + 1)

    def check_held_out(self, step: int, losses: Iterable[float]) -> None:
        """Raise FloatingPointError unless `losses`, of the held-out sequences after `step`, are finite."""
        if not all(map(math.isfinite, losses)):
            raise self._diverged(f"the held-out loss is not finite after step {step}", step + 1)

    def _diverged(self, what: str, step: int) -> FloatingPointError:
        cure = f"lower lr={self.lr:g}, as in `specdec train fit --lr {self.lr / 4:g}`, which takes the corpus as it is"
        if step == 1:  # no update yet
            cure = "no update came before it: look for NaN in the target and in --init, or try --dtype float32"
        kept = "Nothing was exported, and a draft that was there before is still there"
        return FloatingPointError(f"{what}, so the training was ended; {cure}. {kept}")
