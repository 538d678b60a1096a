"""Folds accepted paths into the states of recurrent layers: one launch for all layers of a kind.

Twin: `backends.recurrent.reference.folder`. States of requests that accepted nothing stay unchanged.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from specdec.backends.recurrent.state_pool import ConvSpec, RecurrentLayer
from specdec.backends.triton.launch.sizes import cdiv, next_power_of_2
from specdec.backends.triton.recurrent.scan import constants, width
from specdec.backends.triton.recurrent.tokens import take_node
from specdec.core import grouped
from specdec.core.cache.pool import Commit


@triton.jit
def _path_length(accept_index, request, W: tl.constexpr, BLOCK_W: tl.constexpr):
    c = tl.arange(0, BLOCK_W)
    path = tl.load(accept_index + request * W + c, mask=c < W, other=-1)
    return tl.sum((path >= 0).to(tl.int32))


@triton.jit(
    do_not_specialize=["num_layers", "max_tail"],
    do_not_specialize_on_alignment=["pointers", "rows", "seq_lens", "accept_index"],
)
def _fold_scan_kernel(
    pointers, like, rows, seq_lens, accept_index, num_layers, max_tail,
    W: tl.constexpr, BLOCK_W: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr,
    DECAY: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Fold BLOCK_P values of one head of one request in one layer; pointers: [state, k, u, g, rates] x layers."""
    head, layer, request = tl.program_id(1) % H, tl.program_id(1) // H, tl.program_id(2).to(tl.int64)
    num = _path_length(accept_index, request, W, BLOCK_W)
    if num == 0:
        return
    key_head = head // (H // G)
    n, p = tl.arange(0, BLOCK_N), tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    inside = (n < N)[:, None] & (p < P)
    row = tl.load(rows + request)
    at = (head * N + n[:, None]) * P + p
    state_at = tl.load(pointers + layer).to(like.dtype) + row * (H * N * P) + at
    tail_k = tl.load(pointers + num_layers + layer).to(like.dtype) + row * max_tail * (G * N)
    tail_u = tl.load(pointers + 2 * num_layers + layer).to(like.dtype) + row * max_tail * (H * P)
    tail_g = tl.load(pointers + 3 * num_layers + layer).to(like.dtype) + row * max_tail * (H * WIDTH)
    rate = tl.zeros([], tl.float32)
    if DECAY == "state":
        rate = tl.load(tl.load(pointers + 4 * num_layers + layer).to(like.dtype) + at, mask=inside, other=0.0)
    has_prefix = tl.load(seq_lens + request) > 0
    current = tl.load(state_at, mask=inside & has_prefix, other=0.0)
    for c in range(0, num):
        node = tl.load(accept_index + request * W + c)
        current = take_node(current, tail_k, tail_u, tail_g, node, head, key_head, n, p, rate, H, G, N, P, WIDTH, DECAY)
    tl.store(state_at, current, mask=inside)


@triton.jit(
    do_not_specialize=["num_layers", "max_tail"],
    do_not_specialize_on_alignment=["pointers", "rows", "seq_lens", "accept_index"],
)
def _fold_conv_kernel(
    pointers, like, rows, seq_lens, accept_index, num_layers, max_tail,
    W: tl.constexpr, BLOCK_W: tl.constexpr,
    CHANNELS: tl.constexpr, KEPT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Fold BLOCK_C channels of one request in one layer; pointers: [state, tail] x layers."""
    layer, request = tl.program_id(1), tl.program_id(2).to(tl.int64)
    num = _path_length(accept_index, request, W, BLOCK_W)
    if num == 0:
        return
    j, channel = tl.arange(0, BLOCK_K), tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    row = tl.load(rows + request)
    state = tl.load(pointers + layer).to(like.dtype) + row * (KEPT * CHANNELS) + channel
    tail = tl.load(pointers + num_layers + layer).to(like.dtype) + row * max_tail * CHANNELS + channel
    source = num + j  # index into the state's inputs followed by the path's
    is_old = (source < KEPT) & (tl.load(seq_lens + request) > 0)
    is_node = (source >= KEPT) & (j < KEPT)
    node = tl.load(accept_index + request * W + source - KEPT, mask=is_node, other=0)
    inside = (channel < CHANNELS)[None, :]
    old = tl.load(state[None, :] + source[:, None] * CHANNELS, mask=is_old[:, None] & inside, other=0.0)
    new = tl.load(tail[None, :] + node[:, None] * CHANNELS, mask=is_node[:, None] & inside, other=0.0)
    tl.debug_barrier()  # what one thread overwrites may be another's source
    tl.store(state[None, :] + j[:, None] * CHANNELS, tl.where(is_node[:, None], new, old), (j < KEPT)[:, None] & inside)


def folder(layers: Sequence[RecurrentLayer]) -> Commit:
    """See `backends.recurrent.reference.folder`; the layers' addresses are read here, once."""
    folds = [_fold_of_kind(members) for members in grouped(layers, lambda layer: layer.spec).values()]

    def commit(
        slot_table: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, accept_index: torch.Tensor
    ) -> None:
        for fold in folds:
            fold(slot_table, rows, seq_lens, accept_index)

    return commit


def _fold_of_kind(layers: Sequence[RecurrentLayer]) -> Commit:
    """Return the fold of layers of one spec."""
    spec = layers[0].spec
    if isinstance(spec, ConvSpec):
        kernel, max_tail, block = _fold_conv_kernel, layers[0].tail.shape[1], 256  # type: ignore[union-attr]
        kept = spec.kernel - 1
        options = dict(CHANNELS=spec.channels, KEPT=kept, BLOCK_K=next_power_of_2(kept), BLOCK_C=block)
        blocks, programs = cdiv(spec.channels, block), len(layers)
    else:
        kernel, max_tail, options = _fold_scan_kernel, layers[0].k.shape[1], constants(spec)  # type: ignore[union-attr]
        options = {**options, "WIDTH": width(spec)}
        del options["CORRECTED"]
        blocks, programs = cdiv(spec.v_dim, options["BLOCK_P"]), len(layers) * spec.heads
    like = layers[0].state
    pointers = _pointers(layers)

    def commit(
        slot_table: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, accept_index: torch.Tensor
    ) -> None:
        bs, path = accept_index.shape
        kernel[(blocks, programs, bs)](
            pointers,
            like,
            rows,
            seq_lens,
            accept_index.contiguous(),
            len(layers),
            max_tail,
            W=path,
            BLOCK_W=next_power_of_2(path),
            **options,
        )

    return commit


def _pointers(layers: Sequence[RecurrentLayer]) -> torch.Tensor:
    """Return the addresses of the layers' tensors, [tensors per layer, layers] int64; 0 where a layer has none."""
    columns = [[0 if t is None else t.data_ptr() for t in layer[1:]] for layer in layers]
    return torch.tensor(columns, dtype=torch.int64, device=layers[0].state.device).T.contiguous()
