"""Recurrent layers of live models on our ops: every type against its own forward, what stays unchanged, traces."""

import threading
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.accelerate import force_accelerate_hooks

from specdec.backends.recurrent import recurrent_scope
from specdec.backends.recurrent.state_pool import ConvSpec, ScanInputs, ScanSpec
from specdec.core.errors import AttachError
from specdec.reach.targets.adapters.mixers import Mixers
from specdec.reach.targets.adapters.primitives import PRIMITIVES
from specdec.reach.targets.admission.recording import RecurrentCall
from specdec.reach.targets.overrides import ConfigViews
from tests.recurrent_models import CONFIGS, recurrent_model
from tests.recurrent_naive import Naive, record_mixers
from tests.tiny_models import VOCAB, tiny_model

NUM_TOKENS = 37  # two chunks and a part of one for types with chunks of 16
F32 = torch.float32
CONV = ConvSpec(88, 4)
SSD = ScanSpec(heads=8, key_heads=2, k_dim=6, v_dim=8, decay="head", is_corrected=False)
DELTA = ScanSpec(heads=4, key_heads=4, k_dim=8, v_dim=12, decay="head", is_corrected=True)
KIMI = ScanSpec(heads=2, key_heads=2, k_dim=12, v_dim=12, decay="key", is_corrected=True)
S6 = ScanSpec(heads=1, key_heads=1, k_dim=6, v_dim=48, decay="state", is_corrected=False)
SHAPES = {
    "qwen3_next": [ConvSpec(80, 4), DELTA] * 3,
    "olmo_hybrid": [ConvSpec(112, 4), DELTA] * 3,
    "kimi_linear": [ConvSpec(72, 4), KIMI] * 3,
    "mamba2": [CONV, SSD] * 4,
    "nemotron_h": [CONV, SSD] * 2,
    "mamba": [ConvSpec(48, 4), S6] * 3,
    "lfm2": [ConvSpec(32, 3)] * 3,
    # Two heads, each with its own scan call.
    "zamba": [ConvSpec(64, 4), *[ScanSpec(1, 1, 6, 32, "state", is_corrected=False)] * 2] * 4,
}
# Attention to selected tokens, and biases by distance: our attention ops have neither.
OWN_ATTENTION = ("qwen4_exp", "inkling")

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


class Trivial:
    """Returns results as if there were no state."""

    def conv(self, inputs, layer_id):
        return F.silu(inputs.x) if inputs.is_silu else inputs.x.clone()

    def scan(self, inputs: ScanInputs, layer_id: int) -> torch.Tensor:
        return inputs.v.clone()


def tokens(num_tokens=NUM_TOKENS):
    return torch.randint(3, VOCAB, (1, num_tokens), generator=torch.Generator().manual_seed(1))


def logits(model, ids=None):
    return model(input_ids=tokens() if ids is None else ids, use_cache=False).logits


def recorded(model, mixers):
    with mixers.routed(), record_mixers() as recorder:
        return logits(model), recorder


def layer_ids(mixer):
    """Return the layer ids of all calls of a forward, by primitive."""
    return tuple(i for call in mixer.calls for i in call.turns.layer_ids)


def attributes(model):
    return [sorted(module.__dict__) for module in model.modules()]


@pytest.mark.parametrize("name", CONFIGS)
def test_routed_forward_equals_own(name):
    model, other = recurrent_model(name), recurrent_model(name, seed=1)
    own, others, before = logits(model), logits(other), attributes(model)
    mixers = Mixers(model)
    with mixers.routed():
        with record_mixers() as recorder:
            routed = logits(model)
        assert torch.equal(logits(other), others)
        with recurrent_scope(Trivial()):
            forgetful = logits(model)
    scale = own.abs().max()
    assert (routed - own).abs().max() <= 1e-5 * scale
    assert (forgetful - own).abs().max() > 1e-2 * scale
    assert attributes(model) == before
    assert torch.equal(logits(model), own)
    mixers.renumber(recorder.order)
    assert sorted(i for mixer in mixers.mixers for i in layer_ids(mixer)) == list(range(len(recorder.calls)))
    assert recorded(model, mixers)[1].order == list(range(len(recorder.calls)))


@pytest.mark.parametrize("name", CONFIGS)
def test_16_bits_round_as_the_own_forward_does(name):
    precise, model = logits(recurrent_model(name)), recurrent_model(name, dtype=torch.bfloat16)
    own, routed = logits(model).float(), recorded(model, Mixers(model))[0].float()
    assert (routed - own).abs().mean() <= (own - precise).abs().mean()


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_in_the_order_of_calls(name):
    model = recurrent_model(name)
    calls = recorded(model, Mixers(model))[1].calls
    # Since transformers 5.23 Qwen's heads share keys in the primitive; before, the mixer repeated them.
    grouped = {"qwen3_next": replace(DELTA, key_heads=2)}.get(name, DELTA)
    seen = [call.spec for call in calls]
    assert seen in (SHAPES[name], [grouped if shape == DELTA else shape for shape in SHAPES[name]])


def test_ids_before_and_after_they_are_numbered_by_calls():
    model = recurrent_model("zamba")
    mixers = Mixers(model)
    assert [layer_ids(mixer) for mixer in mixers.mixers] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    recorder = recorded(model, mixers)[1]
    assert recorder.order == [0, 1, 1, 2, 3, 3, 4, 5, 5, 6, 7, 7]
    assert recorder.calls[0] == RecurrentCall(0, SHAPES["zamba"][0], F32)
    mixers.renumber(recorder.order)
    assert [layer_ids(mixer) for mixer in mixers.mixers] == [(0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)]
    assert recorded(model, mixers)[1].order == list(range(12))


class Packed:
    """Computes each request of a packed sequence separately; `attend` stands in for attention over them."""

    sizes = (20, 3, 14)

    def conv(self, inputs, layer_id):
        parts = inputs.x.split(self.sizes)
        return torch.cat([Naive().conv(inputs._replace(x=part), layer_id) for part in parts])

    def scan(self, inputs, layer_id):
        *tensors, beta, rates, scale = inputs
        betas = [None] * len(self.sizes) if beta is None else beta.split(self.sizes)
        parts = zip(*(t.split(self.sizes) for t in tensors), betas, strict=True)
        return torch.cat([Naive().scan(ScanInputs(*part, rates, scale), layer_id) for part in parts])

    @classmethod
    def attend(cls, module, q, k, v, attention_mask=None, scaling=None, **kwargs):
        copies = q.shape[1] // k.shape[1]
        requests = torch.arange(len(cls.sizes)).repeat_interleave(torch.tensor(cls.sizes))
        mask = (requests[:, None] == requests).tril()
        k, v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling)
        return out.transpose(1, 2), None


AttentionInterface.register("specdec_test_packed", Packed.attend)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in OWN_ATTENTION])
def test_packed_requests_do_not_see_each_other(name):
    model = recurrent_model(name)
    own = torch.cat([logits(model, ids) for ids in tokens().split(Packed.sizes, 1)], 1)
    positions = torch.cat([torch.arange(size) for size in Packed.sizes]).unsqueeze(0)
    attention = ConfigViews(model.modules(), "specdec_test_packed").shown()
    with Mixers(model).routed(), recurrent_scope(Packed()), attention:
        packed = model(input_ids=tokens(), position_ids=positions, use_cache=False).logits
    assert (packed - own).abs().max() <= 1e-5 * own.abs().max()


def test_models_without_known_recurrences_have_no_mixers():
    assert Mixers(tiny_model("llama")).mixers == []


def test_hooks_fire():
    model = recurrent_model("bamba")
    mixers = Mixers(model)
    fired = []
    mixers.mixers[1].module.register_forward_hook(lambda *args: fired.append("output"))
    mixers.mixers[1].module.register_forward_pre_hook(lambda *args: fired.append("input"))

    class Hook:
        def pre_forward(self, module):
            fired.append("before")

        def post_forward(self, module, output):
            fired.append("after")

    mixers.mixers[1].module.conv1d._hf_hook = Hook()
    recorded(model, mixers)
    assert fired == ["input", "before", "after", "output"]


def test_an_exception_restores():
    model = recurrent_model("zamba")
    own, before, mixers = logits(model), attributes(model), Mixers(model)
    order = recorded(model, mixers)[1].order
    mixers.renumber(order)

    class Failing(Trivial):
        def scan(self, *args):
            raise RuntimeError("in the middle of a mixer that scans twice")

    with pytest.raises(RuntimeError, match="in the middle"), mixers.routed(), recurrent_scope(Failing()):
        logits(model)
    assert attributes(model) == before
    assert torch.equal(logits(model), own)
    assert recorded(model, mixers)[1].order == list(range(12))


def test_contexts_nest():
    model = recurrent_model("mamba2")
    before, mixers = attributes(model), Mixers(model)
    with mixers.routed():
        recorded(model, mixers)
        with record_mixers() as recorder:
            logits(model)
        assert recorder.calls
    assert attributes(model) == before


def test_other_threads_use_other_models_meanwhile():
    model, other = recurrent_model("qwen3_next"), recurrent_model("qwen3_next", seed=1)
    expected, found = logits(other), []
    with Mixers(model).routed():
        thread = threading.Thread(target=lambda: found.append(logits(other)))
        thread.start()
        thread.join()
    torch.testing.assert_close(found[0], expected)


def test_a_forward_of_its_own_is_refused():
    model = recurrent_model("mamba2")
    mixers = Mixers(model)
    module = mixers.mixers[2].module
    module.forward = module.forward
    with pytest.raises(AttachError, match=r"backbone\.layers\.2\.mixer \(Mamba2Mixer\) has a forward of its own"):
        Mixers(model)
    before = attributes(model)
    with pytest.raises(ValueError, match=r"layers\.2\.mixer .* was given a forward"), mixers.routed():
        pass
    assert attributes(model) == before


def test_a_cache_is_refused():
    model = recurrent_model("bamba")
    with pytest.raises(ValueError, match="use_cache=False"), Mixers(model).routed(), record_mixers():
        model(input_ids=tokens(), use_cache=True)


def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None):
    """What transformers' modeling files have under that name; mixers below find it among their globals."""
    return F.conv1d(F.pad(hidden_states, (2, 0)), weight.unsqueeze(1), bias, groups=weight.shape[0])


class Older(nn.Module):
    """A mixer as in older modeling files: its forward picks a method, in which an inner function convolves."""

    def __init__(self):
        super().__init__()
        self.conv1d = nn.Conv1d(4, 4, 3, groups=4)

    @force_accelerate_hooks("conv1d")
    def forward(self, x, *, scale=2.0):
        return self.torch_forward(x) * scale

    def torch_forward(self, x):
        def convolve(y):
            return causal_conv1d_fn(y, self.conv1d.weight.squeeze(1), self.conv1d.bias)

        return convolve(x)


def test_methods_that_the_forward_calls_are_routed():
    module, x = Older(), torch.randn(1, 4, 9)
    own = module(x, scale=3.0)
    mixers = Mixers(nn.ModuleList([nn.Linear(2, 2), module]))
    with mixers.routed(), record_mixers() as recorder:
        torch.testing.assert_close(module(x, scale=3.0), own)
    assert recorder.calls == [RecurrentCall(0, ConvSpec(4, 3), F32)]
    assert "torch_forward" not in module.__dict__


def test_a_wrapper_that_hides_the_forward_is_refused():
    class Hidden(Older):
        def forward(self, x):
            return causal_conv1d_fn(x, self.conv1d.weight.squeeze(1))

    inner = Hidden.forward
    forwards = [inner]
    Hidden.forward = lambda self, x: forwards[0](self, x)
    Hidden.forward.__wrapped__ = inner
    with pytest.raises(AttachError, match=r"recurrent layer 0 .* in a wrapper"):
        Mixers(nn.ModuleList([Hidden()]))


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "zamba"] if torch.cuda.is_available() else ["mamba2"])
def test_traces_as_one_graph_for_any_number_of_tokens(name):
    model = recurrent_model(name)
    mixers, graphs = Mixers(model), []
    mixers.renumber(recorded(model, mixers)[1].order)

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda ids: logits(model, ids), fullgraph=True, dynamic=True, backend=backend)
    with mixers.routed(), recurrent_scope(Trivial()):
        for num_tokens in (16, 7, 33):
            ids = tokens(num_tokens)
            torch.testing.assert_close(compiled(ids), logits(model, ids), rtol=1e-4, atol=1e-4)
    assert len(graphs) == 1
    ops = (torch.ops.specdec.conv.default, torch.ops.specdec.scan.default)
    called = [node.args[3] for node in graphs[0].graph.nodes if node.target in ops]
    assert called == list(range(sum(len(layer_ids(mixer)) for mixer in mixers.mixers)))


@pytest.mark.parametrize("is_normed", [False, True])
def test_keys_that_heads_share_are_those_repeated(is_normed):
    """transformers repeats them in the mixer until 5.22, and in the primitive since then."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 7, 2, 8)
    v, g, beta = torch.randn(1, 7, 4, 12), -torch.rand(1, 7, 4), torch.rand(1, 7, 4)
    rule = PRIMITIVES["torch_chunk_gated_delta_rule"]
    with record_mixers():
        ours = rule(0, q, k, v, g, beta, use_qk_l2norm_in_kernel=is_normed)[0]
        repeated = (x.repeat_interleave(2, 2) for x in (q, k))
        theirs = rule(0, *repeated, v, g, beta, use_qk_l2norm_in_kernel=is_normed)[0]
    torch.testing.assert_close(ours, theirs)
