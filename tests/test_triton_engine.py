"""The engine on the Triton backend: the text of `generate`, token for token, with every kernel of a round in use.

In the interpreter on a machine without a GPU, so prompts and answers are short; tests/test_gpu.py has long ones.
"""

import pytest
import torch

import specdec
from specdec import SamplingParams
from tests.heads import ALGOS, MODULES, OracleWorker, poison, random_draft, random_head
from tests.test_attach import greedy
from tests.tiny_models import DEVICE, VOCAB, model_of

pytest.importorskip("triton")

PROMPTS = [[5, 9, 17, 3, 44, 8, 8, 101, 12, 13], [7, 30, 2, 90], [64, 3, 3, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30]]
NUM_TOKENS = 5 if DEVICE.type == "cuda" else 3
# The interpreter is slow, and test_backends.py has their shapes.
SLOW = () if torch.cuda.is_available() else ("qwen3", "gemma2", "gpt_oss", "deepseek_v3")
CHAIN = {"num_steps": 3}
TREE = {"num_steps": 3, "topk": 3, "num_draft_tokens": 10}
if DEVICE.type != "cuda":
    TREE = {"num_steps": 2, "topk": 2, "num_draft_tokens": 5}


def engine_of(model, shape, **settings):
    head = random_head(model).to(DEVICE) if shape else None
    return specdec.attach(model, head, backend="triton", max_batch=2, max_seq_len=64, **(shape or {}), **settings)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (name, shape)
        for name, shape in (
            *(("llama", None), ("qwen3", CHAIN), ("gemma2", CHAIN), ("gpt_oss", TREE), ("deepseek_v3", TREE)),
        )
        if name not in SLOW
    ],
)
def test_text_is_that_of_generate(name, shape):
    model = model_of(name)
    expected = [greedy(model, p, NUM_TOKENS) for p in PROMPTS]
    engine = engine_of(model, shape, page_size=16, max_prefill_tokens=16)
    out = engine.generate(PROMPTS, max_new_tokens=NUM_TOKENS)
    engine.check_integrity()
    assert out.tokens == expected
    assert engine.report().backend == "triton"


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the oracle's bookkeeping lives on the host")
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_accepted_paths_are_committed(shape):
    model, prompts, num_tokens = model_of("llama"), PROMPTS[:2], 6
    expected = [greedy(model, p, num_tokens) for p in prompts]
    engine = engine_of(model, shape)
    engine._core.round.worker = OracleWorker(
        engine.config, [p + e for p, e in zip(prompts, expected, strict=True)], VOCAB
    )
    engine._core.target.aux_layers = ()
    out = engine.generate(prompts, max_new_tokens=num_tokens)
    assert out.tokens == expected and out.stats.tau > 1.5


@pytest.mark.parametrize(
    ("algo", "shape"),
    [
        pytest.param(algo, shape, id=f"{algo}-{name}")
        for algo in (*ALGOS, MODULES)
        for name, shape in (("chain", CHAIN), ("tree", TREE))
        if DEVICE.type == "cuda" or (algo, name) == ("eagle3", "tree")  # the interpreter is slow
    ],
)
def test_greedy_and_sampled_text_is_that_of_the_torch_backend(algo, shape):
    model = model_of("llama")
    hot, hotter = SamplingParams(temperature=0.9, seed=3), SamplingParams(temperature=1.2, top_p=0.8, seed=4)
    laws = [hot, SamplingParams(), hotter]
    texts = []
    for backend in ("triton", "torch"):
        draft = random_draft(model, algo).to(DEVICE)
        engine = specdec.attach(model, draft, backend=backend, max_batch=3, max_seq_len=64, **shape)
        texts.append(engine.generate(PROMPTS, max_new_tokens=NUM_TOKENS, sampling=laws).tokens)
        engine.detach()
    assert texts[0] == texts[1]
    assert texts[0][1] == greedy(model, PROMPTS[1], NUM_TOKENS)


def test_poisoned_pools_change_nothing_and_debug_mode_finds_nothing(monkeypatch):
    monkeypatch.setenv("SPECDEC_DEBUG", "1")
    engine, prompts = engine_of(model_of("gemma2"), TREE), PROMPTS[:2] if DEVICE.type == "cuda" else PROMPTS[1:2]
    expected = engine.generate(prompts, max_new_tokens=NUM_TOKENS).tokens
    poison(engine)
    assert engine.generate(prompts, max_new_tokens=NUM_TOKENS).tokens == expected


def test_a_nan_row_ends_its_request_alone():
    model = model_of("llama")
    engine = engine_of(model, CHAIN)
    expected = [greedy(model, p, NUM_TOKENS) for p in PROMPTS]
    poison = 77
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = float("nan")
    with pytest.warns(UserWarning, match="not finite"):
        out = engine.generate([PROMPTS[0], [9, poison, 4], PROMPTS[1]], max_new_tokens=NUM_TOKENS)
    assert out.finish_reasons[1] == "error"
    assert [out.tokens[0], out.tokens[2]] == expected[:2]
    engine.check_integrity()


def test_auto_says_what_it_took_and_why():
    model = model_of("llama")
    report = specdec.attach(model, max_batch=1).report()
    assert report.backend == ("triton" if DEVICE.type == "cuda" else "torch")
    assert "auto: " in report.backend_reason
