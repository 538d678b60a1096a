"""Breakable captures and traces on toy callables: real CUDA graphs where there is a GPU, re-runs elsewhere."""

import threading
import warnings
import weakref
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor

from specdec.backends import (
    AttentionBridge,
    ForwardContext,
    KVPool,
    LayerSpec,
    SlotTables,
    TorchBackend,
    attention,
)
from specdec.core.errors import GraphError
from specdec.graphs import (
    BreakableCapture,
    BufferSpec,
    Counters,
    GraphRunner,
    RecordedBreakable,
    Setup,
    pick_breakable,
)
from specdec.graphs.building import build
from specdec.graphs.compile.trace import trace

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Layers:
    """x -> x + 1, doubled outside the graph, + 1, doubled, + 1; the factor may change between replays."""

    def __init__(self, capture, size=8, num_breaks=2):
        self.capture, self.num_breaks = capture, num_breaks
        self.inside = torch.zeros(size, device=DEVICE)
        self.outside = torch.zeros(size, device=DEVICE)
        self.x = torch.zeros(size, device=DEVICE)
        self.factor, self.calls = 2.0, 0

    def double(self):
        self.calls += 1
        self.outside.copy_(self.inside * self.factor)

    def __call__(self):
        x = self.x + 1
        for _ in range(self.num_breaks):
            self.inside.copy_(x)
            self.capture.interrupt(self.double)
            x = self.outside + 1
        return x


def captured(layers):
    layers.capture.warm_up(layers)
    return layers.capture.capture(layers)


def test_segments_replay_with_what_is_live_between_them():
    layers = Layers(pick_breakable(DEVICE))
    graph = captured(layers)
    before = layers.calls
    for value, factor in ((1.0, 2.0), (5.0, 3.0), (-1.0, 0.0)):
        layers.x.fill_(value)
        layers.factor = factor
        graph.replay()
        assert torch.equal(graph.outputs, torch.full_like(layers.x, ((value + 1) * factor + 1) * factor + 1))
    assert layers.calls == before + 6


def test_breaks_are_not_called_during_a_capture():
    layers = Layers(pick_breakable(DEVICE))
    layers.capture.warm_up(layers)
    assert layers.calls == 2
    layers.capture.capture(layers)
    assert layers.calls == 2


@pytest.mark.gpu
def test_python_runs_once():
    layers = Layers(BreakableCapture(DEVICE))
    runs = []
    graph = layers.capture.capture(lambda: (runs.append(1), layers())[1])
    for _ in range(3):
        graph.replay()
    assert len(runs) == 1 and len(graph._steps) == 5


def test_a_failing_break_is_named_and_the_next_replay_works():
    layers = Layers(pick_breakable(DEVICE))
    graph = captured(layers)
    whole, failing = Layers.double, [3]  # the second break of the second replay

    def sometimes(self):
        failing[0] -= 1
        if failing[0] == -1:
            raise ZeroDivisionError("no attention today")
        whole(self)

    Layers.double = sometimes
    try:
        layers = Layers(pick_breakable(DEVICE))
        graph = layers.capture.capture(layers)
        graph.replay()
        with pytest.raises(GraphError, match=r"break 2.*ZeroDivisionError: no attention today") as caught:
            graph.replay()
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        layers.x.fill_(1.0)
        graph.replay()
        assert torch.equal(graph.outputs, torch.full_like(layers.x, 11.0))
    finally:
        Layers.double = whole


def test_breaks_and_captures_do_not_nest():
    capture = pick_breakable(DEVICE)
    with pytest.raises(GraphError, match="a break within a break"):
        capture.interrupt(lambda: capture.interrupt(lambda: None))
    layers = Layers(capture)
    with pytest.raises(GraphError, match="a capture within a capture"):
        capture.capture(lambda: capture.capture(layers))
    nested = Layers(capture)
    nested.double = lambda: capture.interrupt(lambda: None)
    graph = capture.capture(nested)
    with pytest.raises(GraphError, match=r"break 1.*a break within a break"):
        graph.replay()
    graph = captured(layers)
    graph.replay()
    assert torch.equal(graph.outputs, torch.full_like(layers.x, 7.0))


def test_other_threads_and_other_captures_do_not_break_a_capture():
    ours, other = pick_breakable(DEVICE), pick_breakable(DEVICE)
    called = []

    def body():
        thread = threading.Thread(target=ours.interrupt, args=(lambda: called.append("thread"),))
        thread.start()
        thread.join()
        other.interrupt(lambda: called.append("other"))
        return torch.ones(1, device=DEVICE)

    ours.capture(body)
    assert called == ["thread", "other"]


def test_a_body_that_raises_leaves_the_capture_usable():
    capture = pick_breakable(DEVICE)
    layers = Layers(capture)

    def broken():
        layers()
        raise KeyError("halfway")

    with pytest.raises(KeyError):
        capture.capture(broken)
    graph = captured(layers)
    graph.replay()
    assert torch.equal(graph.outputs, torch.full_like(layers.x, 7.0))


@pytest.mark.parametrize("first", [4, 16])
def test_a_graph_captured_later_does_not_change_the_replays_of_an_earlier_one(first):
    """Both in one pool; the later one is larger in one case and smaller in the other."""
    capture = pick_breakable(DEVICE)
    small, large = Layers(capture, first), Layers(capture, 20 - first, num_breaks=5)
    graph = captured(small)
    small.x.fill_(1.0)
    graph.replay()
    other = captured(large)
    for value in (3.0, -2.0):
        large.x.fill_(7.0)
        other.replay()
        small.x.fill_(value)
        graph.replay()
        assert torch.equal(graph.outputs, torch.full_like(small.x, ((value + 1) * 2 + 1) * 2 + 1))


def test_segments_are_not_divided_further(monkeypatch):
    """A body may say where it can be divided: captures in segments ignore it."""
    steps = []

    class Fake:
        def capture_end(self):
            return None

        def replay(self):
            steps.append("graph")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Fake)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    capture = BreakableCapture(DEVICE, MagicMock(begin=Fake))

    def body():
        capture.divide()
        capture.interrupt(lambda: steps.append("break"))
        capture.divide()

    graph = capture.capture(body)
    assert not steps
    graph.replay()
    assert steps == ["graph", "break", "graph"]


def test_runners_take_breakable_captures():
    capture = pick_breakable(DEVICE)
    layers = Layers(capture)

    def body(variant, x):
        layers.inside[: x.shape[0]].copy_(x + 1)
        capture.interrupt(layers.double)
        return layers.outside[: x.shape[0]] + 1

    counters = Counters()
    x = BufferSpec("x", lambda n: (n,), torch.float32, pad=0.0)
    runner = GraphRunner("toy", body, [x], Setup(capture, counters, DEVICE, (4, 8), unit="tokens"))
    build([runner], capture, lower="nothing")
    for num in (1, 4, 5, 8):
        assert torch.equal(
            runner("", {"x": torch.full((num,), 2.0, device=DEVICE)}), torch.full((num,), 7.0, device=DEVICE)
        )
    runner("", {"x": torch.zeros(9, device=DEVICE)[:8]})
    assert counters.runners["toy"].replays == 5


def test_the_recorded_kind_is_for_machines_without_cuda():
    assert isinstance(pick_breakable(torch.device("cpu")), RecordedBreakable)


class Block(torch.nn.Module):
    """Two products of one input, a third one after the op to cut at, and a residual."""

    def __init__(self, bias):
        super().__init__()
        self.norm = torch.nn.RMSNorm(8)
        self.q, self.k = torch.nn.Linear(8, 8, bias=bias), torch.nn.Linear(8, 4, bias=bias)
        self.out = torch.nn.Linear(8, 8, bias=bias)

    def forward(self, x):
        y = self.norm(x)
        q = torch.ops.aten.sin.default(self.q(y))  # stands in for attention: the op to cut at
        return x + self.out(q) * F.silu(self.k(y)).sum(-1, keepdim=True)


SIN = (torch.ops.aten.sin.default,)


def blocks(num=4, bias=False):
    torch.manual_seed(0)
    return torch.nn.Sequential(*[Block(bias) for _ in range(num)]).to(DEVICE).requires_grad_(False)


def compare(model, traced):
    for num in (1, 2, 16, 33):
        x = torch.randn(num, 8, device=DEVICE)
        with torch.inference_mode():
            torch.testing.assert_close(traced(x)[0], model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_a_trace_serves_every_size_and_compiles_equal_pieces_once(compiler, bias):
    model = blocks(bias=bias)
    traced = trace(model, (torch.randn(16, 8, device=DEVICE),), SIN, compiler)
    assert (traced.num_pieces, traced.num_compiled) == (5, 3)  # first, middle, last
    compare(model, traced)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_pieces_pass_no_shapes(compiler):
    """A shape taken before the op and used twice after it: Inductor's pieces return only tensors and ints."""
    norm = torch.nn.RMSNorm(8).to(DEVICE).requires_grad_(False)

    def fn(x):
        y = norm(x)
        shape = y.shape
        z = torch.ops.aten.sin.default(y.reshape(1, *shape))
        z = torch.ops.aten.sin.default(z.reshape(shape) + y)
        return ((z * 2).reshape(shape) + z.view(1, *shape).reshape(shape),)

    traced = trace(fn, (torch.randn(16, 8, device=DEVICE),), SIN, compiler)
    assert traced.num_pieces == 3
    compare(lambda x: fn(x)[0], traced)


def test_inductor_advises_no_rounding(monkeypatch):
    """Other warnings of Inductor are shown."""
    compile_piece = torch._inductor.standalone_compile

    def warning(*args, **options):
        warnings.warn(
            "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled.", stacklevel=2
        )
        warnings.warn("a kernel spills", stacklevel=2)
        return compile_piece(*args, **options)

    monkeypatch.setattr(torch._inductor, "standalone_compile", warning)
    with pytest.warns(UserWarning) as caught:
        trace(lambda x: (torch.ops.aten.sin.default(x * 2) + 1,), (torch.randn(16, 8, device=DEVICE),), SIN, "inductor")
    assert {str(w.message) for w in caught if w.category is UserWarning} == {"a kernel spills"}


def test_joined_weights_are_views_until_they_part():
    model = blocks(2, bias=True)
    before = {name: p.clone() for name, p in model.named_parameters()}
    addresses = {id(p) for p in model.parameters()}
    traced = trace(model, (torch.randn(16, 8, device=DEVICE),), SIN, "eager")
    block = model[0]
    assert block.q.weight.untyped_storage().data_ptr() == block.k.weight.untyped_storage().data_ptr()
    assert block.q.bias.untyped_storage().data_ptr() == block.k.bias.untyped_storage().data_ptr()
    assert block.out.weight.untyped_storage().nbytes() == 8 * 8 * 4
    compare(model, traced)
    block.q.weight.mul_(2)  # the trace computes with the model's current weights
    compare(model, traced)
    block.q.weight.div_(2)
    traced.release()
    assert {id(p) for p in model.parameters()} == addresses
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) and p.untyped_storage().nbytes() == p.numel() * 4, name


def test_shared_weights_and_foreign_uses_are_not_joined():
    model = blocks(1)
    model[0].k.weight = torch.nn.Parameter(model[0].q.weight[:4].clone())
    extra = model[0].q.weight

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            return self.inner(x) + x @ extra

    whole = Twice()
    traced = trace(whole, (torch.randn(16, 8, device=DEVICE),), SIN, "eager")
    compare(whole, traced)
    assert extra.untyped_storage().nbytes() == 8 * 8 * 4


def test_many_models_can_be_traced_in_one_process():
    def run(x, model):
        return model(x)

    for seed in range(10):
        torch.manual_seed(seed)
        model = blocks(1)
        compare(model, trace(lambda x, m=model: run(x, m), (torch.randn(16, 8, device=DEVICE),), SIN, "eager"))


def test_what_does_not_trace_is_named():
    def reads(x):
        return x * 2 if float(x.sum()) > 0 else x

    with pytest.raises(GraphError, match=r"cannot be traced and compiled as one graph: .*"):
        trace(reads, (torch.randn(16, 8, device=DEVICE),), SIN, "eager")
    with pytest.raises(GraphError, match=r"item|data-dependent|Data-dependent|Tensor"):
        trace(reads, (torch.randn(16, 8, device=DEVICE),), SIN, "eager")


def test_tracing_runs_nothing():
    called = []

    class Spy(Block):
        def forward(self, x):
            if not torch.compiler.is_compiling() and not isinstance(x, FakeTensor):
                called.append(x)
            return super().forward(x)

    trace(Spy(False).to(DEVICE), (torch.randn(16, 8, device=DEVICE),), SIN, "eager")
    assert not called


@pytest.mark.parametrize("branch", [lambda n: n > 40, lambda n: n % 8 == 0, lambda n: n == 16, lambda n: n == 1])
def test_what_depends_on_the_number_of_tokens_is_refused(branch):
    """Dynamo would add a guard; we call past the guards."""

    def fn(x):
        return SIN[0](x) * 2 if branch(x.shape[0]) else SIN[0](x)

    with pytest.raises(GraphError, match=r"depends on the number of tokens|Constraints violated"):
        trace(fn, (torch.randn(16, 8, device=DEVICE),), SIN, "eager")


def test_tensors_kept_elsewhere_are_refused():
    kept = Block(False).to(DEVICE).requires_grad_(False)

    class Keeps(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = kept

        def forward(self, x):
            self.last = self.inner(x)
            return self.last * 2

    with pytest.raises(GraphError, match="its trace returns 2 tensors, 1 were expected"):
        trace(Keeps(), (torch.randn(16, 8, device=DEVICE),), SIN, "eager")


class Products(torch.nn.Module):
    """Products of one input in forms that must not be joined, or only with care."""

    def __init__(self, form):
        super().__init__()
        self.form = form
        sizes = {"odd": (8, 1), "odd first": (3, 8)}.get(form, (8, 8))
        self.a, self.b = (torch.nn.Linear(8, size, bias="odd" in form) for size in sizes)
        self.vector = torch.nn.Parameter(torch.randn(8))

    def forward(self, x):
        x = x * 1
        a = SIN[0](self.a(x)) if self.form != "mixed" else SIN[0](F.linear(x, self.a.weight))
        if self.form == "mutated":
            x.add_(1.0)
        if self.form == "vector":
            return a * F.linear(x, self.vector).unsqueeze(-1)
        if self.form == "viewed":
            x = x.reshape(-1, 8).view(-1, 8)
        return torch.cat([a, self.b(x)], -1)


JOINED = ("plain", "mixed", "viewed", "odd", "odd first")


@pytest.mark.parametrize("form", [*JOINED, "mutated", "vector", "tied", "slices"])
def test_products_are_joined_where_nothing_forbids_it(form):
    torch.manual_seed(0)
    model = Products(form).to(DEVICE).requires_grad_(False)
    if form == "tied":  # two parameters, one storage
        model.b.weight.data = model.a.weight.data
    if form == "slices":  # of a buffer that belongs to something else
        flat = torch.randn(20, 8, device=DEVICE)
        model.a.weight.data, model.b.weight.data = flat[:8], flat[8:16]
    storages = [p.untyped_storage().data_ptr() for p in model.parameters()]
    traced = trace(model, (torch.randn(16, 8, device=DEVICE),), SIN, "eager")
    compare(model, traced)
    are_joined = [p.untyped_storage().data_ptr() for p in model.parameters()] != storages
    assert are_joined == (form in JOINED)
    traced.release()


def test_weights_stay_what_autograd_can_use_and_joined_ones_are_gone():
    model = blocks(1)
    with torch.inference_mode():
        traced = trace(model, (torch.randn(16, 8, device=DEVICE),), SIN, "eager")
        (joined,) = [weakref.ref(t) for t in traced._args if isinstance(t, torch.Tensor) and t.shape == (12, 8)]
        traced.release()
    assert joined() is None
    model.requires_grad_(True)
    model(torch.randn(3, 8, device=DEVICE)).sum().backward()


def test_a_join_that_fails_half_way_leaves_no_trace(monkeypatch):
    model = blocks(3)
    whole, left = torch.cat, [2]

    def cat(tensors, *args, **kwargs):
        if any(isinstance(t, torch.nn.Parameter) or t.data_ptr() for t in tensors[:1] if type(t) is torch.Tensor):
            left[0] -= 1
            if left[0] < 0:
                raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(tensors, *args, **kwargs)

    monkeypatch.setattr(torch, "cat", cat)
    with pytest.raises(torch.OutOfMemoryError):
        trace(model, (torch.randn(16, 8, device=DEVICE),), SIN, "eager")
    monkeypatch.undo()
    assert all(p.untyped_storage().nbytes() == p.numel() * 4 for p in model.parameters())


def test_attention_that_breaks_a_graph_needs_a_plan_first():
    """Warm-ups used to end in an IndexError of an empty list."""
    layer = LayerSpec(num_heads=2, num_kv_heads=1, qk_dim=16, v_dim=16, scaling=0.25)
    backend, capture = TorchBackend(), RecordedBreakable()
    tables = SlotTables(2, 16, 32, 1, CPU)
    pool = KVPool([layer.shape], tables.total_slots, torch.float32, CPU)
    context = ForwardContext(backend, pool, [layer], sinks=[None], on_forward=lambda mode: None)
    bridge = AttentionBridge(context, 8, torch.float32, CPU, capture.interrupt)

    def body(variant, slots):
        with bridge.capturing(slots):
            q, k = torch.ones(len(slots), 2, 16), torch.ones(len(slots), 1, 16)
            return attention(q, k, k, layer_id=0)

    def made():
        setup = Setup(capture, Counters(), CPU, (8,), unit="tokens")
        runner = GraphRunner("prefill", body, [BufferSpec("slots", lambda n: (n,), torch.int64, pad=0)], setup)
        build([runner], capture, lower="the buckets")
        return runner

    with pytest.raises(RuntimeError, match=r"call AttentionBridge\.plan\(\) before graphs are captured"):
        made()
    bridge.plan(backend.metadata.prefill(tables.table, torch.tensor([2]), starts=[0], q_lens=[8]), 8)
    assert made()("", {"slots": torch.arange(8)}).shape == (8, 2, 16)
