"""Two ranks over gloo: the text of one process, with every algorithm; who fails is named, and nothing hangs."""

import itertools
import os
import signal
import time
import warnings
from unittest import mock

import pytest
import torch
import transformers
from transformers.distributed import DistributedConfig

import specdec
from specdec.backends.comm import Communicator
from specdec.engine import ranks
from specdec.graphs import RecordedCapture
from specdec.round.state import EngineState
from tests.heads import ALGOS, random_draft
from tests.ranks import on_ranks
from tests.tiny_models import tiny_model

PROMPTS = [[5, 9, 17, 3, 44, 8, 8, 101, 12, 13], [7, 30, 2, 90], [64, 3, 3, 21]]
SHAPES = {"chain": (3, 1, 4), "tree": (3, 3, 10)}
NUM_TOKENS = 8
LAWS = {"greedy": {}, "sampled": {"temperature": 0.8, "do_sample": True, "seed": 3}}
CASES = [*itertools.product((*ALGOS, "lookup"), SHAPES, LAWS), ("none", "chain", "greedy")]
CASES = [c for c in CASES if c[:2] != ("lookup", "tree")]
SETTINGS = {"max_batch": 3, "max_seq_len": 64, "graph_sampling": ("greedy",)}


def engine_of(model, algo, shape="chain", **settings):
    """An engine on a model that may be sharded; drafts are made from a whole one, so that they are equal."""
    whole = tiny_model("llama")
    drafting = dict(zip(("num_steps", "topk", "num_draft_tokens"), SHAPES[shape], strict=True))
    draft = None if algo in ("none", "lookup") else random_draft(whole, algo)
    wanted = {"none": None}.get(algo, algo)
    return specdec.attach(model, draft, algo=wanted, **({} if algo == "none" else drafting), **SETTINGS, **settings)


def texts(model):
    """The tokens of every case, with graphs for some."""
    found = {}
    for algo, shape, law in CASES:
        engine = engine_of(model, algo, shape, cuda_graph=True if (shape, law) == ("tree", "greedy") else None)
        out = engine.generate(PROMPTS, max_new_tokens=NUM_TOKENS, **LAWS[law])
        found[algo, shape, law] = out.tokens
        engine.detach()
    return found


def sharded(path):
    config = DistributedConfig(tp_size=2)
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, distributed_config=config, dtype=torch.float32
    ).eval()


def play(rank, path):
    """Everything that two ranks do together without losing one."""
    model = sharded(path)
    before = {
        name: p.to_local().clone() if hasattr(p, "to_local") else p.clone() for name, p in model.named_parameters()
    }
    kinds = {name: type(p).__name__ for name, p in model.named_parameters()}
    found = {"texts": texts(model)}
    after = {name: p.to_local() if hasattr(p, "to_local") else p for name, p in model.named_parameters()}
    found["restored"] = all(torch.equal(before[n], after[n]) for n in before)
    found["restored"] &= kinds == {name: type(p).__name__ for name, p in model.named_parameters()}
    engine = engine_of(model, "eagle3")
    unseeded = engine.generate(PROMPTS, max_new_tokens=8, temperature=0.8, do_sample=True)
    found["unseeded"] = unseeded.tokens
    found["kv_heads"] = engine._core.context.layers[0].num_kv_heads
    with pytest.raises(ValueError) as error:
        engine.generate(PROMPTS[rank], max_new_tokens=4)
    found["mismatch"] = str(error.value)
    found["goes on"] = engine.generate(PROMPTS, max_new_tokens=4).tokens
    engine.detach()
    with pytest.raises(Exception) as error:
        specdec.attach(model, None, max_seq_len=64 + rank)
    found["attach"] = f"{type(error.value).__name__}: {error.value}"
    found["replayed"] = {graph: replayed(model, graph) for graph in ("piecewise", "whole")}
    found["capture"] = fails_to_capture(model, rank)
    engine = engine_of(model, "eagle3")
    if rank:
        engine._core.round.worker.draft = lambda batch: 1 / 0
    start = time.monotonic()
    with pytest.raises(Exception) as error:
        engine.generate(PROMPTS, max_new_tokens=8)
    found["step"] = f"{type(error.value).__name__}: {error.value}"
    found["step_s"] = time.monotonic() - start
    return found


def replayed(model, prefill_graph):
    """Tokens from graphs alone, of traced layers; what ran otherwise, and the sums of attach in their order."""
    calls, run = [], Communicator._run

    def noted(self, collective, *args, **options):
        calls.append((collective.__name__, [tuple(a.shape) for a in args]))
        run(self, collective, *args, **options)

    settings = {"compile": True, "compiler": "eager", "cuda_graph": True, "strict": True, "prefill_buckets": (16, 32)}
    with mock.patch.object(Communicator, "_run", noted):
        engine = engine_of(model, "eagle3", "tree", prefill_graph=prefill_graph, **settings)
    tokens = engine.generate(PROMPTS, max_new_tokens=NUM_TOKENS).tokens
    report = engine.report()
    engine.detach()
    return tokens, sum(r["eager"] for r in report.runners.values()), report.compiled.split(" in ")[0], calls


def fails_to_capture(model, rank):
    """A graph that one rank cannot make is used by none."""
    capture = RecordedCapture.capture

    def broken(self, body):
        graph = capture(self, body)  # first: recorded captures sum
        if rank and body.keywords["rows"].shape[0] == 1:
            raise RuntimeError("out of memory")
        return graph

    with mock.patch.object(RecordedCapture, "capture", broken), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = engine_of(model, "eagle3", cuda_graph=True, prefill_graph="off")
    tokens = engine.generate(PROMPTS, max_new_tokens=NUM_TOKENS).tokens
    captured = sorted(map(str, engine._core.graphs.runners["round"].captured))
    engine.detach()
    return tokens, captured


def fail_to_attach(rank, path):
    """Rank 1 has no memory for its tables; rank 0 goes on to the first sum of the round's warm-up."""
    model, empty = sharded(path), EngineState.empty
    broken = MemoryError("none left") if rank else empty
    with mock.patch.object(EngineState, "empty", side_effect=broken), pytest.raises(Exception) as error:
        engine_of(model, "eagle3", cuda_graph=True)
    return f"{type(error.value).__name__}: {error.value}"


def die(rank, path):
    """Rank 1 is killed in the middle of a call."""
    ranks.BEAT_S, ranks.LATE_S = 0.2, 2.0
    engine = engine_of(sharded(path), "eagle3")
    if rank:
        rounds, draft = [], engine._core.round.worker.draft

        def killed(batch):
            rounds.append(1)
            if len(rounds) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return draft(batch)

        engine._core.round.worker.draft = killed
    start = time.monotonic()
    with pytest.raises(specdec.RankError) as error:
        engine.generate(PROMPTS, max_new_tokens=40, ignore_eos=True)
    return str(error.value), time.monotonic() - start


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def played(saved, tmp_path_factory):
    return on_ranks(play, tmp_path_factory.mktemp("ranks"), str(saved))


@pytest.fixture(scope="module")
def expected():
    return texts(tiny_model("llama"))


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_ranks_write_what_one_process_writes(played, expected, case):
    assert played[0]["texts"][case] == played[1]["texts"][case] == expected[case]


def test_detach_gives_the_shards_back(played):
    assert [p["restored"] for p in played] == [True, True]


def test_each_rank_holds_its_own_heads(played):
    assert {p["kv_heads"] for p in played} == {tiny_model("llama").config.num_key_value_heads // 2}


def test_seeds_that_nobody_gave_are_shared(played):
    assert played[0]["unseeded"] == played[1]["unseeded"]


def test_other_arguments_are_refused_on_all_ranks(played):
    assert {p["mismatch"] for p in played} == {
        "generate(): rank 1 got other arguments than rank 0; give all ranks the same"
    }
    assert played[0]["goes on"] == played[1]["goes on"]
    assert {p["attach"] for p in played} == {
        "ValueError: attach(): rank 1 got other arguments than rank 0; give all ranks the same"
    }


def test_a_rank_that_fails_in_a_step_ends_the_others(played):
    assert played[1]["step"].startswith("ZeroDivisionError")
    assert (
        "RankError" in played[0]["step"] and "rank 1 failed: ZeroDivisionError: division by zero" in played[0]["step"]
    )
    assert max(p["step_s"] for p in played) < 10


@pytest.mark.parametrize("graph", ["piecewise", "whole"])
def test_everything_replays_on_ranks_and_sums_come_in_one_order(played, expected, graph):
    """Compile, warm-up and capture are the same sums in the same order on all ranks: none waits for another."""
    (tokens, eager, compiled, sums), theirs = (p["replayed"][graph] for p in played)
    assert tokens == theirs[0] == expected["eagle3", "tree", "greedy"]
    assert eager == theirs[1] == 0 and compiled == theirs[2] == "compiled"
    assert sums == theirs[3] and len(sums) > 50


def test_a_graph_that_one_rank_cannot_make_is_used_by_none(played, expected):
    (tokens, captured), theirs = (p["capture"] for p in played)
    assert tokens == theirs[0] == expected["eagle3", "chain", "greedy"]
    assert captured == theirs[1] == ["round of 2 (greedy)", "round of 3 (greedy)"]


def test_a_rank_that_fails_in_attach_ends_the_others(saved, tmp_path):
    ours, theirs = on_ranks(fail_to_attach, tmp_path, str(saved))
    assert theirs == "MemoryError: none left"
    assert ours == "RankError: a collective: rank 1 failed: MemoryError: none left"


def test_a_rank_that_is_killed_is_named(saved, tmp_path):
    told, code = on_ranks(die, tmp_path, str(saved))
    assert code == -signal.SIGKILL
    message, seconds = told
    assert "rank 1" in message and "no sign of life" in message and seconds < 20
