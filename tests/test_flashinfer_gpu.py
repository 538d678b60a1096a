"""FlashInfer's kernels on a GPU: every path against the float64 reference, graphs at other lengths, no synchronisation.

Kernels that are not compiled yet are compiled here, a minute or two each.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import specdec
from specdec.backends import BACKENDS, LayerSpec, TorchBackend, forward_context
from specdec.backends.flashinfer import backend, kernels, tables
from specdec.backends.flashinfer.kernels import kernel_for
from specdec.backends.flashinfer.tables import NO_WINDOW, Shapes
from specdec.backends.op import ForwardContext
from specdec.core.batch import ForwardMode
from specdec.core.cache.pool import KVPool
from tests import test_backends
from tests.ancestors import words_of
from tests.compiles import counted_compiles
from tests.flashinfer_tables import table_problems
from tests.heads import random_draft
from tests.test_attach import ragged_prompts
from tests.test_backends import Setup
from tests.tiny_models import tiny_model
from tests.waits import forbid_waits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(kernels.version_problem() is not None, reason=str(kernels.version_problem())),
]
BF16, FP16 = torch.bfloat16, torch.float16
D64 = LayerSpec(9, 3, 64, 64, 0.125)
CASES = {
    "d64": (D64, BF16),
    "d128": (LayerSpec(32, 8, 128, 128, 0.09), BF16),
    "d256 window": (LayerSpec(8, 2, 256, 256, 0.0625, window=40), BF16),
    "window": (replace(D64, window=5), BF16),
    "softcap": (replace(D64, softcap=2.0), BF16),
    "sinks": (replace(D64, window=6, has_sinks=True), BF16),
    "fp16": (D64, FP16),
    "mha": (LayerSpec(4, 4, 64, 64, 0.125), BF16),
    "mqa": (LayerSpec(8, 1, 64, 64, 0.125), BF16),
}
BINARY = [max(i - 1, 0) // 2 for i in range(64)]
MIXED = "flashinfer prefills"


@pytest.fixture(autouse=True)
def kinds(monkeypatch):
    """Register the backends for Setup; the mixed one takes prefills of any size here."""
    mixed = type("Any", (BACKENDS["triton+flashinfer"](),), {"min_prefill_flops": 0.0})
    monkeypatch.setattr(backend, "FA3_GAINS", kernels.HEAD_DIMS)
    own = {"flashinfer": BACKENDS["flashinfer"](), MIXED: mixed}
    monkeypatch.setattr(test_backends, "KINDS", {**test_backends.KINDS, **own})


def setup_of(name, kind="flashinfer", **options):
    layer, dtype = CASES[name] if isinstance(name, str) else name
    return Setup(layer, kind, dtype, **options)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("prefixes", [(11, 3, 150), (3000, 1, 700), (0, 63, 128, 65)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_chains_and_prefills(name, prefixes, page_size):
    options = {"prefixes": prefixes, "page_size": page_size, "width": 4096}
    for q_len in (1, 4, 17):
        case = setup_of(name, **options)
        metadata = case.uniform(q_len)
        case.check_causal(metadata, *case.run(metadata))
    case = setup_of(name, **options)
    for node in range(3):  # draft steps
        metadata = case.uniform(1, first_node=node)
        q, out = case.run(metadata)
    case.check_causal(metadata, q, out, 2)
    for kind in ("flashinfer", MIXED):
        case = setup_of(name, kind, **options)
        metadata = case.backend.metadata.prefill(
            case.slot_table, case.rows, prefixes, (40, 150, 3, 270)[: len(prefixes)]
        )
        case.check_causal(metadata, *case.run(metadata))


@pytest.mark.parametrize("prefixes", [(11, 3, 150), (3000, 1, 700), (0, 63, 128, 65)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_trees(name, prefixes):
    """Sizes that just fill and just exceed every tile of queries, and the largest; binary trees, a line, a star."""
    layer, _dtype = CASES[name]
    group = layer.num_heads // layer.num_kv_heads
    edges = {min(64, rows // group + more) for rows in (16, 64, 128) for more in (0, 1)} | {64}
    for nodes in sorted(edges):
        setup_of(name, prefixes=prefixes, width=4096).check_tree(BINARY[:nodes])
    for parents in ([0] * 40, [max(i - 1, 0) for i in range(64)]):
        setup_of(name, prefixes=prefixes, width=4096).check_tree(parents)


@pytest.mark.parametrize("nodes", [65, 128, 200, 256])
@pytest.mark.parametrize("name", ["d64", "sinks"])
def test_trees_of_several_words(name, nodes):
    parents = [max(i - 1, 0) // 2 for i in range(nodes - 1)] + [nodes - 2]
    setup_of(name, prefixes=(11, 3, 150), width=512, mask_words=4).check_tree(parents)


@pytest.mark.parametrize("name", CASES)
def test_draft_steps_of_a_tree(name):
    """Step 2 of topk 4: nodes 4..7, each a child of one of the nodes 0..3, and 8..11 of one of those."""
    case, topk = setup_of(name, prefixes=(11, 3, 150, 700), width=1024), 4
    lines, parents = [[i] for i in range(topk)], [None] * topk
    for step, chosen in ((0, None), (1, [2, 0, 0, 3]), (2, [7, 4, 5, 4])):
        if chosen is not None:
            lines += [[*lines[p], topk * step + i] for i, p in enumerate(chosen)]
            parents += chosen
        first, mine = topk * step, lines[topk * step :]
        depths = torch.tensor([[len(line) - 1 for line in lines]] * 4, device="cuda")
        bits = words_of(mine).repeat(4, 1, 1).cuda()
        metadata = case.uniform(
            topk, first_node=first, depths=depths[:, first:], tail_depths=depths, ancestor_bits=bits
        )
        q, out = case.run(metadata)
        wants = []
        for row, prefix in enumerate(case.prefixes):
            for i, line in enumerate(mine):
                seen = [(p, p) for p in range(prefix)] + [(prefix + j, prefix + k) for k, j in enumerate(line)]
                wants.append(case.expected(q[row * topk + i], row, prefix + len(line) - 1, seen))
        case.check(out, wants)


def test_tables_are_flashinfers_own():
    """Compare with 200 of its own plans, byte for byte."""
    device, generator = torch.device("cuda"), torch.Generator().manual_seed(0)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    loaded = kernels.load([kernel_for("fa2", CASES[name][0], BF16) for name in ("d64", "d128")])
    modules = {kernel.head_dim: module for kernel, module in loaded.items()}

    def draw(*choices):
        return choices[int(torch.randint(len(choices), (1,), generator=generator))]

    for _ in range(200):
        bs, (heads, kv_heads, dim) = draw(1, 2, 7, 33, 64), draw((9, 3, 64), (32, 8, 128), (32, 32, 128), (8, 1, 64))
        shapes = Shapes(bs, draw(1, 4, 8, 33, 64), heads, kv_heads, dim, tables.stock_budget(processors, kv_heads))
        shapes = shapes._replace(window_left=draw(NO_WINDOW, NO_WINDOW, 127, 4000))
        lens = torch.randint(0, draw(10, 1000, 30_000), (bs,), generator=generator).tolist()
        assert table_problems(modules[dim], shapes, lens, device) == [], shapes


GRAPHED = {
    "decode": (1, None),
    "chain": (4, None),
    "chain of tiles": (40, None),
    "tree": (16, BINARY),
    "tree of tiles": (64, BINARY),
}


@pytest.mark.parametrize("path", GRAPHED)
@pytest.mark.parametrize("name", ["d64", "d128", "d256 window", "sinks"])
def test_graphs_replay_at_any_lengths(name, path):
    """Captured at short lengths, replayed at long ones and back, with the graph's memory filled with NaN in between."""
    (layer, dtype), (q_len, parents), bs, width = CASES[name], GRAPHED[path], 5, 21_000
    generator = torch.Generator("cuda").manual_seed(0)
    pool = KVPool([layer.shape], bs * width + 1, dtype, torch.device("cuda"))
    for plane in pool.planes:
        plane.normal_(generator=generator)
    table = 1 + torch.randperm(bs * width, device="cuda", dtype=torch.int32).view(bs, width)
    table, rows = torch.cat([table, torch.zeros_like(table[:1])]), torch.tensor([3, 1, 0, 5, 5], device="cuda")
    lens = torch.zeros(bs, dtype=torch.int64, device="cuda")
    sinks = torch.randn(layer.num_heads, device="cuda", dtype=dtype) if layer.has_sinks else None
    options = {}
    if parents is not None:
        lines, depths = [[0]], [0]
        for node, parent in enumerate(parents[1:q_len], 1):
            lines.append([*lines[parent], node])
            depths.append(depths[parent] + 1)
        bits = words_of(lines).repeat(bs, 1, 1).cuda()
        deep = torch.tensor([depths] * bs, device="cuda")
        options = {"depths": deep, "tail_depths": deep, "ancestor_bits": bits}
    q = torch.randn(bs * q_len, layer.num_heads, layer.qk_dim, device="cuda", dtype=dtype, generator=generator)
    out = torch.empty(bs * q_len, layer.num_heads, layer.v_dim, device="cuda", dtype=dtype)

    def forward(on):
        metadata = on.metadata.uniform(
            ForwardMode.TARGET_VERIFY, table, rows, lens, q_len=q_len, max_prefix=20_500, **options
        )
        context = ForwardContext(on, pool, [layer], [sinks], lambda mode: None)
        with forward_context(context, metadata):
            on.attend(test_backends.AttentionCall(q, None, None, out, pool, 0, layer, sinks))

    ours = BACKENDS["flashinfer"]()()
    ours.prepare_for([layer], dtype, torch.device("cuda"))
    lens.copy_(torch.tensor([9, 1, 4, 0, 0]))
    forward(ours)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward(ours)
    for own in (
        [9, 1, 4, 0, 0],
        [20_000, 3, 777, 0, 0],
        [1, 20_000, 20_000, 0, 0],
        [0, 128, 127, 0, 0],
        [1, 1, 1, 0, 0],
    ):
        lens.copy_(torch.tensor(own))
        out.fill_(float("nan"))
        graph.replay()
        got = out.clone().view(bs, q_len, -1)[:3]
        forward(TorchBackend())
        want = out.view(bs, q_len, -1)[:3]
        error = (got.double() - want.double()).norm() / want.double().norm()
        assert error < test_backends.TOLERANCE[dtype], f"{own}: {error:.1e}"


@pytest.mark.parametrize("kind", ["flashinfer", MIXED])
def test_prefills_back_to_back_behind_a_slow_kernel(kind):
    """The host plans 50 prefills before the device has copied the first plan, without synchronising."""
    cases = []
    for seed in range(50):
        case = setup_of("d64", kind, prefixes=(seed, 3 * seed, 7), width=512)
        metadata = case.backend.metadata.prefill(case.slot_table, case.rows, case.prefixes, (1 + seed, 40, 9 + seed))
        t, layer = metadata.positions.shape[0], case.layer
        q, k = case.random(t, layer.num_heads, 64), case.random(t, layer.num_kv_heads, 64)
        cases.append((case, metadata, q, k, torch.full_like(q, float("nan"))))
    ours = cases[0][0].backend
    for warm in (True, False):
        torch.cuda.synchronize()
        torch.cuda._sleep(0 if warm else 400_000_000)
        torch.cuda.set_sync_debug_mode("default" if warm else "error")
        try:
            for case, metadata, q, k, out in cases:
                ours.plan(metadata)
                ours.run(test_backends.AttentionCall(q, k, k, out, case.pool, 0, case.layer))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for case, metadata, q, _k, out in cases:
        case.check_causal(metadata, q, out)


def test_two_kinds_of_layers_have_a_plan_each():
    wide = LayerSpec(32, 8, 128, 128, 0.09)
    layers = [D64, replace(D64, window=5), wide, D64]
    pools = KVPool([s.shape for s in layers], 900, BF16, torch.device("cuda"))
    for plane in pools.planes:
        plane.normal_()
    table = torch.arange(1, 801, dtype=torch.int32, device="cuda").view(2, 400)
    rows, lens = torch.arange(2, device="cuda"), torch.tensor([300, 17], device="cuda")
    ours, other = BACKENDS["flashinfer"]()(), TorchBackend()
    ours.prepare_for(layers, BF16, torch.device("cuda"))
    q = {s: torch.randn(8, s.num_heads, s.qk_dim, device="cuda", dtype=BF16) for s in layers}
    answers = []
    for own in (ours, other):
        metadata = own.metadata.uniform(ForwardMode.TARGET_VERIFY, table, rows, lens, q_len=4, max_prefix=304)
        own.plan(metadata)
        outs = [torch.empty_like(q[s]) for s in layers]
        for i, (s, out) in enumerate(zip(layers, outs, strict=True)):
            own.attend(test_backends.AttentionCall(q[s], None, None, out, pools, i, s))
        answers.append(outs)
    for a, b in zip(*answers, strict=True):
        assert (a.float() - b.float()).norm() / b.float().norm() < 1e-2


# -- engines ----------------------------------------------------------------------------------------------------------

SHAPES = {"plain": {}, "chain": {"num_steps": 3}, "tree": {"num_steps": 3, "topk": 3, "num_draft_tokens": 10}}


def engine_of(shape, name="flashinfer", **settings):
    model = tiny_model("llama64", dtype=BF16).cuda()
    head = random_draft(model, "nextn").to(BF16).cuda() if shape != "plain" else None
    return specdec.attach(model, head, backend=name, max_batch=4, strict=True, **SHAPES[shape], **settings)


@pytest.mark.parametrize("prefill_graph", ["breakable", "piecewise"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["flashinfer", "triton+flashinfer"])
def test_engines_replay_everything_and_wait_for_nothing(name, shape, prefill_graph):
    engine = engine_of(shape, name, prefill_graph=prefill_graph, compiler="eager")
    engine.generate(ragged_prompts(), max_new_tokens=4)  # allocations of a first round may synchronise
    forbid_waits(engine._core.launcher, "round")
    with counted_compiles() as compiled:
        out = engine.generate(ragged_prompts(), max_new_tokens=24)
    assert compiled == []
    report = engine.report()
    assert report.backend == name
    for what, path in report.paths.items():
        assert not path["eager"], what
    mode = "DECODE" if shape == "plain" else "TARGET_VERIFY"
    assert report.paths[mode]["replays"] and report.paths["EXTEND"]["replays"]
    assert report.paths[mode]["attention"].startswith("flashinfer" if name == "flashinfer" else "triton")
    assert "flashinfer fa3" in report.paths["EXTEND"]["attention"]
    assert all(out.tokens)
    engine.check_integrity()


def test_a_round_is_one_graph_and_a_copy_of_its_results():
    engine = engine_of("tree")
    engine.generate(ragged_prompts(), max_new_tokens=4)
    core, play, counts = engine._core, engine._core.launcher.round, Counter()

    def counted(requests):
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            play(requests)
        names = [e.name for e in seen.events()]
        counts["graphs"] += sum("cudaGraphLaunch" in n for n in names)
        counts["kernels"] += sum("LaunchKernel" in n for n in names)
        counts["rounds"] += 1

    core.launcher.round = counted
    engine.generate(ragged_prompts(), max_new_tokens=24)
    assert counts["graphs"] == counts["kernels"] == counts["rounds"]


@pytest.mark.parametrize("shape", SHAPES)
def test_texts_differ_from_the_torch_backends_at_near_ties_only(shape):
    """In 16 bits: the first differing token must be one between which the model itself barely decides."""
    texts, prompts = {}, ragged_prompts()
    for name in ("flashinfer", "torch"):
        engine = engine_of(shape, name)
        texts[name] = engine.generate(prompts, max_new_tokens=24, ignore_eos=True).tokens
        engine.detach()
    model, differing = tiny_model("llama64", dtype=BF16).cuda(), 0
    for prompt, ours, theirs in zip(prompts, texts["flashinfer"], texts["torch"], strict=True):
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        if at is None:
            continue
        differing += 1
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + ours[:at]], device="cuda")).logits[0, -1].float()
        gap = (logits[ours[at]] - logits[theirs[at]]).abs() / logits.std()
        assert gap < 0.1, f"token {at}: {gap:.3f} standard deviations"
    assert differing <= len(prompts) // 2
