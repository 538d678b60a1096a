"""Tiny targets, heads and corpora for the training tests."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdec.core.draft.head import DraftHead
from specdec.reach.heads.eagle3 import Eagle3Head
from specdec.reach.heads.fresh import eagle3_config, new_eagle, new_eagle3, new_nextn
from specdec.reach.targets.pretrained import load_pretrained
from specdec.tools.train.config import HeadShape
from specdec.tools.train.data import Corpus
from specdec.tools.train.standalone import new_student

VOCAB = 96
EOS = 2
AUX = (0, 1, 3)


def tiny_target() -> LlamaForCausalLM:
    """A random Llama of 5 layers, hidden size 64, grouped heads; its logits have clear argmaxes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.1,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        eos_token_id=EOS,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    model.lm_head.weight.mul_(6.0)  # else its argmaxes are near-ties, and a draft could be right only by chance
    return model


def tiny_head(model: LlamaForCausalLM, draft_vocab_size: int = 64, seed: int = 1) -> Eagle3Head:
    """A fresh head for `model` with gaps in its hot vocabulary."""
    hot = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:draft_vocab_size]
    return new_eagle3(model, eagle3_config(model, draft_vocab_size, AUX), hot.sort().values, seed)


def fresh(algo: str, model: LlamaForCausalLM, seed: int = 1) -> DraftHead:
    """A fresh head of a kind."""
    makers = {"eagle": new_eagle, "eagle3": lambda m, s: tiny_head(m, seed=s), "nextn": new_nextn}
    return makers[algo](model, seed)


def tiny_student(model: LlamaForCausalLM, corpus: Corpus, seed: int = 1) -> LlamaForCausalLM:
    """A fresh standalone draft."""
    counts = torch.bincount(corpus.tokens.long(), minlength=VOCAB)
    return new_student(model, HeadShape(hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2), counts, seed)


def save_target(model: LlamaForCausalLM, folder: Path) -> None:
    """Save the model and a tokenizer of one word per id, "w0" to "w95", with a chat template."""
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w1"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=f"w{EOS}", unk_token="w1")
    tokenizer.chat_template = "w4 {{ messages[0]['content'] }} w2 w5"
    tokenizer.save_pretrained(folder)


def target_with_words(folder: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Write the tiny target and its tokenizer to `folder`; return them as loaded from there."""
    save_target(tiny_target(), folder)
    return load_pretrained(folder)


@torch.no_grad()
def tiny_corpus(model: LlamaForCausalLM, num_sequences: int, seed: int = 0) -> Corpus:
    """Return random prompts of 8-12 tokens with greedy answers of 12-20 tokens."""
    rng = random.Random(seed)
    given = [[rng.randrange(3, VOCAB) for _ in range(rng.randint(8, 12))] for _ in range(num_sequences)]
    said: list[list[int]] = [[] for _ in given]
    for _ in range(20):
        rows = [[*g, *s] for g, s in zip(given, said, strict=True)]
        width = max(map(len, rows))
        logits = model(torch.tensor([r + [0] * (width - len(r)) for r in rows]), use_cache=False).logits  # causal
        for i, (row, answer) in enumerate(zip(rows, said, strict=True)):
            answer.append(int(logits[i, len(row) - 1].argmax()))
    return Corpus.of([(g, s[: rng.randint(12, 20)]) for g, s in zip(given, said, strict=True)])
