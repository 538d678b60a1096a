"""Untrusted files: names that lead out of their folder, invalid tensors, weights of NaN."""

from __future__ import annotations

import copy
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import specdec
from specdec import shipped
from specdec.core.errors import CheckpointError
from specdec.reach.heads.load import check_head, detect_algo, inspect, load_head
from specdec.reach.targets.pretrained import load_draft
from tests import layout_models as lm
from tests.layout_heads import CPU, DEEPSEEK_NORMS, combine_tensors, load, shape_of, target, under
from tests.tiny_models import tiny_model

INDEX = "model.safetensors.index.json"
EAGLE = lm.eagle_config(bias=False)


def indexed(folder: Path, name: Any) -> Path:
    """Write an EAGLE head whose index says that every tensor is in `name`; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(EAGLE))
    weight_map = dict.fromkeys(lm.eagle_tensors(fc_bias=False), name)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


# ---- names


@pytest.mark.parametrize("how", ["absolute", "..", "deep ..", "through a link"])
def test_an_index_does_not_lead_out_of_its_folder(tmp_path: Path, how: str) -> None:
    """Every name leads to weights that would fit."""
    own = tmp_path / "own.safetensors"
    save_file(lm.eagle_tensors(fc_bias=False), str(own))
    name = {
        "absolute": str(own),
        "..": "../own.safetensors",
        "deep ..": "parts/../../own.safetensors",
        "through a link": "parts/own.safetensors",
    }[how]
    folder = indexed(tmp_path / "head", name)
    if how == "through a link":
        (folder / "parts").symlink_to(tmp_path)
    else:
        (folder / "parts").mkdir()
    for call in (load, detect_algo, inspect, lambda f: load_draft(f, dtype=torch.float32, device="cpu")):
        with pytest.raises(CheckpointError, match=r"names the file .*: expected the name of a file in the folder"):
            call(folder)


@pytest.mark.parametrize("name", [7, None, True, ["a"], {"a": 1}, "", "a\0/b"])
def test_what_an_index_cannot_say(tmp_path: Path, name: Any) -> None:
    folder = indexed(tmp_path, name)
    with pytest.raises(CheckpointError, match=r"names the file .*: expected the name of a file in the folder"):
        load(folder)


def test_links_of_a_hub_snapshot_are_followed(tmp_path: Path) -> None:
    """Their files are links to ../../blobs."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    lm.write_shards(tmp_path / "written", EAGLE, lm.eagle_tensors(fc_bias=False))
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted((tmp_path / "written").iterdir())):
        file.rename(blobs / str(i))
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", str(i)))
    assert load(snapshot).algo == "eagle"


@pytest.mark.parametrize("path", ["~nouser-at-all/head", "/" + "x" * 300, "x" * 300, "a\0b/c", 5, None, b"head", ""])
def test_paths_that_are_none(path: Any) -> None:
    for call in (detect_algo, inspect, lambda p: load_draft(p, dtype=torch.float32, device="cpu")):
        with pytest.raises(ValueError, match=r"it is not a path|expected the path|no such folder|cannot be read"):
            call(path)
    if path is not None:
        model = tiny_model("llama")
        with pytest.raises(
            ValueError, match=r"it is not a path|draft is a (int|bytes)|expected the path|no such folder"
        ):
            specdec.attach(model, path)
        specdec.attach(model, max_seq_len=64).detach()


# ---- .bin files and JSON


BINS: dict[str, tuple[Callable[[lm.Tensors], Any], str]] = {
    "a list": (lambda t: list(t.values()), "holds a list: expected a dict of tensors"),
    "a tensor": (lambda t: t["fc.weight"], "holds a Tensor: expected a dict"),
    "integer keys": (lambda t: dict(enumerate(t.values())), "holds a dict: expected a dict of tensors by their names"),
    "no tensors": (lambda t: dict.fromkeys(t, 1), "holds a dict: expected a dict of tensors by their names"),
    "complex numbers": (lambda t: {**t, "fc.weight": t["fc.weight"].to(torch.complex64)}, "stored as torch.complex64"),
}


@pytest.mark.parametrize("what", BINS)
def test_bin_files_of_something_else(tmp_path: Path, what: str) -> None:
    make, message = BINS[what]
    lm.write(tmp_path, EAGLE, {})
    (tmp_path / "model.safetensors").unlink()
    torch.save(make(lm.eagle_tensors(fc_bias=False)), tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_a_bin_file_that_has_not_what_its_index_says(tmp_path: Path) -> None:
    lm.write(tmp_path, EAGLE, {}).joinpath("model.safetensors").unlink()
    tensors = lm.eagle_tensors(fc_bias=False)
    torch.save({n: t for n, t in tensors.items() if n != "fc.weight"}, tmp_path / "part.bin")
    weight_map = dict.fromkeys(tensors, "part.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"part.bin is truncated, corrupted or not what its index.*'fc.weight'"):
        load(tmp_path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' * 100_000, "\udc80", "[1]", "{", '{"x": ' + "9" * 5000 + "}"])
def test_json_that_is_none(tmp_path: Path, text: str) -> None:
    lm.write(tmp_path, {}, lm.eagle_tensors(fc_bias=False))
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=r"config.json (is not JSON|holds a list)"):
        load(tmp_path)


def test_a_layer_number_of_thousands_of_digits(tmp_path: Path) -> None:
    at = f"model.layers.{'9' * 5000}"
    with pytest.raises(CheckpointError, match="unknown layout"):
        load(lm.write(tmp_path, {}, under(at, combine_tensors(DEEPSEEK_NORMS))))


# ---- values of config.json


VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "a negative size": ({"hidden_size": -32}, r"hidden_size=-32: expected an integer of 1\.\."),
    "a size that is true": ({"num_key_value_heads": True}, r"num_key_value_heads=True: expected an integer"),
    "a size that is text": ({"head_dim": "8"}, r"head_dim='8': expected an integer"),
    "heads that do not group": ({"num_key_value_heads": 3}, "num_key_value_heads=3: expected a divisor of 4"),
    "heads of odd width": ({"head_dim": 7}, "heads of 7 elements: expected an even number"),
    "heads too wide for tables": ({"head_dim": 1 << 20}, "heads of 1048576 elements: expected an even number up to"),
    "heads that do not share": ({"num_attention_heads": 5, "num_key_value_heads": 5}, "5 heads do not share"),
    "a negative window": ({"sliding_window": -4}, "sliding_window=-4: expected an integer of 0"),
    "theta is a list": ({"rope_theta": [1e4]}, r"rope_theta=\[10000.0\]: expected a number above 0"),
    "theta is text": ({"rope_theta": "abc"}, "rope_theta='abc'"),
    "scaling is text": ({"rope_scaling": "yarn"}, "rope_scaling='yarn': expected an object"),
    "scaling is a number": ({"rope_parameters": 4}, "rope_parameters=4: expected an object"),
    "yarn without factor": ({"rope_scaling": {"type": "yarn"}}, "rope_type='yarn' without factor: expected a number"),
    "linear without factor": ({"rope_scaling": {"type": "linear"}}, "rope_type='linear' without factor"),
    "llama3 with factor 0": ({"rope_scaling": {"type": "llama3", "factor": 0}}, r"rope_scaling.factor=0: expected a"),
    "a part of a head": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5: expected 1"),
    "architectures": ({"architectures": 3}, "architectures=3: expected a list, each a string"),
    "kinds of layers": ({"layer_types": [["full_attention"]]}, "expected a list, each a string"),
    "layers without end": ({"num_hidden_layers": 10**30}, r"num_hidden_layers=10+: expected an integer of 1.."),
    "a draft vocabulary": ({"draft_vocab_size": "40"}, "draft_vocab_size='40'"),
    "a target's width": ({"target_hidden_size": -1}, "target_hidden_size=-1"),
    "eagle_config": ({"eagle_config": [1]}, r"eagle_config=\[1\]: expected an object"),
    "aux ids that are text": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["1", "2"]}},
        r"eagle_config.eagle_aux_hidden_state_layer_ids=\['1', '2'\]: expected a list, each an integer",
    ),
    "aux layers that are a number": ({"specdec_aux_layers": 3}, "specdec_aux_layers=3: expected a list"),
    "NaN": ({"rope_theta": float("nan")}, "rope_theta=nan"),
}


@pytest.mark.parametrize("what", VALUES)
def test_values_that_no_head_can_have(tmp_path: Path, what: str) -> None:
    changes, message = VALUES[what]
    lm.write(tmp_path, {**lm.official_config(), **changes}, lm.eagle3_tensors("midlayer"))
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)
    assert any(note.startswith("problem: ") for note in inspect(tmp_path).notes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": 4}, "text_config=4: expected an object"),
        ({"specdec_nextn": 4}, "specdec_nextn=4: expected an object"),
        ({"specdec_nextn": {"hidden_first": "no"}}, "specdec_nextn.hidden_first='no': expected true or false"),
        ({"num_nextn_predict_layers": "1"}, "num_nextn_predict_layers='1': expected an integer"),
    ],
)
def test_values_that_no_mtp_layer_can_have(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(nextn(tmp_path, **changes), "qwen2")


def test_what_no_check_foresaw_is_told_with_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec.reach.heads import configs as head_configs

    def broken(*_: Any) -> None:
        raise KeyError("unforeseen")

    monkeypatch.setattr(head_configs, "_rope", broken)
    lm.write(tmp_path, EAGLE, lm.eagle_tensors(fc_bias=False))
    with pytest.raises(
        CheckpointError, match=r"config.json cannot be read as that of 'eagle': KeyError: 'unforeseen'"
    ) as e:
        load(tmp_path)
    assert isinstance(e.value.__cause__, KeyError)


# ---- configs that contradict the tensors


def nextn(folder: Path, **changes: Any) -> Path:
    at = f"model.layers.{lm.LAYERS}"
    tensors = under(at, combine_tensors(DEEPSEEK_NORMS)) | lm.layer_tensors(at, bias=True)
    tensors |= {f"{at}.input_layernorm.weight": lm.gain(lm.HIDDEN, 96)}
    tensors |= {f"{at}.embed_tokens.weight": target("qwen2").get_input_embeddings().weight.clone()}
    return lm.write(folder, {**json.loads(target("qwen2").config.to_json_string()), **changes}, tensors)


def doubted(folder: Path, family: str, message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        load(folder, family)
    assert sum(message in note for note in inspect(folder).notes) == 1


def test_what_config_and_tensors_disagree_in_is_said_once(tmp_path: Path) -> None:
    eagle = lm.write(tmp_path / "a", {**EAGLE, "num_hidden_layers": 7}, lm.eagle_tensors(fc_bias=False))
    doubted(eagle, "llama", "num_hidden_layers=7, the tensors have 1, which is used")
    doubted(nextn(tmp_path / "b", hidden_size=4096), "qwen2", "hidden_size=4096, the tensors have 32")
    doubted(nextn(tmp_path / "c", vocab_size=32000), "qwen2", "vocab_size=32000, the tensors have 96")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(nextn(tmp_path / "d"), "qwen2")


# ---- values in a file stay as they are


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers_are_warned_about(tmp_path: Path, value: float) -> None:
    tensors = lm.eagle_tensors(fc_bias=False)
    tensors["layers.0.mlp.up_proj.weight"][3, 4] = value
    folder = lm.write(tmp_path, EAGLE, tensors)
    with pytest.warns(UserWarning, match=r"layers.0.mlp.up_proj.weight holds NaN or infinity; its drafts") as seen:
        head = load_head(folder, shape_of(target()), torch.float32, CPU)
    assert str(tmp_path) in str(seen[0].message)
    with pytest.warns(UserWarning, match="holds NaN or infinity"):
        check_head(head, shape_of(target()), torch.float32, CPU)  # a live head


def test_an_output_head_of_zeros_is_warned_about(tmp_path: Path) -> None:
    tensors = lm.eagle3_tensors("midlayer")
    tensors["lm_head.weight"].zero_()
    with pytest.warns(UserWarning, match="lm_head.weight is all zeros, so that every token is as likely"):
        load(lm.write(tmp_path, lm.official_config(), tensors))


def test_a_whole_draft_of_nan(tmp_path: Path) -> None:
    """One weight that few texts use gives a warning; a draft that cannot compute anything is refused."""
    model, draft = tiny_model("llama"), tiny_model("qwen3", 3)
    draft.get_input_embeddings().weight.data[77] = float("nan")
    with pytest.warns(UserWarning, match=r"model.embed_tokens.weight holds NaN or infinity"):
        specdec.attach(model, draft, max_seq_len=64).detach()
    draft.model.layers[0].mlp.up_proj.weight.data.fill_(float("nan"))
    draft.save_pretrained(tmp_path)
    for given in (draft, tmp_path):
        with (
            pytest.warns(UserWarning, match="2 tensors hold NaN or infinity"),
            pytest.raises(specdec.AttachError, match=r"its logits are NaN; 2 tensors hold NaN.*: use another export"),
        ):
            specdec.attach(model, given)
    specdec.attach(model, max_seq_len=64).detach()


# ---- standalone drafts


@pytest.fixture(scope="module")
def draft_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft")
    tiny_model("llama", 3).save_pretrained(folder)
    return folder


def changed(files: Path, folder: Path, **changes: Any) -> Path:
    """Return a copy of `files` with another config."""
    config = json.loads((files / "config.json").read_text())
    tensors = load_file(str(files / "model.safetensors"))
    folder = lm.write(folder, {**config, **changes}, {})
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


WHOLE: dict[str, tuple[dict[str, Any], str]] = {
    "more layers": ({"num_hidden_layers": 5}, r"missing tensor model.layers.4.*; and 4 more tensors; config.json and"),
    "another width": ({"intermediate_size": 100}, r"model.layers.0.mlp.* has shape \(.*96.*\), config.json means"),
    "a size that is text": ({"hidden_size": "64"}, "config.json does not describe a causal LM"),
    "no head": ({"num_attention_heads": 0}, "config.json does not describe a causal LM"),
    "layers without end": ({"num_hidden_layers": 10**30}, "more layers than 4096"),
    "memory without end": ({"intermediate_size": 10**9}, r"a model of [\d,]+ parameters, the weights are [\d,]+ bytes"),
    "an unknown model": ({"model_type": "nothing"}, "config.json does not describe a causal LM"),
    "code of its own": (
        {"model_type": "mine", "auto_map": {"AutoConfig": "m.C", "AutoModelForCausalLM": "m.M"}},
        "it needs custom code, which is not run here; read that code, load model and tokenizer yourself",
    ),
}


@pytest.mark.parametrize("what", WHOLE)
def test_a_whole_draft_that_is_none(
    draft_files: Path, tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asks(*_: Any) -> str:
        raise AssertionError("asked a question")

    monkeypatch.setattr("builtins.input", asks)
    changes, message = WHOLE[what]
    folder = changed(draft_files, tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_draft(folder, dtype=torch.float32, device="cpu")
    model = tiny_model("llama")
    with pytest.raises(CheckpointError, match=message):
        specdec.attach(model, folder)
    specdec.attach(model, max_seq_len=64).detach()


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    model = tiny_model("llama")
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = True
    tied = type(model)(config).eval()
    tied.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(str(tmp_path / "model.safetensors"))
    loaded, tokenizer = load_draft(tmp_path, dtype=torch.float32, device="cpu")
    assert tokenizer is None and torch.equal(loaded.lm_head.weight, tied.model.embed_tokens.weight)


def test_tensors_that_a_draft_does_not_use_are_warned_about(draft_files: Path, tmp_path: Path) -> None:
    folder = changed(draft_files, tmp_path, num_hidden_layers=3)
    with pytest.warns(UserWarning, match=r"9 tensors are not used, first model.layers.3.*describes a smaller model"):
        load_draft(folder, dtype=torch.float32, device="cpu")


def test_gguf_files_that_are_cut(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    data = (shipped.path("smollm2-135m-instruct-standalone") / "draft.gguf").read_bytes()
    for length in (0, 10, 1000, len(data) // 2):
        file = tmp_path / "draft.gguf"
        file.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"draft.gguf cannot be read as a causal LM; download it again"):
            load_draft(file, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("note", ["[1]", "7", "{", '{"tokenizer_sha256": 7}'])
def test_a_note_beside_a_draft_that_is_none(draft_files: Path, tmp_path: Path, note: str) -> None:
    from tests.test_standalone import words

    folder = changed(draft_files, tmp_path)
    (folder / "specdec.json").write_text(note)
    with pytest.raises(CheckpointError, match=r"specdec.json (is not JSON|holds a|has tokenizer_sha256=7)"):
        specdec.attach(tiny_model("llama"), folder, tokenizer=words())


def test_a_folder_that_may_not_be_read(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    folder = lm.write(tmp_path / "head", EAGLE, lm.eagle_tensors(fc_bias=False))
    (folder / "config.json").chmod(0)
    with pytest.raises(CheckpointError, match=r"config.json is not JSON"):
        load(folder)
