"""Draft heads in FP8: copies of the linear layers' weights, which halve the time of a large head's forward.

Draft logits are rounded, so slightly fewer drafts may be accepted; the emitted text does not change.
"""

import copy
from typing import Any

import torch
from torch import nn

from specdec.backends.linear import KERNEL_DTYPES
from specdec.backends.linear.fp8 import BLOCK, in_blocks, takes, times_blocks
from specdec.core.draft.head import DraftHead
from specdec.reach.heads.base import OutputHead


class FP8Linear(nn.Module):
    """A linear layer with FP8 weights (e4m3), scaled per block of 128 x 128."""

    weight: torch.Tensor
    scales: torch.Tensor

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.bias = linear.bias
        for name, tensor in zip(("weight", "scales"), in_blocks(linear.weight), strict=True):
            self.register_buffer(name, tensor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., K] to [..., N]."""
        return times_blocks(x, (self.weight, self.scales), self.bias)


def fp8_head(draft: Any) -> DraftHead:
    """Return a copy of a draft head with the weights of its linear layers in FP8; other tensors are shared.

    Layers whose shape has no kernel stay as they are. An output head that can be in FP8 is left out: the engine makes
    its own rows of it. ValueError if `draft` is not a head, not in bf16 or fp16, or no layer has a supported shape.
    """
    told = "draft_weights='fp8'"
    if not isinstance(draft, DraftHead):
        raise ValueError(f"{told}: expected a draft head; load a draft that is a model in FP8 or 4 bits instead")
    if draft.weight.dtype not in KERNEL_DTYPES:
        raise ValueError(f"{told}: expected a draft in bfloat16 or float16, not {draft.weight.dtype}")
    ours = copy.deepcopy(draft, {id(t): t for t in (*draft.parameters(), *draft.buffers())})
    layers = [(name, m) for name, m in ours.named_modules() if isinstance(m, nn.Linear)]
    inner = {name: m for name, m in layers if not isinstance(m, OutputHead)}
    fitting = {name: m for name, m in inner.items() if takes(*m.weight.shape)}
    if not fitting:
        shapes = sorted({tuple(m.weight.shape) for m in inner.values()})
        raise ValueError(
            f"{told}: expected products with N a multiple of 16 and K of {BLOCK}, but this draft's [N, K] are "
            f"{', '.join(map(str, shapes))}; leave draft_weights out"
        )
    for name, linear in fitting.items():
        ours.set_submodule(name, FP8Linear(linear))
    if draft.lm_head is not None and takes(*draft.lm_head.weight.shape):
        ours.lm_head = None
    return ours
