"""The attention of a query at a position has the same bits in every kind of forward.

Plain decoding, chains, paths of trees, prefills whole, in chunks, packed and over a prefix, with and without split K/V.
In fp32 in Triton's interpreter, in all dtypes on a GPU.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from specdec.backends import AttentionCall, LayerSpec, forward_context
from specdec.backends.op import ForwardContext
from specdec.core.batch import ForwardMode
from specdec.core.cache.pool import KVPool

pytest.importorskip("triton")
from specdec.backends.triton import backend as triton_backend
from specdec.backends.triton.attention import tiling
from tests.ancestors import words_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = LayerSpec(3, 1, 16, 16, 0.25)
LAYERS = {
    "full": SMALL,
    "window": replace(SMALL, window=70),
    "narrow window": replace(SMALL, window=5, has_sinks=True),
    "softcap": replace(SMALL, softcap=2.0),
    "sinks": replace(SMALL, has_sinks=True),
    "v_dim": LayerSpec(2, 2, 24, 12, 0.2),
    "latents": LayerSpec(5, 1, 24, 16, 0.2, v_in_k=True),
}
REAL = {
    "8B": LayerSpec(32, 8, 128, 128, 0.09),
    "SmolLM2": LayerSpec(9, 3, 64, 64, 0.125),
    "gpt-oss": LayerSpec(64, 8, 64, 64, 0.125, window=128, has_sinks=True),
    "Gemma": LayerSpec(8, 4, 256, 256, 0.06, window=1024, softcap=50.0),
    "latent": LayerSpec(8, 8, 192, 128, 0.07),
    "GLM-Flash": LayerSpec(20, 1, 576, 512, 0.06, v_in_k=True),
}


@pytest.fixture(autouse=True)
def exact_products(monkeypatch):
    """NumPy's fp32 products depend on the number of rows; a GPU sums in the order of K. In fp64 all orders agree."""
    from triton.runtime import interpreter

    def dot(self, a, b, d, *options):
        product = np.matmul(a.data.astype(np.float64), b.data.astype(np.float64)) + d.data
        return interpreter.TensorHandle(product.astype(d.data.dtype), d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


class Text:
    """A text with a q, k and v for every position, in row 0 of the slot table; row 1 has another text."""

    def __init__(self, layer, length, dtype=torch.float32, page_size=1, processors=None):
        generator = torch.Generator().manual_seed(0)

        def random(*shape):
            return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

        self.layer, self.length, self.dtype, self.random = layer, length, dtype, random
        heads = ((layer.num_heads, layer.qk_dim), (layer.num_kv_heads, layer.qk_dim), (layer.num_kv_heads, layer.v_dim))
        self.text, self.other = [[random(length, *shape) for shape in heads] for _ in range(2)]
        num_pages = -(-(length + 300) // page_size)
        pages = 1 + torch.randperm(2 * num_pages, generator=generator).view(2, num_pages, 1)
        self.table = (pages * page_size + torch.arange(page_size)).flatten(1).int().to(DEVICE)
        pool = KVPool([layer.shape], (2 * num_pages + 1) * page_size, dtype, DEVICE)
        for row, (_q, k, v) in enumerate((self.text, self.other)):
            pool.write(0, self.table[row, :length].long(), k, v)
        self.sinks = random(layer.num_heads) if layer.has_sinks else None
        self.backend = triton_backend.TritonBackend()
        self.backend.processors = processors
        self.context = ForwardContext(self.backend, pool, [layer], [self.sinks], lambda mode: None)

    def attend(self, metadata, inputs):
        """Return the attention of tokens with these q, k and v."""
        q, k, v = (t.contiguous() for t in inputs)
        out = torch.full((q.shape[0], self.layer.num_heads, self.layer.v_dim), float("nan")).to(q)
        with forward_context(self.context, metadata):
            self.backend.run(AttentionCall(q, k, v, out, self.context.pool, 0, self.layer, self.sinks))
        return out

    def uniform(self, rows, lens, q_len, **tree):
        mode = ForwardMode.DECODE if q_len == 1 else ForwardMode.TARGET_VERIFY
        rows, lens = torch.tensor(rows, device=DEVICE), torch.tensor(lens, device=DEVICE)
        most = self.table.shape[1] - q_len
        return self.backend.metadata.uniform(mode, self.table, rows, lens, q_len=q_len, max_prefix=most, **tree)

    def decoded(self, positions):
        """Plain decoding, one request per position."""
        at = torch.tensor(positions, device=DEVICE)
        return self.attend(self.uniform([0] * len(positions), positions, 1), [t[at] for t in self.text])

    def chain(self, start, q_len, others=()):
        """Verify a chain from `start`, between requests of the other text."""
        starts = [*others, start]
        at = [torch.arange(s, s + q_len, device=DEVICE) for s in starts]
        inputs = [torch.cat([b[i] for i in at[:-1]] + [a[at[-1]]]) for a, b in zip(self.text, self.other, strict=True)]
        return self.attend(self.uniform([1] * len(others) + [0], starts, q_len), inputs)[-q_len:]

    def tree(self, start, parents, path):
        """Verify a tree from `start`; return the attention of `path`, whose nodes have the text's tokens."""
        lines = [[0]]
        for node in range(1, len(parents)):
            lines.append([*lines[parents[node]], node])
        depths = torch.tensor([[len(line) - 1 for line in lines]], device=DEVICE)
        bits = words_of(lines).unsqueeze(0).to(DEVICE)
        inputs = [self.random(len(parents), *t.shape[1:]) for t in self.text]
        for given, own in zip(inputs, self.text, strict=True):
            given[path] = own[start : start + len(path)]
        slots = self.table[0].clone()
        tree = {"depths": depths, "tail_depths": depths, "ancestor_bits": bits}
        found = self.attend(self.uniform([0], [start], len(parents), **tree), inputs)[path]
        # As a commit does: the nodes' K and V have overwritten the text's.
        after = slice(start, min(start + len(parents), self.length))
        self.context.pool.write(0, slots[after].long(), self.text[1][after], self.text[2][after])
        return found

    def prefilled(self, *cuts, others=()):
        """Prefill [0, cuts[0]), [cuts[0], cuts[1]), ...; return all attention. others: lengths of packed requests."""
        outs = []
        for start, end in zip((0, *cuts), cuts, strict=False):
            rows, starts, lens = [1] * len(others) + [0], [0] * len(others) + [start], [*others, end - start]
            metadata = self.backend.metadata.prefill(self.table, torch.tensor(rows, device=DEVICE), starts, lens)
            inputs = [
                torch.cat([b[:n] for n in others] + [a[start:end]]) for a, b in zip(self.text, self.other, strict=True)
            ]
            outs.append(self.attend(metadata, inputs)[sum(others) :])
        return torch.cat(outs)

    def fresh(self, length, others):
        """Prefill [0, length) and others, with lengths known only on the device, as in a graph; then padding."""
        lens = torch.tensor([*others, length], device=DEVICE)
        rows, before = torch.tensor([1] * len(others) + [0], device=DEVICE), sum(others)
        metadata = self.backend.metadata.packed(self.table, rows, lens * 0, lens, before + length + 5, 0)
        inputs = [
            torch.cat([*(b[:n] for n in others), a[:length], a[:5]]) for a, b in zip(self.text, self.other, strict=True)
        ]
        out = self.attend(metadata, inputs)[before : before + length]
        for plan, _partials in self.backend._plans.values():
            assert self.layer.v_in_k or not plan.items[: int(plan.counts), 6].any(), "no tile is split"
        return out


def check(text, at, q_len, cut):
    """Compare the query at `at`, and the one before, in every kind of forward with plain decoding."""
    want = dict(zip((at - 1, at), text.decoded([at - 1, at]), strict=True))
    differing = []

    def compare(what, out, first):
        found = [p for p in want if 0 <= p - first < len(out)]
        assert found, what
        differing.extend(f"{what}, {p}" for p in found if not torch.equal(out[p - first], want[p]))

    compare("decoding alone", text.decoded([at]), at)
    compare("decoding in a batch", text.decoded([0, 3, at, 5])[2:3], at)
    for back in sorted({0, q_len // 2, q_len - 1}):
        compare(f"chain of {q_len} from {back} before", text.chain(at - back, q_len), at - back)
    compare("chain in a batch", text.chain(at - 1, q_len, others=(5, at)), at - 1)
    num = max(q_len, 4)
    binary = [max(i - 1, 0) // 2 for i in range(num)]
    path = [num - 1]
    while path[0]:
        path.insert(0, binary[path[0]])
    compare("tree, binary", text.tree(at - len(path) + 1, binary, path), at - len(path) + 1)
    late = [0, *[0] * (num - 2), num - 2]  # two nodes after siblings of the first
    compare("tree, late", text.tree(at - 2, late, [0, num - 2, num - 1]), at - 2)
    compare("prefill", text.prefilled(at + 1), 0)
    compare("prefill in chunks", text.prefilled(cut, at, at + 1), 0)
    compare("packed", text.prefilled(cut, at + 1, others=(1, cut + 3)), 0)
    compare("fresh", text.fresh(at + 1, (1, cut + 3)), 0)
    assert not differing, differing


@pytest.mark.parametrize("at", [7, 63, 64, 130])
@pytest.mark.parametrize(("q_len", "processors"), [(2, 1), (7, 12)])
@pytest.mark.parametrize("name", LAYERS)
def test_bits_are_those_of_plain_decoding(name, q_len, at, processors, monkeypatch):
    """At the edges of blocks and chunks. With one processor tiles are whole, with many they are split."""
    monkeypatch.setattr(tiling, "shared_memory", lambda device: 99 << 10)  # smaller blocks
    check(Text(LAYERS[name], 150, page_size=4, processors=processors), at, q_len, cut=min(at, 37) - 3)


@pytest.mark.parametrize("heads", [(2, 2), (2, 1), (8, 1)])
def test_splitting_changes_no_bits(heads):
    """Groups of 1, 2 and 8; a batch, a prefill and a tree."""
    answers = []
    for processors in (1, 12):
        text = Text(LayerSpec(*heads, 16, 16, 0.25, has_sinks=True), 150, processors=processors)
        answers.append([text.decoded([120, 130, 149])])
        ((plan, _partials),) = text.backend._plans.values()
        assert bool((plan.items[: int(plan.counts), 6] > 0).any()) == (processors > 1)
        answers[-1] += [text.prefilled(150), text.tree(140, [0, 0, 0, 2], [0, 2, 3])]
    assert all(torch.equal(*pair) for pair in zip(*answers, strict=True))


@pytest.mark.gpu
def test_the_next_kernel_reads_what_attention_wrote():
    """A graph of packed prefills of 512 tokens, each followed by a cuBLAS product; all write one tensor, as layers do.
    Kernels may begin before the previous one ends."""
    layer = REAL["SmolLM2"]
    text = Text(layer, 700, torch.bfloat16, page_size=16)
    weight = text.random(576, 576)
    lens, cached = [150, 40, 97, 112, 100], [0, 130, 0, 33, 0]
    rows, (starts, q_lens) = torch.zeros(5, dtype=torch.int64, device=DEVICE), torch.tensor([cached, lens]).to(DEVICE)
    q, k, v = (torch.cat([t[s : s + n] for s, n in zip(cached, lens, strict=True)] + [t[:13]]) for t in text.text)
    out, queries = torch.zeros_like(q), (q, -q, q / 2)

    def products(wait=lambda: None):
        metadata = text.backend.metadata.packed(text.table, rows, starts, q_lens, 512, 700)
        found = []
        with forward_context(text.context, metadata):
            for query in queries * 10:
                text.backend.attend(AttentionCall(query, k, v, out, text.context.pool, 0, layer))
                wait()
                found.append(torch.nn.functional.linear(out.flatten(1), weight))
        return torch.stack(found)

    want = products(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = products()
    for _ in range(100):
        graph.replay()
        assert torch.equal(found, want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", REAL)
def test_bits_on_a_gpu(name, dtype):
    """All tilings: tiles of 16 to 64 rows, with mma and wgmma."""
    text = Text(REAL[name], 2300, dtype, page_size=16)
    for at, q_len in ((40, 1), (190, 4), (255, 8), (256, 16), (1000, 32), (2050, 64), (2239, 5)):
        check(text, at, q_len, cut=min(at, 777) - 3)
