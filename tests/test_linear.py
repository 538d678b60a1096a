"""Products and norms between attention calls: ops, twins, kernels, and bits that depend on a row alone."""

import functools
import itertools
from functools import partial
from importlib import import_module
from inspect import signature

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from specdec.backends import experts
from specdec.backends import linear as ops
from specdec.backends.experts import choices, quantised
from specdec.backends.gates import ACTIVATIONS, apply_gate_twin
from specdec.backends.linear import fp8, latents, packed
from specdec.backends.linear.inputs import joined_inputs
from specdec.backends.recurrent.gates import delta_gates
from specdec.backends.rope import rope_tables
from specdec.backends.triton.launch.sizes import cdiv
from specdec.backends.triton.linear import cublas, gates, inputs, norms, products, tiles
from specdec.backends.triton.linear.strides import strided_rows
from specdec.backends.triton.linear.tiles import Tile, choose_tile
from tests.early_starts import check_early_starts

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BITS = {torch.float16: 2**-10, torch.bfloat16: 2**-7}  # the interpreter rounds bf16 to zero
interpreted = pytest.mark.skipif(DEVICE.type == "cuda", reason="of a GPU, tensor cores sum K in steps of 16")


def random(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def test_ops_compute_what_layers_of_transformers_do():
    mlp = LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=48, hidden_act="silu")).to(DEVICE, torch.bfloat16)
    x, y = random(2, 5, 32), random(2, 5, 32, seed=1)
    joined = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
    assert ops.linear(ops.gated_linear(x, joined, None, "silu"), mlp.down_proj.weight).equal(mlp(x))
    assert ops.gate(ops.linear(x, joined), "silu").equal(ops.gated_linear(x, joined, None, "silu"))
    for kind, offset, is_late in ((LlamaRMSNorm, 0.0, False), (GemmaRMSNorm, 1.0, True)):
        norm = kind(32, eps=1e-3).to(DEVICE, torch.bfloat16)
        norm.weight.data = random(32, seed=2)
        normed, total = ops.add_rms_norm(x, y, norm.weight, 1e-3, offset, is_late)
        assert total.equal(x + y) and normed.equal(norm(x + y))
        assert ops.rms_norm(total, norm.weight, 1e-3, offset, is_late).equal(normed)


def test_traces_keep_the_ops_and_their_shapes():
    def layer(x, weight, scale):
        normed, total = torch.ops.specdec.add_rms_norm(x, x, scale, 1e-5, 0.0, False)
        again = torch.ops.specdec.rms_norm(normed, scale, 1e-5, 1.0, True)
        gated = torch.ops.specdec.gated_linear(again, weight, None, "gelu")
        return torch.ops.specdec.linear(gated, weight[:, :6], weight[:, 7]), total

    given = random(12, 8), random(8)
    graph = make_fx(layer, tracing_mode="symbolic")(random(3, 8), *given)
    names = [str(node.target) for node in graph.graph.nodes if "specdec" in str(node.target)]
    assert names == [f"specdec.{name}.default" for name in ("add_rms_norm", "rms_norm", "gated_linear", "linear")]
    many = random(5, 8)
    assert all(a.equal(b) for a, b in zip(graph(many, *given), layer(many, *given), strict=True))


def test_kernels_take_what_their_ops_take():
    rooms = (ops, fp8, latents, packed, experts, choices, quantised)
    found = [op for room in rooms for op in vars(room).values() if getattr(op, "kernels", "")]
    made = {*found, delta_gates, joined_inputs, rope_tables}
    for op in made:
        kernel = getattr(import_module(f"specdec.backends.triton.{op.kernels}"), op.__name__)
        given, taken = ([(p.name, p.default) for p in signature(f).parameters.values()] for f in (op, kernel))
        assert taken == given or (kernel is inputs.joined_inputs and taken[:3] == given[:3]), op.__name__
    assert len(made) == 22


def test_an_unknown_activation_is_refused_by_name():
    with pytest.raises(ValueError, match="activation='relu': expected one of silu, gelu, gelu_tanh"):
        ops.gated_linear(random(2, 8), random(12, 8), None, "relu")


def padded(t):
    """Copy `t` to an odd address with an odd stride: no TMA."""
    wide = torch.empty(t.shape[0], t.shape[1] + 1 + t.shape[1] % 2, dtype=t.dtype, device=t.device)[
        :, 1 : t.shape[1] + 1
    ]
    return wide.copy_(t)


def assert_close(ours, theirs, steps=1):
    atol = rtol = 2 * steps * BITS[ours.dtype]
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize("place", [lambda t: t, padded], ids=["tma", "plain"])
def test_products_equal_their_twin(place, dtype):
    for num_rows, N, K in ((3, 33, 144), (70, 20, 40)):
        x, bias = random(num_rows, K, dtype=dtype), random(2 * N, dtype=dtype, seed=2)
        weight = random(2 * N, K, dtype=dtype, seed=1) * K**-0.5
        for activation, added in ((None, None), (None, bias), ("silu", bias), ("gelu", None), ("gelu_tanh", None)):
            ours = products.product(place(x), place(weight), added, activation)
            assert_close(ours, ops.product_twin(x, weight, added, activation), steps=3 if activation else 1)


def summed_in_order(x, weight, block):
    sums = [a.float() @ b.float().T for a, b in zip(x.split(block, 1), weight.split(block, 1), strict=True)]
    return functools.reduce(torch.add, sums).half()


@interpreted
@pytest.mark.parametrize("place", [lambda t: t, padded], ids=["tma", "plain"])
def test_k_is_summed_in_order_and_never_split_for_any_number_of_rows(place):
    """Parts a, b, c, -a of whole numbers, exact in fp32 each; a is so large that their sum depends on its order."""
    part, random = choose_tile(1, 40, False, DEVICE).k, torch.Generator().manual_seed(0)
    x, weight = (torch.randint(-8, 9, (rows, 4, part), generator=random) for rows in (130, 40))
    x[:, 0], weight[:, 0] = x[:, 0] * 4096, weight[:, 0] * 64
    x[:, 3], weight[:, 3] = -x[:, 0], weight[:, 0]
    x, weight = x.flatten(1).half(), weight.flatten(1).half()
    halves = [a.float() @ b.float().T for a, b in zip(x.split(2 * part, 1), weight.split(2 * part, 1), strict=True)]
    assert not sum(halves).half().equal(summed_in_order(x, weight, part)), "a split sum differs"
    for rows in (1, 2, 16, 17, 40, 65, 130):
        expected = summed_in_order(x[:rows], weight, choose_tile(rows, 40, False, DEVICE).k)
        assert products.product(place(x)[:rows], place(weight), None, None).equal(expected)


@pytest.mark.parametrize("kb", [99, 163, 227])
def test_tiles_fit_the_shared_memory_of_every_gpu(kb, monkeypatch):
    monkeypatch.setattr(tiles, "shared_memory", lambda device: kb << 10)
    for rows, N, is_gated in itertools.product((1, 32, 64, 128, 129, 9000), (576, 6144, 128256), (0, 1)):
        tile = choose_tile(rows, N, bool(is_gated), DEVICE)
        assert (tile.n * (1 + is_gated) + tile.m) * tile.k * 2 * tile.num_stages <= kb << 10
        assert tile.num_stages >= 3 and tile.k >= 32
        is_one_program_each = cdiv(rows, tile.m) * cdiv(N, tile.n) <= tiles.NUM_MULTIPROCESSORS
        assert tile.m >= min(rows, 64) or is_one_program_each, "else weights are read more often than they need be"


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_gate_after_a_product_has_the_bits_of_one_within(activation):
    x, weight = random(5, 32, dtype=torch.float16), random(2 * 24, 32, dtype=torch.float16, seed=1)
    joined = products.product(x, weight, None, None)
    assert gates.gate(joined, activation).equal(products.product(x, weight, None, activation))


@pytest.mark.parametrize("activation", [*ACTIVATIONS, "sigmoid"])
def test_gates_of_strided_rows_equal_their_twin(activation):
    joined = random(6, 3 * 32 + 5, dtype=torch.float16)
    gate, up = joined[:, :32], joined[:, 32:64]
    heads = random(6, 4, 16, dtype=torch.float16)[..., :8]
    for given in ((gate, up), (gate.contiguous(), up), (heads, up), (joined[:, 1:25:3], up[:, :8])):
        ours = gates.apply_gate(*given, activation)
        assert ours.is_contiguous() and ours.shape == given[1].shape
        assert_close(ours, apply_gate_twin(*given, activation), steps=2)


@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize(("offset", "is_late"), [(0.0, False), (1.0, True)])
def test_norms_equal_their_twins_and_rows_alone_equal_rows_together(offset, is_late, dtype):
    for H in (35, 64, 1100):
        x, y, weight = random(9, H, dtype=dtype), random(9, H, dtype=dtype, seed=1), random(H, dtype=dtype, seed=2)
        settings = weight, 1e-3, offset, is_late
        normed, total = norms.add_rms_norm(x, y, *settings)
        twin, twin_total = ops.add_rms_norm.twin(x, y, *settings)
        assert_close(total, twin_total)
        assert_close(normed, ops.rms_norm.twin(total, *settings), steps=2)
        assert_close(normed, twin, steps=8)
        assert norms.rms_norm(total, *settings).equal(normed)
        for rows in (1, 2, 5):
            assert norms.rms_norm(total[:rows], *settings).equal(normed[:rows])


@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize(("offset", "is_late"), [(0.0, False), (1.0, True)])
@pytest.mark.parametrize("H", [24, 1100])
def test_joined_inputs_equal_their_twin_and_have_the_bits_of_norms(H, offset, is_late, dtype):
    random = torch.Generator().manual_seed(H)
    shapes = (50, H), (7, H), (20, 2, 16), (H,), (H,)
    table, states, tables, *weights = (torch.randn(s, generator=random).to(DEVICE, dtype) for s in shapes)
    ids, positions = torch.tensor([[3, -1, 49, 0, -2, 3, 8], [19, 0, 1, 2, 2, 7, 18]], device=DEVICE)
    settings = (states, positions, tables, *weights, 1e-3, offset, is_late)
    ours, rope = inputs.joined_inputs(ids, table, *settings)
    twin, rows = joined_inputs.twin(ids, table, *settings)
    assert_close(ours, twin, steps=2)
    assert rope.equal(rows) and rope.equal(tables[positions])
    pairs = (table[ids.clamp(min=0)], weights[1]), (states, weights[0])
    assert ours.equal(torch.cat([norms.rms_norm(x, w, 1e-3, offset, is_late) for x, w in pairs], -1))


@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_gated_norms_equal_their_twin_whatever_the_strides_of_the_gate(dtype):
    joined = random(2, 3, 7 * 16, dtype=dtype)
    gate, x, weight = joined[..., 16:80].view(2, 3, 4, 16), random(24, 16, dtype=dtype), random(16, dtype=dtype)
    ours = norms.gated_rms_norm(x, gate, weight, 1e-3)
    assert_close(ours, ops.gated_rms_norm.twin(x, gate, weight, 1e-3), steps=3)
    assert norms.gated_rms_norm(x, gate.contiguous(), weight, 1e-3).equal(ours)
    assert norms.gated_rms_norm(x[:4].contiguous(), gate[:1, :1], weight, 1e-3).equal(ours[:4])
    assert norms.gated_rms_norm(x[:0], gate[:, :, :0], weight, 1e-3).shape == x[:0].shape
    flat = gate.transpose(1, 2)
    assert_close(norms.gated_rms_norm(x, flat, weight, 1e-3), ops.gated_rms_norm.twin(x, flat, weight, 1e-3), steps=3)


def test_norms_read_strided_heads_in_place():
    joined = random(2, 3, 7 * 16, dtype=torch.float16)
    heads = joined[..., 16:80].view(2, 3, 4, 16)
    settings = random(16, dtype=torch.float16), 1e-3, 0.0, False
    for x in (heads, heads[:, :1], heads[:1], heads[:1, :1], heads.transpose(1, 2), heads[..., :8].transpose(2, 3)):
        scale = (settings[0][: x.shape[-1]], *settings[1:])
        ours = norms.rms_norm(x, *scale)
        assert ours.is_contiguous() and ours.equal(norms.rms_norm(x.contiguous(), *scale))
    assert strided_rows(heads) == (4, 7 * 16, 16) and strided_rows(heads.transpose(1, 2)) is None


def test_products_by_our_kernel_take_rows_of_any_shape(monkeypatch):
    monkeypatch.setattr(ops, "is_ours", lambda x, weight: True)
    x, weight = random(2, 3, 48, dtype=torch.float16)[..., 16:], random(24, 32, dtype=torch.float16, seed=1)
    for rows in (x, x[:, :1], x[0, 0], x[:0]):
        ours, twin = ops.linear(rows, weight), ops.product_twin(rows, weight, None, None)
        assert ours.shape == twin.shape
        assert_close(ours, twin)


@pytest.fixture
def counted(monkeypatch):
    """Set whether cuBLAS, and cuBLASLt, have our bits by `agrees`, and record the queries."""
    asked, agrees = [], [True, False]

    def answer(num_rows, weight, bias, linear):
        is_lt = linear is not cublas.by_cublas
        asked.append("lt" if is_lt else num_rows)
        return agrees[is_lt]

    monkeypatch.setattr(cublas, "ANSWERS", {})
    monkeypatch.setattr(cublas, "_agrees", answer)
    return asked, agrees


@pytest.mark.parametrize("activation", [None, "silu"])
def test_many_rows_go_to_cublas_where_it_has_our_bits(counted, activation, monkeypatch):
    asked, agrees = counted
    ours, weight, most = [], random(16, 8, dtype=torch.float16), cublas.OUR_ROWS
    run = products.product
    monkeypatch.setattr(products, "product", lambda x, *rest: ours.append(x.shape[0]) or run(x, *rest))
    for agrees[0], rows in ((True, most), (True, most + 1), (True, most + 1), (False, most + 2), (False, most + 2)):
        cublas.product(random(rows, 8, dtype=torch.float16), weight, None, activation)
    assert asked == [most + 1, "lt", most + 2, "lt"], "once for each number of rows"
    assert ours == [most, most + 2, most + 2]
    monkeypatch.setattr(cublas, "is_rehearsing", lambda: True)
    cublas.product(random(most + 3, 8, dtype=torch.float16), weight, None, activation)
    assert asked.count(most + 3) == 0, "a rehearsal asks nothing"
    assert ours[3:] == [16, most + 3], "and meets the kernels of both ways, and what compares them"


def test_where_cublas_splits_k_its_lt_may_not(counted, monkeypatch):
    asked, agrees = counted
    agrees[:] = False, True
    monkeypatch.setattr(products, "product", lambda *given: None)
    x, weight = random(cublas.OUR_ROWS + 1, 8, dtype=torch.float16), random(16, 8, dtype=torch.float16)
    for bias in (None, random(16, dtype=torch.float16)):
        expected = torch.nn.functional.linear(x, weight) if bias is None else None
        for _ in range(2):
            out = cublas.product(x, weight, bias, None)
            assert (out is None) == (expected is None) and (out is None or out.equal(expected))
    assert asked == [len(x), "lt", len(x)], "a product with a bias is cuBLASLt's in any case"


def test_the_fastest_way_with_our_bits_takes_products_of_graphs(counted, monkeypatch):
    asked, agrees = counted
    agrees[1], weight = True, random(16, 8, dtype=torch.float16)
    monkeypatch.setattr(cublas, "by_cublas_lt", lambda weight: "lt")
    monkeypatch.setattr(cublas, "_ms", lambda rows, weight, bias, activation, linear: times[linear])
    for fastest in (cublas.by_cublas, "lt", None):
        times = {cublas.by_cublas: 2.0, "lt": 2.0, None: 2.0} | {fastest: 1.0}
        cublas.ANSWERS.clear()
        assert {cublas.with_our_bits(448, weight, None, activation) for activation in (None, "silu")} == {fastest}
    times.clear()
    assert cublas.with_our_bits(cublas.TIMED_ROWS + 1, weight, None, None) is cublas.by_cublas
    assert asked == [448, "lt"] * 6 + [cublas.TIMED_ROWS + 1]


def test_bits_of_cublas_are_compared_on_rows_from_first_to_last(monkeypatch):
    weight = random(16, 8, dtype=torch.float16)
    monkeypatch.setattr(cublas.F, "linear", lambda x, weight, bias: products.product(x, weight, bias, None))
    bias = weight[:, 0].contiguous()
    agrees = partial(cublas._agrees, linear=cublas.by_cublas)
    assert agrees(150, weight, None) and agrees(150, weight, bias)
    assert not agrees(150, torch.zeros_like(weight), None), "zeros are the same in any order"

    def off_in_the_last(x, weight, bias):
        out = products.product(x, weight, bias, None)
        out[-1] += 1
        return out

    monkeypatch.setattr(cublas.F, "linear", off_in_the_last)
    assert not agrees(150, weight, None)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_the_last_tile_of_rows_overlaps_the_one_before(activation, monkeypatch):
    x, weight = random(40, 64, dtype=torch.float16), random(48, 64, dtype=torch.float16, seed=1)
    monkeypatch.setattr(products, "choose_tile", lambda *given: Tile(16, 16, 32, 4, 2))
    expected = torch.cat([products.product(row, weight, None, activation) for row in x.split(1)])
    for rows in (3, 16, 17, 31, 40):
        assert products.product(x[:rows], weight, None, activation).equal(expected[:rows])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize(("N", "K"), [(6144, 4096), (960, 576), (1000, 1001), (4096, 14336)])
def test_bits_depend_on_neither_rows_nor_tiles_and_are_those_of_cublas(N, K, dtype, monkeypatch):
    x, bias = random(512, K, dtype=dtype), random(N, dtype=dtype, seed=2)
    weight = random(N, K, dtype=dtype, seed=1) * K**-0.5
    for added in (None, bias):
        full = products.product(x, weight, added, None)
        assert K % 8 or torch.nn.functional.linear(x, weight, added).equal(full)
        for rows in (1, 2, 5, 16, 33, 64, 100, 128, 136, 264, 300, 512):
            assert products.product(x[:rows], weight, added, None).equal(full[:rows])
            assert ops.linear(x[:rows], weight, added).equal(full[:rows])
    for tile in (Tile(16, 64, 64, 4, 3), Tile(32, 32, 128, 4, 3), Tile(64, 128, 64, 8, 3), Tile(16, 16, 256, 2, 2)):
        monkeypatch.setattr(products, "choose_tile", lambda *given, tile=tile: tile)
        assert products.product(x[:40], weight, bias, None).equal(full[:40])


@pytest.mark.gpu
def test_ops_are_captured_with_the_bits_they_have_outside():
    x, weight, scale = random(100, 2048), random(2 * 8192, 2048, seed=1) * 0.02, random(2048, seed=3)
    down = random(2048, 8192, seed=2) * 0.02  # cuBLAS splits its K

    def layer(x):
        normed, total = ops.add_rms_norm(x, x, scale, 1e-5, 0.0, False)
        return ops.linear(ops.gated_linear(normed, weight, None, "silu"), down) + total

    expected = layer(x)
    graph, static = torch.cuda.CUDAGraph(), x.clone()
    with torch.cuda.graph(graph):
        out = layer(static)
    graph.replay()
    assert out.equal(expected)
    for rows in (1, 20, 70):
        assert layer(x[:rows]).equal(expected[:rows])


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [576, 4096])
def test_kernels_that_start_early_read_nothing_before_its_time(hidden, monkeypatch):
    layers = [
        [random(*shape, seed=i) * hidden**-0.5 for shape in ((2 * 4 * hidden, hidden), (hidden, 4 * hidden))]
        for i in range(8)
    ]
    scale = random(hidden, seed=3)

    def forward(x):
        for gate_up, down in layers:
            normed, total = ops.add_rms_norm(x, x, scale, 1e-5, 0.0, False)
            x = ops.linear(ops.gated_linear(normed, gate_up, None, "silu"), down) + total
        return ops.linear(ops.rms_norm(x, scale, 1e-5, 0.0, False), layers[0][0])

    for rows in (1, 20):
        check_early_starts(forward, [random(rows, hidden, seed=10 + i) for i in range(20)], monkeypatch)
