"""Checks of a plan: limits that the host knows, always; bounds of every index on the device, in debug mode."""

import os
from typing import Any

import torch

from specdec.core.batch import AttentionMetadata
from specdec.core.config import MAX_TAIL


def check_shapes(m: AttentionMetadata) -> None:
    """Raise ValueError for a plan that no backend can run. Looks at shapes and host numbers only."""
    bs, width = m.num_reqs, m.slot_table.shape[1]
    if m.ancestor_bits is not None and m.ancestor_bits.shape[:2] != (bs, m.q_len):
        raise ValueError(f"ancestor_bits {list(m.ancestor_bits.shape)}: expected [{bs}, {m.q_len}, words of 64 bits]")
    if m.ancestor_bits is not None and m.tail_len > MAX_TAIL:
        raise ValueError(f"tail_len={m.tail_len} of a tree: expected at most {MAX_TAIL}, the bits of an ancestor mask")
    if m.ancestor_bits is not None and 64 * m.ancestor_bits.shape[-1] < m.tail_len:
        raise ValueError(
            f"ancestor_bits has {m.ancestor_bits.shape[-1]} words of 64 bits: expected a bit per node, {m.tail_len}"
        )
    if not 1 <= m.q_len <= m.tail_len:
        raise ValueError(f"q_len={m.q_len} with tail_len={m.tail_len}: queries are the last 1..tail_len tail nodes")
    if m.max_prefix > width:
        raise ValueError(f"max_prefix={m.max_prefix}: expected at most {width}, the width of the slot table")
    num_tokens = m.positions.shape[0]
    expected = sum(m.q_lens) if m.q_lens is not None else m.q_len if m.is_packed else bs * m.q_len
    if num_tokens != expected or m.out_cache_loc.shape[0] != expected:
        raise ValueError(
            f"{num_tokens} positions and {m.out_cache_loc.shape[0]} slots of {bs} requests: expected {expected} of both"
        )
    if m.prefix_lens.shape[0] != bs:
        raise ValueError(
            f"prefix_lens has {m.prefix_lens.shape[0]} entries: expected {bs}, one per row of the slot table"
        )
    if m.limits is not None and (m.q_lens is None or m.limits.shape[0] != num_tokens):
        raise ValueError(f"limits {list(m.limits.shape)}: expected one per token of a prefill, [{num_tokens}]")
    for name in (
        "limits",
        "slot_table",
        "rows",
        "prefix_lens",
        "positions",
        "out_cache_loc",
        "ancestor_bits",
        "tail_positions",
    ):
        tensor, dtype = getattr(m, name), torch.int32 if name == "slot_table" else torch.int64
        if tensor is not None and (tensor.dtype != dtype or tensor.device != m.prefix_lens.device):
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}: expected {dtype} on {m.prefix_lens.device}")


def check_call(call: Any, num_tokens: int) -> None:
    """Raise ValueError for an AttentionCall whose tensors do not fit its layer, its pool and a plan of `num_tokens`:
    kernels would read and write out of bounds."""
    layer, like = call.layer, call.pool.k[call.layer_id]
    if call.q.shape[0] != num_tokens:
        raise ValueError(f"q of layer {call.layer_id} has {call.q.shape[0]} tokens: expected {num_tokens}, as planned")
    heads = {"q": (layer.num_heads, layer.qk_dim), "k": (layer.num_kv_heads, layer.qk_dim)}
    heads |= {"v": (layer.num_kv_heads, layer.v_dim), "out": (layer.num_heads, layer.v_dim)}
    for name, expected in heads.items():
        given = getattr(call, name)
        if given is None:
            continue
        if given.shape != (call.q.shape[0], *expected):
            raise ValueError(
                f"{name} of layer {call.layer_id} is {list(given.shape)}: expected [T, {expected[0]}, {expected[1]}] "
                f"with T={call.q.shape[0]}, as many tokens as q"
            )
        if given.dtype != like.dtype or given.device != like.device:
            raise ValueError(
                f"{name} of layer {call.layer_id} is {given.dtype} on {given.device}: expected {like.dtype} on "
                f"{like.device}, like the pool"
            )
    for table in call.rope[:2] if call.rope is not None else ():
        is_wrong = table.dim() != 2 or table.shape[0] != num_tokens or table.shape[1] > layer.qk_dim
        if is_wrong or table.shape[1] % 2 or table.shape != call.rope.cos.shape:
            raise ValueError(
                f"a rope table of layer {call.layer_id} is {list(table.shape)}: expected [{num_tokens}, R] with R of "
                f"{layer.qk_dim} at most, even, and the same for cos and sin"
            )


def check_indices(m: AttentionMetadata, num_slots: int) -> None:
    """Raise ValueError for the first index of the plan that is out of bounds. Waits for the device: debug mode only."""
    num_rows, width = m.slot_table.shape
    require_within("rows", m.rows, 0, num_rows - 1, "the last row of the slot table")
    q_lens = m.qo_indptr.diff()
    lens = m.prefix_lens + m.tail_len - m.q_len + q_lens
    require_within("qo_indptr", q_lens, 0, m.q_len, "tokens a request")
    require_within("prefix_lens", m.prefix_lens, 0, m.max_prefix, "max_prefix")
    require_within("prefix + tail", lens, 0 if m.is_packed else 1, width, "positions of the slot table")
    is_used = torch.arange(width, device=lens.device) < lens.unsqueeze(1)
    slots = m.slot_table[m.rows].masked_fill(~is_used, 0)
    require_within("slots of the requests", slots, 0, num_slots - 1, "the last slot of the pool")
    require_within("out_cache_loc", m.out_cache_loc, 0, num_slots - 1, "the last slot of the pool")
    require_within("positions", m.positions, 0, None, "")
    if m.tail_positions is not None:
        require_within("tail_positions", m.tail_positions, 0, None, "")
    if m.ancestor_bits is not None:
        spare = m.tail_len % 64  # bits used of the last word, 0: all
        last = m.ancestor_bits[..., (m.tail_len - 1) // 64]
        if spare:
            require_within("ancestor_bits", last, 0, (1 << spare) - 1, "the tail's nodes")
        require_within("nodes seen", (m.ancestor_bits != 0).sum(-1), 1, None, "")


def is_debug() -> bool:
    """Return whether SPECDEC_DEBUG turns on the index checks, which wait for the device."""
    return os.environ.get("SPECDEC_DEBUG", "0") not in ("", "0")


def require_within(name: str, values: torch.Tensor, low: int, high: int | None, limit: str) -> None:
    """Raise ValueError naming the first of `values` outside [low, high] and the limit. Waits for the device.

    During a CUDA graph capture waiting is impossible, so nothing is checked; the warm-up before it was checked.
    """
    if values.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    is_bad = (values < low) if high is None else (values < low) | (values > high)
    if bool(is_bad.any()):
        at = is_bad.nonzero()[0].tolist()  # the message needs host values; only debug mode comes here
        upper = "" if high is None else f", at most {high} ({limit})"
        raise ValueError(f"{name}{at} is {int(values[tuple(at)])}: expected at least {low}{upper}")
