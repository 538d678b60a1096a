"""Compares a backend's attention with the torch backend's, at the heads, windows and dims of a model's layers."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from specdec.backends.base import AttentionBackend, AttentionCall, LayerSpec
from specdec.backends.differences import SEED, Answer, Check
from specdec.backends.sample_tree import Tail, sample_tree
from specdec.backends.torch_ref import TorchBackend
from specdec.core.batch import AttentionMetadata, ForwardMode
from specdec.core.cache.pool import KVPool

PREFILL = (40, 6)  # new tokens of two requests, over prefixes
WIDTHS = (96, 760)  # limits of the positions of a request, as many as fit in POOL_BYTES of fp32 K/V
POOL_BYTES = 16 << 20
MOST_NODES = 64  # larger tails run the same kernels, except for the words of ancestor bits


def attention_checks(
    backend: AttentionBackend,
    layers: Sequence[LayerSpec],
    dtype: torch.dtype,
    device: torch.device,
    tails: Sequence[Tail],
) -> list[Check]:
    """Return checks of a ragged prefill and of `tails`, for each distinct one of `layers`, in `dtype`.

    The twin gets the same inputs, rounded to `dtype`, in fp32.
    """
    tails = list(dict.fromkeys(Tail(min(num_nodes, MOST_NODES), num_words) for num_nodes, num_words in tails))
    return [
        Check(
            f"{backend.name}, attention of {layer}",
            partial(_answers, backend, layer, dtype, dtype, device, tails),
            partial(_answers, TorchBackend(), layer, dtype, torch.float32, device, tails),
        )
        for layer in dict.fromkeys(layers)
    ]


def _answers(
    backend: AttentionBackend,
    layer: LayerSpec,
    rounded: torch.dtype,
    dtype: torch.dtype,
    device: torch.device,
    tails: Sequence[Tail],
) -> list[Answer]:
    """Attend with random inputs, rounded to `rounded`, over a pool of `dtype`; return [T, Hq, v_dim] per forward."""
    random = torch.Generator(device).manual_seed(SEED)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, device=device).to(rounded).to(dtype)

    width = _width(layer, max((tail.num_nodes for tail in tails), default=0))
    pool = KVPool([layer.shape], 1 + 2 * width, dtype, device)
    for plane in pool.planes:
        plane.copy_(normal(*plane.shape))
    sinks = normal(layer.num_heads) if layer.has_sinks else None
    answers = []
    for what, metadata in _forwards(backend, width, tails, device):
        num_tokens = metadata.positions.shape[0]
        q, k = normal(num_tokens, layer.num_heads, layer.qk_dim), normal(num_tokens, layer.num_kv_heads, layer.qk_dim)
        v = normal(num_tokens, layer.num_kv_heads, layer.v_dim)
        out = torch.zeros(num_tokens, layer.num_heads, layer.v_dim, dtype=dtype, device=device)
        backend.plan(metadata)
        backend.run(AttentionCall(q, k, v, out, pool, 0, layer, sinks))
        answers.append(Answer(what, out))
    return answers


def _width(layer: LayerSpec, num_nodes: int) -> int:
    fitting = POOL_BYTES // (2 * 4 * layer.shape.slot_size)
    return min(max(fitting, WIDTHS[0]), WIDTHS[1]) + num_nodes


def _forwards(
    backend: AttentionBackend, width: int, tails: Sequence[Tail], device: torch.device
) -> Iterator[tuple[str, AttentionMetadata]]:
    """Yield names and metadata of forwards of two requests, one with a long prefix and one with a short one."""
    table = 1 + torch.arange(2 * width, device=device, dtype=torch.int32).view(2, width)
    rows = torch.arange(2, device=device)
    most = width - max(PREFILL[0], *(tail.num_nodes for tail in tails), 0)
    prefixes = [most, most // 8]
    starts, lens = (torch.tensor(values, device=device) for values in (prefixes, PREFILL))
    yield "a prefill", backend.metadata.prefill(table, rows, prefixes, PREFILL, on_device=(starts, lens))
    for tail in tails:
        tree = sample_tree(tail, device)
        depths = None if tree.depths is None else tree.depths.expand(2, -1).contiguous()
        metadata = backend.metadata.uniform(
            ForwardMode.TARGET_VERIFY,
            table,
            rows,
            starts,
            q_len=tail.num_nodes,
            max_prefix=most,
            depths=depths,
            tail_depths=depths,
            ancestor_bits=None if tree.bits is None else tree.bits.expand(2, -1, -1),
        )
        yield f"a {'tree' if tail.num_words else 'chain'} of {tail.num_nodes}", metadata
