"""Prefills run the layers after the last attention for the last token of each prompt only, if no other row is read."""

from dataclasses import replace

import pytest
import torch

import specdec
from specdec.backends import ForwardContext, KVPool, SlotTables, TorchBackend, forward_context
from specdec.backends.op import rows_read
from specdec.graphs.compile import tail
from specdec.graphs.compile.trace import trace
from tests.heads import MODULES, random_draft
from tests.test_attach import greedy
from tests.tiny_models import VOCAB, tiny_model

SIN = (torch.ops.aten.sin.default,)  # in place of attention
ROWS = torch.tensor([6, 2, 6])
LENS = (5, 9, 14)


class Gated(torch.nn.Module):
    """Its last piece takes a gate, half of a product, with strided rows; `aux` is computed before it."""

    def __init__(self):
        super().__init__()
        self.double_, self.out = torch.nn.Linear(8, 16), torch.nn.Linear(8, 8)

    def forward(self, x):
        value, gate = self.double_(x).chunk(2, -1)
        attended = torch.ops.aten.sin(value)
        state = x + self.out(attended * torch.sigmoid(gate)).view(1, x.shape[0], 8)[0]
        aux = torch.cat([x, x + 1], -1)
        return state, aux


def on_rows_of(model, compiler):
    """Return results of the traced `model`, [7, 8] and [7, 16], for ROWS only and for all rows; check the latter."""
    x = torch.randn(7, 8)
    traced = trace(model, (torch.randn(16, 8),), SIN, compiler, num_outputs=2)
    with torch.inference_mode():
        some, whole = traced(x, rows=ROWS), traced(x)
        torch.testing.assert_close(whole, model(x))
        assert torch.equal(traced(x[:3], rows=ROWS)[0], traced(x[:3])[0]), "no fewer rows"
    traced.release()
    return some, whole


def test_the_last_piece_runs_on_chosen_rows():
    (state, aux), whole = on_rows_of(Gated(), "eager")
    torch.testing.assert_close(state[ROWS], whole[0][ROWS])
    assert not state[[0, 1, 3, 4, 5]].any()
    assert torch.equal(aux, whole[1]), "what does not depend on attention has all rows"


def test_code_of_inductor_gets_no_other_strides_than_it_was_compiled_for():
    (state, aux), whole = on_rows_of(Gated(), "inductor")
    assert torch.equal(state, whole[0]) and torch.equal(aux, whole[1])


def test_pieces_without_attention_before_them_run_on_all_rows():
    traced = trace(torch.nn.Linear(8, 8), (torch.randn(16, 8),), SIN, "eager")
    x = torch.randn(7, 8)
    assert torch.equal(traced(x, rows=ROWS)[0], traced(x)[0])


@pytest.fixture
def narrowed(monkeypatch):
    """For each call of a last piece: how many rows were chosen, and how many it computed."""
    seen, live = [], tail._LastPiece.__call__

    def call(piece, *args):
        chosen, made = tail._CHOSEN.get(), live(piece, *args)
        first = made[0] if isinstance(made, tuple) else made
        seen.append((None if chosen is None else len(chosen[0]), len(first)))
        return made

    monkeypatch.setattr(tail._LastPiece, "__call__", call)
    return seen


def prefilled(engine, model, seen):
    """Generate from all prompts together; return the row counts of last pieces, in order."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in LENS]
    seen.clear()
    assert engine.generate(prompts, max_new_tokens=1).tokens == [greedy(model, p, 1) for p in prompts]
    return seen[:]


ALL, LAST = (None, sum(LENS)), (len(LENS), sum(LENS))


@pytest.mark.parametrize(
    ("algo", "expected"),
    [(None, [LAST]), ("lookup", [LAST]), ("eagle3", [LAST, LAST]), ("standalone", [LAST, LAST, (None, 3)]),
     ("eagle", [ALL, LAST]), (MODULES, [ALL] * 4)],
)  # fmt: skip
def test_prefills_of_target_and_draft_read_last_rows(algo, expected, narrowed):
    """EAGLE and NextN read the last hidden states of all tokens; a later MTP module reads those of the module before; a
    standalone draft reads first tokens."""
    model = tiny_model("llama")
    draft = None if algo in (None, "lookup") else random_draft(model, algo)
    settings = {"prefill_graph": "piecewise", "compile": True, "compiler": "eager", "prefill_buckets": (4,)}
    with specdec.attach(model, draft, algo="auto" if draft is not None else algo, **settings) as engine:
        assert prefilled(engine, model, narrowed) == expected


def test_a_forward_within_another_has_rows_of_its_own():
    backend, cpu = TorchBackend(), torch.device("cpu")
    tables = SlotTables(2, 16, 32, 1, cpu)
    pool = KVPool([], tables.total_slots, torch.float32, cpu)
    context = ForwardContext(backend, pool, [], sinks=[], on_forward=lambda mode: None)
    metadata = backend.metadata.prefill(tables.table, torch.tensor([1]), starts=[0], q_lens=[8])
    with forward_context(context, replace(metadata, read_rows=ROWS)):
        assert rows_read() is ROWS
        with forward_context(context, metadata):
            assert rows_read() is None


def test_scoring_reads_all_rows(narrowed):
    model = tiny_model("llama")
    settings = {"prefill_graph": "piecewise", "compile": True, "compiler": "eager", "prefill_buckets": (4,)}
    with specdec.attach(model, **settings) as engine:
        narrowed.clear()
        engine.score([[3, 4, 5, 6]], [[7, 8, 9]])
        assert narrowed == [(None, 6)]
