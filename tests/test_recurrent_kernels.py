"""Recurrent layers: both sets of ops against a loop in fp64, in prefills, rounds and commits."""

import copy
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from specdec.backends.metadata import TORCH_METADATA
from specdec.backends.recurrent import StateScope, conv, recurrent_scope, scan
from specdec.backends.recurrent.gates import delta_gates
from specdec.backends.recurrent.reference import TORCH_RECURRENT
from specdec.backends.recurrent.state_pool import EPS, ConvSpec, ScanInputs, ScanSpec, StatePool
from specdec.backends.triton.recurrent import chunks, units
from specdec.backends.triton.recurrent import scan as scan_kernels
from specdec.backends.triton.recurrent.ops import TRITON_RECURRENT
from specdec.core.batch import ForwardMode
from specdec.core.functional.torch_ops import TORCH_OPS
from tests.state_tensors import pool_bytes, pool_tensors

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"  # the interpreter is slow
NUM_ROWS, DUMMY, MAX_TAIL = 5, 4, 12
WEAK = 0.02  # decays that keep a state through a chunk; with those of 1.0, the default here, hardly any survives
KINDS = {
    "delta": ScanSpec(2, 1, 6, 11, "head", is_corrected=True),
    "delta by key": ScanSpec(2, 2, 8, 4, "key", is_corrected=True),
    "ssd": ScanSpec(2, 1, 33, 17, "head", is_corrected=False),
    "by key": ScanSpec(2, 1, 4, 4, "key", is_corrected=False),
    "s6": ScanSpec(1, 1, 4, 19, "state", is_corrected=False),
    "conv 2": ConvSpec(7, 2),
    "conv 3": ConvSpec(7, 3),
    "conv 4": ConvSpec(9, 4),
    "delta of units": ScanSpec(4, 4, 6, 11, "head", is_corrected=True),
    "delta by key of units": ScanSpec(2, 1, 8, 4, "key", is_corrected=True),
}
GIVEN = {"delta of units": 2, "delta by key of units": 1}  # heads of queries and keys, which the op must normalise
# Parents of the nodes of two trees; the second tree takes two forwards.
TREES = ([-1, 0, 0, 1, 1, 2], [-1, 0, 0, 2, 1, 2, 3, 0])


class NaiveScan:
    """The recurrence by definition, token by token, in fp64."""

    def __init__(self, spec, random, strength=1.0, given=None):
        self.spec, self.random, self.strength, self.given = spec, random, strength, given
        self.rates = (
            -torch.rand(spec.heads, spec.k_dim, spec.v_dim, generator=random) if spec.decay == "state" else None
        )

    def empty(self):
        return torch.zeros(self.spec.heads, self.spec.k_dim, self.spec.v_dim, dtype=torch.float64)

    def inputs(self, num):
        """Return q, k, v, g, beta or None, by token."""
        s = self.spec
        q, k = torch.randn(2, num, self.given or s.key_heads, s.k_dim, generator=self.random)
        g = torch.rand(num, *s.decay_shape, generator=self.random) * self.strength
        beta = torch.rand(num, s.heads, generator=self.random) if s.is_corrected else None
        v = torch.randn(num, s.heads, s.v_dim, generator=self.random)
        if self.given:
            return q, k * 3, v, -g, beta
        return q * s.k_dim**-0.5, k / k.norm(dim=-1, keepdim=True), v, g if s.decay == "state" else -g, beta

    def step(self, state, token):
        q, k, v, g, beta = (None if t is None else t.double() for t in token)
        groups = self.spec.heads // q.shape[0]
        if self.given:
            q, k = (x / (x.square().sum(-1, keepdim=True) + EPS).sqrt() for x in (q, k))
            q = q * self.spec.k_dim**-0.5
        q, k = q.repeat_interleave(groups, 0), k.repeat_interleave(groups, 0)
        decay = {"head": lambda: g[:, None, None], "key": lambda: g[:, :, None]}.get(
            self.spec.decay, lambda: self.rates.double() * g[:, None, :]
        )
        state = decay().exp() * state
        u = v if beta is None else beta[:, None] * (v - torch.einsum("hn,hnp->hp", k, state))
        state = state + torch.einsum("hn,hp->hnp", k, u)
        return state, torch.einsum("hn,hnp->hp", q, state)

    def run(self, layer_id, inputs):
        q, k, v, g, beta = (None if t is None else strided(t.to(DEVICE)) for t in inputs)
        rates = None if self.rates is None else strided(self.rates.to(DEVICE))
        return scan(q, k, v, layer_id, g, beta, rates, self.spec.k_dim**-0.5 if self.given else None)


class NaiveConv:
    """Keeps the last inputs in a list; the longest convolution is followed by SiLU."""

    def __init__(self, spec, random, strength=1.0, given=None):
        self.spec, self.random = spec, random
        self.weight = torch.randn(spec.channels, spec.kernel, generator=random)
        self.bias = torch.randn(spec.channels, generator=random) if spec.kernel > 2 else None

    def empty(self):
        return torch.zeros(self.spec.kernel - 1, self.spec.channels, dtype=torch.float64)

    def inputs(self, num):
        return (torch.randn(num, self.spec.channels, generator=self.random),)

    def step(self, state, token):
        window = torch.cat([state, token[0].double().unsqueeze(0)])
        y = (window * self.weight.double().T).sum(0)
        y = y if self.bias is None else y + self.bias.double()
        return window[1:], F.silu(y) if self.spec.kernel == 4 else y

    def run(self, layer_id, inputs):
        x = inputs[0].to(DEVICE).T.contiguous().T
        bias = None if self.bias is None else self.bias.to(DEVICE)
        return conv(x, self.weight.to(DEVICE), bias, layer_id, self.spec.kernel == 4)


def strided(x):
    """Return the same values, not contiguous."""
    return torch.stack([x, x], -1)[..., 0]


class Session:
    """Runs forwards and commits of one layer in a pool, and compares each with the naive one."""

    def __init__(self, kind, ops, strength=1.0, dtype=torch.float32, tolerance=2e-5, max_tail=MAX_TAIL):
        spec, random = KINDS[kind], torch.Generator().manual_seed(len(kind))
        self.naive = (NaiveConv if isinstance(spec, ConvSpec) else NaiveScan)(spec, random, strength, GIVEN.get(kind))
        self.random, self.dtype, self.tolerance = random, dtype, tolerance
        other = ScanSpec(1, 1, 2, 2, "head", is_corrected=False)
        self.pool = StatePool([other, ConvSpec(3, 2), spec, spec], NUM_ROWS, max_tail, torch.float32, DEVICE, ops)
        for layer in self.pool.layers:
            layer.state.fill_(float("nan"))  # a request that begins at 0 must not read what its row held
        self.table = torch.zeros(NUM_ROWS, 256, dtype=torch.int32, device=DEVICE)
        self.commit_pool = self.pool.committer(TORCH_OPS)
        self.states, self.lens = {}, torch.zeros(NUM_ROWS, dtype=torch.int64)
        self.tails = {}

    def forward(self, metadata, inputs):
        with recurrent_scope(StateScope(self.pool, metadata)):
            return self.naive.run(2, [None if t is None else t.to(self.dtype) for t in inputs])

    def assert_close(self, found, expected):
        torch.testing.assert_close(found.double().cpu(), expected.double(), rtol=self.tolerance, atol=self.tolerance)

    def prefill(self, rows, lens, padding=0):
        """Prefill rows with more tokens; return the outputs, which equal the naive ones."""
        inputs = self.naive.inputs(sum(lens) + padding)
        starts, on_device = self.lens[rows].to(DEVICE), torch.tensor(rows, device=DEVICE)
        q_lens = torch.tensor(lens, device=DEVICE)
        metadata = TORCH_METADATA.packed(self.table, on_device, starts, q_lens, sum(lens) + padding, 256)
        found, at = self.forward(metadata, inputs), 0
        for row, num in zip(rows, lens, strict=True):
            for t in range(at, at + num):
                before = self.states.get(row, self.naive.empty())
                self.states[row], out = self.naive.step(before, self.token(inputs, t))
                self.assert_close(found[t], out)
            self.lens[row] += num
            at += num
        assert not found[at:].any(), "padding gets zeros"
        self.assert_states()
        return found

    def token(self, inputs, t):
        return [None if x is None else x[t].to(self.dtype) for x in inputs]

    def nodes(self, rows, parents, first, num_words=1):
        """Run new nodes from number `first` on, of trees with these parents; None: chains."""
        before = {name: t.clone() for name, t in pool_tensors(self.pool, "").items() if "state" in name}
        tail_len = len(parents)
        q_len = tail_len - first
        paths = [path_to(parents, node) for node in range(tail_len)]
        bits = None
        if parents != list(range(-1, tail_len - 1)):
            words = [[word([n % 64 for n in p if n // 64 == w]) for w in range(num_words)] for p in paths[first:]]
            bits = torch.tensor(words, device=DEVICE).expand(len(rows), -1, -1)
        metadata = TORCH_METADATA.uniform(
            ForwardMode.TARGET_VERIFY, self.table, torch.tensor(rows, device=DEVICE), self.lens[rows].to(DEVICE),
            q_len=q_len, max_prefix=256, first_node=first, ancestor_bits=bits,
        )  # fmt: skip
        inputs = self.naive.inputs(len(rows) * q_len)
        found = self.forward(metadata, inputs)
        for i, row in enumerate(rows):
            for node in range(first, tail_len):
                self.tails[row, node] = self.token(inputs, i * q_len + node - first)
                state = self.states[row] if self.lens[row] else self.naive.empty()
                for n in paths[node]:
                    state, out = self.naive.step(state, self.tails[row, n])
                if row != DUMMY:
                    self.assert_close(found[i * q_len + node - first], out)
        assert found.isfinite().all()
        after = pool_tensors(self.pool, "")
        assert all(torch.equal(value, after[name]) or value.isnan().any() for name, value in before.items())

    def step(self, rows):
        """Run one token for each row, committed at once."""
        metadata = TORCH_METADATA.uniform(
            ForwardMode.DECODE, self.table, torch.tensor(rows, device=DEVICE), self.lens[rows].to(DEVICE),
            q_len=1, max_prefix=256,
        )  # fmt: skip
        inputs = self.naive.inputs(len(rows))
        others = [row for row in range(NUM_ROWS) if row not in rows]
        before = self.pool.layers[2].state[others].clone()
        found = self.forward(metadata, inputs)
        for i, row in enumerate(rows):
            if row == DUMMY:
                continue
            state = self.states[row] if self.lens[row] else self.naive.empty()
            self.states[row], out = self.naive.step(state, self.token(inputs, i))
            self.assert_close(found[i], out)
            self.lens[row] += 1
        self.assert_states()
        assert found.isfinite().all()
        torch.testing.assert_close(self.pool.layers[2].state[others], before, rtol=0, atol=0, equal_nan=True)

    def commit(self, rows, paths):
        width = max(map(len, paths)) + 1
        index = torch.tensor([p + [-1] * (width - len(p)) for p in paths], device=DEVICE)
        before = copy.deepcopy(self.pool.layers[2].state)
        self.commit_pool(self.table, torch.tensor(rows, device=DEVICE), self.lens[rows].to(DEVICE), index)
        for row, path in zip(rows, paths, strict=True):
            if row == DUMMY:
                continue
            state = self.states[row] if self.lens[row] else self.naive.empty()
            for node in path:
                state, _ = self.naive.step(state, self.tails[row, node])
            self.states[row] = state
            self.lens[row] += len(path)
            if not path:
                assert torch.equal(self.pool.layers[2].state[row], before[row])
        self.assert_states()

    def assert_states(self):
        for row, state in self.states.items():
            if row != DUMMY and self.lens[row]:
                self.assert_close(self.pool.layers[2].state[row], state)


def path_to(parents, node):
    return [] if node < 0 else [*path_to(parents, parents[node]), node]


def word(bits):
    """Return the int64 with these bits set."""
    return sum(1 << n for n in bits) - (1 << 64 if 63 in bits else 0)


def chain(num):
    return list(range(-1, num - 1))


@pytest.fixture(params=["torch", "triton"])
def ops(request, monkeypatch):
    """The torch ops, or Triton's in blocks so small that the layers here need several, and several chunks."""
    if request.param == "torch":
        return TORCH_RECURRENT
    monkeypatch.setattr(scan_kernels, "TILE", 32)
    monkeypatch.setattr(chunks, "CHUNK", {"head": 16, "key": 16})
    return TRITON_RECURRENT


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "conv" not in kind])
def test_prefills_that_are_cut_at_multiples_of_64_have_equal_bits(kind):
    """The prefix cache keeps states at such cuts: everything after them must be the same."""
    spec, num = KINDS[kind], 70
    naive = NaiveScan(spec, torch.Generator().manual_seed(0), WEAK)
    inputs = naive.inputs(num)
    found = []
    for cuts in ([0, num], [0, 64, num]):
        pool = StatePool([spec], 3, 1, torch.float32, DEVICE, TRITON_RECURRENT, num_kept=1)
        outputs = []
        for begin, end in pairwise(cuts):
            starts, lens = (torch.tensor([n], device=DEVICE) for n in (begin, end - begin))
            rows = torch.tensor([1 if begin else 0], device=DEVICE)
            table = torch.zeros(3, 256, dtype=torch.int32, device=DEVICE)
            metadata = TORCH_METADATA.packed(table, rows, starts, lens, end - begin, 256)
            with recurrent_scope(StateScope(pool, metadata)):
                outputs.append(naive.run(0, [None if t is None else t[begin:end] for t in inputs]))
            pool.copy(rows, torch.tensor([3], device=DEVICE))  # through a snapshot, to another row
            pool.copy(torch.tensor([3], device=DEVICE), torch.tensor([1], device=DEVICE))
        found.append((torch.cat(outputs), pool.layers[0].state[1]))
    for whole, parts in zip(*found, strict=True):
        assert torch.equal(whole, parts)


@pytest.mark.parametrize("kind", KINDS if ON_GPU else [kind for kind in KINDS if kind not in ("by key", "conv 2")])
def test_prefills_rounds_and_commits_equal_a_loop_over_tokens(kind, ops):
    session = Session(kind, ops)
    session.prefill([2, 0, 1], [9, 1, 4], padding=3)
    session.prefill([0, DUMMY, 2, DUMMY], [5, 0, 2, 0], padding=2)
    session.nodes([2, DUMMY, 0], chain(3), 0)
    session.commit([2, DUMMY, 0], [[0, 1], [0], []])
    session.nodes([1, 2, 0], TREES[0], 0)
    session.commit([1, 2, 0], [[0, 2, 5], [0], [0, 1, 4]])
    session.nodes([1, 0, DUMMY, DUMMY], TREES[1][:3], 0)
    session.nodes([1, 0, DUMMY, DUMMY], TREES[1], 3)
    session.commit([1, 0, DUMMY, DUMMY], [[0, 2, 3, 6], [], [], []])
    session.nodes([0, 1], chain(2), 0)
    session.nodes([0, 1], chain(5), 2)
    session.commit([0, 1], [[0], [0, 1, 2, 3, 4]])
    session.nodes([2], chain(1), 0)
    session.commit([2], [[0]])
    session.step([1, DUMMY, 2, DUMMY])
    session.step([2, 1])
    session.prefill([2], [3])
    session.nodes([2, 1], chain(2), 0)
    session.commit([2, 1], [[0, 1], [0]])
    session.step([3])  # the state's first use is a step
    session.lens[3] = 0
    session.nodes([3], chain(2), 0)  # the state's first use is a round
    session.commit([3], [[0, 1]])


@pytest.mark.parametrize("kind", ["delta", "delta by key", "ssd", "s6", "conv 4"])
def test_a_prefill_in_chunks_equals_a_whole_one(kind, ops):
    whole, parts = Session(kind, ops), Session(kind, ops)
    one = whole.prefill([1], [80])
    inputs = Session(kind, ops).naive.inputs(80)
    for begin, end in ((0, 13), (13, 77), (77, 80)):
        parts.naive.inputs = lambda num, a=begin, b=end: [None if t is None else t[a:b] for t in inputs]
        parts.assert_close(parts.prefill([1], [end - begin]), one[begin:end].cpu())
    whole.assert_close(parts.pool.layers[2].state[1], whole.pool.layers[2].state[1].cpu())


@pytest.mark.parametrize("kind", ["delta", "delta by key", "ssd", "by key"])
@pytest.mark.parametrize("lens", [[65], [64, 0, 130], [3, 200]] if ON_GPU else [[3, 130]])
def test_chunks_as_large_as_they_are(kind, lens):
    session = Session(kind, TRITON_RECURRENT, strength=WEAK)
    session.prefill([2, 0, 1][: len(lens)], lens, padding=70)
    session.prefill([1, 2], [1, 66])


@pytest.mark.parametrize("kind", ["delta", "delta by key", "ssd"])
@pytest.mark.parametrize("scratch", [1, 60_000] if ON_GPU else [60_000])
def test_scratch_is_bounded(kind, scratch, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK", {"head": 16, "key": 16})
    monkeypatch.setattr(chunks, "SCRATCH", scratch)
    session = Session(kind, TRITON_RECURRENT, strength=WEAK)
    session.prefill([2, 0, 1], [33, 0, 50], padding=20)
    session.prefill([0, 2], [15, 48])


@pytest.mark.parametrize("kind", ["delta", "delta by key", "ssd", "by key"])
def test_inputs_of_16_bits_lose_nothing_more(kind):
    session = Session(kind, TRITON_RECURRENT, dtype=torch.bfloat16, tolerance=2e-2)
    session.prefill([1, 0], [80, 5], padding=1)
    session.tolerance = 2e-5
    session.assert_states()


def bits_of_three_tokens(kind, spec, dtype, parents, path):
    """Outputs of three tokens after a prefill, as plain steps (parents None) or as nodes `path` of a tree, and of one
    more step, with the states in between."""
    naive = (NaiveConv if isinstance(spec, ConvSpec) else NaiveScan)(spec, torch.Generator().manual_seed(len(kind)))
    pool = StatePool([spec], NUM_ROWS, MAX_TAIL, dtype, DEVICE, TRITON_RECURRENT)
    table, row, found = (
        torch.zeros(NUM_ROWS, 256, dtype=torch.int32, device=DEVICE),
        torch.tensor([1], device=DEVICE),
        [],
    )
    tokens = [None if t is None else t.to(dtype) for t in naive.inputs(9)]

    def run(metadata, which):
        with recurrent_scope(StateScope(pool, metadata)):
            return naive.run(0, [None if t is None else t[which] for t in tokens])

    def uniform(mode, length, **shape):
        return TORCH_METADATA.uniform(mode, table, row, row.new_tensor([length]), max_prefix=256, **shape)

    run(TORCH_METADATA.packed(table, row, row * 0, row * 5, 5, 256), range(5))
    if parents is None:
        found += [run(uniform(ForwardMode.DECODE, 5 + i, q_len=1), [5 + i])[0] for i in range(3)]
    else:
        bits = torch.tensor([[[word(path_to(parents, n))] for n in range(len(parents))]], device=DEVICE)
        shape = {"ancestor_bits": None if parents == chain(3) else bits, "first_node": 0}
        which = [5 + path.index(n) if n in path else 8 for n in range(len(parents))]
        out = run(uniform(ForwardMode.TARGET_VERIFY, 5, q_len=len(parents), **shape), which)
        found += [out[n] for n in path]
        pool.committer(TORCH_OPS)(table, row, row.new_tensor([5]), row.new_tensor([[*path, -1]]))
    found.append(pool.layers[0].state[1].clone())
    found.append(run(uniform(ForwardMode.DECODE, 8, q_len=1), [8])[0])
    return [*found, pool.layers[0].state[1]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_verified_and_folded_tokens_have_the_bits_of_plain_steps(kind, dtype, monkeypatch):
    monkeypatch.setattr(scan_kernels, "TILE", 32)
    specs = [KINDS[kind], *([REAL[kind]] if ON_GPU and kind in REAL else [])]
    for spec in specs:
        steps = bits_of_three_tokens(kind, spec, dtype, None, None)
        for parents, path in ((chain(3), [0, 1, 2]), ([-1, 0, 0, 1, 2, 2], [0, 2, 4])):
            found = bits_of_three_tokens(kind, spec, dtype, parents, path)
            assert [one.equal(other) for one, other in zip(steps, found, strict=True)] == [True] * 6


REAL = {
    "delta": ScanSpec(32, 32, 128, 128, "head", is_corrected=True),
    "delta by key": ScanSpec(32, 32, 128, 128, "key", is_corrected=True),
    "ssd": ScanSpec(80, 1, 128, 64, "head", is_corrected=False),
    "s6": ScanSpec(1, 1, 16, 4096, "state", is_corrected=False),
}


@pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("scale", [None, 128**-0.5])
@pytest.mark.parametrize("strength", [1.0, WEAK])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", REAL)
def test_real_sizes_equal_the_twin(kind, dtype, strength, scale):
    """Compiled kernels depend on sizes; q and k are as in models of 16 bits and of fp32."""
    spec = REAL[kind]
    if scale is not None and not spec.is_corrected:
        pytest.skip("no units")
    inputs = NaiveScan(spec, torch.Generator(), strength).inputs(200)
    q, k, v, g, beta = (None if t is None else t.to(DEVICE) for t in inputs)
    rates = -torch.rand(1, 16, 4096, device=DEVICE) if spec.decay == "state" else None
    rows, lens = torch.tensor([1, 0], device=DEVICE), torch.tensor([150, 50], device=DEVICE)
    table = torch.zeros(3, 256, dtype=torch.int32, device=DEVICE)
    metadata = TORCH_METADATA.packed(table, rows, lens * 0, lens, 200, 256)
    outs, states = [], []
    for ops in (TRITON_RECURRENT, TORCH_RECURRENT):
        pool = StatePool([spec], 3, 4, dtype, DEVICE, ops)
        outs.append(pool.scan(ScanInputs(q.to(dtype), k.to(dtype), v, g, beta, rates, scale), 0, metadata))
        states.append(pool.layers[0].state[:2])
    for ours, theirs in (outs, states):
        assert (ours - theirs).norm() <= 2e-5 * theirs.norm()


ONE_BIT = {torch.float16: 2**-10, torch.bfloat16: 2**-7}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gates_of_delta_rules_equal_their_twin(dtype):
    joined, (rates, bias) = torch.randn(700, 11, device=DEVICE).to(dtype), torch.randn(2, 3, device=DEVICE)
    joined[0, 2:5] = 30.0  # where softplus(x) = x
    joined[1:7, 2:5] = torch.tensor([-2.9, -3.1, -6, -10, -15, -30], device=DEVICE).to(dtype).unsqueeze(1)
    given = joined[:, 2:5], joined[:, 7:10], rates.to(dtype), bias
    ours = units.delta_gates(*given)
    for number, (found, expected) in enumerate(zip(ours, delta_gates.twin(*given), strict=True)):
        torch.testing.assert_close(found, expected, rtol=1e-5 if number == 0 else ONE_BIT.get(dtype, 1e-6), atol=0)
        assert found.is_contiguous() and found.dtype == torch.float32
    alone = units.delta_gates(*(t[:1] for t in given[:2]), *given[2:])
    assert all(torch.equal(a, b[:1]) for a, b in zip(alone, ours, strict=True))


@pytest.mark.parametrize("kind", ["delta", "delta by key", "ssd", "by key", "s6"])
def test_strong_decays_underflow_to_nothing(kind, ops):
    session = Session(kind, ops, strength=120.0, tolerance=2e-4)
    session.prefill([1], [40])
    session.nodes([1], TREES[0], 0)
    session.commit([1], [[0, 2, 5]])


def test_prefills_of_strong_rates_round_as_a_loop_does(ops):
    """Decays by element are not differences of sums there, whose rounding strong rates would amplify."""
    session = Session("s6", ops, strength=20.0, tolerance=4e-6)
    session.naive.rates *= 20
    session.prefill([1], [80])


@pytest.mark.parametrize("kind", ["delta", "s6", "conv 4"])
def test_low_precision_inputs(kind, ops):
    session = Session(kind, ops, dtype=torch.bfloat16, tolerance=2e-2)
    session.prefill([1, 0], [9, 2])
    session.nodes([1, 0], TREES[0], 0)
    session.commit([1, 0], [[0, 2, 5], [0]])


@pytest.mark.parametrize("kind", ["delta by key", "s6", "conv 4"] if ON_GPU else ["delta by key", "conv 4"])
def test_trees_of_more_than_a_word(kind, ops):
    session, parents = Session(kind, ops, max_tail=70), [*chain(66), 0, 65, 67, 66]
    session.prefill([1], [2])
    session.nodes([1], parents[:63], 0)
    session.nodes([1], parents, 63, num_words=2)
    session.commit([1], [[*range(66), 67, 68]])


def test_tensors_are_named_and_counted():
    specs = list(KINDS.values())
    pool = StatePool(specs, NUM_ROWS, MAX_TAIL, torch.bfloat16, DEVICE, TORCH_RECURRENT)
    assert pool_bytes(pool) == StatePool.bytes_for(specs, NUM_ROWS, MAX_TAIL, torch.bfloat16)
    assert {"target state[0]", "target g[0]", "target rates[4]", "target tail[5]"} <= set(pool_tensors(pool, "target"))
    assert pool.commits_chains


def test_ops_are_traced_without_their_state():
    def layers(x, weight, q, v, g):
        return scan(q, q, v.transpose(0, 1), 1, g) + conv(x, weight, None, 0).sum()

    given = torch.zeros(6, 3), torch.zeros(3, 2), torch.zeros(6, 2, 4), torch.zeros(2, 6, 5), torch.zeros(6, 2)
    graph = make_fx(layers, tracing_mode="symbolic")(*given).graph
    names = [str(node.target) for node in graph.nodes if "specdec" in str(node.target)]
    assert names == ["specdec.scan.default", "specdec.conv.default"]


def test_a_layer_outside_its_engine_is_refused():
    with pytest.raises(RuntimeError, match="outside its engine"):
        conv(torch.zeros(2, 3), torch.zeros(3, 2), None, 0)
