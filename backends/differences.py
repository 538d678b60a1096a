"""Compares two computations of the same: kernels with their torch twins, whole models with other implementations.

Two computations of one model in 16 bits differ by rounding errors that its layers amplify, depending on the model and
on the batch. So a model is run once more with small disturbances, and `bound` depends on the change that they caused.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

# Relative errors, as `largest_difference` and `distance` return them, by dtype of results. Rounding to 16 bits changes
# an element by up to half an eps; each intermediate rounding (softmax weights, split-KV parts, a product before its
# bias) adds as much, and the largest of thousands of errors is 5 times the average: 1 to 3 eps in all. Allowed are 6
# eps of bf16 and 10 of fp16. Kernels in fp32, IEEE or three passes of TF32, stay below 1e-4 after hundreds of tokens.
# A wrong tile has an error of about 1.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
TIMES_DISTURBED = 6.0  # times the effect of one disturbance per layer: kernels round several times in each
MOST = 0.5  # of the norm, for any model; unrelated tensors differ by 1.4
SEED = 1  # of inputs, from separate generators: the global ones stay unchanged


class Answer(NamedTuple):
    """The result of one call, and its name; value: [N, ...], N tokens or rows of state."""

    what: str
    value: torch.Tensor


@dataclass(frozen=True)
class Check:
    """A kernel and its twin, ready to run on equal inputs; `theirs` computes in fp32 where it can."""

    subject: str
    ours: Callable[[], Sequence[Answer]]
    theirs: Callable[[], Sequence[Answer]]

    def problems(self) -> list[str]:
        """Run both; describe results that differ by more than rounding. Waits for the device."""
        return [
            f"{self.subject}: {what} differs from its torch twin by {error:.1e} of its size (allowed: {allowed:.1e})"
            for what, error, allowed in self.errors()
            if not error <= allowed  # NaN, too
        ]

    def errors(self) -> Iterator[tuple[str, float, float]]:
        """Run both; yield each call's name, largest difference, and allowed difference."""
        ours, theirs = self.ours(), self.theirs()
        pairs = list(zip(ours, theirs, strict=True))
        errors = [largest_difference(a.value, b.value) for a, b in pairs]
        found = torch.stack(errors).tolist()  # the one sync of a check, at attach
        for (answer, _), error in zip(pairs, found, strict=True):
            yield answer.what, error, allowed(answer.value.dtype, answer.value.device)


def largest_difference(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Return the largest relative difference of an element of [N, ...], [] fp32: relative to the element or to the root
    mean square of its token's elements, whichever is larger.

    Equal infinities, and NaN in both, count as no difference: weights may be damaged.
    """
    a, b = ours.float().flatten(1), theirs.float().flatten(1)
    usual = b.nan_to_num(0, 0, 0).square().mean(1, keepdim=True).sqrt().clamp(min=torch.finfo(torch.float32).tiny)
    is_equal = (a == b) | (a.isnan() & b.isnan())
    return torch.where(is_equal, 0, (a - b).abs() / torch.maximum(b.abs(), usual)).amax()


def allowed(dtype: torch.dtype, device: torch.device) -> float:
    """Return the difference allowed of results in `dtype` from their twin's, whose products may run in TF32 by a torch
    setting."""
    is_tf32 = device.type == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return max(TOLERANCE[dtype], TOLERANCE[torch.bfloat16] if is_tf32 else 0.0)


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the difference of [rows, ...] relative to the norm: the median of rows, since rounding can flip an expert.

    Rows that are zero in both are skipped: a token with a zero embedding stays zero through layers without biases. If
    no row is left, the result is 0.
    """
    off, norm = (ours.double() - theirs.double()).norm(dim=-1), theirs.double().norm(dim=-1)
    shares = (off / norm)[(off != 0) | (norm != 0)]
    return float(shares.median()) if shares.numel() else 0.0


def bound(dtype: torch.dtype, moved: float = 0.0) -> float:
    """Return the allowed `distance` of results in `dtype`, if a disturbance changes them by `moved`."""
    return max(TOLERANCE[dtype], min(MOST, TIMES_DISTURBED * moved))


def disturb(x: torch.Tensor, unit: float | None = None) -> torch.Tensor:
    """Return x with half of its elements reduced by a factor of 1 - `unit`; None: by half an eps."""
    is_lowered = torch.arange(x.numel(), device=x.device, dtype=torch.float32).mul(2.4).sin().view(x.shape) > 0
    return torch.where(is_lowered, x * (1 - (torch.finfo(x.dtype).eps / 2 if unit is None else unit)), x)
