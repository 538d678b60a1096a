"""`specdec serve` and the rest of clients' requests: neutral fields, headers, keys, origins, hostile bodies."""

import asyncio
import gc
import json
import time

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import specdec
from specdec.core.outputs import TokenLogprob
from tests.tiny_models import tiny_model

httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")  # before test_serve, whose import would fail without it
from specdec.tools.serve.forms import AnswerForm  # noqa: E402
from specdec.tools.serve.intake import StreamPiece  # noqa: E402
from specdec.tools.serve.tokens import Tokens  # noqa: E402
from tests.test_serve import CHAT, TOKENIZER, serving  # noqa: E402

schema = pytest.importorskip("specdec.tools.serve.schema")
server = pytest.importorskip("specdec.tools.serve.server")
prompts = pytest.importorskip("specdec.tools.serve.guard")

KEY = {"authorization": "Bearer secret"}
TEXT = {"prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def tiny():
    engine = specdec.attach(tiny_model("llama"), tokenizer=TOKENIZER, max_batch=4, max_seq_len=500, logprobs=2)
    options = dict(api_key="secret", allowed_origins=["https://a.example"], allowed_hosts=["127.0.0.1", "::1"])
    with serving(engine, max_waiting=2, name="tiny", **options) as served:
        served.http.headers.update(KEY)
        served.api.api_key = "secret"
        yield served
    engine.detach()


NEUTRAL = {
    **{"store": False, "metadata": {"a": "b"}, "service_tier": "auto", "user": "me", "parallel_tool_calls": True},
    **{"top_p": 1.0, "top_k": -1, "min_p": 0, "temperature": None, "presence_penalty": 0, "frequency_penalty": 0.0},
    **{"response_format": {"type": "text"}, "tools": [], "tool_choice": "auto", "logprobs": False, "seed": 3, "n": 1},
}


def test_fields_that_ask_for_nothing_are_accepted():
    chat = [{"role": "developer", "content": "a"}, {**CHAT[0], "name": "me"}, {"role": "assistant", "content": None}]
    body = schema.Body({"messages": chat, **NEUTRAL, "a field of next year": None}, is_chat=True)
    assert [m["role"] for m in body.get("messages")] == ["system", "user", "assistant"]
    assert body.get("messages")[2]["content"] == "" and body.num_top is None
    options = body.options(samples=False)
    assert {name: value for name, value in options.items() if value} == {}
    warm = schema.Body({"messages": chat, "temperature": 0.5, "top_k": -1, "min_tokens": 2}, is_chat=True)
    wanted = {"do_sample": True, "temperature": 0.5, "top_k": 0, "min_new_tokens": 2}
    assert warm.options(samples=False) == wanted


def test_a_body_needs_no_content_type_except_from_a_page(tiny):
    for kind in ("application/x-www-form-urlencoded", "text/plain", None):
        headers = {"content-type": kind} if kind else {}
        assert tiny.http.post("/v1/completions", content=json.dumps(TEXT), headers=headers).status_code == 200
        page = {**headers, "origin": "https://b.example"}
        assert tiny.http.post("/v1/completions", content=json.dumps(TEXT), headers=page).status_code == 415


def test_keys_hosts_and_origins(tiny):
    with httpx.Client(base_url=tiny.url) as stranger:
        assert stranger.get("/v1/models").status_code == 401 and stranger.get("/health").status_code == 200
        for key, status in (("Bearer secreu", 401), ("Basic secret", 401), ("bearer secret", 200)):
            answer = stranger.get("/v1/models", headers={"authorization": key})
            assert answer.status_code == status and ("www-authenticate" in answer.headers) == (status == 401)
    for host, status in (("evil.example:8000", 400), ("[", 400), ("[::1]:8000", 200), ("127.0.0.1", 200)):
        answer = tiny.http.get("/v1/models", headers={"host": host})
        assert answer.status_code == status and ("--allowed-hosts" in answer.text) == (status == 400)
    for origin, status in (("https://a.example", 200), ("https://b.example", 400)):
        asked = {"origin": origin, "access-control-request-method": "POST"}
        asked["access-control-request-headers"] = "authorization, content-type"
        assert tiny.http.options("/v1/chat/completions", headers=asked).status_code == status
    answer = tiny.http.post("/v1/completions", json=TEXT, headers={"origin": "https://a.example"})
    assert answer.headers["access-control-allow-origin"] == "https://a.example"


def test_logprobs_are_those_of_the_engine(tiny):
    wanted = tiny.engine.generate([5, 6, 7], max_new_tokens=3, ignore_eos=True).requests[0]
    out = tiny.api.completions.create(
        model="tiny", prompt=[5, 6, 7], max_tokens=3, logprobs=1, extra_body={"ignore_eos": True}
    )
    scores = out.choices[0].logprobs
    assert scores.token_logprobs == [score.logprob for score in wanted.logprobs]
    assert [list(top.values()) for top in scores.top_logprobs] == [[score.top[0][1]] for score in wanted.logprobs]
    assert scores.tokens == [TOKENIZER.decode([token]) for token in wanted.tokens]
    lengths = [len(text) for text in scores.tokens]
    assert scores.text_offset == [sum(lengths[:i]) for i in range(3)]
    streamed, offsets = [], []
    for chunk in tiny.api.completions.create(
        model="tiny", prompt=[5, 6, 7], max_tokens=3, logprobs=1, stream=True, extra_body={"ignore_eos": True}
    ):
        streamed += [p for choice in chunk.choices if choice.logprobs for p in choice.logprobs.token_logprobs]
        offsets += [at for choice in chunk.choices if choice.logprobs for at in choice.logprobs.text_offset]
    assert (streamed, offsets) == (scores.token_logprobs, scores.text_offset)
    assert tiny.post({**TEXT, "logprobs": 3}, "/v1/completions").json()["error"]["param"] == "logprobs"


@pytest.mark.parametrize("stop", [None, ["of the"]])
def test_a_text_completion_keeps_the_space_between_prompt_and_text(stop):
    """Llama 2's and Mistral's tokenizers drop the first space of what they decode."""
    names = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"▁w{i}": i for i in range(3, 128)}}
    words = Tokenizer(models.WordLevel(names, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    words.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    engine = specdec.attach(tiny_model("llama"), tokenizer=tokenizer, max_batch=4, max_seq_len=100)
    with serving(engine, name="tiny") as served:
        tokens = engine.generate("w5 w6", max_new_tokens=40, ignore_eos=True).tokens[0]
        whole = tokenizer.decode([5, 6, *tokens], skip_special_tokens=True)
        asked = dict(model="tiny", prompt="w5 w6", max_tokens=40, stop=stop, extra_body={"ignore_eos": True})
        text = served.api.completions.create(**asked).choices[0].text
        pieces = [chunk.choices[0].text for chunk in served.api.completions.create(**asked, stream=True)]
    engine.detach()
    assert "w5 w6" + text == whole and "".join(pieces) == text


def test_tokens_of_logprobs_keep_their_spaces():
    """Llama 2's and Mistral's tokenizers drop the first space of what they decode."""
    words = Tokenizer(models.WordLevel({"<unk>": 0, "▁the": 1, "the": 2, "<0xC3>": 3, "</s>": 4, "▁": 5}, "<unk>"))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    words.decoder = decoders.Sequence(parts)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="</s>")
    spelled = [Tokens(tokenizer).spell(i) for i in range(1, 6)]
    assert [text for text, _ in spelled] == [" the", "the", "\ufffd", "</s>", " "]
    assert spelled[0][1] == list(b" the") and spelled[2][1] == [0xC3]  # half a character
    assert [Tokens(TOKENIZER).spell(i) for i in (65, 0xC3)] == [(TOKENIZER.decode([65]), [65]), ("\ufffd", None)]


def test_of_tokens_with_one_text_the_best_logprob_counts():
    spelled = {1: ("a", [97]), 2: ("\ufffd", [0xC3]), 3: ("\ufffd", [0xA9])}
    form = AnswerForm(is_chat=False, model="m", num_top=3, spell=spelled.get)
    piece = StreamPiece(0, "", None, [2], [TokenLogprob(-0.25, [(2, -0.25), (1, -2.0), (3, -3.0)])])
    assert form.whole([[piece._replace(finish_reason="length")]], {})["choices"][0]["logprobs"]["top_logprobs"] == [
        {"\ufffd": -0.25, "a": -2.0}
    ]


def test_values_that_float32_cannot_hold_flush_nothing(tiny):
    for body in ({"logit_bias": {"9": 1e39}}, {"repetition_penalty": 1e-300}, {"temperature": 1e39}):
        assert tiny.post({**TEXT, **body}, "/v1/completions").status_code == 400
    assert tiny.post({**TEXT, "logit_bias": {"9": -1e39}}, "/v1/completions").status_code == 200


HOSTILE = [
    b'{"prompt":[' + b",".join([b"0.5"] * 100_000) + b"]}",
    b'{"messages":[' + b",".join([b"{}"] * 100_000) + b"]}",
    b'{"n":128,"prompt":[' + b",".join([b"[1]"] * 40_000) + b"]}",
    b'{"prompt":[5],"stop":[' + b",".join([b'"zq"'] * 100_000) + b"]}",
    b"{" + b",".join(b'"%d":1' % i for i in range(60_000)) + b"}",
    b'{"prompt":"' + b"a b c d " * 200_000 + b'"}',
]


@pytest.mark.parametrize("body", HOSTILE, ids=["floats", "messages", "prompts", "stops", "fields", "text"])
def test_hostile_bodies_build_nothing(tiny, body, monkeypatch):
    monkeypatch.setattr(tiny.engine, "_requests", None)  # none is made
    for path in ("/v1/completions", "/v1/chat/completions"):
        start = time.thread_time()
        answer = tiny.post(body, path)
        assert answer.status_code == 400 and len(answer.content) < 2000, answer.text
        assert time.thread_time() - start < 1


def test_a_long_text_is_encoded_in_part_only():
    sizes = []

    def encode(text):
        sizes.append(len(text))
        return text.split()

    with pytest.raises(ValueError, match="max_seq_len=500"):
        prompts.check_length("a b c d " * 500_000, encode, 500)
    assert sum(sizes) < 10_000
    prompts.check_length("a " * 500, encode, 500)


def test_requests_that_are_tokenised_count_among_those_that_wait(tiny):
    with tiny.app.state.intake.room_for(5):
        assert tiny.post({**TEXT, "n": 2}, "/v1/completions").status_code == 429
        assert tiny.post(TEXT, "/v1/completions").status_code == 200
    assert tiny.post({**TEXT, "n": 2}, "/v1/completions").status_code == 200


def test_values_and_prompts_are_counted_before_they_are_looked_at():
    assert schema.parse(b"[0, 0]", 9) == [0, 0]
    with pytest.raises(ValueError, match="more than 9 values"):
        schema.parse(b"[" + b"0," * 9 + b"0]", 9)
    prompts = [[1]] * schema.MOST_PROMPTS
    assert len(schema.Body({"prompt": prompts}, is_chat=False).get("prompt")) == schema.MOST_PROMPTS
    with pytest.raises(ValueError, match=r"prompt: 4097 prompts: expected at least 0 and at most 4096"):
        schema.Body({"prompt": [*prompts, None]}, is_chat=False)


def test_a_body_leaves_garbage_collection_as_it_is():
    """Captures pause it, possibly in another thread."""
    for is_on in (False, True):
        (gc.enable if is_on else gc.disable)()
        schema.parse(b"{}", 9)
        assert gc.isenabled() == is_on


def test_a_body_that_declares_no_length_is_bounded():
    """Read without a server, which would close the connection while the client is still writing."""
    sent = iter([{"type": "http.request", "body": b"0" * 6, "more_body": True}] * 3)
    taken = []

    async def receive():
        taken.append(next(sent))
        return taken[-1]

    request = server.Request({"type": "http", "method": "POST", "headers": []}, receive)
    with pytest.raises(server.HTTPException, match="more than 10 bytes") as error:
        asyncio.run(server.read_body(request, 10))
    assert error.value.status_code == 413 and len(taken) == 2
