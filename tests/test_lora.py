"""Low-rank adapters per row: the op, its twin and kernels, and bits that depend on a row and its adapter alone."""

import pytest
import torch
from torch import fx

from specdec.backends import linear as ops
from specdec.backends.gates import gate_twin
from specdec.backends.linear import product_twin
from specdec.backends.linear.lora import lora, lora_linear, lora_twin
from specdec.backends.metadata import TORCH_METADATA
from specdec.backends.op import adapter_scope, adapters_of_tokens
from specdec.backends.triton.linear import adapted, gates, products
from specdec.backends.triton.linear import lora as kernels
from specdec.core.batch import ForwardMode
from specdec.reach.targets.compiling.adapters import take_in_adapters
from tests.test_linear import DEVICE, assert_close, random


def weights(n, rank, K, sizes, dtype=torch.bfloat16):
    a = [random(n, rank, K, dtype=dtype, seed=i) / K**0.5 for i, _ in enumerate(sizes)]
    b = [random(n, size, rank, dtype=dtype, seed=9 + i) / 4 for i, size in enumerate(sizes)]
    return a, b, [torch.linspace(0.5, 2, n, device=DEVICE) + i for i, _ in enumerate(sizes)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_kernels_equal_their_twin_and_bits_are_a_rows_own(dtype, monkeypatch):
    shapes = (5, 16, 1040, (24, 8), 0), (70, 64, 40, (33,), 7), (3, 16, 64, (8, 8, 8), 8)
    for num_rows, rank, K, sizes, rest in shapes:
        x, y = random(num_rows, K, dtype=dtype), random(num_rows, sum(sizes) + rest, dtype=dtype, seed=3)
        given = weights(3, rank, K, sizes, dtype)
        adapters = torch.arange(num_rows, device=DEVICE) // 2 % 4
        ours = kernels.lora(x, y, *given, adapters)
        assert_close(ours, lora_twin(x, y, *given, adapters), 3)
        assert ours[adapters == 0].equal(y[adapters == 0])
        with monkeypatch.context() as tiles:
            tiles.setattr(kernels, "TOGETHER", ())  # all rows of a tile are computed, as with many rows
            assert kernels.lora(x, y, *given, adapters).equal(ours)
        order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        assert kernels.lora(x[order], y[order], *given, adapters[order]).equal(ours[order])
        for i in range(3):
            one = slice(i, i + 1)
            assert kernels.lora(x[one], y[one], *given, adapters[one]).equal(ours[one])


def product_of(num_rows, K, sizes, rest=0, rank=16, num=5, dtype=torch.bfloat16):
    """Rows, weight, bias, and adapters: 1 to `num` and none in turn, two rows each.

    NumPy's order of sums depends on shapes: there all values are eighths, sums exact, and low-rank ones rounded too.
    """

    def eighths(t):
        return t if t.is_cuda else (t * 8).round() / 8

    N, adapters = sum(sizes) + rest, torch.arange(num_rows, device=DEVICE) // 2 % (num + 1)
    x, weight, bias = (random(*shape, dtype=dtype) for shape in ((num_rows, K), (N, K), (N,)))
    a, b, scales = weights(num, rank, K, sizes, dtype)
    given = eighths(x), eighths(weight * K**-0.5), eighths(bias), [*map(eighths, a)], [*map(eighths, b)], scales
    return given, adapters


def apart(x, weight, bias, a, b, scales, activation, adapters):
    y = kernels.lora(x, products.product(x, weight, bias, None), a, b, scales, adapters)
    return gates.gate(y, activation) if activation else y


@pytest.mark.parametrize("num_rows", [1, 4, 5, 32, 40, 64])
def test_one_product_has_the_bits_of_product_adapters_and_gate_apart(num_rows):
    for sizes, rest, activation, rank, K in (
        ((64,), 0, "", 16, 1040),
        ((64, 128, 64), 0, "", 16, 72),
        ((64,), 70, "", 64, 80),
        ((24, 24), 0, "silu", 64, 72),
    ):
        given, adapters = product_of(num_rows, K, sizes, rest, rank, dtype=torch.float16)
        ours = adapted.lora_linear(*given, activation, adapters)
        assert ours.equal(apart(*given, activation, adapters))
        twin = lora_twin(given[0], product_twin(*given[:3], None), *given[3:], adapters)
        twin = gate_twin(twin, activation) if activation else twin
        assert_close(ours, twin, 20 if activation else 5)  # up to 30 times 30
        (x, *others), order = given, torch.randperm(num_rows, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        assert adapted.lora_linear(x[order], *others, activation, adapters[order]).equal(ours[order])
        for i in range(min(num_rows, 3)):
            alone = adapted.lora_linear(x[i : i + 1], *others, activation, adapters[i : i + 1])
            assert alone.equal(ours[i : i + 1])


def test_what_is_not_finite_in_an_adapter_stays_in_its_rows():
    given, adapters = product_of(6, 40, (64, 64), num=2)
    given[4][0][1, 3, 2] = torch.inf
    ours = adapted.lora_linear(*given, "", adapters)
    assert ours.isfinite().all(1).tolist() == (adapters != 2).tolist() and ours[adapters == 2][:, 64:].isfinite().all()
    torch.testing.assert_close(ours, apart(*given, "", adapters), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("num_rows", "sizes", "activation"),
    [(5, (64, 64), "silu"), (5, (128,), "silu"), (5, (40, 64), ""), (130, (64,), ""), (0, (64,), "")],
    ids=["taken", "one part", "odd parts", "many rows", "none"],
)
def test_the_op_has_the_bits_of_ops_apart(num_rows, sizes, activation):
    (x, *given), adapters = product_of(num_rows, 40, sizes)
    is_taken = adapted.lora_linear(x, *given, activation, adapters) is not None
    assert is_taken == (num_rows == 5 and sizes == (64, 64))
    with adapter_scope(adapters):
        y = lora(x, ops.linear(x, *given[:2]), *given[2:])
        ours = lora_linear(x.unsqueeze(0), *given, activation)
    assert ours[0].equal(ops.gate(y, activation) if activation else y)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_rows", "sizes", "activation"),
    [(1, (4096,), ""), (32, (4096, 1024, 1024), ""), (32, (14336,) * 2, "silu"), (64, (14336,) * 2, "silu")],
)
def test_every_replay_reads_its_own_sums(num_rows, sizes, activation):
    """Two products in a row; launches of the second begin while the first ones run."""
    (source, *given), adapters = product_of(num_rows, 4096, sizes, num=16)
    own, graph = adapters.clone(), torch.cuda.CUDAGraph()

    def run(one):
        first = one(source + 0, *given)
        return first, one(first[:, :4096].contiguous(), *given)

    def one_by_one(x, weight, bias, a, b, scales):
        y = lora(x, ops.linear(x, weight, bias), a, b, scales)
        return ops.gate(y, activation) if activation else y

    with torch.inference_mode(), adapter_scope(own):
        run(lambda *args: lora_linear(*args, activation))
        with torch.cuda.graph(graph):
            found = run(lambda *args: lora_linear(*args, activation))
        for step in range(50):
            own.copy_(torch.where(adapters % 3 == step % 4, 0, (adapters + step) % 17))
            source.copy_(random(num_rows, 4096, seed=step))
            graph.replay()
            assert all(a.equal(b) for a, b in zip(found, run(one_by_one), strict=True)), step


def test_products_take_in_adapters_where_nothing_else_reads_them():
    of = torch.ops.specdec

    def layer(x, weight, a, b, scale):
        both = of.lora.default(x, of.linear.default(x, weight, None), [a, a], [b, b], [scale, scale])
        read_twice = of.linear.default(x, weight, None)
        one = of.lora.default(x, of.linear.default(x, weight, None), [a], [b], [scale])
        other = of.lora.default(one, of.linear.default(x, weight, None), [a], [b], [scale])
        return (
            of.gate.default(both, "silu"),
            of.gate.default(one, "silu"),
            other,
            read_twice,
            of.lora.default(x, read_twice, [a], [b], [scale]),
        )

    graph = fx.symbolic_trace(layer)
    take_in_adapters(graph)
    names = [str(node.target).split(".")[1] for node in graph.graph.nodes if node.op == "call_function"]
    assert names == ["linear", "lora_linear", "linear", "lora", "lora_linear", "gate", "lora"]


def test_the_op_finds_the_adapter_of_each_row():
    x, y = (random(1, 4, size, dtype=torch.float32) for size in (32, 8))
    given = weights(2, 16, 32, (8,), torch.float32)
    with pytest.raises(RuntimeError, match="an attached model's adapted layer was called outside its engine"):
        lora(x, y, *given)
    with adapter_scope(torch.tensor([2, 0, 1, 2], device=DEVICE)):
        ours = lora(x, y, *given)
    (a,), (b,), (scale,) = given
    for row, adapter in enumerate((2, 0, 1, 2)):
        added = 0 if not adapter else scale[adapter - 1] * (b[adapter - 1] @ (a[adapter - 1] @ x[0, row]))
        torch.testing.assert_close(ours[0, row], y[0, row] + added)


@pytest.mark.parametrize("num_reqs", [1, 3])
def test_adapters_of_the_nodes_of_a_round_are_dense(num_reqs):
    """Kernels read them contiguously, also those of a single request."""
    rows = torch.arange(num_reqs, device=DEVICE)
    table = torch.zeros(num_reqs, 16, dtype=torch.int32, device=DEVICE)
    metadata = TORCH_METADATA.uniform(ForwardMode.TARGET_VERIFY, table, rows, rows * 0, q_len=4, max_prefix=8)
    found = adapters_of_tokens(rows + 1, metadata)
    assert found.is_contiguous() and found.tolist() == [1 + row for row in range(num_reqs) for _ in range(4)]
