"""Compares kernels of recurrent layers with their twins, at the sizes of a model's layers.

Two requests get a long prefill, one of them after a prefix, then a short one; their nodes run in two forwards, and a
path of them is folded; a plain step follows. Each set of operations has a pool of its own.
"""

from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import torch

from specdec.backends.differences import SEED, Answer, Check
from specdec.backends.metadata import TORCH_METADATA
from specdec.backends.recurrent.reference import TORCH_RECURRENT
from specdec.backends.recurrent.state_pool import (
    ConvInputs,
    ConvSpec,
    RecurrentOps,
    RecurrentSpec,
    ScanInputs,
    StatePool,
)
from specdec.backends.sample_tree import Tail, sample_tree
from specdec.core.batch import AttentionMetadata, ForwardMode

# Tokens of both requests, by decay: several chunks of the kernels and part of one, then less than a chunk. The twin
# takes [nodes, nodes, heads, k_dim] of memory for decays by key, and nodes² launches for decays by element.
LONG = {"head": (3 * 64 + 5, 70), "key": (3 * 32 + 5, 70), "state": (37, 21)}
SHORT = {"head": (7, 20), "key": (7, 20), "state": (7, 3)}
MOST_NODES = {"head": 64, "key": 16, "state": 16}
PREFIX = 9  # tokens of the second request before the checks
WIDTH = 512  # positions of a slot table

Call = Callable[[StatePool, AttentionMetadata], torch.Tensor]


def recurrent_checks(pool: StatePool, tail: Tail, path_width: int, dtype: torch.dtype) -> list[Check]:
    """Return checks of the operations of `pool`, for each distinct spec of its layers; none if they are the twins.

    tail: nodes of a round; path_width: the most nodes that a round accepts; dtype: of the model.
    """
    if pool.ops is TORCH_RECURRENT:
        return []
    device = pool.layers[0].state.device

    def check(spec: RecurrentSpec) -> Check:
        ours, theirs = (
            partial(_answers, spec, ops, tail, path_width, dtype, device) for ops in (pool.ops, TORCH_RECURRENT)
        )
        return Check(f"{pool.ops.name}, {spec}", ours, theirs)

    return [check(spec) for spec in dict.fromkeys(layer.spec for layer in pool.layers)]


def _answers(
    spec: RecurrentSpec, ops: RecurrentOps, tail: Tail, path_width: int, dtype: torch.dtype, device: torch.device
) -> list[Answer]:
    """Return the results of one layer's calls for two requests, and the states after them."""
    op, decay = ("conv", "head") if isinstance(spec, ConvSpec) else ("scan", spec.decay)
    num_nodes = min(tail.num_nodes, MOST_NODES[decay])
    tree = sample_tree(Tail(num_nodes, tail.num_words), device)
    random = torch.Generator(device).manual_seed(SEED)
    pool = StatePool([spec], 2, num_nodes, dtype, device, ops)
    state, call = pool.layers[0].state, _call(spec, dtype, random)
    state.copy_(torch.randn(state.shape, generator=random, device=device))
    table, rows = torch.zeros(2, WIDTH, dtype=torch.int32, device=device), torch.tensor([1, 0], device=device)
    answers, lens = [], [0, PREFIX]

    def run(what: str, metadata: AttentionMetadata) -> None:
        answers.append(Answer(f"{op}_{what}", call(pool, metadata)))

    def note_state(after: str) -> None:
        answers.append(Answer(f"the state after {after}", state.clone()))

    def uniform(mode: ForwardMode, **shape: Any) -> AttentionMetadata:
        return TORCH_METADATA.uniform(mode, table, rows, torch.tensor(lens, device=device), max_prefix=WIDTH, **shape)

    for q_lens in (LONG[decay], SHORT[decay]):
        there = [torch.tensor(values, device=device) for values in (lens, q_lens)]
        what = f"extend of {' and '.join(map(str, q_lens))} tokens"
        run(what, TORCH_METADATA.prefill(table, rows, lens, q_lens, there))
        note_state(f"{op}_{what}")
        lens = [old + new for old, new in zip(lens, q_lens, strict=True)]
    half = (num_nodes + 1) // 2
    for first, end in ((0, half), (min(half, num_nodes - 1), num_nodes)):  # one node runs twice
        bits = None if tree.bits is None else tree.bits[first:end].expand(2, -1, -1)
        nodes = uniform(ForwardMode.TARGET_VERIFY, q_len=end - first, first_node=first, ancestor_bits=bits)
        run(f"tail of nodes {first} to {end - 1}", nodes)
    path = tree.path[:path_width]  # of one request; of the other, the root
    accepted = [[*path, *[-1] * (path_width - len(path))], [0] + [-1] * (path_width - 1)]
    pool.committer(None)(table, rows, *(torch.tensor(values, device=device) for values in (lens, accepted)))
    note_state("a fold")
    run("step of both requests", uniform(ForwardMode.DECODE, q_len=1))
    note_state("a step")
    return answers


def _call(spec: RecurrentSpec, dtype: torch.dtype, random: torch.Generator) -> Call:
    """Return a function that runs a layer on random inputs: convolutions, alternately with a bias and with SiLU, since
    specs do not say which; or scans with q and k in the model's dtype, or fp32 for decays by element of the state, and
    the rest in fp32, so that results are not rounded.

    Decay rates range from 1 to a thousandth: some heads forget at once, some remember everything.
    """

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, device=random.device)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=random, device=random.device)

    if isinstance(spec, ConvSpec):
        weight, bias = (normal(*shape).to(dtype) for shape in ((spec.channels, spec.kernel), (spec.channels,)))
        biases = cycle([bias, None])

        def conv(pool: StatePool, metadata: AttentionMetadata) -> torch.Tensor:
            x = normal(metadata.positions.shape[0], spec.channels).to(dtype)
            bias = next(biases)
            return pool.conv(ConvInputs(x, weight, bias, is_silu=bias is None), 0, metadata)

        return conv

    pace = 10 ** (-3 * uniform(*spec.decay_shape))
    is_by_element = spec.decay == "state"
    rates = -uniform(spec.heads, spec.k_dim, spec.v_dim) if is_by_element else None
    of_keys = torch.float32 if is_by_element else dtype

    scales = cycle([spec.k_dim**-0.5, None] if spec.is_corrected else [None])

    def scan(pool: StatePool, metadata: AttentionMetadata) -> torch.Tensor:
        num, scale = metadata.positions.shape[0], next(scales)
        given = spec.key_heads // (2 if scale and spec.key_heads % 2 == 0 else 1)  # heads may share keys, too
        q, k = (normal(num, given, spec.k_dim) * spec.k_dim**-0.5 for _ in range(2))
        steps = pace * uniform(num, *spec.decay_shape)
        inputs = ScanInputs(
            q=q.to(of_keys),
            k=k.to(of_keys),
            v=normal(num, spec.heads, spec.v_dim),
            g=steps if is_by_element else -steps,
            beta=uniform(num, spec.heads) if spec.is_corrected else None,
            rates=rates,
            scale=scale,
        )
        return pool.scan(inputs, 0, metadata)

    return scan
