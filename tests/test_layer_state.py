"""State that layers keep between forwards: per-row states beside K/V, and latents whose V is a part of K."""

from dataclasses import replace

import pytest
import torch

import specdec
from specdec.backends import BACKENDS, AttentionCall, LayerSpec, TorchBackend, op, unmet_needs
from specdec.backends.registry import takes_latents
from specdec.core.batch import ForwardMode
from specdec.core.cache.pool import KVPool, LayerState
from specdec.core.functional.torch_ops import TORCH_OPS
from specdec.reach.targets.hf import HFTarget
from tests.heads import random_draft
from tests.state_tensors import pool_tensors
from tests.test_attach import ragged_prompts
from tests.tiny_models import DEVICE, tiny_model

CPU = torch.device("cpu")
WINDOW = 3


class LastTokens(LayerState):
    """The last tokens of a row: what a short convolution keeps, here on ids.

    kept [num_rows, WINDOW]: committed tokens, the newest last; tail [num_rows, 64]: the nodes of this round.
    """

    def __init__(self, num_rows):
        self.kept = torch.full((num_rows, WINDOW), -1, device=DEVICE)
        self.tail = torch.full((num_rows, 64), -1, device=DEVICE)

    def write(self, metadata, ids):
        if metadata.mode is not ForwardMode.EXTEND:
            self.tail[metadata.rows, : metadata.tail_len] = ids.view(-1, metadata.tail_len)
            return
        lens = metadata.q_lens or (metadata.q_len,) * metadata.num_reqs
        pieces = zip(metadata.rows.tolist(), metadata.starts, ids.split(lens), strict=True)
        for row, start, piece in pieces:
            before = self.kept[row] if start else torch.full_like(self.kept[row], -1)
            self.kept[row] = torch.cat([before, piece])[-WINDOW:]

    def committer(self, ops):
        def commit(slot_table, rows, seq_lens, accept_index):
            path = self.tail[rows].gather(1, accept_index.clamp(min=0))
            num = (accept_index >= 0).sum(1, keepdim=True)
            newest = num + torch.arange(WINDOW, device=DEVICE)
            self.kept[rows] = torch.cat([self.kept[rows], path], 1).gather(1, newest)

        return commit


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("shape", [{}, {"topk": 3, "num_draft_tokens": 10}], ids=["chain", "tree"])
def test_a_state_by_row_holds_what_was_committed(monkeypatch, shape, graphs):
    """Prompts in chunks, paths of every length, rows that are reused."""
    states = []
    monkeypatch.setattr(HFTarget, "row_states", lambda _, n, *rest: states.append(LastTokens(n)) or tuple(states))
    model = tiny_model("llama").to(DEVICE)

    def write(module, args):
        if states and isinstance(scope := op.current_scope(), op.ForwardContext) and scope.row_states:
            scope.row_states[0].write(scope.backend.planned, args[0].view(-1))

    hook = model.get_input_embeddings().register_forward_pre_hook(write)
    draft = random_draft(model, "eagle").to(DEVICE)
    settings = {"num_steps": 4, "cuda_graph": graphs, "prefill_graph": "off", "max_prefill_tokens": 7, **shape}
    rates = (0.9, 0.7, 0.5, 0.5)
    engine = specdec.attach(model, draft, max_batch=2, max_seq_len=160, synthetic_acceptance=rates, **settings)
    core = engine._core
    lens = set()
    for prompts in (ragged_prompts()[:2], ragged_prompts()[2:4]):
        requests = engine.submit(prompts, max_new_tokens=40, ignore_eos=True)
        for _ in range(12):
            engine.step()
        core.delivery.read(0)  # results that the host has not read yet
        for request in requests:
            fed = [*request.prompt_ids, *request.tokens][:-1]  # the root has not been fed yet
            assert states[0].kept[request.row].tolist() == fed[-WINDOW:]
            lens |= set(request.round_lens)
        engine.abandon(requests)
    engine.check_integrity()
    engine.detach()
    hook.remove()
    assert len(lens) >= 3, "paths of several lengths"


LATENT = LayerSpec(num_heads=4, num_kv_heads=1, qk_dim=24, v_dim=16, scaling=0.2, v_in_k=True)
APART = LayerSpec(num_heads=4, num_kv_heads=1, qk_dim=24, v_dim=16, scaling=0.2)


def test_a_latent_is_stored_once_and_attends_as_k_and_v_do():
    """A prefill, a verify of a tree, the commit of a path: the same with one plane as with two."""
    generator = torch.Generator().manual_seed(0)
    outs, pools = [], []
    inputs = [[torch.randn(n, h, 24, generator=generator) for h in (4, 1)] for n in (9, 8)]
    table = torch.randperm(64, generator=generator)[:30].int().view(1, 30)
    row, bits = torch.zeros(1, dtype=torch.int64), torch.tensor([[1, 3, 5, 11, 19, 37, 67, 139]]).unsqueeze(2)
    for layer in (LATENT, APART):
        backend, pool, own = TorchBackend(), KVPool([layer.shape], 64, torch.float32, CPU), []
        prefill = backend.metadata.prefill(table, row, (0,), (9,), None, None)
        depths = torch.tensor([[0, 1, 1, 2, 2, 2, 2, 3]])
        verify = backend.metadata.uniform(
            ForwardMode.TARGET_VERIFY, table, row, row + 9, q_len=8, max_prefix=30, depths=depths, tail_depths=depths,
            ancestor_bits=bits,
        )  # fmt: skip
        for metadata, (q, k) in zip((prefill, verify), inputs, strict=True):
            out = torch.empty(q.shape[0], 4, 16)
            backend.plan(metadata)
            backend.run(AttentionCall(q, k, k[..., :16], out, pool, 0, layer))
            own.append(out)
        pool.committer(TORCH_OPS)(table, row, row + 9, torch.tensor([[0, 2, 5, -1]]))
        moved = pool.k[0][table[0, 9:12].long()]
        assert torch.equal(moved, inputs[1][1][[0, 2, 5]])
        outs.append(own)
        pools.append(pool)
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))
    latent, apart = pools
    assert torch.equal(latent.v[0], apart.v[0]) and latent.v[0].data_ptr() == latent.k[0].data_ptr()
    assert [p.num_bytes for p in pools] == [64 * 24 * 4, 64 * 40 * 4]
    assert [KVPool.bytes_for([s.shape], 64, torch.float32) for s in (LATENT, APART)] == [p.num_bytes for p in pools]
    assert list(pool_tensors(latent, "target")) == ["target k[0]"]


def test_backends_say_whether_they_take_latents():
    needs = {name: unmet_needs(kind().capabilities, [LATENT], torch.float32) for name, kind in BACKENDS.items()}
    assert needs["torch"] == needs["triton"] == needs["triton+flashinfer"] == []
    assert "layer 0 needs V as a part of K" in needs["flashinfer"]
    assert {name for name in BACKENDS if takes_latents(name)} == {*BACKENDS} - {"flashinfer"} and takes_latents("auto")
    wide = unmet_needs(BACKENDS["triton"]().capabilities, [replace(LATENT, qk_dim=640)], torch.float32)
    assert wide == ["layer 0 needs head dim 640 over 576"]
