"""`specdec serve`: OpenAI's client against a real server; greedy text equals `engine.generate`'s, and nothing leaks."""

import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import specdec
from specdec.tools.commands import main as cli
from specdec.tools.commands.serve import adapters_of, chosen_library
from specdec.tools.commands.serve import serve as serve_command
from specdec.tools.serve.intake import StreamPiece
from specdec.tools.train.adapt import read_log
from tests.adapters import save_lora
from tests.grammars import tiny_tokenizer
from tests.test_text import TOKENIZER
from tests.tiny_models import tiny_model
from tests.train_models import save_target, target_with_words, tiny_head, tiny_target

httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")
uvicorn = pytest.importorskip("uvicorn")
parser = pytest.importorskip("prometheus_client.parser")
build_app = pytest.importorskip("specdec.tools.serve.server").build_app
load = pytest.importorskip("specdec.tools.measure.load")
forms = pytest.importorskip("specdec.tools.serve.forms")

NAME = "words"
CHAT = [{"role": "user", "content": "w7 w9 w11"}]
MAX_BATCH, MAX_SEQ_LEN, MAX_WAITING = 16, 192, 64


@dataclass
class Served:
    """A running server, its engine, and clients."""

    engine: specdec.Engine
    app: object
    server: object
    url: str

    def __post_init__(self):
        self.api = openai.OpenAI(base_url=f"{self.url}/v1", api_key="-", max_retries=0, timeout=60)
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def post(self, body, path="/v1/chat/completions"):
        content = body if isinstance(body, bytes) else json.dumps(body)
        return self.http.post(path, content=content, headers={"content-type": "application/json"})

    def metrics(self):
        families = parser.text_string_to_metric_families(self.http.get("/metrics").text)
        return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}

    def assert_free(self):
        """Check that all rows and pages are freed soon, and no request is left."""
        end = time.monotonic() + 10
        while (self.app.state.intake.texts or self.report_free() < self.total) and time.monotonic() < end:
            time.sleep(0.02)
        self.engine.check_integrity()
        assert self.report_free() == self.total and not self.app.state.intake.texts

    def report_free(self):
        return self.engine.report().num_free_pages

    @property
    def total(self):
        return self.engine.report().num_pages


@contextmanager
def serving(engine, max_waiting=MAX_WAITING, name=NAME, **options):
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    app = build_app(engine, name, max_waiting, **options)
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=60, timeout_keep_alive=60)
    )
    thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    served = Served(engine, app, server, f"http://127.0.0.1:{sock.getsockname()[1]}")
    try:
        yield served
    finally:
        served.api.close()
        served.http.close()
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A server with a draft and a small model that has words and a chat template."""
    model, tokenizer = target_with_words(tmp_path_factory.mktemp("target"))
    settings = dict(max_batch=MAX_BATCH, max_seq_len=MAX_SEQ_LEN, num_steps=2)
    engine = specdec.attach(model, tiny_head(model).eval(), tokenizer=tokenizer, **settings)
    with serving(engine) as served:
        yield served
    engine.detach()


@pytest.fixture
def tiny():
    """A server with a random model and 4 rows, where 2 requests may wait."""
    engine = specdec.attach(tiny_model("llama"), tokenizer=TOKENIZER, max_batch=4, max_seq_len=500)
    with serving(engine, max_waiting=2, name="tiny") as served:
        yield served
    engine.detach()


def streamed(chunks):
    """Return text, finish reason and usage from the chunks of one choice."""
    text, reason, usage = "", None, None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += (choice.delta.content if hasattr(choice, "delta") else choice.text) or ""
            reason = choice.finish_reason or reason
    return text, reason, usage


def test_greedy_text_is_that_of_generate(words):
    expected = words.engine.generate(CHAT, max_new_tokens=10).requests[0]
    args = dict(model=NAME, messages=CHAT, max_tokens=10)
    for law in ({}, {"temperature": 0, "top_p": 0.9}):
        out = words.api.chat.completions.create(**args, **law)
        assert out.choices[0].message.content == expected.text and out.choices[0].finish_reason == "length"
        assert out.object == "chat.completion" and out.choices[0].message.role == "assistant"
        assert (out.usage.prompt_tokens, out.usage.completion_tokens) == (len(expected.prompt_ids), 10)
    parts = [{"type": "text", "text": t} for t in ("w7 w9", " w11")]
    args = dict(model=NAME, messages=[{"role": "user", "content": parts}], max_completion_tokens=10, stream=True)
    chunks = list(words.api.chat.completions.create(**args, stream_options={"include_usage": True}))
    assert streamed(chunks)[:2] == (expected.text, "length") and chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == 10 and not chunks[-1].choices
    assert len(chunks) > 4 and len({chunk.id for chunk in chunks}) == 1


def test_completions_of_strings_and_ids(words):
    prompts = ["w8 w3 w60 w21", "w5 w5 w90"]
    expected = words.engine.generate(prompts, max_new_tokens=6)
    ids = [r.prompt_ids for r in expected.requests]
    for prompt in (prompts, ids):
        out = words.api.completions.create(model=NAME, prompt=prompt, max_tokens=6, n=2)
        assert [c.text for c in out.choices] == [f" {t}" for t in expected.texts for _ in range(2)]
        assert [c.index for c in out.choices] == [0, 1, 2, 3]
        assert out.usage.prompt_tokens == sum(map(len, ids)) and out.usage.completion_tokens == 24
    chunks = words.api.completions.create(model=NAME, prompt=ids[0], max_tokens=6, stream=True)
    assert streamed(chunks)[0] == f" {expected.texts[0]}"
    assert words.api.completions.create(model=NAME, prompt=prompts[0]).usage.completion_tokens == 16


def test_the_bytes_of_a_stream(words):
    response = words.post({"messages": CHAT, "max_tokens": 3, "stream": True})
    lines = response.text.split("\n\n")
    assert response.headers["content-type"].startswith("text/event-stream")
    assert lines[-2:] == ["data: [DONE]", ""] and all(line.startswith("data: {") for line in lines[:-2])
    first, last = (json.loads(lines[i].removeprefix("data: ")) for i in (0, -3))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert last["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}]


@pytest.mark.parametrize("is_chat", [True, False])
def test_an_event_of_text_alone_is_that_of_any_piece(is_chat):
    form = forms.AnswerForm(is_chat, 'the "model"', None, str)
    for choice, text in enumerate(['a ""', '\n\ndata: "', "\ud83d \x00 ü"]):
        for reason in (None, "length"):
            piece = StreamPiece(choice, text, reason)
            assert form.events(piece) == "".join(map(forms.event, form.chunks(piece)))


def test_the_process_is_as_before_once_it_has_served():
    usual = sys.getswitchinterval()
    engine = specdec.attach(tiny_model("llama"), tokenizer=TOKENIZER, max_batch=4, max_seq_len=100)
    sys.setswitchinterval(0.125)
    try:
        with serving(engine, name="tiny"):
            assert sys.getswitchinterval() < 0.001 and gc.get_freeze_count() > 10000
        assert sys.getswitchinterval() == 0.125 and not gc.get_freeze_count()
    finally:
        sys.setswitchinterval(usual)
        engine.detach()


def test_complete_texts_are_logged_for_training(words, tmp_path):
    with (tmp_path / "log").open("a") as log, serving(words.engine, log=log) as served:
        asked = {"model": NAME, "prompt": [[7, 8, 9], [10, 11]], "max_tokens": 5, "temperature": 0}
        answers = served.http.post("/v1/completions", json=asked).json()["choices"]
    corpus = read_log(tmp_path / "log")
    texts = {}
    for i in range(len(corpus)):
        tokens, is_answer = corpus.sequence(i)
        said = words.engine.tokenizer.decode(tokens[is_answer], skip_special_tokens=True)
        texts[tuple(tokens[~is_answer].tolist())] = said
    assert texts == {(7, 8, 9): answers[0]["text"][1:], (10, 11): answers[1]["text"][1:]}


def test_a_log_that_cannot_be_written_to_fails_no_request(words):
    asked = {"model": NAME, "prompt": [7, 8, 9], "max_tokens": 5, "temperature": 0}
    told = pytest.warns(UserWarning, match="No space left on device: nothing is logged from now on")
    with told as warned, open("/dev/full", "a") as log, serving(words.engine, log=log) as served:
        answers = [served.http.post("/v1/completions", json=asked) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200] and len(warned) == 1


def test_what_ends_a_text(words):
    whole = words.engine.generate(CHAT, max_new_tokens=10).requests[0]
    stop = whole.text[len(whole.text) // 2 :][:4]
    ask = dict(model=NAME, messages=CHAT, max_tokens=10)
    for stops in (stop, ["never", stop]):
        out = words.api.chat.completions.create(**ask, stop=stops).choices[0]
        assert (out.message.content, out.finish_reason) == (whole.text.partition(stop)[0], "stop")
    text, reason, _ = streamed(words.api.chat.completions.create(**ask, stop=stop, stream=True))
    assert (text, reason) == (whole.text.partition(stop)[0], "stop")
    out = words.api.chat.completions.create(**ask, extra_body={"stop_token_ids": [whole.tokens[2]]})
    assert out.choices[0].finish_reason == "stop" and out.usage.completion_tokens == 3
    banned = {str(token): -100 for token in whole.tokens}
    assert words.api.chat.completions.create(**ask, logit_bias=banned).choices[0].message.content != whole.text


def test_answers_of_a_model_that_thinks_end_before_special_tokens_that_stop_them():
    """Their special tokens are text until thoughts are split off."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}{# </think> #}"
    engine = specdec.attach(tiny_model("llama"), tokenizer=tokenizer, max_batch=4, max_seq_len=64)
    ask = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 4, "logit_bias": {"1": 9}}
    with engine, serving(engine, name="tiny") as served:
        answers = [served.post({**ask, "stop": stop}).json()["choices"][0] for stop in (None, "<bos>")]
    contents = [(answer["message"]["content"], answer["finish_reason"]) for answer in answers]
    assert contents == [("<bos><bos><bos><bos>", "length"), ("", "stop")]


def test_sampling_repeats_with_its_seed(words):
    ask = dict(model=NAME, messages=CHAT, max_tokens=5, temperature=1.5, n=2)

    def texts(**options):
        return [c.message.content for c in words.api.chat.completions.create(**ask, **options).choices]

    assert texts(seed=5) == texts(seed=5) != texts(seed=7)
    law = dict(do_sample=True, temperature=1.5, seed=5, max_new_tokens=5)
    assert texts(seed=5) == words.engine.generate([CHAT, CHAT], **law).texts


def test_penalties_are_those_of_generate(words):
    """Also where several choices share a prompt."""
    law = {"frequency_penalty": 1.5, "presence_penalty": 0.5}
    text = words.engine.generate("w31 w31 w31", max_new_tokens=8, **law).texts[0]
    out = words.api.completions.create(model=NAME, prompt="w31 w31 w31", max_tokens=8, n=2, temperature=0, **law)
    assert [choice.text for choice in out.choices] == [f" {text}"] * 2
    assert text != words.engine.generate("w31 w31 w31", max_new_tokens=8).texts[0]


def test_64_streams_at_once(words):
    prompts = [f"w{n + 40} w7" for n in range(16)] * 4
    expected = [f" {t}" * bool(t) for t in words.engine.generate(prompts[:16], max_new_tokens=4).texts] * 4
    before = words.metrics()

    def one(prompt):
        return streamed(words.api.completions.create(model=NAME, prompt=prompt, max_tokens=4, stream=True))[0]

    with ThreadPoolExecutor(64) as pool:
        assert list(pool.map(one, prompts)) == expected
    words.assert_free()
    rounds = ("specdec_eager_total", "round")
    assert (
        words.metrics()[rounds] - before[rounds] <= 64
    )  # 3 tokens each after the first, in at least two rounds: 128 one by one


def test_clients_that_vanish(words, monkeypatch):
    core = words.engine._core
    step = core.step
    monkeypatch.setattr(core, "step", lambda caller: (time.sleep(0.01), step(caller)))  # 150 tokens take a second
    body = {"prompt": "w12 w13", "max_tokens": 150, "ignore_eos": True}
    before = words.metrics()
    for _ in range(2):
        with words.http.stream("POST", "/v1/completions", json={**body, "stream": True, "n": 2}) as response:
            next(response.iter_lines())
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{words.url}/v1/completions", json=body, timeout=0.3)
    words.assert_free()
    after = words.metrics()
    assert after["specdec_requests_total", "499"] - before.get(("specdec_requests_total", "499"), 0) == 4
    assert after["specdec_tokens_total",] - before["specdec_tokens_total",] < 6 * 150


def test_load_of_all_kinds(words):
    """Clients that wait for each answer, that arrive at random, and that disconnect or send garbage."""
    whole = load.Load(words.url, NAME, seconds=0.4, warm_up=0.0, longest=MAX_SEQ_LEN, prompt_tokens=8, new_tokens=5)
    assert len(whole.body(3)["prompt"].split()) + whole.body(3)["max_tokens"] <= MAX_SEQ_LEN
    assert [part.clients for part in replace(whole, clients=5).parts(2)] == [3, 2]
    for one in (replace(whole, clients=3), replace(whole, rate=60.0), replace(whole, clients=3, does_harm=True)):
        seen = asyncio.run(load.send(one))
        if seen.counts["finished"] <= 2:  # on a busy machine
            seen = asyncio.run(load.send(replace(one, seconds=8.0)))
        assert seen.counts["finished"] > 2 and not seen.errors and len(seen.firsts) >= seen.counts["finished"]
        assert not one.does_harm or seen.counts["vanished"] + seen.counts["refused"] > 0
        words.assert_free()  # also of requests cut off at the end of the window


def test_the_load_command_on_a_server_that_runs(words, tmp_path):
    length = ["--new-tokens", "4", "--prompt-tokens", "4", "--seconds", "1.5", "--warm-up", "0", "--spread", "0"]
    arguments = ["bench", "serve", "--url", words.url, "--clients", "2", *length, "--out", str(tmp_path)]
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0, done.output
    (row,) = json.loads(next(tmp_path.glob("serve_words_*.json")).read_text())["rows"]
    assert row["what"] == "clients" and row["clients"] == 2 and row["errors"] == 0
    assert row["finished"] > 0 and row["tok_s"] == pytest.approx(4 * row["finished"] / 1.5, abs=0.1)
    assert (
        row["requests_s"] == pytest.approx(row["finished"] / 1.5, abs=1e-2) and row["ttft_ms_p50"] <= row["ttft_ms_p99"]
    )
    wrongs = [
        ["--rates", "0"],
        ["--clients", "x"],
        ["--soak", "5"],
        ["--url", f"{words.url}/nothing"],
        ["--steps", "2"],
    ]
    shaped = ["bench", "serve", "--shape", "tiny", "--draft", "lookup"]
    for wrong in (*([*arguments, *wrong] for wrong in wrongs), shaped):
        refused = CliRunner().invoke(cli.app, wrong).exception
        assert isinstance(refused, ValueError) and wrong[-2] in str(refused)


def test_the_load_reads_streams_of_other_servers():
    async def read(*parts):
        async def sent():
            for part in parts:
                yield part

        return [chunk async for chunk in load._events(sent())]

    assert asyncio.run(read(b'data: {"a": 1}\n\nda', b'ta: {"a": 2}\n', b"\ndata: [DONE]\n\n")) == [{"a": 1}, {"a": 2}]
    assert asyncio.run(read(b'data: {"a": 1}\r\n\r', b'\n: ping\r\n\r\ndata: {"a": 2}\r\n\r\n')) == [{"a": 1}, {"a": 2}]


HALF = [{"role": "user", "content": "\ud800"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
BAD_CHATS = [  # fields, the field at fault, what the message says
    ({"foo": 1}, None, "foo: unknown field"),
    ({"n": 0}, "n", "from 1 to 128"),
    ({"n": True}, "n", "integer"),
    ({"n": 100}, None, "100 texts at once"),
    ({"max_tokens": "5"}, "max_tokens", "integer"),
    ({"max_tokens": 0}, "max_tokens", "integer from 1"),
    ({"max_completion_tokens": 5}, "max_tokens", "one of the two"),
    ({"min_tokens": 3}, "min_tokens", "at most 2 tokens"),
    ({"stream": "yes"}, "stream", "true or false"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "only with stream"),
    ({"logprobs": True}, "logprobs", "--max-logprobs"),
    ({"top_logprobs": 3}, "top_logprobs", "only with logprobs"),
    ({"tools": [{"type": "function"}]}, "tools", "with a function"),
    ({"response_format": {"type": "json_object"}}, "response_format", "--grammar"),
    ({"presence_penalty": 2.1}, "presence_penalty", "presence_penalty=2.1: expected a number from -2 to 2"),
    ({"frequency_penalty": "1"}, "frequency_penalty", "frequency_penalty='1': expected a number from -2 to 2"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs", "the server's own"),
    ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "the server's own"),
    ({"chat_template_kwargs": {"conversations": 1}}, "chat_template_kwargs", "the server's own"),
    ({"temperature": -1}, "temperature", "expected 0 or a number"),
    ({"temperature": float("nan")}, "temperature", "expected 0 or a number"),
    ({"temperature": 1e-9}, "temperature", "expected 0 or a number"),
    ({"temperature": 1e39}, "temperature", "expected 0 or a number"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty", "expected a number"),
    ({"logit_bias": {"9": 1e39}}, "logit_bias", "up to 1e+10"),
    ({"top_p": 0.9}, "top_p", "temperature"),
    ({"top_p": 2, "temperature": 0}, "top_p", "0"),
    ({"seed": -1}, "seed", "2**63"),
    ({"stop": ""}, "stop", "at least 1"),
    ({"stop": [1]}, "stop", "string"),
    ({"stop": ["a"] * 65}, "stop", "65 strings"),
    ({"stop_token_ids": [1] * 1000}, "stop_token_ids", "1000 token ids"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "token id"),
    ({"logit_bias": {"5": float("inf")}}, "logit_bias", "inf"),
    ({"logit_bias": {"5": float("-inf")}}, "logit_bias", "logit_bias.5=-inf: expected a finite number"),
    ({"logit_bias": {"999999": 1}}, None, "vocabulary"),
    ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias", "2000 tokens"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": "hi"}, "messages", "list"),
    ({"messages": CHAT * 5000}, "messages", "5000 messages"),
    ({"messages": HALF}, "messages", "surrogates"),
    (
        {"messages": IMAGE},
        "messages",
        "messages[0].content[0].type='image_url': only parts of type 'text'",
    ),
    ({"messages": [*CHAT * 3, *HALF]}, "messages", "messages[3].content="),
    (
        {"messages": [*CHAT, {"role": "bot", "content": "x"}]},
        "messages",
        "messages[1].role='bot': expected one of system",
    ),
    ({"messages": [{"role": "user", "content": None}]}, "messages", "messages[0].content=None"),
    ({"messages": [{**CHAT[0], "tool_calls": [{"id": "x"}]}]}, "messages", "messages[0].tool_calls"),
    (
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": 5}]},
        "messages",
        "messages[0].tool_call_id=5: expected a string",
    ),
    ({"stop_token_ids": [1, "a"]}, "stop_token_ids", "token ids"),
    ({"stop_token_ids": [999999]}, "stop_token_ids", "stop_token_ids: stop ids hold 999999"),
    ({"priority": 1001}, "priority", "from -1000 to 1000"),
    ({"deadline": -1}, "deadline", "from 0 to 1e+09"),
    ({"max_tokens": 1000}, "max_tokens", "max_seq_len"),
    ({"max_tokens": None, "max_completion_tokens": 1000}, "max_completion_tokens", "max_seq_len"),
    ({"max_tokens": None, "messages": [{"role": "user", "content": "word " * 300}]}, None, "max_seq_len"),
]


@pytest.mark.parametrize(("fields", "param", "says"), BAD_CHATS, ids=[next(iter(f)) for f, _, _ in BAD_CHATS])
def test_bad_fields_are_named(words, fields, param, says):
    for stream in ({}, {"stream": True}):
        if "stream" not in fields and not ("stream_options" in fields and stream):
            response = words.post({"messages": CHAT, "max_tokens": 2, **fields, **stream})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param) and says in error["message"]
            assert error["type"] == "invalid_request_error"
            assert (error["code"] == "context_length_exceeded") == (says == "max_seq_len")


BAD_TEXTS = [b"{", b"[]", b"\xff\xfe", b"[" * 99999, b'{"prompt": "x"} x', b"", b"{}"]
BAD_TEXTS += [
    {"prompt": p} for p in ("", [], [[]], [True], [-1], [10**30], [1.5], [CHAT], CHAT, None, {"a": 1}, "\udc00")
]
BAD_TEXTS += [{"prompt": "x", name: 1} for name in ("logprobs", "suffix", "messages", "tools", "foo")]
BAD_TEXTS += [{"prompt": "x", "logprobs": 0}, {"prompt": "x", "best_of": 2}]


def test_bad_bodies(words):
    for body in BAD_TEXTS:
        response = words.post(body, "/v1/completions")
        assert response.status_code == 400 and response.json()["error"]["message"], body
    neutral = {"presence_penalty": 0, "frequency_penalty": 0.0, "logprobs": None, "best_of": 1, "echo": False, "n": 1}
    assert words.post({"prompt": "x", "max_tokens": 1, **neutral}, "/v1/completions").status_code == 200
    too_large = words.post({"prompt": "x" * 17_000_000}, "/v1/completions")
    assert too_large.status_code == 413 and "bytes" in too_large.json()["error"]["message"]
    with pytest.raises(openai.NotFoundError, match="only 'words' is served"):
        words.api.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="logprobs"):
        words.api.chat.completions.create(model=NAME, messages=CHAT, logprobs=True)
    assert words.http.get("/v1/nothing").json()["error"]["message"] == "Not Found"
    wrong = words.http.get("/v1/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST"), wrong.text


def test_adapters_are_served_as_models_of_their_names(tmp_path):
    model = tiny_model("llama")
    folders = {name: save_lora(model, tmp_path / name, seed=i) for i, name in enumerate("ab")}
    adapters = adapters_of([f"{name}={folder}" for name, folder in folders.items()])
    engine = specdec.attach(model, tokenizer=TOKENIZER, adapters=adapters, max_batch=4, max_seq_len=64)
    ask = {"prompt": [5, 17, 33, 64], "max_tokens": 8, "temperature": 0}
    with engine, serving(engine, name="tiny") as served:
        found = served.api.models.list().data
        assert [(m.id, getattr(m, "parent", None)) for m in found] == [("tiny", None), ("a", "tiny"), ("b", "tiny")]
        assert served.api.models.retrieve("b").id == "b"
        with ThreadPoolExecutor() as pool:
            answers = list(pool.map(lambda name: served.api.completions.create(model=name, **ask), ("tiny", "a", "b")))
        expected = engine.generate([ask["prompt"]] * 3, max_new_tokens=8, adapter=[None, "a", "b"]).texts
        assert [a.choices[0].text for a in answers] == expected and len(set(expected)) == 3
        assert [a.model for a in answers] == ["tiny", "a", "b"]
        with pytest.raises(openai.NotFoundError, match="only 'tiny', 'a', 'b' are served"):
            served.api.completions.create(model="c", **ask)
        with pytest.raises(ValueError, match="'a' is the name of the model and of an adapter"):
            build_app(engine, "a")
    for wrong in (["a"], ["=x"], ["a=x", "a=y"]):
        with pytest.raises(ValueError, match=rf"--lora {wrong[-1]}: expected NAME=FOLDER, each name once"):
            adapters_of(wrong)


def test_models_health_and_metrics(words):
    assert [m.id for m in words.api.models.list()] == [NAME] == [words.api.models.retrieve(NAME).id]
    served = words.api.models.list().data[0]
    assert served.created > 1e9 and served.max_model_len == MAX_SEQ_LEN
    with pytest.raises(openai.NotFoundError, match="only 'words' is served"):
        words.api.models.retrieve("owner/other")
    assert words.http.get("/health").json() == {"status": "ok"}
    words.post({"messages": CHAT, "max_tokens": 40})
    found = words.metrics()
    assert 1 < found["specdec_tau",] <= 3 and found["specdec_requests_total", "200"] > 0
    assert found["specdec_kv_pages_free",] == found["specdec_kv_pages",] == words.total
    assert found["specdec_requests_running",] == found["specdec_requests_waiting",] == 0
    assert found["specdec_replays_total", "round"] == 0 < found["specdec_eager_total", "round"]


def long(**more):
    return {"prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, **more}


@contextmanager
def long_stream(served, **more):
    """Start a stream; yield the lines after its first."""
    with served.http.stream("POST", "/v1/completions", json=long(stream=True, **more)) as response:
        lines = response.iter_lines()
        next(lines)
        yield lines


def test_lengths_that_do_not_fit_are_told_by_their_name(tiny):
    with pytest.raises(openai.BadRequestError, match=r"max_tokens=499: .*give 498 at most") as refused:
        tiny.api.completions.create(model="tiny", prompt=[5, 6], max_tokens=499)
    assert refused.value.param == "max_tokens" and "max_new_tokens" not in str(refused.value)
    with pytest.raises(openai.BadRequestError, match="prompt has 500 tokens"):
        tiny.api.completions.create(model="tiny", prompt=[5] * 500)
    cut = tiny.api.completions.create(model="tiny", prompt=[5] * 497, extra_body={"ignore_eos": True})
    assert cut.usage.completion_tokens == 3  # the default of 16 does not apply: nobody asked for it
    with serving(tiny.engine, name="owner/tiny") as other:
        assert other.api.models.retrieve("owner/tiny").id == "owner/tiny"


def test_a_priority_is_that_of_every_choice(tiny, monkeypatch):
    core, found = tiny.engine._core, []
    submit = core.submit
    monkeypatch.setattr(core, "submit", lambda requests, **how: (found.extend(requests), submit(requests, **how)))
    for priority in ({}, {"priority": -7}):
        assert tiny.post({"prompt": [5, 6], "max_tokens": 2, "n": 2, **priority}, "/v1/completions").status_code == 200
    assert [request.priority for request in found] == [0, 0, -7, -7]


def test_an_answer_ends_at_its_deadline(tiny):
    answer = tiny.post(long(deadline=0.05), "/v1/completions").json()
    assert answer["choices"][0]["finish_reason"] == "length" and answer["usage"]["completion_tokens"] < 400
    tiny.assert_free()


def test_too_many_requests(tiny):
    response = tiny.post(long(n=7), "/v1/completions")  # can never be served
    assert response.status_code == 400 and "at most 6" in response.json()["error"]["message"]
    with long_stream(tiny, n=5):
        found = tiny.metrics()
        assert (found["specdec_requests_running",], found["specdec_requests_waiting",]) == (4, 1)
        with pytest.raises(openai.RateLimitError):
            tiny.api.completions.create(model="tiny", prompt=[5], n=2)
        assert tiny.report_free() < tiny.total
    tiny.assert_free()
    assert tiny.api.completions.create(model="tiny", prompt=[5], max_tokens=2).usage.completion_tokens == 2


def test_a_failure_is_told_to_its_client_only(tiny, monkeypatch):
    good, bad = (tiny.engine.generate(p, max_new_tokens=40, ignore_eos=True).tokens[0] for p in ([5, 6, 7], [9]))
    token = next(t for t in bad if t not in good)
    decode = type(TOKENIZER).decode

    def unlucky(self, ids, **options):
        if token in ids:
            raise KeyError("no such token")
        return decode(self, ids, **options)

    monkeypatch.setattr(type(TOKENIZER), "decode", unlucky)
    bodies = [{**long(max_tokens=40), "prompt": prompt} for prompt in ([5, 6, 7], [9])]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda body: tiny.post(body, "/v1/completions"), bodies))
    assert [a.status_code for a in answers] == [200, 500]
    assert answers[0].json()["choices"][0]["text"] == TOKENIZER.decode(good)
    assert answers[1].json()["error"]["type"] == "server_error"
    tiny.assert_free()


def test_a_step_that_fails(tiny, monkeypatch):
    step, calls = tiny.engine._core.step, []

    def broken(caller):
        calls.append(1)
        if len(calls) == 20:
            raise RuntimeError("a launch failed")
        step(caller)

    monkeypatch.setattr(tiny.engine._core, "step", broken)
    with long_stream(tiny) as lines:
        rest = [line for line in lines if line]
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["type"] == "server_error"
    assert "a launch failed" in rest[-1] and "data: [DONE]" not in rest
    tiny.assert_free()
    assert tiny.api.completions.create(model="tiny", prompt=[5], max_tokens=2).usage.completion_tokens == 2


def test_draining_lets_running_requests_end(tiny):
    with long_stream(tiny) as lines:
        tiny.app.state.intake.drain(60)
        assert tiny.http.get("/health").status_code == 503
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            tiny.api.completions.create(model="tiny", prompt=[5])
        tiny.server.should_exit = True
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and '"finish_reason": "length"' in rest[-2]


def test_draining_ends_what_takes_too_long(tiny):
    with long_stream(tiny) as lines:
        tiny.app.state.intake.drain(0.05)
        rest = [line for line in lines if line]
    assert "shutting down" in rest[-1] and len(rest) < 400
    tiny.assert_free()


def test_an_engine_that_is_detached(tiny):
    spare = specdec.attach(tiny_model("llama"), tokenizer=TOKENIZER, max_seq_len=400)
    with serving(spare) as served, long_stream(served, max_tokens=300) as lines:
        spare.detach()
        assert "detached" in [line for line in lines if line][-1]
        assert served.post(long(max_tokens=2), "/v1/completions").status_code == 503


def test_models_without_eos_are_served_without_grammars():
    pytest.importorskip("llguidance")
    assert [chosen_library(None, object(), has_end) for has_end in (True, False)] == ["auto", None]
    assert chosen_library("off", object(), True) is None and chosen_library("auto", object(), False) == "auto"


def test_the_command_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "specdec.tools.serve.api_server", raising=False)  # imported before, with uvicorn
    with pytest.raises(ValueError, match=r"uvicorn.*pip install 'specdec-toolkit\[serve\]'"):
        serve_command(target="no such target")


@pytest.mark.parametrize("key", ["", "schl\u00fcssel", "a b"])
def test_keys_that_clients_cannot_send_are_refused(key):
    with pytest.raises(ValueError, match="--api-key: expected visible ASCII characters"):
        serve_command(target="no such target", api_key=key)


def test_a_log_that_cannot_be_written_is_refused_before_anything_is_loaded(tmp_path):
    with pytest.raises(FileNotFoundError, match="none/log"):
        serve_command(target="no such target", log=tmp_path / "none" / "log")


@pytest.mark.parametrize(
    "command",
    [
        ["serve", "bundled", "--max-batch", "0"],
        ["doctor", "bundled", "shipped", "--limit", "0"],
        ["bench", "acceptance", "--limit", "0"],
    ],
)
def test_counts_below_one_are_refused_before_anything_is_loaded(command, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["specdec", *command])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert "greater than or equal to 1" in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_errors_of_the_system_are_a_line(monkeypatch, capsys):
    monkeypatch.setattr(cli, "app", lambda: Path("/dev/null/x").mkdir())
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert capsys.readouterr().err.startswith("specdec: [Errno 20] Not a directory: '/dev/null/x'")


COMMAND = """
import sys
from specdec.tools.commands.main import main
assert not {"starlette", "uvicorn", "prometheus_client"} & set(sys.modules), "imported before they are needed"
main()
"""


def test_the_command_ends_well_on_sigterm(tmp_path):
    save_target(tiny_target(), tmp_path / "target")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    arguments = ["serve", str(tmp_path / "target"), "--port", str(port), "--device", "cpu", "--name", "tiny"]
    command = [sys.executable, "-c", COMMAND, *arguments]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True)
    try:
        transport = httpx.HTTPTransport(retries=0)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", transport=transport, timeout=30) as client:
            wait_for(client, process)
            body = {"messages": [{"role": "user", "content": "w7 w9"}], "stream": True, "max_tokens": 200}
            with client.stream("POST", "/v1/chat/completions", json={**body, "ignore_eos": True}) as response:
                lines = response.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"finish_reason": "length"' in rest[-2]
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()


def wait_for(client, process):
    for _ in range(600):
        try:
            return client.get("/health").raise_for_status()
        except httpx.TransportError:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.1)
    raise AssertionError("the server did not start")
