"""Callers that wait for tokens: one steps for all, the others sleep and return as soon as they have theirs."""

import asyncio
import threading
import time
from contextlib import aclosing

import pytest

import specdec
from specdec import DetachedError
from specdec.core.engine.calls import Bell, Calls
from tests.heads import random_head
from tests.test_attach import greedy, ragged_prompts
from tests.test_text import TOKENIZER
from tests.test_threads import join
from tests.tiny_models import tiny_model

NUM_TOKENS = 16


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture
def engine(model):
    with specdec.attach(model, tokenizer=TOKENIZER, max_batch=64, max_seq_len=160) as engine:
        yield engine
        assert engine.report().num_free_pages == engine.report().num_pages
        engine.check_integrity()


@pytest.fixture
def steps(engine, monkeypatch):
    """A list with the number of engine steps so far."""
    step, counted = engine._core.step, [0]

    def count(*caller) -> None:
        counted[0] += 1
        step(*caller)

    monkeypatch.setattr(engine._core, "step", count)
    return counted


def test_64_threads_stream_a_piece_a_round(engine, steps):
    begin, pieces = threading.Barrier(64), []

    def one(i: int) -> None:
        stream = engine.stream([3 + i, 4, 5], max_new_tokens=128, ignore_eos=True)
        begin.wait()
        pieces.append(sum(1 for _ in stream))

    join([threading.Thread(target=one, args=(i,)) for i in range(64)])
    assert min(pieces) >= 120, pieces  # a thread that sleeps through a round gets two tokens at once
    assert steps[0] < 128 + 20, "not a step for every caller"


def test_a_short_call_beside_many_long_ones_returns_when_its_tokens_are_there(engine, steps):
    begin, taken, is_over = threading.Barrier(33), [], []

    def long(i: int) -> None:
        begin.wait()
        while not is_over:
            engine.generate([[3 + i, 4, 5]], max_new_tokens=100, ignore_eos=True)

    def short() -> None:
        begin.wait()
        for _ in range(5):
            before = steps[0]
            engine.generate([[9, 9]], max_new_tokens=4, ignore_eos=True)
            taken.append(steps[0] - before)
        is_over.append(True)

    join([threading.Thread(target=long, args=(i,)) for i in range(32)] + [threading.Thread(target=short)])
    assert max(taken) <= 16, f"{taken} steps for 4 tokens"


class Waiting:
    """A caller that has news after `num_steps` steps, whoever runs them."""

    def __init__(self, calls: Calls, num_steps: int):
        self.calls, self.left, self.own = calls, num_steps, 0

    @property
    def has_news(self) -> bool:
        return self.left <= 0

    def collect(self, step) -> None:
        def counted() -> None:
            self.own += 1
            step()

        self.calls.collect(self, counted)


@pytest.mark.parametrize("error", [None, LookupError, SystemExit])
def test_who_leaves_passes_the_steps_on(error):
    """Five callers; each steps until it has news or its step fails, then the next one takes over."""
    calls = Calls()
    callers = [Waiting(calls, n) for n in (3, 6, 9, 12, 15)]
    all_there, told, num_steps = threading.Event(), [], [0]

    def step() -> None:
        all_there.wait(30)
        num_steps[0] += 1
        for caller in callers:
            caller.left -= 1
            if caller.has_news:
                calls.note(caller)
        try:
            if error is not None and num_steps[0] in (2, 3):
                raise error
        finally:
            calls.wake()

    def run(caller: Waiting) -> None:
        try:
            caller.collect(step)
        except BaseException as problem:
            told.append(problem)

    threads = [threading.Thread(target=run, args=(caller,)) for caller in callers]
    for thread in threads:
        thread.start()
    while len(calls._asleep) < 4:
        pass
    all_there.set()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads), "nobody steps"
    assert [type(problem) for problem in told] == [error] * 2 if error else not told
    assert not calls._asleep and not calls._is_stepped
    assert num_steps == [15] or error, "a step too many"


def test_a_broken_launch_ends_every_sleeping_caller(engine, monkeypatch):
    """No caller hangs; the engine serves the next one."""
    begin, told, core = threading.Barrier(8), [], engine._core
    play, rounds = core.graphs.play, []

    def broken(*args):
        rounds.append(1)
        if len(rounds) == 12:
            raise RuntimeError("it broke")
        return play(*args)

    monkeypatch.setattr(core.graphs, "play", broken)

    def one(i: int) -> None:
        begin.wait()
        try:
            engine.generate([[3 + i, 4, 5]], max_new_tokens=60, ignore_eos=True)
        except RuntimeError as error:
            told.append(str(error))

    join([threading.Thread(target=one, args=(i,)) for i in range(8)])
    assert told == ["it broke"] * 8
    assert len(engine.generate([[3, 4]], max_new_tokens=3, ignore_eos=True).tokens[0]) == 3


def test_a_caller_that_holds_the_turn_steps_itself(engine):
    """The thread that steps for all cannot continue meanwhile."""
    long = threading.Thread(target=engine.generate, args=([[3, 4]],), kwargs={"max_new_tokens": 90, "ignore_eos": True})
    long.start()
    while not engine._core.calls._is_stepped:
        pass
    with engine._core.turns:
        assert len(engine.generate([[5, 6]], max_new_tokens=4, ignore_eos=True).tokens[0]) == 4
        assert engine._core.scheduler.running, "the other caller waits"
    long.join(60)
    assert not long.is_alive()


def test_tasks_stream_side_by_side_and_generate(model, engine):
    expected = [greedy(model, p, NUM_TOKENS) for p in ragged_prompts()]
    order = []

    async def one(i: int) -> str:
        prompt, pieces = ragged_prompts()[i % 5], []
        async for piece in engine.astream([prompt], max_new_tokens=NUM_TOKENS):
            order.append(i)
            pieces.append(piece)
        return "".join(pieces)

    async def all_of_them():
        whole = engine.agenerate(ragged_prompts(), max_new_tokens=NUM_TOKENS)
        return await asyncio.gather(whole, *map(one, range(59)))

    out, *texts = asyncio.run(all_of_them())
    assert out.tokens == expected and out.texts == [TOKENIZER.decode(e) for e in expected]
    assert texts == [TOKENIZER.decode(expected[i % 5]) for i in range(59)]
    middle = order[len(order) // 3 : 2 * len(order) // 3]
    assert len(set(middle)) > 40, "one after another"


def test_tasks_that_are_cancelled_free_their_rows(engine):
    others = engine.submit([[3, 4]], max_new_tokens=5, ignore_eos=True)  # their caller never steps

    async def forever() -> None:
        async for _ in engine.astream([5, 6, 7], max_new_tokens=150, ignore_eos=True):
            pass

    async def some() -> None:
        async with aclosing(engine.astream([5, 6], max_new_tokens=150, ignore_eos=True)) as stream:
            async for _ in stream:
                break
        tasks = [asyncio.create_task(forever()) for _ in range(4)]
        tasks.append(asyncio.create_task(engine.agenerate([[8, 9]] * 3, max_new_tokens=150, ignore_eos=True)))
        async for _ in engine.astream([9, 9], max_new_tokens=9, ignore_eos=True):
            pass
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results), results
        while engine._driver._is_running:
            await asyncio.sleep(0.005)

    asyncio.run(some())
    assert not engine._core.scheduler.running and not engine._core.scheduler.waiting
    assert others[0].finish_reason == "length"


def test_tasks_and_threads_wait_for_one_another(engine):
    """Whichever steps, steps for both."""
    text = TOKENIZER.decode(engine.generate([[5, 6, 7]], max_new_tokens=30, ignore_eos=True).tokens[0])
    texts = []

    async def ask() -> str:
        return "".join([p async for p in engine.astream([5, 6, 7], max_new_tokens=30, ignore_eos=True)])

    def in_thread() -> None:
        for _ in range(3):
            texts.append("".join(engine.stream([5, 6, 7], max_new_tokens=30, ignore_eos=True)))

    async def gather() -> list[str]:
        return await asyncio.gather(*(ask() for _ in range(4)))

    def in_loop() -> None:
        for _ in range(2):
            texts.extend(asyncio.run(gather()))

    join([threading.Thread(target=run) for run in (in_thread, in_loop, in_thread, in_loop)])
    assert texts == [text] * 22


def test_an_event_loop_that_is_busy_takes_together_what_comes_while_it_rests():
    async def run() -> list[bool]:
        loop, bell = asyncio.get_running_loop(), Bell()

        def due() -> asyncio.Future[None]:
            bell.due.append(loop.create_future())
            return bell.due[-1]

        async def work(news: asyncio.Future[None]) -> None:
            await news
            end = time.thread_time() + 0.005
            while time.thread_time() < end:
                pass

        task = asyncio.create_task(work(due()))
        await asyncio.sleep(0)
        bell.ring(loop)
        await task
        second, third = due(), due()
        bell.ring(loop)
        await asyncio.sleep(0)
        was_held = bell.is_resting and not second.done()
        await asyncio.wait_for(second, 5)
        return [was_held, third.done()]

    assert asyncio.run(run()) == [True, True]


def test_errors_reach_tasks(engine, model, monkeypatch):
    with pytest.raises(ValueError, match=r"astream\(\) takes one prompt, got 2; use agenerate\(\)"):
        engine.astream([[3], [4]])
    with pytest.raises(ValueError, match="max_new_tokens"):
        asyncio.run(engine.agenerate([[3]], max_new_tokens=0))
    admit, broken = engine._core.scheduler.admit, []

    def break_once() -> None:
        if not broken:
            broken.append(1)
            raise RuntimeError("it broke")
        admit()

    async def three():
        calls = (engine.agenerate([[3, 4]], max_new_tokens=4, ignore_eos=True) for _ in range(3))
        return await asyncio.gather(*calls, return_exceptions=True)

    monkeypatch.setattr(engine._core.scheduler, "admit", break_once)
    assert "it broke" in map(str, asyncio.run(three())), "nobody hangs"
    assert all(len(out.tokens[0]) == 4 for out in asyncio.run(three()))


def test_detach_ends_tasks(model):
    engine = specdec.attach(tiny_model("llama"), random_head(model), tokenizer=TOKENIZER)

    async def ask() -> None:
        async for _ in engine.astream([5, 6, 7], max_new_tokens=200, ignore_eos=True):
            await asyncio.to_thread(engine.detach)

    with pytest.raises(DetachedError):
        asyncio.run(ask())
    with pytest.raises(DetachedError):
        asyncio.run(engine.agenerate([[3, 4]]))
