"""Runners, captures and buckets on toy callables: real CUDA graphs where there is a GPU, recorded ones elsewhere."""

import sys
import warnings
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.core.batch import ForwardMode
from specdec.core.errors import GraphError
from specdec.graphs import (
    BufferSpec,
    Counters,
    EagerCapture,
    GraphRunner,
    Setup,
    ShapeKey,
    batch_buckets,
    build,
    replayed_sizes,
    token_buckets,
)
from specdec.graphs.building import progress_bar
from specdec.graphs.captures import FullCapture, RecordedCapture, pick_capture

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BUCKETS = (1, 2, 4, 8)
X = BufferSpec("x", lambda n: (n, 3), torch.float32, pad=-7.0)
BIAS = BufferSpec("bias", lambda n: (2, n), torch.int64, pad=5, axis=1)


class Out(NamedTuple):
    total: torch.Tensor  # [n]
    nothing: None


class Toy:
    """A body with state: `seen` keeps the inputs of the last run, padding included."""

    def __init__(self, counters, device=DEVICE):
        self.seen = torch.zeros(16, 3, device=device)
        self.runs = torch.zeros(1, dtype=torch.int64, device=device)
        self.counters = counters

    def __call__(self, variant, x, bias=None, scale=1.0):
        self.counters.count_forward(ForwardMode.DECODE)
        self.seen[: x.shape[0]] = x
        self.runs += 1
        total = x.sum(1) * scale
        return Out(total if bias is None else total + bias.sum(0), None)


def make(capture=None, variants=("",), inputs=(X,), strict=False, body=None, buckets=BUCKETS):
    counters = Counters()
    toy = Toy(counters)
    capture = pick_capture(True, DEVICE) if capture is None else capture
    setup = Setup(capture, counters, DEVICE, buckets, variants, strict)
    runner = GraphRunner("toy", body or toy, inputs, setup)
    build([runner], capture, lower="something", strict=strict)
    return runner, toy, counters


def x_of(n, seed=0):
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@given(st.integers(1, 600))
def test_every_batch_has_a_bucket_that_wastes_a_third_at_most(max_batch):
    buckets = batch_buckets(max_batch)
    assert list(buckets) == sorted(set(buckets)) and buckets[-1] == min(max_batch, 256)
    for num in range(1, buckets[-1] + 1):
        bucket = min(b for b in buckets if b >= num)
        assert bucket - num <= bucket / 3


def test_wanted_buckets_are_clamped_and_checked():
    assert batch_buckets(6, [8, 2, 32]) == (2, 6)
    for wrong in ([], [0], [2, -1]):
        with pytest.raises(ValueError, match="expected sizes of at least 1"):
            batch_buckets(6, wrong)


@given(st.integers(1, 20000))
def test_token_buckets_pad_by_a_quarter_at_most_and_by_an_eighth_where_they_are_large(max_tokens):
    buckets = token_buckets(max_tokens)
    assert list(buckets) == sorted(set(buckets)) and buckets[-1] == max_tokens and buckets[0] == 1
    for below, bucket in pairwise(buckets):
        worst = bucket - (below + 1)
        assert worst <= 3 or worst <= bucket / (8 if below >= 256 else 4)
    assert token_buckets(100, [7, 3, 200]) == (3, 7, 100)


def test_what_would_run_eagerly_anyway_gets_no_graph():
    assert replayed_sizes((8, 16, 32, 64, 128), 20) == (8, 16, 32, 128)
    assert replayed_sizes((8, 16), None) == replayed_sizes((8, 16), 99) == replayed_sizes((8, 16), 10) == (8, 16)
    assert replayed_sizes((8, 16), 3) == (8, 16) and replayed_sizes((8, 16, 32), 3) == (8, 32)


@pytest.mark.parametrize("num", [1, 2, 3, 4, 5, 7, 8])
def test_replay_equals_the_callable_and_pads_with_the_declared_value(num):
    runner, toy, counters = make()
    bucket = min(b for b in BUCKETS if b >= num)
    for seed in range(3):
        x = x_of(num, seed)
        toy.seen.fill_(float("nan"))
        out = runner("", {"x": x})
        torch.testing.assert_close(out.total, x.sum(1), rtol=0, atol=0)
        assert out.nothing is None and out.total.shape == (num,)
        assert torch.equal(toy.seen[:num], x) and bool((toy.seen[num:bucket] == -7).all())
        assert bool(toy.seen[bucket:].isnan().all())
    assert counters.runners["toy"].replays == 3 and counters.runners["toy"].eager == 0
    assert counters.forwards[ForwardMode.DECODE].replays == 3 and counters.forwards[ForwardMode.DECODE].eager == 0


def test_what_lay_in_the_buffers_before_changes_nothing():
    runner, toy, _ = make()
    for num in (8, 3, 7, 1, 5):
        runner._buffers.tensors["x"].fill_(float("nan"))
        x = x_of(num, num)
        assert torch.equal(runner("", {"x": x}).total, x.sum(1))
        assert not bool(toy.seen[:num].isnan().any())


def test_an_input_that_is_the_buffer_itself_is_read_as_it_is_seen():
    shared = torch.arange(9.0, device=DEVICE).view(3, 3)
    square = BufferSpec("square", lambda n: (3, 3), torch.float32, pad=0, axis=None)
    setup = Setup(pick_capture(True, DEVICE), Counters(), DEVICE, (2,), shared={"square": shared})
    runner = GraphRunner("toy", lambda variant, x, square: x @ square, [X, square], setup)
    build([runner], setup.capture, lower="something")
    x = x_of(2)
    for view in (shared, shared.t()):
        shared.copy_(torch.arange(9.0).view(3, 3))
        expected = x @ view.clone()
        assert torch.equal(runner("", {"x": x, "square": view}), expected)


def test_hints_reach_eager_runs_only():
    runner, _, counters = make()
    assert torch.equal(runner("", {"x": x_of(2)}, scale=2.0).total, x_of(2).sum(1))
    assert torch.equal(runner("", {"x": x_of(9)}, scale=2.0).total, x_of(9).sum(1) * 2.0)
    assert counters.runners["toy"].rejects == {"the batch is larger than the largest bucket": 1}
    assert counters.forwards[ForwardMode.DECODE].eager == 1


def test_strict_raises_where_nothing_can_replay():
    runner, _, counters = make(strict=True)
    with pytest.raises(GraphError, match="toy of 9 requests cannot replay: the batch is larger"):
        runner("", {"x": x_of(9)})
    assert counters.runners["toy"].eager == 0
    runner("", {"x": x_of(8)})


def test_inputs_are_padded_along_their_axis():
    runner, _, _ = make(inputs=(X, BIAS))
    bias = torch.arange(6, device=DEVICE).view(2, 3)
    x = x_of(3)
    assert torch.equal(runner("", {"x": x, "bias": bias}).total, x.sum(1) + bias.sum(0))
    assert bool((runner._buffers.tensors["bias"][:, 3:4] == 5).all())


def test_wrong_inputs_are_named():
    runner, _, _ = make()
    with pytest.raises(ValueError, match=r"gives inputs \['x', 'y'\]: expected \['x'\]"):
        runner("", {"x": x_of(2), "y": x_of(2)})
    with pytest.raises(ValueError, match=r"got none of its inputs \['x'\]"):
        runner("", {})
    with pytest.raises(ValueError, match=r"expected torch\.float32 of shape"):
        runner("", {"x": x_of(2).double()})
    with pytest.raises(ValueError, match=r"shape \(2, 2\)"):
        runner("", {"x": x_of(2)[:, :2]})
    with pytest.raises(ValueError, match=r"input 'x' of toy is \[1\]: expected a tensor with axis 0"):
        runner("", {"x": [1]})
    runner, _, _ = make(inputs=(X, BIAS))
    with pytest.raises(ValueError, match=r"input 'bias' is \[1\]: expected a tensor"):
        runner("", {"x": x_of(2), "bias": [1]})


def test_replays_keep_no_history_for_a_backward_pass():
    layer = torch.nn.Linear(3, 3, device=DEVICE)
    runner, _, _ = make(body=lambda variant, x: layer(x))
    for _ in range(2):
        x = x_of(3).requires_grad_()
        out = runner("", {"x": x})
        assert not out.requires_grad
        assert torch.equal(out, layer(x))


def test_mistakes_in_a_setup_are_named():
    for wrong in ((4, 2), (0, 2), (2, 2)):
        with pytest.raises(ValueError, match=r"buckets=.*: expected sizes of at least 1, ascending"):
            make(buckets=wrong)
    with pytest.raises(ValueError, match=r"inputs \['x', 'x'\]: expected distinct names"):
        make(inputs=(X, X))
    with pytest.raises(ValueError, match=r"pad=0.5 of input 'x': torch.int64 holds 0 instead"):
        BufferSpec("x", lambda n: (n,), torch.int64, pad=0.5)
    with pytest.raises(ValueError, match=r"pad=1099511627776 of input 'x': too large for torch.int32"):
        BufferSpec("x", lambda n: (n,), torch.int32, pad=1 << 40)
    with pytest.raises(ValueError, match=r"pad=70000.0 of input 'x': too large for torch.float16"):
        BufferSpec("x", lambda n: (n,), torch.float16, pad=7e4)
    for wrong in (torch.zeros(8, 3).double(), torch.zeros(4, 3), torch.zeros(8, 2), torch.zeros(8)):
        setup = Setup(RecordedCapture(), Counters(), torch.device("cpu"), BUCKETS, shared={"x": wrong})
        with pytest.raises(ValueError, match=r"shared as input 'x' is .*expected torch.float32 of shape \(8, 3\)"):
            GraphRunner("toy", Toy(Counters()), [X], setup)
    with pytest.raises(ValueError, match="device='cpu': CUDA graphs need a CUDA device; use RecordedCapture"):
        FullCapture(torch.device("cpu"))
    for buckets in (batch_buckets, token_buckets):
        with pytest.raises(ValueError, match="at most 0: expected sizes of at least 1"):
            buckets(0)
    runner = GraphRunner(
        "toy", Toy(Counters()), [X], Setup(RecordedCapture(), Counters(), DEVICE, BUCKETS, strict=True)
    )
    with pytest.raises(GraphError, match=r"not made yet: build\(\) makes them"):
        runner("", {"x": x_of(2)})


def test_outputs_belong_to_the_batch_until_the_next_run():
    runner, _, _ = make()
    first = runner("", {"x": x_of(2, 1)}).total
    runner("", {"x": x_of(4, 2)})
    assert torch.equal(first, x_of(2, 1).sum(1)), "another bucket must not write here"
    runner("", {"x": x_of(2, 3)})
    assert torch.equal(first, x_of(2, 3).sum(1)), "outputs are static"


def test_nothing_is_captured_once_sealed():
    runner, toy, counters = make()
    runs = int(toy.runs)
    runner("unseen", {"x": x_of(2)})
    assert counters.runners["toy"].rejects == {"variant 'unseen' was not captured": 1}
    assert int(toy.runs) == runs + 1
    for step in (runner.warm_up, runner.capture):
        with pytest.raises(GraphError, match="phase SEALED"):
            step(ShapeKey("toy", 2, "unseen"))


def test_a_capture_needs_its_warm_up():
    capture = pick_capture(True, DEVICE)
    runner = GraphRunner("toy", Toy(Counters()), [X], Setup(capture, Counters(), DEVICE, BUCKETS))
    with pytest.raises(AssertionError, match="was not warmed up"):
        runner.capture(runner.keys[0])


def test_graphs_are_made_largest_first_after_all_warm_ups():
    order = []

    class Spy(type(pick_capture(True, DEVICE))):
        def warm_up(self, body):
            order.append("warm")
            super().warm_up(body)

        def capture(self, body):
            order.append("capture")
            return super().capture(body)

        def release_cache(self):
            order.append("release")
            super().release_cache()

    capture = Spy(DEVICE) if DEVICE.type == "cuda" else Spy()
    runner, _, _ = make(capture)
    assert order == ["warm"] * 4 + ["release"] + ["capture"] * 4 + ["release"]
    assert [key.size for key in runner.captured] == [8, 4, 2, 1]
    assert all(c.seconds > 0 and c.forwards[ForwardMode.DECODE] == 1 for c in runner.captured.values())


def test_eager_captures_nothing_and_pads_nothing():
    runner, toy, counters = make(EagerCapture())
    assert not runner.captured and runner.keys == []
    toy.seen.fill_(0)
    assert torch.equal(runner("", {"x": x_of(3)}, scale=3.0).total, x_of(3).sum(1) * 3.0)
    assert not bool(toy.seen[3:].any())
    assert counters.runners["toy"].rejects == {"graphs are off": 1}


def failing(error, sizes, phase_runs):
    """Return a body that raises `error` at `sizes`, in its run number `phase_runs` at each size."""
    runs = {}

    def body(variant, x):
        n = x.shape[0]
        runs[n] = runs.get(n, 0) + 1
        if n in sizes and runs[n] == phase_runs:
            raise error
        return x * 2

    return body


@pytest.mark.parametrize("run", [1, 2], ids=["warm-up", "capture"])
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried a lot"),
        RuntimeError("CUDA error: out of memory\nTried a lot"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["torch", "cuda", "cublas"],
)
def test_out_of_memory_names_the_bucket_and_smaller_ones_still_work(error, run):
    body = failing(error, {8, 2}, run)
    with pytest.warns(UserWarning) as caught:
        runner, _, counters = make(body=body)
    assert [str(w.message).split(":")[0] for w in caught] == ["no graph for toy of 8", "no graph for toy of 2"]
    assert "lower something" in str(caught[0].message) and "Tried" not in str(caught[0].message)
    for num in (8, 4, 2, 1):
        assert torch.equal(runner("", {"x": x_of(num)}), x_of(num) * 2)
    assert counters.runners["toy"].replays == 3, "a batch of 2 takes the graph of 4"
    assert counters.runners["toy"].rejects == {"out of memory when it was captured": 1}


def test_what_cannot_be_captured_is_said_once_and_runs_eagerly():
    body = failing(RuntimeError("operation not permitted when stream is capturing\nhelp"), {8}, 2)
    with pytest.warns(
        UserWarning, match=r"no graph for toy of 8: it does something that cannot be captured \(operation"
    ) as caught:
        runner, _, counters = make(body=body)
    assert len(caught) == 1
    for num in (8, 4, 2, 1):
        assert torch.equal(runner("", {"x": x_of(num)}), x_of(num) * 2)
    assert counters.runners["toy"].rejects == {"it does something that cannot be captured": 4}


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("host read")])
def test_strict_refuses_an_incomplete_build(error):
    with pytest.raises(GraphError, match="strict: no graph for toy of 8") as caught:
        make(body=failing(error, {8}, 2), strict=True)
    assert caught.value.__cause__ is error


def test_an_error_of_the_callable_itself_is_not_hidden():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="a bug"):
            make(body=failing(RuntimeError("a bug"), {8}, 1))


def test_an_error_in_a_replay_leaves_the_runner_usable():
    runner, _, _ = make()
    graph = runner.captured[ShapeKey("toy", 2)].graph
    replay = graph.replay
    graph.replay = lambda: (_ for _ in ()).throw(RuntimeError("gone"))
    with pytest.raises(RuntimeError, match="gone"):
        runner("", {"x": x_of(2)})
    graph.replay = replay
    assert torch.equal(runner("", {"x": x_of(2)}).total, x_of(2).sum(1))


@pytest.mark.gpu
def test_a_host_read_in_a_capture_spoils_nothing_else():
    """CUDA aborts the capture; the pool, the other runner and the next engine stay usable."""

    def reads(variant, x):
        return x * 2 if float(x.sum()) > -1e9 else x

    for _ in range(2):
        counters, capture = Counters(), pick_capture(True, DEVICE)
        setup = Setup(capture, counters, DEVICE, BUCKETS)
        bad, good = GraphRunner("bad", reads, [X], setup), GraphRunner("good", lambda variant, x: x * 3, [X], setup)
        with pytest.warns(
            UserWarning, match="no graph for bad of 8: it does something that cannot be captured"
        ) as caught:
            build([bad, good], capture, lower="something")
        assert len([w for w in caught if "no graph" in str(w.message)]) == 1
        for num in (8, 3, 1):
            assert torch.equal(bad("", {"x": x_of(num)}), x_of(num) * 2)
            assert torch.equal(good("", {"x": x_of(num)}), x_of(num) * 3)
        assert counters.runners["good"].replays == 3 and counters.runners["bad"].eager == 3


@pytest.mark.gpu
def test_bodies_share_a_beginning():
    """It is captured once per size; both bodies continue from its results."""
    begun, capture = [], pick_capture(True, DEVICE)

    def body(variant, x):
        doubled = capture.shared(len(x), lambda: begun.append(len(x)) or x * 2)
        return doubled * doubled if variant == "square" else doubled + 1

    setup = Setup(capture, Counters(), DEVICE, BUCKETS, variants=("next", "square"))
    runner = GraphRunner("shares", body, [X], setup)
    build([runner], capture, lower="something")
    assert begun[2 * len(BUCKETS) :] == sorted(BUCKETS, reverse=True)  # after warm-ups
    for num in (8, 3, 1, 8):
        assert torch.equal(runner("square", {"x": x_of(num)}), (x_of(num) * 2) ** 2)
        assert torch.equal(runner("next", {"x": x_of(num)}), x_of(num) * 2 + 1)


def test_captures_by_device_and_wish():
    cpu = torch.device("cpu")
    assert pick_capture(None, cpu).name == "eager" == pick_capture(False, DEVICE).name
    assert isinstance(pick_capture(True, cpu), RecordedCapture)
    if DEVICE.type == "cuda":
        assert isinstance(pick_capture(None, DEVICE), FullCapture)


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_alone_shows_a_bar(monkeypatch, rank):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress_bar(3, "graphs", "graph") as bar:
        assert bool(bar.disable) is (rank == 1)


def test_inputs_of_batches_that_run_eagerly_are_checked_too():
    """One row for five would be broadcast."""
    capture = RecordedCapture()
    inputs = [BufferSpec(name, lambda n: (n, 4), torch.float32, pad=0) for name in ("x", "y")]
    setup = Setup(capture, Counters(), torch.device("cpu"), buckets=(2,))
    runner = GraphRunner("sum", lambda variant, x, y: x + y, inputs, setup)
    build([runner], capture, lower="buckets")
    x = torch.ones(5, 4)
    assert runner("", {"x": x, "y": x}).shape == (5, 4) and setup.counters.runners["sum"].eager == 1
    for wrong in ({"x": x, "y": x[:1]}, {"x": x, "y": x.double()}, {"x": x}, {"x": x, "y": x, "z": x}):
        with pytest.raises(ValueError, match=r"input 'y' is|a batch gives inputs"):
            runner("", wrong)
