"""Layers that are equal but for their weights are walked once by Dynamo; what differs is noticed by its guards."""

import pytest
import torch

import specdec
from specdec.graphs import regions
from specdec.graphs.trace import trace
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.skipif(not regions.can_repeat(), reason="this torch walks every layer")
SIN = (torch.ops.aten.sin.default,)


class Layer(torch.nn.Module):
    def __init__(self, factor=2.0):
        super().__init__()
        self.q, self.k = (torch.nn.Linear(8, 8, bias=False) for _ in range(2))
        self.factor = factor

    def forward(self, x):
        return x + torch.ops.aten.sin(self.q(x) + self.k(x)) * self.factor


class Stack(torch.nn.Module):
    def __init__(self, *factors):
        super().__init__()
        self.layers = torch.nn.ModuleList(map(Layer, factors))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def walks(monkeypatch):
    """Sizes of the graphs that Dynamo gives us, before regions are written out."""
    seen, live = [], specdec.graphs.trace.write_out

    def counted(graph):
        seen.append(len({name for name, _ in graph.named_children()}))
        live(graph)

    monkeypatch.setattr(specdec.graphs.trace, "write_out", counted)
    return seen


@pytest.mark.parametrize(("factors", "num_walked"), [((2.0,) * 5, 1), ((2.0, 3.0, 2.0, 3.0, 2.0), 2)])
def test_equal_layers_are_walked_once_and_others_apart(walks, factors, num_walked):
    model = Stack(*factors).double()  # five layers of threefold sines: what is joined rounds otherwise
    traced = trace(model, (torch.randn(16, 8).double(),), SIN, "eager", alike=list(model.layers))
    assert walks == [num_walked] and traced.num_pieces == 6
    assert {type(layer) for layer in model.layers} == {Layer}
    for num in (2, 5, 33):
        x = torch.randn(num, 8).double()
        torch.testing.assert_close(traced(x)[0], model(x))
    traced.release()


def test_layers_that_are_no_regions_are_walked_as_they_are():
    model, seen = Stack(2.0, 2.0), []

    class Keeps(Layer):
        def forward(self, x):
            seen.append(1)  # a side effect: no region
            return super().forward(x)

    for layer in model.layers:
        layer.__class__ = Keeps
    traced = trace(model, (torch.randn(16, 8),), SIN, "eager", alike=list(model.layers))
    x = torch.randn(5, 8)
    torch.testing.assert_close(traced(x)[0], model(x))


def test_attention_keeps_its_layers():
    """Layers are traced with one id: each call has its own again."""
    model = tiny_model("llama")
    engine = specdec.attach(model, compile=True, compiler="eager", max_seq_len=64)
    (traced,) = set(engine._core.target.compiled.values())
    calls = [n for m in traced._split.children() for n in m.graph.nodes if "specdec.attn" in str(n.target)]
    assert [call.args[3] for call in calls] == list(range(len(model.model.layers)))
    assert [m._specdec_layer_id for m in engine._core.target.spec.modules] == list(range(len(calls)))
