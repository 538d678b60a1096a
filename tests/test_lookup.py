"""Prompt lookup: the op against a search in Python, and the drafter without a model in the whole engine."""

import math
import random

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import specdec
from specdec.core.functional.torch_ops import TORCH_OPS, pick_ops
from tests.heads import random_draft, random_head
from tests.laws import assert_own_law
from tests.test_attach import greedy, ragged_prompts
from tests.tiny_models import DEVICE, tiny_model

FEW = settings(max_examples=40, deadline=None, derandomize=True)
GRAPHS = {
    "eager": {"cuda_graph": False},
    "graphs": {"cuda_graph": True, "prefill_graph": "breakable", "strict": True, "graph_sampling": "greedy"},
    "apart": {"cuda_graph": True, "prefill_graph": "off", "graph_sampling": "greedy"},
}


def search(text, num_tokens, max_ngram):
    """Return the tokens after the longest match, of several the latest, repeated periodically, and its length."""
    for n in range(min(max_ngram, len(text) - 1), 0, -1):
        for end in range(len(text) - 2, n - 2, -1):
            if text[end - n + 1 : end + 1] == text[len(text) - n :]:
                period = len(text) - 1 - end
                return [text[end + 1 + i % period] for i in range(num_tokens)], n
    return [text[-1]] * num_tokens, 0


def all_ops():
    pytest.importorskip("triton")
    from specdec.backends.triton.backend import TritonBackend

    return TORCH_OPS, pick_ops(TritonBackend.capabilities)


@FEW
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=4), st.integers(1, 7))
def test_the_op_finds_what_a_search_finds(texts, num_tokens):
    width = 40
    history = torch.full((6, width), 9, dtype=torch.int32)
    rows = torch.randperm(6, generator=torch.Generator().manual_seed(len(texts)))[: len(texts)]
    for row, text in zip(rows.tolist(), texts, strict=True):
        history[row, : len(text)] = torch.tensor(text, dtype=torch.int32)
    ends = torch.tensor([len(t) - 1 for t in texts])
    expected = [search(t, num_tokens, 4) for t in texts]
    for ops in all_ops():
        found, lengths = ops.look_up(history.to(DEVICE), rows.to(DEVICE), ends.to(DEVICE), num_tokens, 4)
        assert found.dtype == lengths.dtype == torch.int64, ops.name
        assert list(zip(found.tolist(), lengths.tolist(), strict=True)) == expected, ops.name


def test_long_texts_are_searched_to_their_end():
    generator = torch.Generator().manual_seed(0)
    history = torch.randint(0, 50, (3, 5000), generator=generator, dtype=torch.int32)
    history[1, 3000:3006] = history[1, 4000:4006] = torch.tensor([60, 61, 62, 63, 64, 65], dtype=torch.int32)
    history[1, 4500:4504] = torch.tensor([60, 61, 62, 63], dtype=torch.int32)
    history[1, 4001 + 3] = 70
    rows, ends = torch.tensor([1, 0]), torch.tensor([4503, 4999])
    expected = [
        search(history[r, : e + 1].tolist(), 3, 4)[0] for r, e in zip(rows.tolist(), ends.tolist(), strict=True)
    ]
    assert expected[0][0] == 70  # the latest of the two
    for ops in all_ops():
        assert ops.look_up(history.to(DEVICE), rows.to(DEVICE), ends.to(DEVICE), 3, 4)[0].tolist() == expected


def looked_up(model, **settings):
    return specdec.attach(model, algo="lookup", **{"max_batch": 3, "max_seq_len": 160, "num_steps": 4, **settings})


@pytest.mark.parametrize("graphs", GRAPHS)
def test_greedy_text_is_that_of_generate(graphs):
    """Ragged requests, more than rows, prompts in chunks; drafts come from the request's own history."""
    model, prompts = tiny_model("llama").to(DEVICE), ragged_prompts()
    expected = [greedy(model, p, 40) for p in prompts]
    engine = looked_up(model, max_prefill_tokens=16, **GRAPHS[graphs])
    out = engine.generate(prompts, max_new_tokens=40)
    engine.check_integrity()
    assert out.tokens == expected
    report = engine.report()
    assert report.draft == {"algo": "lookup", "max_ngram": 4}
    replayed = {name: counts["replays"] > 0 for name, counts in report.runners.items()}
    assert all(has == (graphs != "eager") for name, has in replayed.items() if "prefill" not in name), replayed
    assert out.stats.tau > 1.2, "tiny models repeat themselves: some drafts must be accepted"
    again = engine.generate(prompts[::-1], max_new_tokens=40)  # rows are reused
    assert again.tokens == expected[::-1]
    engine.detach()


def test_drafts_follow_the_history_of_each_row():
    model, prompts = tiny_model("llama").to(DEVICE), ragged_prompts()[:3]
    engine = looked_up(model, cuda_graph=False)
    core = engine._core
    requests = engine.submit(prompts, max_new_tokens=30, ignore_eos=True)
    for _ in range(6):
        engine.step()
    core.delivery.read(0)  # results that the host has not read yet
    batch = core.round.batch("greedy", torch.tensor([r.row for r in requests], device=DEVICE), 160)
    drafts = core.round.worker.draft(batch).tree.tokens
    for request, history, nodes in zip(requests, core.state.history[batch.rows].tolist(), drafts, strict=True):
        text = [*request.prompt_ids, *request.tokens]
        assert history[: len(text)] == text
        assert nodes.tolist() == [text[-1], *search(text, 4, 4)[0]]
    engine.abandon(requests)
    engine.check_integrity()
    engine.detach()


def test_sampled_text_follows_the_targets_law():
    """Chi-square test over 1000 seeds of the second token, drafted and verified, given the first."""
    model, prompt = tiny_model("llama").to(DEVICE), [5, 6, 7, 5, 6, 7, 5, 6]
    engine = looked_up(model, num_steps=1, max_batch=250, max_seq_len=32)
    assert_own_law(engine, model, prompt, num_tokens=3)
    engine.detach()


def merged(tokens, scores, parents, found, length):
    """Return one request's candidates after `merge`, with their scores, computed in plain Python."""
    paths = [((t,) if p < 0 else None) for t, p in zip(tokens, parents, strict=True)]
    for i, p in enumerate(parents):
        paths[i] = (tokens[i],) if p < 0 else (*paths[p], tokens[i])
    used = [(path, score) for path, score in zip(paths, scores, strict=True) if score > -math.inf]
    best, above, law = dict(used), math.inf, 0.0
    for m in range(len(found)):
        law += math.log((length + m + 0.5) / (length + m + 3.5)) if length else -math.inf
        path, least = tuple(found[: m + 1]), min(above, law)
        best[path] = max(best.get(path, -math.inf), least)
        above = best[path]
    return {path: score for path, score in best.items() if score > -math.inf}


@settings(FEW, max_examples=15, phases=[Phase.generate])
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 40), st.integers(1, 6))
def test_trees_take_what_was_found(seed, bs, num, num_found):
    rng, rows = random.Random(seed), []
    for _ in range(bs):
        row = []  # (token, score, parent), siblings distinct, scores falling
        while len(row) < num:
            parent = rng.randrange(-1, len(row))
            taken = {t for t, _, p in row if p == parent}
            token = next(t for t in range(99) if t not in taken and (rng.random() < 0.6 or t > 90))
            row.append((token, (row[parent][1] if parent >= 0 else 0.0) - rng.random(), parent))
        rows.append([*zip(*row, strict=True)])
    tokens, scores, parents = (torch.tensor([row[i] for row in rows], device=DEVICE) for i in range(3))
    found = torch.tensor([[rng.randrange(3) for _ in range(num_found)] for _ in rows], device=DEVICE)
    lengths = torch.tensor([rng.choice([0, 1, 2, 16]) for _ in rows], device=DEVICE)
    for ops in all_ops():
        made = [t.tolist() for t in ops.merge(tokens, scores, parents, found, lengths)]
        for i, (token, score, parent) in enumerate(zip(*made, strict=True)):
            got = merged(token, score, parent, [], 0)
            expected = merged(*rows[i], found[i].tolist(), int(lengths[i]))
            assert got.keys() == expected.keys() and got == pytest.approx(expected, abs=1e-5), ops.name
            assert all(p < 0 or (p < n and score[n] <= score[p]) for n, p in enumerate(parent))


@pytest.mark.parametrize("graphs", ["eager", "graphs"])
@pytest.mark.parametrize("algo", ["eagle3", "block"])
def test_trees_hold_what_the_text_suggests(algo, graphs):
    """A random draft accepts more with lookup, in a model that repeats itself."""
    model, prompts, taus = tiny_model("llama").to(DEVICE), ragged_prompts(), []
    expected = [greedy(model, p, 40) for p in prompts]
    shape = {"num_steps": 4, "topk": 2, "num_draft_tokens": 9, "max_batch": 3, "max_seq_len": 160}
    for lookup in (False, True):
        draft = random_draft(model, algo).to(DEVICE)
        with specdec.attach(model, draft, lookup=lookup, **shape, **GRAPHS[graphs]) as engine:
            out = engine.generate(prompts, max_new_tokens=40)
            assert out.tokens == expected
            taus.append(out.stats.tau)
    assert taus[1] > 1.2 * taus[0], taus


def test_what_lookup_does_not_take():
    model = tiny_model("llama")
    with pytest.raises(ValueError, match=r"topk=2: algo='lookup' drafts chains; leave topk out"):
        looked_up(model, topk=2)
    with pytest.raises(ValueError, match="drafts without a model, but a draft was given"):
        specdec.attach(model, random_head(model), algo="lookup")
    with pytest.raises(ValueError, match="lookup=True with topk=1: chains hold no second draft"):
        specdec.attach(model, random_head(model), lookup=True)
    assert specdec.attach(model).report().draft == {"algo": None}
