"""Kernels of recurrent layers held against their twins, at the sizes of a model's layers.

Two requests are prefilled by chunks, one of them on top of a prefix, then again by a few tokens each, one by one; nodes
come in two forwards, and a path of them is folded; a plain step follows. Each set of operations works on a pool of its
own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch

from specdec.backends.differences import SEED, Answer, Check
from specdec.backends.metadata import TORCH_METADATA
from specdec.backends.recurrent_ref import TORCH_RECURRENT
from specdec.backends.sample_tree import Tail, sample_tree
from specdec.backends.state_pool import ConvSpec, RecurrentOps, RecurrentSpec, ScanInputs, ScanSpec, StatePool
from specdec.batch import AttentionMetadata, ForwardMode

# Tokens of both requests: several chunks of the kernels and part of one, then fewer than pass by chunks. By decay: the
# twin takes [nodes, nodes, heads, k_dim] of memory where keys decay, and nodes² launches where elements of states do.
LONG = {"head": (3 * 64 + 5, 70), "key": (3 * 32 + 5, 70), "state": (37, 21)}
SHORT = {"head": (7, 20), "key": (7, 20), "state": (7, 3)}
MOST_NODES = {"head": 64, "key": 16, "state": 16}
PREFIX = 9  # tokens that the second request holds before
WIDTH = 512  # positions of a slot table

Call = Callable[[StatePool, int, AttentionMetadata], torch.Tensor]  # pool, tokens, metadata


def recurrent_checks(pool: StatePool, tail: Tail, path_width: int, dtype: torch.dtype) -> list[Check]:
    """Checks of the operations of `pool`, for each distinct spec of its layers; none where they are the twins.

    tail: nodes of a round; path_width: most nodes that it accepts; dtype: of the model.
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
    decay = "head" if isinstance(spec, ConvSpec) else spec.decay
    tail = Tail(min(tail.num_nodes, MOST_NODES[decay]), tail.num_words)
    random = _Random(torch.Generator(device).manual_seed(SEED))
    call = _conv_call(spec, dtype, random) if isinstance(spec, ConvSpec) else _scan_call(spec, dtype, random)
    pool = StatePool([spec], 2, tail.num_nodes, dtype, device, ops)
    pool.layers[0].state.copy_(random.normal(*pool.layers[0].state.shape))
    session = _Session(pool, call, tail)
    session.prefill(LONG[decay])
    session.prefill(SHORT[decay])
    half = (tail.num_nodes + 1) // 2
    session.run_nodes(0, half)
    session.run_nodes(min(half, tail.num_nodes - 1), tail.num_nodes)  # a single one again
    session.fold(path_width)
    session.step()
    return session.answers


@dataclass(frozen=True)
class _Random:
    """Tensors from a generator of their own, fp32, on its device."""

    generator: torch.Generator

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.generator.device)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator, device=self.generator.device)


def _conv_call(spec: ConvSpec, dtype: torch.dtype, random: _Random) -> Call:
    """Return what convolves random inputs: with a bias and without, in turn, since specs do not say which."""
    weight, bias = (random.normal(*shape).to(dtype) for shape in ((spec.channels, spec.kernel), (spec.channels,)))
    biases = cycle([bias, None])

    def call(pool: StatePool, num_tokens: int, metadata: AttentionMetadata) -> torch.Tensor:
        return pool.conv(random.normal(num_tokens, spec.channels).to(dtype), weight, next(biases), 0, metadata)

    return call


def _scan_call(spec: ScanSpec, dtype: torch.dtype, random: _Random) -> Call:
    """Return what runs the recurrence over random inputs, q and k in the model's dtype, the rest in fp32, as models
    have it; with decays by element of the state, all of it.

    Paces of decays are from 1 to a thousandth: some heads forget at once, some remember everything.
    """
    pace = 10 ** (-3 * random.uniform(*spec.decay_shape))
    is_by_element = spec.decay == "state"
    rates = -random.uniform(spec.heads, spec.k_dim, spec.v_dim) if is_by_element else None
    of_keys = torch.float32 if is_by_element else dtype

    def call(pool: StatePool, num_tokens: int, metadata: AttentionMetadata) -> torch.Tensor:
        q, k = (random.normal(num_tokens, spec.key_heads, spec.k_dim) * spec.k_dim**-0.5 for _ in range(2))
        steps = pace * random.uniform(num_tokens, *spec.decay_shape)
        inputs = ScanInputs(
            q=q.to(of_keys),
            k=k.to(of_keys),
            v=random.normal(num_tokens, spec.heads, spec.v_dim),
            g=steps if is_by_element else -steps,
            beta=random.uniform(num_tokens, spec.heads) if spec.is_corrected else None,
            rates=rates,
        )
        return pool.scan(inputs, 0, metadata)

    return call


class _Session:
    """Calls of the one layer of `pool` for two requests, and what they answered."""

    def __init__(self, pool: StatePool, call: Call, tail: Tail):
        self.answers: list[Answer] = []
        self._pool, self._call = pool, call
        (self._layer,) = pool.layers
        self._device = self._layer.state.device
        self._op = "conv" if isinstance(self._layer.spec, ConvSpec) else "scan"
        self._tree = sample_tree(tail, self._device)
        self._table = torch.zeros(2, WIDTH, dtype=torch.int32, device=self._device)
        self._rows = torch.tensor([1, 0], device=self._device)
        self._lens = [0, PREFIX]

    def prefill(self, q_lens: Sequence[int]) -> None:
        """Prefill so many tokens on top of what the requests hold."""
        on_device = [torch.tensor(values, device=self._device) for values in (self._lens, q_lens)]
        metadata = TORCH_METADATA.prefill(self._table, self._rows, self._lens, q_lens, on_device)
        what = f"{self._op}_extend of {' and '.join(map(str, q_lens))} tokens"
        self._run(what, metadata, sum(q_lens))
        self._note_state(f"the state after {what}")
        self._lens = [old + new for old, new in zip(self._lens, q_lens, strict=True)]

    def run_nodes(self, first: int, end: int) -> None:
        """Run nodes [first, end) of both requests."""
        bits = self._tree.bits
        bits = None if bits is None else bits[first:end].expand(2, -1, -1)
        metadata = self._uniform(ForwardMode.TARGET_VERIFY, q_len=end - first, first_node=first, ancestor_bits=bits)
        self._run(f"{self._op}_tail of nodes {first} to {end - 1}", metadata, 2 * (end - first))

    def step(self) -> None:
        """Decode a token of both requests."""
        self._run(f"{self._op}_step of both requests", self._uniform(ForwardMode.DECODE, q_len=1), 2)
        self._note_state("the state after a step")

    def fold(self, path_width: int) -> None:
        """Fold a path of one request, and the root of the other."""
        path = self._tree.path[:path_width]
        accepted = [[*path, *[-1] * (path_width - len(path))], [0] + [-1] * (path_width - 1)]
        lens, index = (torch.tensor(values, device=self._device) for values in (self._lens, accepted))
        self._pool.committer(None)(self._table, self._rows, lens, index)
        self._note_state("the fold")

    def _uniform(self, mode: ForwardMode, **shape: Any) -> AttentionMetadata:
        lens = torch.tensor(self._lens, device=self._device)
        return TORCH_METADATA.uniform(mode, self._table, self._rows, lens, max_prefix=WIDTH, **shape)

    def _run(self, what: str, metadata: AttentionMetadata, num_tokens: int) -> None:
        self.answers.append(Answer(what, self._call(self._pool, num_tokens, metadata)))

    def _note_state(self, what: str) -> None:
        self.answers.append(Answer(what, self._layer.state.clone()))
