"""Addresses rows of a tensor by two strides, such as heads of a joined QKV, so that kernels read them in place."""

import torch


def strided_rows(x: torch.Tensor) -> tuple[int, int, int] | None:
    """Return (inner size in rows, outer stride, inner stride), strides in elements; None if two strides do not do."""
    if x.stride(-1) != 1:
        return None
    levels: list[tuple[int, int]] = []  # size and stride, outermost first
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if levels and size != 1 and levels[-1][1] == size * stride:
            levels[-1] = levels[-1][0] * size, stride
        elif size != 1:
            levels.append((size, stride))
    if len(levels) > 2:
        return None
    (_, outer), (inner, stride) = [(1, 0)] * (2 - len(levels)) + levels
    return inner, outer, stride


def in_rows(x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """Return x and its `strided_rows`; a contiguous copy if two strides do not do."""
    rows = strided_rows(x)
    if rows is not None:
        return x, rows
    return x.contiguous(), whole_rows(x)


def whole_rows(x: torch.Tensor) -> tuple[int, int, int]:
    """Return `strided_rows` of a contiguous tensor of x's shape."""
    return x.numel() // x.shape[-1], 0, x.shape[-1]
