"""Standalone drafts that do not fit are refused, and nothing is left on either model."""

import json

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import specdec
from specdec.prompts import tokenizer_fingerprint
from tests.test_attach import greedy, ragged_prompts
from tests.tiny_models import VOCAB, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


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
        specdec.attach(model, tiny_model("gptj"))
    assert untouched(model)
