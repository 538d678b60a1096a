"""Prompts with images: texts are those of the model's own generate, with any draft and any way of batching."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import specdec
from specdec.tools.doors.checks import check_rotary
from tests.heads import random_head
from tests.image_models import FAMILIES, IMAGE, greedy, image_model, image_prompt
from tests.tiny_models import DEVICE, tiny_model

TEXT = [11, 12, 13, 14, 15, 16, 17]
GRAPHS = {"cuda_graph": True, "graph_sampling": "greedy"}
WAYS = {
    "plain": {"prefix_cache": True},
    "chunks": {"algo": "lookup", "num_steps": 3, "max_prefill_tokens": 5, "prefix_cache": "auto"},
    "tree": {"draft": "standalone", "num_steps": 3, "topk": 2, "num_draft_tokens": 6},
    "eagle3": {"draft": "eagle3", "num_steps": 3, **GRAPHS, "prefill_graph": "breakable"},
    "triton": {"algo": "lookup", "num_steps": 2, "backend": "triton"},
    "compiled": {"algo": "lookup", "num_steps": 3, **GRAPHS, "compile": True, "compiler": "eager"},
}
EVERY_WAY = ("qwen2_5_vl", "qwen3_vl", "gemma3")  # several positions per token; deepstack; limits
CASES = [("gemma3", "triton"), *((kind, "chunks") for kind in FAMILIES)]
CASES += [(kind, way) for kind in EVERY_WAY for way in WAYS if way not in ("chunks", "triton")]
ON = {"max_batch": 4, "max_seq_len": 200}
OPTIONS = {"max_new_tokens": 8, "ignore_eos": True, "do_sample": False}


@pytest.fixture(scope="module")
def models():
    """Models with two image prompts each, and the continuations of these and of a text prompt."""
    found = {}

    def get(kind):
        if kind not in found:
            model = image_model(kind)
            text = torch.tensor([TEXT], device=DEVICE)
            prompts = [image_prompt(model, 0), image_prompt(model, 1, 3, 5)]
            model.to(DEVICE)
            prompts = [{name: value.to(DEVICE) for name, value in p.items()} for p in prompts]
            all_three = [prompts[0], {"input_ids": text, "attention_mask": torch.ones_like(text)}, prompts[1]]
            found[kind] = model, prompts, [greedy(model, p)[0] for p in all_three]
        return found[kind]

    return get


def draft_for(model, settings):
    kind = settings.pop("draft", None)
    if kind == "standalone":
        torch.manual_seed(7)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
        vocab = model.get_output_embeddings().weight.shape[0]
        return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=vocab, max_position_embeddings=256)).eval().to(DEVICE)
    return random_head(model).to(DEVICE) if kind == "eagle3" else None


def batch_of(prompts):
    """Return the prompts as one batch, padded on the left."""
    length, made = max(p["input_ids"].shape[1] for p in prompts), {}
    for name in prompts[0]:
        rows = [p[name] for p in prompts]
        if rows[0].shape == prompts[0]["input_ids"].shape:
            rows = [torch.nn.functional.pad(row, (length - row.shape[1], 0)) for row in rows]
        made[name] = torch.cat(rows)
    return made


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_texts_are_those_of_generate(models, kind, way):
    model, (first, second), expected = models(kind)
    settings = dict(WAYS[way])
    with specdec.attach(model, draft_for(model, settings), **ON, **settings) as engine:
        for _ in range(1 + ("prefix_cache" in settings)):  # the second time from the cache
            assert engine.generate([first, TEXT, second], **OPTIONS).tokens == expected
        reasons = engine.report().runners["target_prefill"]["rejects"]
        assert reasons["prompts with images: the live layers read them"] >= 1
        if "cuda_graph" in settings:
            assert engine.report().runners["round"]["replays"] > 0 == engine.report().runners["round"]["eager"]
        engine.check_integrity()
        if way == "plain":
            with engine.install():
                assert greedy(model, first) == expected[:1]
    assert greedy(model, second) == expected[2:]


@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3"])
def test_padded_batches_and_inputs_by_name(models, kind):
    model, prompts, expected = models(kind)
    batch = batch_of(prompts)
    inputs = {name: value for name, value in batch.items() if name not in ("input_ids", "attention_mask")}
    with specdec.attach(model, algo="lookup", num_steps=2, **ON) as engine:
        out = engine.generate(batch["input_ids"], attention_mask=batch["attention_mask"], **inputs, **OPTIONS)
        assert engine.generate(**batch, **OPTIONS).tokens == out.tokens
        assert out.tokens == [expected[0], expected[2]]
        with engine.install():
            (beside,) = engine.submit(prompts[0], **OPTIONS)
            assert greedy(model, batch) == out.tokens
            while engine.step():
                pass
            assert beside.tokens == expected[0]
            for name in ("output_scores", "output_logits"):
                with pytest.raises(ValueError, match=f"{name}: the engine scores texts without images only"):
                    model.generate(**batch, max_new_tokens=2, return_dict_in_generate=True, **{name: True})
        mask = torch.ones(1, len(TEXT), dtype=torch.long)
        with pytest.raises(ValueError, match="position_ids: the engine has the model compute them"):
            check_rotary(engine._requests([TEXT]), mask, mask.expand(4, -1, -1))


@pytest.mark.parametrize("kind", ["qwen2_5_vl"])
def test_preempted_prompts_are_read_again(models, kind):
    model, (first, second), expected = models(kind)
    with specdec.attach(model, algo="lookup", num_steps=2, **ON) as engine:
        requests = engine.submit([first, TEXT, second], **OPTIONS)
        for num_steps in (3, 2):
            for _ in range(num_steps):
                engine.step()
            while engine._core.mailbox.num_pending:  # as the engine does before it preempts
                engine._core.delivery.read(0)
            engine._core.scheduler.preempt()
            engine._core.launcher.forget_rows()
        while engine.step():
            pass
        assert [r.tokens for r in requests] == expected
        assert engine.report().preemption["preemptions"] == 2 and requests[0].embedded is None


@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3"])
def test_the_prefix_cache_tells_images_apart(models, kind):
    model, (first, _), expected = models(kind)
    random = torch.Generator().manual_seed(5)
    other = {**first, "pixel_values": torch.randn(first["pixel_values"].shape, generator=random).to(DEVICE)}
    num_ids, answer = first["input_ids"].shape[1], torch.tensor([expected[0]], device=DEVICE)
    more = {"input_ids": answer, "attention_mask": torch.ones_like(answer)}
    longer = {
        name: torch.cat([v, more.get(name, torch.zeros_like(answer))], 1) if v.shape[-1] == num_ids else v
        for name, v in first.items()
    }
    wanted = [greedy(model, other)[0], greedy(model, longer)[0]]
    with specdec.attach(model, prefix_cache=True, **ON) as engine:
        found = []
        for prompt, text in ((first, expected[0]), (other, wanted[0]), (longer, wanted[1])):
            before = engine.report().prefix_cache["found"]
            assert engine.generate(prompt, **OPTIONS).tokens == [text]
            found.append(engine.report().prefix_cache["found"] - before)
        image = first["input_ids"][0].tolist().index(IMAGE)
        assert found == [0, image, num_ids + len(expected[0]) - 1]


def test_what_cannot_be_read_is_refused_by_name(models):
    model, (first, _), _ = models("qwen2_5_vl")
    with specdec.attach(model, **ON) as engine:
        for given, told in (
            ({**first, "image_sizes": first["image_grid_thw"]}, "^image_sizes: the model takes no such inputs"),
            ({**first, "pixel_values": first["pixel_values"].tolist()}, "pixel_values=.*: expected a tensor"),
            ({**first, "pixel_values": first["pixel_values"][:8]}, "pixel_values: expected 24 patches.*got 8"),
            ({**first, "inputs_embeds": first["pixel_values"]}, "inputs_embeds"),
        ):
            with pytest.raises(ValueError, match=told):
                engine.generate(given, **OPTIONS)
        with pytest.raises(ValueError, match="pixel_values: only valid with input_ids"):
            engine.generate("a text", pixel_values=first["pixel_values"])
        with pytest.raises(ValueError, match="image_grid_thw, mm_token_type_ids, pixel_values: the engine reads"):
            engine.score(first, [[5]])
        with engine.install(), pytest.raises(ValueError, match="inputs_embeds"):
            model.generate(**first, inputs_embeds=first["pixel_values"])
    with specdec.attach(tiny_model("llama").to(DEVICE), **ON) as engine:
        with pytest.raises(ValueError, match="pixel_values: the engine reads only text"):
            engine.generate({"input_ids": [[5]], "pixel_values": first["pixel_values"]})
        with pytest.raises(ValueError, match="pixel_values"):
            engine.generate([5], pixel_values=first["pixel_values"])
