"""Many callers of one engine: streams read in turn, threads, the live model beside them, detach meanwhile, fairness."""

import asyncio
import copy
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import pytest
import torch

import specdec
from specdec import DetachedError
from specdec.core.engine.turns import Turns
from tests.heads import random_draft, random_head
from tests.test_attach import greedy, ragged_prompts
from tests.test_text import TOKENIZER
from tests.tiny_models import tiny_model

NUM_TOKENS = 16


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture(scope="module")
def expected(model):
    return [greedy(model, p, NUM_TOKENS) for p in ragged_prompts()]


def join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"


@pytest.mark.parametrize("stop", [(), ("no such text",)])
def test_streams_read_in_turn_keep_their_text(model, expected, stop):
    """The second stream's steps finish the first one's request before it is read again."""
    engine = specdec.attach(model, random_head(model), tokenizer=TOKENIZER)
    streams = [engine.stream([p], max_new_tokens=NUM_TOKENS, stop=stop) for p in ragged_prompts()[:3]]
    texts = [next(s) for s in streams]
    for i in (1, 0, 2):
        texts[i] += "".join(streams[i])
    engine.detach()
    assert texts == [TOKENIZER.decode(e) for e in expected[:3]]


def test_a_streams_output_is_whole_when_another_caller_has_stepped(model, expected):
    engine = specdec.attach(model, tokenizer=TOKENIZER)
    stream = engine.stream([ragged_prompts()[0]], max_new_tokens=NUM_TOKENS)
    pieces = [next(stream)]
    engine.generate(ragged_prompts()[1:], max_new_tokens=NUM_TOKENS)
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            output = end.value
            break
    engine.detach()
    assert "".join(pieces) == output.text == TOKENIZER.decode(expected[0])
    assert output.tokens == expected[0]


@pytest.mark.parametrize("settings", [{}, {"cuda_graph": True, "prefill_graph": "breakable", "prefill_buckets": (16,)}])
def test_eight_threads_and_the_live_model(model, expected, settings):
    """Every second caller streams; a ninth thread calls the attached model itself."""
    engine = specdec.attach(model, random_head(model), tokenizer=TOKENIZER, max_batch=3, **settings)
    prompts, wrong = ragged_prompts(), []

    def caller(n: int) -> None:
        for i in range(n, n + 4):
            prompt, own = prompts[i % 5], expected[i % 5]
            if n % 2:
                text = "".join(engine.stream([prompt], max_new_tokens=NUM_TOKENS))
                wrong.extend([text] if text != TOKENIZER.decode(own) else [])
            else:
                tokens = engine.generate([prompt], max_new_tokens=NUM_TOKENS).tokens[0]
                wrong.extend([tokens] if tokens != own else [])

    def owner() -> None:
        for i in range(6):
            tokens = greedy(model, prompts[i % 5], NUM_TOKENS)
            wrong.extend([("the live model", tokens)] if tokens != expected[i % 5] else [])

    failures = []
    before, threading.excepthook = threading.excepthook, lambda args: failures.append(args.exc_value)
    try:
        join([threading.Thread(target=caller, args=(n,)) for n in range(8)] + [threading.Thread(target=owner)])
    finally:
        threading.excepthook = before
    engine.check_integrity()
    assert engine.report().num_free_pages == engine.report().num_pages
    engine.detach()
    assert not failures and not wrong


def test_a_live_draft_may_be_called_too(model, expected):
    draft = random_draft(model, "standalone")
    own, wrong = greedy(draft, [5, 6, 7], 8), []
    engine = specdec.attach(model, draft)
    texts = threading.Thread(target=lambda: [wrong.append(1) for _ in range(8) if greedy(draft, [5, 6, 7], 8) != own])
    texts.start()
    for _ in range(4):
        assert engine.generate(ragged_prompts(), max_new_tokens=NUM_TOKENS).tokens == expected
    texts.join(60)
    engine.detach()
    assert not wrong and not any("_compiled_call_impl" in vars(m) for m in [*draft.modules(), *model.modules()])


def test_a_model_call_that_fails_does_not_keep_the_turn(model, expected):
    engine = specdec.attach(model)
    with pytest.raises(Exception):  # noqa: B017 (whatever HF raises for ids past the vocabulary)
        model(input_ids=torch.tensor([[10**6]]))
    join([threading.Thread(target=engine.generate, args=([[3, 4]],), kwargs={"max_new_tokens": 2})])
    engine.detach()


def test_detach_while_others_generate():
    model, told = tiny_model("llama"), []
    engine = specdec.attach(model, random_head(model), max_batch=2)

    def caller() -> None:
        try:
            while True:
                engine.generate([[3, 4, 5]], max_new_tokens=60, ignore_eos=True)
        except DetachedError as error:
            told.append(error)

    threads = [threading.Thread(target=caller) for _ in range(4)]
    timer = threading.Timer(0.3, engine.detach)
    timer.start()
    join(threads)
    assert len(told) == 4
    specdec.attach(model).detach()


def test_in_asyncio(model, expected):
    engine = specdec.attach(model, random_head(model), tokenizer=TOKENIZER)
    prompts = ragged_prompts()

    async def streamed(prompt) -> str:
        stream, pieces = engine.stream([prompt], max_new_tokens=NUM_TOKENS), []
        while (piece := await asyncio.to_thread(next, stream, None)) is not None:
            pieces.append(piece)
        return "".join(pieces)

    async def both():
        call = asyncio.to_thread(engine.generate, prompts, max_new_tokens=NUM_TOKENS)
        return await asyncio.gather(call, *map(streamed, prompts))

    out, *texts = asyncio.run(both())
    engine.detach()
    assert out.tokens == expected
    assert texts == [TOKENIZER.decode(e) for e in expected]


def test_turns_go_round():
    """A thread that takes turn after turn does not starve the others."""
    turns, is_over, num_turns = Turns(print), threading.Event(), [0]

    def greedy_one() -> None:
        while not is_over.is_set():
            with turns:
                num_turns[0] += 1
                time.sleep(0.001)

    hog = threading.Thread(target=greedy_one)
    hog.start()
    waits = []
    for _ in range(20):
        time.sleep(0.002)
        before = num_turns[0]
        with turns:
            waits.append(num_turns[0] - before)
    is_over.set()
    hog.join()
    assert max(waits) <= 3, waits


def test_a_turn_that_an_exception_ends_is_repaired_and_free():
    repairs = []
    turns = Turns(repairs.append)
    with turns, turns:
        assert turns.is_mine
    for error in (LookupError(), SystemExit(), GeneratorExit()):
        with pytest.raises(type(error)), turns:
            raise error
        assert repairs.pop() is error and not repairs and not turns.is_mine
    with turns, pytest.raises(LookupError), turns:
        raise LookupError
    assert len(repairs) == 1, "of an inner turn, too"
    join([threading.Thread(target=turns.__enter__)])


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_fork_within_a_turn_is_told_instead_of_waiting_for_ever():
    turns = Turns(print)
    with turns:
        child = os.fork()
        if not child:
            with suppress(RuntimeError), turns:
                os._exit(1)
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with turns:
        pass


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, pytest.fail.Exception])
@pytest.mark.parametrize("where", ["model", "model.layers.2"])
def test_whatever_ends_a_call_of_the_live_model_frees_the_turn(expected, error, where):
    model = tiny_model("llama")
    engine = specdec.attach(model)

    def end(*args) -> None:
        raise error

    handle = model.get_submodule(where).register_forward_pre_hook(end)
    with pytest.raises(error):
        model(torch.tensor([[3, 4]]))
    handle.remove()
    tokens = []
    join([threading.Thread(target=lambda: tokens.extend(engine.generate(ragged_prompts()[0]).tokens[0]), daemon=True)])
    assert tokens[:NUM_TOKENS] == expected[0]
    engine.detach()


def test_checkpointed_layers_are_run_again_in_turn():
    """Gradient checkpointing reruns them in backward passes, outside calls of the model."""
    model = tiny_model("llama")
    model.gradient_checkpointing_enable()
    engine = specdec.attach(model)
    model.train()
    layer, seen = model.model.layers[1], []
    loss = model(input_ids=torch.tensor([[3, 4, 5]]), labels=torch.tensor([[3, 4, 5]]), use_cache=False).loss
    layer.mlp.register_forward_pre_hook(lambda *args: seen.append(engine._core.turns.is_mine))
    loss.backward()
    assert seen == [True]
    engine.detach()


def test_attaches_of_one_model_wait_for_each_other():
    model, outcomes = tiny_model("llama"), []

    def attach() -> None:
        try:
            outcomes.append(specdec.attach(model))
        except specdec.AttachError as error:
            outcomes.append(str(error))

    join([threading.Thread(target=attach) for _ in range(3)])
    engine, *refusals = sorted(outcomes, key=lambda x: isinstance(x, str))
    assert len(refusals) == 2 and all("attached already" in text for text in refusals)
    engine.detach()
    assert model.config._attn_implementation == tiny_model("llama").config._attn_implementation


def within_a_step(model, act) -> list[int]:
    """Return tokens of an engine on `model`; another thread runs `act` during one of its steps."""
    engine, acted = specdec.attach(model), []

    def once(*args) -> None:
        if engine._core.turns.is_mine and not acted:
            acted.append(1)
            join([threading.Thread(target=act)])

    handle = model.model.layers[1].mlp.register_forward_pre_hook(once)
    model.train()
    tokens = engine.generate(ragged_prompts()[0], max_new_tokens=NUM_TOKENS).tokens[0]
    engine.detach()
    handle.remove()
    assert acted
    return tokens


def test_what_other_threads_set_within_a_step_stays(expected):
    model = tiny_model("llama")
    assert within_a_step(model, model.eval) == expected[0]
    assert not any(m.training for m in model.modules())
    assert within_a_step(model, lambda: model.set_attn_implementation("eager")) == expected[0]
    assert all(m.training for m in model.modules()) and model.config._attn_implementation == "eager"


def test_models_that_share_a_config_do_not_meet(model, expected):
    """One runs in another thread while an engine steps with its attention replaced."""
    mine, theirs = tiny_model("llama"), tiny_model("llama")
    for module in theirs.modules():
        if hasattr(module, "config"):
            module.config = mine.config
    seen = []
    act = lambda: seen.append(greedy(theirs, ragged_prompts()[1], NUM_TOKENS))  # noqa: E731
    assert within_a_step(mine, act) == expected[0] and seen == [expected[1]]
    copies: list[Any] = []
    within_a_step(mine.eval(), lambda: copies.append(copy.deepcopy(mine.config)))
    assert type(copies[0]) is type(mine.config) and copies[0]._attn_implementation == "sdpa"


def test_a_stream_that_is_closed_frees_its_slots_at_once():
    """Even while it is referenced: since Python 3.12, closing a generator need not close those it iterates over."""
    engine = specdec.attach(tiny_model("llama"), tokenizer=TOKENIZER, max_seq_len=64)
    stream = engine.stream([5, 6, 7], max_new_tokens=20, ignore_eos=True)
    next(stream)
    stream.close()
    report = engine.report()
    assert report.num_free_pages == report.num_pages
    engine.detach()


LEFT = """
import asyncio
import specdec
from tests.test_text import TOKENIZER
from tests.tiny_models import tiny_model

engine = specdec.attach(tiny_model("llama"), algo="lookup", tokenizer=TOKENIZER, max_seq_len=500)
loop = asyncio.new_event_loop()
stream = engine.astream([5, 6, 7], max_new_tokens=490, ignore_eos=True)
loop.run_until_complete(anext(stream))
"""


def test_python_ends_well_while_a_stream_of_asyncio_is_under_way():
    """The stepping thread ends before PyTorch is torn down: else it would crash."""
    subprocess.run([sys.executable, "-c", LEFT], check=True, timeout=120)
