"""What only a GPU can show: the same text on CUDA in fp32 and bf16, and rounds that never synchronise."""

import gc
import os
from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import specdec
from specdec import shipped
from specdec.backends.triton.attention.kernel import _attention_kernel
from specdec.core.text.prompts import chat_ids
from specdec.reach.targets.pretrained import BUNDLED, load_pretrained
from tests.compiles import counted_compiles
from tests.heads import random_head
from tests.test_attach import greedy, ragged_prompts
from tests.test_auto import vary
from tests.tiny_models import ADMITTED, tiny_model
from tests.waits import forbid_waits

pytestmark = pytest.mark.gpu
CONFIGS = (None, {"num_steps": 3}, {"num_steps": 4, "topk": 4, "num_draft_tokens": 16})
AUTO = {"num_steps": "auto", "auto_steps": (1, 3), "topk": 2, "num_draft_tokens": 7}
QUESTIONS = ["What is 17 times 3? Explain.", "Name three rivers of Europe and say where they flow.", "Hi!"]
NEAR_TIE = 0.25  # logits; bf16 rounds logits of size 16..32 to steps of 0.125


@pytest.mark.parametrize("name", ADMITTED)
def test_fp32_equals_generate(name):
    model, prompts = tiny_model(name).cuda(), ragged_prompts()
    expected = [greedy(model, p) for p in prompts]
    for config in CONFIGS:
        head = random_head(model).cuda() if config else None
        engine = specdec.attach(model, head, max_batch=4, strict=True, **(config or {}))
        assert engine.generate(prompts, max_new_tokens=24).tokens == expected, config
        engine.check_integrity()
        runners = engine.report().runners
        in_parts = {"target_prefill", "draft_prefill", "first_token", "draft_begin"}  # done by whole graphs
        assert all(runners[what]["replays"] for what in runners.keys() - in_parts)
        engine.detach()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_experts_in_16_bits_are_captured(name, dtype):
    model = tiny_model(name).to(dtype).cuda()
    with pytest.warns(UserWarning, match="inv_freq is in low precision"):
        engine = specdec.attach(model, random_head(model).to(dtype).cuda(), max_batch=4, num_steps=3, strict=True)
    engine.generate(ragged_prompts(), max_new_tokens=12)
    runners = engine.report().runners
    assert runners["round"]["replays"] and runners["whole_prefill"]["replays"]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("config", [*CONFIGS[1:], AUTO], ids=["chain", "tree", "auto"])
def test_a_round_never_waits_for_the_host(config, temperature):
    model = tiny_model("llama").cuda()
    engine = specdec.attach(model, random_head(model).cuda(), strict=True, **config)
    if config is AUTO:
        vary(engine)
    engine.generate(ragged_prompts(), max_new_tokens=4)  # allocations of a first round may synchronise
    forbid_waits(engine._core.launcher, "round")
    law = specdec.SamplingParams(temperature=temperature)
    engine.generate(ragged_prompts(), max_new_tokens=24, sampling=law)


@pytest.mark.parametrize("config", [*CONFIGS, AUTO], ids=["plain", "chain", "tree", "auto"])
@pytest.mark.parametrize("name", ["gemma2", "qwen3_next"])
def test_nothing_is_compiled_on_live_traffic(config, name):
    """Attaching warms up every kernel; lengths, batches and sampling settings add none."""
    model, prompts = tiny_model(name).cuda(), ragged_prompts()
    head = random_head(model).cuda() if config else None
    laws = [specdec.SamplingParams(temperature=0.9), specdec.SamplingParams()]
    with counted_compiles() as warm:
        _attention_kernel.device_caches.clear()  # drop what other tests have compiled: the counter must see some
        engine = specdec.attach(model, head, max_batch=5, max_seq_len=512, **(config or {}))
    if config is AUTO:
        vary(engine)
    with counted_compiles() as live:
        for batch in (prompts, prompts[:3], [list(range(3, 120)) * 3], [[5]]):
            for law in laws:
                engine.generate(batch, max_new_tokens=40, sampling=law)
    assert [name for name in warm if name.startswith("specdec.")]
    assert not [name for name in live if name.startswith("specdec.")]


def test_a_round_is_one_graph_and_a_copy_of_its_results():
    """The profiler counts one graph per round, and the kernel that copies its results to the host."""
    model, num_rounds = tiny_model("llama").cuda(), 12
    engine = specdec.attach(model, random_head(model).cuda(), num_steps=3, max_batch=2)
    engine.submit(ragged_prompts()[:2], max_new_tokens=100, ignore_eos=True)
    for _ in range(4):
        engine.step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        for _ in range(num_rounds):
            engine.step()
        torch.cuda.synchronize()
    calls = Counter(e.name for e in prof.events())
    graphs = sum(n for name, n in calls.items() if "GraphLaunch" in name)
    kernels = sum(n for name, n in calls.items() if "LaunchKernel" in name)
    assert (graphs, kernels, calls["_mail_kernel"]) == (num_rounds, num_rounds, num_rounds)


def test_out_of_memory_at_capture_leaves_an_eager_engine():
    model, prompts = tiny_model("llama").cuda(), ragged_prompts()
    expected = [greedy(model, p, 12) for p in prompts]
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    # Room for pools, row states (20 KiB each) and small batches, but not for the logits of 4096 requests.
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (180 << 20)) / total)
    try:
        with pytest.warns(UserWarning, match=r"no graph for round of 4096 .*lower max_batch"):
            engine = specdec.attach(
                model, random_head(model).cuda(), num_steps=7, max_batch=4096, max_seq_len=64, num_slots=4096,
                graph_batches=(4, 4096), graph_sampling="sampled", prefill_graph="off",
            )  # fmt: skip
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    law = specdec.SamplingParams(temperature=0.5)
    engine.generate(prompts[:3], max_new_tokens=12, sampling=law)
    assert engine.report().runners["round"]["replays"] > 0
    engine.generate(prompts, max_new_tokens=12, sampling=law)
    assert engine.report().runners["round"]["rejects"].get("out of memory when it was captured", 0) > 0
    assert engine.generate(prompts, max_new_tokens=12).tokens == expected
    engine.check_integrity()


def test_detach_gives_the_memory_back():
    model = tiny_model("llama").cuda()
    head = random_head(model).cuda()
    greedy(model, [5, 6, 7], 4)
    gc.collect()  # left by a test that failed before
    torch._C._cuda_clearCublasWorkspaces()  # attaching drops them
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        engine = specdec.attach(model, head, num_steps=3, max_batch=8)
        engine.generate(ragged_prompts(), max_new_tokens=8)
        assert torch.cuda.memory_allocated() > before
        engine.detach()
        del engine
        torch._C._cuda_clearCublasWorkspaces()  # workspaces of 1-token prefills that ran eagerly
        torch.cuda.empty_cache()
        assert torch.cuda.memory_allocated() <= before + (8 << 20)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("config", CONFIGS, ids=["plain", "chain", "tree"])
def test_a_model_on_another_gpu_than_the_current_one(config):
    model, prompts = tiny_model("gemma2").to("cuda:1"), ragged_prompts()
    expected = [greedy(model, p, 16) for p in prompts]
    head = random_head(model).to("cuda:1") if config else None
    assert torch.cuda.current_device() == 0
    engine = specdec.attach(model, head, max_batch=4, strict=True, **(config or {}))
    assert engine.generate(prompts, max_new_tokens=16).tokens == expected


def test_auto_is_triton():
    report = specdec.attach(tiny_model("llama").cuda(), max_batch=1).report()
    assert report.backend == "triton" and report.backend_reason.startswith("auto: triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("config", CONFIGS[1:], ids=["chain", "tree"])
def test_smollm2_equals_generate_but_for_near_ties(config, dtype):
    model, tokenizer = load_pretrained(os.environ.get("SPECDEC_TARGET", BUNDLED), dtype=dtype, device="cuda")
    prompts = chat_ids(QUESTIONS, tokenizer)
    expected = [greedy(model, p, 48) for p in prompts]
    engine = specdec.attach(model, shipped.path(), strict=True, **config)
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
