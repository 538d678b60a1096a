"""Whatever goes wrong for one caller, no other caller loses text, rows or slots."""

import os
import random
import signal
import threading
import time

import pytest
import torch

import specdec
from specdec.core.cache.tables import SlotTables
from tests.faults import Tally, Victim
from tests.heads import random_head
from tests.test_attach import greedy, ragged_prompts
from tests.tiny_models import tiny_model


@pytest.mark.parametrize(
    ("subject", "nums"), [("attention", [100, 100]), ("hybrid", [50]), ("plain_hybrid", [50]), ("several_shapes", [50])]
)
def test_random_faults_lose_nothing(subject, nums):
    tally = Tally()
    nums = [*nums, 100] if torch.cuda.is_available() else nums  # bench/faults.py runs 10,000
    for seed, num in enumerate(nums):
        Victim(seed, tally, subject).run(num)
    assert not tally.wrong and not tally.lost
    assert tally.faults["broken off"] > 0.16 * sum(nums) and tally.neighbours > 0.33 * sum(nums)
    assert tally.told < tally.neighbours / 2


@pytest.mark.usefixtures("python_sigint")
def test_ctrl_c_at_random_moments_loses_nothing():
    """Real signals, sent by another thread while `generate` runs."""
    model, prompts, rng = tiny_model("llama"), ragged_prompts(), random.Random(0)
    engine = specdec.attach(model, random_head(model), max_batch=4)
    expected = engine.generate(prompts, max_new_tokens=12).tokens
    num_interrupted, handler = 0, signal.getsignal(signal.SIGINT)
    for _ in range(25):
        timer = threading.Timer(rng.random() * 0.1, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            engine.generate(prompts, max_new_tokens=12)
            timer.join()
            time.sleep(0.01)
        except KeyboardInterrupt:
            num_interrupted += 1
        assert signal.getsignal(signal.SIGINT) is handler
        engine.check_integrity()
        assert engine.report().num_free_pages == engine.report().num_pages
    assert num_interrupted == 25
    assert engine.generate(prompts, max_new_tokens=12).tokens == expected


def test_a_request_that_cannot_be_packed_fails_alone():
    model, prompts = tiny_model("llama"), ragged_prompts()
    engine = specdec.attach(model, random_head(model))
    requests = engine.submit([prompts[0]], max_new_tokens=12)
    engine.step()
    bad = engine._requests([prompts[1]], max_new_tokens=12)
    bad[0].stop_ids = (2**70,)  # as if admission had accepted it
    with pytest.raises(OverflowError):
        list(engine._run(bad))
    while engine.step():
        pass
    assert requests[0].tokens == greedy(model, prompts[0], 12)
    engine.check_integrity()


def test_slot_tables_are_recomputed_from_who_holds_a_row():
    tables = SlotTables(max_running=3, width=20, num_slots=48, page_size=4, device=torch.device("cpu"))
    rows = [tables.reserve(n) for n in (9, 4, 17)]
    assert rows == [0, 1, 2] and tables.reserve(1) is None
    tables.write(torch.tensor(rows), torch.from_numpy(tables.pages_of(rows)))
    tables.check_integrity()
    tables._pages._free[:] = 0  # a state that a fault may leave
    tables._pages.num_free, tables._free_rows = 1, [0]
    tables.repair([1])
    tables.check_integrity()
    assert tables.num_free_rows == 2 and tables.num_free_pages == tables.num_pages - 1
    assert sorted(tables.table[1, :4].tolist()) == list(range(16, 20))
    assert int(tables.table[1, 4:].max()) < 4  # the dummy page
