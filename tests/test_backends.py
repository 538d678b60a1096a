"""TorchBackend against a naive float64 reference, one query at a time, over every row of the prefix + tail table."""

import pytest
import torch

from specdec.backends import LayerSpec, TorchBackend, forward_context
from specdec.backends.metadata import prefill_metadata, uniform_metadata
from specdec.backends.op import ForwardContext, attention
from specdec.batch import ForwardMode
from specdec.kv_cache import KVPool
from specdec.models.probe import classify_mask

LAYERS = {
    "gqa": LayerSpec(9, 3, 16, 16, 0.25),
    "window": LayerSpec(4, 2, 16, 16, 0.25, window=5),
    "softcap": LayerSpec(4, 2, 16, 16, 0.25, softcap=2.0),
    "sinks": LayerSpec(4, 2, 16, 16, 0.25, window=6, has_sinks=True),
    "v_dim": LayerSpec(4, 4, 24, 12, 0.2),
}
PREFIXES = (11, 3)


class Setup:
    """A pool full of NaN but for the prefixes of two requests, whose slots are shuffled."""

    def __init__(self, layer: LayerSpec):
        self.generator = torch.Generator().manual_seed(0)
        self.layer = layer
        self.tables = 1 + torch.randperm(80, generator=self.generator).view(2, 40)
        self.pool = KVPool([layer.shape], 81, torch.float32, torch.device("cpu"))
        for cache in (self.pool.k[0], self.pool.v[0]):
            cache.fill_(float("nan"))
            for row, prefix in enumerate(PREFIXES):
                cache[self.tables[row, :prefix]] = self.random(prefix, *cache.shape[1:])
        self.sinks = self.random(layer.num_heads) if layer.has_sinks else None
        self.modes = []
        self.context = ForwardContext(TorchBackend(), self.pool, [layer], [self.sinks], self.modes.append)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def run(self, metadata):
        t, s = metadata.positions.numel(), self.layer
        q, k = self.random(t, s.num_heads, s.qk_dim), self.random(t, s.num_kv_heads, s.qk_dim)
        v = self.random(t, s.num_kv_heads, s.v_dim)
        with forward_context(self.context, metadata):
            return q, attention(q, k, v, 0)

    def expected(self, q, row: int, q_pos: int, visible: list[tuple[int, int]]) -> torch.Tensor:
        """One query [Hq, dim] over `visible` (slot position, rotary position) pairs, in float64."""
        s = self.layer
        near = [at for at, pos in visible if s.window is None or q_pos - pos < s.window]
        slots, group = self.tables[row, near], s.num_heads // s.num_kv_heads
        keys = self.pool.k[0][slots].double().repeat_interleave(group, 1)
        values = self.pool.v[0][slots].double().repeat_interleave(group, 1)
        logits = torch.einsum("hd,nhd->hn", q.double(), keys) * s.scaling
        if s.softcap:
            logits = torch.tanh(logits / s.softcap) * s.softcap
        if self.sinks is not None:
            logits = torch.cat([logits, self.sinks.double().unsqueeze(1)], 1)
        return torch.einsum("hn,nhd->hd", logits.softmax(-1)[:, : len(near)], values)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("first", "q_len"), [(0, 1), (0, 4), (2, 1)])
def test_causal_tails(name, first, q_len):
    setup = Setup(LAYERS[name])
    lens = torch.tensor(PREFIXES)
    for node in range(first):  # earlier tail nodes are in the pool already
        setup.run(uniform_metadata(ForwardMode.DRAFT, setup.tables, lens, q_len=1, first_node=node, max_prefix=16))
    metadata = uniform_metadata(ForwardMode.DRAFT, setup.tables, lens, q_len=q_len, first_node=first, max_prefix=16)
    q, out = setup.run(metadata)
    for row, prefix in enumerate(PREFIXES):
        for i in range(q_len):
            end = prefix + first + i
            want = setup.expected(q[row * q_len + i], row, end, [(p, p) for p in range(end + 1)])
            torch.testing.assert_close(out[row * q_len + i].double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_trees_see_their_ancestors(name):
    setup = Setup(LAYERS[name])
    parents = [0, 0, 0, 1, 3]
    depths = torch.tensor([[0, 1, 1, 2, 3]] * 2)
    ancestors = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 3, 4]]
    assert all(parents[i] in chain for i, chain in enumerate(ancestors))
    bits = torch.tensor([[sum(1 << j for j in chain) for chain in ancestors]] * 2)
    metadata = uniform_metadata(
        ForwardMode.TARGET_VERIFY,
        setup.tables,
        torch.tensor(PREFIXES),
        q_len=5,
        max_prefix=16,
        depths=depths,
        tail_depths=depths,
        ancestor_bits=bits,
    )
    q, out = setup.run(metadata)
    for row, prefix in enumerate(PREFIXES):
        for i, chain in enumerate(ancestors):
            tail = [(prefix + j, prefix + int(depths[0, j])) for j in chain]
            want = setup.expected(
                q[row * 5 + i], row, prefix + int(depths[0, i]), [(p, p) for p in range(prefix)] + tail
            )
            torch.testing.assert_close(out[row * 5 + i].double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_ragged_prefill(name):
    setup, lens = Setup(LAYERS[name]), (2, 7)
    q, out = setup.run(prefill_metadata(setup.tables, PREFIXES, lens))
    start = 0
    for row, (prefix, n) in enumerate(zip(PREFIXES, lens, strict=True)):
        for i in range(n):
            end = prefix + i
            want = setup.expected(q[start + i], row, end, [(p, p) for p in range(end + 1)])
            torch.testing.assert_close(out[start + i].double(), want, atol=1e-5, rtol=1e-5)
        start += n
    assert setup.modes == [ForwardMode.EXTEND]


def test_masks_are_classified_by_what_they_show():
    cpu = torch.device("cpu")
    assert classify_mask(lambda b, h, q, k: k <= q, cpu) is None
    assert classify_mask(lambda b, h, q, k: (k <= q) & (q - k < 77), cpu) == 77
    assert "chunked" in classify_mask(lambda b, h, q, k: (k <= q) & (q // 64 == k // 64), cpu)
    assert "not causal" in classify_mask(lambda b, h, q, k: k == k, cpu)
    assert "holes" in classify_mask(lambda b, h, q, k: (k <= q) & ((q - k) % 2 == 0), cpu)
