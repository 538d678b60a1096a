"""Compares two ways to compute the same: kernels with their torch twins, whole models with other routes through them.

Two ways to compute one model in 16 bits differ by what rounding grows to through its layers, which depends on the model
and on the batch. So a model is run once more with small disturbances, and `bound` allows what those moved.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

# By the dtype of results, in the shares that `largest_difference` and `distance` return. Rounding to 16 bits moves an
# element by half an eps of it; what is rounded before (weights of keys, parts of split keys, a product before its
# bias) by as much each time, and the largest of thousands by 5 times the average: 1 to 3 eps in all. Allowed are 6 of
# bf16 and 10 of fp16. Kernels in fp32, in IEEE or three passes of TF32, stay below 1e-4 after hundreds of tokens. A
# wrong tile is off by about 1.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
TIMES_DISTURBED = 6.0  # of what one disturbance a layer moves: kernels round several times in each
MOST = 0.5  # of the norm, whatever the model; unrelated tensors differ by 1.4
SEED = 1  # of inputs, from generators of their own: the global ones stay where they are


class Answer(NamedTuple):
    """The result of one call, and its name; value: [N, ...], of N tokens, or rows of state."""

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


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Return the difference of [rows, ...], in shares of the norm: the rows' median, as rounding can flip an expert.

    Rows that are zero in both have no norm and are left out: a token whose embedding is zero stays so through layers
    without biases. Where nothing is left, it is 0.
    """
    off, norm = (ours.double() - theirs.double()).norm(dim=-1), theirs.double().norm(dim=-1)
    shares = (off / norm)[(off != 0) | (norm != 0)]
    return float(shares.median()) if shares.numel() else 0.0


def bound(dtype: torch.dtype, moved: float = 0.0) -> float:
    """Return the `distance` that results in `dtype` may have, if a disturbance moves them by `moved`."""
    return max(TOLERANCE[dtype], min(MOST, TIMES_DISTURBED * moved))


def disturb(x: torch.Tensor, unit: float | None = None) -> torch.Tensor:
    """Return x with half of its elements smaller by `unit`, relative; None: by their last bit."""
    is_lowered = torch.arange(x.numel(), device=x.device, dtype=torch.float32).mul(2.4).sin().view(x.shape) > 0
    return torch.where(is_lowered, x * (1 - (torch.finfo(x.dtype).eps / 2 if unit is None else unit)), x)
