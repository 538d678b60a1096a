"""`specdec::delta_gates`: decays and strengths of gated delta rules, in one launch. A row's bits depend on it alone."""

import torch
import torch.nn.functional as F

from specdec.backends.library import op


@op(
    "delta_gates(Tensor a, Tensor b, Tensor log_rates, Tensor bias) -> (Tensor, Tensor)",
    lambda a, b, *_: tuple(a.new_empty(a.shape, dtype=torch.float32) for _ in range(2)),
    "recurrent.units",
    lambda *_: True,
)
def delta_gates(
    a: torch.Tensor, b: torch.Tensor, log_rates: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return g and beta [T, H] fp32 of gated delta rules: -exp(log_rates) * softplus(a + bias), and sigmoid(b), rounded
    to b's dtype.

    a, b: [T, H], of any strides; log_rates, bias: [H].
    """
    return -log_rates.float().exp() * F.softplus(a.float() + bias.float()), b.sigmoid().float()
