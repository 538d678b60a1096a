"""Cosines and sines of rotary embeddings, both in one launch."""

import torch
import triton
import triton.language as tl

from specdec.backends.triton.launch.sizes import next_power_of_2


@triton.jit(do_not_specialize_on_alignment=["positions"])  # parts of a batch begin anywhere
def _tables_kernel(
    positions, frequencies, cos, sin, scale, WIDTH: tl.constexpr, TIMES: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    f = tl.arange(0, BLOCK)
    inside = f < WIDTH
    angle = tl.load(positions + token).to(tl.float32) * tl.load(frequencies + f, mask=inside, other=0.0).to(tl.float32)
    c, s = (tl.cos(angle) * scale).to(cos.dtype.element_ty), (tl.sin(angle) * scale).to(sin.dtype.element_ty)
    for i in tl.static_range(TIMES):
        at = token * (WIDTH * TIMES) + i * WIDTH + f
        tl.store(cos + at, c, mask=inside)
        tl.store(sin + at, s, mask=inside)


def rope_tables(
    positions: torch.Tensor, frequencies: torch.Tensor, scale: float, is_doubled: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `specdec.backends.rope.rope_tables`."""
    width, times = frequencies.shape[0], 2 if is_doubled else 1
    shape = (*positions.shape, width * times)
    cos, sin = (torch.empty(shape, dtype=dtype, device=positions.device) for _ in range(2))
    _tables_kernel[(positions.numel(),)](
        positions.contiguous(),
        frequencies,
        cos,
        sin,
        scale,
        WIDTH=width,
        TIMES=times,
        BLOCK=next_power_of_2(width),
        num_warps=1,
    )
    return cos, sin
