"""Verification against a naive recursion; the law of emitted tokens against the target's, with controls that fail."""

import math
import random
from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from specdec.core.functional import spine
from specdec.core.functional import tree as tree_of
from specdec.core.functional.sampling import SamplingBatch, SamplingParams, process_logits, sample, uniform
from specdec.core.functional.tree import Frontier, Tree, build, chain
from specdec.core.functional.verify import VerifyOutput, trim, verify_chain, verify_greedy, verify_spine, verify_tree
from tests.test_tree import grow

VOCAB_SIZE = 7
BELOW_ONE = 1.0 - 2.0**-53


def assert_same(got: VerifyOutput, expected: VerifyOutput) -> None:
    for field, a, b in zip(VerifyOutput._fields, got, expected, strict=True):
        assert a.tolist() == b.tolist(), field


def random_tree(rng: random.Random, bs: int, num_nodes: int) -> Tree:
    """Return random trees. Siblings are distinct, as `Tree` promises; verification reads no ancestor bits."""
    rows = []
    for _ in range(bs):
        row = [(rng.randrange(VOCAB_SIZE), 0, 0)]
        while len(row) < num_nodes:
            parent, token = rng.randrange(len(row)), rng.randrange(VOCAB_SIZE)
            if (token, parent) not in {(t, p) for t, p, _ in row[1:]}:
                row.append((token, parent, row[parent][2] + 1))
        rows.append(row)
    tokens, parents, depths = torch.tensor(rows).permute(2, 0, 1).contiguous()
    return Tree(tokens, parents, depths, torch.zeros_like(tokens))


def agreeable_logits(rng: random.Random, tree: Tree) -> Tensor:
    """Random logits whose argmax is often a child's token, so that accepted paths get long. [bs, D, V]."""
    bs, num_nodes = tree.tokens.shape
    logits = torch.rand(bs, num_nodes, VOCAB_SIZE, generator=torch.Generator().manual_seed(rng.randrange(2**31)))
    for row in range(bs):
        for node in range(1, num_nodes):
            if rng.random() < 0.7:
                logits[row, tree.parents[row, node], tree.tokens[row, node]] += 1
    return logits


def naive_walk(tree: Tree, logits: Tensor, row: int, node: int = 0) -> tuple[list[int], int]:
    """Return (nodes from `node` down, bonus token) by recursion."""
    target = int(logits[row, node].argmax())
    for child in range(1, tree.tokens.shape[1]):
        if tree.parents[row, child] == node and tree.tokens[row, child] == target:
            path, bonus = naive_walk(tree, logits, row, child)
            return [node, *path], bonus
    return [node], target


def naive_output(tree: Tree, logits: Tensor, num_steps: int) -> VerifyOutput:
    index, tokens = [], []
    for row in range(tree.tokens.shape[0]):
        path, bonus = naive_walk(tree, logits, row)
        pad = [-1] * (num_steps + 1 - len(path))
        index.append(path + pad)
        tokens.append([int(tree.tokens[row, node]) for node in path[1:]] + [bonus] + pad)
    accept_index = torch.tensor(index)
    invalid = torch.zeros(len(index), dtype=torch.bool)
    return VerifyOutput(accept_index, (accept_index >= 0).sum(1), torch.tensor(tokens), invalid)


def one_hot_law(logits: Tensor) -> Tensor:
    return process_logits(logits, SamplingBatch.stack([SamplingParams()] * logits.shape[0], "cpu"))


# --- greedy, and sampling at temperature 0


@settings(max_examples=80, deadline=None)
@given(bs=st.integers(1, 4), num_nodes=st.integers(1, 24), seed=st.integers(0, 9999))
def test_greedy_walk_equals_the_recursion(bs: int, num_nodes: int, seed: int) -> None:
    rng = random.Random(seed)
    tree = random_tree(rng, bs, num_nodes)
    logits = agreeable_logits(rng, tree)
    num_steps = max(1, int(tree.depths.max()))
    expected = naive_output(tree, logits, num_steps)
    assert_same(verify_greedy(logits, tree, num_steps), expected)
    for u in (0.0, 0.5, BELOW_ONE):
        uniforms = torch.full((bs, num_nodes), u, dtype=torch.float64)
        assert_same(verify_tree(one_hot_law(logits), tree, num_steps, uniforms), expected)


@settings(max_examples=40, deadline=None)
@given(bs=st.integers(1, 4), num_steps=st.integers(0, 6), seed=st.integers(0, 9999))
def test_chain_of_one_hots_is_the_greedy_walk(bs: int, num_steps: int, seed: int) -> None:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB_SIZE, (bs, num_steps + 1), generator=generator)
    tree = chain(tokens[:, 0], tokens[:, 1:])
    logits = agreeable_logits(rng, tree)
    draft_probs = torch.nn.functional.one_hot(tree.tokens[:, 1:], VOCAB_SIZE).float()
    for u in (0.0, 0.5, BELOW_ONE):
        uniforms = torch.full((bs, num_steps + 1), u, dtype=torch.float64)
        expected = naive_output(tree, logits, num_steps)
        assert_same(verify_chain(one_hot_law(logits), draft_probs, tree, uniforms), expected)


# --- the law of emitted tokens
#
# The target is a Markov chain: its law after a node depends only on the node's token, so that the joint law of the
# first tokens is known. Rounds are repeated until every request has emitted three.

NUM_REQUESTS, NUM_TOKENS, FIRST_ROOT = 60_000, 3, 3
DRAFT_STREAM = 64  # verification uses the streams below

Round = Callable[[Tensor, Tensor], VerifyOutput]  # (root [bs], uniforms [bs, 2 * DRAFT_STREAM]) -> verified

TARGETS = {
    "plain": SamplingParams(temperature=1.0),
    "peaked": SamplingParams(temperature=0.3),
    "flat, top-k": SamplingParams(temperature=1.8, top_k=3),
    "top-p": SamplingParams(temperature=1.2, top_p=0.8),
    "all filters": SamplingParams(temperature=0.8, top_k=5, top_p=0.95, min_p=0.1),
}


@cache
def target_law(name: str) -> Tensor:
    """Return the target's law [V, V], row: last token."""
    logits = torch.randn(1, VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(11)) * 1.5
    return process_logits(logits, SamplingBatch.stack([TARGETS[name]], "cpu"))[0]


@cache
def draft_law() -> Tensor:
    """Return a law like the plain target's, with noise. [V, V]."""
    noise = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(12))
    return (target_law("plain").log() + noise).softmax(-1)


def chain_round(law: Tensor, num_steps: int) -> Round:
    def run(root: Tensor, uniforms: Tensor) -> VerifyOutput:
        drafts, draft_probs, last = [], [], root
        for step in range(num_steps):
            draft_probs.append(draft_law()[last])
            last = sample(draft_probs[-1], uniforms[:, DRAFT_STREAM + step])
            drafts.append(last)
        tree = chain(root, torch.stack(drafts, dim=1))
        return verify_chain(law[tree.tokens], torch.stack(draft_probs, dim=1), tree, uniforms[:, : num_steps + 1])

    return run


def tree_round(law: Tensor, num_steps: int, topk: int, num_draft_tokens: int) -> Round:
    def run(root: Tensor, uniforms: Tensor) -> VerifyOutput:
        candidates = grow(root, draft_law().log(), num_steps, topk)
        tree = build(root, *candidates, num_draft_tokens=num_draft_tokens, num_steps=num_steps)
        return verify_tree(law[tree.tokens], tree, num_steps, uniforms[:, :num_draft_tokens])

    return run


def spine_round(law: Tensor, num_steps: int, topk: int, num_draft_tokens: int) -> Round:
    """A drawn path, its siblings, and children of those."""

    def children(last: Tensor, uniforms: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities and tokens [bs, n, K] after last [bs, n], the first child of the first node drawn."""
        best = draft_law()[last].log().topk(topk)
        drawn = sample(draft_law()[last[:, 0]], uniforms[:, DRAFT_STREAM + step])
        spine.put_first(drawn, best.indices[:, 0], best.values[:, 0], None)
        return best.values, best.indices, draft_law()[last[:, 0]]

    def run(root: Tensor, uniforms: Tensor) -> VerifyOutput:
        logs, ids, law_of_root = (t[:, 0] if t.dim() == 3 else t for t in children(root[:, None], uniforms, 0))
        names, laws = torch.arange(topk).expand_as(ids), [law_of_root]
        frontier = Frontier(ids, logs, names, names.new_zeros(*names.shape, 1))
        tokens, scores, parents, depths = [ids], [logs], [torch.full_like(ids, -1)], [1] * topk
        for step in range(1, num_steps):
            logs, ids, law_here = children(frontier.tokens, uniforms, step)
            laws.append(law_here)
            own_bits = names.new_zeros(topk, 1)
            first = len(depths)
            score, owner, frontier = tree_of.grow(logs, ids.flatten(1), frontier, own_bits, first, True)
            tokens.append(ids.flatten(1))
            scores.append(score)
            parents.append(owner)
            depths += [step + 1] * topk**2
        made = [torch.cat(t, 1) for t in (tokens, scores, parents)]
        made[1].masked_fill_(spine.firsts(torch.tensor(depths)), spine.KEPT)
        sizes = {"num_draft_tokens": num_draft_tokens, "num_steps": num_steps}
        tree = build(root, *made, torch.tensor(depths), **sizes)
        probs, used = law[tree.tokens], uniforms[:, :num_draft_tokens]
        return verify_spine(probs, torch.stack(laws, 1), tree, min(num_steps, num_draft_tokens - 1), used)

    return run


def bonus_from_the_whole_law(right: Round, law: Tensor) -> Round:
    """A classic mistake: after a rejection, draw from the target's law as if nothing had been rejected."""

    def run(root: Tensor, uniforms: Tensor) -> VerifyOutput:
        verified = right(root, uniforms)
        last = verified.accept_lens[:, None] - 1
        before = torch.cat([root[:, None], verified.tokens], dim=1).gather(1, last)[:, 0]
        bonus = sample(law[before], uniforms[:, 0])
        return verified._replace(tokens=verified.tokens.scatter(1, last, bonus[:, None]))

    return run


def one_uniform_for_all(right: Round, law: Tensor) -> Round:
    """Another one: the acceptance tests and the bonus share their random number."""
    return lambda root, uniforms: right(root, torch.cat([uniforms[:, :1].expand(-1, 64), uniforms[:, 64:]], dim=1))


def emit(run: Round) -> Tensor:
    """Return the first tokens of every request. [NUM_REQUESTS, NUM_TOKENS], int64."""
    seeds = torch.arange(NUM_REQUESTS)
    root = torch.full_like(seeds, FIRST_ROOT)
    emitted, num_emitted = torch.full((NUM_REQUESTS, 65), -1), torch.zeros_like(seeds)
    for counter in range(NUM_TOKENS):
        streams = torch.arange(DRAFT_STREAM + 8)
        verified = run(root, uniform(seeds, torch.full_like(seeds, counter), streams))
        columns = torch.arange(verified.tokens.shape[1])
        at = torch.where(verified.tokens >= 0, num_emitted[:, None] + columns, 64)  # the last column takes the padding
        emitted.scatter_(1, at, verified.tokens)
        num_emitted += verified.accept_lens
        root = emitted.gather(1, num_emitted[:, None] - 1)[:, 0]
    return emitted[:, :NUM_TOKENS]


def p_values(tokens: Tensor, law: Tensor) -> list[float]:
    """Chi-square p-values of the first token, the first two, … against the target; 0 if an impossible one occurs."""
    values, joint, cell = [], torch.ones(1, dtype=torch.float64), torch.zeros(tokens.shape[0], dtype=torch.int64)
    last = torch.tensor([FIRST_ROOT])  # last token of each cell of `joint`
    exact = law.double() / law.double().sum(-1, keepdim=True)
    for token in tokens.unbind(1):
        joint = (joint[:, None] * exact[last]).flatten()
        last = torch.arange(VOCAB_SIZE).repeat(last.numel())
        cell = cell * VOCAB_SIZE + token
        counts, expected = torch.bincount(cell, minlength=joint.numel()).double(), joint * tokens.shape[0]
        is_rare = expected < 5  # pooled: chi-square is an approximation
        rare_counts, rare_expected = counts[is_rare].sum(), expected[is_rare].sum()
        if (counts[expected == 0] > 0).any():
            values.append(0.0)
            continue
        counts, expected = counts[~is_rare], expected[~is_rare]
        if rare_expected >= 5:
            counts, expected = torch.cat([counts, rare_counts[None]]), torch.cat([expected, rare_expected[None]])
        expected = expected * (counts.sum() / expected.sum())
        values.append(float(stats.chisquare(counts.numpy(), expected.numpy()).pvalue))
    return values


def rounds(law: Tensor) -> dict[str, Round]:
    return {
        "chain 1": chain_round(law, 1),
        "chain 3": chain_round(law, 3),
        "tree 2x2": tree_round(law, num_steps=2, topk=2, num_draft_tokens=7),
        "tree 3x3": tree_round(law, num_steps=3, topk=3, num_draft_tokens=12),
        "spine 3x3": spine_round(law, num_steps=3, topk=3, num_draft_tokens=12),
        "spine 4x2 of 4": spine_round(law, num_steps=4, topk=2, num_draft_tokens=4),
    }


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("way", rounds(torch.empty(0)))
def test_what_is_emitted_has_the_law_of_the_target(way: str, target: str) -> None:
    law = target_law(target)
    values = p_values(emit(rounds(law)[way]), law)
    assert min(values) > 1e-3, values


@pytest.mark.parametrize("mistake", [bonus_from_the_whole_law, one_uniform_for_all])
@pytest.mark.parametrize("way", ["chain 3", "tree 3x3", "spine 3x3"])
def test_the_same_test_finds_mistakes(way: str, mistake: Callable[[Round, Tensor], Round]) -> None:
    law = target_law("plain")
    values = p_values(emit(mistake(rounds(law)[way], law)), law)
    assert max(values) < 1e-6, values


@pytest.mark.parametrize("way", rounds(torch.empty(0)))
def test_a_request_does_not_depend_on_its_batch(way: str) -> None:
    run = rounds(target_law("plain"))[way]
    seeds, counters = torch.arange(33), torch.arange(33) * 5
    root = seeds % VOCAB_SIZE
    batch = run(root, uniform(seeds, counters, torch.arange(72)))
    for rows in (torch.tensor([20]), torch.tensor([32, 0, 20])):
        part = run(root[rows], uniform(seeds[rows], counters[rows], torch.arange(72)))
        assert_same(part, VerifyOutput(*(field[rows] for field in batch)))


# --- the edges


@pytest.mark.parametrize("law", [(0.1, 0.2, 0.7), (0.3, 0.3, 0.4), (1 / 3, 1 / 3, 1 / 3), (1e-8, 0.5, 0.5)])
def test_rejecting_the_whole_support_still_emits_a_possible_token(law: tuple[float, ...]) -> None:
    """Children cover the support; rounding may reject even the last, which has probability 1 by then."""
    probs = torch.tensor([0.0, *law, 0.0]).expand(1, 4, 5)
    tree = Tree(*(torch.tensor([row]) for row in ([4, 1, 2, 3], [0, 0, 0, 0], [0, 1, 1, 1], [1, 3, 5, 9])))
    for u in (0.0, 0.999, BELOW_ONE, 1.0):
        uniforms = torch.full((1, 4), u, dtype=torch.float64)
        first = verify_tree(probs, tree, 1, uniforms).tokens[0, 0]
        assert first in (1, 2, 3)


def test_equal_laws_accept_everything() -> None:
    law = target_law("plain")
    tokens = torch.randint(VOCAB_SIZE, (9, 5), generator=torch.Generator().manual_seed(5))
    tree = chain(tokens[:, 0], tokens[:, 1:])
    uniforms = torch.full((9, 5), BELOW_ONE, dtype=torch.float64)
    verified = verify_chain(law[tree.tokens], law[tree.tokens[:, :-1]], tree, uniforms)
    assert verified.accept_lens.tolist() == [5] * 9
    assert torch.equal(verified.tokens[:, :4], tree.tokens[:, 1:])


@pytest.mark.parametrize("broken", [(math.nan, slice(None)), (math.inf, 5), (0.0, slice(None))])
def test_a_broken_draft_law_costs_its_drafts_only(broken: tuple[float, int | slice]) -> None:
    law = target_law("plain")
    tree = chain(torch.tensor([1, 1]), torch.tensor([[2, 3], [2, 3]]))
    draft_probs = law[tree.tokens[:, :-1]].clone()
    draft_probs[0, 1, broken[1]] = broken[0]
    uniforms = torch.full((2, 3), 0.25, dtype=torch.float64)
    verified = verify_chain(law[tree.tokens], draft_probs, tree, uniforms)
    assert verified.accept_lens.tolist() == [2, 3]
    assert not verified.invalid.any()
    assert verified.tokens[0].tolist() == [2, int(sample(law[2], uniforms[0, 0])), -1]


def verify_all_ways(logits: Tensor, probs: Tensor, tree: Tree) -> dict[str, VerifyOutput]:
    bs, num_nodes, _ = logits.shape
    uniforms = torch.full((bs, num_nodes), 0.5, dtype=torch.float64)
    draft_probs = torch.nn.functional.one_hot(tree.tokens[:, 1:], VOCAB_SIZE).float()
    return {
        "greedy": verify_greedy(logits, tree, num_nodes - 1),
        "tree": verify_tree(probs, tree, num_nodes - 1, uniforms),
        "chain": verify_chain(probs, draft_probs, tree, uniforms),
    }


@pytest.mark.parametrize("way", ["greedy", "tree", "chain"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_invalid_row_ends_alone(way: str, value: float) -> None:
    tree = chain(torch.tensor([1] * 4), torch.tensor([[2, 3, 4]] * 4))
    logits = torch.zeros(4, 4, VOCAB_SIZE)
    logits.scatter_(2, torch.tensor([2, 3, 0, 5]).expand(4, 4)[..., None], 50.0)  # accepts 2, 3; then needs 0, not 4
    logits[3, :, 6] = -math.inf  # a forbidden token is not an error
    clean = verify_all_ways(logits, logits.softmax(-1), tree)[way]
    assert clean.tokens.tolist() == [[2, 3, 0, -1]] * 4
    assert not clean.invalid.any()

    logits[0, 1, 6] = value  # on the path
    logits[1, 3, 6] = value  # below the rejected draft: never consulted
    logits[2, 0] = -math.inf  # no token is possible
    verified = verify_all_ways(logits, logits.softmax(-1), tree)[way]
    assert verified.invalid.tolist() == [True, False, True, False]
    assert verified.accept_lens[[0, 2]].tolist() == [2, 1]
    assert verified.accept_index[[0, 2]].tolist() == [[0, 1, -1, -1], [0, -1, -1, -1]]
    assert verified.tokens[[0, 2]].tolist() == [[2, 0, -1, -1], [0, -1, -1, -1]]
    for row in (1, 3):
        assert_same(VerifyOutput(*(field[row] for field in verified)), VerifyOutput(*(field[row] for field in clean)))


def test_a_law_without_mass_is_invalid() -> None:
    tree = chain(torch.tensor([1]), torch.tensor([[2]]))
    probs = torch.zeros(1, 2, VOCAB_SIZE)
    for way in ("tree", "chain"):
        verified = verify_all_ways(probs, probs, tree)[way]
        assert verified.invalid.tolist() == [True]
        assert verified.tokens.tolist() == [[0, -1]]


# --- trim


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(-1, 7), st.booleans()),
        min_size=1,
        max_size=4,
    ),
    stop_ids=st.lists(st.integers(-1, 4), max_size=3),
    is_shared=st.booleans(),
)
def test_trim_cuts_at_stop_tokens_and_length(
    rows: list[tuple[list[int], int, bool]], stop_ids: list[int], is_shared: bool
) -> None:
    padded = torch.tensor([tokens + [-1] * (5 - len(tokens)) for tokens, _, _ in rows])
    verified = VerifyOutput(
        accept_index=torch.where(padded >= 0, torch.arange(5) * 2, -1),
        accept_lens=torch.tensor([len(tokens) for tokens, _, _ in rows]),
        tokens=padded,
        invalid=torch.tensor([invalid for _, _, invalid in rows]),
    )
    stops = torch.tensor(stop_ids, dtype=torch.int64)
    stops = stops if is_shared else stops.repeat(len(rows), 1)
    trimmed, finished = trim(verified, stops, torch.tensor([remaining for _, remaining, _ in rows]))

    for row, (tokens, remaining, invalid) in enumerate(rows):
        kept: list[int] = []
        while len(kept) < min(len(tokens), remaining) and not (kept and kept[-1] in stop_ids):
            kept.append(tokens[len(kept)])
        pad = [-1] * (5 - len(kept))
        assert trimmed.tokens[row].tolist() == kept + pad
        assert trimmed.accept_index[row].tolist() == [0, 2, 4, 6, 8][: len(kept)] + pad
        assert trimmed.accept_lens[row] == len(kept)
        assert finished[row] == (invalid or len(kept) >= remaining or kept[-1] in stop_ids)
        assert trimmed.invalid[row] == (invalid and kept == tokens)


def test_trim_takes_stop_ids_by_request() -> None:
    tree = chain(torch.tensor([1, 1]), torch.tensor([[2, 3], [2, 3]]))
    logits = torch.nn.functional.one_hot(torch.tensor([[2, 3, 4]] * 2), VOCAB_SIZE).float()
    verified, finished = trim(verify_greedy(logits, tree, 2), torch.tensor([[2, -1], [4, -1]]), torch.tensor([9, 9]))
    assert verified.tokens.tolist() == [[2, -1, -1], [2, 3, 4]]
    assert finished.tolist() == [True, True]


def test_no_value_reaches_the_host() -> None:
    """Tensors on `meta` have no values: `.item()`, `if tensor` and data-dependent shapes would raise."""
    tokens = torch.empty(4, 4, dtype=torch.int64, device="meta")
    tree = chain(tokens[:, 0], tokens[:, 1:])
    logits = torch.empty(4, 4, VOCAB_SIZE, device="meta")
    uniforms = torch.empty(4, 4, dtype=torch.float64, device="meta")
    for verified in (
        verify_greedy(logits, tree, 3),
        verify_tree(logits, tree, 3, uniforms),
        verify_chain(logits, logits[:, 1:], tree, uniforms),
        verify_spine(logits, logits[:, 1:], tree, 3, uniforms),
    ):
        trimmed, _ = trim(verified, tree.tokens[0, :2], tree.tokens[:, 0])
        assert [tuple(field.shape) for field in trimmed] == [(4, 4), (4,), (4, 4), (4,)]
