"""Products, norms and rope tables of traced layers that are replaced by our ops: which are, and that results stay."""

from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import specdec
from specdec.backends.linear.fp8 import fp8_linear, in_blocks, quantise
from specdec.core.config import EngineConfig
from specdec.graphs.compile import pieces
from specdec.graphs.compile.trace import trace
from specdec.reach.targets.compiling.checked import rewrite, trace_checked
from specdec.reach.targets.compiling.tables import take_over_tables
from specdec.reach.targets.compiling.target import _subject
from specdec.reach.targets.hf import HFTarget
from specdec.tools.measure.shapes import make_target
from tests.heads import random_draft
from tests.recurrent_models import CONFIGS, recurrent_model
from tests.tiny_models import tiny_model

OPS = ("linear", "gated_linear", "rms_norm", "add_rms_norm", "rope_tables")
# Of four layers: ungated products, gated ones, norms, norms of a sum, pairs of tables.
EXPECTED = {
    "llama": (12, 4, 1, 8, 1),
    "qwen2_windowed": (12, 4, 1, 8, 1),
    "qwen3": (12, 4, 1, 8, 1),  # norms of heads move to attention, as in Gemma 3
    "gemma2": (12, 4, 9, 8, 1),
    "gemma3": (12, 4, 9, 8, 2),
    "gpt_oss": (12, 0, 1, 4, 1),  # and four sums over experts, as below
    "qwen3_moe": (12, 0, 1, 4, 1),
}


def ops_of(graph):
    return Counter(str(node.target).split(".")[1] for node in graph.graph.nodes if "specdec." in str(node.target))


def counts(graph):
    found = ops_of(graph)
    return tuple(found[op] for op in OPS)


class Seen(list):
    """For every flat graph, the counts of OPS and whether its pieces are covered; ops: counts of all ops."""

    def __init__(self):
        self.ops = []


@pytest.fixture
def flat(monkeypatch):
    """The flat graphs that are cut, and whether each piece needs a compiler."""
    seen = Seen()
    cut = pieces.cut

    def spy(graph, at):
        chain = cut(graph, at)
        parts = [m for m in chain.children() if not any(pieces.is_call(n, at) for n in m.graph.nodes)]
        seen.ops.append(ops_of(graph))
        seen.append((counts(graph), [pieces.is_covered(m) for m in parts]))
        return chain

    monkeypatch.setattr("specdec.graphs.compile.trace.cut", spy)
    return seen


@pytest.mark.parametrize("name", EXPECTED)
def test_layers_are_of_our_ops(name, flat):
    """They compute the same as the live layers: `trace_checked` compares."""
    target = HFTarget(tiny_model(name))
    config = EngineConfig(compile=True, compiler="eager")
    trace_checked(_subject(target, config), config, target.device)
    ((found, covered),) = flat
    assert found == EXPECTED[name]
    assert all(covered), "no layer of these needs a compiler"


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in ("qwen4_exp", "inkling")])  # they are refused
def test_every_recurrent_model_computes_the_same_of_our_ops(name):
    """In 16 bits, where the gates and norms of hybrids are recognised."""
    target = HFTarget(recurrent_model(name, dtype=torch.bfloat16))
    config = EngineConfig(compile=True, compiler="eager")
    trace_checked(_subject(target, config), config, target.device).release()


def test_hybrids_with_experts_have_no_ops_of_others_around_their_recurrence(flat):
    """Three layers of four are recurrent, with two key heads for four heads; every layer has a shared expert."""
    target = HFTarget(make_target("tiny-hybrid", "cpu").bfloat16())
    config = EngineConfig(compile=True, compiler="eager")
    trace_checked(_subject(target, config), config, target.device).release()
    ((_, covered),), (found,) = flat, flat.ops
    num_layers = len(target.spec.layers) + found["scan"]
    assert found["scan"] == found["conv"] == found["gated_rms_norm"] == found["delta_gates"] > 0
    assert found["experts_rms_norm"] == found["top_scores"] == num_layers and not found["weighted_sum"]
    assert found["apply_gate"] == num_layers + len(target.spec.layers), "of shared experts, and behind attention"
    assert found["rope_tables"] == 1 and all(covered), "of three equal positions; no compiler is needed"


@pytest.mark.parametrize(("algo", "num_joined"), [("eagle", 0), ("eagle3", 1), ("nextn", 1)])
def test_drafts_are_of_our_ops(algo, num_joined, flat):
    """Heads that normalise embeddings and states do so, with the table lookup, in one op."""
    model = tiny_model("llama")
    specdec.attach(model, random_draft(model, algo), algo=algo, compile=True, compiler="eager").detach()
    assert len(flat) >= 2 and all(all(covered) for _, covered in flat)
    assert sum(found["joined_inputs"] for found in flat.ops) == num_joined


class Calls(TorchDispatchMode):
    """Records the ops that are called, except those within our ops."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_products_of_a_head_outside_of_traces_are_batch_invariant():
    """Else drafts, and so samples, would depend on the batch size."""
    head = random_draft(tiny_model("llama"), "eagle3")
    features, states = torch.randn(3, head.fc.in_features), torch.randn(3, head.hidden_size)
    with torch.inference_mode(), Calls() as calls:
        head.fuse(features)
        head.project(head.normed(states))
    assert [n for n in calls.names if "linear" in n or "mm" in n] == ["specdec.linear.default"] * 2
    assert head.fuse(features).requires_grad == head.fc.weight.requires_grad


def norm(x, weight, eps=1e-5, offset=0.0, power=2, dim=-1):
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(power).mean(dim, keepdim=True) + eps)
    return (normed * (offset + weight.float())).to(x.dtype)


def norm_by_name(x, weight):
    wide = x.float()
    root = torch.rsqrt(torch.add(wide.pow(2).mean(-1, keepdim=True), other=1e-5))
    return torch.mul((wide * root).to(x.dtype), other=weight)


def norm_of_twice_eps(x, weight):
    wide = x.float()
    root = torch.rsqrt(torch.add(wide.pow(2).mean(-1, keepdim=True), 1.0, alpha=2.0))
    return weight * (wide * root).to(x.dtype)


def normed_twice(x, weight):
    total = x + x.roll(1, -1)
    return norm(total, weight) + norm(total, weight, offset=1.0) + total


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (normed_twice, (0, 0, 1, 1, 0)),  # the second norm reads the sum that the first op returns
        (lambda x, weight: F.rms_norm(x, (64,), weight, 1e-5), (0, 0, 1, 0, 0)),
        (lambda x, weight: F.rms_norm(x + x.roll(1, -1), (64,), 1 + weight, 1e-5), (0, 0, 0, 0, 0)),
        (norm_by_name, (0, 0, 0, 0, 0)),
        (norm_of_twice_eps, (0, 0, 0, 0, 0)),
        (lambda x, weight: norm(x, weight, power=4), (0, 0, 0, 0, 0)),
        (lambda x, weight: norm(x.view(-1, 64, 1), weight, dim=-2).view(-1, 64 * 64), (0, 0, 0, 0, 0)),
        (lambda x, weight: F.layer_norm(x, (64,), weight), (0, 0, 0, 0, 0)),
        (lambda x, weight: norm(x, weight) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1), (0, 0, 1, 0, 0)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_which_norms_are_recognised(run, expected, dtype):
    weight = nn.Parameter(torch.rand(64, dtype=dtype))
    assert _compare(lambda x: (run(x, weight),), torch.randn(5, 64, dtype=dtype)) == expected


@pytest.mark.parametrize(
    ("activation", "is_recognised"),
    [
        (F.silu, True),
        (F.gelu, True),
        (lambda x: F.gelu(x, approximate="tanh"), True),
        (F.relu, False),
        (lambda x: F.silu(x) + 1, False),
    ],
)
def test_which_gates_are_recognised(activation, is_recognised):
    gate, up, down = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64, bias=False)
    found = _compare(lambda x: (down(activation(gate(x)) * up(x)),), torch.randn(5, 64))
    assert found == ((1, 1, 0, 0, 0) if is_recognised else (2, 0, 0, 0, 0))


def test_an_order_of_gate_and_up_that_is_not_ours_stays():
    up, gate = nn.Linear(64, 96), nn.Linear(64, 96)
    assert _compare(lambda x: (up(x) * F.silu(gate(x)),), torch.randn(5, 64)) == (1, 0, 0, 0, 0)


def tables(x, kind=torch.float32, is_column=False):
    """Return the angles of a rope [1, T, 16], with positions rounded to `kind`. is_column: as in transformers 5.24."""
    positions, frequencies = x[:, :1].ne(9).cumsum(0).mul(100).add(1).transpose(0, 1), x.new_full((8,), 0.25)
    if is_column:
        half = positions[..., None].to(kind).float() * frequencies.to(device=x.device, dtype=torch.float)
    else:
        row = positions[:, None, :].to(kind).float()
        half = (frequencies[None, :, None].float().expand(1, -1, 1) @ row).transpose(1, 2)
    return torch.cat((half, half), -1)


def sines_first(x):
    angles = tables(x)
    sin = angles.sin()
    turned = -sin[0]
    return torch.cat([turned, angles.cos()[0]], -1)


def columns(x):
    angles = tables(x, is_column=True)
    return torch.cat([angles.cos()[0], angles.sin()[0]], -1)


def rounded_positions(x, is_column=False):
    angles = tables(x, torch.bfloat16, is_column)
    return torch.cat([angles.cos()[0], angles.sin()[0]], -1)


def three_positions(x, are_equal, is_column):
    """Return a rope with three positions per token, used in turn; is_column: as in transformers 5.24."""
    positions = x[:, :1].ne(9).cumsum(0).transpose(0, 1)
    positions = positions[None].expand(3, 1, -1) if are_equal else torch.stack([positions + i for i in range(3)])
    frequencies = x.new_full((8,), 0.25)
    if is_column:
        angles = positions[..., None].float() * frequencies.to(device=x.device, dtype=torch.float)
    else:
        frequencies = frequencies[None, None, :, None].float().expand(3, 1, -1, 1)
        angles = (frequencies @ positions[:, :, None, :].float()).transpose(2, 3)
    results = []
    for table in (angles.cos() * 0.5, angles.sin() * 0.5):
        first = table[0]
        for i in (1, 2):
            first[..., slice(i, 6, 3)] = table[i, ..., slice(i, 6, 3)]
        results.append(torch.cat((first, first), dim=-1).to(dtype=x.dtype)[0])
    return torch.cat(results, -1)


@pytest.mark.parametrize(
    ("run", "expected"),
    [(sines_first, 1), (columns, 1), (rounded_positions, 0), (partial(rounded_positions, is_column=True), 0)],
)
def test_which_tables_are_recognised(run, expected):
    assert _compare(lambda x: (run(x),), torch.randn(5, 64))[4] == expected


@pytest.mark.parametrize("is_column", [True, False])
@pytest.mark.parametrize("are_equal", [True, False])
def test_tables_of_three_positions_are_those_of_one_where_these_are_equal(are_equal, is_column):
    graphs, x = [], torch.randn(5, 64)
    capture = partial(torch.compile, backend=lambda graph, _: graphs.append(graph) or graph.forward, fullgraph=True)
    expected = capture(three_positions)(x, are_equal, is_column)
    take_over_tables(graphs[0])
    graphs[0].recompile()
    assert ops_of(graphs[0])["rope_tables"] == are_equal
    torch.testing.assert_close(graphs[0](x)[0], expected)


@pytest.mark.parametrize(("by_row", "is_used"), [(False, False), (False, True), (True, False)])
def test_gated_products_in_fp8_quantise_their_result(by_row, is_used):
    """Not if something else uses it, or if rows need one scale each: that takes one more launch."""
    gate, up, (down, of_down) = (in_blocks(torch.randn(256, 256)) for _ in range(3))
    of_down = torch.rand(256) if by_row else of_down

    def run(x):
        halves = (fp8_linear(*quantise(x, False), [w], [s], [], x.dtype) for w, s in (gate, up))
        gated = F.silu(next(halves)) * next(halves)
        y = fp8_linear(*quantise(gated.view(-1, 256), by_row), [down], [of_down], [], x.dtype)
        return (y, gated) if is_used else (y,)

    def rewritten(graph):
        rewrite(graph, is_ours=True)
        found.append(ops_of(graph))

    found, x = [], torch.randn(5, 256, dtype=torch.bfloat16)
    attention, num_outputs = torch.ops.specdec.attn.default, 1 + is_used
    traced = trace(run, (x,), (attention,), "eager", num_outputs=num_outputs, rewrite=rewritten)
    one, two = {"quantise": 1, "gated_linear_fp8": 1, "fp8_linear": 1}, {"quantise": 2, "fp8_linear": 2}
    assert found == [two if by_row or is_used else one]
    with torch.inference_mode():
        for inputs in (x, x[:1]):
            assert all(map(torch.equal, traced(inputs), run(inputs)))


@pytest.mark.filterwarnings("error")
def test_nothing_is_erased_twice():
    """The root is the first factor, and both factors use the same nodes."""
    weight = nn.Parameter(torch.rand(64, dtype=torch.bfloat16))

    def run(x):
        wide = x.float()
        return (weight * (torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * wide).to(x.dtype),)

    assert _compare(run, torch.randn(5, 64, dtype=torch.bfloat16)) == (0, 0, 1, 0, 0)


def _compare(run, x):
    """Trace `run`, rewrite the trace, compare both at some sizes, and count our ops."""
    found = []

    def rewritten(graph):
        rewrite(graph, is_ours=True)
        found.append(counts(graph))

    traced = trace(run, (x,), (torch.ops.specdec.attn.default,), "eager", rewrite=rewritten)
    with torch.inference_mode():
        for inputs in (x, x[:1], torch.cat([x, x])):
            torch.testing.assert_close(traced(inputs), run(inputs))
    return found[0]
