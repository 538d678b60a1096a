"""Admission by equality: models altered so that our route gives other logits are refused, others are not."""

import pytest
import torch
import transformers as tf

import specdec
from specdec.backends import TorchBackend, pick_backend, unmet_needs
from specdec.reach.targets.admission.equality import LENGTH
from specdec.reach.targets.admission.probe import probe
from specdec.reach.targets.admission.recording import Positions
from specdec.reach.targets.hf import HFTarget
from tests.tiny_models import _BASE, DEVICE, VOCAB, WINDOW, random_weights, tiny_model

DTYPES = (torch.float32, torch.bfloat16)


def converted(model, dtype):
    """Convert the weights to `dtype`; rotary frequencies stay in fp32, as `from_pretrained` leaves them."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


class Untold(tf.FalconH1Config):
    """A config without `layer_types`, as remote code may have."""

    layers_block_type = None


def parallel_hybrid():
    """Attention in every layer, a parallel recurrent branch that is not routed, and a config that does not name it."""
    config = tf.FalconH1Config(
        **{**_BASE, "num_hidden_layers": 2},
        mamba_d_ssm=64,
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=16,
        mamba_chunk_size=8,
    )
    torch.manual_seed(0)
    model = random_weights(tf.AutoModelForCausalLM.from_config(config))
    for layer in model.model.layers:
        layer.mamba.out_proj.weight.data.mul_(20)  # in 16 bits, a branch a hundredth as large is lost in rounding
    model.config.__class__ = Untold
    return model


def neighbours():
    """A feed-forward that also reads the previous token."""
    model = tiny_model("llama")
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) + 0.3 * torch.roll(x, 1, 1)
    return model


def counted():
    """Rotary positions counted from the start of the row, whatever is passed."""
    model = tiny_model("llama")
    rotary = model.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda x, position_ids: forward(x, torch.arange(x.shape[1])[None])
    return model


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("doctored", [parallel_hybrid, neighbours, counted])
def test_models_that_would_write_another_text_are_refused(doctored, dtype, monkeypatch):
    monkeypatch.setattr("specdec.reach.targets.adapters.mixers.PRIMITIVES", {})  # no recurrent layer is recognised
    model = converted(doctored(), dtype)
    with pytest.raises(specdec.AttachError, match=r"logits differ from its own forward's by \d\.\de.* \(allowed: \d"):
        specdec.attach(model)
    assert not [name for module in model.modules() for name in vars(module) if "specdec" in name]


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_that_are_nan_over_our_pool_alone_are_refused(dtype):
    """NaN is neither greater nor less than the tolerance."""
    model = converted(tiny_model("llama"), dtype)
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) * (1 if x.shape[1] == LENGTH else float("nan"))
    with pytest.raises(specdec.AttachError, match=r"differ from its own forward's by nan"):
        HFTarget(model)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "qwen3_moe"])
def test_what_rounding_does_is_no_reason(name, dtype):
    HFTarget(converted(tiny_model(name), dtype)).detach()


def test_windows_are_those_of_masks():
    """A dozen tokens can only show a window of 8; the keyword argument that most layers also pass is no mask."""
    model = tiny_model("gemma2")
    for layer in model.model.layers:
        layer.self_attn.sliding_window = None
    assert [layer.window for layer in probe(model).layers] == [WINDOW, None] * 2


def test_masks_passed_by_name_are_read():
    config = tf.AfmoeConfig(**_BASE, num_dense_layers=1, moe_intermediate_size=48, head_dim=16)
    HFTarget(random_weights(tf.AutoModelForCausalLM.from_config(config))).detach()


def test_layers_that_count_positions_get_theirs(monkeypatch):
    """In a real model it matters only far into a text; here from the eighth token on."""
    model = tiny_model("llama4")
    assert probe(model).counts_positions and not probe(tiny_model("llama")).counts_positions
    monkeypatch.setattr(Positions, "get_seq_length", lambda self, layer_idx=0: 0)
    with pytest.raises(specdec.AttachError, match="logits differ"):
        HFTarget(model)


def test_chunks_are_refused_by_name_where_a_backend_has_none():
    layers = probe(tiny_model("llama4")).layers
    assert [layer.chunk for layer in layers] == [16, 16, 16, None]
    assert unmet_needs(TorchBackend.capabilities, layers, torch.float32) == []
    with pytest.raises(ValueError, match="layer 0 needs chunked attention"):
        pick_backend("triton", layers, torch.float32, DEVICE)


def test_foreign_layer_types_alone_are_no_reason():
    model = tiny_model("llama")
    model.config.layer_types = ["of_a_kind_to_come"] * 4
    with pytest.raises(specdec.AttachError, match="of_a_kind_to_come"):  # it explains another reason
        HFTarget(model.train())
    model.model.layers[0].self_attn.is_causal = True
    HFTarget(model.eval()).detach()


def test_a_model_that_cannot_run_packed_is_refused_with_its_error():
    model = tiny_model("llama")
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x[:, : 12 + 0 * len(x)]) if x.shape[1] == 12 else x.view(-1, 5)
    with pytest.raises(specdec.AttachError, match="could not be compared with its own forward: shape"):
        HFTarget(model)


def test_logits_that_the_model_bans_have_no_scale():
    model = tiny_model("llama")
    head = model.lm_head.forward
    banned = torch.zeros(VOCAB).index_fill_(0, torch.tensor([3, 4]), torch.finfo(torch.float32).min)
    model.lm_head.forward = lambda x: (head(x) + banned).clamp_min(torch.finfo(torch.float32).min)
    HFTarget(model).detach()
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) + 0.3 * torch.roll(x, 1, 1)
    with pytest.raises(specdec.AttachError, match="logits differ"):
        HFTarget(model)


@pytest.mark.parametrize("wrong", ["target", "draft"])
def test_heads_whose_kernels_give_other_logits_are_refused(wrong, monkeypatch):
    """Admission runs the model's own output head; a planted fault stands in for a wrong kernel."""
    model, draft = tiny_model("llama"), tiny_model("llama")
    spoilt, own = model if wrong == "target" else draft, HFTarget.head

    def head(self, hidden):
        logits = own(self, hidden)
        return logits.roll(1, -1) if self.route.multiplies and self.model is spoilt else logits

    monkeypatch.setattr(HFTarget, "head", head)
    with pytest.raises(specdec.AttachError, match="our matmul for its output head differs from its own by 1"):
        specdec.attach(model, draft, algo="standalone", max_batch=1, max_seq_len=64)
    assert not hasattr(model, "_specdec_attached") and not hasattr(draft, "_specdec_attached")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.filterwarnings("ignore:.*holds NaN or infinity")
def test_a_token_whose_embedding_is_damaged_is_no_reason(dtype):
    model = converted(tiny_model("llama"), dtype)
    model.get_input_embeddings().weight.data[VOCAB // 4 : VOCAB // 2 : 2] = float("nan")  # some are ids of the texts
    HFTarget(model).detach()


@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_whose_embeddings_are_zero_are_no_reason(dtype):
    """As in rows that pad a vocabulary: without biases, all later values are zero too."""
    model = converted(tiny_model("llama"), dtype)
    model.get_input_embeddings().weight.data[VOCAB // 4 : VOCAB // 2 : 2] = 0
    HFTarget(model).detach()
    model.get_input_embeddings().weight.data.zero_()
    HFTarget(model).detach()
