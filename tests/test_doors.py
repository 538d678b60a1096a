"""`model.generate` through an engine, compared with transformers' own loop: equal tokens, or refused by name."""

import copy
import pickle
import threading
import time
import types
import weakref

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    TextIteratorStreamer,
    pipeline,
)
from transformers.generation.logits_process import LogitsProcessor, RepetitionPenaltyLogitsProcessor
from transformers.generation.streamers import BaseStreamer

import specdec
from specdec import shipped
from specdec.tools.doors.lockstep import Lockstep
from tests.heads import random_draft
from tests.recurrent_models import recurrent_model
from tests.test_threads import join
from tests.tiny_models import DEVICE, tiny_model

PAD = 0


@pytest.fixture(scope="module")
def model():
    """A tiny target whose greedy texts contain its EOS."""
    model = tiny_model("llama").to(DEVICE)
    ids = plain(model, ids_of([5, 6, 7]), max_new_tokens=12)[0, 3:]
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = int(ids[6]), PAD
    return model


@pytest.fixture(scope="module")
def engine(model):
    draft = random_draft(model, "eagle3").to(DEVICE)
    engine = specdec.attach(model, draft, max_batch=4, max_seq_len=160, num_steps=3)
    yield engine
    engine.detach()


def plain(model, *args, **kwargs):
    """Generate with transformers' own loop."""
    return type(model).generate(model, *args, **kwargs)


def ids_of(*rows):
    return torch.tensor(rows, device=DEVICE)


def padded(side="left"):
    """Three prompts of different lengths, padded, and their mask."""
    rows, width = [[5, 6, 7], [9], [11, 12, 13, 14, 15]], 5
    fill = [[PAD] * (width - len(r)) for r in rows]
    ids = [f + r if side == "left" else r + f for f, r in zip(fill, rows, strict=True)]
    return {"input_ids": ids_of(*ids), "attention_mask": (ids_of(*ids) != PAD).long()}


class StopAt(StoppingCriteria):
    """Ends rows after a given token."""

    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


class AllRowsAt(StoppingCriteria):
    """Keeps state per row of the whole batch and ends all rows together, as in lm-eval."""

    def __init__(self, token, batch):
        self.token, self.is_done = token, [False] * batch

    def __call__(self, input_ids, scores, **kwargs):
        for i, done in enumerate(self.is_done):
            self.is_done[i] = done or self.token in input_ids[i, -2:].tolist()
        return torch.tensor([all(self.is_done)] * len(self.is_done), device=input_ids.device)


class Unlucky(LogitsProcessor):
    """A processor that no setting expresses."""

    def __call__(self, input_ids, scores):
        scores[:, 13] = -torch.inf
        return scores


CASES = {
    "greedy": {},
    "max_new_tokens": {"max_new_tokens": 7},
    "max_length": {"max_length": 20},
    "default length": {"max_new_tokens": None},
    "GenerationConfig": {"max_new_tokens": None, "generation_config": GenerationConfig(max_new_tokens=9)},
    "positional config": {"positional": GenerationConfig(max_new_tokens=8)},
    "no EOS": {"eos_token_id": -1},
    "several EOS": {"eos_token_id": [3, 17, 44, 91]},
    "min_new_tokens": {"min_new_tokens": 15},
    "min_length": {"min_length": 22},
    "suppress_tokens": {"suppress_tokens": list(range(3, 60))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(3, 90))},
    "bad_words_ids": {"bad_words_ids": [[37, 37], [120, 115]]},
    "sequence_bias": {"sequence_bias": [[[11], 6.0]]},
    "return_dict": {"return_dict_in_generate": True},
    "max_time": {"max_time": 1000.0},
    "no cache": {"use_cache": False},
    "no mask": {"attention_mask": None},
    "no custom_generate": {"custom_generate": None},
    "position_ids": {"position_ids": "as counted"},
}
ALONE = {"repetition_penalty": {"repetition_penalty": 1.3}, "no_repeat_ngram_size": {"no_repeat_ngram_size": 2}}


def arguments(case, batch):
    options = {**batch, "max_new_tokens": 24, **case}
    config = options.pop("positional", None)
    if options.get("position_ids") is not None:
        options["position_ids"] = (options["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    return (options.pop("input_ids"), *([config] if config else [])), options


AS_LOOP = ("greedy", "several EOS", "return_dict", "position_ids", "repetition_penalty")


@pytest.mark.parametrize(
    ("name", "door"),
    [*((name, "install") for name in (*CASES, *ALONE)), *((name, "custom_generate") for name in AS_LOOP)],
)
def test_greedy_calls_equal_transformers(engine, model, name, door):
    batch = padded() if name in CASES else {"input_ids": ids_of([5, 6, 7]), "attention_mask": ids_of([1, 1, 1])}
    args, options = arguments({**CASES, **ALONE}[name], batch)
    expected = plain(model, *args, **copy.deepcopy(options))
    if door == "install":
        with engine.install():
            got = model.generate(*args, **options)
    else:
        got = model.generate(*args, **options, custom_generate=engine.as_generate())
    if name == "return_dict":
        expected, got = expected.sequences, got.sequences
    assert torch.equal(got, expected) and got.device == expected.device
    engine.check_integrity()


def test_prompts_of_32_bits_give_sequences_of_64(engine, model):
    """As in transformers, also for stopping criteria."""
    seen, options = [], {"input_ids": ids_of([5, 6, 7]).int(), "max_new_tokens": 4}
    expected = plain(model, **options)
    with engine.install():
        got = model.generate(**options, stopping_criteria=[lambda ids, scores: seen.append(ids.dtype) or False])
    assert got.dtype is expected.dtype is torch.int64 and torch.equal(got, expected)
    assert seen == [torch.int64] * 4


@pytest.mark.parametrize("name", ["mamba", "mamba2", "falcon_mamba"])
def test_models_whose_cache_has_a_name_of_its_own(name):
    """transformers prepares `cache_params` for them: an empty one is ignored, one with a state is refused."""
    model, batch = recurrent_model(name).to(DEVICE), {**padded(), "max_new_tokens": 10, "eos_token_id": [3]}
    expected = plain(model, **batch)
    read = model(batch["input_ids"], use_cache=True).cache_params
    engine = specdec.attach(model, algo="lookup", max_batch=4, max_seq_len=64)
    assert torch.equal(model.generate(**batch, custom_generate=engine.as_generate()), expected)
    with engine.install():
        assert torch.equal(model.generate(**batch), expected)
        with pytest.raises(ValueError, match=r"cache(_params)? holds tokens"):
            model.generate(**batch, cache_params=read)
    engine.detach()


def test_a_right_padded_prompt_goes_on_after_its_own_last_token(engine, model):
    batch = padded("right")
    with engine.install():
        got = model.generate(**batch, max_new_tokens=12)
    for row, mask, new in zip(batch["input_ids"], batch["attention_mask"], got[:, 5:], strict=True):
        expected = plain(model, row[mask.bool()].unsqueeze(0), max_new_tokens=12)[0, int(mask.sum()) :]
        assert torch.equal(new[: len(expected)], expected) and bool((new[len(expected) :] == PAD).all())


@pytest.mark.parametrize("make", [lambda t: StopAt(t), lambda t: AllRowsAt(t, 3)], ids=["by row", "all rows"])
@pytest.mark.parametrize("eos", [True, False])
def test_criteria_end_texts_where_transformers_ends_them(engine, model, make, eos):
    batch, end = padded(), {} if eos else {"eos_token_id": -1}
    token = int(plain(model, **batch, max_new_tokens=24, **end)[2, 14])
    for case in ({}, {"max_new_tokens": 3}):
        options = {**batch, "max_new_tokens": 24, **end, **case}
        expected = plain(model, **options, stopping_criteria=StoppingCriteriaList([make(token)]))
        with engine.install():
            got = model.generate(**options, stopping_criteria=StoppingCriteriaList([make(token)]))
        assert torch.equal(got, expected)
        engine.check_integrity()


def test_a_clock_ends_a_text(engine, model):
    with engine.install():
        begin = time.monotonic()
        got = model.generate(ids_of([5, 6, 7]), max_new_tokens=120, eos_token_id=-1, max_time=0.0)
    assert got.shape[1] < 3 + 120 and time.monotonic() - begin < 30
    engine.check_integrity()


class Recorder(BaseStreamer):
    """Records a streamer's input."""

    def __init__(self):
        self.rows, self.ended = [], 0

    def put(self, value):
        self.rows.append(value.clone())

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("batch", [1, 3])
def test_streamers_get_prompt_tokens_and_end(engine, model, batch):
    prompt, theirs, ours = padded()["input_ids"][-batch:], Recorder(), Recorder()
    expected = plain(model, prompt, max_new_tokens=16, streamer=theirs)
    with engine.install():
        got = model.generate(prompt, max_new_tokens=16, streamer=ours)
    assert torch.equal(got, expected) and ours.ended == theirs.ended == 1
    assert torch.equal(ours.rows[0], theirs.rows[0])
    if batch == 1:
        assert torch.cat(ours.rows[1:]).tolist() == torch.cat(theirs.rows[1:]).tolist()
        assert len(ours.rows) <= len(theirs.rows)
    else:
        assert [r.tolist() for r in ours.rows] == [r.tolist() for r in theirs.rows]


def test_beams_are_not_streamed_by_transformers_either(engine, model):
    with engine.install(on_unsupported="fallback"), pytest.raises(ValueError, match="streamer: transformers"):
        model.generate(ids_of([5, 6, 7]), num_beams=2, streamer=Recorder(), max_new_tokens=4)


REFUSED = {
    "num_beams": ({"num_beams": 2}, "num_beams=2"),
    "output_attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
    "processor": ({"logits_processor": LogitsProcessorList([Unlucky()])}, "logits_processor Unlucky"),
    "another value": (
        {"logits_processor": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.7)])},
        "logits_processor RepetitionPenalty",
    ),
    "penalty over padding": ({"repetition_penalty": 1.2}, "repetition_penalty=1.2 with padded prompts"),
    "prefix function": ({"prefix_allowed_tokens_fn": lambda i, ids: [5, 6, 7]}, "PrefixConstrained"),
    "too long": ({"max_new_tokens": 1000}, "max_seq_len"),
    "positions": ({"position_ids": torch.arange(3, 8, device=DEVICE).repeat(3, 1)}, "position_ids"),
    "guidance": ({"guidance_scale": 1.5}, "guidance_scale=1.5"),
    "a longer mask": (
        {"attention_mask": torch.ones(3, 7, dtype=torch.long, device=DEVICE)},
        r"attention_mask of shape \(3, 7\): expected that of input_ids, \(3, 5\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_or_left_to_transformers(engine, model, name):
    changes, message = REFUSED[name]
    options = {**padded(), "max_new_tokens": 6, **changes}
    with engine.install(), pytest.raises(ValueError, match=message):
        model.generate(**copy.deepcopy(options))
    if name == "too long":
        options["max_new_tokens"] = 170  # more than fits into the engine
    expected = plain(model, **copy.deepcopy(options))
    with engine.install(on_unsupported="fallback"), pytest.warns(UserWarning, match="decoded by transformers"):
        got = model.generate(**options)
    if name == "output_attentions":
        assert torch.equal(got.sequences, expected.sequences)
    else:
        assert torch.equal(got, expected)
    engine.check_integrity()


@pytest.mark.parametrize("place", ["call", "config"])
def test_token_healing_is_refused_or_left_to_transformers_with_its_tokenizer(engine, model, monkeypatch, place):
    """transformers heals before the loop, with a tokenizer that it passes to no loop but its own."""
    settings, seen = {"token_healing": True, "max_new_tokens": 4}, []
    options = settings if place == "call" else {"generation_config": GenerationConfig(**settings)}
    options = {**options, "tokenizer": "the tokenizer"}
    monkeypatch.setattr(model, "heal_tokens", lambda ids, tokenizer: seen.append(tokenizer) or ids, raising=False)
    expected = plain(model, ids_of([5, 6, 7]), **options)
    with engine.install(), pytest.raises(ValueError, match="token_healing: trim the prompt yourself"):
        model.generate(ids_of([5, 6, 7]), **options)
    with engine.install(on_unsupported="fallback"), pytest.warns(UserWarning, match="by transformers: token_healing"):
        got = model.generate(ids_of([5, 6, 7]), **options)
    assert torch.equal(got, expected) and seen == ["the tokenizer"] * 2


def test_calls_within_autocast_are_left_to_transformers_too(engine, model):
    """As in a Trainer's evaluation with bf16=True."""
    options = {**padded(), "max_new_tokens": 6}
    with torch.autocast(DEVICE.type, torch.bfloat16):
        expected = plain(model, **options)
        with engine.install(), pytest.raises(ValueError, match=r"autocast.* is on: an engine runs the model in"):
            model.generate(**options)
        with engine.install(on_unsupported="fallback"), pytest.warns(UserWarning, match=r"by transformers.*autocast"):
            got = model.generate(**options)
    assert torch.equal(got, expected)
    engine.check_integrity()


@pytest.mark.parametrize("door", ["install", "custom_generate"])
@pytest.mark.parametrize(
    "options",
    [
        {"output_scores": True},
        {"output_logits": True, "output_scores": True, "suppress_tokens": [37], "min_new_tokens": 9},
        {"output_logits": True, "max_new_tokens": 1},
    ],
    ids=["scores", "both, processed", "logits of one token"],
)
def test_scores_and_logits_are_those_of_transformers(engine, model, options, door):
    """Ended rows continue with padding in transformers, and so they do here."""
    options = {**padded(), "max_new_tokens": 14, "return_dict_in_generate": True, **options}
    expected = plain(model, **options)
    if door == "install":
        with engine.install():
            got = model.generate(**options)
    else:
        got = model.generate(**options, custom_generate=engine.as_generate())
    assert torch.equal(got.sequences, expected.sequences)
    for name in ("scores", "logits"):
        ours, theirs = getattr(got, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert all(row.dtype is torch.float32 for row in ours)
            torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), atol=2e-4, rtol=1e-4)
    engine.check_integrity()


def test_scores_of_sampled_calls_are_the_laws_that_were_sampled(engine, model):
    options = {"do_sample": True, "temperature": 0.7, "top_k": 5, "max_new_tokens": 8, "output_scores": True}
    with engine.install():
        got = model.generate(ids_of([5, 6, 7]), **options, output_logits=True, return_dict_in_generate=True)
    for token, law, logits in zip(got.sequences[0, 3:], got.scores, got.logits, strict=True):
        assert law[0].isfinite().sum() == 5 and law[0, token].isfinite()
        torch.testing.assert_close(law[0, token], logits[0, token] / 0.7)


def test_sampled_calls_are_seeded_by_torch_and_repeat_prompts(engine, model):
    options = {"do_sample": True, "temperature": 0.9, "num_return_sequences": 3, "max_new_tokens": 10}
    outs = []
    with engine.install():
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            outs.append(model.generate(ids_of([5, 6, 7]), **options))
    assert outs[0].shape[0] == 3 and torch.equal(outs[0], outs[1]) and not torch.equal(outs[0], outs[2])
    assert len({tuple(row.tolist()) for row in outs[0]}) == 3, "every sequence has numbers of its own"
    with engine.install(), pytest.raises(ValueError, match="num_return_sequences"):  # greedy: as in transformers
        model.generate(ids_of([5, 6, 7]), num_return_sequences=2, max_new_tokens=4)


def test_a_model_is_given_its_generate_back():
    model = tiny_model("llama").to(DEVICE)
    engine = specdec.attach(model, algo="lookup", max_batch=2, max_seq_len=64)
    with engine.install():
        assert "generate" in vars(model)
        twin = copy.deepcopy(model)
        with pytest.raises(ValueError, match="not the model that the engine is attached to"):
            twin.generate(ids_of([5, 6, 7]), max_new_tokens=4, custom_generate=engine.as_generate())
        with pytest.raises(ValueError, match="replaced already"):
            engine.install()
        with pytest.raises(ValueError, match="assistant_model: the engine has a draft"):
            model.generate(ids_of([5, 6, 7]), max_new_tokens=4, assistant_model=twin)
    assert "generate" not in vars(model)
    engine.uninstall()
    engine.install()
    engine.detach()
    assert "generate" not in vars(model)
    with pytest.raises(ValueError, match="on_unsupported='maybe': expected one of"):
        specdec.tools.doors.generate.EngineGenerate(engine, "maybe")


@pytest.mark.parametrize("make", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_with_an_engine_has_its_own_generate(make):
    model, ids = tiny_model("llama").to(DEVICE), ids_of([5, 6, 7])
    expected = plain(model, ids, max_new_tokens=6)
    engine = specdec.attach(model, algo="lookup", max_batch=2, max_seq_len=64)
    with engine.install():
        twin = make(make(model))
    gone = weakref.ref(engine)
    engine.detach()
    del engine
    assert gone() is None and torch.equal(twin.generate(ids, max_new_tokens=6), expected)
    other = specdec.attach(twin, algo="lookup", max_batch=2, max_seq_len=64)
    with other.install():
        assert torch.equal(twin.generate(ids, max_new_tokens=6), expected)
        assert other.report().acceptance.num_rounds > 0
    assert "generate" not in vars(twin)
    other.detach()


def test_a_generate_that_others_have_put_there_stays():
    model = tiny_model("llama").to(DEVICE)
    engine = specdec.attach(model, max_batch=2, max_seq_len=64)
    engine.install()
    ours = model.generate
    model.generate = theirs = lambda *args, **kwargs: ours(*args, **kwargs)
    assert model.generate(ids_of([5, 6, 7]), max_new_tokens=4).shape == (1, 7)
    engine.detach()
    assert model.generate is theirs


def test_a_row_whose_end_is_told_late_is_over_when_rows_are_looked_at_again():
    """Another thread's step gives a row its last token before its finish reason; the other row is a token behind."""
    first, second = (types.SimpleNamespace(tokens=[7], finish_reason=None) for _ in range(2))
    rows = Lockstep(torch.tensor([[1], [2]]), [first, second], StoppingCriteriaList(), PAD)
    assert rows.advance() == [[7, 7]] and rows.is_done == [False, False]
    first.finish_reason = "eos"
    second.tokens, second.finish_reason = [7, 8], "length"
    assert rows.advance() == [[PAD, 8]] and rows.is_over
    assert rows.sequences().tolist() == [[1, 7, PAD], [2, 7, 8]]


def test_threads_share_an_installed_engine(engine, model):
    prompts = [ids_of([5, 6, 7]), ids_of([9]), ids_of([11, 12, 13])]
    expected = [plain(model, p, max_new_tokens=20) for p in prompts]
    got = [None] * 3

    def work(i):
        got[i] = model.generate(prompts[i], max_new_tokens=20)

    with engine.install():
        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        join(threads)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    engine.check_integrity()


def test_pipelines_streamers_and_stop_strings_of_a_real_model(smollm2):
    """SmolLM2 with a shipped draft: calls that transformers' users make, before and after install."""
    model, tokenizer = smollm2[0], copy.deepcopy(smollm2[1])
    tokenizer.pad_token_id, tokenizer.padding_side = tokenizer.eos_token_id, "left"
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    chats = [[{"role": "user", "content": q}] for q in ("What is the capital of France?", "Name three colours.")]
    text = "The three primary colours are"
    calls = {
        "one": lambda: pipe(text, max_new_tokens=12, do_sample=False),
        "chats": lambda: pipe(chats, max_new_tokens=12, do_sample=False, batch_size=2),
        "stop": lambda: stopped(model, tokenizer, text, ["yellow", "red,"]),
        "stop across the prompt": lambda: stopped(model, tokenizer, text, ["are the"]),
        "stop of the model's own": lambda: shipped_stop(model, tokenizer, text, ["primary"]),
        "none of them": lambda: shipped_stop(model, tokenizer, text, ["primary"], stop_strings=None),
        "stream": lambda: streamed(model, tokenizer, text),
    }
    expected = {name: call() for name, call in calls.items()}
    engine = specdec.attach(model, shipped.path(), max_batch=2, num_steps=2)  # no tokenizer: the pipeline has one
    with engine.install():
        got = {name: call() for name, call in calls.items()}
    assert engine.report().acceptance.num_rounds > 0
    engine.tokenizer = tokenizer
    for name, strings in (("stop", ["yellow", "red,"]), ("stop across the prompt", ["are the"])):
        out = engine.generate(text, max_new_tokens=12, do_sample=False, stop_strings=strings)
        assert tokenizer.decode(tokenizer(text)["input_ids"] + out.tokens[0]) == expected[name]
        assert out.finish_reasons == ["stop_string"] and not any(string in out.texts[0] for string in strings)
    engine.detach()
    assert got == expected
    assert expected["stop"].endswith("red,") and expected["stop across the prompt"] == text + " the"


def stopped(model, tokenizer, text, strings):
    inputs = tokenizer(text, return_tensors="pt").to(model.device)
    out = model.generate(**inputs, max_new_tokens=12, do_sample=False, stop_strings=strings, tokenizer=tokenizer)
    return tokenizer.decode(out[0])


def shipped_stop(model, tokenizer, text, strings, **options):
    model.generation_config.stop_strings, model.generation_config.max_time = strings, 1000.0
    inputs = tokenizer(text, return_tensors="pt").to(model.device)
    out = model.generate(**inputs, max_new_tokens=12, do_sample=False, tokenizer=tokenizer, **options)
    model.generation_config.stop_strings = model.generation_config.max_time = None
    return tokenizer.decode(out[0])


def streamed(model, tokenizer, text):
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    inputs = tokenizer(text, return_tensors="pt").to(model.device)
    thread = threading.Thread(
        target=model.generate, kwargs={**inputs, "max_new_tokens": 12, "do_sample": False, "streamer": streamer}
    )
    thread.start()
    pieces = "".join(streamer)
    thread.join()
    return pieces
