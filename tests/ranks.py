"""Runs a function of a test module on two ranks: processes over gloo, on one CPU thread each."""

import importlib
import itertools
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SIZE = 2
TIMEOUT_S = 240.0
_STORES = itertools.count()


def on_ranks(
    fn: Callable[..., Any], folder: Path, *args: Any, timeout: float = 240.0
) -> tuple[list[Any], list[int | None]]:
    """What fn(rank, folder, *args) returned, or saved, on every rank, and their exit codes.

    `fn` is found by its name in its module. AssertionError with the traceback of a rank that raised.
    """
    context = torch.multiprocessing.get_context("spawn")
    given = (fn.__module__, fn.__qualname__, str(folder), args)
    processes = [context.Process(target=_run, args=(rank, *given)) for rank in range(SIZE)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT_S)
        if process.is_alive():
            process.kill()
            raise AssertionError(f"a rank hung in {fn.__qualname__}")
    results = [pickle.loads((folder / str(rank)).read_bytes()) for rank in range(SIZE)]
    failed = [told for is_done, told in results if not is_done]
    assert not failed, "\n".join(failed)
    return [result for _, result in results], [process.exitcode for process in processes]


def _run(rank: int, module: str, name: str, folder: str, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(SIZE), "TOKENIZERS_PARALLELISM": "0"}
    renew(rank, folder)
    try:
        outcome = True, getattr(importlib.import_module(module), name)(rank, folder, *args)
    except BaseException:
        outcome = False, f"rank {rank}: {traceback.format_exc()}"
    save(rank, folder, outcome)
    sys.stdout.flush()
    os._exit(0)  # without waiting for the other rank


def save(rank: int, folder: str, outcome: tuple[bool, Any]) -> None:
    """Write what a rank returns, for one that will not come to its end."""
    Path(folder, str(rank)).write_bytes(pickle.dumps(outcome))


def renew(rank: int, folder: str) -> None:
    """Make the process group, or a new one in place of one in which a rank has failed."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    store = f"file://{folder}/store{next(_STORES)}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=SIZE)
