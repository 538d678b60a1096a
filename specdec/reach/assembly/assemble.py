"""Assembles an engine: picks draft and backends, checks that all fits the device, and builds the core."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.backends.base import AttentionBackend
from specdec.backends.checks import is_debug
from specdec.backends.op import ForwardContext
from specdec.backends.registry import compiling_kernels, pick_backend, pick_recurrent
from specdec.core.cache.pool import KVPool, LayerState
from specdec.core.cache.prefix import KeptStates
from specdec.core.cache.tables import SlotTables
from specdec.core.config import EngineConfig
from specdec.core.draft.block import mask_words
from specdec.core.draft.head import BlockDraftHead, DraftHead
from specdec.core.draft.worker import DraftParts, DraftWorker, NoDraft
from specdec.core.engine.core import Core
from specdec.core.engine.generation import Settings
from specdec.core.engine.ranked import RankedCore
from specdec.core.engine.ranks import Ranks
from specdec.core.engine.round_costs import measure_costs
from specdec.core.errors import CapacityError
from specdec.core.functional.checks import checked
from specdec.core.functional.ops import RoundOps
from specdec.core.functional.torch_ops import pick_ops
from specdec.core.grammar.feed import MaskFeed
from specdec.core.grammar.matcher import Compiler
from specdec.core.round.parts import Parts
from specdec.core.round.state import EngineState
from specdec.graphs.counters import Counters
from specdec.reach.assembly.algorithms import algorithm
from specdec.reach.assembly.bits import check_bits
from specdec.reach.assembly.kernel_check import check_kernels
from specdec.reach.assembly.memory import BY_SLOT, Draft, ModelShape, check_memory
from specdec.reach.assembly.models import HFModels
from specdec.reach.assembly.narrow import narrow_head
from specdec.reach.checkpoints.tensors import TensorFiles
from specdec.reach.grammars.compiler import make_compiler
from specdec.reach.heads.formats import ASSISTANT, STANDALONE, WHOLE, why_absent
from specdec.reach.heads.load import check_head, load_head, open_draft
from specdec.reach.heads.quantised import fp8_head
from specdec.reach.targets.assistant import is_assistant, load_assistant
from specdec.reach.targets.hf import HFTarget
from specdec.reach.targets.shape import position_limit
from specdec.reach.targets.standalone import load_standalone

Source = str | Path | nn.Module | TensorFiles  # a draft, as `resolve_draft` returns it


def resolve_draft(draft: Any, algo: str | None) -> tuple[str | None, Any]:
    """Return the algorithm's name and the draft; if that is a head's checkpoint, as opened files.

    Every contradiction between `draft` and `algo` is an error.
    """
    if algo not in (None, "auto"):
        has_model = algorithm(algo).has_model  # unknown names raise here
        if not has_model and draft is not None:
            raise ValueError(f"algo={algo!r} drafts without a model, but a draft was given; leave one of them out")
        if not has_model:
            return algo, None
        if draft is None:
            raise ValueError(f"algo={algo!r} needs a draft: a checkpoint folder, a Hub id, a loaded head or a model")
    if algo is None and draft is not None:
        raise ValueError("algo=None is plain decoding, but a draft was given; leave one of them out")
    if draft is None:
        return None, None
    found, opened = _open(draft, None if algo == "auto" else algo)
    if algo is not None and algo not in ("auto", found):
        what = type(draft).__name__ if isinstance(draft, nn.Module) else repr(str(draft))
        why = "" if isinstance(draft, nn.Module) else why_absent(algo, found)
        raise ValueError(f"algo={algo!r}, but {what} is a draft for {found!r}{why}")
    return found, draft if opened is None else opened


def _open(draft: str | Path | nn.Module, wanted: str | None) -> tuple[str, TensorFiles | None]:
    if isinstance(draft, DraftHead):
        return draft.algo, None
    if isinstance(draft, PreTrainedModel):
        return ASSISTANT if is_assistant(draft) else STANDALONE, None
    if not isinstance(draft, str | Path):
        raise ValueError(
            f"draft is a {type(draft).__name__}: expected a folder, a Hub id, a head such as Eagle3Head, or a causal LM"
        )
    return open_draft(draft, wanted)


def assemble(
    target: HFTarget,
    config: EngineConfig,
    draft: Source | None,
    algo: str | None,
    tokenizer: Any,
    ranks: Ranks | None = None,
) -> tuple[Core, str, str]:
    """Return an engine's core with captured graphs, the reason for its backend, and `Report.bits`. ranks: of a sharded
    target.

    ValueError, CheckpointError, CapacityError or GraphError if the parts do not fit together; AttachError for a wrong
    kernel, under check_kernels.
    """
    _check_length(config, target, "model")
    if config.logprobs is not None and config.logprobs > target.spec.vocab_size:
        raise ValueError(f"logprobs={config.logprobs}: the model's vocabulary has {target.spec.vocab_size} tokens")
    loaded = None if draft is None or algo is None else _load_draft(draft, algo, target, tokenizer)
    try:
        if isinstance(loaded, HFTarget):
            _check_length(config, loaded, "draft")
        return _assemble(target, config, loaded, algo, tokenizer, ranks)
    except BaseException as error:
        if isinstance(loaded, HFTarget):
            loaded.detach()
        if isinstance(error, torch.OutOfMemoryError):
            raise CapacityError(f"{error}; lower {BY_SLOT}, or max_prefill_tokens") from error
        raise


def _assemble(
    target: HFTarget, config: EngineConfig, draft: Draft | None, algo: str | None, tokenizer: Any, ranks: Ranks | None
) -> tuple[Core, str, str]:
    device = target.device
    grammars = _grammars(config, target, tokenizer, ranks)
    backend, why = pick_backend(config.backend, target.spec.layers, target.dtype, device)
    config = replace(config, prefix_cache=_keeps_prefixes(config, draft))
    counters = Counters()
    ours = draft if config.draft_weights is None else fp8_head(draft)
    narrow, draft = narrow_head(config, draft, target), ours
    shape = None if draft is None else ModelShape.of(draft)
    check_memory(target, config, shape)
    sizes = (config.max_running, config.table_width, config.pool_slots, config.page_size)
    has_states = any(isinstance(model, HFTarget) and model.spec.recurrent for model in (target, draft))
    states = KeptStates(config.num_kept_states, config.page_size) if has_states and config.prefix_cache else None
    tables = SlotTables(*sizes, device, bool(config.prefix_cache), states)
    row_states = _row_states(target, config, config.verify_width, backend)
    context = _context(backend, ModelShape.of(target), tables, counters, config.tree_words, row_states)
    worker: DraftWorker = NoDraft(_ops_for(backend))
    if algo is not None:
        row, own, own_context = algorithm(algo), backend, None
        if shape is not None:
            own, draft_why = pick_backend(config.backend, shape.layers, shape.dtype, device)
            why = why if own is backend else f"{why}; the draft: {own.name}, {draft_why}"
            own_states = _row_states(draft, config, config.draft_tail, own)
            words = mask_words(draft, config) if isinstance(draft, BlockDraftHead) else config.draft_words
            pool = None if shape.has_pool else context.pool
            own_context = _context(own, shape, tables, counters, words, own_states, pool)
        worker = row.make(DraftParts(row.spec, target, config, _ops_for(own), own_context, narrow), draft)
    for model in (target, draft):
        if isinstance(model, HFTarget):
            model.expect_positions(config.table_width)
    target.read_layers(worker.aux_layers)
    logprobs = None if config.logprobs is None else (config.num_steps + 1, config.logprobs)
    digests = config.num_steps + 1 if config.digests else None
    state = EngineState.empty(config.num_rows, config.table_width, device, logprobs, digests)
    if target.adapters:
        context = replace(context, adapters=state.adapters)
    if target.images.moves_positions:
        context = replace(context, rope_deltas=torch.zeros_like(state.seq_lens))
    in_use = [c.backend for c in (context, worker.context) if c is not None]
    parts = Parts(
        target=target,
        config=config,
        worker=worker,
        context=context,
        ops=_ops_for(backend),
        tables=tables,
        state=state,
        counters=counters,
        models=HFModels(target, worker, config),
        compiling_kernels=partial(compiling_kernels, in_use, device),
        grammars=grammars,
        feed=None if grammars is None else MaskFeed(config, target.spec.vocab_size, device),
    )
    check_kernels(parts)
    core = Core(parts) if ranks is None else RankedCore(parts, ranks)
    try:
        if config.auto_steps is not None:
            core.launcher.tiers.set_costs(measure_costs(core))
        return core, why, check_bits(core)
    except BaseException:
        core.close()
        raise


def _grammars(config: EngineConfig, target: HFTarget, tokenizer: Any, ranks: Ranks | None) -> Compiler | None:
    """Return the grammar compiler, None without `config.grammar`; ValueError if grammars are not supported here."""
    if config.grammar is None:
        return None
    if ranks is not None:
        raise ValueError(f"grammar={config.grammar!r}: not supported with a sharded model; leave it out")
    eos_ids = Settings.merge(target.model.generation_config).eos_ids
    return make_compiler(config.grammar, tokenizer, target.spec.vocab_size, eos_ids)


def _load_draft(draft: Source, algo: str, target: HFTarget, tokenizer: Any) -> Draft:
    if algo in WHOLE:
        assert not isinstance(draft, TensorFiles), "a whole model is loaded from where it lies"
        return (load_assistant if algo == ASSISTANT else load_standalone)(draft, target, tokenizer)
    if isinstance(draft, DraftHead):
        check_head(draft, target.shape, target.dtype, target.device)
        return draft
    assert not isinstance(draft, nn.Module)
    return load_head(draft, target.shape, target.dtype, target.device, algo)


def _keeps_prefixes(config: EngineConfig, draft: Draft | None) -> bool:
    """Return whether to use a prefix cache; ValueError if it is required but not supported."""
    reasons = []
    if isinstance(draft, DraftHead) and draft.num_modules > 1:
        reasons.append(f"the draft has {draft.num_modules} modules that read each other's last states")
    if config.prefix_cache is True and reasons:
        raise ValueError(f"prefix_cache=True: {'; '.join(reasons)}; leave prefix_cache out")
    return config.prefix_cache is not False and not reasons


def _check_length(config: EngineConfig, model: HFTarget, what: str) -> None:
    limit = model.spec.max_positions
    if config.max_seq_len > limit:
        _, why = position_limit(model.model.config.get_text_config())
        raise ValueError(
            f"max_seq_len={config.max_seq_len}: the {what} has positions up to {limit}{why and f' ({why})'}; "
            f"attach with max_seq_len={limit} or less"
        )


def _context(
    kind: type[AttentionBackend],
    model: ModelShape,
    tables: SlotTables,
    counters: Counters,
    mask_words: int,
    row_states: tuple[LayerState, ...] = (),
    shared: KVPool | None = None,
) -> ForwardContext:
    """Make a ready backend for a model's layers, and their K/V pool under the slots of `tables`, unless shared."""
    backend, device = kind(), tables.table.device
    backend.prepare_for(model.layers, model.dtype, device, mask_words)
    pool = shared or KVPool([layer.shape for layer in model.layers], tables.total_slots, model.dtype, device)
    sinks, count = model.sinks, counters.count_forward
    return ForwardContext(backend, pool, model.layers, sinks, count, row_states, stores=shared is None)


def _row_states(
    model: Draft | None, config: EngineConfig, max_tail: int, backend: type[AttentionBackend]
) -> tuple[LayerState, ...]:
    """Make the states of a model's recurrent layers; heads have none."""
    if not isinstance(model, HFTarget):
        return ()
    return model.row_states(config.num_rows, max_tail, pick_recurrent(backend.capabilities), config.num_kept_states)


def _ops_for(backend: type[AttentionBackend]) -> RoundOps:
    ops = pick_ops(backend.capabilities)
    return checked(ops) if is_debug() else ops
