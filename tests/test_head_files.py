"""The layout of a folder, what saving writes, and what a strict loader refuses, with its reasons."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specdec.core.draft.head import DraftHead
from specdec.core.errors import CheckpointError
from specdec.reach.heads.base import LayerConfig
from specdec.reach.heads.eagle import EagleConfig, EagleHead
from specdec.reach.heads.eagle3 import Eagle3Config, Eagle3Head
from specdec.reach.heads.load import check_head, detect_algo, inspect, load_head, save_head
from specdec.reach.heads.nextn import NextNConfig, NextNHead
from tests import layout_models as lm
from tests.layout_heads import CPU, DEEPSEEK_NORMS, LLAMA3, MIMO_NORMS, combine_tensors, load, shape_of, target, under

# ---- layouts that are recognised


def test_layouts_are_told_by_tensors(tmp_path: Path) -> None:
    model = target("deepseek_v3")
    whole = {"model.embed_tokens.weight": torch.ones(2, 2), "model.layers.0.mlp.gate_proj.weight": torch.ones(2)}
    at = f"model.layers.{lm.LAYERS}"
    mtp = under(at, combine_tensors(DEEPSEEK_NORMS) | lm.experts_apart(lm.hf_layer_tensors(model, 90)))
    plain = lm.write(tmp_path / "eagle3", model.config.to_dict(), whole)  # folder names make no difference
    both = lm.write(tmp_path / "llama", model.config.to_dict(), {**whole, **mtp})
    assert detect_algo(plain) == "standalone" and inspect(plain).tensors.keys() == whole.keys()
    assert (detect_algo(both), detect_algo(both, "standalone"), detect_algo(both, "eagle")) == (
        "nextn",
        "standalone",
        "nextn",
    )
    gguf = tmp_path / "model.gguf"
    gguf.touch()
    assert detect_algo(gguf) == detect_algo("bundled") == inspect(gguf).layout == "standalone"
    with pytest.raises(ValueError, match="a whole model, not a head: load it with load_pretrained"):
        load(plain, "deepseek_v3")
    with pytest.raises(ValueError, match="transformers drops it when it saves a model; use the original repository"):
        load(plain, "deepseek_v3", algo="nextn")
    with pytest.raises(ValueError, match="algo='eagle3', but it holds 'nextn and standalone'"):
        load(both, "deepseek_v3", algo="eagle3")


def test_of_a_hub_repository_only_the_heads_parts_are_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    model, at = target("qwen2"), f"model.layers.{lm.LAYERS}"
    mtp = under(at, combine_tensors(DEEPSEEK_NORMS)) | lm.layer_tensors(at, bias=True)
    mtp[f"{at}.input_layernorm.weight"] = lm.gain(lm.HIDDEN, 96)
    remote = lm.write_shards(
        tmp_path / "remote", model.config.to_dict(), {"model.embed_tokens.weight": mtp[f"{at}.enorm.weight"]}, mtp
    )
    local, fetched = tmp_path / "local", []

    def snapshot_download(repo: str, allow_patterns: list[str]) -> str:
        assert (repo, allow_patterns) == ("someone/target", ["*.json"])
        local.mkdir(exist_ok=True)
        for file in remote.glob("*.json"):
            (local / file.name).write_bytes(file.read_bytes())
        return str(local)

    def hf_hub_download(repo: str, name: str) -> str:
        fetched.append(name)
        (local / name).write_bytes((remote / name).read_bytes())
        return str(local / name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    shape = shape_of(target("qwen2"))
    head = load_head("someone/target", shape, torch.float32, CPU)
    assert head.algo == "nextn" and fetched == ["model-00002-of-00002.safetensors"]


def test_bfloat16_keeps_what_transformers_keeps_in_fp32(tmp_path: Path) -> None:
    model = lm.target_of("deepseek_v3").bfloat16()
    router = model.model.layers[-1].mlp.gate
    router.e_score_correction_bias = router.e_score_correction_bias.float()  # as from_pretrained leaves it
    at = f"model.layers.{lm.LAYERS}"
    tensors = combine_tensors(DEEPSEEK_NORMS) | lm.experts_apart(lm.hf_layer_tensors(model, 90))
    folder = lm.write(tmp_path, model.config.to_dict(), under(at, tensors))
    head = load_head(folder, shape_of(model), torch.bfloat16, CPU)
    state = head.state_dict()
    assert state["mtp.0.layer.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert state["mtp.0.layer.mlp.experts.gate_up_proj"].dtype == head.weight.dtype == torch.bfloat16
    exact = type(head.rotary)(config=head.hf_config).inv_freq
    assert head.rotary.inv_freq.dtype == torch.float32 and torch.equal(head.rotary.inv_freq, exact)


def test_a_loaded_head_does_not_lean_on_its_file(tmp_path: Path) -> None:
    tensors = lm.eagle_tensors(fc_bias=False)
    head = load(lm.write(tmp_path, lm.eagle_config(bias=False), tensors))
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as handle:  # in place: a process that maps the file would see it
        handle.seek(file.stat().st_size // 2)
        handle.write(b"\xff" * (file.stat().st_size // 2))
    assert all(torch.equal(tensors[name], p) for name, p in head.state_dict().items())


# ---- saving


def heads_to_save() -> dict[str, tuple[str, DraftHead]]:
    """Return (family, head) by its special feature."""
    layer = LayerConfig(lm.HIDDEN, lm.MLP, lm.HEADS, lm.KV_HEADS, lm.DIM, rope_theta=5e5)
    window = dataclasses.replace(layer, qk_norm=True, window=4, rope_scaling=LLAMA3)
    eagle3 = Eagle3Config(layer, lm.HIDDEN, lm.VOCAB, 40, (0, 3, 6))
    many = dataclasses.replace(
        eagle3, layer=window, num_layers=3, norm_before_residual=True, norm_before_fc=True, recycles_normed=True
    )
    narrow = dataclasses.replace(eagle3, layer=dataclasses.replace(layer, hidden_size=24), own_embedding=True)
    own = NextNConfig(hidden_first=True, recycles_normed=False, own_embedding=True, own_head=True)
    return {
        "eagle": ("llama", EagleHead(EagleConfig(layer, lm.VOCAB, fc_bias=True))),
        "eagle without bias": (
            "llama",
            EagleHead(EagleConfig(dataclasses.replace(layer, qkv_bias=True), lm.VOCAB, False)),
        ),
        "eagle with an embedding of its own": ("llama", EagleHead(EagleConfig(layer, lm.VOCAB, own_embedding=True))),
        "eagle3": ("llama", Eagle3Head(eagle3)),
        "eagle3 with fc_norm": ("llama", Eagle3Head(dataclasses.replace(eagle3, fc_norm=True))),
        "eagle3 of another width": ("llama", Eagle3Head(narrow)),
        "eagle3 that only speculators can express": ("llama", Eagle3Head(many)),
        "nextn": ("deepseek_v3", NextNHead(target("deepseek_v3"))),
        "nextn with all of its own": ("qwen3_next", NextNHead(target("qwen3_next"), own)),
        "nextn of two layers": ("qwen3", NextNHead(target("qwen3"), NextNConfig(2))),
    }


@pytest.mark.parametrize("what", heads_to_save())
def test_what_is_saved_loads_as_it_was(tmp_path: Path, what: str) -> None:
    family, head = heads_to_save()[what]
    for i, parameter in enumerate(head.parameters()):
        parameter.data = lm.noise(*parameter.shape, seed=i)
    if isinstance(head, Eagle3Head):
        head.set_hot_vocab(lm.hot_ids(40))
    save_head(tmp_path, head, dtype=torch.float32)
    if isinstance(head, NextNHead):
        assert not any("gate_up_proj" in name for name in inspect(tmp_path).tensors)  # one tensor per expert
    back = load(tmp_path, family)
    assert back.config == head.config and back.algo == head.algo
    assert list(back.state_dict()) == list(head.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(back.state_dict().values(), head.state_dict().values(), strict=True))
    expected = "speculators" if "speculators" in what else head.algo
    assert inspect(tmp_path).layout == expected


def test_what_save_head_refuses(tmp_path: Path) -> None:
    heads = heads_to_save()
    with pytest.raises(ValueError, match=r"cannot express norm_before_residual, norm_before_fc"):
        save_head(tmp_path, heads["eagle3 that only speculators can express"][1], layout="eagle3", dtype=torch.float32)
    with pytest.raises(ValueError, match=r"layout='nextn': expected one of \('eagle3', 'speculators'\)"):
        save_head(tmp_path, heads["eagle3"][1], layout="nextn", dtype=torch.float32)
    with pytest.raises(ValueError, match="lm_head_from_target=True: a head of 'eagle' has no lm_head"):
        save_head(tmp_path, heads["eagle"][1], dtype=torch.float32, lm_head_from_target=True)
    assert not any(tmp_path.iterdir())


def listing(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_head_takes_the_place_of_another_only_if_told(tmp_path: Path) -> None:
    heads = heads_to_save()
    save_head(tmp_path, heads["eagle"][1], dtype=torch.float32)
    before = listing(tmp_path)
    with pytest.raises(ValueError, match=r"holds config.json, model.safetensors already: .* or pass overwrite=True"):
        save_head(tmp_path, heads["eagle3"][1], dtype=torch.float32)
    assert listing(tmp_path) == before
    (tmp_path / "pytorch_model.bin").write_bytes(b"an older one")
    head = heads["eagle3"][1]
    head.set_hot_vocab(lm.hot_ids(40))
    save_head(tmp_path, head, dtype=torch.float32, overwrite=True)
    assert inspect(tmp_path).layout == "eagle3" and set(listing(tmp_path)) == set(before)
    (tmp_path / "model.safetensors.index.json").write_text("{}")  # readers look there first
    with pytest.raises(ValueError, match=r"holds model.safetensors.index.json, which readers would load instead"):
        save_head(tmp_path, head, dtype=torch.float32, overwrite=True)
    with pytest.raises(ValueError, match="is a file: expected a folder"):
        save_head(tmp_path / "config.json", head, dtype=torch.float32)


def test_a_crash_while_writing_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec.reach.checkpoints import replacing

    head = heads_to_save()["eagle"][1]
    save_head(tmp_path / "head", head, dtype=torch.float32)
    before = listing(tmp_path / "head")

    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(replacing, "json_text", full)  # after the weights
    for folder in (tmp_path / "head", tmp_path / "new"):
        with pytest.raises(OSError, match="no space left"):
            save_head(folder, head, dtype=torch.bfloat16, overwrite=True)
    assert listing(tmp_path / "head") == before and not (tmp_path / "new").exists()


def test_tensors_that_share_memory_are_stored_apart(tmp_path: Path) -> None:
    """safetensors refuses shared ones, and readers need all names: an output head that is the embedding or its rows."""
    layer, sizes = LayerConfig(lm.HIDDEN, 40, 4, 2, 8), (40, lm.VOCAB)
    configs = [Eagle3Config(layer, lm.HIDDEN, lm.VOCAB, n, (0, 1, 2), own_embedding=True) for n in sizes]
    narrow, wide = map(Eagle3Head, configs)
    narrow.set_hot_vocab(lm.hot_ids(40))
    narrow.lm_head.weight.data = narrow.embed_tokens.weight.data[:40]
    wide.set_hot_vocab(torch.arange(lm.VOCAB))
    wide.lm_head.weight = wide.embed_tokens.weight
    for head in (narrow, wide):
        folder = tmp_path / str(head.config.draft_vocab_size)
        save_head(folder, head, dtype=torch.bfloat16)
        stored = load_file(str(folder / "model.safetensors"))
        assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode
        rows = stored["embed_tokens.weight"][: head.config.draft_vocab_size]
        assert rows.dtype is torch.bfloat16 and torch.equal(stored["lm_head.weight"], rows)
        assert torch.equal(load(folder).lm_head.weight, rows.float())


@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
def test_rows_of_the_targets_output_head_need_no_storing(tmp_path: Path, layout: str) -> None:
    head = heads_to_save()["eagle3"][1]
    head.set_hot_vocab(lm.hot_ids(40))
    save_head(tmp_path, head, layout=layout, dtype=torch.bfloat16, lm_head_from_target=True)
    back = load(tmp_path)
    assert "lm_head.weight" not in inspect(tmp_path).tensors
    assert torch.equal(back.lm_head.weight, target().lm_head.weight[lm.hot_ids(40)])


# ---- what is refused


def _official(**config: Any) -> tuple[dict, lm.Tensors]:
    return lm.official_config(**config), lm.eagle3_tensors("midlayer")


def _without(case: tuple[dict, lm.Tensors], *names: str, **tensors: Any) -> tuple[dict, lm.Tensors]:
    config, stored = case
    kept = {name: t for name, t in stored.items() if name not in names}
    return config, kept | {name.replace("__", "."): t for name, t in tensors.items()}


def _eagle(fc_bias: bool = False, **config: Any) -> tuple[dict, lm.Tensors]:
    return lm.eagle_config(**config), lm.eagle_tensors(fc_bias=fc_bias)


def _speculators(**config: Any) -> tuple[dict, lm.Tensors]:
    return lm.speculators_config(**config), lm.eagle3_tensors("layers.0")


def _mimo(**config: Any) -> tuple[dict, lm.Tensors]:
    at = "model.mtp_layers.0"
    tensors = under(at, combine_tensors(MIMO_NORMS)) | lm.layer_tensors(at, bias=True)
    tensors[f"{at}.input_layernorm.weight"] = lm.gain(lm.HIDDEN, 92)
    return {**target("qwen2").config.to_dict(), **config}, tensors


H, V = lm.HIDDEN, lm.VOCAB
REFUSED = {
    "hidden size of another target": (
        lambda: _without(_official(), fc__weight=torch.ones(H, 3 * 48)),
        rf"fc\.weight has shape \({H}, 144\), expected \({H}, {3 * H}\): the hidden size of another target",
    ),
    "too few features": (
        lambda: _without(_official(), fc__weight=torch.ones(H, 2 * H)),
        "it reads 2 parts of 32, where config.json and layout mean 3",
    ),
    "another target in config.json": (
        lambda: _official(target_hidden_size=48),
        "made for hidden size 48, the target has 32: another target's head",
    ),
    "another vocabulary": (lambda: _official(vocab_size=99), "made for a vocabulary of 99, the target has 96"),
    "an embedding of another vocabulary": (
        lambda: _without(_official(), embed_tokens__weight=torch.ones(99, H)),
        rf"embed_tokens\.weight has shape \(99, {H}\), expected \({V}, {H}\): the vocabulary or the hidden size",
    ),
    "attention that does not read both": (
        lambda: _without(_official(), midlayer__self_attn__q_proj__weight=torch.ones(H, H)),
        r"midlayer.self_attn.q_proj.weight has shape \(32, 32\), expected \(32, 64\): .*twice the head's width",
    ),
    "all at once": (
        lambda: _without(_official(fc_norm=True), "norm.weight", extra=torch.ones(1), lm_head__weight=torch.ones(3, H)),
        r"fc_norm=True, but there is no tensor fc_norm; missing tensor norm.weight of shape \(32,\); unexpected tensor "
        r"extra; lm_head.weight has shape \(3, 32\), expected \(40, 32\): draft_vocab_size",
    ),
    "absolute d2t": (
        lambda: _without(_official(), d2t=lm.hot_ids(40)),
        "d2t holds absolute target ids; expected offsets",
    ),
    "no hot vocabulary was set": (
        lambda: _without(_official(), d2t=torch.zeros(40).long(), t2d=torch.ones(V).bool()),
        "d2t is all zeros: no hot vocabulary was set before export",
    ),
    "maps of other types": (
        lambda: _without(_official(), t2d=torch.ones(V)),
        r"d2t is torch.int64 and t2d torch.float32; expected torch.int64 and torch.bool",
    ),
    "flags that official names cannot have": (
        lambda: _official(norm_before_residual=True),
        "config.json sets norm_before_residual: this layout cannot express it",
    ),
    "aux ids of a deeper target": (
        lambda: _official(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}),
        r"aux layer ids \[2, 16, 29\] do not fit 8 layers \(ascending, of 1..7\)",
    ),
    "the last layer's output as a feature": (
        lambda: _official(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}),
        "transformers returns normed",
    ),
    "a head of one layer's output": (
        lambda: _official(eagle_config={"use_aux_hidden_state": False}),
        "use_aux_hidden_state=False: expected a head that reads outputs of several layers",
    ),
    "rope that depends on the length": (
        lambda: _official(rope_scaling={"type": "dynamic", "factor": 2.0}),
        "rope_type='dynamic': expected default or one of linear, llama3, yarn",
    ),
    "sizes that are missing": (
        lambda: ({"model_type": "llama"}, lm.eagle3_tensors("midlayer")),
        "config.json lacks 'hidden_size' .*; config.json lacks 'intermediate_size'",
    ),
    "quantised weights": (
        lambda: _without(_official(), norm__weight=torch.ones(H).to(torch.float8_e4m3fn)),
        r"norm.weight stored as torch.float8_e4m3fn: quantised weights",
    ),
    "a bias that config.json denies": (
        lambda: _eagle(fc_bias=True, bias=False),
        "config.json has bias=False, but there is a tensor fc.bias",
    ),
    "no bias where true is meant": (
        lambda: _eagle(),
        "config.json has no 'bias', which means true, but there is no tensor fc.bias",
    ),
    "an input norm that EAGLE-1 has not": (
        lambda: _without(_eagle(bias=False), layers__0__input_layernorm__weight=torch.ones(H)),
        "unexpected tensor layers.0.input_layernorm.weight: the first layer of EAGLE-1/2 has no input norm",
    ),
    "an EAGLE-1 head of another width": (
        lambda: (lm.eagle_config(bias=False, hidden_size=48), lm.eagle_tensors(fc_bias=False)),
        "made for hidden size 48, the target has 32: another target's head; fc.weight has shape",
    ),
    "a norm that no flag speaks of": (
        lambda: _without(_speculators(), input_norm__weight=torch.ones(3 * H)),
        "config.json has no 'norm_before_fc', which means false, but there is a tensor input_norm",
    ),
    "a flag without its norms": (
        lambda: _speculators(fc_norm=True),
        "config.json has fc_norm=True, but there is no tensor fc_norm",
    ),
    "layers of two kinds": (
        lambda: _speculators(layer={"layer_types": ["full_attention", "sliding_attention"]}),
        r"layer_types=\['full_attention', 'sliding_attention'\]: expected draft layers of one kind",
    ),
    "more layers promised than stored": (
        lambda: _speculators(layer={"num_hidden_layers": 2}),
        "num_hidden_layers=2, but 1 have tensors",
    ),
    "a layer of an unknown type": (
        lambda: _speculators(layer={"model_type": "mamba"}),
        "transformer_layer_config.model_type='mamba': expected llama or qwen3",
    ),
    "an MTP layer without its projection": (
        lambda: _without(_mimo(), "model.mtp_layers.0.input_proj.weight"),
        r"missing tensor model.mtp_layers.0.input_proj.weight of shape \(32, 64\): an MTP layer of another family",
    ),
    "more MTP layers promised than stored": (
        lambda: _mimo(num_nextn_predict_layers=2),
        r"config.json has 2 MTP layers, the tensors are of layers \[0\]",
    ),
    "nothing but the norms around an MTP layer": (
        lambda: ({}, {"mtp.norm.weight": torch.ones(H)}),
        "tensors around an MTP layer, but none of the layer itself",
    ),
    "an MTP layer after other layers": (
        lambda: ({}, under("model.layers.5", combine_tensors(DEEPSEEK_NORMS))),
        "its MTP layer is model.layers.5; expected model.layers.8, after the 8 layers of the target",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(tmp_path: Path, what: str) -> None:
    make, message = REFUSED[what]
    folder = lm.write(tmp_path, *make())
    with pytest.raises(CheckpointError, match=message):
        load(folder, "qwen2" if "MTP" in what else "llama")


def test_files_that_are_cut_off(tmp_path: Path) -> None:
    legacy = lm.write(tmp_path / "bin", lm.eagle_config(bias=False), lm.eagle_tensors(fc_bias=False), legacy=True)
    for folder, name in ((legacy, "pytorch_model.bin"), (lm.write(tmp_path / "st", *_official()), "model.safetensors")):
        data = (folder / name).read_bytes()
        for length in (0, 7, 100, len(data) // 2, len(data) - 1):
            (folder / name).write_bytes(data[:length])
            with pytest.raises(CheckpointError, match=rf"{name} is truncated, corrupted"):
                load(folder)
    config, tensors = _official()
    folder = lm.write_shards(tmp_path / "shards", config, *({n: t} for n, t in tensors.items()))
    (folder / f"model-00002-of-{len(tensors):05}.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"the index of its parts names model-00002-of-"):
        load(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}}))
    with pytest.raises(CheckpointError, match=r"index.json has no 'weight_map'"):
        load(folder)


def test_a_built_head_is_checked_against_its_target() -> None:
    heads = heads_to_save()
    shape = shape_of(target())
    check_head(heads["eagle"][1], shape, torch.float32, CPU)
    check_head(heads["eagle3 of another width"][1], shape, torch.float32, CPU)
    for changes, message in (
        ({"hidden_size": 48}, "hidden size is 32, the target has 48"),
        ({"vocab_size": 99}, "vocabulary is 96, the target has 99"),
        ({"num_layers": 6}, r"aux layers \(0, 3, 6\) do not fit a target of 6 layers"),
    ):
        with pytest.raises(CheckpointError, match=message):
            check_head(heads["eagle3"][1], dataclasses.replace(shape, **changes), torch.float32, CPU)
    with pytest.raises(CheckpointError, match=r"dtype is torch.float32, the target has torch.bfloat16"):
        check_head(heads["eagle"][1], shape, torch.bfloat16, CPU)
    narrow = heads["eagle3 of another width"][1]
    narrow.embed_tokens = None
    with pytest.raises(CheckpointError, match="it is 24 wide, so it cannot share the target's embed_tokens"):
        check_head(narrow, shape, torch.float32, CPU)
