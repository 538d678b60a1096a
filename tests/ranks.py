"""Runs a function of a test module on two ranks: over gloo, one CPU thread each, or over NCCL, one GPU each."""

import faulthandler
import gc
import importlib
import itertools
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from specdec.core.engine import ranks

SIZE = 2
TIMEOUT_S = 150.0
_STORES = itertools.count()


def on_ranks(fn: Callable[..., Any], folder: Path, device: str, *args: Any) -> tuple[list[Any], list[int | None]]:
    """Return what fn(rank, folder, device, *args) returned, or saved, on every rank, and the exit codes.

    `fn` is looked up by name in its module. device: cpu, or cuda, of which rank i gets the i-th. Raises AssertionError
    with the traceback of a rank that raised.
    """
    context = torch.multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")
    tests = {name: vars(module) for name, module in sys.modules.items() if name.startswith("tests.test_")}
    callers = [name for name, given in tests.items() if given.get("on_ranks") is on_ranks]
    shared = ["tests.tiny_models", "specdec.api", "torch.export._trace", *callers]  # once for all ranks: saves seconds
    context.set_forkserver_preload(shared)
    given = (fn.__module__, fn.__qualname__, str(folder), device, args)
    processes = [context.Process(target=_run, args=(rank, *given)) for rank in range(SIZE)]
    hidden = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"} if device == "cpu" else {}
    with mock.patch.dict(os.environ, hidden):
        for process in processes:
            process.start()
    end = time.monotonic() + TIMEOUT_S
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
    saved = [Path(folder, str(rank)) for rank in range(SIZE)]
    results = [pickle.loads(path.read_bytes()) if path.exists() else (False, "nothing saved") for path in saved]
    told = "\n".join(told_file(rank, folder).read_text()[-4000:] for rank in hung)
    assert not hung, f"ranks {hung} hung in {fn.__qualname__}; saved so far: {results}\n{told}"
    failed = [told for is_done, told in results if not is_done]
    assert not failed, "\n".join(map(str, failed))
    return [result for _, result in results], [process.exitcode for process in processes]


def _run(rank: int, module: str, name: str, folder: str, device: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.dup2(os.open(told_file(rank, folder), os.O_WRONLY | os.O_CREAT), 2)
    faulthandler.dump_traceback_later(TIMEOUT_S - 10)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(SIZE), "TOKENIZERS_PARALLELISM": "0"}
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch._C._get_accelerator = lambda: torch.device("cpu")  # transformers calls it; CUDA builds return cuda
        ranks.EAGER_S = 0.0  # a waiting rank leaves its core to the other one
    renew(rank, folder, device)
    try:
        fn = getattr(importlib.import_module(module), name)
        gc.collect()
        gc.freeze()  # see conftest.py
        outcome = True, fn(rank, folder, device, *args)
    except BaseException:
        outcome = False, f"rank {rank}: {traceback.format_exc()}"
    save(rank, folder, outcome)
    sys.stdout.flush()
    os._exit(0)  # without waiting for the other rank


def told_file(rank: int, folder: str | Path) -> Path:
    """Return the file of a rank's stderr."""
    return Path(folder, f"stderr{rank}")


def save(rank: int, folder: str, outcome: tuple[bool, Any]) -> None:
    """Write a rank's result, for a rank that will not end normally."""
    Path(folder, str(rank)).write_bytes(pickle.dumps(outcome))


def renew(rank: int, folder: str, device: str) -> None:
    """Make the process group, or replace one in which a rank has failed."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        # A group with a broken collective is freed once the other rank's is, so all references to this one must go.
        gc.collect()  # frees an engine that failed and was not detached
        for beats in [t for t in threading.enumerate() if t.name == "specdec-beat"]:
            beats.join(10)
        gc.collect()
    store = f"file://{folder}/store{next(_STORES)}"
    where = {"backend": "gloo"} if device == "cpu" else {"backend": "nccl", "device_id": torch.device("cuda", rank)}
    torch.distributed.init_process_group(**where, init_method=store, rank=rank, world_size=SIZE)
