"""Kernels compared with their twins at attach: correct ones pass with a margin, wrong ones are named and refused."""

import re
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

import specdec
from specdec.backends import LayerSpec, TorchBackend, attention_check, experts
from specdec.backends.attention_check import attention_checks
from specdec.backends.differences import Check, allowed, largest_difference
from specdec.backends.experts import check as experts_check
from specdec.backends.experts.check import expert_checks
from specdec.backends.recurrent import check as recurrent_check
from specdec.backends.recurrent.check import recurrent_checks
from specdec.backends.recurrent.reference import TORCH_RECURRENT
from specdec.backends.recurrent.state_pool import ConvSpec, ScanSpec, StatePool
from specdec.backends.sample_tree import Tail, sample_tree
from specdec.backends.triton.backend import TritonBackend
from specdec.backends.triton.experts import products as expert_kernels
from specdec.backends.triton.recurrent import chunks
from specdec.backends.triton.recurrent import ops as recurrent
from specdec.core.errors import AttachError
from specdec.reach.assembly.kernel_check import check_kernels
from specdec.reach.targets.adapters.experts import distinct_weights
from tests.recurrent_models import recurrent_model
from tests.test_attach import ragged_prompts
from tests.test_recurrent_kernels import KINDS, REAL
from tests.tiny_models import DEVICE, tiny_model

ON_GPU = DEVICE.type == "cuda"
TREE, CHAIN, ONE = Tail(6, 1), Tail(4, 0), Tail(1, 0)
LAYER = LayerSpec(4, 2, 16, 16, 0.25, window=20, softcap=30.0, has_sinks=True)
FP32, BF16 = torch.float32, torch.bfloat16
BOTH = [FP32, BF16]


@pytest.fixture
def small(monkeypatch):
    """Use sizes that suit the interpreter, with as many chunks; on a GPU keep those of attach."""
    if not ON_GPU:
        monkeypatch.setattr(chunks, "CHUNK", {"head": 16, "key": 16})
        monkeypatch.setattr(recurrent_check, "LONG", dict.fromkeys(chunks.CHUNK, (19, 5)) | {"state": (18, 3)})
        monkeypatch.setattr(recurrent_check, "SHORT", dict.fromkeys(("head", "key", "state"), (1, 2)))
        monkeypatch.setattr(attention_check, "WIDTHS", (40, 40))
        monkeypatch.setattr(attention_check, "PREFILL", (9, 2))
        monkeypatch.setattr(experts_check, "NUM_TOKENS", 4)
        monkeypatch.setattr(experts_check, "AVERAGES", (1, 10))


def pool_of(spec, ops, dtype=FP32):
    return StatePool([spec, spec], 2, 6, dtype, DEVICE, ops)


def assert_room(checks, share=0.5):
    """Check that errors are far below their limits, without TF32, which users may enable."""
    assert checks
    for check in checks:
        for what, error, limit in check.errors():
            assert error <= share * limit, (check.subject, what)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("delta", BF16), ("delta by key", FP32), ("ssd", FP32), ("s6", FP32), ("conv 4", BF16)],
)
def test_recurrent_kernels_pass(kind, dtype, small):
    pool = pool_of(KINDS[kind], recurrent.TRITON_RECURRENT, dtype)
    (check,) = checks = recurrent_checks(pool, TREE if dtype == FP32 else ONE, 4, dtype)
    assert_room(checks, 0.1 if kind != "conv 4" else 0.5)
    assert re.match(r"triton, (Scan|Conv)Spec\(", check.subject)
    assert not recurrent_checks(pool_of(KINDS[kind], TORCH_RECURRENT), TREE, 4, dtype), "a twin needs none"


@pytest.mark.parametrize("dtype", BOTH, ids=str)
def test_attention_passes(dtype, small):
    assert_room(attention_checks(TritonBackend(), [LAYER, replace(LAYER, turn=1)], dtype, DEVICE, [TREE, CHAIN]))


@pytest.mark.parametrize(("is_transposed", "dtype"), [(False, FP32), (True, BF16)])
def test_experts_pass(is_transposed, dtype, monkeypatch, small):
    monkeypatch.setattr(experts, "grouped_linear", expert_kernels.grouped_linear)
    weight, bias = torch.randn(5, 40, 24, device=DEVICE).to(dtype), torch.randn(5, 40, device=DEVICE).to(dtype)
    given = (weight.transpose(1, 2).contiguous(), bias) if is_transposed else (weight, None)
    checks = expert_checks(*given, is_transposed)
    assert_room(checks)
    assert not expert_checks(weight.double(), None, False), "fp64 has no kernel"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*BOTH, torch.float16], ids=str)
def test_real_sizes_have_room(dtype):
    """The checks of attach for models in use: no error here is near its limit, on any GPU."""
    convs = [ConvSpec(8192, 4), ConvSpec(5376, 4)]
    for spec in [*REAL.values(), *convs]:
        pool = StatePool([spec], 1, 1, dtype, DEVICE, recurrent.TRITON_RECURRENT)
        assert_room(recurrent_checks(pool, Tail(24, 1), 4, dtype), 0.1 if isinstance(spec, ScanSpec) else 0.5)
    layers = [
        LayerSpec(32, 8, 128, 128, 128**-0.5),
        LayerSpec(16, 2, 256, 256, 0.0625),
        LayerSpec(64, 8, 64, 64, 0.125, window=128, has_sinks=True),
        LayerSpec(8, 4, 256, 256, 0.0625, window=4096, softcap=50.0),
        LayerSpec(128, 128, 192, 128, 192**-0.5),
    ]
    assert_room(attention_checks(TritonBackend(), layers, dtype, DEVICE, [Tail(24, 1), CHAIN, ONE, Tail(200, 4)]))
    random = torch.Generator(DEVICE).manual_seed(0)
    for num_experts, num_columns, num_features in ((8, 2816, 1024), (128, 1536, 2048), (512, 1024, 2048)):
        weight = torch.randn(num_experts, num_columns, num_features, generator=random, device=DEVICE, dtype=dtype)
        assert_room(expert_checks(weight * num_features**-0.5, None, False))
        assert_room(expert_checks((weight * num_features**-0.5).transpose(1, 2).contiguous(), None, True))


def nudged(op):
    """Return `op` with one element off by the root mean square of all."""

    def wrong(*args):
        out = op(*args)
        flat = out.view(-1)
        flat[flat.numel() // 2] += out.float().square().mean().sqrt().item()
        return out

    return wrong


def wrong_folder(layers):
    commit = TORCH_RECURRENT.folder(layers)

    def wrong(slot_table, rows, seq_lens, accept_index):
        commit(slot_table, rows, seq_lens, accept_index)
        layers[0].state[rows[0]].view(-1)[5] += 1

    return wrong


@pytest.mark.parametrize("kind", ["delta", "conv 4"])
@pytest.mark.parametrize(
    ("field", "told"),
    [
        ("extend", r"_extend of \d+ and \d+ tokens differs"),
        ("tail", r"_tail of nodes 0 to 2 differs"),
        ("fold", "fold"),
    ],
)
@pytest.mark.parametrize("dtype", BOTH, ids=str)
def test_a_wrong_recurrent_kernel_is_named(kind, field, told, dtype):
    op = ("conv_" if kind == "conv 4" else "scan_") + field
    own = {"folder": wrong_folder} if field == "fold" else {op: nudged(getattr(TORCH_RECURRENT, op))}
    ops = replace(TORCH_RECURRENT, name="wrong", **own)
    (check,) = recurrent_checks(pool_of(KINDS[kind], ops, dtype), TREE, 4, dtype)
    problems = check.problems()
    assert re.search(told, problems[0]) and "wrong, " in problems[0] and "allowed: " in problems[0]
    assert repr(KINDS[kind]) in problems[0]


class WrongBackend(TorchBackend):
    name = "wrong"

    def _attend(self, call):
        super()._attend(call)
        call.out[-1, 1, 3] = float("nan")


def test_wrong_attention_is_named():
    problems = [p for c in attention_checks(WrongBackend(), [LAYER], FP32, DEVICE, [TREE]) for p in c.problems()]
    assert len(problems) == 2 and "a prefill differs" in problems[0] and "a tree of 6 differs" in problems[1]
    assert all("wrong, attention of LayerSpec(" in p and "by nan" in p for p in problems)


def test_damaged_weights_are_not_the_kernels_fault(monkeypatch):
    weight = torch.randn(4, 8, 16, device=DEVICE)
    weight[0, 2, 3], weight[3, 1] = float("nan"), float("inf")
    (check,) = expert_checks(weight, None, False)
    assert not check.problems()
    monkeypatch.setattr(experts, "grouped_linear", nudged(experts.grouped_linear))
    assert "experts [4, 8, 16]: grouped_linear of" in check.problems()[0]


def test_differences():
    theirs = torch.tensor([[1.0, -1.0, 1.0, 1.0], [1e-3, 1e-3, 0.0, 0.0], [0.0] * 4])
    assert float(largest_difference(theirs, theirs)) == 0
    ours = theirs.clone()
    ours[1, 2] = 5e-4
    assert 0.7 < float(largest_difference(ours, theirs)) < 0.72
    ours[2, 0] = 1e-9
    assert float(largest_difference(ours, theirs)) > 1e6, "where nothing is, nothing may be"
    assert allowed(BF16, DEVICE) > allowed(torch.float16, DEVICE) > allowed(FP32, DEVICE)


@pytest.mark.parametrize("num_words", [1, 2])
def test_trees_name_their_ancestors(num_words):
    tree = sample_tree(Tail(64, num_words), DEVICE)
    assert tree.bits.shape == (64, num_words) and tree.path == (0, 1, 3, 7, 15, 31, 63)
    for node in (0, 1, 40, 63):
        seen = [n for n in range(64) if int(tree.bits[node, 0]) >> n & 1]
        assert seen[-1] == node and len(seen) == int(tree.depths[node]) + 1
        assert all((b - 1) // 2 == a for a, b in pairwise(seen))


@pytest.fixture
def subjects(monkeypatch, small):
    """Record what attach checks, without bits, which take a minute in the interpreter: see test_bits.py."""
    monkeypatch.setattr("specdec.reach.assembly.assemble.check_bits", lambda core: "equal")
    seen, problems = [], Check.problems
    monkeypatch.setattr(Check, "problems", lambda check: seen.append(check.subject) or problems(check))
    return seen


def attached(model, **settings):
    return specdec.attach(model, None, algo=None, backend="triton", max_batch=1, max_seq_len=64, **settings)


def random_states():
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if ON_GPU else [])]


def test_attach_checks_all_kernels(subjects, monkeypatch):
    """Of a target and of a draft that is another model, without changing the user's random state."""
    model, draft = recurrent_model("qwen3_next").to(DEVICE), recurrent_model("lfm2").to(DEVICE)
    have_stayed = []

    def watched(parts):
        before = random_states()
        check_kernels(parts)
        have_stayed.append(all(map(torch.equal, before, random_states())))

    monkeypatch.setattr("specdec.reach.assembly.assemble.check_kernels", watched)
    settings = {"num_steps": 2, "max_batch": 1, "max_seq_len": 64, "backend": "triton", "cuda_graph": False}
    engine = specdec.attach(model, draft, prefill_graph="off", check_kernels=True, **settings)
    assert have_stayed == [True]
    kinds = [re.split(r"[(\[]", subject)[0] for subject in subjects]
    assert kinds == [
        *("triton, attention of LayerSpec", "triton, ConvSpec", "triton, ScanSpec"),
        *("triton, attention of LayerSpec", "triton, ConvSpec"),
        *("experts ", "experts "),
    ]
    assert len(distinct_weights(model)) == 2 and not distinct_weights(draft)
    engine.detach()


@pytest.mark.parametrize("field", ["scan_extend", "conv_tail", "scan_step"])
def test_attach_refuses_wrong_kernels(field, monkeypatch, subjects):
    wrong = replace(TORCH_RECURRENT, name="triton", **{field: nudged(getattr(TORCH_RECURRENT, field))})
    monkeypatch.setattr(recurrent, "TRITON_RECURRENT", wrong)
    model = recurrent_model("qwen3_next").to(DEVICE)
    with pytest.raises(AttachError) as caught:
        attached(model, check_kernels=True)
    found, environment, advice = caught.value.reasons[0], *caught.value.reasons[-2:]
    assert re.search(rf"{field} of .* differs from its torch twin by \S+ of its size \(allowed: 1.0e-03\)", found)
    assert re.search(r"with triton \S+, torch \S+", environment) and "backend='torch'" in advice
    count = len(subjects)
    settings = {"backend": "torch", "max_batch": 1, "max_seq_len": 64, "check_kernels": True}
    engine = specdec.attach(model, None, algo=None, **settings)
    assert all(subject.startswith("experts") for subject in subjects[count:])
    engine.detach()


def test_attach_refuses_wrong_experts(monkeypatch, subjects):
    """No backend helps against them."""
    monkeypatch.setattr(experts, "grouped_linear", nudged(experts.grouped_linear.twin))
    with pytest.raises(AttachError, match=r"experts \[4, 48, 32\]: grouped_linear of .*whatever the backend") as caught:
        model, settings = recurrent_model("qwen3_next").to(DEVICE), {"max_seq_len": 64, "check_kernels": True}
        specdec.attach(model, algo=None, backend="torch", **settings)
    assert "backend='torch'" not in str(caught.value)


@pytest.mark.parametrize("is_any", [False, True])
def test_ranks_fail_alike(is_any, subjects):
    given = []
    target = SimpleNamespace(
        device=DEVICE,
        model=torch.nn.Linear(1, 1),
        dtype=FP32,
        any_rank=lambda own: given.append(own) or is_any,
    )
    context = SimpleNamespace(backend=TorchBackend(), state_pool=None)
    worker = SimpleNamespace(context=None, module=None)
    config = specdec.EngineConfig(check_kernels=True)
    parts = SimpleNamespace(
        target=target, context=context, worker=worker, config=config, compiling_kernels=lambda: None
    )
    if is_any:
        with pytest.raises(AttachError, match="on another rank"):
            check_kernels(parts)
    else:
        check_kernels(parts)
    assert given == [False]


def test_nothing_is_checked_unless_it_is_wanted(monkeypatch):
    monkeypatch.setattr(Check, "problems", lambda check: pytest.fail("checked"))
    attached(tiny_model("qwen3_moe").to(DEVICE)).detach()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*inv_freq is in low precision")
@pytest.mark.parametrize("dtype", BOTH, ids=str)
def test_attach_checks_on_a_gpu(dtype, monkeypatch):
    """All kernels are right, the engine works, and almost no memory stays allocated."""
    seen, problems = [], Check.problems
    monkeypatch.setattr(Check, "problems", lambda check: seen.append(check.subject) or problems(check))
    peaks = []

    def measured(parts):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        check_kernels(parts)
        peaks.append((torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before))

    monkeypatch.setattr("specdec.reach.assembly.assemble.check_kernels", measured)
    model = recurrent_model("qwen3_next", dtype=dtype).to(DEVICE)
    engine = specdec.attach(model, algo=None, max_batch=2, max_seq_len=128, check_kernels=True)
    assert len(seen) == 5 and {s.split(",")[0].split(" [")[0] for s in seen} >= {"triton", "experts"}
    ((most, left),) = peaks
    assert most < 64 << 20 and left < 4 << 20
    assert engine.generate(ragged_prompts()[:2], max_new_tokens=4).tokens
    engine.detach()
