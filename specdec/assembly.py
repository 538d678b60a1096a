"""Putting an engine together: which draft, which backends, whether it fits the device, and the core of all parts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from specdec.backends import AttentionBackend, pick_backend
from specdec.backends.checks import is_debug
from specdec.config import EngineConfig
from specdec.draft.algo_spec import algo_spec
from specdec.draft.eagle3 import Eagle3Worker
from specdec.draft.worker import DraftWorker, NoDraft
from specdec.engine import Core
from specdec.graphs import Counters
from specdec.kv_cache import KVPool, LayerShape, SlotTables
from specdec.memory import MemoryNeed, check_fits, free_bytes
from specdec.models.eagle3 import Eagle3Head
from specdec.models.hf import HFTarget
from specdec.models.loader import check_head, detect_algo, load_eagle3
from specdec.prefill_graphs import LOWER as PREFILL_LOWER
from specdec.prefill_graphs import estimate_prefill_bytes, resolve_prefill_mode
from specdec.round_checks import checked
from specdec.round_graphs import LOWER, estimate_bytes
from specdec.round_ops import RoundOps, pick_ops


def resolve_algo(draft: Any, algo: str | None) -> str | None:
    """The algorithm's name; every contradiction between `draft` and `algo` is an error."""
    if algo not in (None, "auto"):
        algo_spec(algo)  # unknown names raise here
        if draft is None:
            raise ValueError(f"algo={algo!r} needs a draft: a checkpoint folder, a Hub id or a loaded head")
    if algo is None and draft is not None:
        raise ValueError("algo=None is plain decoding, but a draft was given; leave one of them out")
    if draft is None:
        return None
    if isinstance(draft, nn.Module):
        if not isinstance(draft, Eagle3Head):
            raise ValueError(f"draft is a {type(draft).__name__}: expected a folder, a Hub id or an Eagle3Head")
        return "eagle3"
    found = detect_algo(draft)
    if algo not in ("auto", found):
        raise ValueError(f"algo={algo!r}, but {str(draft)!r} holds a draft for {found!r}")
    return found


def assemble(target: HFTarget, config: EngineConfig, draft: str | Path | nn.Module | None) -> tuple[Core, str]:
    """The core of an engine, its graphs captured, and why it runs on the backend it does.

    ValueError, CheckpointError, CapacityError or GraphError for what cannot be put together.
    """
    if config.max_seq_len > target.spec.max_positions:
        raise ValueError(f"max_seq_len={config.max_seq_len}: the model has positions up to {target.spec.max_positions}")
    machine = (target.dtype, target.device, config.page_size)
    backend, why = pick_backend(config.backend, target.spec.layers, *machine)
    backends = [backend]
    counters = Counters()
    head = None if draft is None else _load_head(draft, target)
    _check_memory(target, config, head)
    tables = SlotTables(config.max_batch, config.table_width, config.pool_slots, config.page_size, target.device)
    worker: DraftWorker = NoDraft()
    if head is not None:
        draft_backend, draft_why = pick_backend(config.backend, [head.config.layer], *machine)
        why = why if draft_backend is backend else f"{why}; the draft: {draft_backend.name}, {draft_why}"
        backends.append(draft_backend)
        worker = Eagle3Worker(
            head,
            target.embed_tokens,
            config,
            draft_backend(),
            _ops_for(draft_backend),
            tables.total_slots,
            counters.count_forward,
        )
    may_merge = _may_merge(config, backends)
    core = Core(target, config, worker, backend(), _ops_for(backend), tables, counters, may_merge=may_merge)
    return core, why


def _load_head(draft: str | Path | nn.Module, target: HFTarget) -> Eagle3Head:
    if isinstance(draft, Eagle3Head):
        check_head(draft, target.shape, target.dtype, target.device)
        return draft
    assert not isinstance(draft, nn.Module)
    return load_eagle3(draft, target.shape, target.dtype, target.device)


def _check_memory(target: HFTarget, config: EngineConfig, head: Eagle3Head | None) -> None:
    """CapacityError if pools, tables and graphs will not fit beside the weights."""
    total_slots = SlotTables.slots_for(config.pool_slots, config.page_size)

    def size(module: nn.Module) -> int:
        return sum(p.numel() * p.element_size() for p in module.parameters())

    def pool(layers: Sequence[LayerShape]) -> int:
        return KVPool.bytes_for(layers, total_slots, target.dtype)

    lower = "num_slots, max_batch or max_seq_len"
    needs = [MemoryNeed("KV pool", pool([s.shape for s in target.spec.layers]), lower)]
    needs.append(MemoryNeed("slot tables", 8 * config.num_rows * config.table_width, "max_batch or max_seq_len"))
    resident = [MemoryNeed("weights", size(target.model), "")]
    if head is not None:
        c = head.config
        state = config.num_rows * (c.draft_vocab_size + c.hidden_size) + 2 * config.table_width * c.head_dim
        needs.append(MemoryNeed("the draft's KV pool", pool([c.layer.shape]), lower))
        needs.append(MemoryNeed("the draft's state", state * target.dtype.itemsize, "max_batch or max_seq_len"))
        resident.append(MemoryNeed("draft", size(head), ""))
    if config.cuda_graph is not False:
        spec = target.spec
        shape = (spec.hidden_size, spec.vocab_size, len(spec.layers), target.dtype.itemsize)
        needs.append(MemoryNeed("graphs", estimate_bytes(config, *shape), LOWER))
    if resolve_prefill_mode(config, target) != "off":
        num_aux = 0 if head is None else len(head.config.aux_layers)
        num_bytes = estimate_prefill_bytes(config, target.spec, num_aux, target.dtype.itemsize)
        needs.append(MemoryNeed("prefill graphs", num_bytes, PREFILL_LOWER))
    check_fits(needs, resident, free_bytes(target.device))


def _may_merge(config: EngineConfig, backends: Sequence[type[AttentionBackend]]) -> bool:
    """Whether draft, verify and extend can be one graph: nothing may have to be planned on the host between them."""
    on_host = [b.name for b in backends if not b.capabilities.device_planned]
    if config.round_graph and on_host:
        raise ValueError(
            f"round_graph=True: {on_host[0]} plans on the host; leave round_graph out, or take another backend"
        )
    return not on_host


def _ops_for(backend: type[AttentionBackend]) -> RoundOps:
    ops = pick_ops(backend)
    return checked(ops) if is_debug() else ops
