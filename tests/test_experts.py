"""Products with experts: kernels against their twin, the twin against a loop, experts of transformers against their own
implementations, and engines whose prefills and rounds all replay, in fp32 and bf16."""

from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from torch import nn
from transformers.integrations.moe import batched_mm_experts_forward
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import specdec
from specdec.backends import grouped_linear
from specdec.backends.experts.choices import experts_rms_norm, top_scores, weighted_sum
from specdec.backends.experts.quantised import grouped_mxfp4, pack_mxfp4
from specdec.backends.gates import ACTIVATIONS
from specdec.backends.library import RUN
from specdec.backends.linear import wide_linear
from specdec.backends.triton.experts import choices
from specdec.backends.triton.experts import products as kernels
from specdec.backends.triton.linear import norms
from specdec.reach.targets.adapters.experts import Experts, experts_forward
from specdec.reach.targets.compiling.routers import take_over_choices
from tests.early_starts import check_early_starts
from tests.heads import random_head
from tests.tiny_models import DEVICE, tiny_model

E = 5  # experts; id E stands for experts of other ranks
ONE_BIT = {torch.float32: 1e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}
# tokens, experts per token, columns, features: one row per expert, some, all rows by id, several blocks
SHAPES = ((1, 2, 40, 24), (3, 3, 33, 140), (17, 2, 70, 33), (30, 3, 40, 50))


def case(shape, dtype, is_transposed, has_bias, num_experts=E, seed=0):
    """Return x, ids with some of other ranks, weight, bias or None, is_transposed."""
    (tokens, k, n, features), random = shape, torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, features, generator=random)
    ids = torch.rand(tokens, num_experts + 1, generator=random).topk(k).indices
    weight = torch.randn(num_experts, n, features, generator=random) * features**-0.5
    bias = torch.randn(num_experts, n, generator=random).to(DEVICE, dtype) if has_bias else None
    weight = (weight.transpose(1, 2).contiguous() if is_transposed else weight).to(DEVICE, dtype)
    return x.to(DEVICE, dtype), ids.to(DEVICE), weight, bias, is_transposed


def looped(x, ids, weight, bias, is_transposed):
    """Compute one row at a time, in fp64."""
    rows = []
    for t, chosen in enumerate(ids.tolist()):
        for j, e in enumerate(chosen):
            source = x[t if x.shape[0] == ids.shape[0] else t * ids.shape[1] + j].double()
            if e >= weight.shape[0]:
                rows.append(source.new_zeros(weight.shape[2 if is_transposed else 1]))
                continue
            matrix = weight[e].double() if is_transposed else weight[e].double().T
            rows.append(source @ matrix + (0 if bias is None else bias[e].double()))
    return torch.stack(rows).to(x.dtype)


def assert_close(ours, theirs):
    tolerance = ONE_BIT[ours.dtype]
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=2 * tolerance, atol=2 * tolerance)


def assert_same(ours, theirs):
    """Compare bit for bit on a GPU; in the interpreter products are numpy's, whose bits may depend on a row's place."""
    assert_close(ours, theirs) if DEVICE.type == "cpu" else torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_the_op_multiplies_each_row_with_its_expert(is_transposed, has_bias):
    for shape in SHAPES:
        x, *given = case(shape, torch.float32, is_transposed, has_bias)
        assert_close(grouped_linear(x, *given), looped(x, *given))
        repeated = x.repeat_interleave(shape[1], 0) * 2
        assert_close(grouped_linear(repeated, *given), looped(repeated, *given))
    empty = grouped_linear(x[:0], given[0][:0], *given[1:])
    assert empty.shape == (0, SHAPES[-1][2])


@pytest.mark.parametrize(
    ("dtype", "scanned"),
    [(torch.float32, kernels.SCANNED), (torch.float32, 0), (torch.bfloat16, kernels.SCANNED)],
    ids=["fp32 scanned", "fp32 routed", "bf16 scanned"],
)
def test_kernels_equal_their_twin(dtype, scanned, monkeypatch):
    monkeypatch.setattr(kernels, "SCANNED", scanned)
    for number, shape in enumerate(SHAPES):
        num_experts = 12 if number == 3 else E  # so that 90 rows are few
        x, *given = case(shape, dtype, number % 2 == 1, number > 1, num_experts)
        found = kernels.grouped_linear(x, *given)
        assert_close(found, looped(x, *given))
        assert_close(found, grouped_linear.twin(x, *given))
        is_foreign = given[0].flatten() == num_experts
        assert not found[is_foreign].any()
        assert_same(kernels.grouped_linear(x.repeat_interleave(shape[1], 0), *given), found)
    ids, weight, bias, is_transposed = given
    view = weight.transpose(1, 2)
    assert_same(kernels.grouped_linear(x, ids, view, bias, not is_transposed), found)
    one = torch.full_like(ids, 2)  # one expert has more rows than a tile
    assert_close(kernels.grouped_linear(x, one, *given[1:]), grouped_linear.twin(x, one, *given[1:]))
    order = torch.randperm(x.shape[0], device=DEVICE)  # of the last shape: results move with their tokens
    moved = kernels.grouped_linear(x[order], given[0][order], *given[1:])
    assert_same(moved, found.view(*given[0].shape, -1)[order].flatten(0, 1))
    assert kernels.grouped_linear(x[:0], given[0][:0], *given[1:]).shape == (0, found.shape[1])


def test_the_dispatcher_may_leave_defaults_out():
    """As within a dispatch mode, such as a rehearsal."""
    x, ids = torch.randn(3, 16, device=DEVICE), torch.randint(0, E, (3, 2), device=DEVICE)
    weight = torch.randn(E, 8, 16, device=DEVICE)
    expected = grouped_linear.twin(x, ids, weight)
    for run in (RUN["grouped_linear"], kernels.grouped_linear):
        torch.testing.assert_close(run(x, ids, weight), expected, rtol=1e-5, atol=1e-5)


def test_every_tile_equals_the_twin(monkeypatch):
    """With few rows, which every tile takes; in use the number of experts decides."""
    monkeypatch.setattr(kernels, "SCANNED", 0)
    sizes = [(2, 227 << 10), (2, 99 << 10), (4, 99 << 10)]  # element size, shared memory
    tiles = {kernels.tiling(average * 8, 8, 70, *size) for average in (1, 50) for size in sizes}
    x, *given = case((21, 2, 150, 70), torch.float16, False, False, num_experts=2)
    for tile in tiles:
        monkeypatch.setattr(kernels, "tiling", lambda *_, tile=tile: tile)
        assert_close(kernels.grouped_linear(x, *given), grouped_linear.twin(x, *given))
    assert len(tiles) == 4


@pytest.mark.parametrize("activation", [*ACTIVATIONS, "swigluoai"])
def test_gates_within_products_equal_their_twin(activation, monkeypatch):
    for number, shape in enumerate(SHAPES):
        monkeypatch.setattr(kernels, "SCANNED", 0 if number == 1 else 512)
        x, *given = case((*shape[:2], shape[2] // 2 * 2, shape[3]), torch.float16, number % 2 == 1, number > 1)
        x *= 5 if activation == "swigluoai" else 1  # beyond its clamping limits
        found, twin = (f(x, *given, activation) for f in (kernels.grouped_linear, grouped_linear.twin))
        assert found.shape == twin.shape == (shape[0] * shape[1], shape[2] // 2)
        assert grouped_linear(x, *given, activation).shape == found.shape
        torch.testing.assert_close(found, twin, rtol=6 * ONE_BIT[torch.float16], atol=0.02)


def summed_in_order(x, ids, weight, block):
    """Expert product with K summed block by block; products of whole numbers are exact in fp32."""
    total = torch.zeros(ids.numel(), weight.shape[1])
    for a, b in zip(x.split(block, 1), weight.split(block, 2), strict=True):
        total += (a[:, None].float().repeat_interleave(ids.shape[1], 0) @ b[ids.flatten()].float().mT).squeeze(1)
    return total.half()


@pytest.mark.skipif(DEVICE.type == "cuda", reason="tensor cores sum K in steps of 16")
def test_k_is_summed_in_order_and_never_split_for_any_number_of_rows():
    """Parts a, b, c, -a of whole numbers, each exact in fp32; a is so large that their sum depends on the order."""
    part, random = 128, torch.Generator().manual_seed(0)
    x, weight = (torch.randint(-8, 9, (*rows, 4, part), generator=random) for rows in ((600,), (2, 10)))
    x[:, 0], weight[:, :, 0] = x[:, 0] * 4096, weight[:, :, 0] * 64
    x[:, 3], weight[:, :, 3] = -x[:, 0], weight[:, :, 0]
    x, weight = x.flatten(1).half(), weight.flatten(2).half()
    ids = torch.randint(2, (600, 1), generator=random)
    assert not summed_in_order(x, ids, weight, 2 * part).equal(summed_in_order(x, ids, weight, part)), "splits differ"
    for rows in (1, 2, 16, 17, 60, 600):
        tile = kernels.tiling(rows, 2, x.shape[1], 2, 227 << 10)
        expected = summed_in_order(x[:rows], ids[:rows], weight, tile.k)
        assert kernels.grouped_linear(x[:rows], ids[:rows], weight, None, False).equal(expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ONE_BIT, ids=str)
def test_bits_of_a_row_depend_on_no_other_row(dtype):
    """Nor on their number, and so on the tile: an MLP of 32 experts, with its router."""
    x, ids, *first = case((3000, 4, 768, 512), dtype, False, False, num_experts=32)
    second = case((1, 1, 512, 384), dtype, False, True, num_experts=32, seed=1)[2:]
    router = case((1, 1, 32, 512), dtype, False, False, num_experts=1, seed=2)[2][0].to(torch.bfloat16)

    def mlp(x, ids):
        scores = torch.ops.specdec.wide_linear(x.to(torch.bfloat16), router, None)
        weights, chosen = top_scores(scores, 4, "chosen", dtype)
        assert chosen.shape == ids.shape
        inner = grouped_linear(x, ids, *first, "silu")
        return torch.cat([weighted_sum(grouped_linear(inner, ids, *second), weights, dtype), scores.to(dtype)], 1)

    full = mlp(x, ids)
    for rows in (*range(1, 129, 9), 128, 129, 500, 1000):
        assert mlp(x[:rows], ids[:rows]).equal(full[:rows]), rows


@pytest.mark.parametrize("num_rows", [1, 700, 3000])
def test_rows_are_put_in_the_order_of_experts(num_rows):
    ids = torch.randint(0, E + 3, (num_rows,), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(num_rows))
    order, starts = kernels.route(ids, E)
    ours = ids.clamp(max=E)
    assert torch.equal(order.long(), ours.argsort(stable=True))
    assert torch.equal(starts.long(), torch.searchsorted(ours.sort().values, torch.arange(E + 1, device=DEVICE)))


@triton.jit
def _blocks_kernel(starts, out, num_rows, E: tl.constexpr, BLOCK_E: tl.constexpr):
    block = tl.program_id(0)
    expert, begin, end = kernels.routed_block(starts, block, num_rows, E, BLOCK_E, 16)
    tl.store(out + block * 3, expert)
    tl.store(out + block * 3 + 1, begin)
    tl.store(out + block * 3 + 2, end)


def test_blocks_hold_rows_of_one_expert():
    """A row in two blocks would be written by both, in any order."""
    ids = torch.tensor([0] * 5 + [2] * 40 + [3] * 16 + [E] * 3, device=DEVICE)
    _, starts = kernels.route(ids, E)
    blocks = torch.empty(10, 3, dtype=torch.int32, device=DEVICE)
    _blocks_kernel[(10,)](starts, blocks, ids.numel(), E=E, BLOCK_E=8)
    held = [(0, 0, 5), (2, 5, 21), (2, 21, 37), (2, 37, 45), (3, 45, 61), (E, 61, 64)]
    assert [tuple(block) for block in blocks.tolist()][:6] == held
    assert (blocks[6:, 2] <= blocks[6:, 1]).all(), "programs past the last block have no rows"


class NoLaunch:
    def __getitem__(self, grid):
        return lambda *args, **options: None


@pytest.mark.parametrize("num_tokens", [4, 1000])
def test_nothing_waits_for_the_host(num_tokens, monkeypatch):
    """Meta tensors have no values: reading one would fail."""
    monkeypatch.setattr(kernels, "_grouped_linear_kernel", NoLaunch())
    monkeypatch.setattr(kernels, "_route_kernel", NoLaunch())
    x, ids = torch.empty(num_tokens, 24, device="meta"), torch.empty(num_tokens, 2, dtype=torch.int64, device="meta")
    weight = torch.empty(E, 40, 24, device="meta")
    assert kernels.grouped_linear(x, ids, weight, None, False).shape == (2 * num_tokens, 40)
    module = experts_module("qwen3_moe", torch.float32).to("meta")
    x = torch.empty(num_tokens, 64, device="meta")
    assert experts_forward(module, x, ids, torch.empty(num_tokens, 2, device="meta")).shape == x.shape


def experts_module(name, dtype):
    """Random experts of transformers: plain; transposed with biases and their own gate; without a gate."""
    config = tiny_model("qwen3_moe" if name == "nemotron_h" else name).config
    if name == "nemotron_h":
        values = dict(n_routed_experts=4, moe_intermediate_size=48, moe_latent_size=None, mlp_hidden_act="relu2")
        for key, value in values.items():
            setattr(config, key, value)
    made = {"qwen3_moe": Qwen3MoeExperts, "gpt_oss": GptOssExperts, "nemotron_h": NemotronHExperts}[name](config)
    for number, parameter in enumerate(made.parameters()):
        random = torch.Generator().manual_seed(number)
        parameter.data = torch.randn(parameter.shape, generator=random) * 0.1
    return made.to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "nemotron_h"])
@torch.inference_mode()
def test_experts_equal_those_of_transformers(name, dtype):
    """Also for chosen experts of other ranks, whose weight is 0."""
    module = experts_module(name, dtype)
    module._is_expert_parallel = True  # else transformers 5.23 expects no such choices
    random = torch.Generator().manual_seed(1)
    for num_tokens, first in ((1, 0), (19, 4)):
        x = torch.randn(num_tokens, 64, generator=random).to(DEVICE, dtype)
        ids = torch.rand(num_tokens, 4, generator=random).topk(2).indices.to(DEVICE)
        weights = torch.rand(num_tokens, 2, generator=random).to(DEVICE, dtype)
        ids[:first, 0], weights[:first, 0] = 4, 0
        ours, theirs = (f(module, x, ids, weights) for f in (experts_forward, batched_mm_experts_forward))
        assert ours.dtype == dtype
        tolerance = ONE_BIT[dtype] * float(theirs.abs().max())
        torch.testing.assert_close(ours, theirs, rtol=ONE_BIT[dtype], atol=tolerance)


def test_the_implementation_is_put_back():
    model = tiny_model("qwen3_moe")
    config = model.config
    before = config._experts_implementation
    with pytest.raises(KeyError), Experts(model).routed():
        assert config._experts_implementation == "specdec"
        raise KeyError
    assert config._experts_implementation == before != "specdec"
    for other in (tiny_model("llama"), nn.Linear(1, 1)):  # models without experts are unchanged
        state = [dict(vars(m)) for m in other.modules()]
        with Experts(other).routed():
            assert [dict(vars(m)) for m in other.modules()] == state


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("qwen3_moe", torch.float32), ("qwen3_moe", torch.bfloat16), ("gpt_oss", torch.bfloat16)][
        : 3 if DEVICE.type == "cuda" else 1
    ],
)
@pytest.mark.filterwarnings("ignore:.*inv_freq is in low precision")
def test_prefills_and_rounds_replay(name, dtype):
    """With strict=True: nothing runs eagerly, and nothing prevents a replay. test_attach.py compares the texts."""
    model = tiny_model(name, dtype=dtype).to(DEVICE)
    prompts = [list(range(3, 3 + n)) for n in (3, 9, 20)]
    settings = {"num_steps": 2, "max_batch": 4, "max_seq_len": 64, "compile": False}
    graphs = {"prefill_graph": "whole", "prefill_buckets": (32,), "cuda_graph": True, "strict": True}
    head = random_head(model).to(DEVICE, dtype)
    engine = specdec.attach(model, head, **graphs, **settings)
    tokens = engine.generate(prompts, max_new_tokens=8).tokens
    runners = engine.report().runners
    assert runners["whole_prefill"]["replays"] and runners["round"]["replays"]
    assert not any(runner["eager"] or runner["rejects"] for runner in runners.values())
    engine.detach()
    if DEVICE.type == "cpu":  # where graphs run the same arithmetic
        eager = specdec.attach(model, head, prefill_graph="off", cuda_graph=False, **settings)
        assert eager.generate(prompts, max_new_tokens=8).tokens == tokens


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ONE_BIT, ids=str)
@pytest.mark.parametrize("num_tokens", [1, 4, 32, 200, 1024, 2048])
def test_a_captured_product_follows_other_choices(num_tokens, dtype):
    x, ids, *given = case((num_tokens, 4, 200, 256), dtype, False, True, num_experts=32)
    kernels.grouped_linear(x, ids, *given)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = grouped_linear(x, ids, *given)
    for seed in (1, 2):
        ids.copy_(case((num_tokens, 4, 200, 256), dtype, False, True, num_experts=32, seed=seed)[1])
        graph.replay()
        assert_close(found, grouped_linear.twin(x, ids, *given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num", "k"), [(256, 8), (60, 4), (5, 5), (1000, 10)])
def test_choices_are_those_of_a_stable_sort(num, k, dtype):
    """Also for equal scores, for -inf, and for both zeros."""
    random = torch.Generator().manual_seed(num)
    scores = torch.randn(2 * 3, num, generator=random).mul(2).round(decimals=1).to(dtype)
    scores[0, ::2], scores[1, 1:], scores[2, :3] = float("-inf"), 0.0, -0.0
    scores = scores.to(DEVICE).view(2, 3, num)
    values, indices = choices.top_scores(scores.view(6, num), k)
    expected = top_scores.twin(scores.view(6, num), k)
    assert torch.equal(indices, expected[1]) and torch.equal(values, expected[0])
    assert torch.equal(torch.ops.specdec.top_scores(scores, k)[1].view(6, k), indices)
    assert torch.equal(values, scores.view(6, num).topk(k).values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softmax", ["all", "chosen"])
def test_a_softmax_within_choices_is_that_of_torch(softmax, dtype):
    scores = torch.randn(7, 60, generator=torch.Generator().manual_seed(0)).mul(4).to(DEVICE, dtype)
    ours, twin = choices.top_scores(scores, 5, softmax, dtype), top_scores.twin(scores, 5, softmax, dtype)
    assert torch.equal(ours[1], twin[1]) and ours[0].dtype == dtype
    assert_close(ours[0], twin[0])
    for rows in (1, 3):
        assert choices.top_scores(scores[:rows], 5, softmax, dtype)[0].equal(ours[0][:rows])


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 3, (torch.float16,) * 3, (torch.bfloat16, torch.float32, None)])
def test_weighted_sums_equal_their_twin_and_are_in_the_order_of_choices(dtypes):
    rows_dtype, weights_dtype, dtype = dtypes
    random = torch.Generator().manual_seed(0)
    rows, weights = (torch.randn(*shape, generator=random) for shape in ((5 * 3, 1100), (5, 3)))
    given = rows.to(DEVICE, rows_dtype), weights.to(DEVICE, weights_dtype), dtype or rows_dtype
    assert_close(choices.weighted_sum(*given), weighted_sum.twin(*given))
    terms = torch.tensor([2.0**14, 2.0**-12, -(2.0**14)], device=DEVICE).to(rows_dtype).view(3, 1)
    ones = torch.ones(1, 3, dtype=weights_dtype, device=DEVICE)
    for sums in (choices.weighted_sum, weighted_sum.twin):  # the first term absorbs the second
        assert [float(sums(terms[order], ones, torch.float32)) for order in ([0, 1, 2], [0, 2, 1])] == [0.0, 2.0**-12]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("is_shared", "is_gated"), [(False, False), (True, False), (True, True)])
def test_norms_of_what_experts_give_equal_their_twin_and_the_ops_they_replace(is_shared, is_gated, dtype):
    random = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=random).to(DEVICE, dtype)

    rows, weights, residual, scale = normal(5 * 3, 300), normal(5, 3), normal(1, 5, 300), normal(300)
    shared, gate = normal(5, 300), normal(5, 9)[:, 4:5]
    given = rows, weights, shared if is_shared else None, gate if is_gated else None, residual
    given = *given, scale, 1e-3, 1.0, True
    ours, twin = choices.experts_rms_norm(*given), experts_rms_norm.twin(*given)
    for found, expected in zip(ours, twin, strict=True):
        assert found.shape == residual.shape and (found - expected).norm() <= 0.01 * expected.norm()
    total = choices.weighted_sum(rows, weights, dtype)
    if is_shared:
        total = total + (gate.sigmoid() * shared if is_gated else shared)
    apart = norms.add_rms_norm(total.view_as(residual), residual, scale, 1e-3, 1.0, True)
    if dtype != torch.bfloat16 or DEVICE.type == "cuda":  # the interpreter truncates where torch rounds
        assert all(torch.equal(a, b) for a, b in zip(ours, apart, strict=True))


def make_graph(fn, x):
    """Return the graph that Dynamo traces for fn(x)."""
    graphs = []
    torch.compile(fn, backend=lambda graph, _: graphs.append(graph) or graph.forward, fullgraph=True)(x)
    return graphs[0]


def test_traces_choose_by_our_op():
    def chooses(x):
        values, _ = torch.topk(x.softmax(-1), 2, dim=-1)
        return values, x.topk(2)[1], x.topk(3, 0)[0].sum() + values, torch.topk(x, k=2, largest=False)[0]

    x = torch.randn(5, 6)
    graph = make_graph(chooses, x)
    assert take_over_choices(graph) == 2
    graph.recompile()
    for ours, theirs in zip(graph(x), chooses(x), strict=True):
        assert torch.equal(ours, theirs)


def test_traces_take_the_softmax_of_a_router_into_our_op():
    def routes(x):
        law = x.bfloat16().softmax(-1, dtype=torch.float)
        values, ids = law.topk(2, dim=-1)
        values /= values.sum(dim=-1, keepdim=True)
        few, _ = torch.topk(x, 3, dim=-1)
        kept, _ = (x * 2).softmax(-1).topk(2)
        last, _ = (x * 3).softmax(0).topk(2)
        return values.to(torch.bfloat16), ids, torch.nn.functional.softmax(few, dim=1), kept, kept + 1, last

    x = torch.randperm(30).view(5, 6) / 8  # no two are equal in bf16: topk does not say which of equal values it takes
    graph = make_graph(routes, x)
    assert take_over_choices(graph) == 4
    graph.recompile()
    ops = [node.args[1:] for node in graph.graph.nodes if "top_scores" in str(node.target)]
    assert ops == [
        (2, "chosen", torch.bfloat16),
        (3, "chosen", torch.float32),
        (2, "all", torch.float32),
        (2, "", torch.float32),
    ]
    for ours, theirs in zip(graph(x), routes(x), strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["bf16", "mxfp4"])
def test_kernels_that_start_early_read_nothing_before_its_time(form, monkeypatch):
    """Layers of a router, its choices, two products with experts and their sum, 8 in a row."""
    random, hidden, num = torch.Generator(DEVICE).manual_seed(0), 256, 16
    layers = []
    for _ in range(8):
        router = torch.randn(num, hidden, generator=random, device=DEVICE).bfloat16()
        sizes = (num, 512, hidden), (num, hidden, 256)
        if form == "bf16":
            up, down = (torch.randn(s, generator=random, device=DEVICE).bfloat16() * 0.5 * s[2] ** -0.5 for s in sizes)
            products = partial(grouped_linear, weight=up, activation="silu"), partial(grouped_linear, weight=down)
        else:
            packs = [random_mxfp4(num, *s[1:], random) for s in sizes]
            products = tuple(
                partial(grouped_mxfp4, words=words, exponents=exponents, activation=activation)
                for (words, exponents), activation in zip(packs, ("swigluoai", ""), strict=True)
            )
        layers.append((router, products))

    def forward(x):
        for router, (up, down) in layers:
            weights, ids = top_scores(wide_linear(x, router), 4, "chosen", x.dtype)
            x = x + weighted_sum(down(up(x, ids), ids), weights, x.dtype)
        return x

    for rows in (1, 8):
        inputs = [torch.randn(rows, hidden, generator=random, device=DEVICE).bfloat16() for _ in range(20)]
        check_early_starts(forward, inputs, monkeypatch)


def random_mxfp4(num_experts, num_columns, num_features, random):
    """Return the words and exponents of random experts."""
    size = num_experts, num_columns, num_features // 32
    blocks = torch.randint(0, 256, (*size, 16), generator=random, device=DEVICE, dtype=torch.uint8)
    scales = torch.randint(118, 122, size, generator=random, device=DEVICE, dtype=torch.uint8)
    packs = [pack_mxfp4(b.flatten(1), s) for b, s in zip(blocks, scales, strict=True)]
    return tuple(torch.stack(parts) for parts in zip(*packs, strict=True))
