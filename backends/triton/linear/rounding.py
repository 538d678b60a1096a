"""Rounds features to FP8, scaled by the largest of them."""

import triton
import triton.language as tl

from specdec.backends.triton.launch.relaunch import INTERPRETED

LARGEST = tl.constexpr(448.0)  # of float8_e4m3fn
LEAST = tl.constexpr(1e-12)  # of a scale: zeros stay zeros
HAS_FMA = tl.constexpr(not INTERPRETED)


@triton.jit
def quantised(values, AXIS: tl.constexpr):
    """Return values [.., n] fp32, whose last axis is AXIS, in FP8, and their scales [..].

    On a GPU, quotients are products with the reciprocal of the scale, corrected by the remainder twice (Markstein,
    IBM J. Res. Dev. 34(1), 1990): the bits of a division in fewer instructions. Verified against divisions for all
    mantissas of a scale with the values around ties of FP8, and for all pairs of bf16 and of fp16 mantissas.
    """
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(values), AXIS), LARGEST), LEAST)
    by = tl.expand_dims(scale, AXIS)
    if HAS_FMA:
        inverse = tl.expand_dims(tl.div_rn(1.0, scale), AXIS)
        quotient = values * inverse
        for _ in tl.static_range(2):
            quotient = tl.fma(tl.fma(-quotient, by, values), inverse, quotient)
    else:
        quotient = tl.div_rn(values, by)
    return quotient.to(tl.float8e4nv), scale
