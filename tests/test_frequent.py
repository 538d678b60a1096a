"""The most frequent tokens of texts, to which a draft may be restricted."""

import json

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from specdec.core.text.frequent import frequent_ids, texts_of


@pytest.fixture(scope="module")
def tokenizer():
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(30)}, unk_token="w1"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w29", unk_token="w1")


def test_special_ones_then_frequent_ones_then_the_lowest(tokenizer):
    texts = ["w7 w9 w7", "w9 w7 w20 w4 w20"]
    assert frequent_ids(tokenizer, texts, 3) == [1, 7, 29]
    assert frequent_ids(tokenizer, iter(texts), 5) == [1, 7, 9, 20, 29]  # equal counts: lower ids first
    assert frequent_ids(tokenizer, "".join(f"{text} " for text in texts), 3) == [1, 7, 29]  # one text, not its letters
    assert frequent_ids(tokenizer, texts, 8) == [0, 1, 2, 4, 7, 9, 20, 29]
    assert frequent_ids(tokenizer, [], 4) == [0, 1, 2, 29]


@pytest.mark.parametrize("size", [2, 31])
def test_sizes_that_cannot_be(tokenizer, size):
    with pytest.raises(ValueError, match=f"size={size}: expected more than the 2 special tokens, and at most all 30"):
        frequent_ids(tokenizer, ["w7"], size)


def test_texts_of_files(tmp_path):
    lines, plain = tmp_path / "a.jsonl", tmp_path / "a.txt"
    lines.write_text(json.dumps({"question": "w1", "turns": ["w2", {"text": "w3"}], "n": 4}) + "\n\n" + '"w5"\n')
    plain.write_text("w1 w2\nw3\n")
    assert list(texts_of(lines)) == ["w1", "w2", "w3", "w5"]
    assert list(texts_of(plain)) == ["w1 w2\n", "w3\n"]
    lines.write_text('{"question": "w1"}\n{"question": w2}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl:2: not JSON"):
        list(texts_of(lines))
