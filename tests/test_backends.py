"""Every backend against a naive float64 reference, query by query, over every row of the prefix + tail table.

Without a GPU the Triton kernels run in Triton's interpreter. The pool is full of NaN except for the requests' own K/V,
and outputs are NaN before they are written: a wrong slot that is read or a row that is not written cannot go unnoticed.
"""

import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.backends import (
    BACKENDS,
    AttentionCall,
    LayerSpec,
    TorchBackend,
    attention,
    forward_context,
    pick_backend,
    unmet_needs,
)
from specdec.backends.base import HeadNorms, NormedRope
from specdec.backends.metadata import TORCH_METADATA
from specdec.backends.op import ForwardContext
from specdec.backends.rope import Rope, prepare, rope_table, rotate
from specdec.core.batch import ForwardMode
from specdec.core.cache.pool import KVPool
from specdec.reach.targets.admission.masks import Reach, classify_mask

triton = pytest.importorskip("triton")
from specdec.backends.triton import backend  # noqa: E402
from specdec.backends.triton.attention import tiling  # noqa: E402
from specdec.backends.triton.attention.chunks import chunk_of, most_chunks, tile_span  # noqa: E402
from specdec.backends.triton.attention.metadata import TRITON_METADATA  # noqa: E402
from specdec.backends.triton.attention.plan import split_plan  # noqa: E402
from specdec.backends.triton.attention.store import store_kv  # noqa: E402
from specdec.backends.triton.backend import TritonBackend  # noqa: E402
from tests.ancestors import words_of  # noqa: E402
from tests.split_plan import begin_of, split_plan_reference  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # relative to the reference's norm
LAYERS = {
    "gqa": LayerSpec(9, 3, 16, 16, 0.25),
    "window": LayerSpec(4, 2, 16, 16, 0.25, window=5),
    "softcap": LayerSpec(4, 2, 16, 16, 0.25, softcap=2.0),
    "sinks": LayerSpec(4, 2, 16, 16, 0.25, window=6, has_sinks=True),
    "v_dim": LayerSpec(4, 4, 24, 12, 0.2),
    "mqa": LayerSpec(5, 1, 64, 64, 0.125),
    "wide": LayerSpec(4, 2, 192, 128, 0.07, softcap=30.0, has_sinks=True),
    "widest": LayerSpec(2, 1, 256, 256, 0.0625, window=40),
    "latents": LayerSpec(20, 1, 40, 32, 0.2, v_in_k=True),
}
PREFIXES = (11, 3, 150)


class SmallPieces(TritonBackend):
    """Splits even short prefixes into chunks."""

    processors = 32


KINDS = {"torch": TorchBackend, "triton": TritonBackend, "triton, split": SmallPieces}


class Setup:
    """A pool full of NaN except for the prefixes of some requests, whose pages are shuffled."""

    def __init__(
        self,
        layer,
        kind="triton, split",
        dtype=torch.float32,
        prefixes=PREFIXES,
        page_size=1,
        width=192,
        mask_words=1,
    ):
        self.generator = torch.Generator().manual_seed(0)
        self.layer, self.prefixes, self.dtype = layer, prefixes, dtype
        num_pages = -(-width // page_size)
        pages = 1 + torch.randperm(len(prefixes) * num_pages, generator=self.generator).view(len(prefixes), -1, 1)
        self.tables = (pages * page_size + torch.arange(page_size)).flatten(1).to(DEVICE)  # by request
        # The table has other requests' rows before and between those of these requests, in any order.
        self.rows = (1 + 2 * torch.randperm(len(prefixes), generator=self.generator)).to(DEVICE)
        everything = (2 * len(prefixes) + 1, self.tables.shape[1])
        self.slot_table = torch.full(everything, 1 << 30, dtype=torch.int32, device=DEVICE)
        self.slot_table[self.rows] = self.tables.int()
        self.num_slots = (len(prefixes) * num_pages + 1) * page_size
        self.pool = KVPool([layer.shape], self.num_slots, dtype, DEVICE)
        for cache in (self.pool.k[0], self.pool.v[0]):
            cache.fill_(float("nan"))
            for row, prefix in enumerate(prefixes):
                cache[self.tables[row, :prefix]] = self.random(prefix, *cache.shape[1:])
        self.sinks = self.random(layer.num_heads) if layer.has_sinks else None
        self.modes = []
        self.backend = KINDS[kind]()
        self.backend.prepare_for([layer], dtype, DEVICE, mask_words)
        self.context = ForwardContext(self.backend, self.pool, [layer], [self.sinks], self.modes.append)
        self.lens = torch.tensor(prefixes, device=DEVICE)

    def random(self, *shape):
        return torch.randn(*shape, generator=self.generator).to(DEVICE, self.dtype)

    def run(self, metadata, rope=None):
        t, s = metadata.positions.numel(), self.layer
        q, k = self.random(t, s.num_heads, s.qk_dim), self.random(t, s.num_kv_heads, s.qk_dim)
        v = self.random(t, s.num_kv_heads, s.v_dim)
        out = torch.full((t, s.num_heads, s.v_dim), float("nan"), dtype=self.dtype, device=DEVICE)
        with forward_context(self.context, metadata):
            self.backend.run(AttentionCall(q, k, v, out, self.pool, 0, s, self.sinks, rope))
        return (q if rope is None else rotate(q, rope)), out

    def uniform(self, q_len, **options):
        mode = ForwardMode.DRAFT if q_len == 1 else ForwardMode.TARGET_VERIFY
        most = -(-max(self.prefixes) // 16) * 16  # an upper bound known on the host, not the length itself
        return self.backend.metadata.uniform(
            mode,
            self.slot_table,
            self.rows,
            self.lens,
            q_len=q_len,
            max_prefix=min(most, self.tables.shape[1]),
            **options,
        )

    def expected(self, q, row, q_pos, visible):
        """Attend with one query [Hq, dim] to `visible` (slot position, rotary position) pairs, in float64."""
        s = self.layer
        near = [at for at, pos in visible if s.window is None or q_pos - pos < s.window]
        slots, group = self.tables[row, near], s.num_heads // s.num_kv_heads
        keys = self.pool.k[0][slots].double().repeat_interleave(group, 1)
        values = self.pool.v[0][slots].double().repeat_interleave(group, 1)
        logits = torch.einsum("hd,nhd->hn", q.double(), keys) * s.scaling
        if s.softcap:
            logits = torch.tanh(logits / s.softcap) * s.softcap
        if self.sinks is not None:
            logits = torch.cat([logits, self.sinks.double().unsqueeze(1)], 1)
        return torch.einsum("hn,nhd->hd", logits.softmax(-1)[:, : len(near)], values)

    def run_limited(self, metadata, limits):
        metadata = replace(metadata, limits=torch.tensor(limits, device=DEVICE))
        return metadata, *self.run(metadata)

    def check(self, out, wants):
        want = torch.stack(wants)
        error = (out.double() - want).norm() / want.norm()
        assert error < TOLERANCE[self.dtype], f"relative error {error:.2e}"

    def check_causal(self, metadata, q, out, first=0):
        """Check that every row sees the prefix, and the tail up to itself or to its limit."""
        starts, wants = metadata.qo_indptr.tolist(), []
        limits = None if metadata.limits is None else metadata.limits.tolist()
        for row, prefix in enumerate(self.prefixes):
            for i in range(starts[row + 1] - starts[row]):
                end = prefix + first + i
                last = end if limits is None else limits[starts[row] + i]
                wants.append(self.expected(q[starts[row] + i], row, end, [(p, p) for p in range(last + 1)]))
        self.check(out, wants)

    def check_tree(self, parents, **kwargs):
        """Verify one tree for every request: rows see the prefix and their ancestors."""
        ancestors, depths = [[0]], [0]
        for node, parent in enumerate(parents[1:], 1):
            ancestors.append([*ancestors[parent], node])
            depths.append(depths[parent] + 1)
        bits = words_of(ancestors).repeat(len(self.prefixes), 1, 1).to(DEVICE)
        deep = torch.tensor([depths] * len(self.prefixes), device=DEVICE)
        q, out = self.run(self.uniform(len(parents), depths=deep, tail_depths=deep, ancestor_bits=bits), **kwargs)
        wants = []
        for row, prefix in enumerate(self.prefixes):
            for i, line in enumerate(ancestors):
                seen = [(p, p) for p in range(prefix)] + [(prefix + j, prefix + depths[j]) for j in line]
                wants.append(self.expected(q[row * len(parents) + i], row, prefix + depths[i], seen))
        self.check(out, wants)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("first", "q_len"), [(0, 1), (0, 4), (2, 1)])
def test_causal_tails(name, kind, first, q_len):
    setup = Setup(LAYERS[name], kind)
    for node in range(first):  # earlier tail nodes are in the pool already
        setup.run(setup.uniform(1, first_node=node))
    metadata = setup.uniform(q_len, first_node=first)
    q, out = setup.run(metadata)
    setup.check_causal(metadata, q, out, first)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYERS)
def test_trees_see_their_ancestors(name, kind):
    Setup(LAYERS[name], kind).check_tree([0, 0, 0, 1, 3])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["gqa", "window"])
def test_rows_of_a_block_see_each_other(name, kind):
    """Rows also see later rows of their block, as in block drafters; several blocks of keys."""
    setup, num = Setup(LAYERS[name], kind), 35
    depths = torch.arange(num, device=DEVICE).expand(3, -1)
    bits = torch.full((3, num, 1), -1, device=DEVICE)
    q, out = setup.run(setup.uniform(num, depths=depths, tail_depths=depths, ancestor_bits=bits))
    wants = []
    for row, prefix in enumerate(PREFIXES):
        seen = [(p, p) for p in range(prefix + num)]
        wants += [setup.expected(q[row * num + i], row, prefix + i, seen) for i in range(num)]
    setup.check(out, wants)


@pytest.mark.parametrize("name", ["window", "widest"])
def test_narrow_tiles_for_little_shared_memory(name, monkeypatch):
    """The tiles for an RTX 4090; tests.compile_kernels compiles them and checks that they fit."""
    wide = Setup(LAYERS[name], "triton")
    metadata = wide.uniform(4)
    tilings = [tiling.choose_tiling(metadata, wide.layer, torch.float32)]
    monkeypatch.setattr(tiling, "shared_memory", lambda device: 99 << 10)
    tilings.append(tiling.choose_tiling(metadata, wide.layer, torch.float32))
    assert tilings[1].block_n == tilings[0].block_n // 2 >= 16
    setup = Setup(LAYERS[name], "triton, split")
    setup.check_tree([0, 0, 0, 1, 3])
    metadata = setup.backend.metadata.prefill(setup.slot_table, setup.rows, PREFIXES, (2, 7, 15))
    setup.check_causal(metadata, *setup.run(metadata))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", [64, 150])
def test_large_trees_use_all_bits_of_their_words(nodes, kind):
    setup = Setup(LAYERS["gqa"], kind, prefixes=(3, 20))
    setup.check_tree([max(i - 1, 0) // 2 for i in range(nodes - 1)] + [nodes - 2])


@pytest.mark.parametrize("kind", KINDS)
def test_windows_over_a_tree_of_two_words(kind):
    layer = replace(LAYERS["sinks"], window=5)
    Setup(layer, kind, prefixes=(40,), width=320).check_tree([max(i - 2, 0) for i in range(70)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYERS)
def test_ragged_prefill(name, kind):
    setup = Setup(LAYERS[name], kind)
    metadata = setup.backend.metadata.prefill(setup.slot_table, setup.rows, PREFIXES, (2, 7, 15))
    setup.check_causal(metadata, *setup.run(metadata))
    assert setup.modes == [ForwardMode.EXTEND]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["gqa", "window"])
def test_tokens_of_images_see_each_other(name, kind):
    """Image blocks that begin and end within tiles and blocks of keys, or span several; and text around them."""
    setup, q_lens = Setup(LAYERS[name], kind, width=240), (2, 7, 40)
    metadata = setup.backend.metadata.prefill(setup.slot_table, setup.rows, PREFIXES, q_lens)
    limits = blocks_of(PREFIXES, q_lens)
    setup.check_causal(*setup.run_limited(metadata, limits))


def blocks_of(prefixes, q_lens):
    """Return the last position that each token sees; some blocks of 5 to 21 tokens see each other."""
    limits = []
    for prefix, q_len in zip(prefixes, q_lens, strict=True):
        own = list(range(q_len))
        for begin, size in ((1, 5), (8, 21), (33, 9)):
            own[begin : begin + size] = [min(begin + size, q_len) - 1] * len(own[begin : begin + size])
        limits += [prefix + last for last in own]
    return limits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYERS)
def test_packed_prefill_equals_a_ragged_one(name, kind):
    """Lengths known only on the device, empty requests between and after the others, and padding."""
    answers = []
    for is_packed in (False, True):
        setup = Setup(LAYERS[name], kind)
        setup.slot_table[0] = 0  # the dummy row
        if is_packed:
            live = torch.tensor([0, 2, 3], device=DEVICE)
            rows, starts, lens = (torch.zeros(5, dtype=torch.int64, device=DEVICE) for _ in range(3))
            rows[live], starts[live], lens[live] = setup.rows, setup.lens, torch.tensor([2, 7, 15], device=DEVICE)
            metadata = setup.backend.metadata.packed(setup.slot_table, rows, starts, lens, 31, max(PREFIXES))
        else:
            metadata = setup.backend.metadata.prefill(setup.slot_table, setup.rows, PREFIXES, (2, 7, 15))
        setup.generator.manual_seed(1)
        t, s = 31, setup.layer
        q, k, v = (setup.random(t, n, d) for n, d in zip(*_heads(s), strict=True))
        num = metadata.positions.shape[0]
        out = torch.zeros(num, s.num_heads, s.v_dim, dtype=setup.dtype, device=DEVICE)
        with forward_context(setup.context, metadata):
            setup.backend.run(AttentionCall(q[:num], k[:num], v[:num], out, setup.pool, 0, s, setup.sinks))
        answers.append(out[:24])
        assert out.isfinite().all() and metadata.owners()[-1] == (5 if is_packed else 2)
        assert not is_packed or ((metadata.positions[24:] == 0).all() and (metadata.out_cache_loc[24:] == 0).all())
    torch.testing.assert_close(*answers, rtol=1e-5, atol=1e-5)


def _heads(layer):
    return (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads), (layer.qk_dim, layer.qk_dim, layer.v_dim)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [1, 5, 33, 100, 1000] if DEVICE.type == "cuda" else [1, 33, 100, 1000])
def test_windows_of_any_size_on_every_path(window, kind):
    """Prompts of several tiles, prefixes of several blocks; windows shorter than a block and longer than everything."""

    def setup():
        return Setup(replace(LAYERS["sinks"], window=window), kind, prefixes=(0, 40, 250), width=384)

    case = setup()
    metadata = case.backend.metadata.prefill(case.slot_table, case.rows, case.prefixes, (130, 33, 70))
    case.check_causal(metadata, *case.run(metadata))
    for q_len in (1, 9):
        case = setup()
        metadata = case.uniform(q_len)
        case.check_causal(metadata, *case.run(metadata))
    setup().check_tree([max(i - 1, 0) // 2 for i in range(20)])


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_dtypes_and_pages(kind, dtype, page_size):
    setup = Setup(LAYERS["gqa"], kind, dtype, page_size=page_size)
    metadata = setup.uniform(3)
    setup.check_causal(metadata, *setup.run(metadata))
    setup = Setup(LAYERS["v_dim"], kind, dtype, page_size=page_size)
    setup.check_tree([0, 0, 1])
    setup = Setup(LAYERS["softcap"], kind, dtype, page_size=page_size)
    metadata = setup.backend.metadata.prefill(setup.slot_table, setup.rows, PREFIXES, (5, 1, 3))
    setup.check_causal(metadata, *setup.run(metadata))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(
    "layer",
    [
        LayerSpec(9, 3, 64, 64, 0.125),
        LayerSpec(32, 8, 128, 128, 0.09),
        LayerSpec(8, 2, 256, 256, 0.06, window=1024),
        LayerSpec(8, 8, 192, 128, 0.07, softcap=20.0, has_sinks=True),
    ],
    ids=str,
)
def test_long_contexts(layer, dtype):
    """Real head shapes, many splits: decode, a chain, trees of 8 and 64 nodes, prefill over a prefix."""
    prefixes = (3000, 1, 700)

    def setup(page_size=16):
        return Setup(layer, "triton", dtype, prefixes=prefixes, page_size=page_size, width=4096)

    for q_len in (1, 6):
        case = setup()
        metadata = case.uniform(q_len)
        case.check_causal(metadata, *case.run(metadata))
    setup(page_size=1).check_tree([0, 0, 0, 1, 1, 2, 4, 5])
    setup().check_tree([max(i - 1, 0) // 2 for i in range(63)] + [62])
    case = setup()
    metadata = case.backend.metadata.prefill(case.slot_table, case.rows, prefixes, (40, 150, 3))
    case.check_causal(metadata, *case.run(metadata))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rotary", [16, 8])
def test_the_backend_rotates_what_comes_unrotated(kind, rotary):
    setup = Setup(LAYERS["gqa"], kind)
    metadata = setup.uniform(3)
    rope = rope_table(metadata.positions, rotary, 10000.0, torch.float32)
    setup.check_causal(metadata, *setup.run(metadata, rope))


@pytest.mark.parametrize(("rotary", "is_late"), [(0, None), (24, None), (8, None), (24, False), (8, True)])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_stored_keys_equal_the_twin(rotary, is_late, dtype):
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(5, *s, generator=generator).to(DEVICE, dtype) for s in ((6, 24), (3, 24), (3, 12)))
    wide = torch.randn(3, 5, 24, generator=generator).to(DEVICE, dtype).transpose(0, 1)  # heads first, as in HF
    pools = [KVPool([LAYERS["v_dim"].shape], 9, dtype, DEVICE) for _ in range(2)]
    for pool in pools:
        pool.k[0], pool.v[0] = pool.k[0][:, :3].contiguous(), pool.v[0][:, :3].contiguous()
    slots = torch.tensor([8, 1, 3, 2, 7], device=DEVICE)
    rope = Rope(*rope_table(torch.arange(5, device=DEVICE), rotary, 100.0, dtype)) if rotary else None
    if is_late is not None:
        weights = (torch.randn(24, generator=generator).to(DEVICE, dtype) for _ in range(2))
        rope = NormedRope(*rope, HeadNorms(*weights, 0.5, 1.0 if is_late else 0.0, is_late))
    for keys in (k, wide):
        got = store_kv(q, keys, v, pools[0].k[0], pools[0].v[0], slots, rope)
        expected, stored = (q, keys) if rope is None else prepare(q, keys, rope)
        pools[1].write(0, slots, stored, v)
        near = {"atol": TOLERANCE[dtype], "rtol": 1e-2 if is_late is None else 4e-2}  # a norm rounds twice more
        torch.testing.assert_close(got, expected, **near)
        torch.testing.assert_close(pools[0].k[0], pools[1].k[0], **near)
        assert torch.equal(pools[0].v[0], pools[1].v[0])


@pytest.mark.parametrize("num_kv_heads", [8, 12])
def test_few_tokens_split_over_programs_are_stored_as_many_are(num_kv_heads):
    q, k, v = (torch.randn(130, heads, 16).to(DEVICE) for heads in (2 * num_kv_heads, num_kv_heads, num_kv_heads))
    slots, rope = torch.arange(1, 131, device=DEVICE), rope_table(torch.arange(130, device=DEVICE), 8, 100.0, q.dtype)
    pools = [torch.zeros(131, num_kv_heads, 16, device=DEVICE) for _ in range(4)]
    many = store_kv(q, k, v, *pools[:2], slots, rope)
    few = store_kv(q[:5], k[:5], v[:5], *pools[2:], slots[:5], Rope(rope.cos[:5], rope.sin[:5]))
    assert torch.equal(few, many[:5])
    for of_many, of_few in zip(pools[:2], pools[2:], strict=True):
        assert torch.equal(of_few[:6], of_many[:6]) and of_few[1:6].any() and not of_few[6:].any()


@settings(max_examples=25 if DEVICE.type == "cuda" else 15, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 170), st.integers(1, 15)), min_size=1, max_size=4), st.sampled_from([1, 16]))
def test_any_ragged_prefill(lens, page_size):
    prefixes, q_lens = zip(*lens, strict=True)
    setup = Setup(LAYERS["window"], "triton, split", prefixes=prefixes, page_size=page_size)
    metadata = setup.backend.metadata.prefill(setup.slot_table, setup.rows, prefixes, q_lens)
    setup.check_causal(metadata, *setup.run(metadata))


@settings(max_examples=25 if DEVICE.type == "cuda" else 15, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(0, 170), min_size=1, max_size=4),
    st.lists(st.integers(0, 1 << 30), min_size=0, max_size=11),
    st.sampled_from(["gqa", "window", "sinks"]),
)
def test_any_tree(prefixes, choices, name):
    parents = [0] + [choice % (node + 1) for node, choice in enumerate(choices)]
    Setup(LAYERS[name], "triton, split", prefixes=tuple(prefixes)).check_tree(parents)


@settings(max_examples=40 if DEVICE.type == "cuda" else 12, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 200)), min_size=1, max_size=90),
    st.integers(1, 60),
    st.sampled_from([1, 3, 4]),
    st.sampled_from([16, 64]),
    st.sampled_from([0, 1, 100, 5000]),
    st.booleans(),
    st.sampled_from([20, 1000]),
)
def test_work_is_cut_as_the_twin_says(lens, resident, group, block_m, window, is_tree, max_partials):
    prefixes, q_lens = (list(x) for x in zip(*lens, strict=True))
    num_tiles = sum(triton.cdiv(q * group, block_m) for q in q_lens)
    shape = {"resident": resident, "group": group, "block_m": block_m, "block_n": 32, "window": window}
    shape |= {"is_tree": is_tree, "first_node": 0, "max_partials": max_partials}
    is_small = resident % 2 == 0  # the plan is right for any batch
    limits = blocks_of(prefixes, q_lens) if resident % 3 == 0 and not is_tree else None
    span = max(q_lens) if is_tree or limits else tile_span(group, block_m)
    max_chunks = most_chunks(max(1, *(p + q for p, q in lens)), max(q_lens), window, span, 32)
    indptr = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    plan = split_plan(
        torch.tensor(prefixes, device=DEVICE), indptr, num_tiles=num_tiles, is_small=is_small, num_kv_heads=3,
        max_chunks=max_chunks, **shape, limits=None if limits is None else torch.tensor(limits, device=DEVICE),
    )  # fmt: skip
    items, tree_states = split_plan_reference(prefixes, q_lens, **shape, limits=limits)
    assert int(plan.counts) == len(items) <= plan.items.shape[0] == num_tiles + resident
    assert plan.items[: len(items)].tolist() == items
    if is_tree:
        some = [i for i, q_len in enumerate(q_lens) if q_len]
        assert plan.tree_states[some].tolist() == [tree_states[i] for i in some]
    check_cut(items, tree_states, prefixes, q_lens, {**shape, "limits": limits}, max_chunks)
    used = [item[4] + (item[6] or min(2, max_chunks)) for item in items if item[4] >= 0]
    assert max(used, default=0) <= plan.num_partials
    assert all((plan.arrived[item[7]] == 0).all() for item in items if item[6])


def check_cut(items, tree_states, prefixes, q_lens, shape, max_chunks):
    """Check that a tile's items cover its keys in order, from the start of a block; pieces begin with a chunk, and the
    states of tiles are consecutive."""
    group, block_m, window, is_tree = shape["group"], shape["block_m"], shape["window"], shape["is_tree"]
    tiles: dict[tuple[int, int], list[list[int]]] = {}
    for number, item in enumerate(items):
        pieces = tiles.setdefault((item[0], item[1]), [])
        pieces.append(item)
        assert item[7] == number + 1 - len(pieces)
    assert is_tree or len(tiles) == sum(triton.cdiv(q * group, block_m) for q in q_lens)
    num_states = 0
    for (request, m_block), pieces in tiles.items():
        prefix, q_len = prefixes[request], q_lens[request]
        first, last = m_block * block_m // group, min(((m_block + 1) * block_m - 1) // group, q_len - 1)
        nearest, end = (prefix, prefix // 32 * 32) if is_tree else (prefix + first, prefix + last + 1)
        if shape["limits"]:
            end = shape["limits"][sum(q_lens[:request]) + last] + 1
        begin = pieces[0][2]
        assert begin == (max(nearest - window + 1, 0) // 32 * 32 if window else 0) and pieces[-1][3] == end
        assert all(a[3] == b[2] and b[2] in (end, begin_of(chunk_of(b[2]))) for a, b in pairwise(pieces))
        chunks = chunk_of(end - 1) + 1 - chunk_of(begin)
        assert len(pieces) <= chunks <= max_chunks
        states = chunks if len(pieces) > 1 else min(2, chunks) if is_tree else 0
        for item in pieces:
            assert item[4] == (num_states if states else -1) and item[6] == (states if len(pieces) > 1 else 0)
            assert item[5] == chunk_of(item[2]) - chunk_of(begin)
        assert not is_tree or tree_states[request] == [num_states - m_block * states, states]
        num_states += states


@pytest.mark.parametrize("num_tokens", [300, 2100] if DEVICE.type == "cuda" else [300])
def test_prompts_that_fill_the_gpu_are_not_split(num_tokens, monkeypatch):
    monkeypatch.setattr(backend, "_num_processors", lambda device: 2)
    setup = Setup(LayerSpec(2, 1, 16, 16, 0.25), "triton", prefixes=(0,), width=num_tokens)
    metadata = setup.backend.metadata.prefill(setup.slot_table, setup.rows, [0], [num_tokens])
    q, out = setup.run(metadata)
    setup.check_causal(metadata, q, out)
    ((plan, _partials),) = setup.backend._plans.values()
    num_tiles = triton.cdiv(2 * num_tokens, 32)  # fp32
    assert int(plan.counts) == num_tiles and (plan.items[:num_tiles, 6] == 0).all()


@pytest.mark.parametrize("window", [512, 1024, 4096])
@pytest.mark.parametrize("prefix", [0, 3000])
def test_windowed_prefills_visit_few_keys_beside_those_they_see(window, prefix):
    """Gemma's group of 2 with the tiling of 16-bit prefills: keys visited by tiles, over keys that their rows see."""
    num_tokens, shape = 8192, {"group": 2, "block_m": 64, "block_n": 64, "window": window}
    items, _ = split_plan_reference(
        [prefix], [num_tokens], first_node=0, resident=132, is_tree=False, max_partials=10000, **shape
    )
    visited = sum(triton.cdiv(end - begin, 64) * 64 * tile_span(2, 64) for _, _, begin, end, *_ in items)
    needed = sum(min(prefix + i + 1, window) for i in range(num_tokens))
    assert visited <= 1.3 * needed


@pytest.mark.parametrize(("first", "q_len"), [(0, 1), (0, 5), (6, 3), (0, 64), (3, 97)])
def test_uniform_metadata_equals_the_twin(first, q_len):
    generator = torch.Generator().manual_seed(0)
    table = torch.randint(1, 500, (9, 130), generator=generator, dtype=torch.int32).to(DEVICE)
    rows = torch.tensor([3, 0, 8, 7, 1], device=DEVICE)
    lens = torch.tensor([0, 1, 60, 129, 40], device=DEVICE)
    depths = torch.randint(0, 5, (5, q_len), generator=generator).to(DEVICE)
    lines = [[0]]
    for node in range(1, first + q_len):
        lines.append([*lines[int(torch.randint(0, node, (), generator=generator))], node])
    tail = torch.tensor([[len(line) - 1 for line in lines]] * 5, device=DEVICE)
    bits = words_of(lines[first:], first + q_len).repeat(5, 1, 1).to(DEVICE)
    deltas = {"rope_deltas": torch.arange(9, device=DEVICE) - 4}
    for options in (
        deltas,
        {"depths": depths},
        {"depths": depths, "tail_depths": tail, "ancestor_bits": bits, **deltas},
    ):
        args = (ForwardMode.DRAFT, table, rows, lens)
        shape = {"q_len": q_len, "max_prefix": 130, "first_node": first}
        same_metadata(
            TRITON_METADATA.uniform(*args, **shape, **options), TORCH_METADATA.uniform(*args, **shape, **options)
        )


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300)), min_size=1, max_size=6))
def test_prefill_metadata_equals_its_twin(lens):
    starts, q_lens = zip(*lens, strict=True)
    table = torch.randint(1, 9999, (7, 640), generator=torch.Generator().manual_seed(0), dtype=torch.int32).to(DEVICE)
    rows = torch.randperm(7, generator=torch.Generator().manual_seed(len(lens)))[: len(lens)].to(DEVICE)
    ours = TRITON_METADATA.prefill(table, rows, starts, q_lens)
    same_metadata(ours, TORCH_METADATA.prefill(table, rows, starts, q_lens))
    on_device = rows, torch.tensor(starts, device=DEVICE), torch.tensor(q_lens, device=DEVICE) % 7
    same_metadata(*(m.packed(table, *on_device, 37, 640) for m in (TRITON_METADATA, TORCH_METADATA)))


def same_metadata(got, want):
    tensors = ("positions", "out_cache_loc", "qo_indptr", "tail_positions", "path_slots", "prefix_lens")
    for name in tensors:
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None), name
        if a is not None:
            assert a.dtype == b.dtype and torch.equal(a, b), name
    for name in ("mode", "q_len", "tail_len", "max_prefix", "q_lens"):
        assert getattr(got, name) == getattr(want, name), name


# -- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_plans_that_no_backend_can_run(kind):
    setup = Setup(LAYERS["gqa"], kind)
    depths = torch.ones(3, 65, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="tail_len=257 of a tree: expected at most 256"):
        setup.run(setup.uniform(257, ancestor_bits=torch.ones(3, 257, 5, dtype=torch.int64, device=DEVICE)))
    with pytest.raises(ValueError, match="ancestor_bits has 1 words of 64 bits: expected a bit per node, 65"):
        setup.run(setup.uniform(65, depths=depths, ancestor_bits=depths.unsqueeze(2)))
    with pytest.raises(ValueError, match="max_prefix=193: expected at most 192, the width of the slot table"):
        setup.run(replace(setup.uniform(1), max_prefix=193))
    with pytest.raises(ValueError, match=r"slot_table is torch.int64 .*expected torch.int32"):
        setup.run(replace(setup.uniform(1), slot_table=setup.slot_table.long()))
    with pytest.raises(ValueError, match=r"prefix_lens has 3 entries: expected 2, one per row of the slot table"):
        setup.backend.plan(
            replace(setup.uniform(1), rows=setup.rows[:2], positions=setup.rows[:2], out_cache_loc=setup.rows[:2])
        )


@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_do_not_fit_their_layer(kind):
    """A layer's first call is checked: else a kernel would read out of bounds, or leave out heads."""
    setup, layer = Setup(LAYERS["gqa"], kind), LAYERS["gqa"]
    metadata = setup.uniform(1)
    q, k = (torch.randn(3, n, layer.qk_dim, device=DEVICE) for n in (layer.num_heads, layer.num_kv_heads))

    def run(q=q, k=k, v=k, layer_id=0, rope=None):
        pool = KVPool([layer.shape], setup.num_slots, torch.float32, DEVICE)
        context = ForwardContext(type(setup.backend)(), pool, [layer], [None], lambda mode: None)
        with forward_context(context, metadata):
            return attention(q, k, v, layer_id, rope)

    assert run().shape == q.shape
    table = torch.ones(3, 2 * layer.qk_dim, device=DEVICE)
    short, wide, odd, half = table[:2, : layer.qk_dim], table, table[:, :3], table[:, :8]
    told = {
        r"q of layer 0 is \[3, \d+, \d+\]: expected \[T, ": {"q": q.repeat(1, 2, 1)},
        r"k of layer 0 is .*with T=3, as many tokens as q": {"k": k[:2]},
        "v of layer 0 is torch.float64 on .*: expected torch.float32 on .*, like the pool": {"v": k.double()},
        r"a rope table of layer 0 is \[2, \d+\]: expected \[3, R\]": {"rope": Rope(short, short)},
        r"a rope table of layer 0 is \[3, \d+\]: expected \[3, R\] with R of": {"rope": Rope(wide, wide)},
        r"a rope table of layer 0 is \[3, 3\]: expected .* even": {"rope": Rope(odd, odd)},
        r"a rope table of layer 0 is \[3, 4\]: expected .* the same for cos": {"rope": Rope(half, half[:, :4])},
        "layer_id=1: expected one of the context's 1 layers": {"layer_id": 1},
    }
    for message, wrong in told.items():
        with pytest.raises(ValueError, match=message):
            run(**wrong)
    other = KVPool([replace(layer, num_kv_heads=1).shape], 9, torch.float32, DEVICE)
    with pytest.raises(
        ValueError, match=r"the pool holds layers .*num_kv_heads=1.*: expected .*as the layers need them"
    ):
        ForwardContext(setup.backend, other, [layer], [None], lambda mode: None)
    with pytest.raises(ValueError, match=r"sinks of shapes \[\]: expected \[None\], one entry per layer"):
        ForwardContext(setup.backend, KVPool([layer.shape], 9, torch.float32, DEVICE), [layer], [], lambda mode: None)


def test_lengths_of_prefills_are_checked():
    setup = Setup(LAYERS["gqa"], "torch")
    rows = setup.rows[:1]
    for starts, lens in (([0, 1], [5]), ([-1], [5]), ([0], [0]), ([190], [5])):
        with pytest.raises(ValueError, match=r"expected (one for each request|1 or more within the table's 192)"):
            setup.backend.metadata.prefill(setup.slot_table, rows, starts, lens)
    with pytest.raises(
        ValueError, match=r"rows \[1\], prefix_lens \[3\]: expected a q_len of at least 1, and a row and"
    ):
        mode = ForwardMode.DECODE
        setup.backend.metadata.uniform(mode, setup.slot_table, rows, setup.lens, q_len=1, max_prefix=9)
    with pytest.raises(ValueError, match="0 rows, 0 starts, 0 q_lens: expected one for each request"):
        setup.backend.metadata.prefill(setup.slot_table, rows[:0], [], [])


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_of_trees_are_checked(kind):
    """Else a kernel would read out of bounds."""
    setup = Setup(LAYERS["gqa"], kind)
    depths = torch.ones(3, 5, dtype=torch.int64, device=DEVICE)
    tree = {"depths": depths[:, 1:], "tail_depths": depths, "ancestor_bits": depths[:, 1:, None]}
    setup.uniform(4, first_node=1, **tree)
    told = {
        r"depths \[3, 5\]: expected \[3, 4\]": {"depths": depths},
        r"tail_depths \[3, 4\]: expected \[3, 5\]": {"tail_depths": depths[:, 1:]},
        r"ancestor_bits \[2, 4, 1\]: expected \[3, 4, 1\]": {"ancestor_bits": depths[:2, 1:, None]},
        r"ancestor_bits \[3, 4\]: expected \[3, 4, 1\]": {"ancestor_bits": depths[:, 1:]},
    }
    for message, wrong in told.items():
        with pytest.raises(ValueError, match=message):
            setup.uniform(4, first_node=1, **tree | wrong)


@pytest.mark.parametrize("kind", KINDS)
def test_debug_mode_names_the_index_that_is_out_of_bounds(kind, monkeypatch):
    monkeypatch.setenv("SPECDEC_DEBUG", "1")
    setup = Setup(LAYERS["gqa"], kind)
    metadata = setup.uniform(2)
    setup.check_causal(metadata, *setup.run(metadata))  # a valid plan passes
    row = int(setup.rows[1])
    setup.slot_table[row, 3] = setup.num_slots + 6
    with pytest.raises(
        ValueError, match=rf"slots of the requests\[1, 3\] is {setup.num_slots + 6}: .*last slot of the pool"
    ):
        setup.run(metadata)
    setup.slot_table[row, 3] = 1
    setup.lens[2] = 190
    with pytest.raises(ValueError, match=r"prefix_lens\[2\] is 190: expected at least 0, at most 160"):
        setup.run(metadata)
    setup.lens[2] = 150
    metadata.out_cache_loc[4] = -1
    with pytest.raises(ValueError, match=r"out_cache_loc\[4\] is -1"):
        setup.run(metadata)


def test_what_a_backend_lacks_is_told(monkeypatch):
    def reasons(*layers, dtype=torch.float32, device=DEVICE):
        with pytest.raises(ValueError) as error:
            pick_backend("triton", layers, dtype, device)
        return str(error.value)

    assert "layer 1 needs head dim 512 over 256" in reasons(LAYERS["gqa"], LayerSpec(2, 1, 512, 512, 1.0))
    assert "dtype torch.float64 is not one of" in reasons(LAYERS["gqa"], dtype=torch.float64)
    monkeypatch.setattr("specdec.backends.triton.backend.INTERPRETED", False)
    assert "it needs CUDA, the model is on cpu" in reasons(LAYERS["gqa"], device=torch.device("cpu"))
    with pytest.raises(ValueError, match="expected 'auto' or one of"):
        pick_backend("fast", [LAYERS["gqa"]], torch.float32, DEVICE)


def test_head_dims_outside_the_capabilities_are_told():
    some = replace(TritonBackend.capabilities, head_dims=frozenset({64, 128}))
    layers = [LayerSpec(4, 2, 64, 128, 1.0), LayerSpec(4, 2, 96, 96, 1.0)]
    (reason,) = unmet_needs(some, layers, torch.float32)
    assert reason == "layer 1 needs head dims [96], supported: [64, 128]"
    assert not unmet_needs(TritonBackend.capabilities, layers, torch.float32)


def test_auto_takes_triton_on_cuda_and_says_why():
    cuda, able, wide = torch.device("cuda"), LAYERS["gqa"], LayerSpec(2, 1, 512, 512, 1.0)
    assert pick_backend("auto", [able], torch.bfloat16, cuda)[0] is TritonBackend
    backend, why = pick_backend("auto", [able, wide], torch.bfloat16, cuda)
    assert backend is TorchBackend and "layer 1 needs head dim 512 over 256" in why
    assert pick_backend("auto", [able], torch.float32, torch.device("cpu"))[0] is TorchBackend
    assert list(BACKENDS) == ["triton", "torch", "flashinfer", "triton+flashinfer"]


def test_masks_are_classified_by_what_they_show():
    cpu = torch.device("cpu")
    assert classify_mask(lambda b, h, q, k: k <= q, cpu) == Reach()
    assert classify_mask(lambda b, h, q, k: (k <= q) & (q - k < 77), cpu) == Reach(window=77)
    for chunk in (64, 100, 8192):
        assert classify_mask(lambda b, h, q, k, c=chunk: (k <= q) & (q // c == k // c), cpu) == Reach(chunk=chunk)
    assert "depends on" in classify_mask(lambda b, h, q, k: (k <= q) & (q - k < q % 64 + 2), cpu)
    assert "not causal" in classify_mask(lambda b, h, q, k: k == k, cpu)
    assert "holes" in classify_mask(lambda b, h, q, k: (k <= q) & ((q - k) % 2 == 0), cpu)


@pytest.mark.skipif(torch.cuda.is_available(), reason="they are compiled by running them")
def test_every_kernel_compiles_for_a_gpu():
    """The compiler rejects some code that the interpreter accepts; ptxas needs no GPU."""
    folder = Path(__file__).parents[1] / "backends"
    kernels = {k for path in folder.rglob("*.py") for k in re.findall(r"^def (_\w+_kernel)\(", path.read_text(), re.M)}
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.compile_kernels"]
    run = subprocess.run(command, env=env, cwd=folder.parent, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    assert kernels and kernels <= set(run.stdout.split())


@pytest.mark.parametrize("num_tokens", [4, 6])
def test_a_call_of_other_tokens_than_the_plan_is_refused(num_tokens):
    layer, backend = LayerSpec(2, 1, 8, 8, scaling=1.0), TorchBackend()
    table = torch.arange(1, 9, dtype=torch.int32).view(1, 8)
    backend.plan(backend.metadata.prefill(table, torch.zeros(1, dtype=torch.int64), [0], [5]))
    q, k = torch.ones(num_tokens, 2, 8), torch.ones(num_tokens, 1, 8)
    pool = KVPool([layer.shape], 9, torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match=rf"q of layer 0 has {num_tokens} tokens: expected 5, as planned"):
        backend.run(AttentionCall(q, k, k, torch.empty_like(q), pool, 0, layer))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["gqa", "sinks"])
def test_a_forward_without_requests_gives_nothing(name, kind):
    setup = Setup(LAYERS[name], kind)
    setup.rows, setup.lens = setup.rows[:0], setup.lens[:0]
    for q_len in (1, 3):
        _, out = setup.run(setup.uniform(q_len))
        assert out.shape == (0, setup.layer.num_heads, setup.layer.v_dim)
