"""Folders as users have them, for tests of the command: tiny targets with a tokenizer, and prompt files."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for m in messages %}<user> {{ m.content }} {% endfor %}{% if add_generation_prompt %}<answer>{% endif %}"
)


def word_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A word is a token: w3, w4, … beside the special ones."""
    specials = ["<unk>", "<user>", "<eos>", "<answer>"]
    vocab = {word: i for i, word in enumerate([*specials, *(f"w{i}" for i in range(len(specials), vocab_size))])}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<eos>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def save_target(folder: Path, model: Any) -> Path:
    """`model` and a tokenizer of its vocabulary, as `from_pretrained` reads them."""
    model.save_pretrained(folder)
    word_tokenizer(model.config.get_text_config().vocab_size).save_pretrained(folder)
    return folder


def prompt_file(path: Path, *questions: str) -> Path:
    """JSON lines."""
    path.write_text("".join(json.dumps({"question": q}) + "\n" for q in questions), "utf-8")
    return path
