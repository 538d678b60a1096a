"""Standalone drafts that do not fit are refused, and both models stay unchanged."""

import json
import shutil
import threading
import warnings

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import specdec
from specdec import shipped
from specdec.core.text.prompts import tokenizer_fingerprint
from specdec.reach.targets.gguf_once import gguf_read_once
from specdec.reach.targets.pretrained import load_pretrained, read_tokenizer
from tests.test_attach import greedy, ragged_prompts
from tests.tiny_models import VOCAB, tiny_model


def words(swapped=False):
    vocab = {f"w{i}": i for i in range(VOCAB)}
    if swapped:
        vocab["w7"], vocab["w9"] = 9, 7
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocab, unk_token="w0")))


def untouched(model):
    return not hasattr(model, "_specdec_attached")


@pytest.fixture
def folder(tmp_path):
    tiny_model("qwen3", 3).save_pretrained(tmp_path / "draft")
    words().save_pretrained(tmp_path / "draft")
    return tmp_path / "draft"


def test_a_folder_is_loaded_in_the_targets_dtype_and_drafts(folder):
    model, prompt = tiny_model("llama"), ragged_prompts()[0]
    engine = specdec.attach(model, folder, tokenizer=words(), num_steps=3, max_seq_len=128)
    assert engine.report().draft["algo"] == "standalone" and engine.draft_module.dtype == torch.float32
    assert engine.generate([prompt], max_new_tokens=8).tokens == [greedy(model, prompt, 8)]


def test_another_tokenizer_is_refused(folder):
    model = tiny_model("llama")
    with pytest.raises(ValueError, match=r"tokenizer is not the target's: 4 entries differ, first 'w[79]' = 7"):
        specdec.attach(model, folder, tokenizer=words(swapped=True))
    assert untouched(model)


def test_a_draft_without_a_tokenizer_may_name_its_own(folder):
    for file in folder.glob("token*"):
        file.unlink()
    model, note = tiny_model("llama"), folder / "specdec.json"
    note.write_text(json.dumps({"tokenizer_sha256": tokenizer_fingerprint(words(swapped=True))}))
    with pytest.raises(ValueError, match="was trained with the tokenizer"):
        specdec.attach(model, folder, tokenizer=words())
    note.write_text(json.dumps({"tokenizer_sha256": tokenizer_fingerprint(words())}))
    specdec.attach(model, folder, tokenizer=words()).detach()
    assert untouched(model)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", "{broken"),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", None),
        ("tokenizer_config.json", "[1]"),
    ],
)
def test_a_broken_tokenizer_is_no_missing_one(folder, name, text):
    """A missing one would skip the vocabulary check. text None: the file is missing, but others refer to it."""
    if text is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(text)
    model = tiny_model("llama")
    with pytest.raises(specdec.CheckpointError, match=r"its tokenizer \(token.*json\) cannot be read"):
        specdec.attach(model, folder, tokenizer=words())
    assert untouched(model)


def test_a_tokenizer_with_code_of_its_own_is_refused_without_a_question(folder, monkeypatch):
    def asks(*_):
        raise AssertionError("asked a question")

    monkeypatch.setattr("builtins.input", asks)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text("raise AssertionError('ran')")
    load_pretrained(folder)  # transformers has its own tokenizer for this kind of model
    (folder / "config.json").unlink()
    with pytest.raises(specdec.CheckpointError, match="it needs custom code, which is not run here; read that code"):
        read_tokenizer(folder)


def test_a_gguf_file_may_come_without_tokens_but_not_with_broken_ones(tmp_path):
    gguf = pytest.importorskip("gguf")
    assert read_tokenizer(shipped.path("smollm2-135m-instruct-standalone"), "draft.gguf") is None
    writer = gguf.GGUFWriter(tmp_path / "broken.gguf", "llama")
    writer.add_vocab_size(3)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["a", "b", "c"])  # without scores or merges
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(specdec.CheckpointError, match=r"its tokenizer \(broken.gguf\) cannot be read"):
        read_tokenizer(tmp_path, "broken.gguf")


def test_another_vocabulary_the_target_itself_and_short_positions_are_refused():
    model, other = tiny_model("llama"), tiny_model("qwen3")
    other.resize_token_embeddings(VOCAB - 8)
    with pytest.raises(ValueError, match=rf"scores {VOCAB - 8} tokens, the target {VOCAB}"):
        specdec.attach(model, other)
    with pytest.raises(ValueError, match="the draft is the target itself"):
        specdec.attach(model, model)
    short = tiny_model("qwen3")
    short.config.max_position_embeddings = 64
    with pytest.raises(ValueError, match="the draft has positions up to 64"):
        specdec.attach(model, short, max_seq_len=128)
    assert untouched(model) and untouched(other) and untouched(short)


def told(model, draft, **options):
    """Return the warnings of attach that name this file as their source."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        specdec.attach(model, draft, max_seq_len=64, **options).detach()
    return [str(w.message) for w in found if w.filename == __file__]


def test_the_targets_own_folder_as_its_draft_is_warned_of(tmp_path, monkeypatch):
    folder, copy = tmp_path / "model", tmp_path / "copy"
    tiny_model("llama").save_pretrained(folder)
    shutil.copytree(folder, copy)
    model = load_target(folder)
    same = told(model, folder)
    assert len(same) == 1 and "the draft is the same model as the target (a LlamaForCausalLM of " in same[0]
    assert "smaller model" in same[0] and told(model, load_target(folder)) == same
    monkeypatch.chdir(tmp_path)
    assert told(model, "model") == same, "the same folder under another name"
    assert not told(model, copy) and not told(tiny_model("llama"), folder), "what was loaded elsewhere may differ"
    assert untouched(model)


def load_target(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def test_a_checkpoint_without_mtp_layers_says_what_was_looked_for(folder):
    model = tiny_model("qwen3")
    with pytest.raises(ValueError, match="is a draft for 'standalone': an MTP layer is not in this checkpoint") as why:
        specdec.attach(model, folder, algo="nextn")
    for name in ("mtp.fc.*", "model.layers.N.eh_proj.*", "model.mtp_layers.0.", "use the original repository"):
        assert name in str(why.value)
    with pytest.raises(ValueError, match=r"is a draft for 'standalone'$"):
        specdec.attach(model, folder, algo="eagle")
    assert untouched(model)


def test_a_draft_serves_one_engine_at_a_time():
    draft = tiny_model("qwen3")
    first = specdec.attach(tiny_model("llama"), draft)
    second = tiny_model("llama", 1)
    with pytest.raises(specdec.AttachError, match="attached already"):
        specdec.attach(second, draft)
    assert untouched(second)
    first.detach()
    specdec.attach(second, draft).detach()
    assert untouched(draft)


def test_a_model_that_cannot_be_routed_is_no_draft():
    model = tiny_model("llama")
    with pytest.raises(specdec.AttachError, match="AttentionInterface"):
        specdec.attach(model, tiny_model("rwkv"))
    assert untouched(model)


def test_two_threads_read_gguf_files_one_after_the_other():
    """What they set in gguf is restored, whichever ends first."""
    gguf = pytest.importorskip("gguf")
    live, is_inside, may_leave = gguf.GGUFReader, threading.Event(), threading.Event()

    def read() -> None:
        with gguf_read_once():
            is_inside.set()
            may_leave.wait(10)

    thread = threading.Thread(target=read)
    with gguf_read_once():
        thread.start()
        assert not is_inside.wait(0.1)
    may_leave.set()
    thread.join()
    assert gguf.GGUFReader is live
