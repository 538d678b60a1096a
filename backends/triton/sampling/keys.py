"""Integer keys that order (fp32 value, index) pairs; all keys are different, so that ranking is stable."""

import triton
import triton.language as tl


@triton.jit
def order_key(value, index):
    """Return an int64 that is larger for higher values and, among equal ones, for lower indices; NaN counts as -inf."""
    value = tl.where(value != value, float("-inf"), value) + 0.0  # -0.0 equals 0.0
    bits = value.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def value_of(key):
    """Return the fp32 value in a key."""
    ordered = (key >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def index_of(key):
    """Return the index in a key, int64."""
    return (0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)).to(tl.int64)
