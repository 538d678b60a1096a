"""Recurrent models on two ranks, over gloo or a GPU each: the text and the logits of one process."""

import warnings
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import transformers
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

import specdec
from specdec.backends.comm import Communicator
from specdec.core.engine import ranks
from specdec.reach.parallel.mixer_ranks import FORMS, SharedMixers
from specdec.reach.parallel.sharded import find_group, plain
from specdec.reach.targets.adapters.experts import Experts
from specdec.reach.targets.adapters.mixers import Mixers
from tests import shape_ranks
from tests.heads import random_draft
from tests.ranks import on_ranks
from tests.recurrent_models import recurrent_model
from tests.state_tensors import pool_bytes
from tests.test_attach import ragged_prompts
from tests.test_tensor_parallel import error_of, shards_of

BY_HEADS = ("qwen3_next", "qwen3_5_moe")  # where HF's plan gathers, and heads can be split
WHOLE = ("kimi_linear", "one_key_head")  # where every rank runs whole recurrent layers
NAMES = (*BY_HEADS, *WHOLE)
MADE = {"one_key_head": ("qwen3_5", {"linear_num_key_heads": 1})}  # type and changes to its config, if not its name
PROMPTS = ragged_prompts()[:3]
SHAPES = {"chain": {"num_steps": 3}, "tree": {"num_steps": 3, "topk": 2, "num_draft_tokens": 6}}
SETTINGS = {"max_batch": 3, "max_seq_len": 64, "graph_sampling": ("greedy",), "prefill_graph": "off"}
RUNS = {name: [("eagle", "chain", {})] for name in WHOLE}
RUNS |= {name: [("eagle", "chain", {}), ("eagle", "tree", {"cuda_graph": True})] for name in BY_HEADS}
RUNS["qwen3_next"] += [("nextn", "chain", {}), ("the same model", "tree", {})]
ON_GPU = {"qwen3_next": [("eagle", "chain", {"cuda_graph": True, "compile": True})]}  # tracing takes a CPU too long
EVERY = {"qwen3_next": 9, "qwen3_5_moe": 9, "kimi_linear": 5, "one_key_head": 21}  # collectives per forward
SUMS = dict.fromkeys(NAMES, 1) | {"kimi_linear": 0, "one_key_head": 5}  # collectives per mixer


def whole_model(name):
    """Return a random model whose heads differ in every weight."""
    kind, changes = MADE.get(name, (name, {}))
    model = recurrent_model(kind, **changes)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn(parameter.shape) / 4)
    return model


def texts(model, name):
    """Return the tokens of every run, and the bytes of states; drafts come from a whole model, so they are equal."""
    found, whole, sizes = [], whole_model(name), set()
    for algo, shape, settings in RUNS[name] + (ON_GPU.get(name, []) if model.device.type == "cuda" else []):
        draft = whole_model(name) if algo == "the same model" else random_draft(whole, algo)
        engine = specdec.attach(model, draft.to(model.device), **{**SETTINGS, **SHAPES[shape], **settings})
        out = engine.generate(PROMPTS, max_new_tokens=8)
        found.append(out.tokens)
        engine.check_integrity()
        assert algo != "the same model" or out.stats.tau > 2, "drafts are accepted, and folded into the states"
        report = engine.report()
        assert "cuda_graph" not in settings or not report.runners["round"]["eager"]
        assert "compile" not in settings or report.compiled.startswith("compiled"), report.compiled
        sizes.add((shape, pool_bytes(engine._core.context.state_pool)))
        engine.detach()
    return {"texts": found, "bytes": sorted(sizes)}


@torch.no_grad()
def logits_of(model):
    ids = torch.arange(24, device=model.device).view(2, 12) * 5 + 3
    return model(input_ids=ids, use_cache=False).logits.cpu()


def play(rank, folder, device, paths):
    """Return what a rank finds for every model, and then for faults."""
    ranks.BEAT_S = 0.2
    found = {name: found_of(name, path) for name, path in paths.items()}
    model = sharded(paths["qwen3_5_moe"])
    found["miscut"] = {key: miscut(model, key, cut.dim) for key, cut in FORMS[1].items()}
    found["written"] = [error_of(lambda key=key: written(model, key)) for key in ("A_log", "in_proj_z.weight")]
    found["converted"] = converted(sharded(paths["qwen3_5_moe"]))
    if device == "cpu":
        found["shape"] = shape_ranks.found_of_shape()
        # last, as the group is unusable after it; on GPUs, processes may end with it: see test_tensor_parallel.py
        found["unshared"] = fails_to_share(model, rank)
    return found


def sharded(path):
    config = DistributedConfig(tp_size=2)
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(path, distributed_config=config, dtype=torch.float32).eval()


def found_of(name, path):
    model = sharded(path)
    shards, attributes, saved = shards_of(model), attributes_of(model), saved_of(model)
    with made_plain(model):
        found = {"logits": logits_of(model), "sums": sums_of(model), "saved": saved == saved_of(model)}
        found["collectives"] = collectives(lambda: logits_of(model))
    found |= texts(model, name)
    pairs = zip(shards, shards_of(model), strict=True)
    is_restored = all(kind is now and torch.equal(t, u) for (kind, t), (now, u) in pairs)
    return found | {"restored": is_restored and attributes == attributes_of(model)}


@contextmanager
def made_plain(model):
    """Within the context, make the model plain, as engines run it."""
    communicator = Communicator(find_group(model), model.device)
    parallelism = plain(model, communicator.name)
    try:
        with Experts(model).routed():
            yield
    finally:
        parallelism.restore()
        communicator.close()


def attributes_of(model):
    """Return plain attributes of mixers, and instance-level forwards."""
    counts = [[v for v in vars(mixer.module).values() if isinstance(v, int)] for mixer in Mixers(model).mixers]
    return counts, [vars(module).get("forward") for module in model.modules()]


def saved_of(model):
    """Return what a checkpoint would contain: names, types, shapes and sums."""
    state = {name: (t, t.to_local() if isinstance(t, DTensor) else t) for name, t in model.state_dict().items()}
    return {name: (type(t), t.shape, float(local.double().sum())) for name, (t, local) in state.items()}


def collectives(call):
    """Return the number of collectives in a call."""
    calls = []
    kinds = {kind: getattr(Communicator, kind) for kind in ("all_reduce", "all_gather")}
    noted = {kind: lambda self, x, run=run: calls.append(x) or run(self, x) for kind, run in kinds.items()}
    with mock.patch.multiple(Communicator, **noted), torch.no_grad():
        call()
    return len(calls)


def sums_of(model):
    """Return the number of collectives of each mixer."""
    x = torch.ones(1, 3, model.config.hidden_size, device=model.device)
    return [collectives(lambda mixer=mixer: mixer.module(x)) for mixer in Mixers(model).mixers]


def miscut(model, key, dim):
    """Return logits of a model with one weight assigned to wrong heads, the warnings, and collectives of mixers."""
    replace = SharedMixers.replace_weight

    def wrong(self, name, module, short, own):
        replace(self, name, module, short, own.flip(dim) if name.endswith(key) else own)

    with mock.patch.object(SharedMixers, "replace_weight", wrong), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with made_plain(model):
            return logits_of(model), [str(w.message) for w in told], sums_of(model)


def written(model, key):
    """Generate after a write to one of HF's weights."""
    weight = model.model.layers[2].linear_attn.get_parameter(key)
    engine = specdec.attach(model, None, **SETTINGS)
    with torch.no_grad():
        weight.mul_(1.0)
    try:
        engine.generate(PROMPTS, max_new_tokens=4)
    finally:
        engine.detach()


def converted(model):
    """Return the types of a mixer's weights after conversion and freezing, and whether their values are unchanged."""
    mixer = model.model.layers[2].linear_attn
    before = [local.double() for _, local in shards_of(mixer)]
    with made_plain(model):
        mixer.double().requires_grad_(False)
    kinds = {(p.dtype, p.requires_grad) for p in mixer.parameters()}
    return kinds, all(torch.equal(t, local) for t, (_, local) in zip(before, shards_of(mixer), strict=True))


def fails_to_share(model, rank):
    """Rank 1 has no memory for the fifth weight; return the error, and whether the model is unchanged."""
    before, calls, replace = attributes_of(model), [], SharedMixers.replace_weight

    def broken(self, *args):
        calls.append(args)
        if rank and len(calls) == 5:
            raise MemoryError("none left")
        replace(self, *args)

    with mock.patch.object(SharedMixers, "replace_weight", broken):
        told = error_of(lambda: specdec.attach(model, None, **SETTINGS))
    return told, before == attributes_of(model)


@pytest.fixture(scope="module")
def played(tmp_path_factory, device):
    """Return what each rank found."""
    paths = {name: str(tmp_path_factory.mktemp(name)) for name in NAMES}
    for name, path in paths.items():
        whole_model(name).save_pretrained(path)
    return on_ranks(play, tmp_path_factory.mktemp("ranks"), device, paths)[0]


@pytest.mark.parametrize("name", NAMES)
def test_ranks_write_what_one_process_writes(played, device, name):
    """Where heads are split, each rank has its heads' part of the states."""
    expected = texts(whole_model(name).to(device), name)
    for found in (p[name] for p in played):
        assert found["texts"] == expected["texts"]
        parts = [(shape, num_bytes // (2 if name in BY_HEADS else 1)) for shape, num_bytes in expected["bytes"]]
        assert found["bytes"] == parts


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_one_process(played, device, name):
    expected = logits_of(whole_model(name).to(device))
    assert expected.std() > 0.1  # so that the comparison means something
    for found in (p[name] for p in played):
        assert (found["logits"] - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert set(found["sums"]) == {SUMS[name]} and found["collectives"] == EVERY[name]


@pytest.mark.parametrize("name", NAMES)
def test_detach_gives_back_what_was_there(played, name):
    """A checkpoint saved meanwhile is complete, too."""
    assert [(p[name]["restored"], p[name]["saved"]) for p in played] == [(True, True)] * 2


@pytest.mark.parametrize("key", FORMS[1])
def test_what_is_cut_in_another_place_is_seen_and_runs_whole(played, device, key):
    expected = logits_of(whole_model("qwen3_5_moe").to(device))
    for logits, told, sums in (p["miscut"][key] for p in played):
        assert len(told) == 1 and "every rank runs all heads" in told[0]
        assert "model.layers.0.linear_attn, model.layers.2.linear_attn" in told[0]
        assert sums == [5, 5, 5]
        assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_weights_that_are_written_while_ranks_have_copies_are_named(played):
    for told in (p["written"] for p in played):
        for error, key in zip(told, ("A_log", "in_proj_z.weight"), strict=True):
            assert f"GraphError: the model has changed since attach(): model.layers.2.linear_attn.{key} (" in error
            assert "(written); 1 in all: each rank keeps the copy of its heads" in error


def test_mixers_that_were_converted_stay_converted(played):
    assert [p["converted"] for p in played] == [({(torch.float64, False)}, True)] * 2


def test_a_rank_that_cannot_share_ends_the_others(played, device):
    if device == "cuda":
        pytest.skip("on CPUs only")
    (ours, is_ours_whole), (theirs, is_theirs_whole) = (p["unshared"] for p in played)
    assert theirs == "MemoryError: none left" and "rank 1 failed: MemoryError: none left" in ours
    assert is_ours_whole and is_theirs_whole


def test_layers_of_a_shape_repeat_in_their_order_and_keep_weights_of_their_own(played, device):
    if device == "cuda":
        pytest.skip("on CPUs only")
    expected, num_bytes = shape_ranks.logits_of_one()
    for found in (p["shape"] for p in played):
        assert (found["logits"] - expected).abs().max() <= 1e-5 * expected.abs().max() and expected.std() > 0.01
        held, stored = found["bytes"]
        assert found["storages"] and held == stored < 0.6 * num_bytes, "nothing keeps the whole weights"
    assert played[0]["shape"]["drafts"] == played[1]["shape"]["drafts"]


@pytest.mark.parametrize("algo", shape_ranks.DRAFTS)
def test_latency_of_a_shape_that_ranks_share(played, device, algo):
    if device == "cuda":
        pytest.skip("on CPUs only")
    (rows,), others = (p["shape"]["rows"][algo] for p in played)
    assert not others, "the first rank alone prints"
    assert [row["what"] for row in rows] == ["attach", "ttft", "tpot"] * (2 if algo == "eagle3" else 1)
    assert {row["tp"] for row in rows} == {2}
    assert {row.get("algo") for row in rows if row["steps"]} == ({None} if algo == "eagle3" else {"nextn"})
    assert all(row["tau"] > 1 for row in rows if row["what"] == "tpot" and row["steps"])
