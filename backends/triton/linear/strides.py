"""Rows of a tensor that two strides reach, such as heads of a joined QKV: kernels read them in place."""

import torch


def strided_rows(x: torch.Tensor) -> tuple[int, int, int] | None:
    """Return (rows of the inner level, stride of the outer, of the inner), in elements; None where that is too few."""
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
    """Return x and where its rows lie, see `strided_rows`; a copy where two strides do not say that."""
    rows = strided_rows(x)
    if rows is not None:
        return x, rows
    return x.contiguous(), whole_rows(x)


def whole_rows(x: torch.Tensor) -> tuple[int, int, int]:
    """Return where the rows of a contiguous tensor of x's shape lie, see `strided_rows`."""
    return x.numel() // x.shape[-1], 0, x.shape[-1]
