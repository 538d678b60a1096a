"""Two ranks, over gloo or a GPU each: the text of one process, with every algorithm; failing ranks are named, and
nothing hangs."""

import itertools
import os
import signal
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.distributed import DistributedConfig

import specdec
from specdec.backends.comm import LOST, Communicator, agreed
from specdec.core.engine import ranks
from specdec.core.errors import GraphError
from specdec.core.round.state import EngineState
from specdec.graphs import FullCapture, RecordedCapture
from specdec.reach.heads.load import save_head
from tests.heads import ALGOS, random_draft
from tests.ranks import on_ranks, renew, save, told_file
from tests.tiny_models import tiny_model

PROMPTS = [[5, 9, 17, 3, 44, 8, 8, 101, 12, 13], [7, 30, 2, 90], [64, 3, 3, 21]]
SHAPES = {"chain": (3, 1, 4), "tree": (3, 3, 10)}
NUM_TOKENS = 8
LAWS = {"greedy": {}, "sampled": {"temperature": 0.8, "do_sample": True, "seed": 3}}
CASES = [*itertools.product((*ALGOS, "lookup"), SHAPES, LAWS), ("none", "chain", "greedy")]
CASES = [c for c in CASES if c[:2] != ("lookup", "tree")]
COMPARED = {("eagle3", "chain", "greedy"), ("eagle3", "tree", "greedy"), ("nextn", "chain", "greedy")}  # by others, too
SETTINGS = {"max_batch": 3, "max_seq_len": 64, "graph_sampling": ("greedy",)}


def engine_of(model, algo, shape="chain", **settings):
    """Attach to a model that may be sharded; drafts are made from a whole one, so that they are equal."""
    whole = tiny_model("llama")
    drafting = dict(zip(("num_steps", "topk", "num_draft_tokens"), SHAPES[shape], strict=True))
    draft = None if algo in ("none", "lookup") else random_draft(whole, algo).to(model.device)
    wanted = {"none": None}.get(algo, algo)
    return specdec.attach(model, draft, algo=wanted, **({} if algo == "none" else drafting), **SETTINGS, **settings)


def texts(model, cases):
    """Return the tokens of these cases; greedy trees run in graphs."""
    found = {}
    for algo, shape in dict.fromkeys((algo, shape) for algo, shape, _ in cases):
        engine = engine_of(model, algo, shape, cuda_graph=True if shape == "tree" else None)
        for law in [law for *case, law in cases if case == [algo, shape]]:
            found[algo, shape, law] = engine.generate(PROMPTS, max_new_tokens=NUM_TOKENS, **LAWS[law]).tokens
        engine.detach()
    return found


def sharded(path):
    config = DistributedConfig(tp_size=2)
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, distributed_config=config, dtype=torch.float32
    ).eval()


class Verdict(NamedTuple):
    """Values that ranks agree on: tensors [n, ...] of integers and bools."""

    numbers: torch.Tensor
    flags: torch.Tensor


def play(rank, folder, device, path, cases, is_whole, *faults):
    """Return the texts of cases; if `is_whole`, also all else that two ranks do together, and then the faults, each in
    a new group, since it leaves the group unusable."""
    found = {}
    ranks.BEAT_S = 0.2

    def note(**facts):
        found.update(facts)
        save(rank, folder, (True, found))

    model = sharded(path)
    shards = shards_of(model)
    note(texts=texts(model, cases))
    if not is_whole:
        return found
    note(parts=parts_of(model), files=from_files(model, Path(folder, f"head{rank}")))
    pairs = zip(shards, shards_of(model), strict=True)
    note(restored=all(kind is now and torch.equal(t, u) for (kind, t), (now, u) in pairs))
    note(**disagree(model, rank))
    note(replayed={graph: replayed(model, graph) for graph in ("piecewise", "whole")})
    note(prefixes=shares_prefixes(model, rank), preempted=preempts(model))
    note(capture=fails_to_capture(model, rank))
    note(uncompiled=fails_to_compile(model, rank))
    for fault in faults:
        renew(rank, folder, device)
        note(**suffer(rank, folder, device, path, fault))
    return found


def suffer(rank, folder, device, path, fault):
    """Return how a fault ends, and when; nothing for a rank that is killed."""
    if not Path(folder, str(rank)).exists():
        save(rank, folder, (True, {}))
    start = time.monotonic()
    told = error_of(lambda: FAULTS[fault](sharded(path), rank))
    if device == "cuda":
        torch.cuda.synchronize()  # nothing waits for the other rank
    return {fault: told, f"{fault}_s": time.monotonic() - start}


def error_of(call):
    with pytest.raises(Exception) as error:
        call()
    return f"{type(error.value).__name__}: {error.value}"


def shards_of(model):
    return [(type(p), getattr(p, "_local_tensor", p).detach().clone()) for p in model.parameters()]


def parts_of(model):
    """Return this rank's K/V heads, and whether drafts that copy rows of the output head get all of them."""
    engine = engine_of(model, "none")
    whole = tiny_model("llama").lm_head.weight
    shape = engine._core.target.shape
    is_part, rows = shape.lm_head.weight.shape[0] < len(whole), shape.lm_head_rows()
    num = engine._core.context.layers[0].num_kv_heads
    engine.detach()
    return num, is_part and torch.equal(rows.cpu(), whole)


def from_files(model, folder):
    """Tokens of a NextN layer read from files, and built from the classes of the sharded target; and whether it keeps
    the output head stored with it: the target's, or another."""
    whole = tiny_model("llama")
    save_head(folder, random_draft(whole, "nextn"), dtype=torch.float32)
    file, own = folder / "model.safetensors", []
    stored, name = load_file(file), "model.layers.4.shared_head.head.weight"
    for other in (0.0, 1.0):
        save_file(stored | {name: whole.lm_head.weight.detach() + other}, file)
        engine = specdec.attach(model, folder, num_steps=3, **SETTINGS)
        tokens = engine.generate(PROMPTS, max_new_tokens=NUM_TOKENS).tokens
        own.append(engine.draft_module.lm_head is not None)
        engine.detach()
    return tokens, own


def disagree(model, rank):
    """Default seeds, and results that differ by rank; other prompts and stops on one rank, after which both continue;
    other settings."""
    engine = engine_of(model, "eagle3")
    torch.manual_seed(rank)
    requests = engine.submit(PROMPTS, max_new_tokens=8, temperature=0.8, do_sample=True)
    while any(r.finish_reason is None for r in requests):
        engine.step()
    found = {"unseeded": [(r.sampling.seed, r.tokens) for r in requests]}
    own = Verdict(torch.full((2, 3), rank, device=model.device), torch.full((2,), bool(rank), device=model.device))
    found["agreed"] = [field.tolist() for field in agreed(engine._core.target.group, own)]
    found["prompts"] = error_of(lambda: engine.generate(PROMPTS[rank], max_new_tokens=4))
    found["stops"] = error_of(lambda: engine.generate(PROMPTS, max_new_tokens=4, stop_token_ids=[rank]))
    found["scores"] = error_of(lambda: engine.score([PROMPTS[rank]], [[5, 6]]))
    found["goes on"] = engine.generate(PROMPTS, max_new_tokens=4).tokens
    engine.detach()
    found["settings"] = error_of(lambda: specdec.attach(model, None, max_seq_len=64 + rank))
    return found


def replayed(model, prefill_graph):
    """Return tokens from graphs alone, eager runs, how layers ran, and the collectives of attach in order."""
    calls = []

    def noted(name):
        run = getattr(Communicator, name)

        def call(self, x):
            calls.append((name, tuple(x.shape)))
            return run(self, x)

        return mock.patch.object(Communicator, name, call)

    is_cuda = model.device.type == "cuda"
    settings = {"compile": is_cuda or prefill_graph == "piecewise"}  # tracing takes seconds on a CPU
    settings |= {"cuda_graph": True, "strict": True, "prefill_buckets": (16, 32)}
    settings |= {"compiler": "inductor" if is_cuda else "eager"}
    with noted("all_reduce"), noted("all_gather"), noted("broadcast"):
        engine = engine_of(model, "eagle3", "tree", prefill_graph=prefill_graph, **settings)
    tokens = engine.generate(PROMPTS, max_new_tokens=NUM_TOKENS).tokens
    report = engine.report()
    engine.detach()
    return tokens, sum(r["eager"] for r in report.runners.values()), report.compiled.split(" in ")[0], calls


def shares_prefixes(model, rank):
    """Tokens of prompts, and how many were found cached: first, again, after one rank has cleared, again, and after one
    has written a weight; also scores of two continuations of one prompt."""
    found = []
    with engine_of(model, "eagle3", prefix_cache=True) as engine:
        for _ in range(5):
            out = engine.generate(PROMPTS, max_new_tokens=NUM_TOKENS)
            found.append((out.tokens, [r.num_cached for r in out.requests]))
            if rank and len(found) == 2:
                engine.clear_prefix_cache()
            if rank and len(found) == 4:
                with torch.no_grad():
                    model.get_input_embeddings().weight.mul_(1)
        scores = engine.score([PROMPTS[0]] * 2, [[5, 6], [7, 8]])
        engine.check_integrity()
    return found, [score.logprob for score in scores]


def preempts(model):
    """Return tokens with few slots, which requests take as their texts grow, and what was prefilled again."""
    with mock.patch("specdec.core.engine.scheduler.GROWTH", 1), engine_of(model, "eagle3", num_slots=40) as engine:
        tokens = engine.generate(PROMPTS, max_new_tokens=NUM_TOKENS).tokens
        engine.check_integrity()
        return tokens, engine.report().preemption


def fails_to_capture(model, rank):
    """A graph that one rank cannot capture is used by none."""
    kind = FullCapture if model.device.type == "cuda" else RecordedCapture
    capture = kind.capture

    def broken(self, body):
        graph = capture(self, body)  # first: recorded captures run collectives
        if rank and body.keywords["rows"].shape[0] == 1:
            raise RuntimeError("out of memory")
        return graph

    with mock.patch.object(kind, "capture", broken), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = engine_of(model, "eagle3", cuda_graph=True, prefill_graph="off")
    tokens = engine.generate(PROMPTS, max_new_tokens=NUM_TOKENS).tokens
    captured = sorted(map(str, engine._core.graphs.runners["round"].captured))
    engine.detach()
    return tokens, captured


def fails_to_compile(model, rank):
    """Layers compiled on one rank only would make other graphs there."""

    def broken(*args, **options):
        raise GraphError("no graph")

    patched = mock.patch("specdec.graphs.compile.trace.trace", broken) if rank else nullcontext()
    with patched, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = engine_of(model, "eagle3", compile=True, compiler="eager", prefill_graph="off")
    tokens, told = engine.generate(PROMPTS, max_new_tokens=NUM_TOKENS).tokens, engine.report().compiled
    engine.detach()
    return told, tokens


def fails_in_a_step(model, rank):
    engine = engine_of(model, "eagle3")
    in_round(engine, 2, lambda: 1 / 0 if rank else None)
    engine.generate(PROMPTS, max_new_tokens=40, ignore_eos=True)


def in_round(engine, number, fn):
    """Call `fn` when round `number` is launched."""
    rounds, play = itertools.count(1), engine._core.graphs.play

    def launch(*args):
        if next(rounds) == number:
            fn()
        return play(*args)

    engine._core.graphs.play = launch


def fails_to_attach(model, rank):
    """Rank 1 has no memory for its tables; rank 0 continues to the first sum of the round's warm-up."""
    broken = MemoryError("none left") if rank else EngineState.empty
    with mock.patch.object(EngineState, "empty", side_effect=broken):
        engine_of(model, "eagle3", cuda_graph=True)


def is_killed(model, rank):
    """Rank 1 is killed in the middle of a call."""
    ranks.BEAT_S, ranks.LATE_S = 0.2, 2.0
    engine = engine_of(model, "eagle3")
    in_round(engine, 3, lambda: os.kill(os.getpid(), signal.SIGKILL) if rank else None)
    engine.generate(PROMPTS, max_new_tokens=40, ignore_eos=True)


FAULTS = {"step": fails_in_a_step, "attach": fails_to_attach, "killed": is_killed}  # the last one ends its process


@pytest.fixture(scope="module")
def selected(request):
    """Return the cases whose texts this run compares, and whether it runs other tests of this module."""
    own = [item for item in request.session.items if item.path == Path(__file__)]
    given = [getattr(item, "callspec", None) for item in own]
    cases = COMPARED.union(c.params["case"] for c in given if c and "case" in c.params)
    return [case for case in CASES if case in cases], any(not c or "case" not in c.params for c in given)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory, device, selected):
    """Return what both ranks found, and the exit codes of the last fault."""
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(path)
    if device == "cpu":
        faults = FAULTS if selected[1] else ()
        return on_ranks(play, tmp_path_factory.mktemp("ranks"), device, str(path), *selected, *faults)
    found, codes = on_ranks(play, tmp_path_factory.mktemp("ranks"), device, str(path), *selected)
    # separate processes: NCCL cannot always start again after an interruption
    for fault in FAULTS if selected[1] else ():
        folder = tmp_path_factory.mktemp("ranks")
        suffered, codes = on_ranks(suffer, folder, device, str(path), fault)
        if codes[0] == LOST:  # kernels were being loaded into a device that was waiting
            suffered[0][fault] = "RankError: " + told_file(0, folder).read_text()[-2000:]
        found = [{**f, **s} for f, s in zip(found, suffered, strict=True)]
    return found, codes


@pytest.fixture(scope="module")
def played(outcome):
    return outcome[0]


@pytest.fixture(scope="module")
def expected(device, selected):
    return texts(tiny_model("llama").to(device), selected[0])


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_ranks_write_what_one_process_writes(played, expected, case):
    assert played[0]["texts"][case] == played[1]["texts"][case] == expected[case]


def test_detach_gives_the_shards_back(played):
    assert [p["restored"] for p in played] == [True, True]


def test_each_rank_holds_its_own_heads_and_drafts_see_whole_rows(played):
    assert {p["parts"] for p in played} == {(tiny_model("llama").config.num_key_value_heads // 2, True)}


def test_a_nextn_layer_of_a_sharded_target_drafts_from_its_files(played, expected):
    for tokens, own in (p["files"] for p in played):
        assert tokens == expected["nextn", "chain", "greedy"] and own == [False, True]


def test_seeds_that_nobody_gave_are_shared(played):
    assert played[0]["unseeded"] == played[1]["unseeded"]


def test_ranks_take_the_verdict_of_rank_0(played):
    assert [p["agreed"] for p in played] == [[[[0] * 3] * 2, [False] * 2]] * 2


OTHERS = [("prompts", "generate()"), ("stops", "generate()"), ("settings", "attach()"), ("scores", "score()")]


@pytest.mark.parametrize(("what", "call"), OTHERS)
def test_other_arguments_are_refused_on_all_ranks(played, what, call):
    told = f"ValueError: {call}: rank 1 got arguments that differ from rank 0's; give all ranks the same"
    assert [p[what] for p in played] == [told, told]
    assert played[0]["goes on"] == played[1]["goes on"]


@pytest.mark.parametrize(
    ("where", "told"), [("step", "ZeroDivisionError: division by zero"), ("attach", "MemoryError: none left")]
)
def test_a_rank_that_fails_ends_the_others_with_its_words(played, where, told):
    ours, theirs = (p[where] for p in played)
    assert theirs == told and ours.startswith("RankError: ") and f"rank 1 failed: {told}" in ours


def test_layers_that_compile_on_one_rank_only_run_live_on_all(played, expected):
    (told, tokens), (theirs, _) = (p["uncompiled"] for p in played)
    assert (told, theirs) == ("not compiled: they fail on another rank", "not compiled: no graph")
    assert tokens == played[1]["uncompiled"][1] == expected["eagle3", "chain", "greedy"]


@pytest.mark.parametrize("graph", ["piecewise", "whole"])
def test_everything_replays_on_ranks_and_sums_come_in_one_order(played, expected, graph, device):
    """Compile, warm-up and capture run the same sums in the same order on all ranks: none waits for another."""
    (tokens, eager, compiled, sums), theirs = (p["replayed"][graph] for p in played)
    assert tokens == theirs[0] == expected["eagle3", "tree", "greedy"]
    is_live = graph == "whole" and device == "cpu"
    assert eager == theirs[1] == 0 and compiled == theirs[2] == (
        "not compiled: compile=False" if is_live else "compiled"
    )
    assert sums == theirs[3] and len(sums) > 50


def test_ranks_find_the_same_prefixes_and_forget_them_when_one_does(played, expected):
    (found, scores), theirs = (p["prefixes"] for p in played)
    assert found == theirs[0] and scores == theirs[1]
    assert [tokens for tokens, _ in found] == [expected["eagle3", "chain", "greedy"]] * 5
    none, all_of = [0, 0, 0], [9, 3, 3]
    assert [cached for _, cached in found] == [none, all_of, none, all_of, none]


def test_all_ranks_preempt_the_same_requests(played, expected):
    (tokens, told), theirs = (p["preempted"] for p in played)
    assert tokens == expected["eagle3", "chain", "greedy"] and told["preemptions"] > 0 and theirs == (tokens, told)


def test_a_graph_that_one_rank_cannot_make_is_used_by_none(played, expected):
    (tokens, captured), theirs = (p["capture"] for p in played)
    assert tokens == theirs[0] == expected["eagle3", "chain", "greedy"]
    assert captured == theirs[1] == ["round of 2 (greedy)", "round of 3 (greedy)"]


def test_a_rank_that_is_killed_is_named(outcome):
    (ours, _), codes = outcome
    assert codes == [0, -signal.SIGKILL]
    assert ours["killed"].startswith("RankError") and "rank 1 has sent no heartbeat" in ours["killed"]
    assert ours["killed_s"] < 20
