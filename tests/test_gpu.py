"""What only a GPU can show: the same text on CUDA in fp32 and bf16, and a round that never waits for the host."""

import os

import pytest
import torch

import specdec
from specdec import heads
from specdec.backends.triton.compiles import counted_compiles
from specdec.models.pretrained import BUNDLED, load_pretrained
from specdec.prompts import chat_ids
from tests.heads import random_head
from tests.test_attach import greedy, ragged_prompts
from tests.tiny_models import ADMITTED, tiny_model

pytestmark = pytest.mark.gpu
CONFIGS = (None, {"num_steps": 3}, {"num_steps": 4, "topk": 4, "num_draft_tokens": 16})
QUESTIONS = ["What is 17 times 3? Explain.", "Name three rivers of Europe and say where they flow.", "Hi!"]
NEAR_TIE = 0.25  # logits; bf16 rounds logits of size 16..32 to steps of 0.125


@pytest.mark.parametrize("name", ADMITTED)
def test_fp32_equals_generate(name):
    model, prompts = tiny_model(name).cuda(), ragged_prompts()
    expected = [greedy(model, p) for p in prompts]
    for config in CONFIGS:
        head = random_head(model).cuda() if config else None
        engine = specdec.attach(model, head, max_batch=4, **(config or {}))
        assert engine.generate(prompts, max_new_tokens=24).tokens == expected, config
        engine.check_integrity()
        engine.detach()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("config", CONFIGS[1:], ids=["chain", "tree"])
def test_a_round_never_waits_for_the_host(config, temperature):
    model = tiny_model("llama").cuda()
    engine = specdec.attach(model, random_head(model).cuda(), **config)
    core, play = engine._core, engine._core._round

    def guarded(requests):
        torch.cuda.set_sync_debug_mode("error")
        try:
            play(requests)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine.generate(ragged_prompts(), max_new_tokens=4)  # allocations of a first round may wait
    core._round = guarded
    law = specdec.SamplingParams(temperature=temperature)
    engine.generate(ragged_prompts(), max_new_tokens=24, sampling=law)


@pytest.mark.parametrize("config", CONFIGS, ids=["plain", "chain", "tree"])
def test_nothing_is_compiled_on_live_traffic(config):
    """One request warms every kernel up; other lengths, batches and samplings add none."""
    model, prompts = tiny_model("gemma2").cuda(), ragged_prompts()
    head = random_head(model).cuda() if config else None
    engine = specdec.attach(model, head, max_batch=5, max_seq_len=512, **(config or {}))
    laws = [specdec.SamplingParams(temperature=0.9), specdec.SamplingParams()]
    with counted_compiles() as warm:
        for law in laws:
            engine.generate(prompts[:1], max_new_tokens=6, sampling=law)
    with counted_compiles() as live:
        for batch in (prompts, prompts[:3], [list(range(3, 120)) * 3], [[5]]):
            for law in laws:
                engine.generate(batch, max_new_tokens=40, sampling=law)
    assert [name for name in warm if name.startswith("specdec.")]
    assert not [name for name in live if name.startswith("specdec.")]


def test_auto_is_triton():
    report = specdec.attach(tiny_model("llama").cuda(), max_batch=1).report()
    assert report.backend == "triton" and report.backend_reason.startswith("auto: triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", CONFIGS[1:], ids=["chain", "tree"])
def test_smollm2_equals_generate_but_for_near_ties(config, dtype):
    model, tokenizer = load_pretrained(os.environ.get("SPECDEC_TARGET", BUNDLED), dtype=dtype, device="cuda")
    prompts = chat_ids(QUESTIONS, tokenizer)
    expected = [greedy(model, p, 48) for p in prompts]
    engine = specdec.attach(model, heads.path(), **config)
    out = engine.generate(prompts, max_new_tokens=48)
    engine.detach()
    assert out.stats.tau > 1.4
    for prompt, ours, theirs in zip(prompts, out.tokens, expected, strict=True):
        if ours != theirs:
            assert dtype is torch.bfloat16, "fp32 must be equal token for token"
            at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + theirs[:at]], device="cuda")).logits[0, -1].float()
            assert abs(logits[ours[at]] - logits[theirs[at]]) <= NEAR_TIE
