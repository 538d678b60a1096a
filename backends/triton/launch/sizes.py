"""`triton.cdiv` and `triton.next_power_of_2` for launches: on the host, Triton's own take microseconds per call."""


def cdiv(x: int, y: int) -> int:
    """Return x / y, rounded up."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is `n` or more, for n >= 1."""
    return 1 << (n - 1).bit_length()
