"""`specdec convert`: round trips are bit-identical; what a layout cannot express is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from specdec.reach.heads.load import load_head, save_head
from specdec.reach.targets.shape import TargetShape
from specdec.tools.commands.convert import convert
from specdec.tools.commands.main import app
from tests import layout_models as lm
from tests.heads import random_head
from tests.train_models import tiny_target

SHAPE = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "rms_norm_eps")
OFFICIAL = (*SHAPE, "draft_vocab_size", "head_dim", "rope_theta", "max_position_embeddings", "fc_norm", "eagle_config")
AUX = {"eagle_aux_hidden_state_layer_ids": [1, 3, 6], "use_aux_hidden_state": True}
SCALING = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def same_tensors(a: lm.Tensors, b: lm.Tensors) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_official_there_and_back(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = lm.eagle3_tensors("midlayer", dim=12) | {f"fc_norm.{i}.weight": lm.gain(lm.HIDDEN, i) for i in range(3)}
    tensors = {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
    more = {"head_dim": 12, "rope_theta": 5e5, "rope_scaling": SCALING, "fc_norm": True, "eagle_config": AUX}
    lm.write(tmp_path / "a", lm.official_config(**more), tensors)
    convert(tmp_path / "a", tmp_path / "b", "speculators", verifier="someone/target")
    there = config_of(tmp_path / "b")
    assert there["speculators_config"]["verifier"]["name_or_path"] == "someone/target"
    assert there["eagle_aux_hidden_state_layer_ids"] == [1, 3, 6] and there["norm_output"] is False
    names = load_file(str(tmp_path / "b" / "model.safetensors")).keys()
    assert {
        "layers.0.hidden_norm.weight",
        "fc_norm.2.weight",
        "d2t",
    } < names and "midlayer.hidden_norm.weight" not in names
    convert(tmp_path / "b", tmp_path / "c", "official")
    assert same_tensors(load_file(str(tmp_path / "c" / "model.safetensors")), tensors)
    before, after = config_of(tmp_path / "a"), config_of(tmp_path / "c")
    assert {k: before[k] for k in (*OFFICIAL, "rope_scaling")} == {k: after[k] for k in (*OFFICIAL, "rope_scaling")}
    assert after["speculators_config"] == there["speculators_config"]


def test_speculators_there_and_back(tmp_path: Path) -> None:
    tensors = {**lm.eagle3_tensors("layers.0"), "embed_tokens.weight": lm.noise(lm.VOCAB, lm.HIDDEN)}
    lm.write(tmp_path / "a", lm.speculators_config(), tensors)
    convert(tmp_path / "a", tmp_path / "b", "official")
    official = config_of(tmp_path / "b")
    assert "eagle_aux_hidden_state_layer_ids" not in official["eagle_config"]  # the default is not written
    convert(tmp_path / "b", tmp_path / "c", "speculators")
    assert same_tensors(load_file(str(tmp_path / "c" / "model.safetensors")), tensors)
    before, after = config_of(tmp_path / "a"), config_of(tmp_path / "c")
    for key in ("speculators_model_type", "draft_vocab_size", "speculators_config", "architectures"):
        assert before[key] == after[key], key
    ours, theirs = (c["transformer_layer_config"] for c in (before, after))
    keys = (*SHAPE, "head_dim", "rope_theta")
    assert {k: ours[k] for k in keys} == {k: theirs[k] for k in keys}


def test_rope_that_nobody_named_is_written_down(tmp_path: Path) -> None:
    lm.write(tmp_path / "a", lm.official_config(), lm.eagle3_tensors("midlayer"))
    notes = convert(tmp_path / "a", tmp_path / "b", "speculators")
    assert "rope theta 10000, the default; config.json does not say" in notes
    assert config_of(tmp_path / "b")["transformer_layer_config"]["rope_theta"] == 10000.0


@pytest.mark.parametrize(
    ("flag", "tensors", "layer"),
    [
        ("norm_before_residual", {}, {}),
        ("norm_output", {}, {}),
        ("norm_before_fc", {"input_norm.weight": lm.gain(3 * lm.HIDDEN, 1)}, {}),
        ("sliding_window", {}, {"sliding_window": 4, "layer_types": ["sliding_attention"]}),
    ],
)
def test_what_the_official_layout_cannot_express(tmp_path: Path, flag: str, tensors: Any, layer: Any) -> None:
    config = lm.speculators_config(**({} if layer else {flag: True}), layer=layer)
    lm.write(tmp_path / "a", config, lm.eagle3_tensors("layers.0") | tensors)
    with pytest.raises(ValueError, match=rf"official EAGLE-3 layout cannot express {flag}"):
        convert(tmp_path / "a", tmp_path / "b", "official")
    assert not (tmp_path / "b").exists()


def test_what_convert_refuses(tmp_path: Path) -> None:
    tensors = lm.eagle3_tensors("midlayer")
    official = lm.write(tmp_path / "a", lm.official_config(), tensors)
    with pytest.raises(ValueError, match="to='gguf': expected one of official, speculators"):
        convert(official, tmp_path / "b", "gguf")
    with pytest.raises(ValueError, match="in the layout 'official' already"):
        convert(official, tmp_path / "b", "official")
    with pytest.raises(ValueError, match="is the source"):
        convert(official, official, "speculators")
    eagle = lm.write(tmp_path / "e", lm.eagle_config(bias=False), lm.eagle_tensors(fc_bias=False))
    with pytest.raises(ValueError, match="holds a head of 'eagle': expected an EAGLE-3 head"):
        convert(eagle, tmp_path / "b", "speculators")
    del tensors["lm_head.weight"]
    shared = lm.write(tmp_path / "s", lm.official_config(lm_head_from_target=True), tensors)
    with pytest.raises(ValueError, match=r"uses its target's lm_head.*give that target as --target"):
        convert(shared, tmp_path / "b", "speculators")
    broken = lm.write(tmp_path / "x", lm.official_config(), {**tensors, "extra": torch.ones(1)})
    with pytest.raises(ValueError, match=r"missing tensor lm_head.weight .*; unexpected tensor extra"):
        convert(broken, tmp_path / "b", "speculators")
    assert not (tmp_path / "b").exists()


def test_a_head_without_an_lm_head_gets_its_targets_rows(tmp_path: Path) -> None:
    """As in shipped heads and those of `train run`."""
    model = tiny_target()
    head = random_head(model)
    save_head(tmp_path / "a", head, lm_head_from_target=True, dtype=torch.float32, num_layers=5)
    assert "lm_head.weight" not in load_file(str(tmp_path / "a" / "model.safetensors"))
    shape = TargetShape.of(model)
    convert(tmp_path / "a", tmp_path / "b", "speculators", target=shape)
    before, after = (load_head(tmp_path / n, shape, torch.float32, torch.device("cpu")) for n in "ab")
    written = load_file(str(tmp_path / "b" / "model.safetensors"))["lm_head.weight"]
    assert torch.equal(written, model.lm_head.weight[head.hot_ids])
    assert same_tensors(before.state_dict(), after.state_dict())
    for sizes in ({"hidden_size": 32}, {"vocab_size": 60}):
        other = TargetShape.of(LlamaForCausalLM(LlamaConfig(**{**model.config.to_dict(), **sizes})))
        with pytest.raises(
            ValueError, match=r"--target: its output head is .* give the target that it was trained for"
        ):
            convert(tmp_path / "a", tmp_path / "c", "speculators", target=other)
    (tmp_path / "c" / "custom_generate").mkdir(parents=True)
    (tmp_path / "c" / "custom_generate" / "generate.py").write_text("mine")
    with pytest.raises(ValueError, match=r"holds custom_generate/generate.py already"):
        convert(tmp_path / "a", tmp_path / "c", "speculators", target=shape)


def test_the_command(tmp_path: Path) -> None:
    lm.write(tmp_path / "a", lm.official_config(), lm.eagle3_tensors("midlayer"))
    command = ["convert", "--json", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "speculators"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert json.loads(done.output.splitlines()[-1])["dst"] == str(tmp_path / "b")
    (tmp_path / "b" / "config.json").write_text("somebody's")
    again = CliRunner().invoke(app, command)
    assert again.exit_code != 0 and "--overwrite" in str(again.exception)
    assert (tmp_path / "b" / "config.json").read_text() == "somebody's"
    nowhere = CliRunner().invoke(app, [*command[:3], "", *command[4:]])
    assert "the folder to write to is ''" in str(nowhere.exception)
    unused = CliRunner().invoke(app, [*command[:2], str(tmp_path / "b"), "c", "--to", "official", "--target", "t"])
    assert "--target t: only --to speculators needs the target; leave it out" in str(unused.exception)
    done = CliRunner().invoke(app, [*command, "--overwrite"])
    assert done.exit_code == 0 and config_of(tmp_path / "b")["speculators_model_type"] == "eagle3"
