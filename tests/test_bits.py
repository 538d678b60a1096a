"""`Report.bits`: rows whose bits depend on the other rows of a batch are found, and the op at fault is named."""

import pytest
import torch
import transformers as tf
from torch import nn
from torch.nn import functional as F

import specdec
from specdec.backends import torch_ref
from specdec.backends.triton.recurrent.ops import TRITON_RECURRENT
from specdec.reach.assembly.bits import _compare
from specdec.reach.assembly.op_bits import Case, Shared
from tests.heads import random_draft
from tests.recurrent_models import CONFIGS
from tests.tiny_models import random_weights, tiny_model

SHAPES = {"plain": {}, "chain": {"num_steps": 2}, "tree": {"num_steps": 3, "topk": 2, "num_draft_tokens": 7}}
SHAPES["auto"] = {**SHAPES["tree"], "num_steps": "auto", "auto_steps": (2, 3)}
FORWARDS = {"plain": "batches of 2 x 1", "chain": "chains of 1 x 3, 2 x 3", "tree": "trees of 1 x 7, 2 x 7"}
FORWARDS["auto"] = f"{FORWARDS['plain']}; chains of 1 x 3, 2 x 3, 1 x 4, 2 x 4; {FORWARDS['tree']}"
DOWN = (64, 96)


@pytest.fixture(scope="module")
def library():
    """A product that computes every row by itself, or whose bits depend on the number of rows."""
    library = torch.library.Library("bits_test", "DEF")
    library.define("linear(Tensor x, Tensor weight, bool is_sound) -> Tensor")

    def linear(x, weight, is_sound):
        rows = [weight @ row for row in x.reshape(-1, x.shape[-1])]
        out = torch.stack(rows).view(*x.shape[:-1], -1)
        return out if is_sound or len(rows) == 1 else torch.nextafter(out, out + 1)

    library.impl("linear", linear, "CompositeExplicitAutograd")
    yield library
    library._destroy()


def by_token(q, k, v, mask, layer, sinks):
    """Attention of each query by itself, over its visible keys."""
    out = torch.empty(*q.shape[:3], v.shape[-1])
    for i, j in torch.cartesian_prod(*map(torch.arange, q.shape[:2])).tolist():
        keys, values = (t[i, :, mask[i, j]].repeat_interleave(q.shape[2] // t.shape[1], 0) for t in (k, v))
        law = ((keys * q[i, j].unsqueeze(1)).sum(-1) * layer.scaling).softmax(-1)
        out[i, j] = (law.unsqueeze(-1) * values).sum(1)
    return out


def bits(shape, library, monkeypatch, broken=None, attend=by_token, model=None, **settings):
    """Return `Report.bits` of an engine with row-wise ops, except the products of weights [N, K] `broken`."""
    monkeypatch.setattr(torch_ref, "_attend", attend)
    monkeypatch.setattr(
        nn.Linear,
        "forward",
        lambda self, x: torch.ops.bits_test.linear(x, self.weight, tuple(self.weight.shape) != broken),
    )
    model = model or tiny_model("llama")
    draft = None if shape == "plain" else random_draft(model, "eagle")
    small = {"max_batch": 2, "max_seq_len": 32, "check_kernels": True}
    engine = specdec.attach(model, draft, **{**small, **SHAPES[shape], **settings})
    free, found = engine.report().num_free_pages, engine.report()
    assert found.num_pages == free and not engine._core.slot_tables.table.any(), "nothing is left of the check"
    assert not any(path["eager"] for path in found.paths.values()), "its forwards are not counted"
    engine.detach()
    assert f"bits       {found.bits}" in str(found)
    return found.bits


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_that_do_not_depend_on_others_are_equal(shape, library, monkeypatch):
    assert bits(shape, library, monkeypatch, page_size=4) == "equal"


@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_that_depends_on_its_rows_is_named(shape, library, monkeypatch):
    found = bits(shape, library, monkeypatch, broken=DOWN)
    assert found == f"different: products of [64, 96] in steps after prefills of 28, 4; {FORWARDS[shape]}"


def test_attention_that_depends_on_the_tail_is_named(library, monkeypatch):
    def attend(q, k, v, mask, *others):
        out = by_token(q, k, v, mask, *others)
        return out if q.shape[1] != 3 else torch.nextafter(out, out + 1)

    found = bits("chain", library, monkeypatch, attend=attend)
    assert found.startswith("different: attention in chains of 1 x 3, 2 x 3"), found


def test_ids_are_none_that_stand_for_images():
    """Gemma 3n's per-layer embeddings have no rows for the last ids: on a GPU a kernel would end the process."""
    parts = {"laurel_rank": 8, "altup_num_inputs": 2, "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0]}
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "hidden_size_per_layer_input": 8}
    config = tf.Gemma3nTextConfig(**sizes, **heads, **parts, vocab_size=128, vocab_size_per_layer_input=96)
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    with specdec.attach(model, max_batch=2, max_seq_len=64, check_kernels=True) as engine:
        assert not engine.report().bits.startswith("not checked")


def exactly(activation):
    """Return an activation whose rounding does not depend on the layout, as torch's does on a CPU."""
    return lambda x, *options, **named: activation(x.double(), *options).to(x.dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run in Triton's interpreter, on a CPU")
def test_recurrent_layers_are_equal_but_for_prefills_in_chunks(library, monkeypatch):
    monkeypatch.setattr("specdec.reach.assembly.assemble.pick_recurrent", lambda *_: TRITON_RECURRENT)
    monkeypatch.setattr("specdec.reach.assembly.bits.CONTEXTS", (9, 3))
    for name in ("silu", "softplus"):
        monkeypatch.setattr(F, name, exactly(getattr(F, name)))
    config = CONFIGS["mamba2"]()
    config.num_hidden_layers, config.num_heads, config.n_groups, config.hidden_size = 1, 2, 1, 8
    torch.manual_seed(0)
    model = random_weights(tf.AutoModelForCausalLM.from_config(config))
    model.backbone.layers[0].mixer.in_proj.weight.data *= 8  # so that states make up a large part of the output
    found = bits("chain", library, monkeypatch, model=model)
    assert found.startswith("different: recurrent layers in steps after prefills of 8") and "parts of 3:9" in found
    assert "chains" not in found and "together" not in found


def test_the_ops_of_this_machine_are_compared_as_they_are():
    """On a CPU a product's bits depend on its rows: whatever the result, it names ops."""
    engine = specdec.attach(tiny_model("llama"), max_batch=4, max_seq_len=32, check_kernels=True)
    found = engine.report().bits
    engine.detach()
    assert found == "equal" or "products of [" in found or "attention" in found


def test_where_no_op_differs_what_may_be_the_cause_is_named():
    ones, zeros = (lambda within=None, fill=fill: torch.full((1, 4), fill) for fill in (1.0, 0.0))
    case = Case("steps after prefills", "3", ones, 1, [Shared(zeros, 1, 0, 0)])
    found = _compare([case], "layers that are compiled in rounds only")
    assert found == "different: layers that are compiled in rounds only in steps after prefills of 3"


def test_a_vocabulary_may_be_small():
    """As of amino acids or bases: on CUDA, a token outside the vocabulary would end the process."""
    model = tiny_model("llama")
    model.resize_token_embeddings(40)
    with specdec.attach(model, algo="lookup", num_steps=9, max_batch=5, max_seq_len=48, check_kernels=True) as engine:
        assert "chains of 1 x 10" in engine.report().bits


def test_what_ends_a_check_leaves_the_model_free(monkeypatch):
    """An interrupt, for example: the engine has already changed the model by then."""
    model, ours = tiny_model("llama"), "specdec.reach.assembly.assemble.check_bits"
    before = [list(vars(module)) for module in model.modules()]
    with monkeypatch.context() as patch:
        patch.setattr(ours, lambda core: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt) as kept:  # with its frames, as a notebook keeps it
            specdec.attach(model, max_batch=1, max_seq_len=32)
    assert kept.tb and [list(vars(module)) for module in model.modules()] == before
    specdec.attach(model, max_batch=1, max_seq_len=32).detach()


@pytest.mark.gpu
def test_16_bits_are_compared_on_a_gpu_without_being_asked():
    model = tiny_model("llama64").cuda().bfloat16()
    engine = specdec.attach(model, max_batch=4, max_seq_len=64, backend="triton", compile=False)
    assert engine.report().bits == "equal" or engine.report().bits.startswith("different: ")
    engine.detach()


@pytest.mark.parametrize(
    ("model", "settings", "reason"),
    [
        ("llama", {}, "not checked: float32 on cpu"),
        ("llama", {"check_kernels": True, "max_batch": 2, "num_slots": 6}, "not checked: the pool holds no prompt"),
    ],
)
def test_what_is_not_compared_says_why(model, settings, reason):
    engine = specdec.attach(tiny_model(model), **{"max_batch": 1, "max_seq_len": 32, **settings})
    assert engine.report().bits == reason
    engine.detach()
