"""The tensors that prefills and rounds write, by name: tests compare them, fill them with NaN and restore them."""

from dataclasses import fields

import torch

from specdec.core.cache.pool import KVPool


def pool_tensors(pool, owner):
    """Return every tensor of a K/V pool, or of a pool of recurrent states, under names that begin with `owner`."""
    if isinstance(pool, KVPool):
        own_v = {f"{owner} v[{i}]": v for i, v in enumerate(pool.v) if not pool.layers[i].v_in_k}
        return {f"{owner} k[{i}]": k for i, k in enumerate(pool.k)} | own_v
    named = [(f"{owner} {n}[{i}]", t) for i, layer in enumerate(pool.layers) for n, t in layer._asdict().items()]
    return {name: t for name, t in named if isinstance(t, torch.Tensor)}


def pool_bytes(pool):
    """Return the bytes that a pool holds."""
    return sum(t.nbytes for t in pool_tensors(pool, "").values())


def state_tensors(state):
    """Return all tensors of an EngineState."""
    own = {f.name: getattr(holder, f.name) for holder in (state, state.processors) for f in fields(holder)}
    return {name: t for name, t in own.items() if isinstance(t, torch.Tensor)} | {"sampling": state.sampling.bits.T}


def worker_tensors(worker):
    """Return all tensors of a draft worker, without a cache that it shares with the target."""
    named = {name: getattr(worker, name, None) for name in ("hot_ids", "logits", "hidden", "last", "features")}
    states = worker.context.states if worker.context is not None and worker.context.stores else ()
    cache = {name: t for state in states for name, t in pool_tensors(state, "cache").items()}
    return {name: t for name, t in named.items() if isinstance(t, torch.Tensor)} | cache
