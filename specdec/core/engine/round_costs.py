"""Measures the time of rounds of each tier, by batch and context, on an idle engine: the costs that `Policy` uses."""

from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter

import torch

from specdec.core.batch import on_device
from specdec.core.engine.core import Core
from specdec.core.engine.policy import CostTable
from specdec.core.sampling_params import SamplingKind
from specdec.graphs.shapes import batch_buckets

NEAR, FAR = 64, 4096  # tokens of the contexts, fewer where fewer fit
MOST, ENOUGH = 3, 60.0  # times that are taken, and ms after which they are enough
IN_A_ROW = 4  # rounds on CUDA, where the host launches one while the device plays another


@torch.inference_mode()
def measure_costs(core: Core) -> CostTable:
    """Time rounds of finished requests, which only write K/V that nothing reads."""
    config, table, device = core.config, core.slot_tables.table, core.device
    far = min(FAR, table.shape[1] - config.tail_reserve)
    contexts = min(NEAR, far // 2), far
    captured = batch_buckets(config.max_batch, config.graph_batches)
    buckets = [n for n in captured if n & (n - 1) == 0 or n == captured[-1]]
    slots = torch.arange(table[: captured[-1]].numel(), device=device) % (core.slot_tables.total_slots - 1) + 1
    kind, before = SamplingKind(config.graph_sampling[0]), table.clone()
    rows_of: dict[int, tuple[tuple[float, ...], tuple[float, ...]]] = {}
    catch_up: dict[int, float] = {}
    try:
        with on_device(device), core.models.stepping(), core.counters.ignoring():
            table[: captured[-1]] = slots.view(captured[-1], -1).to(table.dtype)
            for bucket in buckets:
                rows, ms = torch.arange(bucket, device=device), []
                for context in contexts:
                    core.state.seq_lens[:bucket] = context
                    plays = (partial(core.graphs.play, kind, rows, context, shape) for shape in config.shapes)
                    ms.append(tuple(_ms(play, device) for play in plays))
                rows_of[bucket] = ms[0], ms[1]
                if core.round.catch_up is not None:
                    catch_up[bucket] = _ms(partial(core.graphs.catch_up, rows, far), device)
    finally:
        table.copy_(before)
        core.state.seq_lens.zero_()
    return CostTable(rows_of, contexts, catch_up or dict.fromkeys(buckets, 0.0))


def _ms(play: Callable[[], object], device: torch.device) -> float:
    """Return ms of a call, after one that is not timed: the median of a few, on CUDA the mean of several in a row."""
    is_cuda = device.type == "cuda"
    synchronize, num = torch.cuda.synchronize if is_cuda else lambda: None, IN_A_ROW if is_cuda else 1
    play()
    times: list[float] = []
    while len(times) < MOST and sum(times) < ENOUGH:
        synchronize()
        start = perf_counter()
        for _ in range(num):
            play()
        synchronize()
        times.append(1e3 * (perf_counter() - start) / num)
    return median(times)
