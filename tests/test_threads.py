"""Many callers of one engine: streams read in turn, threads, the live model beside them, detach under way, fairness."""

import asyncio
import threading
import time

import pytest
import torch

import specdec
from specdec import DetachedError
from specdec.engine.turns import Turns
from tests.heads import random_draft, random_head
from tests.test_attach import greedy, ragged_prompts
from tests.test_text import TOKENIZER
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

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
    """The second stream's steps end the first one's request before it is read again."""
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
    assert not wrong and not draft._forward_hooks and not model._forward_pre_hooks


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
    """A thread that takes turn after turn does not keep the others waiting."""
    turns, is_over, num_turns = Turns(lambda: None), threading.Event(), [0]

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


def test_a_turn_that_broke_off_is_repaired_before_the_next():
    repairs = []
    turns = Turns(lambda: repairs.append(1))
    with turns, turns:
        assert turns.is_mine
    with pytest.raises(LookupError), turns:
        raise LookupError
    assert not repairs and not turns.is_mine
    with turns:
        assert repairs == [1]
    with turns:
        assert repairs == [1]


def test_a_stream_that_is_closed_frees_its_slots_at_once():
    """While somebody still holds it: from Python 3.12 on, closing a generator need not close those it iterates over."""
    engine = specdec.attach(tiny_model("llama"), tokenizer=TOKENIZER, max_seq_len=64)
    stream = engine.stream([5, 6, 7], max_new_tokens=20, ignore_eos=True)
    next(stream)
    stream.close()
    report = engine.report()
    assert report.num_free_pages == report.num_pages
    engine.detach()
