"""Recurrent models that two ranks share, over gloo or a GPU each: the text and the logits of one process."""

import pytest
import torch
import transformers
from transformers.distributed import DistributedConfig

import specdec
from tests.heads import random_draft
from tests.ranks import on_ranks
from tests.recurrent_models import recurrent_model
from tests.test_attach import ragged_prompts
from tests.test_tensor_parallel import shards_of

# Of recurrent layers, HF's plans gather what goes in and what comes out, or leave them whole.
NAMES = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "kimi_linear")
PROMPTS = ragged_prompts()[:3]
SHAPES = {"chain": {"num_steps": 3}, "tree": {"num_steps": 3, "topk": 2, "num_draft_tokens": 6, "cuda_graph": True}}
RUNS = {name: [("eagle", shape) for shape in SHAPES] for name in NAMES}
RUNS["qwen3_next"].append(("nextn", "chain"))
SETTINGS = {"max_batch": 3, "max_seq_len": 64, "graph_sampling": ("greedy",), "prefill_graph": "off"}


def whole_model(name):
    """A random model in which heads differ in every weight."""
    model = recurrent_model(name)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn(parameter.shape) / 4)
    return model


def texts(model, name):
    """The tokens of every run; drafts are made from a whole model, so that they are equal."""
    found, whole = {}, whole_model(name)
    for algo, shape in RUNS[name]:
        draft = random_draft(whole, algo).to(model.device)
        engine = specdec.attach(model, draft, **SETTINGS, **SHAPES[shape])
        found[algo, shape] = engine.generate(PROMPTS, max_new_tokens=8).tokens
        engine.check_integrity()
        engine.detach()
    return found


def play(rank, folder, device, paths):
    """What both ranks find of every model."""
    return {name: found_of(name, path) for name, path in paths.items()}


def found_of(name, path):
    config = DistributedConfig(tp_size=2)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(path, distributed_config=config, dtype=torch.float32).eval()
    shards = shards_of(model)
    found = {"texts": texts(model, name)}
    pairs = zip(shards, shards_of(model), strict=True)
    return found | {"restored": all(kind is now and torch.equal(t, u) for (kind, t), (now, u) in pairs)}


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    return request.param


@pytest.fixture(scope="module")
def played(tmp_path_factory, device):
    """What each rank found, by model."""
    paths = {name: str(tmp_path_factory.mktemp(name)) for name in NAMES}
    for name, path in paths.items():
        whole_model(name).save_pretrained(path)
    return on_ranks(play, tmp_path_factory.mktemp("ranks"), device, paths)[0]


@pytest.mark.parametrize("name", NAMES)
def test_ranks_write_what_one_process_writes(played, device, name):
    expected = texts(whole_model(name).to(device), name)
    assert len({tuple(map(tuple, tokens)) for tokens in expected.values()}) == 1, "greedy texts do not depend on drafts"
    assert played[0][name]["texts"] == played[1][name]["texts"] == expected


@pytest.mark.parametrize("name", NAMES)
def test_detach_gives_the_shards_back(played, name):
    assert [p[name]["restored"] for p in played] == [True, True]
