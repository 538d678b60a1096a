"""Prompts of every accepted form, and text that appears piece by piece."""

import pytest
import torch

import specdec
from specdec.text import Detokenizer, prompts_to_ids
from tests.test_attach import greedy, ragged_prompts
from tests.tiny_models import tiny_model


class ByteTokenizer:
    """One token a byte, as the worst case of byte-level BPE; ids past 96 wrap so that tiny models can use it."""

    def __call__(self, text, **_):
        return {"input_ids": list(text.encode())}

    def decode(self, ids, **_):
        return bytes(ids).decode(errors="replace")

    def apply_chat_template(self, messages, **_):
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


TOKENIZER = ByteTokenizer()


def pieces(text: str, stop=()) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(TOKENIZER, stop)
    out = []
    for byte in text.encode():
        out.append(detokenizer.feed([byte]))
        if detokenizer.stopped:
            break
    return [*out, detokenizer.finish()], detokenizer


def test_multi_byte_characters_come_whole():
    out, _ = pieces("naïve – 語 😀!")
    assert "".join(out) == "naïve – 語 😀!"
    assert not any("\ufffd" in piece for piece in out)


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one STOP two", ["STOP"], "one "),
        ("one STO two", ["STOP"], "one STO two"),
        ("aab aaab", ["aaab"], "aab "),
        ("x###y", ["##", "#y"], "x"),
        ("ends with ST", ["STOP"], "ends with ST"),
    ],
)
def test_stop_strings_across_tokens(text, stop, expected):
    out, detokenizer = pieces(text, stop)
    assert "".join(out) == expected
    assert detokenizer.stopped == (expected != text)


def test_every_form_of_prompt():
    ids, mask = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 9]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    chat = [{"role": "user", "content": "a"}]
    rendered = list(b"<user>a<assistant>")
    assert prompts_to_ids("ab", TOKENIZER) == [[97, 98]]
    assert prompts_to_ids(["ab", chat, [5, 6]], TOKENIZER) == [[97, 98], rendered, [5, 6]]
    assert prompts_to_ids(chat, TOKENIZER) == [rendered]
    assert prompts_to_ids([5, 6], None) == [[5, 6]]
    assert prompts_to_ids(ids, None, mask) == [[5, 6], [7, 8, 9, 9]]
    assert prompts_to_ids({"input_ids": ids, "attention_mask": mask}, None) == [[5, 6], [7, 8, 9, 9]]
    assert prompts_to_ids(ids[0], None) == [[0, 0, 5, 6]]
    assert prompts_to_ids(ids, None, mask.tolist()) == [[5, 6], [7, 8, 9, 9]]
    assert prompts_to_ids(ids[:1], None, mask[:1]) == prompts_to_ids(ids[0], None, mask[0]) == [[5, 6]]
    assert prompts_to_ids([ids[0], ids[1:]], None) == [[0, 0, 5, 6], [7, 8, 9, 9]]


def test_what_a_tokenizer_returns_without_padding():
    one = {"input_ids": [5, 6], "attention_mask": [1, 1]}
    ragged = {"input_ids": [[5, 6, 7], [8]], "attention_mask": [[0, 1, 1], [1]]}
    assert prompts_to_ids(one, None) == [[5, 6]]
    assert prompts_to_ids(ragged, None) == [[6, 7], [8]]


def test_stop_strings_and_streams_through_the_engine():
    model, prompt = tiny_model("llama"), ragged_prompts()[0]
    expected = greedy(model, prompt, 24)
    whole = TOKENIZER.decode(expected)
    engine = specdec.attach(model, tokenizer=TOKENIZER)
    assert "".join(engine.stream(prompt, max_new_tokens=24)) == whole
    stop = whole[9:12]
    out = engine.generate([prompt], max_new_tokens=24, stop=stop)
    assert out.finish_reasons == ["stop_string"]
    assert out.texts == [whole[: whole.index(stop)]]
    assert out.tokens == [expected[: len(whole[: whole.index(stop) + len(stop)].encode())]]
    stream = engine.stream(prompt, max_new_tokens=24)
    next(stream)
    stream.close()
    engine.check_integrity()
    report = engine.report()
    assert report.num_free_pages == report.num_pages
