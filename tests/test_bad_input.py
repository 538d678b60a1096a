"""User errors: each is a ValueError that names the value and the fix, before any work, and changes nothing."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

import specdec
from specdec.backends import BACKENDS
from specdec.core.cache.pool import KVPool, LayerShape
from specdec.core.functional.checks import checked
from specdec.core.functional.torch_ops import pick_ops
from specdec.core.functional.tree import chain
from specdec.reach.heads.load import save_head
from tests.heads import random_head
from tests.tiny_models import tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture
def engine(model):
    engine = specdec.attach(model, max_seq_len=64, num_slots=100, max_batch=2)
    yield engine
    engine.check_integrity()
    assert engine.generate([[3, 4]], max_new_tokens=2).tokens  # still works
    engine.detach()


@pytest.fixture
def checkpoint(model, tmp_path: Path) -> Path:
    save_head(tmp_path / "head", random_head(model), lm_head_from_target=False, dtype=torch.float32)
    return tmp_path / "head"


@pytest.mark.parametrize("options", [{"prompts": "text"}, {"prompts": [[3]], "stop": "x"}])
def test_text_needs_a_tokenizer(engine, options):
    with pytest.raises(ValueError, match="tokenizer"):
        engine.generate(**options)


def test_a_prompt_that_can_never_fit_the_pool(model):
    engine = specdec.attach(model, max_seq_len=128, num_slots=32)
    with pytest.raises(specdec.CapacityError, match=r"pool has 32.*larger num_slots"):
        engine.generate([[3] * 40], max_new_tokens=8)
    engine.detach()


def test_streams_are_refused_without_text_and_free_their_slots(engine):
    with pytest.raises(ValueError, match="no tokenizer"):
        engine.stream([[3]])
    requests = engine.submit([[3, 4, 5]], max_new_tokens=20, ignore_eos=True)
    engine.step()
    engine.abandon(requests)
    report = engine.report()
    assert report.num_free_pages == report.num_pages


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_steps": -1}, "num_steps=-1"),
        ({"num_steps": 256}, "num_steps=256: expected 'auto' or an integer from 0 to 255"),
        ({"topk": 0}, "topk=0"),
        ({"topk": 60, "num_steps": 6}, "exceed 256"),
        ({"topk": 65, "num_steps": 2}, "topk=65: expected an integer from 1 to 64"),
        ({"num_steps": 3, "num_draft_tokens": 9}, r"num_steps\+1=4"),
        ({"num_steps": 2, "topk": 2, "num_draft_tokens": 8}, "expected 2..7"),
        ({"max_batch": 0}, "max_batch=0"),
        ({"max_batch": 2.0}, "max_batch=2.0: expected an integer of at least 1"),
        ({"max_batch": 10**9}, "the engine needs .* are available .*; lower num_slots, max_batch"),
        ({"num_slots": 10**12}, "the engine needs .* are available .*; lower num_slots, max_batch"),
        ({"max_bach": 2}, "max_bach=2: .*; did you mean max_batch"),
        ({"max_seq_len": 100_000}, "positions up to 512"),
        ({"backend": "magic"}, "backend='magic'"),
        ({"topk": 64, "num_steps": 2, "draft_vocab_size": 32}, "scores only 32"),
    ],
)
def test_attach_refuses_settings(model, settings, message):
    head = random_head(model, settings.pop("draft_vocab_size", 64))
    with pytest.raises(ValueError, match=message):
        specdec.attach(model, head, **settings)
    specdec.attach(model).detach()  # nothing is left on the model


def test_an_engine_larger_than_the_machine_is_a_capacity_error(model):
    with pytest.raises(specdec.CapacityError):
        specdec.attach(model, max_batch=10**9)


def test_numpys_integers_are_settings(model):
    engine = specdec.attach(model, max_batch=np.int64(2), max_seq_len=np.int32(64))
    assert type(engine.config.max_batch) is int and engine.generate([[3, 4]], max_new_tokens=2).tokens
    engine.detach()


def test_weights_without_values_are_told():
    with torch.device("meta"):
        empty = LlamaForCausalLM(tiny_model("llama").config).eval()
    with pytest.raises(specdec.AttachError, match=r"on the meta device .*: it holds no values; load the weights first"):
        specdec.attach(empty)


def test_a_draft_of_nan_is_told_apart_from_the_target(model):
    draft = copy.deepcopy(model)
    torch.nn.init.constant_(draft.lm_head.weight, float("nan"))
    told = "cannot attach the draft, a LlamaForCausalLM: its logits are NaN; lm_head.weight holds NaN"
    with pytest.warns(UserWarning), pytest.raises(specdec.AttachError, match=told):
        specdec.attach(model, draft)
    specdec.attach(model).detach()


@pytest.mark.parametrize(
    "tokenizer", ["gpt2", Path("gpt2"), AutoTokenizer, PreTrainedTokenizerFast, 7, lambda text: []]
)
def test_attach_refuses_what_is_no_tokenizer(model, tokenizer):
    name = "'gpt2'" if "gpt2" in str(tokenizer) else "..."
    with pytest.raises(ValueError, match=rf"^tokenizer=.*AutoTokenizer\.from_pretrained\({name}\)"):
        specdec.attach(model, tokenizer=tokenizer)
    specdec.attach(model).detach()


@pytest.mark.parametrize(
    ("draft", "algo", "message"),
    [
        (None, "medusa", "algo='medusa'"),
        (None, "eagle3", "needs a draft"),
        ("somewhere", None, "algo=None is plain decoding"),
        ("/no/such/folder", "auto", "no such folder"),
        (torch.nn.Linear(1, 1), "auto", "is a Linear"),
    ],
)
def test_attach_refuses_algorithms(model, draft, algo, message):
    with pytest.raises(ValueError, match=message):
        specdec.attach(model, draft, algo)
    specdec.attach(model).detach()


def _config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _weights(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    state = load_file(str(path))
    change(state)
    save_file(state, str(path))


def _absolute_ids(state) -> None:
    state["d2t"] = state["d2t"] + torch.arange(state["d2t"].numel())


BREAKAGES = {
    "hidden size 96": lambda f: _config(f, target_hidden_size=96),
    "vocabulary of 999": lambda f: _config(f, vocab_size=999),
    "aux layer ids": lambda f: _config(f, eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 15, 27]}),
    "truncated": lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:2000]),
    "no config.json": lambda f: (f / "config.json").unlink(),
    "neither model.safetensors": lambda f: (f / "model.safetensors").unlink(),
    "is not JSON": lambda f: (f / "config.json").write_text("{"),
    "unknown layout": lambda f: save_file({"foo.weight": torch.ones(2)}, str(f / "model.safetensors")),
    "missing tensor fc.weight": lambda f: _weights(f, lambda s: s.pop("fc.weight")),
    "unexpected tensor extra": lambda f: _weights(f, lambda s: s.update(extra=torch.ones(1))),
    "norm.weight has shape": lambda f: _weights(f, lambda s: s.update({"norm.weight": torch.ones(3)})),
    "absolute target ids": lambda f: _weights(f, _absolute_ids),
}


@pytest.mark.parametrize("message", BREAKAGES)
def test_broken_checkpoints_are_refused(model, checkpoint, message):
    BREAKAGES[message](checkpoint)
    with pytest.raises(specdec.CheckpointError, match=message.replace(".", r"\.")):
        specdec.attach(model, checkpoint)
    specdec.attach(model).detach()


def test_a_good_checkpoint_loads(model, checkpoint):
    engine = specdec.attach(model, checkpoint, algo="eagle3")
    assert engine.report().draft["aux_layers"] == (0, 1, 2)
    engine.detach()


def test_training_mode_is_refused(model):
    with pytest.raises(specdec.AttachError, match=r"model.eval\(\)"):
        specdec.attach(model.train())
    model.eval()


@pytest.mark.parametrize("place", ["model.layers.1.self_attn", "model.layers.1", "model.embed_tokens", "lm_head"])
def test_parameters_of_several_dtypes_are_told(place):
    model = tiny_model("llama").bfloat16()
    model.get_submodule(place).float()
    expected = r"several dtypes.*torch\.(float32|bfloat16) \(model\..*model\.to\(torch\."
    with pytest.raises(specdec.AttachError, match=expected) as refused:
        specdec.attach(model)
    assert "masks" not in str(refused.value)
    specdec.attach(model.to(model.get_input_embeddings().weight.dtype)).detach()


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_debug_mode_names_indices_of_the_round_that_are_out_of_bounds(name):
    if name == "triton":
        pytest.importorskip("triton")
    ops = checked(pick_ops(BACKENDS[name]().capabilities))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ids = torch.tensor([[3, 4, 5]], device=device)
    line = chain(ids[:, 0], ids[:, 1:])
    logits = torch.randn(1, 3, 9, device=device)
    assert ops.verify_greedy(logits, line, 2).accept_lens.item() >= 1
    with pytest.raises(ValueError, match=r"tree tokens\[0, 1\] is 9: .* 8 \(the last token of the vocabulary\)"):
        ops.verify_greedy(logits, line._replace(tokens=ids + 5), 2)
    with pytest.raises(ValueError, match=r"parents come first"):
        ops.verify_greedy(logits, line._replace(parents=ids), 2)
    with pytest.raises(ValueError, match=r"row index\[0, 2\] is 5: expected at least -1, at most 4"):
        ops.gather_rows(torch.zeros(1, 5, 2, device=device), ids)
    commit = ops.committer(KVPool([LayerShape(1, 8, 8)], 20, torch.float32, device))
    table, rows = torch.arange(1, 17, dtype=torch.int32, device=device).unsqueeze(0), torch.zeros_like(ids[0, :1])
    commit(table, rows, torch.tensor([4], device=device), ids)
    with pytest.raises(ValueError, match=r"accepted position\[0, 1\] is 16: .* 15 \(the last of the slot table\)"):
        commit(table, rows, torch.tensor([12], device=device), ids)
    with pytest.raises(ValueError, match=r"slot of the accepted path\[0, 0\] is 28: .* 19 \(the last slot of the pool"):
        commit(table + 20, rows, torch.tensor([4], device=device), ids)


def test_autocast_is_refused_by_name():
    model = tiny_model("llama")
    engine = specdec.attach(model, algo="lookup", max_seq_len=64)
    told = r"torch.autocast\(device_type='cpu', dtype=torch.bfloat16\) is on: .*model.to\(torch.bfloat16\)"
    with torch.autocast("cpu", torch.bfloat16):
        for call in (lambda: engine.generate([[5, 6]], max_new_tokens=4), lambda: engine.score([[5]], [[6]])):
            with pytest.raises(ValueError, match=told):
                call()
    engine.check_integrity()
    assert len(engine.generate([[5, 6]], max_new_tokens=4).tokens[0]) == 4
    engine.detach()
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=told):
        specdec.attach(model, algo="lookup", max_seq_len=64)


@pytest.mark.parametrize("name", ["llama", "gptj"])
def test_autocast_in_the_models_own_forward_is_refused_by_name(name):
    def wrapped(model):  # as Accelerate's mixed precision prepares a model, and so a Trainer with bf16=True
        model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
        return model

    told = r"its forward runs in torch.autocast\(dtype=torch.bfloat16\).* weights are torch.float32: .*model.to\("
    with pytest.raises(specdec.AttachError, match=told) as refused:
        specdec.attach(wrapped(tiny_model(name)), algo="lookup", max_seq_len=64)
    assert len(refused.value.reasons) == 1
    model = wrapped(tiny_model(name).to(torch.bfloat16))  # the fix that the message names
    specdec.attach(model, algo="lookup", max_seq_len=64).detach()
