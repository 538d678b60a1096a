"""Prefills on FlashInfer: its Hopper kernel (FA3), or FA2 elsewhere and for layers with sinks.

The host knows the lengths of prefills, and their attention runs outside every graph, so FlashInfer plans them itself.
A plan is written to pinned memory and copied asynchronously: it has a buffer of its own until its copy has run
(`PinnedRing`). No device value is read.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from specdec.backends.base import AttentionCall, LayerSpec
from specdec.backends.flashinfer.calls import CAUSAL, Paged, run_fa2, run_fa3, run_variant
from specdec.backends.flashinfer.kernels import Kernel, kernel_for, prefill_family
from specdec.core.batch import AttentionMetadata


class PinnedRing:
    """Pinned host buffers that a stream copies from; a buffer is reused after its copy has run."""

    def __init__(self) -> None:
        self._busy: list[tuple[torch.cuda.Event, torch.Tensor]] = []

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return a free pinned uint8 buffer of at least `num_bytes`."""
        for i, (event, buffer) in enumerate(self._busy):
            if buffer.numel() >= num_bytes and event.query():
                del self._busy[i]
                return buffer
        return _pinned(max(num_bytes, 1 << 20))

    def give(self, buffer: torch.Tensor) -> None:
        """Give a buffer back; it is free once the current stream has run all copies queued so far."""
        event = torch.cuda.Event()
        event.record()
        self._busy.append((event, buffer))


def _pinned(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


class _Lengths(NamedTuple):
    """Lengths of the current forward. pages: [bs, longest] int32, slots by position; the rest int32 [bs] and [bs+1].

    page_starts, starts_on_device: where each row of `pages` begins; last_page_len encodes its length, see `tables`.
    """

    pages: torch.Tensor
    qo_indptr: torch.Tensor
    kv_lens: torch.Tensor
    page_starts: torch.Tensor
    starts_on_device: torch.Tensor
    last_page_len: torch.Tensor


class PrefillAttention:
    """The plans of the current prefill, one per family and shape of layer, and the modules that run them."""

    def __init__(self, modules: Mapping[Kernel, Any], device: torch.device):
        self._modules, self._device = modules, device
        self._num_processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._ring = PinnedRing()
        self._lengths: _Lengths | None = None
        self._planned: dict[tuple[object, ...], Paged] = {}

    def begin(self) -> None:
        """Discard the plans of the previous prefill."""
        self._lengths, self._planned = None, {}

    def attend(self, m: AttentionMetadata, call: AttentionCall) -> None:
        """Attend in one layer of prefill `m`, whose K and V are stored."""
        layer, family = call.layer, prefill_family(call.layer, self._device)
        module = self._modules[kernel_for(family, layer, call.q.dtype)]
        window_left = -1 if layer.window is None else layer.window - 1
        key = (family, layer.num_heads, layer.num_kv_heads, layer.qk_dim, window_left)
        if key not in self._planned:
            self._planned[key] = self._plan(module, family, m, layer, window_left)
        paged = self._planned[key]
        if family == "fa3":
            run_fa3(module, paged, call)
        elif family == "fa2":
            run_fa2(module, paged, call)
        else:
            run_variant(module, paged, call, m.tail_len, None, None)

    def _plan(self, module: Any, family: str, m: AttentionMetadata, layer: LayerSpec, window_left: int) -> Paged:
        if self._lengths is None:
            self._lengths = _lengths(m)
        own, device = self._lengths, self._device
        page_size, is_graph, is_causal = 1, False, True
        heads, dims = (layer.num_heads, layer.num_kv_heads), (layer.qk_dim, layer.v_dim)
        shape = (m.positions.shape[0], m.num_reqs, *heads, page_size, is_graph, *dims, is_causal, window_left)
        options: tuple[object, ...] = ()
        if family == "fa3":  # a work list per multiprocessor: (tile, head) pairs, each with all its keys
            rows = 192 if layer.v_dim == 64 else 128  # of a tile (`PrefillSM90Plan`)
            num_works = layer.num_heads * sum(-(-n // rows) for n in m.q_lens or ())
            float_bytes, int_bytes = 16, 7 * (4 * num_works + 16) + 4 * (self._num_processors + 1) + 16
            kv_indptr = own.page_starts
        else:  # tiles are cut into chunks if they do not fill the GPU; lengths are differences of kv_indptr
            kv_indptr = torch.nn.functional.pad(own.kv_lens.cumsum(0), (1, 0)).to(torch.int32)
            options = (-1, False, 0, 0)  # no fixed split, splits allowed, nothing else on the GPU, ragged queries
            lens = (m.qo_indptr, own.qo_indptr, kv_indptr, own.kv_lens)
            float_bytes, int_bytes = map(int, module.workspace_size(*lens, *shape, *options))
        floats = torch.empty(max(float_bytes, 16), dtype=torch.uint8, device=device)
        ints = torch.empty(int_bytes, dtype=torch.uint8, device=device)
        staging = self._ring.take(int_bytes)
        info = module.plan(floats, ints, staging, own.qo_indptr, kv_indptr, own.kv_lens, *shape, *options)
        self._ring.give(staging)
        pages = (own.starts_on_device, own.pages, own.last_page_len)
        return Paged(floats, ints, [int(n) for n in info], m.qo_indptr, *pages, CAUSAL, window_left)


def _lengths(m: AttentionMetadata) -> _Lengths:
    """Return the lengths of a prefill in the form of its plans and kernels, and its page list."""
    assert m.starts is not None and m.q_lens is not None, "a prefill knows its lengths on the host"
    kv_lens = [start + n for start, n in zip(m.starts, m.q_lens, strict=True)]
    longest = max(kv_lens)
    pages = m.slot_table[:, :longest].index_select(0, m.rows)
    starts = torch.arange(m.num_reqs + 1, dtype=torch.int32, device="cpu") * longest
    lens = torch.tensor(kv_lens, dtype=torch.int32, device="cpu")
    qo_indptr = torch.tensor([0, *m.q_lens], dtype=torch.int32, device="cpu").cumsum(0).to(torch.int32)
    device = m.rows.device
    starts_on_device = torch.arange(m.num_reqs + 1, dtype=torch.int32, device=device) * longest
    q_lens = m.qo_indptr.diff()
    last_page_len = (m.prefix_lens + q_lens + 1 - longest).to(torch.int32)
    return _Lengths(pages, qo_indptr, lens, starts, starts_on_device, last_page_len)
