"""Attach and detach on live models of many architectures: the same text as `generate`, and nothing left afterwards."""

import copy
import gc
import itertools
import pickle
import sys
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers as tf

import specdec
from specdec.backends import TorchBackend
from specdec.reach.heads.load import save_head
from tests.heads import ALGOS, MODULES, random_draft, random_head
from tests.tiny_models import ADMITTED, CHUNKED, REFUSED, VOCAB, tiny_model

LENGTHS = (23, 5, 14, 40, 1)
NUM_TOKENS = 24
CONFIGS = (None, {"num_steps": 3}, {"num_steps": 4, "topk": 4, "num_draft_tokens": 16})


def ragged_prompts(seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


def greedy(model, prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", [*ADMITTED, *CHUNKED])
def test_engine_equals_generate(name):
    model, prompts = tiny_model(name), ragged_prompts()
    expected = [greedy(model, p) for p in prompts]
    for config in CONFIGS:
        engine = specdec.attach(model, random_head(model) if config else None, max_batch=4, **(config or {}))
        out = engine.generate(prompts, max_new_tokens=NUM_TOKENS)
        engine.check_integrity()
        engine.detach()
        assert out.tokens == expected, config


def test_the_text_part_of_a_composite_model_equals_generate():
    model, prompts = tiny_model("gemma3_composite"), ragged_prompts()[:3]
    engine = specdec.attach(model, random_head(model), num_steps=3)
    out = engine.generate(prompts, max_new_tokens=NUM_TOKENS)
    engine.detach()
    assert out.tokens == [greedy(model, p) for p in prompts]


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_models_are_refused_with_their_reason(name):
    with pytest.raises(specdec.AttachError, match="AttentionInterface") as caught:
        specdec.attach(tiny_model(name))
    assert caught.value.reasons


def test_a_softcap_that_the_models_own_attention_leaves_out_is_named():
    """Logits as small as those of random weights would show no difference."""
    model = tiny_model("gemma2")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(30)
    if model.config._attn_implementation == "sdpa":  # the default of transformers 5.17, but no longer of 5.23
        message = r"sdpa, leaves out the softcap: load .* attn_implementation='eager'"
        with pytest.raises(specdec.AttachError, match=message):
            specdec.attach(model)
        model.set_attn_implementation("eager")
    specdec.attach(model).detach()


@pytest.mark.parametrize("name", ["llama", "gptj"])
def test_models_that_return_tuples_are_refused_as_such(name):
    model = tiny_model(name)
    model.config.return_dict = False
    with pytest.raises(specdec.AttachError, match=r"return_dict=False.*: set model.config.return_dict = True"):
        specdec.attach(model)
    model.config.return_dict = True
    specdec.attach(model).detach()


def test_encoder_decoders_are_refused_as_such():
    sizes = {"vocab_size": VOCAB, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
    sizes |= {f"{part}_attention_heads": 2 for part in ("encoder", "decoder")}
    ends = {f"{name}_token_id": i for i, name in enumerate(("pad", "bos", "eos", "decoder_start"))}
    for model in (
        tf.WhisperForConditionalGeneration(tf.WhisperConfig(**sizes, **ends)),
        tf.BartForConditionalGeneration(tf.BartConfig(**sizes)),
    ):
        with pytest.raises(specdec.AttachError, match="it is an encoder-decoder") as caught:
            specdec.attach(model.eval())
        assert len(caught.value.reasons) == 1


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rotary_embeddings_that_depend_on_the_batch_are_refused(kind):
    model = tiny_model("llama")
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": kind}
    with pytest.raises(specdec.AttachError, match=f"rope type '{kind}'"):
        specdec.attach(model)


def test_a_model_made_in_inference_mode_is_refused():
    with torch.inference_mode():
        model = tiny_model("llama")
        expected = greedy(model, [5, 6, 7], 4)
    with pytest.raises(specdec.AttachError, match=r"model\.embed_tokens\.weight.* made within torch\.inference_mode"):
        specdec.attach(model, compile=True, compiler="eager")
    assert greedy(model, [5, 6, 7], 4) == expected


def test_a_compiled_engine_that_loads_its_draft_in_inference_mode(tmp_path):
    model = tiny_model("llama")
    save_head(tmp_path, random_head(model), dtype=torch.float32)
    with torch.inference_mode():
        engine = specdec.attach(model, tmp_path, num_steps=2, max_seq_len=64, compile=True, compiler="eager")
    assert engine.generate([[5, 6, 7]], max_new_tokens=4).tokens == [greedy(model, [5, 6, 7], 4)]
    engine.detach()


def test_detach_leaves_the_model_as_it_was():
    model = tiny_model("llama")
    ids = torch.tensor([ragged_prompts()[0]])
    before = model(ids, output_hidden_states=[0]).logits  # on its first call, HF itself leaves attributes behind
    names = [sorted(vars(m)) for m in model.modules()]
    configs = [m.config for m in model.modules() if hasattr(m, "config")]
    engine = specdec.attach(model, random_head(model))
    engine.generate(ids, max_new_tokens=8)
    assert greedy(model, ids[0].tolist(), 8)  # usable while attached
    engine.detach()
    assert torch.equal(model(ids).logits, before)
    assert [sorted(vars(m)) for m in model.modules()] == names
    assert [m.config for m in model.modules() if hasattr(m, "config")] == configs


def test_hooks_on_layers_go_with_us():
    """EAGLE-3 reads layer outputs through hooks; detach removes ours and keeps the owner's."""
    model, prompt = tiny_model("llama"), ragged_prompts()[0]
    names = [sorted(vars(m)) for m in model.modules()]
    with specdec.attach(model, random_head(model), max_seq_len=64) as engine:
        engine.generate([prompt], max_new_tokens=2)
    assert [sorted(vars(m)) for m in model.modules()] == names and pickle.dumps(model)
    assert not any(m._forward_hooks for m in model.modules())
    model(torch.tensor([prompt]), output_hidden_states=True)  # hooks of the model's owner, which stay
    hooks = [list(m._forward_hooks) for m in model.modules()]
    with specdec.attach(model, random_head(model), max_seq_len=64) as engine:
        engine.generate([prompt], max_new_tokens=2)
    assert [list(m._forward_hooks) for m in model.modules()] == hooks
    assert len(model(torch.tensor([prompt]), output_hidden_states=True).hidden_states) == 1 + len(model.model.layers)


def test_attach_twice_and_generate_after_detach():
    model = tiny_model("llama")
    engine = specdec.attach(model)
    with pytest.raises(specdec.AttachError, match=r"attached already.*detach\(\)"):
        specdec.attach(model)
    engine.detach()
    for call in (lambda: engine.generate([[3]]), engine.report):
        with pytest.raises(specdec.DetachedError, match="detached"):
            call()
    engine.detach()  # as at the end of a `with`, or in a notebook cell run twice: nothing is left to do
    specdec.attach(model).detach()


def test_an_engine_is_detached_at_the_end_of_a_with():
    model = tiny_model("llama")
    with specdec.attach(model) as engine:
        assert specdec.engine_of(model) is engine and engine.generate([[3]], max_new_tokens=2).tokens
    assert specdec.engine_of(model) is None
    with pytest.raises(KeyError), specdec.attach(model) as engine:
        engine.install()
        raise KeyError("of the user's")
    assert specdec.engine_of(model) is None and "generate" not in vars(model)
    with specdec.attach(model) as engine:
        engine.detach()


def test_a_run_that_is_under_way_at_detach_says_so():
    model = tiny_model("llama")
    engine = specdec.attach(model)
    engine.submit([[3, 4]], max_new_tokens=20, ignore_eos=True)
    assert engine.step()
    engine.detach()
    with pytest.raises(specdec.DetachedError, match="detached"):
        engine.step()


def test_two_engines_do_not_meet():
    models = [tiny_model("llama", seed=1), tiny_model("qwen3", seed=2)]
    prompt = ragged_prompts()[0]
    expected = [greedy(m, prompt) for m in models]
    engines = [specdec.attach(m, random_head(m)) for m in models]
    requests = [e.submit(prompt, max_new_tokens=NUM_TOKENS) for e in engines]
    while any([e.step() for e in engines]):
        pass
    assert [r[0].tokens for r in requests] == expected


def test_aux_hidden_states_are_outputs_of_the_named_layers():
    model = tiny_model("llama")
    prompt = torch.tensor([ragged_prompts()[0]])
    classic = model(prompt, output_hidden_states=True).hidden_states  # entry 0 is the embedding
    engine = specdec.attach(model, random_head(model, aux=(0, 1, 2)))
    seen = []
    draft = engine._core.prefill.draft
    engine._core.prefill.draft = lambda metadata, ids, aux: (seen.append(aux), draft(metadata, ids, aux))[1]
    engine.submit(prompt, max_new_tokens=1)
    engine.step()
    torch.testing.assert_close(seen[0], torch.cat([classic[i + 1][0] for i in (0, 1, 2)], -1), atol=1e-5, rtol=1e-5)


def test_backends_are_prepared_for_their_layers_before_anything_runs(monkeypatch):
    seen, run = [], TorchBackend._prepare
    monkeypatch.setattr(TorchBackend, "prepare_for", lambda self, *given: seen.append((len(given[0]), given[1])))
    monkeypatch.setattr(TorchBackend, "_prepare", lambda self, metadata: (seen.append("ran"), run(self, metadata))[1])
    model = tiny_model("llama")
    engine = specdec.attach(model, random_head(model), backend="torch")
    admission = seen.index((model.config.num_hidden_layers, torch.float32))  # it uses a backend of its own
    engine.generate([[3]], max_new_tokens=1)
    wanted = [(model.config.num_hidden_layers, torch.float32), (1, torch.float32), "ran"]  # the target's, the draft's
    assert seen[admission : admission + 3] == wanted and seen.count("ran") > admission


def test_low_precision_rotary_is_reported():
    with pytest.warns(UserWarning, match="inv_freq is in low precision"):
        specdec.attach(tiny_model("llama").to(torch.bfloat16)).detach()


@pytest.mark.parametrize("settings", [{}, {"compile": True, "compiler": "eager"}])
def test_an_engine_that_is_dropped_leaves_the_model_free(settings):
    """As in a notebook cell that is run again: no garbage collection is needed, and the model keeps nothing."""
    model, prompt = tiny_model("llama"), ragged_prompts()[0]
    model(torch.tensor([prompt]), output_hidden_states=[0])  # on its first call, HF itself leaves attributes behind
    names = [sorted(vars(m)) for m in model.modules()]
    expected = greedy(model, prompt)
    gc.disable()
    try:
        for _ in range(2):
            engine = specdec.attach(model, random_draft(model, "standalone"), **settings)
            assert engine.generate([prompt], max_new_tokens=NUM_TOKENS).tokens == [expected]
            core = weakref.ref(engine._core)
            del engine
            assert core() is None, "pools and graphs are freed with the engine"
            assert [sorted(vars(m)) for m in model.modules()] == names
    finally:
        gc.enable()
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())


@pytest.mark.parametrize("part, method", [("graphs", "play"), ("delivery", "hand_over")])
def test_an_engine_that_is_dropped_after_a_failure_is_freed(part, method):
    """The error's traceback holds the engine, and the failed request holds the error."""
    engine = specdec.attach(tiny_model("llama"), random_draft(tiny_model("llama"), "eagle3"), num_steps=3)
    with fails_at(7, getattr(engine._core, part), method), pytest.raises(ZeroDivisionError):
        engine.generate(ragged_prompts(), max_new_tokens=NUM_TOKENS)
    core = weakref.ref(engine._core)
    del engine
    gc.collect()
    assert core() is None


def fails_at(number, owner, method):
    """Patch a method so that its call `number` raises, counted from 1."""
    run, calls = getattr(owner, method), itertools.count(1)
    return mock.patch.object(owner, method, lambda *args: 1 / 0 if next(calls) == number else run(*args))


def test_an_engine_that_outlives_our_modules_is_dropped_without_a_word(monkeypatch):
    """As at interpreter exit, which sets module globals to None."""
    told = []
    engine = specdec.attach(tiny_model("llama"))
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    monkeypatch.setattr("specdec.api.sys", None)
    del engine
    assert not told


def test_the_engine_of_a_model_is_told_and_not_kept():
    model, prompt = tiny_model("llama"), ragged_prompts()[0]
    draft = tiny_model("llama", seed=1)
    expected = greedy(model, prompt)
    assert specdec.engine_of(model) is None
    engine = specdec.attach(model, draft)
    assert specdec.engine_of(model) is specdec.engine_of(draft) is engine
    assert specdec.engine_of(copy.deepcopy(model)) is None
    gc.disable()
    try:
        engine.install()
        gone = weakref.ref(engine)
        del engine
        with pytest.raises(specdec.AttachError, match=r"attached already.*specdec\.engine_of\(model\)"):
            specdec.attach(model)
        assert greedy(model, prompt) == expected, "installed, it goes on"
        specdec.engine_of(model).detach()
        assert gone() is None and specdec.engine_of(model) is specdec.engine_of(draft) is None
        engine = specdec.attach(model)
        del engine
        assert specdec.engine_of(model) is None, "dropped, and not installed"
    finally:
        gc.enable()


def test_an_engine_in_a_cycle_is_found_when_the_model_is_attached_again():
    model = tiny_model("llama")
    engine = specdec.attach(model)
    holder = [engine]
    holder.append(holder)
    del engine, holder
    specdec.attach(model).detach()


def test_an_exception_between_attach_and_detach_leaves_the_model_free():
    model = tiny_model("llama")

    def cell():
        engine = specdec.attach(model)
        raise KeyError(engine.report().model)

    with pytest.raises(KeyError):
        cell()
    specdec.attach(model).detach()


def test_a_stream_keeps_its_engine_attached():
    model = tiny_model("llama")

    class Letters:
        def decode(self, ids, **options):
            return "".join(chr(65 + i % 26) for i in ids)

    engine = specdec.attach(model, tokenizer=Letters())
    stream = engine.stream([5, 6, 7], max_new_tokens=8, ignore_eos=True)
    first = next(stream)
    del engine
    with pytest.raises(specdec.AttachError, match="attached already"):
        specdec.attach(model)
    assert len(first + "".join(stream)) == 8
    del stream
    specdec.attach(model).detach()


@pytest.mark.parametrize("compiled", [False, True])
def test_copies_of_an_attached_model_are_free(compiled):
    model, prompt = tiny_model("llama"), ragged_prompts()[0]
    expected = greedy(model, prompt)
    engine = specdec.attach(model, compile=compiled, compiler="eager")
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for twin in copies:
        other = specdec.attach(twin)
        with pytest.raises(specdec.AttachError, match="attached already"):
            specdec.attach(twin)
        assert other.generate([prompt], max_new_tokens=NUM_TOKENS).tokens == [expected]
        other.detach()
        assert not hasattr(twin, "_specdec_attached")
        assert greedy(twin, prompt) == expected
    with pytest.raises(specdec.AttachError, match="attached already"):
        specdec.attach(model)
    assert engine.generate([prompt], max_new_tokens=NUM_TOKENS).tokens == [expected]


def test_detach_that_runs_out_of_memory_can_be_called_again(monkeypatch):
    model, prompt = tiny_model("llama"), ragged_prompts()[0]
    before = {name: p.clone() for name, p in model.named_parameters()}
    expected = greedy(model, prompt)
    engine = specdec.attach(model, random_draft(model, "standalone"), compile=True, compiler="eager")
    clone, left = torch.Tensor.clone, [5]

    def short(self, **options):
        left[0] -= 1
        if left[0] < 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return clone(self, **options)

    monkeypatch.setattr(torch.Tensor, "clone", short)
    with pytest.raises(torch.OutOfMemoryError):
        engine.detach()
    monkeypatch.undo()
    assert greedy(model, prompt) == expected
    with pytest.raises(specdec.AttachError, match="attached already"):
        specdec.attach(model)
    engine.detach()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) and p.untyped_storage().nbytes() == p.nbytes, name
    assert not any("specdec" in name for m in model.modules() for name in vars(m))
    specdec.attach(model).detach()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("org/model", r"cannot attach 'org/model': it is a name: load it first, .*from_pretrained"),
        (Path("some/folder"), "it is a name: load it first"),
        (None, "cannot attach a NoneType: expected a transformers causal LM"),
        (torch.nn.Linear(2, 2), "cannot attach a Linear: expected a transformers causal LM"),
    ],
)
def test_targets_that_are_no_models(target, message):
    with pytest.raises(specdec.AttachError, match=message):
        specdec.attach(target, "org/draft")


def test_the_result_of_torch_compile_is_named():
    compiled = torch.compile(tiny_model("llama"), backend="eager")
    with pytest.raises(specdec.AttachError, match=r"result of torch.compile\(\): pass the model itself"):
        specdec.attach(compiled)


def test_unknown_settings_are_named():
    model = tiny_model("llama")
    with pytest.raises(ValueError, match=r"num_step=3: attach.. has no such setting: .*topk.*; did you mean num_steps"):
        specdec.attach(model, num_step=3)
    with pytest.raises(ValueError, match=r"zzz=1: attach.. has no such setting: expected one of num_steps, topk"):
        specdec.attach(model, zzz=1)
    specdec.attach(model).detach()


@pytest.mark.parametrize("algo", [*ALGOS, MODULES])
def test_drafts_without_a_step_are_refused(algo):
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="num_steps=0 with a draft: expected at least 1 draft step"):
        specdec.attach(model, random_draft(model, algo), num_steps=0)
    specdec.attach(model).detach()


def test_what_a_detached_engine_held_is_freed_at_once():
    """Without a garbage collection: on a GPU this is gigabytes."""
    model = tiny_model("llama")
    engine = specdec.attach(model, random_head(model), num_steps=2, cuda_graph=True)
    engine.generate([[3, 4]], max_new_tokens=4)
    pools = [weakref.ref(engine._core.context.pool), weakref.ref(engine._core.round.worker.context.pool)]
    gc.collect()
    gc.disable()
    try:
        engine.detach()
        del engine
        assert not [pool for pool in pools if pool() is not None]
    finally:
        gc.enable()


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_the_default_dtype_of_torch_changes_nothing(default):
    """Users may have set it to load models."""
    model = tiny_model("llama")
    draft, found = random_draft(model, "eagle3"), []
    processed = {"do_sample": True, "seed": 3, "top_p": 0.9, "repetition_penalty": 1.3, "logit_bias": {5: 1.5}}
    try:
        for dtype in (torch.float32, default):
            torch.set_default_dtype(dtype)
            traced = {"compile": True, "compiler": "eager", "cuda_graph": True, "logprobs": 2}
            with specdec.attach(model, draft, num_steps=2, topk=1, max_batch=2, max_seq_len=64, **traced) as engine:
                prompts, options = [[1, 5, 6, 7], [4, 3]], {"max_new_tokens": 8, "ignore_eos": True}
                found += [
                    engine.generate(prompts, **options).tokens,
                    engine.generate(prompts, **options, **processed).tokens,
                ]
    finally:
        torch.set_default_dtype(torch.float32)
    assert found[:2] == found[2:]
