"""Runs a function of a test module on two ranks: processes over gloo, on one CPU thread each."""

import importlib
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SIZE = 2


def on_ranks(fn: Callable[..., Any], folder: Path, *args: Any, timeout: float = 240.0) -> list[Any]:
    """What fn(rank, *args) returned on every rank, or the exit code of a rank that was killed.

    `fn` is found by its name in its module. AssertionError with the traceback of a rank that raised.
    """
    context = torch.multiprocessing.get_context("spawn")
    given = (fn.__module__, fn.__qualname__, str(folder), args)
    processes = [context.Process(target=_run, args=(rank, *given)) for rank in range(SIZE)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout)
        if process.is_alive():
            process.kill()
            raise AssertionError(f"a rank hung in {fn.__qualname__}")
    results = [process.exitcode or pickle.loads((folder / str(r)).read_bytes()) for r, process in enumerate(processes)]
    failed = [result[1] for result in results if isinstance(result, tuple) and not result[0]]
    assert not failed, "\n".join(failed)
    return [result[1] if isinstance(result, tuple) else result for result in results]


def _run(rank: int, module: str, name: str, folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(SIZE), "TOKENIZERS_PARALLELISM": "0"}
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=SIZE)
    try:
        outcome = True, getattr(importlib.import_module(module), name)(rank, *args)
    except BaseException:
        outcome = False, f"rank {rank}: {traceback.format_exc()}"
    Path(folder, str(rank)).write_bytes(pickle.dumps(outcome))
    sys.stdout.flush()
    os._exit(0)  # without waiting for the other rank
