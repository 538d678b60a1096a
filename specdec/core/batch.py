"""Plain data passed between layers: forward modes, the attention metadata of one forward, copies to a device."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch


class ForwardMode(Enum):
    """Purpose of a forward pass."""

    EXTEND = auto()  # prefill
    DECODE = auto()
    DRAFT = auto()  # one draft step
    TARGET_VERIFY = auto()
    DRAFT_EXTEND = auto()


def ancestor_mask(bits: torch.Tensor, num_nodes: int) -> torch.Tensor:
    """Unpack ancestor bits [bs, q, W] int64 to a mask [bs, q, num_nodes] bool: True where query q sees node j."""
    nodes = torch.arange(num_nodes, device=bits.device)
    return (bits[..., nodes // 64] >> nodes % 64) & 1 != 0


@dataclass(frozen=True)
class AttentionMetadata:
    """Attention metadata of one forward: every request sees its prefix and a tail of new nodes.

    Request i has queries for the LAST `q_len` of its `tail_len` tail nodes. Tail node t lives at position
    prefix_lens[i]+t of the request's row in the slot table; its K/V is written before attention reads it.

    mode: purpose of the forward.
    slot_table: [num_rows, width] int32, KV slot of each position of each row; slot 0 is the dummy slot.
    rows: [bs] int64, the row of each request in that table.
    prefix_lens: [bs] int64, committed tokens every query sees.
    positions: [T] int64, rotary positions of the queries (prefix + depth), packed request by request.
    out_cache_loc: [T] int64, KV slots that take this forward's K/V.
    qo_indptr: [bs+1] int32, request i's tokens are [qo_indptr[i], qo_indptr[i+1]) of the packed T.
    q_len, tail_len: tokens, uniform over requests. For EXTEND both are the longest request's.
    max_prefix: host upper bound of prefix_lens; shapes may depend on it, never on prefix_lens.
    ancestor_bits: [bs, q_len, W] int64, W words of 64 bits for at least tail_len nodes; bit t % 64 of word t // 64 set:
        tail node t is visible. None means causal: node t has depth t.
    tail_positions: [bs, tail_len] int64, positions of the tail nodes (sliding windows need them); None: prefix + t.
    path_slots: [bs, q_len, tail_len] int32, KV slots of each query's ancestors and itself by depth, 0 past the last.
        Trees need them on Triton's backend.
    q_lens: EXTEND only, tokens of each request on the host (ragged). None: every request has q_len, or, for EXTEND,
        only the device knows (`is_packed`).
    starts: prefix_lens on the host, if they are known there (prefills); None: unknown.
    rotary: [T] int64, positions that rotate queries and keys, where they differ from `positions`; None: `positions`.
    limits: ragged prefills only, [T] int64, the last position that each query sees, not before its own and ascending
        within a request: tokens of an image may see each other. None: its own.
    read_rows: EXTEND only, [n] int64, the tokens of the packed T whose last hidden states are read; None: all.
    """

    mode: ForwardMode
    slot_table: torch.Tensor
    rows: torch.Tensor
    prefix_lens: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    qo_indptr: torch.Tensor
    q_len: int
    tail_len: int
    max_prefix: int
    ancestor_bits: torch.Tensor | None = None
    tail_positions: torch.Tensor | None = None
    path_slots: torch.Tensor | None = None
    q_lens: tuple[int, ...] | None = None
    starts: tuple[int, ...] | None = None
    rotary: torch.Tensor | None = None
    limits: torch.Tensor | None = None
    read_rows: torch.Tensor | None = None

    @property
    def num_reqs(self) -> int:
        """Number of requests in this forward."""
        return self.rows.shape[0]

    @property
    def is_packed(self) -> bool:
        """Return whether only the device knows how many tokens each request has, as in a captured whole prefill.

        Requests without tokens and tokens past the last request's are padding; q_len and tail_len are the bound T.
        """
        return self.mode is ForwardMode.EXTEND and self.q_lens is None

    def owners(self) -> torch.Tensor:
        """Return the request of each token of a packed or ragged batch, [T] int64; num_reqs for padding."""
        places = torch.arange(self.positions.shape[0], dtype=torch.int32, device=self.positions.device)
        return torch.searchsorted(self.qo_indptr[1:], places, right=True)

    def visible_nodes(self) -> torch.Tensor:
        """Return the mask [bs, q_len, tail_len] bool of tail nodes that each query sees, itself included."""
        if self.ancestor_bits is not None:
            return ancestor_mask(self.ancestor_bits, self.tail_len)
        node = torch.arange(self.tail_len, device=self.rows.device)
        return (node <= node[self.tail_len - self.q_len :, None]).expand(self.num_reqs, -1, -1)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which kernels and streams are those of `device`, whichever GPU is current."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def refuse_autocast(device: torch.device) -> None:
    """Raise ValueError within `torch.autocast`, which would change dtypes between the parts of a forward."""
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        raise ValueError(
            f"torch.autocast(device_type={device.type!r}, dtype={dtype}) is on: an engine runs the model in the "
            f"dtype of its weights. Leave autocast around it, or convert the model before attach(): model.to({dtype})"
        )


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy `host` to `device` without waiting for the device."""
    if device.type == "cuda":  # `pin_memory` asks the driver first whether `host` is pinned
        host = torch.empty_like(host, pin_memory=True).copy_(host)
    return host.to(device, non_blocking=True)


def ints_to_device(values: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Copy host ints (nested lists too) to an int64 tensor on `device` without waiting for the device."""
    return to_device(torch.tensor(values, dtype=torch.int64, device="cpu"), device)
