"""Products and norms between attention and attention: ops, twins, kernels, and bits that depend on a row alone."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from specdec.backends import linear as ops

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.usefixtures("one_thread")


def random(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def test_ops_compute_what_layers_of_transformers_do():
    mlp = LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=48, hidden_act="silu")).to(DEVICE, torch.bfloat16)
    x, y = random(2, 5, 32), random(2, 5, 32, seed=1)
    joined = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
    assert ops.linear(ops.gated_linear(x, joined, None, "silu"), mlp.down_proj.weight).equal(mlp(x))
    for kind, offset, is_late in ((LlamaRMSNorm, 0.0, False), (GemmaRMSNorm, 1.0, True)):
        norm = kind(32, eps=1e-3).to(DEVICE, torch.bfloat16)
        norm.weight.data = random(32, seed=2)
        normed, total = ops.add_rms_norm(x, y, norm.weight, 1e-3, offset, is_late)
        assert total.equal(x + y) and normed.equal(norm(x + y))
        assert ops.rms_norm(total, norm.weight, 1e-3, offset, is_late).equal(normed)


def test_traces_keep_the_ops_and_their_shapes():
    def layer(x, weight, scale):
        normed, total = torch.ops.specdec.add_rms_norm(x, x, scale, 1e-5, 0.0, False)
        again = torch.ops.specdec.rms_norm(normed, scale, 1e-5, 1.0, True)
        gated = torch.ops.specdec.gated_linear(again, weight, None, "gelu")
        return torch.ops.specdec.linear(gated, weight[:, :6], weight[:, 7]), total

    given = random(12, 8), random(8)
    graph = make_fx(layer, tracing_mode="symbolic")(random(3, 8), *given)
    names = [str(node.target) for node in graph.graph.nodes if "specdec" in str(node.target)]
    assert names == [f"specdec.{name}.default" for name in ("add_rms_norm", "rms_norm", "gated_linear", "linear")]
    many = random(5, 8)
    assert all(a.equal(b) for a, b in zip(graph(many, *given), layer(many, *given), strict=True))


def test_an_unknown_activation_is_refused_by_name():
    with pytest.raises(ValueError, match="activation='relu': expected one of silu, gelu, gelu_tanh"):
        ops.gated_linear(random(2, 8), random(12, 8), None, "relu")
