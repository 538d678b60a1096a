"""Rounds features to FP8, with the scale that the largest of them takes."""

import triton
import triton.language as tl

LARGEST = tl.constexpr(448.0)  # of float8_e4m3fn
LEAST = tl.constexpr(1e-12)  # of a scale: zeros stay zeros


@triton.jit
def quantised(values, AXIS: tl.constexpr):
    """Return values [.., n] fp32, whose last axis is AXIS, in FP8, and the scales [..] that were taken out."""
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(values), AXIS), LARGEST), LEAST)
    return tl.div_rn(values, tl.expand_dims(scale, AXIS)).to(tl.float8e4nv), scale
