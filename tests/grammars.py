"""A byte-level tokenizer for the tiny models, grammars, and plain constrained decoding with HF, token by token."""

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec import Grammar, SamplingParams
from specdec.core.functional.sampling import SamplingBatch, constrain, process_logits
from tests.tiny_models import VOCAB

EOS = 2
MERGES = [("{", '"'), ('"', ":"), ("Ġ", '"'), ('"', ","), ("n", "a"), ("m", "e"), ("na", "me"), ("t", "r"), ("u", "e")]
MERGES += [("tr", "ue"), ('":', "Ġ"), ("e", "d"), ("r", "ed"), ("a", "g"), ("ag", "e"), ("0", "0"), ("1", "2")]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "color": {"enum": ["red", "blue"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "color", "tags"],
    "additionalProperties": False,
}
GRAMMARS = {
    "json": Grammar(json=SCHEMA),
    "regex": Grammar(regex="(ab|cd){2,6}[0-9]{3}"),
    "choice": Grammar(choice=["red", "redder", "blue"]),
}


def tiny_tokenizer(*more_merges: tuple[str, str]) -> PreTrainedTokenizerFast:
    """A tokenizer of special ids 0 to 2, ASCII, and some merges: 128 ids at most."""
    merges = [*MERGES, *more_merges]
    characters = ["Ġ", "Ċ", *map(chr, range(33, 127))]
    names = ["<pad>", "<bos>", "<eos>", *characters, *("".join(pair) for pair in merges)]
    assert len(names) <= VOCAB
    model = models.BPE({name: i for i, name in enumerate(names)}, merges)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)


def masks_after(compiled, tokens):
    """Yield the mask of allowed next tokens after each prefix of `tokens`, the empty one first."""
    matcher, mask = compiled.matcher(), np.zeros(-(-VOCAB // 32), np.int32)
    assert matcher.fill(mask)
    yield torch.from_numpy(mask)
    for token in tokens:
        assert matcher.accept(token) and matcher.fill(mask)
        yield torch.from_numpy(mask)


@torch.inference_mode()
def plain_text(model, compiled, prompt, num_tokens):
    """Return greedy text under a grammar, token by token: mask, then argmax."""
    matcher, mask = compiled.matcher(), np.zeros(-(-model.config.vocab_size // 32), np.int32)
    text = []
    while len(text) < num_tokens:
        matcher.fill(mask)
        logits = model(torch.tensor([prompt + text], device=model.device)).logits[:, -1:].float()
        text.append(int(constrain(logits, torch.from_numpy(mask).to(model.device).view(1, 1, -1)).argmax()))
        if text[-1] == EOS:
            break
        assert matcher.accept(text[-1])
    return text


@torch.inference_mode()
def plain_law(model, ids, mask, params: SamplingParams):
    """Return the distribution [V] of the token after `ids` under a mask."""
    logits = model(torch.tensor([ids], device=model.device)).logits[:, -1:].float().cpu()
    return process_logits(constrain(logits, mask.view(1, 1, -1)), SamplingBatch.stack([params], "cpu"))[0, 0]


def spm_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer like converted SentencePiece ones: "llama2" and "metaspace" prepend a space, "gemma" does not."""
    space, characters = "\u2581", [*map(chr, range(33, 127))]
    merges = [("{", '"'), ('"', ":"), (space, '"'), ("n", "a"), ("na", "m"), (space, "{"), (space + "{", '"')]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), space, *characters, *map("".join, merges)]
    model = models.BPE({name: i for i, name in enumerate(names)}, merges, byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    to_space = normalizers.Replace(" ", space)
    if kind == "metaspace":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=space, prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(space)] * (kind == "llama2") + [to_space])
    tokenizer.decoder = decoders.Sequence([decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")
