"""Ranks that wait for each other, and missing ones named: threads over one store stand in for processes."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

import specdec
from specdec.core.engine import ranks as module
from specdec.core.engine.ranked import told_of
from specdec.core.engine.ranks import Ranks
from specdec.core.errors import RankError
from tests.grammars import tiny_tokenizer
from tests.tiny_models import tiny_model


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "BEAT_S", 0.05)
    monkeypatch.setattr(module, "POLL_S", 0.02)


@pytest.fixture
def make():
    store, made = dist.HashStore(), []

    def ranks(size=2, timeout_s=5.0):
        made.extend(Ranks(store, rank, size, timeout_s) for rank in range(size))
        return made[-size:]

    yield ranks
    for rank in made:
        rank.close()


def on_all(ranks, fn):
    """Return what fn(rank) returns, or raises, on all ranks at once."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        futures = [pool.submit(fn, rank) for rank in ranks]
        return [f.exception() or f.result() for f in futures]


def test_ranks_get_what_all_gave_in_order(make):
    ranks = make(3)
    for number in range(2 * module.KEPT):
        got = on_all(ranks, lambda r, n=number: r.meet("count", [r.rank, n]))
        assert got == [[[0, number], [1, number], [2, number]]] * 3
    on_all(ranks, lambda r: r.same("prompts", [1, 2, 3]))


def test_ranks_compare_stop_strings():
    with specdec.attach(tiny_model("llama"), tokenizer=tiny_tokenizer()) as engine:
        one, again, other = (told_of(engine._requests([[5]], stop=stop)[0]) for stop in ("a b", "a b", "b a"))
    assert one == again != other


def test_other_arguments_and_other_places_are_errors_on_all(make):
    ranks = make(3)
    errors = on_all(ranks, lambda r: r.same("generate()", [1, r.rank == 1]))
    assert {type(e) for e in errors} == {ValueError}
    assert str(errors[0]) == "generate(): rank 1 got arguments that differ from rank 0's; give all ranks the same"
    errors = on_all(ranks, lambda r: r.meet("detach()" if r.rank == 2 else "generate()"))
    assert {type(e) for e in errors} == {RankError} and "rank 2 to 'detach()'" in str(errors[0])


def test_a_rank_that_does_not_come_is_named(make):
    ours, theirs = make(timeout_s=0.3)
    with pytest.raises(RankError, match=r"generate\(\): rank 1 did not arrive within 0.3 s"):
        ours.meet("generate()")
    assert theirs.rank == 1


def test_a_rank_that_fails_is_named_with_its_error(make):
    ours, theirs = make()
    failed = threading.Event()

    def fails():
        with theirs.reporting():
            failed.wait()
            raise OSError("the disk is full")

    pool = ThreadPoolExecutor(1)
    future = pool.submit(fails)
    failed.set()
    with pytest.raises(RankError, match="attach: rank 1 failed: OSError: the disk is full"):
        ours.meet("attach")
    assert "rank 1 failed" in str(ours.explain(RuntimeError("connection closed"), "a round"))
    assert isinstance(future.exception(), OSError)
    pool.shutdown()


def test_an_engine_that_lost_a_rank_says_so_ever_after(make):
    ours, theirs = make()
    calls = []
    ours.on_lost, theirs.on_lost = (lambda told: calls.append((0, told))), (lambda told: calls.append((1, told)))
    with pytest.raises(OSError, match="full"), theirs.reporting():
        raise OSError("full")
    for _ in range(2):
        with pytest.raises(RankError, match="a round: rank 1 failed: OSError: full"):
            ours.wait(lambda: False, "a round")
    for call in (lambda: ours.meet("generate()"), lambda: ours.reporting().__enter__()):
        with pytest.raises(RankError, match="a round: rank 1 failed: OSError: full"):
            call()
    with pytest.raises(RankError, match="this rank, 1, failed: OSError: full"):
        theirs.meet("generate()")
    assert calls == [(1, "this rank, 1, failed: OSError: full"), (0, "a round: rank 1 failed: OSError: full")]


def test_a_thread_that_waits_for_the_device_is_looked_after(make):
    """It cannot check for lost ranks itself; what it waits for must be ended."""
    ours, theirs = make()
    released = threading.Event()
    ours.on_lost = lambda told: released.set()
    with ours.reporting():
        with pytest.raises(OSError, match="full"), theirs.reporting():
            raise OSError("full")
        assert released.wait(5)
    with pytest.raises(RankError, match=r"^rank 1 failed: OSError: full"):
        ours.meet("generate()")


def test_a_rank_without_a_call_is_left_alone_until_the_next(make):
    ours, theirs = make()
    calls = []
    ours.on_lost = calls.append
    with ours.reporting():
        pass
    with pytest.raises(OSError, match="full"), theirs.reporting():
        raise OSError("full")
    time.sleep(5 * module.BEAT_S)
    assert not calls
    with pytest.raises(RankError, match=r"^generate\(\): rank 1 failed: OSError: full"):
        ours.meet("generate()")


def test_an_error_that_a_collective_caused_is_the_other_ranks(make):
    ours, theirs = make()
    with pytest.raises(OSError, match="full"), theirs.reporting():
        raise OSError("full")
    with pytest.raises(RankError, match="a collective: rank 1 failed: OSError: full"), ours.reporting():
        raise ValueError("the probe forward failed") from RuntimeError("gloo: connection reset by peer")


def test_where_all_fail_nobody_is_lost(make):
    ranks = make()
    calls = []

    def fail(rank):
        rank.on_lost = calls.append
        with rank.reporting():
            raise MemoryError("none left")

    assert {type(e) for e in on_all(ranks, fail)} == {MemoryError} and not calls


def test_a_rank_that_has_detached_is_not_waited_for(make):
    ours, theirs = make()
    theirs.close()
    with pytest.raises(RankError, match=r"generate\(\): rank 1 has detached its engine"):
        ours.meet("generate()")


def test_a_rank_that_came_and_detached_at_once_has_come(make, monkeypatch):
    ours, theirs = make()
    has, looked = Ranks._has, []

    def has_late(self, key):
        """The other rank arrives and leaves between two reads of the store."""
        if self is ours and key == "closed/1" and not looked:
            looked.append(key)
            theirs._set("0/1", {"what": "attach()", "value": 7})
            theirs.close()
        return has(self, key)

    monkeypatch.setattr(Ranks, "_has", has_late)
    assert ours.meet("attach()", 6) == [6, 7] and looked
    with pytest.raises(RankError, match="rank 1 has detached its engine"):
        ours.meet("generate()")


def test_an_attach_that_fails_is_told_and_ends_the_signs_of_life(make):
    ours, theirs = make()

    def attach(rank):
        with rank.attaching(("eagle3", 3)):
            if rank is theirs:
                raise MemoryError("none left")
            rank.meet("attach(): graphs")

    told, own = on_all([ours, theirs], attach)
    assert str(told) == "attach(): graphs: rank 1 failed: MemoryError: none left" and isinstance(own, MemoryError)
    for rank in (ours, theirs):
        rank._beats.join(1)
        assert not rank._beats.is_alive()


def test_a_rank_without_signs_of_life_is_named(make, monkeypatch):
    monkeypatch.setattr(module, "LATE_S", 0.5)
    ours, theirs = make()
    ours.wait(lambda: True, "a round")
    time.sleep(0.1)
    ours._late()  # sees it alive
    theirs._is_over.set()  # as a killed process would
    start = time.monotonic()
    with pytest.raises(RankError, match=r"a round: rank 1 has sent no heartbeat for 0.5 s: it is gone"):
        ours.wait(lambda: False, "a round")
    assert time.monotonic() - start < 2


def test_a_rank_that_has_not_begun_or_has_detached_is_not_gone(make, monkeypatch):
    """One may still be loading its weights; the other need not send heartbeats any more."""
    monkeypatch.setattr(module, "LATE_S", 0.05)
    alone, (ours, theirs) = Ranks(dist.HashStore(), 0, 2), make()
    time.sleep(0.1)
    for rank in (alone, ours):
        rank._late()
    theirs.close()
    theirs._beats.join(1)
    ours._late()  # sees the last heartbeat
    time.sleep(0.1)
    assert alone._late() == ours._late() == []
    alone.close()


def test_a_wait_ends_when_it_is_done_or_too_long(make):
    ours, _ = make(timeout_s=0.3)
    end = time.monotonic() + 0.05
    ours.wait(lambda: time.monotonic() > end, "a round")
    with pytest.raises(RankError, match=r"nothing came back for 0.3 s; all ranks send heartbeats"):
        ours.wait(lambda: False, "a round")


def test_a_store_that_is_gone_is_told(make, monkeypatch):
    ours, _ = make()

    def gone(*args):
        raise RuntimeError("connection reset")

    monkeypatch.setattr(dist.HashStore, "set", gone)
    with pytest.raises(RankError, match="the ranks' store is gone, and rank 0 probably with it"):
        ours.meet("generate()")
