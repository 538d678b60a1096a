"""Every checkpoint layout: written by hand to its description, loaded, and compared with plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import specdec
from specdec.core.errors import CheckpointError
from specdec.reach.checkpoints.tensors import TensorFiles
from specdec.reach.heads.load import detect_algo, inspect, save_head
from specdec.reach.targets.shape import LAST
from tests import layout_models as lm
from tests.heads import random_draft
from tests.layout_heads import (
    DEEPSEEK_NORMS,
    LLAMA3,
    MIMO_NORMS,
    ROWS,
    Played,
    agree,
    aux_states,
    combine_tensors,
    last_states,
    load,
    target,
    under,
)
from tests.test_attach import greedy
from tests.tiny_models import tiny_model

# ---- EAGLE-1/2


@pytest.mark.parametrize(
    ("config", "fc_bias", "qkv_bias", "theta", "notes"),
    [
        ({"bias": False, "rope_theta": 500000.0}, False, False, 500000.0, ["rope theta 500000, from rope_theta"]),
        ({}, True, False, 10000.0, ["bias: true; config.json does not say", "rope theta 10000, the default"]),
        ({"bias": True, "qkv_bias": True, "rope_theta": 1e6}, True, True, 1e6, ["rope theta 1e+06"]),
    ],
    ids=["llama3", "llama2", "qwen2"],
)
def test_eagle(tmp_path: Path, config: dict, fc_bias: bool, qkv_bias: bool, theta: float, notes: list[str]) -> None:
    tensors = lm.eagle_tensors(fc_bias=fc_bias, qkv_bias=qkv_bias)
    stored = {**tensors, "embed_tokens.weight": target().get_input_embeddings().weight.clone()}
    folder = lm.write(tmp_path / "head", lm.eagle_config(**config), stored, legacy=not config)
    head = load(folder)
    assert (head.algo, head.aux_layers, head.embed_tokens, head.lm_head) == ("eagle", (LAST,), None, None)
    features = last_states(target())
    reference = lm.eagle_reference(tensors, target().lm_head.weight, theta)
    agree(head, reference, features, features, target())
    report = inspect(folder)
    assert (report.layout, report.algo) == ("eagle", "eagle")
    assert report.tensors["fc.weight"] == ((lm.HIDDEN, 2 * lm.HIDDEN), torch.float32)
    for note in notes:
        assert any(note in line for line in report.notes), (note, report.notes)


def test_an_embedding_of_an_eagle_head_that_is_not_the_targets_is_kept(tmp_path: Path) -> None:
    tensors = {**lm.eagle_tensors(fc_bias=False), "embed_tokens.weight": lm.noise(lm.VOCAB, lm.HIDDEN)}
    head = load(lm.write(tmp_path / "head", lm.eagle_config(bias=False), tensors))
    assert head.config.own_embedding and torch.equal(head.embed_tokens.weight, tensors["embed_tokens.weight"])
    features = last_states(target())
    agree(head, lm.eagle_reference(tensors, target().lm_head.weight, 10000.0), features, features, target())
    tensors["embed_tokens.weight"] = lm.noise(lm.VOCAB, lm.HIDDEN + 1)
    with pytest.raises(ValueError, match=r"embed_tokens.weight has shape \(96, 33\), expected \(96, 32\)"):
        load(lm.write(tmp_path / "wide", lm.eagle_config(bias=False), tensors))


# ---- EAGLE-3, official names


def test_eagle3_official(tmp_path: Path) -> None:
    tensors = lm.eagle3_tensors("midlayer")
    head = load(lm.write(tmp_path, lm.official_config(), tensors))
    features = aux_states()
    agree(head, lm.eagle3_reference(tensors, "midlayer", 10000.0), features, lm.fused(tensors, features), target())
    assert head.aux_layers == (1, 3, 4)  # the outputs after 2, n//2 and n-3 of 8 layers
    assert head.hot_ids.tolist() == lm.hot_ids(40).tolist() and int(head.t2d.sum()) == 40
    notes = inspect(tmp_path).notes
    assert "rope theta 10000, the default; config.json does not say" in notes
    assert "aux layer ids: the default [2, n//2, n-3] of a target of n layers" in notes


def test_specforge_export(tmp_path: Path) -> None:
    """fc_norm, its own head_dim, scaled rope, named aux layers; norm_output does not mean recycling here."""
    tensors = lm.eagle3_tensors("midlayer", dim=12)
    tensors |= {f"fc_norm.{i}.weight": lm.gain(lm.HIDDEN, 60 + i) for i in range(3)}
    config = lm.official_config(
        architectures=["LlamaForCausalLMEagle3"],
        head_dim=12,
        rope_theta=500000.0,
        rope_scaling=LLAMA3,
        fc_norm=True,
        norm_output=True,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 6], "use_aux_hidden_state": True},
    )
    head = load(lm.write(tmp_path, config, tensors))
    features = aux_states()
    reference = lm.eagle3_reference(tensors, "midlayer", 500000.0, dim=12, scaling=LLAMA3)
    agree(head, reference, features, lm.fused(tensors, features), target())
    assert head.aux_layers == (0, 2, 5) and not head.recycles_normed
    notes = inspect(tmp_path).notes
    assert "rope theta 500000, from rope_theta; scaling llama3" in notes
    assert "norm_output=True: here only that lm_head reads normed states" in notes


@torch.no_grad()
@pytest.mark.parametrize("ids", [None, [1, 2, 7]])
def test_aux_layers_are_the_streams_that_the_ids_count(tmp_path: Path, ids: list[int] | None) -> None:
    """Id k is transformers' classic hidden_states[k]: the embedding is 0, the input of layer k is k."""
    model = target()
    more = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}} if ids else {}
    head = load(lm.write(tmp_path, lm.official_config(**more), lm.eagle3_tensors("midlayer")))
    seen: dict[int, torch.Tensor] = {}
    hooks = [
        layer.register_forward_hook(lambda _, __, out, i=i: seen.update({i: out[0] if isinstance(out, tuple) else out}))
        for i, layer in enumerate(model.model.layers)
    ]
    classic = model(torch.tensor([[5, 6, 7]]), output_hidden_states=True).hidden_states
    for hook in hooks:
        hook.remove()
    counted = ids or [2, lm.LAYERS // 2, lm.LAYERS - 3]
    assert all(torch.equal(seen[i], classic[k]) for i, k in zip(head.aux_layers, counted, strict=True))


def test_the_papers_layers_are_known_in_sglangs_spelling(tmp_path: Path) -> None:
    n = lm.LAYERS
    more = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, n // 2 - 1, n - 4]}}
    head = load(lm.write(tmp_path, lm.official_config(**more), lm.eagle3_tensors("midlayer")))
    assert head.aux_layers == (1, n // 2 - 1, n - 4)


def test_a_head_of_another_width_has_its_own_embedding(tmp_path: Path) -> None:
    tensors = {**lm.eagle3_tensors("midlayer", width=24), "embed_tokens.weight": lm.noise(lm.VOCAB, 24)}
    config = lm.official_config(hidden_size=24, target_hidden_size=lm.HIDDEN, head_dim=lm.DIM)
    head = load(lm.write(tmp_path / "head", config, tensors))
    assert head.config.own_embedding and (head.hidden_size, head.target_hidden_size) == (24, lm.HIDDEN)
    features = aux_states()
    agree(head, lm.eagle3_reference(tensors, "midlayer", 10000.0), features, lm.fused(tensors, features), target())
    del tensors["embed_tokens.weight"]
    with pytest.raises(ValueError, match="absent embedding: the head's width differs from the target's"):
        load(lm.write(tmp_path / "without", config, tensors))
    with pytest.raises(ValueError, match="lm_head_from_target=True: the head is 24 wide, but its target's rows 32"):
        save_head(tmp_path / "saved", head, dtype=torch.float32, lm_head_from_target=True)
    tensors["embed_tokens.weight"] = lm.noise(lm.VOCAB, 24)
    del tensors["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load(lm.write(tmp_path / "rows", {**config, "lm_head_from_target": True}, tensors))


@pytest.mark.parametrize("maps", ["missing", "zero"])
def test_a_head_that_scores_all_tokens_needs_no_maps(tmp_path: Path, maps: str) -> None:
    tensors = lm.eagle3_tensors("midlayer", dv=lm.VOCAB)
    for name in ("d2t", "t2d"):
        if maps == "missing":
            del tensors[name]
        else:
            tensors[name] = torch.zeros_like(tensors[name])
    head = load(lm.write(tmp_path, lm.official_config(lm.VOCAB), tensors))
    assert head.hot_ids.tolist() == list(range(lm.VOCAB)) and bool(head.t2d.all())
    features = aux_states()
    agree(head, lm.eagle3_reference(tensors, "midlayer", 10000.0), features, lm.fused(tensors, features), target())


def test_maps_of_a_head_that_scores_all_tokens_are_followed(tmp_path: Path) -> None:
    """Draft ids in another order: the rows of the output head move to where d2t points."""
    order = torch.randperm(lm.VOCAB, generator=torch.Generator().manual_seed(6))
    tensors = lm.eagle3_tensors("midlayer", dv=lm.VOCAB)
    straight = dict(tensors)
    tensors["lm_head.weight"] = straight["lm_head.weight"][order]
    tensors["d2t"] = order - torch.arange(lm.VOCAB)
    for i, t2d in enumerate((torch.ones(lm.VOCAB).bool(), torch.zeros(lm.VOCAB).bool())):
        folder = lm.write(tmp_path / str(i), lm.official_config(lm.VOCAB), {**tensors, "t2d": t2d})
        head = load(folder)
        assert head.hot_ids.tolist() == list(range(lm.VOCAB))
        features = aux_states()
        reference = lm.eagle3_reference(straight, "midlayer", 10000.0)
        agree(head, reference, features, lm.fused(straight, features), target())


@pytest.mark.parametrize(
    ("maps", "message"),
    [
        ({"d2t": torch.arange(lm.VOCAB).flip(0)}, "d2t holds absolute target ids; expected offsets"),
        ({"d2t": torch.arange(lm.VOCAB) // 7}, "d2t does not lead to each of the 96 target tokens once"),
        ({"d2t": torch.full((lm.VOCAB,), 0.5)}, "d2t is torch.float32; expected torch.int64"),
        ({"t2d": torch.arange(lm.VOCAB) < 40}, "t2d marks 40 target tokens, but the head scores all 96"),
    ],
)
def test_maps_that_contradict_a_head_that_scores_all(tmp_path: Path, maps: lm.Tensors, message: str) -> None:
    tensors = lm.eagle3_tensors("midlayer", dv=lm.VOCAB) | maps
    with pytest.raises(ValueError, match=message):
        load(lm.write(tmp_path, lm.official_config(lm.VOCAB), tensors))


@pytest.mark.parametrize("stored", ["copy", "bfloat16 copy", "trained"])
def test_a_stored_embedding_is_shared_if_it_is_the_targets(tmp_path: Path, stored: str) -> None:
    weight = target().get_input_embeddings().weight
    weight = {"copy": weight.clone(), "bfloat16 copy": weight.bfloat16(), "trained": weight * 1.1}[stored]
    tensors = {**lm.eagle3_tensors("midlayer"), "embed_tokens.weight": weight}
    head = load(lm.write(tmp_path, lm.official_config(), tensors))
    assert (head.embed_tokens is not None) == (stored == "trained")
    features = aux_states()
    agree(head, lm.eagle3_reference(tensors, "midlayer", 10000.0), features, lm.fused(tensors, features), target())


def test_an_embedding_as_it_was_initialised_is_warned_about(tmp_path: Path) -> None:
    weight = lm.noise(lm.VOCAB, lm.HIDDEN, scale=0.02)
    tensors = {**lm.eagle3_tensors("midlayer"), "embed_tokens.weight": weight}
    with pytest.warns(UserWarning, match="as if it had been exported before training"):
        load(lm.write(tmp_path, lm.official_config(), tensors))


def test_a_rope_base_that_safeailabs_trainer_ignored_is_noted(tmp_path: Path) -> None:
    head = load(lm.write(tmp_path, lm.official_config(rope_theta=500000.0), lm.eagle3_tensors("midlayer")))
    assert head.config.layer.rope_theta == 500000.0  # the file's value; the note says what may be meant
    assert "SafeAILab's EAGLE-3 trainer used rope theta 10000 whatever config.json says" in inspect(tmp_path).notes


# ---- EAGLE-3, speculators


SPECULATORS = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_output": {"norm_output": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "all of eagle 3.1": {"norm_before_residual": True, "norm_output": True, "fc_norm": True},
}


@pytest.mark.parametrize("flags", SPECULATORS)
def test_speculators(tmp_path: Path, flags: str) -> None:
    raw = SPECULATORS[flags]
    tensors = {**lm.eagle3_tensors("layers.0"), "embed_tokens.weight": target().get_input_embeddings().weight.clone()}
    if raw.get("norm_before_fc"):
        tensors["input_norm.weight"] = lm.gain(3 * lm.HIDDEN, 61)
    if raw.get("fc_norm"):
        tensors |= {f"fc_norm.{i}.weight": lm.gain(lm.HIDDEN, 62 + i) for i in range(3)}
    head = load(lm.write(tmp_path, lm.speculators_config(**raw), tensors))
    reference = lm.eagle3_reference(
        tensors,
        "layers.0",
        10000.0,
        normed_residual=raw.get("norm_before_residual", False),
        recycles_normed=raw.get("norm_output", False),
    )
    features = aux_states()
    agree(head, reference, features, lm.fused(tensors, features), target())
    assert head.aux_layers == (1, 3, 4) and head.recycles_normed == raw.get("norm_output", False)
    assert inspect(tmp_path).layout == "speculators" and detect_algo(tmp_path) == "eagle3"


def test_speculators_of_two_qwen3_layers_with_a_window(tmp_path: Path) -> None:
    tensors = lm.eagle3_tensors("layers.0", qk_norm=True, num_aux=2)
    tensors |= {**lm.layer_tensors("layers.1", qk_norm=True), "layers.1.input_layernorm.weight": lm.gain(lm.HIDDEN, 66)}
    layer = {
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "use_sliding_window": True,
        "sliding_window": 4,
        "layer_types": ["sliding_attention"] * 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    config = lm.speculators_config(layer=layer, eagle_aux_hidden_state_layer_ids=[2, 6])
    del config["transformer_layer_config"]["rope_theta"]
    head = load(lm.write(tmp_path, config, tensors))
    reference = lm.eagle3_reference(tensors, "layers.0", 1e6, deeper=("layers.1",), window=4)
    features = aux_states(2)
    agree(head, reference, features, lm.fused(tensors, features), target())
    assert head.aux_layers == (1, 5) and head.attention_layers[1].window == 4
    assert "rope theta 1e+06, from rope_parameters.rope_theta" in inspect(tmp_path).notes


def test_sizes_that_speculators_leaves_out_are_its_classs_defaults(tmp_path: Path) -> None:
    config = lm.speculators_config()
    for key in ("rms_norm_eps", "num_key_value_heads"):
        del config["transformer_layer_config"][key]
    tensors = lm.eagle3_tensors("layers.0")
    for name in ("k", "v"):  # Llama's default: as many as query heads
        tensors[f"layers.0.self_attn.{name}_proj.weight"] = lm.noise(lm.HEADS * lm.DIM, 2 * lm.HIDDEN)
    layer = load(lm.write(tmp_path, config, tensors)).config.layer
    assert (layer.rms_norm_eps, layer.num_kv_heads, layer.window) == (1e-6, lm.HEADS, None)


# ---- NextN / MTP


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize("experts", ["one by one", "fused"])
def test_nextn_of_deepseek_and_glm(tmp_path: Path, family: str, experts: str) -> None:
    model = target(family)
    layer = lm.hf_layer_tensors(model, 90)
    at = f"model.layers.{lm.LAYERS}"
    tensors = under(at, combine_tensors(DEEPSEEK_NORMS))
    stored = tensors | under(at, lm.experts_apart(layer) if experts == "one by one" else layer)
    copies = {f"{at}.embed_tokens.weight": model.get_input_embeddings().weight.clone()}
    copies[f"{at}.shared_head.head.weight"] = model.lm_head.weight.clone()
    config = {**model.config.to_dict(), "num_nextn_predict_layers": 1}
    target_part = {"model.embed_tokens.weight": torch.ones(2, 2), "model.layers.0.mlp.gate.weight": torch.ones(2)}
    folder = lm.write_shards(tmp_path, config, target_part, stored, copies)
    (folder / "model-00001-of-00003.safetensors").unlink()  # only files that contain the MTP layer are opened
    head = load(folder, family)
    assert (head.algo, head.embed_tokens, head.lm_head) == ("nextn", None, None)
    names = tuple(f"{at}.{name}" for name in DEEPSEEK_NORMS)
    reference = lm.nextn_reference(tensors, names, lm.hf_block(model, layer), model.lm_head.weight)
    agree(head, reference, last_states(model), last_states(model), model)
    assert inspect(folder).layout == "nextn" and set(inspect(folder).tensors) == {*stored, *copies}


def test_copies_that_differ_from_the_targets_are_kept(tmp_path: Path) -> None:
    model = target("deepseek_v3")
    layer, at = lm.hf_layer_tensors(model, 90), f"model.layers.{lm.LAYERS}"
    tensors = under(at, combine_tensors(DEEPSEEK_NORMS))
    own = lm.noise(lm.VOCAB, lm.HIDDEN, seed=8)
    stored = tensors | under(at, lm.experts_apart(layer)) | {f"{at}.shared_head.head.weight": own}
    stored[f"{at}.embed_tokens.weight"] = lm.noise(lm.VOCAB, lm.HIDDEN, seed=9)
    head = load(lm.write(tmp_path, model.config.to_dict(), stored), "deepseek_v3")
    assert head.config.own_head and torch.equal(head.embed_tokens.weight, stored[f"{at}.embed_tokens.weight"])
    names = tuple(f"{at}.{name}" for name in DEEPSEEK_NORMS)
    reference = lm.nextn_reference(tensors, names, lm.hf_block(model, layer), own)
    agree(head, reference, last_states(model), last_states(model), model)


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_mtp_of_qwen(tmp_path: Path, family: str) -> None:
    """Norms multiply by 1+w, in the layer and around it."""
    model = target(family)
    layer = lm.hf_layer_tensors(model, 91)
    names = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
    tensors = combine_tensors(names, around=0.0)
    stored = tensors | under("mtp.layers.0", lm.experts_apart(layer))
    stored |= {"model.embed_tokens.weight": torch.ones(2, 2), "model.layers.0.input_layernorm.weight": torch.ones(2)}
    config = {**model.config.to_dict(), "mtp_num_hidden_layers": 1}
    head = load(lm.write(tmp_path, config, stored), family)
    reference = lm.nextn_reference(tensors, names, lm.hf_block(model, layer), model.lm_head.weight, plus_one=True)
    agree(head, reference, last_states(model), last_states(model), model)
    assert inspect(tmp_path).layout == "qwen_mtp"
    prompt = list(range(5, 16))
    expected = greedy(model, prompt, 12)
    for shape in ({"num_steps": 3}, {"num_steps": 3, "topk": 2, "num_draft_tokens": 6}):
        engine = specdec.attach(model, tmp_path, algo="nextn", max_batch=1, max_seq_len=64, **shape)
        assert engine.generate([prompt], max_new_tokens=12).tokens == [expected]
        engine.detach()


def test_mtp_of_mimo_reads_the_hidden_state_first(tmp_path: Path) -> None:
    model, at = target("qwen2"), "model.mtp_layers.0"
    names = tuple(f"{at}.{name}" for name in MIMO_NORMS)
    tensors = combine_tensors(names) | lm.layer_tensors(at, bias=True)
    tensors[f"{at}.input_layernorm.weight"] = lm.gain(lm.HIDDEN, 92)
    whole = {"model.embed_tokens.weight": torch.ones(2, 2)}
    folder = lm.write(tmp_path, {**model.config.to_dict(), "num_nextn_predict_layers": 1}, {**tensors, **whole})
    theta = model.config.rope_parameters["rope_theta"]
    reference = lm.nextn_reference(
        tensors, names, lambda x: lm.plain_layer(tensors, at, x, theta), model.lm_head.weight, hidden_first=True
    )
    agree(load(folder, "qwen2"), reference, last_states(model), last_states(model), model)
    assert inspect(folder).layout == "mimo" and "the projection reads [hidden, embedding]" in inspect(folder).notes


def test_mtp_of_speculators_reads_the_embedding_first(tmp_path: Path) -> None:
    model, at = target("qwen3"), "mtp_layers.0"
    names = tuple(f"{at}.{name}" for name in MIMO_NORMS)
    tensors = combine_tensors(names) | lm.layer_tensors(at, qk_norm=True)
    tensors[f"{at}.input_layernorm.weight"] = lm.gain(lm.HIDDEN, 93)
    config = {"speculators_model_type": "mtp", "transformer_layer_config": model.config.to_dict()}
    folder = lm.write(tmp_path, {**config, "num_nextn_predict_layers": 1}, tensors)
    theta = model.config.rope_parameters["rope_theta"]
    reference = lm.nextn_reference(
        tensors, names, lambda x: lm.plain_layer(tensors, at, x, theta), model.lm_head.weight
    )
    agree(load(folder, "qwen3"), reference, last_states(model), last_states(model), model)
    assert inspect(folder).layout == "speculators_mtp"


@torch.no_grad()
def test_nextn_drafts_what_transformers_mtp_model_drafts(tmp_path: Path) -> None:
    from transformers.modeling_layers import MtpModel

    model = target("deepseek_v3")
    model.save_pretrained(tmp_path)
    at = f"model.layers.{lm.LAYERS}"
    mtp = combine_tensors(DEEPSEEK_NORMS) | lm.experts_apart(lm.hf_layer_tensors(model, 94))
    weights = tmp_path / "model.safetensors"
    save_file({**load_file(str(weights)), **under(at, mtp)}, str(weights), metadata={"format": "pt"})
    head = load(tmp_path, "deepseek_v3")
    model = type(model).from_pretrained(tmp_path, dtype=torch.float32).eval()
    model._keys_to_ignore_on_load_unexpected = [
        rf"model\.layers\.{lm.LAYERS}\."
    ]  # where this tiny model has its MTP layer
    peer = MtpModel.from_pretrained(model).eval()
    tokens = torch.randint(3, lm.VOCAB, (ROWS + 1,))
    hidden = model.model(tokens[None, :-1]).last_hidden_state
    _, logits, _ = peer(tokens[None, 1:], hidden, torch.ones(1, ROWS), torch.arange(ROWS)[None], None)
    states = Played(head).append(model.get_input_embeddings()(tokens[1:]), hidden[0])
    ours = head.project(head.normed(states[-1:]), model.lm_head)
    torch.testing.assert_close(ours, logits[0], atol=1e-4, rtol=1e-4)


def test_several_mtp_layers_are_modules_in_order(tmp_path: Path) -> None:
    model = target("qwen2")
    tensors: lm.Tensors = {}
    for m in range(2):
        at = f"model.layers.{lm.LAYERS + m}"
        tensors |= under(at, combine_tensors(DEEPSEEK_NORMS)) | lm.layer_tensors(at, bias=True)
        tensors[f"{at}.input_layernorm.weight"] = lm.gain(lm.HIDDEN, 95 + m)
        tensors[f"{at}.embed_tokens.weight"] = model.get_input_embeddings().weight.clone()
    head = load(lm.write(tmp_path, {**model.config.to_dict(), "num_nextn_predict_layers": 2}, tensors), "qwen2")
    assert head.num_modules == 2 and head.embed_tokens is None
    for m in range(2):
        gate = tensors[f"model.layers.{lm.LAYERS + m}.mlp.gate_proj.weight"]
        assert torch.equal(head.mtp[m].layer.mlp.gate_proj.weight, gate)
    last = f"model.layers.{lm.LAYERS + 1}.embed_tokens.weight"
    with pytest.raises(ValueError, match=rf"{last} differs from .*expected one for all"):
        load(lm.write(tmp_path, model.config.to_dict(), {**tensors, last: tensors[last] + 1}), "qwen2")


@pytest.mark.parametrize("algo", ["auto", "eagle"])
def test_a_checkpoint_is_opened_once_in_an_attach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algo: str) -> None:
    model, opened, at = tiny_model("llama"), [], TensorFiles.at
    save_head(tmp_path / "head", random_draft(model, "eagle"), dtype=torch.float32)
    monkeypatch.setattr(TensorFiles, "at", lambda source: (opened.append(source), at(source))[1])
    engine = specdec.attach(model, tmp_path / "head", algo, num_steps=1, max_batch=1)
    engine.detach()
    assert opened == [tmp_path / "head"]
