"""Models whose weights are elsewhere, packed or compiled away are refused, with the reason and the fix."""

import threading

import accelerate
import pytest
import torch
from torch import nn

import specdec
from tests.heads import random_draft
from tests.test_attach import greedy, ragged_prompts
from tests.tiny_models import tiny_model


def refused(model, match):
    with pytest.raises(specdec.AttachError, match=match) as caught:
        specdec.attach(model)
    assert not hasattr(model, "_specdec_attached")
    return caught.value.reasons


@pytest.mark.parametrize("cuda_graph", [None, True])
def test_layers_that_accelerate_offloads_are_refused(cuda_graph):
    model = tiny_model("llama")
    accelerate.cpu_offload(model.model.layers[3])
    with pytest.raises(specdec.AttachError, match=r"accelerate offloads model.layers.3.*load the whole model onto one"):
        specdec.attach(model, cuda_graph=cuda_graph)


def test_models_that_are_moved_in_for_a_forward_are_refused():
    model = tiny_model("llama")
    accelerate.hooks.add_hook_to_module(model.model, accelerate.hooks.CpuOffload("cpu"))
    refused(model, "accelerate offloads model ")
    accelerate.hooks.remove_hook_from_module(model.model)
    specdec.attach(model).detach()


def test_hooks_that_move_no_weights_are_no_reason():
    model, prompt = tiny_model("llama"), ragged_prompts()[0]
    expected = greedy(model, prompt, 8)
    hook = accelerate.hooks.AlignDevicesHook(execution_device="cpu", io_same_device=True)
    accelerate.hooks.add_hook_to_module(model.model.layers[1], hook)
    engine = specdec.attach(model)
    assert engine.generate([prompt], max_new_tokens=8).tokens == [expected]


def test_weights_without_values_are_refused():
    model = tiny_model("llama")
    model.model.layers[2].to("meta")
    refused(model, r"model.layers.2.\S+ is on the meta device \(9 tensors\): it holds no values; load the weights")


@pytest.mark.gpu
def test_models_on_several_devices_are_refused():
    model = tiny_model("llama")
    model.model.layers[2].to("cuda")
    refused(model, r"it is on 2 devices \(.* on cpu, .* on cuda:0\); an engine runs on one")


def test_devices_are_counted(monkeypatch):
    """As on a machine with GPUs: one tensor reports another device."""
    from specdec.reach.targets.admission import placement

    class There:
        device = torch.device("cuda:1")

    model = tiny_model("llama")
    tensors = [*placement._tensors(model), ("model.layers.3.mlp.up_proj.weight", There())]
    monkeypatch.setattr(placement, "_tensors", lambda model: tensors)
    refused(model, r"it is on 2 devices \(model.embed_tokens.weight on cpu, model.layers.3.\S+ on cuda:1\).*one: ")


class Packed(nn.Module):
    """A linear layer of int8 rows with scales, as quantisers make it."""

    def __init__(self, linear, keep):
        super().__init__()
        self.scale = nn.Parameter(linear.weight.abs().amax(1, keepdim=True) / 127)
        rows = (linear.weight / self.scale).round().to(torch.int8)
        if keep is nn.Parameter:
            self.weight = nn.Parameter(rows, requires_grad=False)
        else:
            self.register_buffer("weight", rows)

    def forward(self, x):
        return x @ (self.weight.to(x.dtype) * self.scale).T


@pytest.mark.parametrize("keep", [nn.Parameter, "buffer"])
def test_packed_weights_are_refused(keep):
    model = tiny_model("llama")
    model.model.layers[1].mlp.up_proj = Packed(model.model.layers[1].mlp.up_proj, keep)
    refused(model, r"up_proj.weight is of torch.int8 \(1 such tensors\): expected plain.*quantization_config")


class Sharded(torch.Tensor):
    """A tensor subclass in place of a weight."""


def test_tensor_subclasses_and_foreign_floats_are_refused():
    model = tiny_model("llama")
    weight = torch.Tensor._make_subclass(Sharded, model.model.norm.weight.data)
    model.model.norm._parameters["weight"] = weight
    refused(model, "norm.weight is a Sharded")
    model = tiny_model("llama")
    model.model.norm.weight = nn.Parameter(model.model.norm.weight.to(torch.float8_e4m3fn), requires_grad=False)
    refused(model, "norm.weight is of torch.float8_e4m3fn")


def test_models_that_transformers_quantised_are_refused():
    class Quantizer:
        class quantization_config:
            quant_method = "bitsandbytes_8bit"

    model = tiny_model("llama")
    model.hf_quantizer = Quantizer()
    refused(model, r"it is quantised \(bitsandbytes_8bit\): .* use a checkpoint that is not quantised")
    del model.hf_quantizer
    specdec.attach(model).detach()


@pytest.mark.filterwarnings("ignore")
def test_dynamically_quantised_models_are_refused():
    model = torch.ao.quantization.quantize_dynamic(tiny_model("llama"), {nn.Linear}, dtype=torch.qint8)
    refused(model, "quantised modules")


def test_weights_that_a_gguf_file_held_packed_are_plain(smollm2):
    specdec.attach(smollm2[0], max_batch=1, max_seq_len=64).detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embeddings_of_another_type_than_attention_are_refused(dtype):
    class Cast(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.weight = inner, inner.weight

        def forward(self, ids):
            return self.inner(ids).to(torch.float64)

    model = tiny_model("llama", dtype=torch.float64)
    model.model.embed_tokens = Cast(model.model.embed_tokens.to(dtype))
    refused(model, rf"its embedding is {dtype}, but attention runs in torch.float64: .*from_pretrained")


def test_drafts_are_examined_too():
    target = tiny_model("llama")
    draft = random_draft(target, "standalone")
    accelerate.cpu_offload(draft.model.layers[0])
    with pytest.raises(specdec.AttachError, match="cannot attach the draft, a Qwen3ForCausalLM: accelerate offloads"):
        specdec.attach(target, draft)
    specdec.attach(target).detach()


def compiled_forward(model):
    model.forward = torch.compile(model.forward, backend="eager")


def compiled_decoder_forward(model):
    model.model.forward = torch.compile(model.model.forward, backend="eager")


def compiled_in_place(model):
    model.compile(backend="eager")


def compiled_layer(model):
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")


@pytest.mark.parametrize("how", [compiled_forward, compiled_decoder_forward, compiled_in_place, compiled_layer])
def test_compiled_models_are_refused(how):
    model = tiny_model("llama")
    how(model)
    refused(model, r"was compiled .* with attention inside: attach the model before .* compile=True")


def test_modules_without_attention_may_be_compiled():
    model, prompt = tiny_model("llama"), ragged_prompts()[0]
    expected = greedy(model, prompt, 6)
    model.model.layers[1].mlp.compile(backend="eager")
    assert specdec.attach(model).generate([prompt], max_new_tokens=6).tokens == [expected]


def test_a_decoder_that_another_thread_calls_within_a_step_waits():
    model, hidden, threads = tiny_model("llama"), [], []
    ids = torch.tensor([[3, 4, 5]])
    expected = model.model(ids).last_hidden_state
    engine = specdec.attach(model)

    def meanwhile(*args):
        if not threads:
            threads.append(threading.Thread(target=lambda: hidden.append(model.model(ids).last_hidden_state)))
            threads[0].start()
            threads[0].join(0.1)
            assert threads[0].is_alive()

    model.model.layers[2].mlp.register_forward_pre_hook(meanwhile)
    engine.generate([[3, 4, 5]], max_new_tokens=1)
    threads[0].join(60)
    assert torch.equal(hidden[0], expected)
