"""Dynamo traces equal layers, which differ only in their weights, once; others one by one."""

import gc
import weakref
from contextvars import ContextVar

import pytest
import torch
import torch._dynamo.eval_frame

import specdec
from specdec.core.errors import GraphError
from specdec.graphs.compile import layers as equal_layers
from specdec.graphs.compile.alike import alike
from specdec.graphs.compile.layers import Layers
from specdec.graphs.compile.trace import trace
from specdec.graphs.compile.walk import walk
from tests.tiny_models import tiny_model

VARIABLE = ContextVar("variable", default=1.0)
SIN = (torch.ops.aten.sin.default,)


class Layer(torch.nn.Module):
    def __init__(self, factor=2.0, index=0):
        super().__init__()
        self.q, self.k = (torch.nn.Linear(8, 8, bias=False) for _ in range(2))
        self.factor, self.index = factor, index

    def forward(self, x, shift=0.0):
        return x + torch.ops.aten.sin(self.q(x) + self.k(x)) * self.factor + shift


class Stack(torch.nn.Module):
    def __init__(self, *factors, cls=Layer):
        super().__init__()
        self.layers = torch.nn.ModuleList(cls(factor, i) for i, factor in enumerate(factors))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def walks(monkeypatch):
    """The layers that Dynamo traces individually."""
    seen, live = [], equal_layers._walk_layer
    monkeypatch.setattr(equal_layers, "_walk_layer", lambda *args: seen.append(args[0]) or live(*args))
    return seen


def traced_layers(model):
    """Trace a stack of `Layer` in fp64: joined products round differently, and five sines times three amplify that."""
    model, layers = model.double(), Layers(alike(list(model.layers)))
    with layers.recording():
        for num in (16, 7):
            model(torch.randn(num, 8).double())
    assert not any("forward" in vars(layer) for layer in model.layers)
    traced = trace(model, (torch.randn(16, 8).double(),), SIN, "eager", layers=layers)
    assert not any("forward" in vars(layer) for layer in model.layers)
    for num in (2, 5, 33):
        x = torch.randn(num, 8).double()
        torch.testing.assert_close(traced(x)[0], model(x))
    traced.release()
    return traced, len(layers.standing)


def test_the_first_and_the_last_of_equal_layers_are_walked_and_others_as_they_are(walks):
    model = Stack(*[2.0, 3.0] * 3)
    traced, num_standing = traced_layers(model)
    assert [model.layers[i] for i in (0, 4, 1, 5)] == walks
    assert (num_standing, traced.num_pieces) == (6, 7)
    walks.clear()
    assert traced_layers(Stack(2.0, 2.0, 3.0))[1] == 0 and not walks


class ByIndex(Layer):
    def forward(self, x):
        return super().forward(x) * (1 + self.index)


class ByArgument(Stack):
    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x, shift=0.25 if i == 2 else 0.0)
        return x


class Keeps(Layer):
    def forward(self, x):
        self.kept = x * 2  # a side effect: another output of its graph
        return super().forward(x)


@pytest.mark.parametrize("cls", [ByIndex, Keeps])
def test_layers_that_are_not_equal_are_walked_as_they_are(walks, cls):
    """They look equal; the graphs of the first and the last differ."""
    model = Stack(*[2.0] * 4, cls=cls)
    if cls is Keeps:
        with pytest.raises(
            specdec.GraphError, match="it stores tensors besides its outputs"
        ):  # the whole is refused too
            traced_layers(model)
    else:
        assert traced_layers(model)[1] == 0
    assert len(walks) == (1 if cls is Keeps else 2)


def test_an_argument_that_differs_makes_another_kind(walks):
    assert traced_layers(ByArgument(*[2.0] * 4))[1] == 3 and len(walks) == 2


def test_equal_layers_are_told_by_what_can_be_seen():
    def groups(change):
        model = Stack(*[2.0] * 4)
        change(model.layers[2])
        return [len(group) for group in alike(list(model.layers))]

    assert groups(lambda m: None) == [4]
    changes = [
        lambda m: m.double(),
        lambda m: m.eval(),
        lambda m: m.q.requires_grad_(False),
        lambda m: setattr(m.k, "weight", m.q.weight),
        lambda m: setattr(m.q, "weight", torch.nn.Parameter(torch.rand(16, 8)[::2])),
        lambda m: m.q.register_forward_hook(lambda module, args, out: out * 2),
        lambda m: setattr(m.q, "forward", torch.sin),
    ]
    assert [groups(change) for change in changes] == [[3, 1]] * len(changes)


def test_torch_keeps_nothing_of_a_trace():
    """torch keeps every backend for ever; ours is one function."""
    kept = torch._dynamo.eval_frame.cached_backends
    sizes = []
    for _ in range(2):
        walk(Stack(2.0), (torch.ones(4, 8),), [], (2, 9))  # by Dynamo: no module is given
        sizes.append({getattr(b, "compiler_fn", None) for b in kept.values()})
    assert sizes[0] == sizes[1]
    assert any(backend is specdec.graphs.compile.walk._give_back for backend in sizes[0])


def test_a_walk_that_fails_keeps_nothing():
    """torch leaves its error in a reference cycle with frames that hold every caller's variables."""

    class Caller:
        def walk(self):
            with pytest.raises(GraphError, match="ContextVar"):
                walk(lambda x: x + VARIABLE.get(), (torch.ones(4),), [], (2, 9))

    caller = Caller()
    alive = weakref.ref(caller)
    gc.disable()
    try:
        caller.walk()
        del caller
        assert alive() is None
    finally:
        gc.enable()


def test_attention_keeps_its_layers():
    """Equal layers are traced with one id: each call gets its own id back."""
    model = tiny_model("llama")
    engine = specdec.attach(model, compile=True, compiler="eager", max_seq_len=64)
    (traced,) = set(engine._core.target.compiled.values())
    calls = [n for m in traced._split.children() for n in m.graph.nodes if "specdec.attn" in str(n.target)]
    assert [call.args[3] for call in calls] == list(range(len(model.model.layers)))
    assert [m._specdec_layer_id for m in engine._core.target.spec.modules] == list(range(len(calls)))
