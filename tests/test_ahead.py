"""Kernels compiled ahead: bodies are rehearsed at sizes that need different kernels, launch nothing, and read zeros."""

import itertools
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import specdec
from specdec.backends import BACKENDS, TorchBackend, comm, compiling_kernels
from specdec.backends.library import define_op
from specdec.core.prefill.whole import WholeProgram
from specdec.graphs import BufferSpec, Counters, GraphRunner, RecordedCapture, Setup, build, rehearse
from specdec.graphs.captures import EagerCapture
from specdec.graphs.compile.trace import trace
from specdec.graphs.once import equal_parts_once, is_once
from tests.heads import ALGOS, random_draft
from tests.tiny_models import DEVICE, tiny_model

triton = pytest.importorskip("triton")
from specdec.backends.triton.launch import ahead  # noqa: E402
from specdec.backends.triton.launch.relaunch import CachedLaunch  # noqa: E402

tl = pytest.importorskip("triton.language")


@triton.jit
def _add_kernel(x, amount, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x + i, tl.load(x + i) + amount)


class Within:
    """A context that records calls; `num_compiled` kernels must be compiled in it."""

    def __init__(self, num_compiled=1):
        self.told, self.num_compiled = [], num_compiled

    def __enter__(self):
        self.told.append("enter")
        return lambda: self.num_compiled

    def __exit__(self, *error):
        self.told.append("exit")


def test_a_size_for_each_power_of_two_is_rehearsed_in_every_variant_and_warmed_up_again():
    within, buckets, phase = Within(), (1, 2, 3, 4, 5, 6, 7, 8, 9), ["rehearsed"]

    def body(variant, rows):
        within.told.append((phase[0], variant, rows.shape[0], is_once()))
        if phase[0] == "rehearsed" and rows.shape[0] == 9:
            raise RuntimeError("found zeros where it wants ones")
        return rows

    specs = [BufferSpec("rows", lambda n: (n,), torch.int64, pad=0)]
    capture = RecordedCapture()
    setup = Setup(capture, Counters(), torch.device("cpu"), buckets, variants=("a", "b"))
    runner = GraphRunner("echo", body, specs, setup)
    rehearse([runner], None)
    assert within.told == []
    rehearse([runner], within, lambda: within.told.append("prepared"))
    assert within.told[:2] == ["enter", "prepared"] and within.told[-1] == "exit"
    assert within.told[2:-1] == [("rehearsed", v, n, True) for n in (9, 1, 2, 4, 8) for v in "ab"]
    within.told, within.num_compiled = [], 0
    rehearse([runner], within)
    assert within.told[1:-1] == [("rehearsed", v, 9, True) for v in "ab"]  # all their kernels are found
    within.told, phase[0] = [], "built"
    build([runner], capture, lower="nothing")
    for is_warm_up in (True, False):
        assert [t for t in within.told if t[3] == is_warm_up] == [
            ("built", v, n, is_warm_up) for n in reversed(buckets) for v in "ab"
        ]


def test_below_the_largest_size_some_variants_are_rehearsed():
    within, met = Within(), []
    specs = [BufferSpec("rows", lambda n: (n,), torch.int64, pad=0)]
    variants = {"variants": ("a", "b", "c"), "rehearsed": ("a", "c")}
    setup = Setup(RecordedCapture(), Counters(), torch.device("cpu"), (1, 2, 3), **variants)
    rehearse([GraphRunner("echo", lambda v, rows: met.append((v, rows.shape[0])), specs, setup)], within)
    assert met == [("a", 3), ("b", 3), ("c", 3), ("a", 1), ("c", 1), ("a", 2), ("c", 2)]


def test_one_kind_of_sampling_meets_all_kernels_that_sizes_change():
    """Whole prefills use other attention kernels if nothing is cached: both variants are rehearsed."""
    settings = {"max_batch": 2, "max_seq_len": 64, "cuda_graph": True, "prefill_graph": "whole", "backend": "triton"}
    core = specdec.attach(tiny_model("llama").to(DEVICE), **settings, prefill_buckets=[8], graph_batches=[1])._core
    whole = core.prefill.whole.runner.runner
    assert whole.variants == ("greedy, fresh", "filtered, fresh", "greedy", "filtered")
    assert whole.rehearsed == ("greedy, fresh", "greedy")
    rounds = core.launcher.rounds.runners.values()
    assert [r.rehearsed for r in rounds] == [("greedy",), ("greedy",)]
    assert all(len(r.variants) > 1 for r in rounds)


def test_ranks_are_not_asked_and_their_parts_are_zero():
    """No communicator of that name exists: outside a rehearsal that is an error."""
    x = torch.ones(3, 4)
    with torch.inference_mode(), ahead._Zeros():
        found = [comm.all_reduce(x, "none"), comm.all_gather(x, 2, "none"), comm.broadcast(x, "none")]
    assert [tuple(t.shape) for t in found] == [(3, 4), (3, 8), (3, 4)] and all(not t.any() for t in found)
    with pytest.raises(RuntimeError, match="no communicator"):
        comm.all_reduce(x, "none")


def test_what_a_kernel_would_have_filled_is_zero():
    given = torch.ones(3, 4, dtype=torch.int64)
    with torch.inference_mode(), ahead._Zeros():
        found = [torch.empty(5), torch.empty_like(given), given.new_empty(2), torch.empty_strided((2, 3), (1, 2))]
        found.append(torch.empty_like(given.t()))
        kept = given + 1
    assert all(not t.any() for t in found) and (kept == 2).all()


def test_within_ops_of_ours_too():
    """They compute indices for torch's or Inductor's kernels, which must not read out of bounds."""
    row = torch.arange(4.0)

    def choose(x):
        unfilled = torch.empty(1000, dtype=torch.int64)
        return torch.cat([unfilled.float(), row[unfilled]])

    define_op("unfilled_choices(Tensor x) -> Tensor", choose, lambda x: x.new_empty(2000))
    dirty = [torch.full((1000,), 7) for _ in range(20)]
    del dirty
    with torch.inference_mode(), ahead._Zeros():
        found = torch.ops.specdec.unfilled_choices.default(torch.ones(2))
    assert not found[:1000].any() and not found[1000:].any()


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.num_products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def test_equal_pieces_of_a_trace_run_once():
    layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(6))

    def run(x):
        for layer in layers:
            x = torch.ops.aten.sin(layer(x)) + x
        return x

    traced = trace(run, (torch.randn(16, 8),), (torch.ops.aten.sin.default,), "eager")
    x = torch.randn(5, 8)
    for is_short, num in ((False, 6), (True, 2), (False, 6)):  # the first piece and five equal ones
        with torch.no_grad(), Counting() as counted:
            if not is_short:
                torch.testing.assert_close(traced(x)[0], run(x))
                num *= 2
            else:
                with equal_parts_once():
                    assert traced(x)[0].shape == x.shape
        assert counted.num_products == num


def test_rehearsals_of_two_threads_come_one_after_the_other():
    """Else the first to end would let the other's launches run, on uninitialised data."""
    run, inside, second = ahead.JITFunction.run, threading.Event(), []

    def rehearse_too():
        inside.set()
        with ahead._without_launches("specdec"):
            second.append(ahead.JITFunction.run)

    with ahead._without_launches("specdec"):
        first = ahead.JITFunction.run
        thread = threading.Thread(target=rehearse_too)
        thread.start()
        inside.wait()
        thread.join(0.1)
        assert ahead.JITFunction.run is first and not second
    thread.join()
    assert len(second) == 1 and ahead.JITFunction.run is run and not ahead.is_rehearsing()


def test_indices_are_zero_and_write_nothing():
    rows, far = torch.arange(12.0).view(3, 4), torch.tensor([7, -9])
    with torch.inference_mode(), ahead._Zeros():
        found = [rows[far], rows.index_select(0, far), rows.gather(0, far.view(1, 2)), rows[:, far].t()[:1]]
        rows[far] = -1.0
        rows.index_copy_(0, far, torch.ones(2, 4))
        masked = rows[torch.tensor([True, False, True])]
        embedded = torch.nn.functional.embedding(far, rows)
    assert all(torch.equal(t, rows[:1].expand_as(t)) for t in (*found[:2], embedded))
    assert (found[2] == torch.tensor([0.0, 1.0])).all() and torch.equal(rows, torch.arange(12.0).view(3, 4))
    assert torch.equal(masked, rows[::2])


def test_only_what_may_run_without_its_launches_is_rehearsed(monkeypatch):
    ours, cuda = BACKENDS["triton"]().__new__(BACKENDS["triton"]()), torch.device("cuda", 0)
    theirs = TorchBackend.__new__(TorchBackend)
    assert compiling_kernels([ours, ours], cuda) is not None
    assert compiling_kernels([ours, theirs], cuda) is None and compiling_kernels([ours], torch.device("cpu")) is None
    assert [BACKENDS[name]().rehearses for name in ("flashinfer", "triton+flashinfer")] == [False, True]
    monkeypatch.setenv("SPECDEC_AHEAD", "0")
    assert compiling_kernels([ours], cuda) is None


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a wrong index would end CUDA for this process")
@pytest.mark.parametrize(
    ("algo", "shape"), [("lookup", (3, 1, 4)), *itertools.product(ALGOS, [(3, 1, 4), (3, 4, 12)])], ids=str
)
def test_every_body_can_do_without_its_launches(monkeypatch, algo, shape):
    model = tiny_model("llama")
    draft = None if algo == "lookup" else random_draft(model, algo)
    names = ("num_steps", "topk", "num_draft_tokens")
    settings = {"max_batch": 2, "max_seq_len": 64, "synthetic_acceptance": (0.9, 0.5, 0.2)}
    drafted = dict(zip(names, shape, strict=True))
    engine = specdec.attach(model, draft, algo=algo, backend="triton", **drafted, **settings)
    core = engine._core
    monkeypatch.setattr("triton.runtime.interpreter.GridExecutor.__call__", lambda *args, **kwargs: None)
    rows = torch.tensor([0, 1])
    with torch.inference_mode(), ahead._Zeros():
        hidden = torch.full((2, core.target.spec.hidden_size), torch.nan)
        for kind in ("greedy", "sampled", "filtered", "processed_greedy", "processed"):
            core.round.play(kind, rows)
            core.round.first_tokens(kind, rows, core.target.head(hidden))
        whole = WholeProgram(core.prefill.programs._parts, core.round, EagerCapture())
        whole.run("greedy, fresh", torch.zeros(16, 2, dtype=torch.int64), torch.zeros(4, 8, dtype=torch.int64))


@pytest.mark.gpu
def test_a_rehearsal_compiles_and_launches_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    compiled, x = [], torch.zeros(64, device=DEVICE)
    listener = lambda src, **_told: compiled.append(src.name)  # noqa: E731
    monkeypatch.setattr(triton.knobs.compilation, "listener", listener)
    launch, other = CachedLaunch(_add_kernel), torch.zeros(32, device=DEVICE)

    def in_another_thread():
        _add_kernel[(1,)](other, 1.0, N=32)
        torch.cuda.synchronize()

    with ahead.compiling_ahead(DEVICE, package=__name__.partition(".")[0]) as num_compiled:
        assert num_compiled() == 0 and ahead.is_rehearsing() and _add_kernel[(1,)](x, 1.0, N=64) is None
        launch((1,), x, 1.0, N=16)
        assert num_compiled() == 2
        thread = threading.Thread(target=in_another_thread)
        thread.start()
        thread.join()
    assert not ahead.is_rehearsing()
    assert not x.any() and (other == 1).all()
    _add_kernel[(1,)](x, 1.0, N=64)  # both launches wait for their own kernel
    launch((1,), x, 1.0, N=16)
    assert compiled == ["_add_kernel"] * 3
    assert (x[:16] == 2).all() and (x[16:] == 1).all()


def test_a_rehearsal_ends_while_kernels_are_compiled_and_launches_find_them():
    compiled, kernels = threading.Event(), {}
    with ThreadPoolExecutor(1) as pool:
        with ahead._Unawaited(pool) as mode:
            awaited = mode.submit("source", lambda: compiled.wait(60) and "kernel", lambda k: kernels.update(key=k))
            assert mode.submit("source", pytest.fail, lambda k: kernels.update(other=k)) is awaited
        assert kernels == {"key": awaited, "other": awaited}
        compiled.set()
        assert awaited.result() == "kernel" == kernels["key"]


COMPILED_ELSEWHERE = """if True:
    from concurrent.futures import ThreadPoolExecutor
    import torch, triton
    from triton.runtime.driver import driver
    from specdec.backends import compiling_kernels
    from specdec.backends.triton.attention.tables import _tables_kernel
    from specdec.backends.triton.launch import workers
    from tests.compile_kernels import CompileOnly

    class Workers(ThreadPoolExecutor):
        def submit(self, fn):
            return super().submit(lambda: workers.compile_in_worker(fn) or fn())

    def compile(width):
        tensors = torch.int64, torch.float32, torch.bfloat16, torch.bfloat16
        with Workers(1) as pool, triton.AsyncCompileMode(pool):
            _tables_kernel.warmup(*tensors, 1.0, WIDTH=width, TIMES=2, BLOCK=width, grid=(1,)).result()

    found, workers.MOST = [], 1
    driver.set_active(CompileOnly(90))
    triton.knobs.compilation.listener = lambda cache_hit, **_: found.append(cache_hit)
    with workers.compile_workers("model"):
        compile(32)  # nothing waits for the worker
        idle = workers._CURRENT[0]._idle
        worker = idle.get()
        assert worker.poll(60)
        idle.put(worker)
        compile(64)
        idle.get().close()
        idle.put(workers.Pipe()[0])  # of a worker that is gone
        compile(128)
    try:
        with workers.compile_workers("another"):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert not workers._CURRENT
    for name, is_cached in (("another", False), ("another", True), ("model", True)):
        with workers.compile_workers(name):
            ahead = compiling_kernels((), torch.device("cuda"))
            assert workers.kernels_are_cached() == is_cached == (ahead is None), name
            compile(64 * 2**len(found))
    assert not workers.kernels_are_cached()
    assert found == [False, True, False, False, False, False], found
"""


def test_worker_processes_compile_what_threads_find(tmp_path, monkeypatch):
    """Runs in a separate process. Without a worker that is ready, threads compile themselves."""
    for name, value in (("TRITON_INTERPRET", "0"), ("TRITON_CACHE_DIR", str(tmp_path)), ("PYTHONPATH", ".")):
        monkeypatch.setenv(name, value)
    subprocess.run([sys.executable, "-c", COMPILED_ELSEWHERE], check=True, timeout=120)
