"""`model.generate(..., custom_generate=FOLDER, trust_remote_code=True)`, with folders of drafts."""

from __future__ import annotations

import copy
import gc
import shutil
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TextStreamer, dynamic_module_utils

import specdec
from specdec import shipped
from specdec.custom_generate import engine_of
from specdec.reach.heads.custom_generate import FILE, TEXT
from specdec.reach.heads.load import save_head
from specdec.tools.commands.convert import convert
from tests.heads import random_draft
from tests.test_threads import join
from tests.tiny_models import DEVICE, tiny_model

PROMPT = torch.tensor([[5, 6, 7]], device=DEVICE)
NEW = {"max_new_tokens": 10, "eos_token_id": -1}


@pytest.fixture(autouse=True)
def _modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make transformers copy generate.py here, not into the user's cache."""
    modules = tmp_path / "hf_modules"
    modules.mkdir()
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(modules))
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)


def saved(folder: Path, model: Any, algo: str = "eagle3") -> str:
    save_head(folder, random_draft(model, algo), dtype=torch.float32)
    return str(folder)


def generate(model: Any, folder: str, **options: Any) -> Any:
    if "input_ids" not in options:
        options = {"inputs": PROMPT, **NEW, **options}
    return model.generate(**options, custom_generate=folder, trust_remote_code=True)


def test_a_real_model_and_a_shipped_head(smollm2, capsys):
    model, tokenizer = smollm2[0], copy.deepcopy(smollm2[1])
    tokenizer.pad_token_id = tokenizer.eos_token_id
    folder = str(shipped.path())
    texts = ["The capital of France is", "Three primary colours are red, blue and"]
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    try:
        for text in texts:
            inputs = tokenizer(text, return_tensors="pt").to(model.device)
            expected = model.generate(**inputs, **options)
            assert torch.equal(generate(model, folder, **inputs, **options), expected)
        engine = engine_of(model)
        assert engine is not None and engine.report().acceptance.num_rounds > 0, "one engine for both calls"

        tokenizer.padding_side = "left"
        inputs = tokenizer(texts, return_tensors="pt", padding=True).to(model.device)
        expected = model.generate(**inputs, **options)
        assert torch.equal(generate(model, folder, **inputs, **options), expected)

        tokenizer.padding_side = "right"
        inputs = tokenizer(texts, return_tensors="pt", padding=True).to(model.device)
        got = generate(model, folder, **inputs, **options)
        width = inputs["input_ids"].shape[1]
        for ids, mask, row in zip(inputs["input_ids"], inputs["attention_mask"], got, strict=True):
            alone = ids[mask.bool()].unsqueeze(0)
            wanted = model.generate(alone, **options)[0, alone.shape[1] :]
            assert torch.equal(row[width : width + len(wanted)], wanted)

        inputs = tokenizer(texts[0], return_tensors="pt").to(model.device)
        stops = {"stop_strings": [" Paris"], "tokenizer": tokenizer, "streamer": TextStreamer(tokenizer)}
        got = generate(model, folder, **inputs, **options, **stops)
        assert tokenizer.decode(got[0]).endswith(" Paris") and " Paris" in capsys.readouterr().out
        assert engine_of(model) is engine
        engine.check_integrity()
    finally:
        if engine_of(model) is not None:
            engine_of(model).detach()


def test_an_engine_is_replaced_by_another_folder_or_other_settings(tmp_path):
    model = tiny_model("llama").to(DEVICE)
    expected = model.generate(PROMPT, **NEW)
    # folders with the same last name and equal generate.py files: transformers uses one module for both
    first, second = saved(tmp_path / "a" / "head", model), saved(tmp_path / "b" / "head", model, "eagle")
    assert torch.equal(generate(model, first), expected)
    one = engine_of(model)
    assert torch.equal(generate(model, first + "/"), expected) and engine_of(model) is one
    assert torch.equal(generate(model, second), expected)
    two = engine_of(model)
    assert two is not one and two.report().draft["algo"] == "eagle"
    with pytest.raises(specdec.DetachedError):
        one.generate([[5]])
    assert torch.equal(generate(model, second, engine_settings={"max_seq_len": 32, "max_batch": 1}), expected)
    three = engine_of(model)
    assert three is not two and three.config.max_seq_len == 32
    assert torch.equal(generate(model, second), expected) and engine_of(model) is three, "settings stay"
    with pytest.raises(ValueError, match="max_seq_len=32"):
        generate(model, second, max_new_tokens=40)
    three.detach()
    assert engine_of(model) is None and not [name for name in vars(model) if "specdec" in name]
    assert torch.equal(generate(model, second), expected), "attached anew"
    moved = tmp_path / "elsewhere"
    shutil.move(second, moved)
    assert torch.equal(generate(model, str(moved)), expected) and engine_of(model) is not three
    engine_of(model).check_integrity()


def test_calls_with_two_folders_in_two_threads(tmp_path):
    model, seen = tiny_model("llama").to(DEVICE), []
    expected = model.generate(PROMPT, **NEW)
    folders = [saved(tmp_path / "one", model), saved(tmp_path / "two", model, "eagle")]

    def calls(folder):
        seen.extend(torch.equal(generate(model, folder, engine_settings={"max_seq_len": 32}), expected) for _ in "123")

    threads = [threading.Thread(target=calls, args=(folder,)) for folder in folders]
    join(threads)
    assert seen == [True] * 6


def test_the_engine_goes_with_its_model(tmp_path):
    model = tiny_model("llama").to(DEVICE)
    folder = saved(tmp_path / "head", model)
    graphs = {"cuda_graph": True, "graph_sampling": "greedy", "prefill_graph": "off", "max_batch": 1}
    generate(model, folder, engine_settings=graphs)  # the engine must not take itself for a change of the model
    twin = copy.deepcopy(model)
    assert engine_of(twin) is None and torch.equal(
        generate(twin, folder, engine_settings=graphs), generate(model, folder)
    )
    assert engine_of(twin) is not engine_of(model)
    gone = [weakref.ref(x) for m in (model, twin) for x in (m, engine_of(m), engine_of(m)._core)]
    del model, twin
    gc.collect()
    assert [ref() for ref in gone] == [None] * 6


def test_what_goes_wrong_is_named(tmp_path, monkeypatch):
    model = tiny_model("llama").to(DEVICE)
    folder = saved(tmp_path / "head", model)
    with pytest.raises(ValueError, match="num_beams=2"):
        generate(model, folder, num_beams=2)
    with pytest.warns(UserWarning, match="decoded by transformers"):
        generate(model, folder, num_beams=2, on_unsupported="fallback")
    with pytest.raises(ValueError, match="revision with custom_generate"):
        generate(model, folder, revision="v2")
    engine = engine_of(model)
    with pytest.raises(ValueError, match=r"num_step=2: attach\(\) has no such setting"):
        generate(model, folder, engine_settings={"num_step": 2})
    for wrong in ([("max_batch", 2)], "max_batch=2", {2: 2}, 5):
        with pytest.raises(ValueError, match=r"engine_settings=.*: expected a dict from names to values"):
            generate(model, folder, engine_settings=wrong)
    assert engine_of(model) is engine, "what was there is not lost"
    assert generate(model, folder).shape == (1, 13), "a failed call leaves the model usable"
    with pytest.raises(ValueError, match=r"add draft=FOLDER"):
        specdec.custom_generate.generate_with_draft(model, inputs=PROMPT)
    assert specdec.custom_generate.generate_with_draft(model, inputs=PROMPT, draft=folder, **NEW).shape == (1, 13)
    with pytest.raises(ValueError, match="trust_remote_code"):
        model.generate(PROMPT, custom_generate=folder, trust_remote_code=False)
    monkeypatch.setitem(sys.modules, "specdec.custom_generate", None)
    with pytest.raises(
        ImportError, match="decoded with specdec, which cannot be imported: pip install specdec-toolkit"
    ):
        generate(model, folder)


def test_every_folder_of_a_draft_has_the_file(tmp_path):
    model = tiny_model("llama")
    save_head(tmp_path / "head", random_draft(model, "eagle3"), dtype=torch.float32)
    convert(tmp_path / "head", tmp_path / "other", "speculators", verifier="tiny")
    for folder in (tmp_path / "head", tmp_path / "other", *map(shipped.path, shipped.available())):
        assert (folder / FILE).read_text("utf-8") == TEXT
