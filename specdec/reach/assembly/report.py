"""Builds the report of an engine from its core."""

from dataclasses import asdict

from specdec.core.engine.core import Core
from specdec.core.engine.generation import shipped_settings
from specdec.core.metrics import AcceptanceStats
from specdec.core.outputs import Report
from specdec.reach.targets.weight_bytes import verify_cost


def report_of(core: Core, backend_reason: str, bits: str) -> Report:
    """Return the report of a core, while it is not stepped; backend_reason, bits: see `assemble`."""
    model, context = core.target.model, core.context
    verify, draft_compiled = verify_cost(model, core.config.verify_width), core.models.how_draft_compiled
    runners, forwards = core.counters.runners.items(), core.counters.forwards.items()
    return Report(
        model=type(model).__name__,
        draft=core.round.worker.facts | ({"layers": draft_compiled} if draft_compiled else {}),
        backend=context.backend.name,
        backend_reason=backend_reason,
        config=asdict(core.config),
        generation=shipped_settings(model.generation_config),
        kv_bytes=context.pool.num_bytes,
        latents=sum(layer.v_in_k for layer in context.layers),
        num_free_pages=core.slot_tables.num_free_pages,
        num_pages=core.slot_tables.num_pages,
        prefix_cache=core.slot_tables.prefix_facts,
        preemption=dict(core.scheduler.preemption),
        grammar={} if core.launcher.feed is None else core.launcher.feed.facts,
        policy=core.launcher.tiers.facts,
        capture=core.graphs.capture.name,
        prefill_graph=core.prefill.name,
        compile_seconds=core.models.compile_seconds,
        compiled=core.models.how_compiled,
        bits=bits,
        experts={} if verify is None else verify.facts,
        graphs=[cost for runner in core.runners for cost in runner.costs],
        runners={n: {"replays": c.replays, "eager": c.eager, "rejects": dict(c.rejects)} for n, c in runners},
        paths={
            mode.name: {"replays": c.replays, "eager": c.eager, "attention": core.served_by(mode)}
            for mode, c in forwards
        },
        acceptance=AcceptanceStats().merge([core.delivery.acceptance]),
    )
