"""The alternative product for few rows: the same numbers, only within a step, only where it is faster."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import specdec
from specdec.reach.targets import few_rows
from specdec.reach.targets.few_rows import MEASURED, FewRows, measure, transposed
from tests.heads import random_head
from tests.test_attach import greedy, ragged_prompts
from tests.tiny_models import tiny_model

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
MOST = MEASURED[-1]


@pytest.fixture
def always(monkeypatch):
    """Make every layer large enough, and faster transposed."""
    monkeypatch.setattr(few_rows, "LEAST_SIZE", 0)
    monkeypatch.setattr(few_rows, "measure", lambda *_: (False, *[True] * MOST))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 3, MOST])
def test_both_ways_give_the_same(num_rows, dtype):
    rows, weight = torch.randn(num_rows, 24, dtype=dtype), torch.randn(40, 24, dtype=dtype)
    out = transposed(rows, weight)
    assert out.shape == (num_rows, 40) and out.is_contiguous()
    torch.testing.assert_close(out, F.linear(rows, weight), rtol=TOLERANCE[dtype], atol=5 * TOLERANCE[dtype])


@pytest.mark.parametrize("bias", [False, True])
def test_layers_go_the_other_way_within_a_step_alone(bias, always, monkeypatch):
    model = nn.Sequential(nn.Linear(8, 16, bias=bias), nn.Linear(16, 8, bias=bias), nn.Linear(8, 16, bias=bias))
    calls, original = [], transposed
    monkeypatch.setattr(few_rows, "transposed", lambda *args: calls.append(len(args[0])) or original(*args))
    own = model[1].forward = lambda x: F.linear(x, model[1].weight, model[1].bias)  # as with accelerate's hooks
    chosen = FewRows([model, model])
    for shape in ((8,), (1, 8), (2, 3, 8), (MOST + 1, 8), (0, 8)):
        x, calls[:] = torch.randn(shape), []
        expected = model(x)
        with torch.inference_mode(), chosen.active():
            torch.testing.assert_close(model(x), expected)
        num_rows = x.numel() // 8
        assert calls == ([num_rows] * 2 if 0 < num_rows <= MOST else [])
    with pytest.raises(RuntimeError, match="in a step"), chosen.active():
        raise RuntimeError("in a step")
    assert model[1].forward is own and not any("forward" in vars(model[i]) for i in (0, 2))
    with chosen.active(), FewRows(model).active():  # of two engines, the second keeps the first one's forwards
        pass
    assert not any("forward" in vars(model[i]) for i in (0, 2))


def test_only_large_layers_of_torchs_own_kind_are_asked(monkeypatch):
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    monkeypatch.setattr(few_rows, "measure", lambda *_: pytest.fail("measured"))
    ints = nn.Linear(512, 512)
    ints.weight = nn.Parameter(ints.weight.to(torch.int8), requires_grad=False)
    others = [Scaled(512, 512), nn.Linear(16, 16), nn.Linear(512, 512, device="meta"), nn.Conv1d(512, 512, 1), ints]
    with FewRows(others).active():
        assert not any("forward" in vars(module) for module in others)


@pytest.mark.parametrize(("columns", "shape"), [(64, (1024, 64, 32)), (1 << 30, (1, 1 << 16, 32))])
def test_the_faster_way_is_taken(columns, shape, monkeypatch):
    """From four rows on, the transposed product gains less than the margin; row counts between measured ones use the
    result of the next one. The weights are just too large for caches."""
    monkeypatch.setattr(few_rows, "READ_BYTES", 1 << 23)

    def seconds(product, weights):
        num_rows = len(product.args[0])
        assert weights.shape == shape and product(weights[0]).shape == (num_rows, shape[1])
        return 1.0 if product.func is F.linear else 0.5 if num_rows < 4 else 0.9

    with monkeypatch.context() as patch:
        patch.setattr(few_rows, "_seconds", seconds)
        assert measure.__wrapped__(columns, 32, torch.float32, 1) == (False, True, True, True, *[False] * (MOST - 3))
    assert len(measure(64, 32, torch.bfloat16, 1)) == MOST + 1
    assert measure(64, 32, torch.bfloat16, 1) is measure(64, 32, torch.bfloat16, 1), "once a process"


def test_engines_give_transformers_text_that_way(always, monkeypatch):
    """Target, head and a draft that is another model; the live model's own forwards keep torch's bits."""
    calls, original = [], transposed
    monkeypatch.setattr(few_rows, "transposed", lambda *args: calls.append(len(args[0])) or original(*args))
    model, prompts = tiny_model("llama"), ragged_prompts()
    with torch.no_grad():
        before = model(torch.tensor([[5, 6, 7]])).logits
        expected = [greedy(model, prompt, 12) for prompt in prompts]
    for draft in (None, random_head(model), tiny_model("llama")):
        settings = {} if draft is None else {"num_steps": 2}
        engine = specdec.attach(model, draft, max_batch=2, max_seq_len=64, **settings)
        calls.clear()
        tokens = engine.generate(prompts, max_new_tokens=12).tokens
        assert [t[: len(e)] for t, e in zip(tokens, expected, strict=True)] == expected
        assert {1, 2} <= set(calls) if draft is None else {2, 3, 6} <= set(calls)
        with torch.no_grad():
            assert torch.equal(model(torch.tensor([[5, 6, 7]])).logits, before)
        swapped = engine._core.models._few_rows
        model.lm_head.forward = swapped._forwards[model.lm_head]  # as if a step had been interrupted there
        engine.detach()
        assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("graphs", [False, True], ids=["live", "recorded"])
def test_the_watch_does_not_take_them_for_changes(graphs, always):
    """Admission checks the models before a step replaces forwards: prefixes stay cached, and graphs stay valid."""
    model, prompt = tiny_model("llama"), list(range(5, 45))
    engine = specdec.attach(model, max_batch=2, max_seq_len=64, cuda_graph=graphs, prefix_cache=True)
    engine.generate([prompt], max_new_tokens=4)
    again = engine.generate([prompt], max_new_tokens=4)
    assert again.tokens == [greedy(model, prompt, 4)]
    assert again.requests[0].num_cached > 0
    engine.detach()
