"""Messages between the ranks of a tensor-parallel engine on the host, so that they neither drift nor hang.

Ranks run the same program: the same calls in the same order. They meet at attach and at every call, in a key-value
store that needs no collective: a missing rank is named when a deadline ends, or as soon as it reports an error.
"""

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import Any

import torch.distributed as dist

from specdec.core.errors import RankError

TIMEOUT_S = 60.0  # after which a missing rank counts as lost
ATTACH_TIMEOUT_S = 1800.0  # the same during attach: one rank may compile what another has cached
BEAT_S = 2.0  # between two heartbeats
LATE_S = 10 * BEAT_S  # without heartbeat, after which a rank counts as lost; a compiler may block one for seconds
POLL_S = 0.25
EAGER_S = 0.05  # of polling the device without pause: a sleep takes longer than most waits for rounds
SPIN_S = 2e-5  # between two polls after that
KEPT = 4  # meetings whose values are kept, at least: a slow rank may still read the previous one

_engines = itertools.count()


class Ranks:
    """One engine's rank among `size`; see the module. store: a key-value store that all ranks can reach.

    Methods that raise RankError, which names the rank, do so if another rank fails or does not come within `timeout_s`
    seconds; later calls raise it, too. on_lost: then called with the message, once, from any thread, to end whatever
    waits for the rank on a device.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_s: float = TIMEOUT_S):
        self.rank, self.size = rank, size
        self._store = store
        self._timeout_s = timeout_s
        self.on_lost: Callable[[str], None] = lambda message: None
        self._lost = ""  # why this engine is of no use any more
        self._suspicion = ""  # what may become the reason
        self._num_meetings = 0
        self._num_reporting = 0  # calls in progress, in which a device may wait for another rank
        self._seen: dict[int, tuple[bytes, float]] = {}  # the last beat of a rank, and when it was new here
        self._is_over = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="specdec-beat", daemon=True)
        self._beats.start()

    @classmethod
    def of(cls, group: dist.ProcessGroup, timeout_s: float = TIMEOUT_S) -> "Ranks":
        """Return this rank's Ranks of a process group; every rank must call it at the same point, once per engine."""
        store = dist.PrefixStore(
            f"specdec/{group.group_name}/{next(_engines)}", dist.distributed_c10d._get_default_store()
        )
        return cls(store, dist.get_rank(group), dist.get_world_size(group), timeout_s)

    def meet(self, what: str, value: Any = None, timeout_s: float | None = None) -> list[Any]:
        """Exchange `value`, plain JSON data: return every rank's, by rank. timeout_s: by default the engine's.
        RankError if a rank fails, is late, or makes a call other than `what`."""
        self._require()
        timeout_s = timeout_s or self._timeout_s
        number, self._num_meetings = self._num_meetings, self._num_meetings + 1
        own = {"what": what, "value": value}
        self._set(f"{number}/{self.rank}", own)
        met = [own if r == self.rank else self._of(number, r, what, timeout_s) for r in range(self.size)]
        others = {m["what"] for m in met} - {what}
        if others:
            came = ", ".join(f"rank {i} to {m['what']!r}" for i, m in enumerate(met))
            raise self._lose(f"the ranks made different calls: {came}. Make the same calls in the same order on all")
        return [m["value"] for m in met]

    def same(self, what: str, value: Any, beside: Any = None) -> list[Any]:
        """Return every rank's `beside`, as `meet` does; ValueError on all ranks unless all pass an equal `value`."""
        digest = sha256(repr(value).encode()).hexdigest()[:16]
        given = self.meet(what, [digest, beside])
        differing = [rank for rank, (other, _) in enumerate(given) if other != given[0][0]]
        if differing:
            others = ", ".join(map(str, differing))
            raise ValueError(f"{what}: rank {others} got arguments that differ from rank 0's; give all ranks the same")
        return [theirs for _, theirs in given]

    def any_in_attach(self, is_so: bool) -> bool:
        """Return whether `is_so` on any rank; RankError as `meet`."""
        return any(self.meet("attach()", is_so, ATTACH_TIMEOUT_S))

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Send errors of the `with` block to the other ranks, which raise RankError at their next meeting or wait; an
        error of a collective becomes a RankError here. If the device waits for a lost rank, that ends within seconds.
        """
        self._require()
        self._num_reporting += 1
        try:
            yield
        except RankError:
            raise
        except BaseException as error:
            self._report(error)
            raise
        finally:
            self._num_reporting -= 1

    @contextlib.contextmanager
    def attaching(self, settings: Any) -> Iterator[None]:
        """Return a context for making an engine, with `settings` that are equal on all ranks: ValueError if not. An
        error is sent to the others, and ends the heartbeat."""
        try:
            self.same("attach()", settings)
            with self.reporting():
                yield
        except BaseException:
            self.close()
            raise

    def _report(self, error: BaseException) -> None:
        """Report an error here to the other ranks, unless it comes from one of them: raise RankError then."""
        if self._lost:
            raise RankError(self._lost) from error
        if is_of_a_collective(error) or (error.__cause__ is not None and is_of_a_collective(error.__cause__)):
            raise self.explain(error, "a collective") from error
        told = f"{type(error).__name__}: {error}"
        with contextlib.suppress(RankError):
            self._set(f"failed/{self.rank}", told)
        if not self._have_all_failed():  # then no rank waits for another, and the process group is kept
            self._lose(f"this rank, {self.rank}, failed: {told}")

    def wait(self, is_done: Callable[[], bool], what: str) -> None:
        """Return when is_done(); RankError if another rank fails or is gone before."""
        self._require()
        start = looked = time.monotonic()
        end = start + self._timeout_s
        while not is_done():
            now = time.monotonic()
            if now - start < EAGER_S:
                continue
            if now - looked > POLL_S:
                looked = now
                self._raise_failed(what)
            if now > end:
                raise self._lose(f"{what}: nothing came back for {self._timeout_s:g} s; {self._told_of_absent()}")
            time.sleep(SPIN_S)

    def explain(self, error: BaseException, what: str) -> RankError:
        """Return the RankError for a collective that failed with `error`, once it is known whose fault it is."""
        end = time.monotonic() + LATE_S + BEAT_S
        while time.monotonic() < end:
            try:
                self._raise_failed(what)
            except RankError as told:
                return told
            time.sleep(POLL_S)
        return self._lose(f"{what}: {type(error).__name__}: {error}; {self._told_of_absent()}")

    def close(self) -> None:
        """End the heartbeat."""
        if not self._is_over.is_set():
            with contextlib.suppress(RankError):
                self._set(f"closed/{self.rank}", True)
        self._is_over.set()

    def _require(self) -> None:
        if self._lost:
            raise RankError(self._lost)

    def _lose(self, message: str) -> RankError:
        """Return the error that ends this engine, or that has ended it before."""
        if not self._lost:
            self._lost = message
            self.on_lost(message)
        return RankError(self._lost)

    def _of(self, number: int, rank: int, what: str, timeout_s: float) -> Any:
        key, start = f"{number}/{rank}", time.monotonic()
        end, looked = start + timeout_s, start
        while True:
            with self._reachable(what):
                if self._store.check([key]):
                    return json.loads(self._store.get(key))
            if time.monotonic() - start < EAGER_S:
                continue
            if time.monotonic() - looked > POLL_S:
                looked = time.monotonic()
                self._raise_failed(what)
            if self._has(f"closed/{rank}") and not self._has(key):  # it may have come since, and left at once
                raise self._lose(f"{what}: rank {rank} has detached its engine")
            if time.monotonic() > end:
                raise self._lose(f"{what}: rank {rank} did not arrive within {timeout_s:g} s")
            time.sleep(1e-3)

    def _raise_failed(self, what: str) -> None:
        """Raise RankError if another rank has said that it failed, or shows no sign of life."""
        failure = self._failure()
        if failure:
            raise self._lose(f"{what}: {failure}")

    def _failure(self) -> str:
        """Return a description of another rank's failure; empty if none is known."""
        for rank in self._others():
            if self._has(f"failed/{rank}"):
                return f"rank {rank} failed: {json.loads(self._store.get(f'failed/{rank}'))}"
        late = self._late()
        return f"rank {', '.join(map(str, late))} has sent no heartbeat for {LATE_S:g} s: it is gone" if late else ""

    def _have_all_failed(self) -> bool:
        """Return whether the others have failed as this rank has, within a beat."""
        end = time.monotonic() + BEAT_S
        with contextlib.suppress(RankError):
            while time.monotonic() < end:
                if all(self._has(f"failed/{rank}") for rank in self._others()):
                    return True
                time.sleep(POLL_S / 10)
        return False

    def _late(self) -> list[int]:
        """Ranks that beat once, and not lately; clocks of ranks are not compared, only how often they beat."""
        now, late = time.monotonic(), []
        for rank in self._others():
            beat = self._store.get(f"beat/{rank}") if self._has(f"beat/{rank}") else b""
            seen, since = self._seen.get(rank, (b"", now))
            self._seen[rank] = (beat, since if beat == seen else now)
            if beat and now - self._seen[rank][1] > LATE_S and not self._has(f"closed/{rank}"):
                late.append(rank)
        return late

    def _beat(self) -> None:
        """Send heartbeats, in a thread; `_is_over` ends it."""
        forgotten = 0
        for number in itertools.count():
            with contextlib.suppress(RuntimeError):
                self._store.set(f"beat/{self.rank}", str(number))
                self._watch()
                while forgotten < self._num_meetings - KEPT:
                    self._store.delete_key(f"{forgotten}/{self.rank}")
                    forgotten += 1
            if self._is_over.wait(BEAT_S):
                return

    def _watch(self) -> None:
        """Fail a call whose thread waits for the device while the device waits for a dead rank."""
        failure = self._failure() if self._num_reporting and not self._lost else ""
        if failure and failure == self._suspicion:  # not at once: it may be about to fail as the other did
            self._lose(failure)
        self._suspicion = failure

    def _told_of_absent(self) -> str:
        late = self._late()
        return f"rank {', '.join(map(str, late))} has sent no heartbeat" if late else "all ranks send heartbeats"

    def _others(self) -> Sequence[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _has(self, key: str) -> bool:
        with self._reachable(key):
            return self._store.check([key])

    def _set(self, key: str, value: Any) -> None:
        with self._reachable(key):
            self._store.set(key, json.dumps(value))

    @contextlib.contextmanager
    def _reachable(self, what: str) -> Iterator[None]:
        """RankError for a store that cannot be reached: it lives in rank 0's process, or in torchrun's."""
        try:
            yield
        except RankError:
            raise
        except RuntimeError as error:
            raise self._lose(f"{what}: the ranks' store is gone, and rank 0 probably with it: {error}") from error


def is_of_a_collective(error: BaseException) -> bool:
    """Return whether `error` came from NCCL or gloo, and so most likely from another rank."""
    is_told = isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL"))
    return is_told or isinstance(error, dist.DistError)
