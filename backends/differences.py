"""Kernels held against their twins: what both answer to the same inputs, and how far rounding may take them apart.

Whatever compiles a kernel for sizes that no test has seen may do it wrong, and nothing else would notice.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

# By the dtype of a kernel's results, in the shares that `largest_difference` returns. Rounding to 16 bits moves an
# element by half an eps of it; what is rounded before (weights of keys, parts of split keys, a product before its
# bias) by as much each time, and the largest of thousands by 5 times the average: 1 to 3 eps in all. Allowed are 8 of
# bf16 and 10 of fp16. Kernels in fp32, in IEEE or three passes of TF32, stay below 1e-4 after hundreds of tokens. A
# wrong tile is off by about 1.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 6e-2}
SEED = 1  # of inputs, from generators of their own: the global ones stay where they are


class Answer(NamedTuple):
    """What one call gave, and its name; value: [N, ...], of N tokens, or rows of state."""

    what: str
    value: torch.Tensor


@dataclass(frozen=True)
class Check:
    """A kernel and its twin, ready to run on equal inputs; `theirs` computes in fp32 where it can."""

    subject: str
    ours: Callable[[], Sequence[Answer]]
    theirs: Callable[[], Sequence[Answer]]

    def problems(self) -> list[str]:
        """Run both; say where they differ by more than rounding. Waits for the device."""
        return [
            f"{self.subject}: {what} differs from its torch twin by {error:.1e} of its size (allowed: {allowed:.1e})"
            for what, error, allowed in self.errors()
            if not error <= allowed  # NaN, too
        ]

    def errors(self) -> Iterator[tuple[str, float, float]]:
        """Run both; yield of each call its name, the largest difference, and what is allowed."""
        ours, theirs = self.ours(), self.theirs()
        pairs = list(zip(ours, theirs, strict=True))
        errors = [largest_difference(a.value, b.value) for a, b in pairs]
        found = torch.stack(errors).tolist()  # the one sync of a check, at attach
        for (answer, _), error in zip(pairs, found, strict=True):
            yield answer.what, error, allowed(answer.value.dtype, answer.value.device)


def largest_difference(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Return the largest difference of an element of [N, ...], [] fp32: in shares of it, or of what elements of its
    token are on average (their root mean square), if that is more.

    Where both are the same infinity, or NaN, as of damaged weights, there is none.
    """
    a, b = ours.float().flatten(1), theirs.float().flatten(1)
    usual = b.nan_to_num(0, 0, 0).square().mean(1, keepdim=True).sqrt().clamp(min=torch.finfo(torch.float32).tiny)
    is_equal = (a == b) | (a.isnan() & b.isnan())
    return torch.where(is_equal, 0, (a - b).abs() / torch.maximum(b.abs(), usual)).amax()


def allowed(dtype: torch.dtype, device: torch.device) -> float:
    """Return how far results in `dtype` may be from their twin's, whose products the user may have put on TF32."""
    is_tf32 = device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return max(TOLERANCE[dtype], TOLERANCE[torch.bfloat16] if is_tf32 else 0.0)
