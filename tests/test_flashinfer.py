"""FlashInfer's tables made on the device, what backends with it report and refuse; on a GPU, its kernels on every path.

The tables, their twin and the choice between backends need neither FlashInfer nor a GPU.
"""

import importlib.metadata
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.backends import BACKENDS, LayerSpec, TorchBackend, pick_backend, unmet_needs
from specdec.core.batch import ForwardMode
from specdec.core.errors import AttachError

pytest.importorskip("triton")
from specdec.backends.flashinfer import backend as backends
from specdec.backends.flashinfer import kernels, prefill, tables, uniform
from specdec.backends.flashinfer.kernels import Kernel
from specdec.backends.flashinfer.tables import NO_WINDOW, Shapes, TableLayout
from specdec.backends.flashinfer.variant import variant
from specdec.backends.triton.backend import TritonBackend
from tests.flashinfer_tables import INT_FIELDS, read_tables, tables_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LLAMA = LayerSpec(32, 8, 128, 128, 0.088)


# -- tables ---------------------------------------------------------------------------------------------------------


@settings(max_examples=100 if DEVICE.type == "cuda" else 12, deadline=None, derandomize=True)
@given(
    st.lists(
        st.one_of(st.integers(0, 300), st.integers(0, 40_000)), min_size=1, max_size=70 if DEVICE.type == "cuda" else 12
    ),
    st.sampled_from([1, 4, 6, 8, 33, 64]),
    st.sampled_from([(1, 1), (3, 3), (4, 8), (8, 1)]),
    st.sampled_from([64, 128, 256]),
    st.sampled_from([NO_WINDOW, 100, 5000]),
    st.integers(8, 140),
    st.booleans(),
)
def test_tables_equal_their_twin(prefixes, q_len, heads, head_dim, window_left, processors, is_stock):
    group, num_kv_heads = heads
    bs = len(prefixes)
    shapes = Shapes(bs, q_len, group * num_kv_heads, num_kv_heads, head_dim, 0, window_left)
    stock = tables.stock_budget(processors, num_kv_heads)
    budget = stock if is_stock else tables.budget_for(bs, shapes.tiles, processors, num_kv_heads)
    shapes = shapes._replace(budget=budget)
    rows = torch.randperm(bs + 2, generator=torch.Generator().manual_seed(bs))[:bs]
    table = torch.zeros(bs + 2, 50_000, dtype=torch.int32, device=DEVICE)
    written = tables.write_tables(shapes, torch.tensor(prefixes, device=DEVICE), q_len, rows.to(DEVICE), table)

    lens = [n + q_len for n in prefixes]
    got, want = read_tables(shapes, written.workspace), tables_reference(shapes, lens)
    assert got == want
    assert sum(got["is_valid"]) <= shapes.grid and got["o_indptr"][-1] <= shapes.partial_rows
    starts, last = written.kv_indptr.tolist(), written.last_page_len.tolist()
    for request, (row, n) in enumerate(zip(rows.tolist(), lens, strict=True)):
        assert starts[request] == row * table.stride(0), "pages of a request begin at its row of the slot table"
        assert starts[request + 1] - starts[request] - 1 + last[request] == n, "FlashInfer's length of it"


def their_plan(kv_lens, q_len, group, cta, page_budget, window_left=None):
    """FlashInfer's host plan under a graph, line by line (scheduler.cuh 0.6.18: PrefillSplitQOKVIndptr)."""
    effective = [min(n, window_left + cta) if window_left is not None else n for n in kv_lens]
    low, high = 128, max(1, *effective)
    while low < high:
        middle = (low + high) // 2
        total = sum(-(-(q_len * group) // cta) * -(-max(n, 1) // middle) for n in effective)
        if total > page_budget:
            low = middle + 1
        else:
            high = middle
    requests, tiles, chunks, merge, outputs = [], [], [], [0], [0]
    for request, n in enumerate(effective):
        num_chunks = -(-max(n, 1) // low)
        for tile in range(-(-(q_len * group) // cta)):
            for chunk in range(num_chunks):
                requests.append(request), tiles.append(tile), chunks.append(chunk)
        merge += [merge[-1] + num_chunks * (i + 1) for i in range(q_len)]
        outputs.append(outputs[-1] + q_len * num_chunks)
    return low, requests, tiles, chunks, merge, outputs


@pytest.mark.parametrize("window_left", [None, 900])
@pytest.mark.parametrize(
    ("q_len", "group", "head_dim", "cta"),
    [(1, 4, 128, 16), (4, 4, 128, 16), (6, 3, 64, 64), (32, 4, 128, 128), (64, 3, 64, 128), (64, 2, 256, 64)],
)
def test_the_twin_says_what_flashinfers_source_says(q_len, group, head_dim, cta, window_left):
    generator = torch.Generator().manual_seed(q_len)
    for bs in (1, 2, 9, 40):
        lens = torch.randint(1, 20_000, (bs,), generator=generator).tolist()
        left = NO_WINDOW if window_left is None else window_left
        shapes = Shapes(bs, q_len, group * 2, 2, head_dim, 132, left)
        assert shapes.cta == cta
        ours = tables_reference(shapes, lens)
        low, requests, tiles, chunks, merge, outputs = their_plan(lens, q_len, group, cta, 132, window_left)
        n = len(requests)
        assert ours["chunk_size"] == [low] and sum(ours["is_valid"]) == n
        assert (ours["request"][:n], ours["qo_tile"][:n], ours["kv_tile"][:n]) == (requests, tiles, chunks)
        assert (ours["merge_indptr"], ours["o_indptr"]) == (merge, outputs)


def test_the_integers_are_functions_of_shapes():
    shapes = Shapes(3, 4, 32, 8, 128, 33)
    at = TableLayout.of(shapes)
    assert tables.plan_info(shapes, 77) == [
        *(33, 12, at.num_rows, 16, at.request, at.qo_tile, at.kv_tile, at.merge_indptr, at.o_indptr),
        *(at.chunk_size, 0, 77, at.is_valid, 1, 1),
    ]
    assert at == (0, 144, 288, 432, 448, 464, 480, 544, 592)  # 33 * 4 bytes, at multiples of 16
    assert Shapes(200, 4, 32, 8, 128, 33).grid == 200, "as many items as tiles at least"


# -- which mask, which kernel ---------------------------------------------------------------------------------------


def metadata_of(q_len, tail_len=None, is_tree=True, bs=2):
    table, rows = torch.zeros(3, 300, dtype=torch.int32), torch.arange(bs)
    tail_len = tail_len or q_len
    bits = torch.ones(bs, q_len, 1, dtype=torch.int64) if is_tree else None
    return TorchBackend.metadata.uniform(
        ForwardMode.TARGET_VERIFY,
        table,
        rows,
        torch.full((bs,), 100),
        q_len=q_len,
        max_prefix=200,
        first_node=tail_len - q_len,
        ancestor_bits=bits,
    )


@pytest.mark.parametrize(
    ("layer", "metadata", "mode", "window_left"),
    [
        (LLAMA, metadata_of(4, is_tree=False), uniform.CAUSAL, NO_WINDOW),
        (LLAMA, metadata_of(1, 3, is_tree=False), uniform.CAUSAL, NO_WINDOW),
        (replace(LLAMA, window=50), metadata_of(4, is_tree=False), uniform.CAUSAL, 49),
        (LLAMA, metadata_of(32), uniform.CAUSAL, NO_WINDOW),  # 32 x 4 rows are one tile of 128
        (LLAMA, metadata_of(33), uniform.CUSTOM, NO_WINDOW),  # two tiles: the second asks about its own keys only
        (LLAMA, metadata_of(4, 12), uniform.CUSTOM, NO_WINDOW),  # a draft step: earlier tail nodes are not a prefix
        (replace(LLAMA, window=50), metadata_of(8), uniform.CUSTOM, 57),
    ],
)
def test_how_a_layer_is_masked(layer, metadata, mode, window_left):
    kind = uniform.kind_of(layer, metadata)
    assert (kind.mask_mode, kind.window_left) == (mode, window_left)


def test_which_kernels_layers_need():
    device, dtype = torch.device("cpu"), torch.bfloat16
    windowed, sunk = replace(LLAMA, window=9), replace(LLAMA, has_sinks=True)
    chains = kernels.kernels_for([LLAMA, windowed, LLAMA], dtype, device, mask_words=0)
    assert list(map(str, chains)) == ["fa2 d128 bfloat16", "fa2 d128 bfloat16 window"]
    trees = kernels.kernels_for([LLAMA, replace(LLAMA, softcap=30.0)], dtype, device)
    assert [str(k) for k in trees if k.family == "tree"] == ["tree d128 bfloat16", "tree d128 bfloat16 softcap"]
    assert {k.family for k in kernels.kernels_for([sunk], dtype, device, mask_words=0)} == {"tree"}


def test_a_variants_name_changes_with_what_it_is_compiled_from(monkeypatch):
    flags = [(capped, windowed) for capped in (True, False) for windowed in (True, False)]
    names = {variant(c, d, *f).name for c in ("half", "nv_bfloat16") for d in (64, 128) for f in flags}
    assert len(names) == 16
    monkeypatch.setattr("specdec.backends.flashinfer.variant.SOURCE", "another")
    assert variant("half", 64, False, False).name not in names


class _Event:
    """An event of a stream whose work is done when the test sets `is_done`."""

    is_done = False

    def record(self):
        pass

    def query(self):
        return type(self).is_done


def test_a_staging_buffer_is_not_written_before_it_is_read(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(prefill, "_pinned", lambda size: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(_Event, "is_done", False)
    ring, taken = prefill.PinnedRing(), []
    for _ in range(50):
        taken.append(ring.take(1000))
        ring.give(taken[-1])
    assert len({t.data_ptr() for t in taken}) == 50, "the device has read none of them"
    monkeypatch.setattr(_Event, "is_done", True)
    again = ring.take(1000)
    assert again.data_ptr() in {t.data_ptr() for t in taken}
    assert ring.take(5 << 20).numel() == 5 << 20


# -- what backends report and refuse -----------------------------------------------------------------------------------


def installed(monkeypatch, found):
    def version(name):
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(kernels, "version", version)


@pytest.mark.parametrize("name", ["flashinfer", "triton+flashinfer"])
def test_what_is_missing_is_told(name, monkeypatch):
    def reason(found):
        installed(monkeypatch, found)
        with pytest.raises(AttachError) as error:
            pick_backend(name, [LLAMA], torch.bfloat16, torch.device("cpu"))
        return str(error.value)

    assert "flashinfer is not installed: pip install 'specdec-toolkit[flashinfer]'" in reason(None)
    assert "flashinfer-python 0.5.0 is not 0.6.18.post1, whose tables are known" in reason("0.5.0")
    assert "it needs CUDA, the model is on cpu" in reason("0.6.18.post1")
    monkeypatch.setenv("SPECDEC_FLASHINFER_ANY", "1")
    assert "it needs CUDA" in reason("0.5.0")


def test_what_its_kernels_cannot_do_is_refused():
    def reasons(*layers, dtype=torch.bfloat16):
        return unmet_needs(BACKENDS["flashinfer"]().capabilities, layers, dtype)

    assert reasons(LLAMA, LayerSpec(9, 3, 64, 64, 0.1, window=5, softcap=3.0, has_sinks=True)) == []
    assert reasons(LLAMA, dtype=torch.float32)[0].startswith("dtype torch.float32 is not one of")
    assert "layer 0 needs head dims [80], supported: [64, 128, 256]" in reasons(LayerSpec(4, 4, 80, 80, 0.1))
    assert "layer 0 needs v_dim different from qk_dim" in reasons(LayerSpec(4, 4, 128, 64, 0.1))


def test_auto_never_compiles_and_says_what_would_be_faster(monkeypatch):
    cuda = torch.device("cuda")
    monkeypatch.setattr(backends.MixedBackend, "unusable_on", classmethod(lambda cls, device: None))
    monkeypatch.setattr(TritonBackend, "unusable_on", classmethod(lambda cls, device: None))
    monkeypatch.setattr(backends, "build", lambda wanted: pytest.fail("a surprise"))
    monkeypatch.setattr(backends, "unbuilt", lambda wanted: wanted)
    kind, why = pick_backend("auto", [LLAMA], torch.bfloat16, cuda)
    assert kind is TritonBackend
    assert "long prefills (from about 1900 tokens on) would run on FlashInfer if its kernels were compiled" in why
    assert "fa3 d128 bfloat16" in why and "`specdec backends build MODEL`" in why
    kind, why = pick_backend("auto", [LLAMA], torch.float32, cuda)
    assert (
        kind is TritonBackend
        and "no layer of this model is one that FlashInfer's prefill kernel would run faster" in why
    )

    monkeypatch.setattr(backends, "unbuilt", lambda wanted: [])
    monkeypatch.setattr(backends.MixedBackend, "prepare_for", lambda self, *given, **more: None)
    assert pick_backend("auto", [LLAMA], torch.bfloat16, cuda)[0] is backends.MixedBackend

    def broken(self, *given, **more):
        raise AttachError("with the installed FlashInfer", ["prefill of a layer: differs from torch"])

    monkeypatch.setattr(backends.MixedBackend, "prepare_for", broken)
    kind, why = pick_backend("auto", [LLAMA], torch.bfloat16, cuda)
    assert kind is TritonBackend and "differs from torch" in why


def test_which_layers_the_mixed_backend_takes():
    fits = backends._fits_fa3
    assert fits(LLAMA, torch.bfloat16) and fits(replace(LLAMA, window=100, softcap=30.0), torch.float16)
    assert not fits(LLAMA, torch.float32) and not fits(replace(LLAMA, has_sinks=True), torch.bfloat16)
    assert not fits(LayerSpec(4, 4, 192, 128, 0.1), torch.bfloat16)
    assert not fits(LayerSpec(9, 3, 64, 64, 0.125), torch.bfloat16)


def test_long_prefills_go_to_flashinfer_and_short_ones_do_not():
    table, rows = torch.zeros(9, 40_000, dtype=torch.int32), torch.arange(8)
    small = LayerSpec(9, 3, 128, 128, 0.09)

    def takes(layer, starts, lens):
        metadata = TorchBackend.metadata.prefill(table, rows[: len(lens)], starts, lens)
        return backends.MixedBackend()._takes(metadata, layer, torch.bfloat16)

    assert takes(LLAMA, [0], [2048]) and not takes(LLAMA, [0], [1024])
    assert takes(LLAMA, [30_000], [128]) and takes(small, [6144], [2048])  # chunks at the end of long prompts
    assert not takes(small, [0], [2048]) and takes(small, [0] * 8, [2048] * 8) and takes(small, [0], [4096])
    assert not takes(replace(LLAMA, window=64), [30_000], [2048])  # few keys are visible


def test_a_slot_table_that_32_bits_cannot_index_is_refused():
    backend = backends.FlashInferBackend()
    table = torch.empty(1, dtype=torch.int32).expand(1 << 16, 1 << 15)
    with pytest.raises(ValueError, match="FlashInfer counts them in 32 bits"):
        backend.plan(replace(metadata_of(1, is_tree=False), slot_table=table))


def test_kernels_are_named_in_reports():
    backend = backends.FlashInferBackend()
    backend._prefill_families, backend._uniform_families = ["fa3"], ["fa2", "tree"]
    assert backend.served_by(ForwardMode.EXTEND) == "flashinfer fa3"
    assert backend.served_by(ForwardMode.TARGET_VERIFY) == "flashinfer fa2+tree"
    mixed = backends.MixedBackend()
    mixed._from = backends._from_tokens([LLAMA])
    assert mixed.served_by(ForwardMode.DECODE) == "triton"
    assert mixed.served_by(ForwardMode.EXTEND) == "flashinfer fa3 from about 1900 tokens on, triton below"
    mixed._from = None  # as if FlashInfer could serve no layer of the model
    assert mixed.served_by(ForwardMode.EXTEND) == "triton"
    assert TorchBackend().served_by(ForwardMode.DECODE) == "torch"
    assert str(Kernel("fa3", torch.float16, 64, True, True)) == "fa3 d64 float16 window softcap"
    assert len(INT_FIELDS) == 15
