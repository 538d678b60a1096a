"""Causal convolutions over paths of nodes and over packed prefills, a tile of channels at a time.

Twins: `backends.recurrent.convolution.conv_tail`, `conv_step` and `conv_extend`.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from specdec.backends.recurrent.state_pool import ConvInputs, ConvLayer
from specdec.backends.triton.launch.relaunch import early_and_leading, wait_for_others
from specdec.backends.triton.launch.sizes import cdiv, next_power_of_2
from specdec.backends.triton.recurrent.chunk_tiles import requests_block
from specdec.core.batch import AttentionMetadata

BLOCK_C = 128
EXTEND = dict(BLOCK=256, BLOCK_T=16, num_warps=4)  # channels and tokens per program of prefills


@triton.jit(
    do_not_specialize=["first_node", "q_len", "max_tail"],
    do_not_specialize_on_alignment=["rows", "prefix_lens", "ancestor_bits"],
)
def _conv_tail_kernel(
    x, weight, bias, out, state, tail, rows, prefix_lens, ancestor_bits, first_node, q_len, max_tail,
    x_t, x_c, weight_c, weight_k,
    CHANNELS: tl.constexpr, KERNEL: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, WORDS: tl.constexpr,
    BLOCK_NODES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """Convolve one node: inputs of its path from itself upwards, then of the row's state, newest first."""
    wait_for_others(PDL, LEADS)
    channel, token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    inside = channel < CHANNELS
    request = token // q_len
    node = first_node + (token - request * q_len)
    row = tl.load(rows + request)
    has_prefix = tl.load(prefix_lens + request) > 0
    state += row * ((KERNEL - 1) * CHANNELS) + channel
    tail += row * max_tail * CHANNELS + channel
    x += channel * x_c
    given = tl.load(x + token * x_t, mask=inside, other=0.0)
    tl.store(tail + node * CHANNELS, given, mask=inside)
    total = _first(bias, channel, inside, BLOCK, HAS_BIAS)
    total = tl.fma(given.to(tl.float32), _weight(weight, channel, KERNEL - 1, weight_c, weight_k, inside), total)
    if WORDS:
        t = tl.arange(0, BLOCK_NODES)
        words = tl.load(ancestor_bits + token * WORDS + t // 64, mask=t // 64 < WORDS, other=0)
        is_seen = (words >> (t % 64) & 1) != 0
    ancestor, num_old = node, tl.zeros([], tl.int64)  # num_old: inputs taken from the state
    for back in tl.static_range(1, KERNEL):
        if WORDS:
            ancestor = tl.max(tl.where(is_seen & (t < ancestor), t, -1)).to(tl.int64)
        else:
            ancestor = tl.maximum(ancestor - 1, -1)
        is_node = ancestor >= 0
        is_own = ancestor >= first_node  # one of this forward, which may not be in the tail yet
        own = tl.load(x + (token + ancestor - node) * x_t, mask=inside & is_own, other=0.0).to(tl.float32)
        older = tl.load(tail + ancestor * CHANNELS, mask=inside & is_node & ~is_own, other=0.0).to(tl.float32)
        place = KERNEL - 2 - num_old
        kept = tl.load(state + place * CHANNELS, mask=inside & has_prefix & ~is_node, other=0.0).to(tl.float32)
        num_old += tl.where(is_node, 0, 1)
        value = tl.where(is_own, own, tl.where(is_node, older, kept))
        total = tl.fma(value, _weight(weight, channel, KERNEL - 1 - back, weight_c, weight_k, inside), total)
    tl.store(out + token * CHANNELS + channel, _finished(total, out.dtype.element_ty, SILU), mask=inside)


@triton.jit(do_not_specialize_on_alignment=["rows", "prefix_lens"])
def _conv_step_kernel(
    x, weight, bias, out, state, rows, prefix_lens, x_t, x_c, weight_c, weight_k,
    CHANNELS: tl.constexpr, KEPT: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """Convolve one token of a request, and store it as the newest input of the row's state."""
    wait_for_others(PDL, LEADS)
    channel, request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    inside = channel < CHANNELS
    state += tl.load(rows + request) * (KEPT * CHANNELS) + channel
    has_prefix = tl.load(prefix_lens + request) > 0
    given = tl.load(x + request * x_t + channel * x_c, mask=inside, other=0.0)
    total = _first(bias, channel, inside, BLOCK, HAS_BIAS)
    total = tl.fma(given.to(tl.float32), _weight(weight, channel, KEPT, weight_c, weight_k, inside), total)
    newer = given.to(state.dtype.element_ty)
    for back in tl.static_range(1, KEPT + 1):
        at = state + (KEPT - back) * CHANNELS
        old = tl.load(at, mask=inside & has_prefix, other=0.0)
        total = tl.fma(old.to(tl.float32), _weight(weight, channel, KEPT - back, weight_c, weight_k, inside), total)
        tl.debug_barrier()  # what one thread overwrites may be another's source
        tl.store(at, newer, mask=inside)
        newer = old
    tl.store(out + request * CHANNELS + channel, _finished(total, out.dtype.element_ty, SILU), mask=inside)


@triton.jit
def _first(bias, channel, inside, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Return the first term of a convolution. All kernels add inputs to it newest first, so their bits are equal."""
    total = tl.zeros([BLOCK], tl.float32)
    if HAS_BIAS:
        total = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def _finished(total, DTYPE: tl.constexpr, SILU: tl.constexpr):
    """Round a convolution; SILU: then apply SiLU and round again."""
    result = total.to(DTYPE)
    if SILU:
        wide = result.to(tl.float32)
        result = (wide / (1 + tl.exp(-wide))).to(DTYPE)
    return result


@triton.jit
def _weight(weight, channel, tap: tl.constexpr, weight_c, weight_k, inside):
    return tl.load(weight + channel * weight_c + tap * weight_k, mask=inside, other=0.0).to(tl.float32)


@triton.jit(
    do_not_specialize=["num_tokens", "num_reqs"], do_not_specialize_on_alignment=["rows", "prefix_lens", "qo_indptr"]
)
def _conv_extend_kernel(
    x, weight, bias, out, state, rows, prefix_lens, qo_indptr, num_tokens, num_reqs,
    x_t, x_c, weight_c, weight_k,
    CHANNELS: tl.constexpr, KERNEL: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Convolve BLOCK_T tokens of a packed prefill; padding gets zeros."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    begin, t, r = tl.program_id(1).to(tl.int64) * BLOCK_T, tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_R)
    token = begin + t
    ends = tl.load(qo_indptr + 1 + r, mask=r < num_reqs, other=2147483647)
    owner = tl.sum((ends[None, :] <= token[:, None]).to(tl.int32), 1)
    is_live = (owner < num_reqs) & (token < num_tokens)
    place = token - tl.load(qo_indptr + owner, mask=is_live, other=0)  # in the request
    inside = channel < CHANNELS
    tile = is_live[:, None] & inside[None, :]
    x += begin * x_t
    has_start = tl.sum((is_live & (place < KERNEL - 1)).to(tl.int32)) > 0  # a request begins here
    row = tl.load(rows + owner, mask=is_live & has_start, other=0)
    has_prefix = tl.load(prefix_lens + owner, mask=is_live & has_start, other=0) > 0
    total = tl.zeros([BLOCK_T, BLOCK], tl.float32) + _first(bias, channel, inside, BLOCK, HAS_BIAS)[None, :]
    for back in tl.static_range(KERNEL):  # in the order of the step and tail kernels
        is_new = (place - back >= 0)[:, None]
        x_at = x + (t - back)[:, None] * x_t + channel[None, :] * x_c
        value = tl.load(x_at, mask=tile & is_new, other=0.0).to(tl.float32)
        if has_start:
            source = place + KERNEL - 1 - back  # in the state
            state_at = state + (row * (KERNEL - 1) + source)[:, None] * CHANNELS + channel[None, :]
            old = tl.load(state_at, mask=tile & ~is_new & has_prefix[:, None], other=0.0).to(tl.float32)
            value = tl.where(is_new, value, old)
        weights = _weight(weight, channel, KERNEL - 1 - back, weight_c, weight_k, inside)
        total = tl.fma(value, weights[None, :], total)
    out_at = out + begin * CHANNELS + t[:, None] * CHANNELS + channel[None, :]
    result = _finished(tl.where(is_live[:, None], total, 0.0), out.dtype.element_ty, SILU)
    tl.store(out_at, result, mask=(token < num_tokens)[:, None] & inside[None, :])


@triton.jit(do_not_specialize_on_alignment=["rows", "prefix_lens", "qo_indptr"])
def _keep_inputs_kernel(
    x, state, rows, prefix_lens, qo_indptr, x_t, x_c,
    CHANNELS: tl.constexpr, KEPT: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the last inputs of one request as its row's state."""
    channel, request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    begin, end = tl.load(qo_indptr + request).to(tl.int64), tl.load(qo_indptr + request + 1)
    if begin == end:
        return
    j = tl.arange(0, BLOCK_K)
    state += tl.load(rows + request) * (KEPT * CHANNELS) + channel[None, :]
    source = end - begin - KEPT + j  # in the request; below 0, in the state
    inside = (channel < CHANNELS)[None, :]
    is_new = ((source >= 0) & (j < KEPT))[:, None]
    is_old = ((source < 0) & (j < KEPT) & (tl.load(prefix_lens + request) > 0))[:, None]
    new = tl.load(x + (begin + source)[:, None] * x_t + channel[None, :] * x_c, mask=is_new & inside, other=0.0)
    old = tl.load(state + (source + KEPT)[:, None] * CHANNELS, mask=is_old & inside, other=0.0)
    tl.debug_barrier()  # what one thread overwrites may be another's source
    kept = tl.where(is_new, new.to(state.dtype.element_ty), old)
    tl.store(state + j[:, None] * CHANNELS, kept, mask=(j < KEPT)[:, None] & inside)


def conv_tail(inputs: ConvInputs, layer: ConvLayer, metadata: AttentionMetadata) -> torch.Tensor:
    """See `backends.recurrent.convolution.conv_tail`."""
    m, spec, bits, num_tokens = metadata, layer.spec, metadata.ancestor_bits, inputs.x.shape[0]
    tensors, strides, constants = _arguments(inputs, layer)
    _conv_tail_kernel[(cdiv(spec.channels, BLOCK_C), num_tokens)](
        *tensors,
        layer.tail,
        m.rows,
        m.prefix_lens,
        bits,
        m.tail_len - m.q_len,
        m.q_len,
        layer.tail.shape[1],
        *strides,
        KERNEL=spec.kernel,
        WORDS=0 if bits is None else bits.shape[2],
        BLOCK_NODES=next_power_of_2(m.tail_len),
        BLOCK=BLOCK_C,
        num_warps=BLOCK_C // 32,
        **constants,
        **early_and_leading(num_tokens),
    )
    return tensors[3]


def conv_step(inputs: ConvInputs, layer: ConvLayer, metadata: AttentionMetadata) -> torch.Tensor:
    """See `backends.recurrent.convolution.conv_step`."""
    spec, num_tokens, (tensors, strides, constants) = layer.spec, inputs.x.shape[0], _arguments(inputs, layer)
    constants |= {"KEPT": spec.kernel - 1, "BLOCK": BLOCK_C, "num_warps": BLOCK_C // 32}
    args = *tensors, metadata.rows, metadata.prefix_lens, *strides
    grid = cdiv(spec.channels, BLOCK_C), num_tokens
    _conv_step_kernel[grid](*args, **constants, **early_and_leading(num_tokens))
    return tensors[3]


def conv_extend(inputs: ConvInputs, layer: ConvLayer, metadata: AttentionMetadata) -> torch.Tensor:
    """See `backends.recurrent.convolution.conv_extend`."""
    m, spec, num_tokens, kept = metadata, layer.spec, inputs.x.shape[0], layer.spec.kernel - 1
    tensors, strides, constants = _arguments(inputs, layer)
    grid = cdiv(spec.channels, EXTEND["BLOCK"]), cdiv(num_tokens, EXTEND["BLOCK_T"])
    of_batch = m.rows, m.prefix_lens, m.qo_indptr
    constants |= {"KERNEL": spec.kernel, "BLOCK_R": requests_block(m.num_reqs), **EXTEND}
    _conv_extend_kernel[grid](*tensors, *of_batch, num_tokens, m.num_reqs, *strides, **constants)
    _keep_inputs_kernel[(cdiv(spec.channels, BLOCK_C), m.num_reqs)](
        inputs.x,
        layer.state,
        *of_batch,
        *inputs.x.stride(),
        CHANNELS=spec.channels,
        KEPT=kept,
        BLOCK_K=next_power_of_2(kept),
        BLOCK=BLOCK_C,
    )
    return tensors[3]


def _arguments(inputs: ConvInputs, layer: ConvLayer) -> tuple[list[Any], tuple[int, ...], dict[str, Any]]:
    """Return the arguments of all kernels: x, weight, bias, a new output, the state; strides; common constexprs."""
    x, weight, bias, is_silu = inputs
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    constants = {"CHANNELS": layer.spec.channels, "HAS_BIAS": bias is not None, "SILU": is_silu}
    return [x, weight, bias, out, layer.state], (*x.stride(), *weight.stride()), constants
