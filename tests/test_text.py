"""Prompts of every accepted form, and text that arrives piece by piece."""

import time

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import specdec
from specdec import SamplingParams
from specdec.core.engine.request import Request
from specdec.core.text.detokenizer import Detokenizer
from specdec.core.text.inputs import prompts_to_ids
from tests.test_attach import greedy, ragged_prompts
from tests.tiny_models import tiny_model


class ByteTokenizer:
    """One token per byte, as the worst case of byte-level BPE; ids above 96 wrap so that tiny models can use it."""

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


def test_text_in_pieces_of_any_size_is_the_whole_text():
    text = "naïve – 語 😀! " * 20
    ids = list(text.encode())
    for size in (1, 2, 3, 7, 50):
        detokenizer = Detokenizer(TOKENIZER)
        parts = [detokenizer.feed(ids[i : i + size]) for i in range(0, len(ids), size)]
        assert "".join(parts) + detokenizer.finish() == text
        assert detokenizer.finish() == "" and detokenizer.num_fed == len(ids)


@pytest.mark.parametrize("size", [1, 2, 5, 40])
def test_the_token_that_completes_a_stop_string_is_the_last_that_counts(size):
    ids = list("héllo STOP and more".encode())
    detokenizer = Detokenizer(TOKENIZER, ["STOP", "more"])
    parts = []
    for i in range(0, len(ids), size):
        if not detokenizer.stopped:
            parts.append(detokenizer.feed(ids[i : i + size]))
    assert "".join(parts) == "héllo " and detokenizer.num_fed == len("héllo STOP".encode())


def test_held_text_is_looked_at_when_the_request_ends():
    """A stop string before half a character, at the length limit."""
    detokenizer = Detokenizer(TOKENIZER, ["STOP"])
    text = detokenizer.feed([*b"a STOP", 0xE8]) + detokenizer.finish()
    assert text == "a " and detokenizer.stopped


class Spaced:
    """One word per token; as in SentencePiece, the space before a text's first word is not decoded."""

    def decode(self, ids, **_):
        return " ".join("abcdefgh"[i] for i in ids)


@pytest.mark.parametrize(
    ("prompt", "ids", "stop", "expected", "num_fed"),
    [
        ("List:\n", "A, B", ":\nA", "", 1),
        ("List:\n", "AB, C", ":\nABC", "AB, C", 5),
        ("List:\n", "AB, C", ["x", "\nAB,"], "", 3),
        ("aa", "aab", "aaa", "", 1),  # the prompt's end counts, as far as it begins the string
        ("xSTOP", "STOP y", "STOP", "", 4),  # a stop string within the prompt ends nothing
        ("xSTOP", "a STOP y", "STOP", "a ", 6),
        ("é".encode()[:1], "é".encode()[1:] + b"z", "éz", "\ufffdz", 2),  # half a character of the prompt
    ],
)
@pytest.mark.parametrize("size", [1, 2, 9])
def test_a_stop_string_may_begin_in_the_prompt(prompt, ids, stop, expected, num_fed, size):
    prompt, ids = (list(text if isinstance(text, bytes) else text.encode()) for text in (prompt, ids))
    detokenizer = Detokenizer(TOKENIZER, [stop] if isinstance(stop, str) else stop, prompt)
    parts = [detokenizer.feed(ids[i : i + size]) for i in range(0, len(ids), size) if not detokenizer.stopped]
    assert ("".join(parts) + detokenizer.finish(), detokenizer.num_fed) == (expected, num_fed)


def test_the_space_between_prompt_and_text_belongs_to_a_stop_string():
    found = [Detokenizer(Spaced(), [stop], [0, 1]) for stop in ("b c", "bc", " d", "c d")]
    texts = [d.feed([2, 3]) + d.finish() for d in found]
    assert texts == ["", "c d", "c", ""] and [d.stopped for d in found] == [True, False, True, True]


def test_pieces_that_come_while_text_is_read_are_read_next():
    class Late(list):
        def __getitem__(self, at):
            found = super().__getitem__(at)
            if len(self) == 1:
                self.append("late")  # added by another thread's step
            return found

    detokenizer = Detokenizer(TOKENIZER, ["never"])
    request = Request([3], np.array([3, 0]), 9, SamplingParams(), (), frozenset(), detokenizer)
    request.pieces = Late(["first "])
    assert request.read() + request.read() == "first late"


class Counting(ByteTokenizer):
    def __init__(self):
        self.num_ids = []

    def decode(self, ids, **_):
        self.num_ids.append(len(ids))
        return super().decode(ids)


def test_text_is_decoded_once_unless_it_is_looked_at_on_the_way():
    model, prompt = tiny_model("llama"), ragged_prompts()[0]
    tokenizer = Counting()
    engine = specdec.attach(model, tokenizer=tokenizer)
    out = engine.generate([prompt], max_new_tokens=60, ignore_eos=True)
    assert tokenizer.num_ids == [60] and out.texts == [TOKENIZER.decode(out.tokens[0])]
    tokenizer.num_ids.clear()
    assert "".join(engine.stream(prompt, max_new_tokens=60, ignore_eos=True)) == out.texts[0]
    assert len(tokenizer.num_ids) <= 66 and max(tokenizer.num_ids) <= 26  # once per step, one window at a time
    engine.detach()


def test_an_error_gives_up_the_text_that_was_held_back():
    model, prompt = tiny_model("llama"), ragged_prompts()[0]
    engine = specdec.attach(model, tokenizer=TOKENIZER)
    whole = engine.generate([prompt], max_new_tokens=8, ignore_eos=True).texts[0]
    forward, left = engine._core.target.forward, [7]

    def spoil(context, metadata, ids):
        out = forward(context, metadata, ids)
        left[0] -= 1
        if left[0] == 0:
            out.logits.fill_(float("nan"))
        return out

    engine._core.target.forward = spoil
    with pytest.warns(UserWarning, match="not finite"):
        out = engine.generate([prompt], max_new_tokens=60, ignore_eos=True, stop=[whole[4:7] + "never"])
    assert out.finish_reasons == ["error"] and out.texts == [TOKENIZER.decode(out.tokens[0])]
    assert len(out.tokens[0]) == 7


def test_a_streams_time_begins_when_it_is_first_read():
    engine = specdec.attach(tiny_model("llama"), tokenizer=TOKENIZER)
    stream = engine.stream([3, 4, 5], max_new_tokens=2, ignore_eos=True)
    time.sleep(0.3)
    begin = time.perf_counter()
    while True:
        try:
            next(stream)
        except StopIteration as end:
            assert end.value.first_token_s <= end.value.time_s <= time.perf_counter() - begin
            break


def test_every_form_of_prompt():
    ids, mask = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 9]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    chat = [{"role": "user", "content": "a"}]
    rendered = list(b"<user>a<assistant>")
    assert prompts_to_ids("ab", TOKENIZER) == [[97, 98]]
    assert prompts_to_ids(["ab", chat, [5, 6]], TOKENIZER) == [[97, 98], rendered, [5, 6]]
    assert prompts_to_ids(chat, TOKENIZER) == [rendered]
    parts = [{"type": "text", "text": text} for text in ("a", "", "b")]
    assert prompts_to_ids([{"role": "user", "content": parts}], TOKENIZER) == [list(b"<user>ab<assistant>")]
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    assert prompts_to_ids([*chat, call], TOKENIZER) == [list(b"<user>a<assistant>None<assistant>")]
    assert prompts_to_ids({"input_ids": ids, "pixel_values": None}, None) == ids.tolist()
    assert prompts_to_ids([5, 6], None) == [[5, 6]]
    assert prompts_to_ids(ids, None, mask) == [[5, 6], [7, 8, 9, 9]]
    assert prompts_to_ids({"input_ids": ids, "attention_mask": mask}, None) == [[5, 6], [7, 8, 9, 9]]
    assert prompts_to_ids(ids[0], None) == [[0, 0, 5, 6]]
    assert prompts_to_ids(ids, None, mask.tolist()) == [[5, 6], [7, 8, 9, 9]]
    assert prompts_to_ids(ids[:1], None, mask[:1]) == prompts_to_ids(ids[0], None, mask[0]) == [[5, 6]]
    assert prompts_to_ids([ids[0], ids[1:]], None) == [[0, 0, 5, 6], [7, 8, 9, 9]]


def test_numpys_integers_are_token_ids():
    rows, mask = np.array([[0, 5, 6], [7, 8, 9]], dtype=np.uint16), np.array([[0, 1, 1], [1, 1, 1]])
    one, texts = rows[0], [[0, 5, 6], [7, 8, 9]]
    assert prompts_to_ids(one, None) == prompts_to_ids(list(one), None) == texts[:1]
    assert prompts_to_ids(rows, None) == prompts_to_ids(list(rows), None) == prompts_to_ids(tuple(rows), None) == texts
    assert prompts_to_ids([list(one), rows[1:], [7, np.int64(8)]], None) == [*texts, [7, 8]]
    for batch in (rows, list(rows), [list(row) for row in rows]):
        found = prompts_to_ids({"input_ids": batch, "attention_mask": mask}, None)
        assert found == [[5, 6], [7, 8, 9]] and all(type(t) is int for ids in found for t in ids)
    assert all(type(t) is int for ids in prompts_to_ids([one, list(one)], None) for t in ids)
    assert prompts_to_ids({"input_ids": one, "attention_mask": mask[0]}, None) == [[5, 6]]
    for wrong in (rows.astype(float), [rows.astype(bool)[0]], rows[None], np.array("text"), [rows]):
        with pytest.raises(ValueError, match=r"integers|tensor of 2 rows"):
            prompts_to_ids(wrong, None)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_are_refused_by_name(kind):
    for prompts, name in ((kind(b"hi"), "prompts"), ([kind(b"hi")], "prompt 0"), ([[5], kind(b"hi")], "prompt 1")):
        with pytest.raises(ValueError, match=rf"{name} is {kind.__name__}: .*decode\('utf-8'\)"):
            prompts_to_ids(prompts, TOKENIZER)


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


class Bytes:
    """A tokenizer whose tokens are bytes; num_decoded counts them."""

    num_decoded = 0

    def decode(self, tokens, **_):
        self.num_decoded += len(tokens)
        return bytes(tokens).decode(errors="replace")


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_a_long_run_of_bytes_is_text(size):
    """Decoders with byte fallback drop a whole run of bytes while one of its characters is incomplete."""
    tokenizer = Tokenizer(models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    text = "🎉" * 12 + "አማርኛ" * 9 + "é日🦀" * 8
    tokens = list(text.encode())
    assert "\ufffd" in tokenizer.decode(tokens[:30]) and "🎉" not in tokenizer.decode(tokens[:30])
    detokenizer = Detokenizer(tokenizer, ["never"])
    parts = [detokenizer.feed(tokens[i : i + size]) for i in range(0, len(tokens), size)]
    assert "".join(parts) + detokenizer.finish() == text


@pytest.mark.parametrize("half", [[0xE2], [0xE2, 0x82], [0x82]])
def test_bytes_that_never_become_text_cost_no_more_than_text(half):
    tokens = [*b"begin ", *half * 300, *"\u20ac end".encode()]
    tokenizer = Bytes()
    detokenizer = Detokenizer(tokenizer)
    text = "".join(detokenizer.feed([token]) for token in tokens) + detokenizer.finish()
    assert tokenizer.num_decoded < 80 * len(tokens)
    assert text == Bytes().decode(tokens)


class Fussy(ByteTokenizer):
    def apply_chat_template(self, messages, **_):
        raise RuntimeError("roles must alternate")


def test_what_a_chat_template_refuses_is_a_mistake():
    with pytest.raises(ValueError, match="messages: the chat template refuses them: roles must alternate"):
        prompts_to_ids([{"role": "user", "content": "a"}], Fussy())
