"""Recording a callable: the graph that Dynamo would make, in a fraction of the time; the rest is left to Dynamo."""

import subprocess
import sys

import pytest
import sympy
import torch
from torch import nn

from specdec.core.errors import GraphError
from specdec.graphs.compile import walk as walking
from specdec.graphs.compile.pieces import _holds
from specdec.graphs.compile.record import Fakes, record
from specdec.graphs.compile.trace import trace

SIN = (torch.ops.aten.sin.default,)


@pytest.fixture
def walks(monkeypatch):
    """The callables that Dynamo traces."""
    seen, live = [], walking._walk
    monkeypatch.setattr(walking, "_walk", lambda *args: seen.append(args[0]) or live(*args))
    return seen


class Block(nn.Module):
    """Calls torch in all forms: methods, operators, functions in C and in Python, ops; sizes, items, results."""

    def __init__(self):
        super().__init__()
        self.q, self.out = nn.Linear(8, 12, bias=False), nn.Linear(12, 8)
        self.register_buffer("ramp", torch.linspace(0, 1, 12))
        self.num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        q = self.q(x).view(*x.shape[:-1], 3, 4)
        low, high = q.chunk(2, -1)
        q = torch.cat((-high, low), dim=-1).reshape(x.shape[0], -1) * self.ramp
        q = 1 - q / 2 + nn.functional.softmax(q, dim=-1, dtype=torch.float64).type_as(q)
        q += torch.arange(x.shape[0] * 12, device=x.device).view(-1, 12)[..., :12].to(q.dtype) * 1e-3
        q = torch.ops.aten.sin.default(nn.functional.silu(q))
        values, indices = q.topk(2, dim=-1)
        q[:, 0] = values.sum(-1)
        return self.out(q) + nn.functional.rms_norm(x, (8,), eps=1e-5) + indices.size(0) * 2


def examples(num_tokens=6, seed=0):
    return torch.randn(num_tokens, 8, generator=torch.Generator().manual_seed(seed))


def test_what_is_recorded_computes_the_same_for_every_number_of_tokens(walks):
    model = Block()
    traced = trace(model, (examples(),), SIN, "eager", smallest=2)
    assert not walks and model.num_calls == 0, "the model's attributes stay as they are"
    for num_tokens in (1, 2, 7, 33):
        x = examples(num_tokens, num_tokens)
        torch.testing.assert_close(traced(x)[0], model(x))
    traced.release()


@torch.no_grad()
def test_a_graph_is_called_with_what_it_reads_and_the_number_of_tokens():
    model, x, unused = Block(), examples(), torch.ones(6)
    graph, args, _ = record(lambda x, unused: model(x), (x, unused), [(x, (0,)), (unused, (0,))], {}, model)
    assert [a for a in args if isinstance(a, int)] == [6] and any(a is x for a in args)
    assert {id(t) for t in (*model.parameters(), model.ramp)} < {id(a) for a in args}
    assert not any(a is unused for a in args)
    torch.testing.assert_close(graph(*args)[0], model(x))


@torch.no_grad()
def test_what_follows_takes_results_of_the_same_calls_alone():
    fakes, first, narrow = Fakes(), Block(), Block()
    narrow.register_buffer("ramp", torch.ones(1))
    graphs = []
    for model, num_tokens in ((first, 6), (Block(), 7), (narrow, 8)):
        x = examples(num_tokens)
        graph, args, mode = record(model, (x,), [(x, (0,))], {}, model, fakes, follows=bool(graphs))
        assert mode is fakes.mode
        torch.testing.assert_close(graph(*args)[0], model(x))
        graphs.append(graph)
    calls = [[n.meta.get("example_value") for n in graph.graph.nodes if n.op != "placeholder"] for graph in graphs]
    values = [[value for value in results if value is not None] for results in calls]  # sizes and writes have none
    same = [[a is b for a, b in zip(values[0], others, strict=True)] for others in values[1:]]
    assert all(same[0]), "nothing is computed again"
    assert same[1] == sorted(same[1], reverse=True) and 0 < sum(same[1]) < len(same[1]), "until a call is another"


class Branching(Block):
    def forward(self, x):
        return super().forward(x) if x.shape[0] > 20 else x * 2


class Reading(Block):
    def forward(self, x):
        return super().forward(x) * (2 if bool(x.sum() > 0) else 3)


class Keeping(Block):
    kept = None

    def forward(self, x):
        if self.kept is None:
            self.kept = [x * 2]
        return super().forward(x) + self.kept[0]


@pytest.mark.parametrize("cls", [Branching, Reading, Keeping])
def test_what_is_not_one_graph_is_refused_and_leaves_nothing_in_the_model(walks, cls):
    model = cls()
    with pytest.raises(GraphError):
        trace(model, (examples(),), SIN, "eager")
    assert len(walks) == 1, "Dynamo says why"
    assert "kept" not in vars(model) and model.num_calls == 0
    assert model(examples()).shape == (6, 8)


class Mixed(Block):
    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.out(self.q(x)).float()


def test_autocast_is_left_to_dynamo_whose_graph_has_it(walks):
    model = Mixed()
    traced = trace(model, (examples(),), SIN, "eager")
    assert len(walks) == 1
    torch.testing.assert_close(traced(examples(9))[0], model(examples(9)))


@pytest.mark.parametrize("relation", [sympy.Eq, sympy.Ne, sympy.Ge, sympy.Lt])
def test_what_is_taken_for_granted_of_sizes_is_checked_for_all(relation):
    size = sympy.Symbol("T", integer=True, positive=True)
    for side in (size, 2 * size - 9, 7 - size, size / 2, size * size - 9 * size, sympy.Mod(size, 3), sympy.Integer(4)):
        for other in (-1, 0, 1, 4, size, 3 * size - 8):
            taken = relation(side, other)
            expected = all(taken.subs(size, n) == True for n in range(2, 13))  # noqa: E712 (sympy)
            assert _holds(taken, size, 2, 12) == expected, taken


OPERATORS = {
    "powers": lambda x: (x**2, x.abs() ** 0.5, x.abs() ** x, 2**x, x.clone().__ipow__(3)),
    "sums and products": lambda x: (1 - x, 1 / x, x // 2, 2 // x, x % 2, 2 % x, -x, +x, abs(x), x @ x.T),
    "in place": lambda x: (x.clone().__isub__(1), x.clone().__imul__(2), x.clone().__itruediv__(2)),
    "bits": lambda x: ((x > 0) & (x < 1), (x > 0) | (x < 1), (x > 0) ^ (x < 1), ~(x > 0), x.int() << 1, x.int() >> 1),
    "comparisons": lambda x: (x == 0, x != 0, x > 0, x >= 0, x < 0, x <= 0),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_run_from_the_code_of_a_graph(name, walks):
    layer, x, count = nn.Linear(8, 8), torch.randn(5, 8), len(OPERATORS[name](torch.ones(2, 2)))
    expected = OPERATORS[name](layer(x))
    traced = trace(
        lambda x: OPERATORS[name](layer(x)), [torch.randn(4, 8)], (), "eager", module=layer, num_outputs=count
    )
    assert all(map(torch.equal, traced(x), expected)) and not walks


TRACED_ALONE = """if True:
    import sys, torch
    from torch import nn
    from specdec.graphs.compile.trace import trace

    layer = nn.Linear(8, 8)
    trace(lambda x: (layer(x),), [torch.randn(4, 8)], (), "eager", module=layer)
    found = {"torch.export._trace", "torch._inductor.codecache", "networkx"} & sys.modules.keys()
    assert not found, found
"""


def test_a_trace_imports_no_compiler():
    """Importing torch's takes half a second, and a trace needs none."""
    subprocess.run([sys.executable, "-c", TRACED_ALONE], check=True, timeout=120)
