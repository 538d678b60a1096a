"""Structured answers of `specdec serve`: response_format, tools and reasoning, by OpenAI's client; formats as data."""

import itertools
import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import specdec
from specdec import Grammar
from tests.grammars import SCHEMA, tiny_tokenizer
from tests.heads import random_draft
from tests.tiny_models import VOCAB, tiny_model

openai, jsonschema = pytest.importorskip("openai"), pytest.importorskip("jsonschema")
for needed in ("httpx", "uvicorn", "prometheus_client.parser", "llguidance"):
    pytest.importorskip(needed)
make_compiler = pytest.importorskip("specdec.reach.grammars.compiler").make_compiler
formats, messages, structure = (
    pytest.importorskip(f"specdec.tools.serve.{name}") for name in ("formats", "messages", "structure")
)
Splitter = pytest.importorskip("specdec.tools.serve.splitting").Splitter
serving = pytest.importorskip("tests.test_serve").serving

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["red", "blue"]}, "days": {"type": "integer", "maximum": 9, "minimum": 0}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "tells", "parameters": PARAMETERS}}]
TOOLS += [{"type": "function", "function": {"name": "time"}}]
TEMPLATE = (
    "{% if tools %}{{ tools | length }} tools, write <tool_call>. {% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments.city }}{% endfor %}. {% endfor %}A: "
)
CHAT = [{"role": "user", "content": "hi"}]


def one_of(tokenizer, grammar=None):
    model = tiny_model("llama")
    settings = {"max_batch": 8, "max_seq_len": 400, "num_steps": 3, "grammar": grammar, "logprobs": 3}
    return specdec.attach(model, random_draft(model, "eagle3"), tokenizer=tokenizer, **settings)


@pytest.fixture(scope="module")
def served():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    engine = one_of(tokenizer, "auto")
    with serving(engine, name="m") as served:
        yield served
    engine.detach()


def ask(served, **fields):
    return served.api.chat.completions.create(model="m", messages=fields.pop("messages", CHAT), **fields)


def schema_format(schema=SCHEMA):
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}


def test_answers_follow_their_schema(served):
    answer = ask(served, response_format=schema_format(), max_tokens=120).choices[0]
    jsonschema.validate(json.loads(answer.message.content), SCHEMA)
    assert answer.finish_reason == "stop"
    sampled = ask(served, response_format=schema_format(), temperature=1.0, n=3, seed=1, max_tokens=150)
    for choice in sampled.choices:
        if choice.finish_reason == "stop":
            jsonschema.validate(json.loads(choice.message.content), SCHEMA)
    text = ask(served, extra_body={"structured_outputs": {"choice": ["red", "blue"]}}).choices[0].message.content
    assert text in ("red", "blue")
    assert ask(served, response_format={"type": "text"}, max_tokens=4).choices[0].finish_reason == "length"


@pytest.mark.filterwarnings("ignore:a request ended after")
def test_an_answer_that_is_complete_before_min_tokens_is_whole_and_json_everywhere(served):
    body = {"messages": CHAT, "structured_outputs": {"choice": ["red"]}, "min_tokens": 20}

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    for more in ({"logprobs": True, "top_logprobs": 3}, {"stream": True, "logprobs": True, "top_logprobs": 3}):
        answer = served.post({**body, **more})
        assert answer.status_code == 200
        lines = answer.text.replace("data: ", "").replace("[DONE]", "").splitlines()
        found = [json.loads(line, parse_constant=refuse) for line in lines if line]
        texts = [(c.get("delta") or c.get("message") or {}).get("content", "") for f in found for c in f["choices"]]
        assert "".join(texts) == "red" and found[-1]["choices"][0]["finish_reason"] == "length"
        scores = [p for f in found for c in f["choices"] for p in (c["logprobs"] or {"content": []})["content"]]
        assert min(top["logprob"] for score in scores for top in score["top_logprobs"]) == -9999.0


def test_calls_of_tools_are_parsed_and_streamed(served):
    chosen = {"type": "function", "function": {"name": "weather"}}
    whole = ask(served, tools=TOOLS, tool_choice=chosen, max_tokens=120).choices[0]
    (call,) = whole.message.tool_calls
    assert whole.finish_reason == "tool_calls" and whole.message.content is None
    assert call.function.name == "weather" and re.fullmatch("[a-z0-9]{9}", call.id), "as Mistral's templates want it"
    jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
    chunks = list(ask(served, tools=TOOLS, tool_choice=chosen, max_tokens=120, stream=True))
    deltas = [c.choices[0].delta for c in chunks]
    first = [c for d in deltas for c in d.tool_calls or [] if c.index == 0]
    assert first[0].function.name == "weather" and first[0].id and all(c.id is None for c in first[1:])
    assert "".join(c.function.arguments for c in first) == call.function.arguments and len(first) > 2
    assert not any(d.content for d in deltas) and chunks[-1].choices[0].finish_reason == whole.finish_reason
    history = [*CHAT, whole.message.model_dump(exclude_none=True)]
    history += [{"role": "tool", "tool_call_id": call.id, "content": "warm"}]
    assert ask(served, messages=history, tools=TOOLS, max_tokens=3).choices[0].finish_reason == "length"


@pytest.mark.parametrize("choice", ["auto", {"type": "function", "function": {"name": "weather"}}])
def test_a_special_token_that_ends_texts_may_end_those_that_may_call(served, choice):
    """Token 1, <bos>, is not content; an answer without calls, and one with them."""
    body = {"messages": CHAT, "tools": TOOLS, "tool_choice": choice, "max_tokens": 150}
    body |= {"stop_token_ids": [1], "logit_bias": {"1": 100}}
    reason = "stop" if choice == "auto" else "tool_calls"
    for stream in (False, True):
        given = served.post({**body, "stream": stream}).text
        assert "<bos>" not in given and f'"finish_reason": "{reason}"' in given


def test_tools_that_are_too_large_for_a_grammar_leave_the_text_free(served):
    fields = {"tools": [tool_with({"description": "x" * 2**18})], "max_tokens": 2}
    with pytest.warns(UserWarning, match=r"tool calls are not constrained: tools: lark: 26.* characters"):
        assert ask(served, **fields).choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError, match=r"tools: lark: 26.* characters: expected at most") as caught:
        ask(served, tool_choice="required", **fields)
    assert caught.value.body["param"] == "tools"


def test_an_answer_that_may_call_goes_past_eos_if_asked(served):
    fields = {"tools": TOOLS, "max_tokens": 5, "logit_bias": {"2": 100}, "extra_body": {"ignore_eos": True}}
    assert ask(served, **fields).usage.completion_tokens == 5
    with pytest.raises(openai.BadRequestError, match="grammar without EOS"):
        ask(served, tool_choice="required", **fields)


@pytest.mark.parametrize(("clients", "num"), [(8, 16), pytest.param(64, 192, marks=pytest.mark.matrix)])
def test_clients_with_different_schemas_share_rounds(served, clients, num):
    def called(i):
        tool = {"type": "function", "function": {"name": f"f{i}", "parameters": PARAMETERS}}
        chunks = ask(served, tools=[tool], tool_choice="required", max_tokens=150, stream=True, temperature=1.0, seed=i)
        calls = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or [] if c.index == 0]
        jsonschema.validate(json.loads("".join(c.function.arguments for c in calls)), PARAMETERS)
        return calls[0].function.name == f"f{i}"

    def one(i):
        if i % 3 == 2:
            return called(i)
        schema = {"type": "object", "properties": {f"k{i}": {"type": "boolean"}}, "required": [f"k{i}"]}
        schema["additionalProperties"] = False
        answer = ask(served, response_format=schema_format(schema), max_tokens=30).choices[0].message.content
        return list(json.loads(answer)) == [f"k{i}"]

    with ThreadPoolExecutor(clients) as threads:
        assert all(threads.map(one, range(num)))
    served.assert_free()


def test_grammars_that_take_long_hold_up_no_request_without_one(served, monkeypatch):
    compile_, may_go_on = served.engine.compile_grammar, threading.Event()

    def slow(grammar):
        may_go_on.wait(5)
        return compile_(grammar)

    monkeypatch.setattr(served.engine, "compile_grammar", slow)
    with ThreadPoolExecutor(24) as clients:
        fields = {"response_format": schema_format(), "max_tokens": 1}
        others = [clients.submit(ask, served, **fields) for _ in range(24)]
        time.sleep(0.1)
        began = time.perf_counter()
        assert ask(served, max_tokens=1).choices and time.perf_counter() - began < 4
        may_go_on.set()
        assert all(other.result().choices for other in others)


def tool_with(parameters):
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


BAD = [
    ({"response_format": {"type": "xml"}}, "response_format", "expected text, json_object or json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "expected an object with 'name' and 'schema'"),
    ({"response_format": schema_format({"type": 3})}, "response_format", "json.type: 3 is not valid"),
    ({"response_format": schema_format(json.loads("[" * 99 + "]" * 99))}, "response_format", "nested too deeply"),
    ({"response_format": "json_schema"}, "response_format", "expected an object with 'name' and 'schema'"),
    ({"response_format": schema_format(None)}, "response_format", "expected an object with 'name' and 'schema'"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format", "response_format.schema="),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "foo": 1}}}, "response_format",
     "response_format.json_schema.foo=1: this server does not support it"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parametres": {}}}]}, "tools",
     "tools[0].function.parametres={}: this server does not support it"),
    ({"tools": [*TOOLS, tool_with({"properties": {"a": {"type": "objct"}}})], "tool_choice": "required"}, "tools",
     "tools[2].function.parameters.properties.a.type: 'objct' is not valid"),
    ({"tools": [*TOOLS, tool_with({"type": "objct"})]}, "tools", "tools[2].function.parameters={'type': 'objct'}: exp"),
    ({"tools": [tool_with({"type": ["string", "null"]})]}, "tools", "expected a JSON schema of an object"),
    ({"tools": [tool_with({"uniqueItems": True})], "tool_choice": "required", "response_format": schema_format()},
     "tools", 'tools[0].function.parameters: Unimplemented keys: ["uniqueItems"]'),
    ({"structured_outputs": {"regex": "(["}}, "structured_outputs", "unclosed character class"),
    ({"structured_outputs": {"foo": 1}}, "structured_outputs", "expected a Grammar"),
    ({"structured_outputs": {"grammar": 'root ::= "a"', "ebnf": 'root ::= "b"'}}, "structured_outputs",
     "grammar and ebnf are the same"),
    ({"tools": [{"type": "function"}]}, "tools", "tools[0]"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "letters, digits"),
    ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "expected none, auto, required"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "no tool 'x'"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "messages",
     "arguments='{': expected JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "message"), BAD)
def test_mistakes_are_named(served, fields, param, message):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(served, extra_body={k: v for k, v in fields.items() if k != "messages"}, **{"messages": CHAT, **{
            k: v for k, v in fields.items() if k == "messages"}})  # fmt: skip
    assert message in caught.value.body["message"] and caught.value.body["param"] == param


ANSWERS = {
    "hermes": 'Sure.\n<tool_call>\n{"name": "f", "arguments": {"a": "x}\\"", "b": [1]}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    "llama3": '<|python_tag|>{"name": "f", "parameters": {"a": 1}}',
    "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {"b": {"c": 2}}}]',
    "harmony": "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>commentary to=functions.f "
    '<|constrain|>json<|message|>{"a": 1}<|call|>',
    "gemma": "<start_function_call>call:f{a:<escape>x, y:z<escape>,b:5}<end_function_call>",
}
PARTS = {
    "hermes": ["content: Sure.", "call: f", 'arguments: {"a": "x}\\"", "b": [1]}', "call: g", "arguments: {}"],
    "llama3": ["call: f", 'arguments: {"a": 1}'],
    "mistral": ["call: f", 'arguments: {"a": 1}', "call: g", 'arguments: {"b": {"c": 2}}'],
    "harmony": ["reasoning_content: so", "call: f", 'arguments: {"a": 1}'],
    "gemma": ["call: f", 'arguments: {"a": "x, y:z", "b": 5}'],
}


def parts_of(text, size, *given, **options):
    splitter = Splitter(*given, ends=["</s>"], **options)
    cuts = [text[i : i + size] for i in range(0, len(text), size)]
    parts = [part for cut in cuts for part in splitter.feed(cut, False)] + splitter.feed("</s>", True)
    groups = itertools.groupby(parts, key=lambda part: (part.kind, part.call))
    return [f"{kind}: {''.join(part.text for part in own)}" for (kind, _), own in groups]


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_answers_are_split_however_they_come(name, size):
    thinking = formats.THINKING["harmony" if name == "harmony" else "think"]
    assert parts_of(ANSWERS[name], size, formats.TOOL_FORMATS[name], thinking) == PARTS[name]


CALL = ["call: f", 'arguments: {"a": 1}']
PEOPLE = 'People: [{"name": "Ann", "arguments": {}}, {"name": "Bob", "arguments": {"c": 1}}] end'


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("harmony", ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>', CALL),
        ("harmony", '<|start|>assistant to=functions.f<|channel|>commentary<|message|>{"a": 1}', CALL),
        ("harmony", '<|channel|>analysis to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>', CALL),
        ("mistral", PEOPLE, [f"content: {PEOPLE}"]),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "x1"}]', CALL),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1}, "id": "x1"}\n</tool_call>', CALL),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": "a}"}\n</tool_call>', ["call: f", 'arguments: "a}"']),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": null}\n</tool_call>', ["call: f", "arguments: null"]),
    ],
)
def test_calls_are_read_as_models_write_them(name, text, parts, size):
    assert parts_of(text, size, formats.TOOL_FORMATS[name], formats.THINKING.get(name)) == parts


@pytest.mark.parametrize("name", ["hermes", "harmony"])
@pytest.mark.parametrize("size", [1, 1000])
def test_an_answer_that_is_cut_behind_arguments_has_no_content(name, size):
    form, thinking = formats.TOOL_FORMATS[name], formats.THINKING.get(name)
    text = ANSWERS[name].partition('\n<tool_call>\n{"name": "g"')[0].removeprefix("Sure.\n")
    start = text.rindex("}")
    whole = parts_of(text, size, form, thinking)
    for cut in range(start + 1, len(text)):
        assert parts_of(text[:cut], size, form, thinking) == whole, text[:cut]


def test_a_call_whose_arguments_a_stop_string_ends_is_none_to_run():
    """finish_reason is "stop" then: clients run calls where it is "tool_calls"."""
    text = ANSWERS["hermes"]
    for cut in (text.index("}"), len(text)):
        splitter = Splitter(formats.TOOL_FORMATS["hermes"], None)
        assert [part.kind for part in splitter.feed(text[:cut], True)][:2] == ["content", "call"]
        assert splitter.has_calls is (cut == len(text))


@pytest.mark.parametrize("size", [1, 1000])
def test_thoughts_are_apart_and_other_text_is_content(size):
    llama, think = formats.TOOL_FORMATS["llama3"], formats.THINKING["think"]
    thought = ["reasoning_content: hm", 'content: x < 4 { "name"']
    assert parts_of('<think>\nhm\n</think>\n\nx < 4 { "name"', size, llama, think) == thought
    assert parts_of('hm</think>x < 4 { "name"', size, llama, think, True) == thought
    assert parts_of("a <tool_call> b", size, llama, None) == ["content: a <tool_call> b"]
    final = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes<|return|>"
    assert parts_of(final, size, None, formats.THINKING["harmony"]) == ["reasoning_content: hm", "content: yes"]


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("name", [n for n, form in formats.TOOL_FORMATS.items() if form.between is not None])
def test_a_request_without_parallel_calls_gets_one(name, choice):
    form = formats.TOOL_FORMATS[name]
    tokenizer, one = tiny_tokenizer(), form.opening.format(name="time", quoted='"time"') + "{}" + form.closing
    grammar = structure.Structure(None, structure.tools("tools", TOOLS), choice, form, None, True).grammar(False, {})
    matcher = make_compiler("llguidance", tokenizer, VOCAB, frozenset([2])).compile(grammar).matcher()
    text = f"{form.first}{one}{form.last}"
    assert all(matcher.accept(token) for token in tokenizer.encode(text))
    mask = np.zeros(VOCAB // 32, np.int32)
    assert matcher.fill(mask) and mask.tolist() == [1 << 2, 0, 0, 0], "EOS"
    two = f"{form.first}{one}{form.between}{one}{form.last}"
    assert parts_of(two, 3, form, None, False, is_single=True) == ["call: time", "arguments: {}"], (
        "of a text that no grammar constrained"
    )
    splitter = Splitter(form, None, is_single=True)
    splitter.feed(two[: two.rindex("}", 0, two.rindex("{}") + 2)], True)
    assert splitter.has_calls, "a stop string within the second, which the answer leaves out"


def test_parallel_calls_are_of_the_request(served):
    fields = {"tools": TOOLS[:1], "tool_choice": "required", "logit_bias": {"2": -100}, "max_tokens": 120}

    def called(**more):
        (choice,) = ask(served, **fields | more).choices
        return len(choice.message.tool_calls), choice.finish_reason

    assert called()[0] == called(parallel_tool_calls=True)[0] > 1
    assert called(parallel_tool_calls=False) == (1, "tool_calls")
    named = {"type": "function", "function": {"name": "weather"}}
    assert called(tool_choice=named) == called(tool_choice=named, parallel_tool_calls=True) == (1, "tool_calls")
    with pytest.raises(openai.BadRequestError, match="parallel_tool_calls='no': expected true or false"):
        called(parallel_tool_calls="no")


@pytest.mark.parametrize(
    "parameters", [None, {}, {"properties": {"a": {"type": "null"}}, "required": ["a"]}, {"type": ["object", "null"]}]
)
def test_arguments_are_an_object_whatever_the_schema_says(parameters):
    form, tools = formats.TOOL_FORMATS["hermes"], structure.tools("tools", [tool_with(parameters)])
    grammar = structure.Structure(None, tools, "required", form, None).grammar(False, {})
    tokenizer, mask = tiny_tokenizer(), np.zeros(VOCAB // 32, np.int32)
    matcher = make_compiler("llguidance", tokenizer, VOCAB, frozenset([2])).compile(grammar).matcher()
    assert all(matcher.accept(token) for token in tokenizer.encode(form.opening.format(quoted='"f"')))
    assert matcher.fill(mask)
    begins = [tokenizer.decode([token]) for token in range(VOCAB) if mask[token // 32] >> token % 32 & 1]
    assert begins and all(text.startswith("{") for text in begins)


def test_a_tool_without_parameters_takes_no_arguments():
    """OpenAI: "Omitting parameters defines a function with an empty parameter list"."""
    form, tools = formats.TOOL_FORMATS["hermes"], structure.tools("tools", [tool_with(None)])
    grammar = structure.Structure(None, tools, "required", form, None).grammar(False, {})
    tokenizer = tiny_tokenizer()
    matcher = make_compiler("llguidance", tokenizer, VOCAB, frozenset([2])).compile(grammar).matcher()
    opening = form.opening.format(quoted='"f"')
    assert all(matcher.accept(token) for token in tokenizer.encode(opening + "{"))
    assert not matcher.accept(tokenizer.encode('"')[0])


@pytest.mark.parametrize("name", [n for n, form in formats.TOOL_FORMATS.items() if form.has_json])
def test_forced_calls_are_what_the_parser_reads(name):
    """The parser splits a text that the grammar of a format allows into the call."""
    form, tokenizer = formats.TOOL_FORMATS[name], tiny_tokenizer()
    compiler = make_compiler("llguidance", tokenizer, VOCAB, frozenset([2]))
    thinking = formats.THINKING["think"]
    tools = structure.tools("tools", TOOLS)
    grammar = structure.Structure(None, tools, "=weather", form, thinking).grammar(False, {})
    own = form.opening.format(name="weather", quoted='"weather"') + '{"city": "red", "days": 3}' + form.closing
    text = f"<think>hm </think>{form.first}{own}{form.last}"
    matcher, mask = compiler.compile(grammar).matcher(), np.zeros(VOCAB // 32, np.int32)
    assert all(matcher.accept(token) for token in tokenizer.encode(text))
    assert matcher.fill(mask) and mask[0] >> 2 & 1
    parts = parts_of(text, 1000, form, thinking)
    assert parts == ["reasoning_content: hm", "call: weather", 'arguments: {"city": "red", "days": 3}']


@pytest.mark.parametrize("name", [n for n, form in formats.TOOL_FORMATS.items() if form.trigger])
def test_calls_that_a_model_begins_itself_are_constrained(name):
    """tool_choice="auto": other text is free, and may end; arguments fit the schema and are parsed unchanged."""
    form, tokenizer = formats.TOOL_FORMATS[name], tiny_tokenizer()
    compiler = make_compiler("llguidance", tokenizer, VOCAB, frozenset([2]))
    tools = structure.tools("tools", TOOLS)
    grammar = structure.Structure(None, tools, "auto", form, None).grammar(False, {})
    before = "" if form.is_first else "a {b} "
    opening = f"{before}{form.first}{form.opening.format(name='weather', quoted=json.dumps('weather'))}"
    call = f'{opening}{{"city": "red", "days": 3}}{form.closing}{form.last}'
    for text, can_end in ((f"{before}hm {{}}", True), (call, True), (f'{opening}{{"days"', False), (opening, False)):
        matcher, mask = compiler.compile(grammar).matcher(), np.zeros(VOCAB // 32, np.int32)
        accepted = [matcher.accept(token) for token in tokenizer.encode(text)]
        assert all(accepted) == (text != f'{opening}{{"days"'), text
        if all(accepted):
            assert matcher.fill(mask) and bool(mask[0] >> 2 & 1) == can_end, text
    parts = ["call: weather", 'arguments: {"city": "red", "days": 3}']
    assert parts_of(call, 1000, form, None)[-2:] == parts


def test_thoughts_come_before_a_constrained_answer():
    answer = structure.Structure(Grammar(json=SCHEMA), [], "auto", None, formats.THINKING["think"])
    compiler = make_compiler("llguidance", tiny_tokenizer(), VOCAB, frozenset([2]))
    for is_thinking, text in ((False, '<think>{a}</think>{"name'), (False, '{"name'), (True, 'a </think> {"name')):
        matcher = compiler.compile(answer.grammar(is_thinking, {})).matcher()
        assert all(matcher.accept(token) for token in tiny_tokenizer().encode(text)), text


@pytest.mark.parametrize(
    ("answer", "text", "wrong"),
    [
        ({"choice": ['a"b', "<tool_call>"]}, 'a"b', "b"),
        ({"choice": ['a"b', "<tool_call>"]}, "<tool_call>", "a<"),
        ({"regex": "[/a]/{2}\n\\/\\\\"}, "a//\n/\\", "a/\n"),
        ({"regex": ""}, "", "a"),
        ({"json": {"enum": [[1, 2]]}}, "[1, 2]", "[1,2]"),
        ({"json_object": True, "any_whitespace": True}, '{\n"a":1 }', "[]"),
    ],
)
def test_answers_of_every_kind_follow_thoughts(answer, text, wrong):
    thinking, tokenizer = formats.THINKING["think"], tiny_tokenizer()
    grammar = structure.Structure(Grammar(**answer), [], "auto", None, thinking).grammar(True, {})
    compiled = make_compiler("llguidance", tokenizer, VOCAB, frozenset([2])).compile(grammar)
    matcher, mask = compiled.matcher(), np.zeros(VOCAB // 32, np.int32)
    assert all(matcher.accept(token) for token in tokenizer.encode(f"hm</think>{text}"))
    assert matcher.fill(mask) and mask[0] >> 2 & 1
    matcher = compiled.matcher()
    assert not all(matcher.accept(token) for token in tokenizer.encode(f"hm</think>{wrong}"))


@pytest.mark.parametrize(
    ("mark", "tools", "thinking"),
    [
        ("{{ tools }} [TOOL_CALLS]", "mistral", None),
        ("{{ tools }} [TOOL_CALLS] [ARGS]", "mistral-args", None),
        ("<think></think> {{ tools }} <tool_call>", "hermes", "think"),
        ('{{ tools }} {"name": , "parameters": }', "llama3", None),
        ('{{ tools }} "parameters": <tool_call>', "hermes", None),
        ("<|channel|> {{ tools }}", "harmony", "harmony"),
        ("<tool_call>", None, None),
        ("{{ tools }} <tool_call><function=f>", None, None),
        ("{{ tools }} <tool_call>{name} <arg_key>", None, None),
    ],
)
def test_formats_are_found_in_templates(mark, tools, thinking):
    assert (formats.tool_format_of(mark), formats.thinking_of(mark)) == (tools, thinking)


def test_what_a_model_or_server_cannot_do_is_refused_by_name():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    engine = one_of(tokenizer)
    with serving(engine, name="m") as served:
        for fields, message in (
            ({"tools": TOOLS}, "tools: this model's chat template has no known tool format"),
            ({"response_format": {"type": "json_object"}}, "response_format: this server does not constrain text"),
        ):
            with pytest.raises(openai.BadRequestError, match=message):
                ask(served, **fields)
    engine.detach()


def test_messages_of_tools_are_checked():
    turn = {"role": "assistant", "content": None, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]}  # fmt: skip
    own = messages.messages("messages", [turn, {"role": "tool", "tool_call_id": "1", "content": "x"}])
    assert own[0]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert own[1] == {"role": "tool", "tool_call_id": "1", "name": "f", "content": "x"}, "templates want the name"
    thought = messages.messages("messages", [{**turn, "reasoning_content": "hm"}])
    assert thought[0]["thinking"] == thought[0]["reasoning_content"] == "hm", "GPT-OSS's template has its own name"
    said = messages.messages("messages", [{**turn, "reasoning_content": "hm", "content": "so"}])[0]
    assert "thinking" not in said and said["reasoning_content"] == "hm", "and takes no content beside it"
