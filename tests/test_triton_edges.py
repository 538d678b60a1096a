"""Edge cases of the round's Triton kernels, against the torch functions that specify them.

`tests.test_triton_round` has the usual sizes of a round; here are the largest and smallest ones, trees of any form,
laws with all their mass in one place, borders of blocks, and rows beside a row of NaN.
"""

import math
import random

import pytest

pytest.importorskip("triton")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime import interpreter

from specdec.backends.triton.backend import TritonBackend
from specdec.backends.triton.round import walk
from specdec.core.cache.pool import KVPool, LayerShape
from specdec.core.functional import sampling, tree, verify
from specdec.core.functional.torch_ops import TORCH_OPS, pick_ops
from specdec.core.functional.tree import Tree
from tests.test_triton_round import generator, same, same_growth
from tests.test_verify import BELOW_ONE, VOCAB_SIZE, agreeable_logits, one_hot_law, random_tree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPS = pick_ops(TritonBackend.capabilities)
FEW = settings(max_examples=15, deadline=None, derandomize=True)
SEEDS = st.integers(0, 1 << 20)


def on_device(draft: Tree) -> Tree:
    return Tree(*(part.to(DEVICE) for part in draft))


def constant(value: float, *shape: int) -> torch.Tensor:
    return torch.full(shape, value, dtype=torch.float64, device=DEVICE)


def line(num_nodes: int, bs: int) -> Tree:
    """The deepest tree: one path, node i carries token i."""
    nodes = torch.arange(num_nodes, device=DEVICE).repeat(bs, 1)
    return tree.chain(nodes[:, 0], nodes[:, 1:])


# --- growth and re-rank


@pytest.mark.skipif(DEVICE != "cuda", reason="9 s in the interpreter, which grows and builds smaller ones above")
@pytest.mark.parametrize("kind", ["random", "ties", "nan"])
def test_the_widest_tree_has_4160_candidates(kind):
    k, g = 64, generator(5)
    first, second = -torch.rand(1, k, generator=g), -torch.rand(1, k, k, generator=g)
    if kind == "ties":
        first, second = torch.zeros_like(first), (second * 2).round()
    elif kind != "random":
        second[torch.rand(second.shape, generator=g) < 0.5] = math.nan
        second[torch.rand(second.shape, generator=g) < 0.5] = -math.inf
    first, second = first.to(DEVICE), second.to(DEVICE)
    grown = same_growth(second, first, k, g)

    names = torch.arange(k, device=DEVICE).repeat(1, 1)
    tokens = torch.cat([names, names.repeat(1, k)], 1)
    parents = torch.cat([torch.full_like(names, -1), names.repeat_interleave(k, 1)], 1)
    depths = torch.tensor([1] * k + [2] * k * k, device=DEVICE)
    arguments = (names[:, 7], tokens, torch.cat([first, grown[0]], 1), parents, depths)
    shape = {"num_draft_tokens": 64, "num_steps": 2}
    same(OPS.build(*arguments, **shape), tree.build(*arguments, **shape))


@FEW
@given(SEEDS, st.integers(1, 5), st.integers(1, 8), st.integers(1, 8))
def test_growth_takes_parents_and_children_of_any_number(seed, bs, num_parents, num_children):
    g = generator(seed)
    log_probs = torch.randn(bs, num_parents, num_children, generator=g).round().to(DEVICE)  # some above 0: clamped
    scores = -torch.rand(bs, num_parents, generator=g).round().to(DEVICE)
    topk = 1 + seed % (num_parents * num_children)
    same_growth(log_probs, scores, topk, g)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_the_smallest_trees_equal_the_twin(width):
    ids, scores = torch.tensor([[5, 6], [7, 8]], device=DEVICE), torch.tensor([[-2.0, -1.0], [-1.0, -1.0]])
    arguments = (ids[:, 0].clone(), ids, scores.to(DEVICE), torch.full_like(ids, -1), torch.ones_like(ids[0]))
    shape = {"num_draft_tokens": width, "num_steps": 1}
    same(OPS.build(*arguments, **shape), tree.build(*arguments, **shape))


def test_a_request_of_nan_leaves_the_trees_beside_it_alone():
    log_probs = -torch.rand(3, 12, generator=generator(1)).cumsum(1).to(DEVICE)
    ids = torch.arange(12, device=DEVICE)
    parents = (ids - 1).repeat(3, 1)
    arguments = [ids[:3], ids.repeat(3, 1), log_probs, parents, ids + 1]
    shape = {"num_draft_tokens": 8, "num_steps": 12}
    healthy = OPS.build(*arguments, **shape)
    arguments[2] = log_probs.clone()
    arguments[2][1] = math.nan
    got = OPS.build(*arguments, **shape)
    same(got, tree.build(*arguments, **shape))
    for a, b in zip(got, healthy, strict=True):
        assert torch.equal(a[[0, 2]], b[[0, 2]])


# --- verification


@FEW
@given(SEEDS, st.integers(1, 5), st.integers(1, 64))
def test_walks_down_trees_of_any_form_equal_the_twins(seed, bs, num_nodes):
    rng = random.Random(seed)
    draft = random_tree(rng, bs, num_nodes)
    logits = agreeable_logits(rng, draft).to(DEVICE)
    draft, num_steps = on_device(draft), max(1, int(draft.depths.max()))
    same(OPS.verify_greedy(logits, draft, num_steps), verify.verify_greedy(logits, draft, num_steps))
    probs = (3 * logits).softmax(-1)
    u = torch.rand(bs, num_nodes, dtype=torch.float64, generator=generator(seed)).to(DEVICE)
    same(OPS.verify_tree(probs, draft, num_steps, u), verify.verify_tree(probs, draft, num_steps, u))


@FEW
@given(SEEDS, st.integers(1, 5), st.integers(1, 24), st.sampled_from([0.0, 0.5, BELOW_ONE]))
def test_walks_over_one_hot_laws_are_the_greedy_walk_whatever_the_numbers(seed, bs, num_nodes, u):
    rng = random.Random(seed)
    draft = random_tree(rng, bs, num_nodes)
    logits = agreeable_logits(rng, draft)
    draft, num_steps = on_device(draft), max(1, int(draft.depths.max()))
    greedy = OPS.verify_greedy(logits.to(DEVICE), draft, num_steps)
    same(OPS.verify_tree(one_hot_law(logits).to(DEVICE), draft, num_steps, constant(u, bs, num_nodes)), greedy)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 6])
def test_chains_of_one_hot_laws_are_the_greedy_walk(num_steps):
    g = generator(num_steps)
    tokens = torch.randint(VOCAB_SIZE, (5, num_steps + 1), generator=g)
    draft = tree.chain(tokens[:, 0], tokens[:, 1:])
    logits = agreeable_logits(random.Random(num_steps), draft)
    laws = torch.nn.functional.one_hot(tokens[:, 1:], VOCAB_SIZE).float().to(DEVICE)
    greedy = OPS.verify_greedy(logits.to(DEVICE), on_device(draft), num_steps)
    for u in (0.0, 0.5, BELOW_ONE):
        uniforms = constant(u, 5, num_steps + 1)
        same(OPS.verify_chain(one_hot_law(logits).to(DEVICE), laws, on_device(draft), uniforms), greedy)


@pytest.mark.parametrize("num_accepted", [0, 1, 62, 63])
def test_a_path_may_have_64_nodes(num_accepted):
    draft = line(64, 2)
    logits = torch.zeros(2, 64, 70, device=DEVICE)
    nodes = torch.arange(64, device=DEVICE)
    logits[:, nodes, torch.where(nodes < num_accepted, nodes + 1, 69)] = 1  # the next node's token, or the bonus
    probs = one_hot_law(logits.cpu()).to(DEVICE)
    laws = torch.nn.functional.one_hot(draft.tokens[:, 1:], 70).float()
    want = verify.verify_greedy(logits, draft, 63)
    assert want.accept_lens.tolist() == [num_accepted + 1] * 2 and want.tokens[0, num_accepted] == 69
    same(OPS.verify_greedy(logits, draft, 63), want)
    same(OPS.verify_tree(probs, draft, 63, constant(0.5, 2, 64)), want)
    same(OPS.verify_chain(probs, laws, draft, constant(0.5, 2, 64)), want)


@pytest.mark.parametrize("kind", ["greedy", "tree", "chain"])
@pytest.mark.parametrize(
    ("node", "bad"),
    [
        (node, bad)
        for i, node in enumerate((0, 1, 40, 63))
        for j, bad in enumerate((math.nan, math.inf))
        if DEVICE == "cuda" or i % 2 == j  # the interpreter is slow
    ],
)
def test_one_bad_number_on_the_longest_path_ends_its_request_alone(kind, node, bad):
    draft = line(64, 3)
    laws = torch.nn.functional.one_hot((draft.tokens + 1) % 64, 64).float()

    def decide(ops, values):
        if kind == "greedy":
            return ops.verify_greedy(values, draft, 63)
        if kind == "tree":
            return ops.verify_tree(values, draft, 63, constant(0.5, 3, 64))
        return ops.verify_chain(values, laws[:, :-1].contiguous(), draft, constant(0.5, 3, 64))

    healthy = decide(OPS, laws)
    assert healthy.accept_lens.tolist() == [64] * 3
    broken = laws.clone()
    broken[1, node, 5] = bad  # NaN's argmax is 5: the bonus must be cleared
    got = decide(OPS, broken)
    same(got, decide(TORCH_OPS, broken))
    assert got.invalid.tolist() == [False, True, False]
    assert got.accept_lens[1] == node + 1 and got.tokens[1, node] == 0 and got.tokens[1, node + 1 :].eq(-1).all()
    assert torch.equal(got.tokens[1, :node], draft.tokens[1, 1 : node + 1])
    for a, b in zip(got, healthy, strict=True):
        assert torch.equal(a[[0, 2]], b[[0, 2]])


def test_the_root_is_not_its_own_child():
    zeros = torch.zeros(1, 2, dtype=torch.int64, device=DEVICE)
    draft = Tree(torch.tensor([[4, 1]], device=DEVICE), zeros, zeros, zeros)
    probs = torch.nn.functional.one_hot(torch.full((1, 2), 4, device=DEVICE), 10).float()
    for got in (OPS.verify_greedy(probs, draft, 1), OPS.verify_tree(probs, draft, 1, constant(0.5, 1, 2))):
        assert got.accept_index.tolist() == [[0, -1]] and got.tokens.tolist() == [[4, -1]]


def test_a_law_without_mass_ends_its_request_alone():
    draft, probs = line(3, 3), torch.rand(3, 3, 10, generator=generator(6)).to(DEVICE)
    laws, uniforms = probs[:, :-1].contiguous(), constant(0.0, 3, 3)
    probs[1, 0] = 0
    got_tree, got_chain = OPS.verify_tree(probs, draft, 2, uniforms), OPS.verify_chain(probs, laws, draft, uniforms)
    same(got_tree, verify.verify_tree(probs, draft, 2, uniforms))
    same(got_chain, verify.verify_chain(probs, laws, draft, uniforms))
    assert got_tree.invalid.tolist() == got_chain.invalid.tolist() == [False, True, False]


def test_nan_beside_the_path_is_not_looked_at():
    tokens, parents = torch.tensor([[9, 1, 2]], device=DEVICE), torch.zeros(1, 3, dtype=torch.int64, device=DEVICE)
    draft = Tree(tokens, parents, parents, parents)
    probs = torch.nn.functional.one_hot(torch.tensor([[2, 0, 5]], device=DEVICE), 10).float()
    probs[0, 1] = math.nan
    for got, want in (
        (OPS.verify_greedy(probs, draft, 1), verify.verify_greedy(probs, draft, 1)),
        (
            OPS.verify_tree(probs, draft, 1, constant(0.5, 1, 3)),
            verify.verify_tree(probs, draft, 1, constant(0.5, 1, 3)),
        ),
    ):
        same(got, want)
        assert got.tokens.tolist() == [[2, 5]] and not got.invalid.any()


# --- verification of trees with a drawn path


def random_spine(rng: random.Random, bs: int, num_steps: int) -> Tree:
    """Return trees in which the first nodes of each depth form a drawn path; up to 3 more nodes per depth."""
    more, rows = [rng.randrange(4) for _ in range(num_steps)], []
    for _ in range(bs):
        row = [(rng.randrange(VOCAB_SIZE), 0, 0)]
        for depth, num in enumerate(more, 1):
            above = [node for node, (_, _, own) in enumerate(row) if own == depth - 1]
            for i in range(num + 1):
                parent = above[0] if i == 0 else rng.choice(above[: 1 + rng.randrange(len(above))])
                taken = {token for token, own, _ in row[1:] if own == parent}
                row.append((rng.choice(sorted(set(range(VOCAB_SIZE)) - taken)), parent, depth))
        rows.append(row)
    tokens, parents, depths = torch.tensor(rows).permute(2, 0, 1).contiguous()
    return Tree(tokens, parents, depths, torch.zeros_like(tokens))


def same_spine(probs, laws, draft, num_steps, uniforms):
    """Return the kernels' output, after a comparison with the twin's."""
    got = OPS.verify_spine(probs, laws, draft, num_steps, uniforms)
    same(got, verify.verify_spine(probs, laws, draft, num_steps, uniforms))
    return got


@settings(max_examples=40 if DEVICE == "cuda" else 8, deadline=None, derandomize=True)
@given(SEEDS, st.integers(1, 8), st.integers(1, 6), st.integers(0, 2), st.sampled_from([0.1, 1.0, 9.0]))
def test_walks_down_spines_equal_the_twin(seed, bs, num_steps, more_laws, apart):
    """Laws of any mass, more of them than steps, near and far from the target's; forbidden tokens, broken laws."""
    rng, g = random.Random(seed), generator(seed)
    draft = random_spine(rng, bs, num_steps)
    logits = agreeable_logits(rng, draft)
    near = logits[:, torch.arange(num_steps + more_laws).clamp(max=logits.shape[1] - 1)]
    laws = (2 * near + apart * torch.randn(near.shape, generator=g)).softmax(-1) * 3
    logits[torch.rand(logits.shape, generator=g) < 0.2] = -math.inf
    probs = (2 * logits).softmax(-1).nan_to_num(0.0)  # no mass where all tokens are forbidden
    if seed % 4 == 0:
        laws[0, 0] = (math.nan, math.inf, 0.0)[seed % 3]
        laws[-1, -1, 3] = math.nan
    uniforms = torch.rand(draft.tokens.shape, dtype=torch.float64, generator=g).to(DEVICE)
    same_spine(probs.to(DEVICE), laws.to(DEVICE), on_device(draft), num_steps, uniforms)


@pytest.mark.parametrize("num_accepted", [0, 1, 3, 4])
def test_a_spine_is_accepted_up_to_the_first_refusal(num_accepted):
    """Siblings have the law's residual mass; past the spine, there are point masses of the whole law."""
    nodes = [[0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 0, 1, 1, 3, 3, 5, 5], [0, 1, 1, 2, 2, 3, 3, 4, 4]]
    tokens, parents, depths = (torch.tensor([row] * 2, device=DEVICE) for row in nodes)
    draft = Tree(tokens, parents, depths, torch.zeros_like(tokens))
    spine, siblings = torch.tensor([1, 3, 5, 7], device=DEVICE), torch.tensor([2, 4, 6, 8], device=DEVICE)
    laws = torch.nn.functional.one_hot(spine, 5000).float().repeat(2, 1, 1)
    probs = torch.zeros(2, 9, 5000, device=DEVICE)
    probs[:, :, 4999] = 1
    for step, node in enumerate((0, 1, 3, 5)):
        probs[:, node] = 0
        probs[:, node, (spine if step < num_accepted else siblings)[step]] = 1
    got = same_spine(probs, laws, draft, 4, constant(0.5, 2, 9))
    path = [0, *spine[:num_accepted].tolist(), *siblings[num_accepted : num_accepted + 1].tolist()]
    assert got.accept_index[0].tolist() == path + [-1] * (5 - len(path))
    assert got.tokens[1].tolist() == [*path[1:], 4999] + [-1] * (5 - len(path))


@pytest.mark.parametrize("u", [0.3, BELOW_ONE])
def test_a_spine_whose_law_is_the_targets_draws_from_the_law_if_rounding_rejects(u):
    probs = torch.zeros(2, 3, 5000, device=DEVICE)
    probs[..., [3, 4500]] = 0.5
    zeros = torch.zeros(2, 3, dtype=torch.int64, device=DEVICE)
    tokens, depths = torch.tensor([[0, 3, 4500]] * 2, device=DEVICE), torch.tensor([[0, 1, 1]] * 2, device=DEVICE)
    uniforms = constant(1.0, 2, 3)
    uniforms[:, 0] = u
    got = same_spine(probs, probs[:, :1].contiguous(), Tree(tokens, zeros, depths, zeros), 1, uniforms)
    assert got.tokens[:, 0].tolist() == [3 if u < 0.5 else 4500] * 2


@pytest.mark.parametrize("covers", [False, True])
def test_siblings_that_are_all_that_is_left_may_be_refused_by_rounding_only(covers):
    """The residual is of tokens 2 and 3; uniforms of 1 reject everything, and the bonus is drawn from the residual."""
    tokens = torch.tensor([[0, 1, 2, 3 if covers else 4]], device=DEVICE)
    zeros, depths = torch.zeros_like(tokens), torch.tensor([[0, 1, 1, 1]], device=DEVICE)
    probs, laws = torch.zeros(1, 4, 10, device=DEVICE), torch.zeros(1, 1, 10, device=DEVICE)
    probs[..., 1:4], laws[..., 1] = torch.tensor([0.5, 0.25, 0.25], device=DEVICE), 1.0
    uniforms = constant(1.0, 1, 4)
    uniforms[:, 0] = 0.25
    got = same_spine(probs, laws, Tree(tokens, zeros, depths, zeros), 1, uniforms)
    assert got.accept_lens.tolist() == [1] and got.tokens[0, 0] == (2 if covers else 3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0])
@pytest.mark.parametrize("node", [0, 1, 2])
def test_a_broken_law_beside_a_spine_ends_its_request_alone(node, bad):
    draft = line(3, 3)
    probs = torch.nn.functional.one_hot((draft.tokens + 1) % 3, 5000).float()
    laws = 0.9 * probs[:, :-1] + 0.1 / 5000
    healthy = same_spine(probs, laws, draft, 2, constant(0.5, 3, 3))
    assert healthy.accept_lens.tolist() == [3] * 3
    probs[1, node, slice(None) if bad == 0 else 4] = bad
    got = same_spine(probs, laws, draft, 2, constant(0.5, 3, 3))
    assert got.invalid.tolist() == [False, True, False] and got.accept_lens[1] == node + 1
    for a, b in zip(got, healthy, strict=True):
        assert torch.equal(a[[0, 2]], b[[0, 2]])


# --- what is drawn after rejections


@pytest.mark.parametrize("num_children", [1, 2, 63])
@pytest.mark.parametrize("u", [0.0, 0.4, BELOW_ONE])
def test_a_tree_whose_children_are_all_of_the_law_draws_from_the_law(num_children, u):
    """Uniforms of 1 reject everything, as only rounding can; the residual then has no mass."""
    tokens = torch.arange(num_children + 1, device=DEVICE).repeat(2, 1)
    draft = Tree(tokens, torch.zeros_like(tokens), torch.zeros_like(tokens), torch.zeros_like(tokens))
    probs = torch.zeros(2, num_children + 1, 5000, device=DEVICE)
    probs[:, :, 1 : num_children + 1] = 1 / num_children
    uniforms = constant(1.0, 2, num_children + 1)
    uniforms[:, 0] = u
    got = OPS.verify_tree(probs, draft, 1, uniforms)
    same(got, verify.verify_tree(probs, draft, 1, uniforms))
    assert (got.accept_lens == 1).all() and ((got.tokens[:, 0] >= 1) & (got.tokens[:, 0] <= num_children)).all()


@pytest.mark.parametrize("u", [0.0, 0.3, BELOW_ONE])
def test_a_chain_whose_draft_is_the_target_draws_from_the_law_if_rounding_rejects(u):
    probs = torch.zeros(2, 2, 5000, device=DEVICE)
    probs[..., [3, 4500]] = 0.5
    draft = tree.chain(torch.tensor([0, 0], device=DEVICE), torch.tensor([[3], [4500]], device=DEVICE))
    uniforms = constant(1.0, 2, 2)
    uniforms[:, 0] = u
    got = OPS.verify_chain(probs, probs[:, :1].contiguous(), draft, uniforms)
    same(got, verify.verify_chain(probs, probs[:, :1], draft, uniforms))
    assert got.tokens[:, 0].tolist() == [3 if u < 0.5 else 4500] * 2


def scanned_in_parallel(values: torch.Tensor) -> torch.Tensor:
    """Return cumulative sums along the last dim in a GPU scan's order of sums, which differs between entries."""
    step = 1
    while step < values.shape[-1]:
        values = values + torch.nn.functional.pad(values, (step, 0))[..., : values.shape[-1]]
        step *= 2
    return values


def test_a_sum_that_rounds_past_the_laws_mass_accepts_no_impossible_token(monkeypatch):
    """The first three children carry the law; in a parallel scan their sum exceeds its mass at the fourth's turn, and
    u * residual, below 0, would be less than its probability, 0."""
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda values, *_, **__: scanned_in_parallel(values))
    if DEVICE == "cpu":
        scan = interpreter.ScanOps
        monkeypatch.setattr(
            scan,
            "cumsum",
            lambda own, x: [own.to_tensor(scanned_in_parallel(torch.from_numpy(x.handle.data)).numpy(), x.dtype)],
        )
    tiny = 1.2 * 2.0**-53
    probs = torch.tensor([1.0, 0, 0, 0, tiny, tiny], device=DEVICE).expand(1, 6, 6)
    root = torch.zeros(1, 6, dtype=torch.int64, device=DEVICE)
    draft = Tree(torch.tensor([[2, 0, 4, 5, 1, 3]], device=DEVICE), root, root, root)
    uniforms = torch.tensor([[0.5, BELOW_ONE, 0.9, 0.9, 0.5, 0.5]], dtype=torch.float64, device=DEVICE)
    for ops in (OPS, TORCH_OPS):
        got = ops.verify_tree(probs, draft, 1, uniforms)
        assert got.accept_lens.tolist() == [1] and got.tokens[0, 0] in (0, 4, 5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0])
def test_a_draft_law_that_is_none_is_rejected_and_the_target_draws(bad):
    probs = torch.rand(3, 4, 40, generator=generator(3)).to(DEVICE)  # mass is not 1: laws are renormalised
    laws = probs[:, :-1].clone()
    draft = tree.chain(torch.zeros(3, dtype=torch.int64, device=DEVICE), torch.full((3, 3), 7, device=DEVICE))
    uniforms = constant(0.25, 3, 4)
    healthy = OPS.verify_chain(probs, laws, draft, uniforms)
    laws[1, 1, 9 if bad else slice(None)] = bad
    got = OPS.verify_chain(probs, laws, draft, uniforms)
    same(got, verify.verify_chain(probs, laws, draft, uniforms))
    assert got.accept_lens.tolist() == [4, 2, 4] and not got.invalid.any()
    assert got.tokens[1, 1] == sampling.sample(probs[1, 1], uniforms[1, 0])
    for a, b in zip(got, healthy, strict=True):
        assert torch.equal(a[[0, 2]], b[[0, 2]])


@FEW
@given(SEEDS, st.integers(1, 5), st.integers(1, 6), st.sampled_from([6, 17000]))
def test_chains_of_laws_of_any_mass_equal_the_twin(seed, bs, num_steps, vocab):
    g = generator(seed)
    probs, laws = 5 * torch.rand(bs, num_steps + 1, vocab, generator=g), torch.rand(bs, num_steps, vocab, generator=g)
    probs[torch.rand(probs.shape, generator=g) < 0.3] = 0
    drafts = torch.randint(vocab, (bs, num_steps + 1), generator=g)
    uniforms = torch.rand(bs, num_steps + 1, dtype=torch.float64, generator=g).to(DEVICE)
    arguments = (probs.to(DEVICE), laws.to(DEVICE), on_device(tree.chain(drafts[:, 0], drafts[:, 1:])), uniforms)
    same(OPS.verify_chain(*arguments), verify.verify_chain(*arguments))


# --- numbers and draws


def test_random_numbers_wrap_as_the_twin_does():
    most = (1 << 63) - 1
    seeds, counters = torch.tensor([[0, most, -most - 1, -1], [most, -1, 0, 1 << 62]], device=DEVICE)
    for first, num in ((0, 64), (1, 1), (16, 3), (191, 1), ((1 << 31) - 80, 64)):
        assert torch.equal(OPS.uniforms(seeds, counters, first, num), TORCH_OPS.uniforms(seeds, counters, first, num))


@pytest.mark.parametrize("u", [0.0, 0.2, 0.5, 0.9, BELOW_ONE])
def test_rejected_tokens_of_any_block_are_not_drawn(u):
    """Three blocks of a vocabulary; the mass of the second, in half of the rows the third's, is on a rejected token."""
    probs, rejected = torch.rand(4, 1, 20000, generator=generator(3)), torch.tensor([7, 9000, 19999])
    probs[:, :, 8192:16384] = 0
    probs[1::2, :, 16384:] = 0
    probs[:, :, rejected] = 1.0
    zeros = torch.zeros(4, 4, dtype=torch.int64)
    tokens = torch.cat([torch.zeros(1, dtype=torch.int64), rejected]).repeat(4, 1)
    draft, uniforms = on_device(Tree(tokens, zeros, zeros, zeros)), constant(BELOW_ONE, 4, 4)
    uniforms[:, 0] = u
    laws = probs.expand(4, 4, -1).contiguous().to(DEVICE)
    got = OPS.verify_tree(laws, draft, 1, uniforms)
    same(got, verify.verify_tree(laws, draft, 1, uniforms))
    assert got.accept_lens.eq(1).all() and not torch.isin(got.tokens[:, 0].cpu(), rejected).any()


@pytest.mark.parametrize("vocab", [1, 2, 4097, 16383, 16384, 16385, 40000])
def test_all_mass_on_one_token_draws_it_wherever_it_stands(vocab):
    borders = (4095, 4096, 16383, 16384, 32768)
    places = sorted({0, vocab // 2, vocab - 1, *(p for p in borders if p < vocab)})
    probs = torch.nn.functional.one_hot(torch.tensor(places), vocab).float().to(DEVICE) * 1e-30
    for u in (0.0, 0.5, BELOW_ONE):
        assert OPS.sample(probs, constant(u, len(places))).tolist() == places


def test_draws_are_possible_and_nan_stays_in_its_row():
    probs = torch.rand(4, 40000, generator=generator(8)).to(DEVICE)
    u = constant(0.6, 4)
    healthy = OPS.sample(probs, u)
    assert torch.equal(healthy, sampling.sample(probs, u)) and (healthy > 20000).all()  # beyond the first block
    probs[1, 4:39998] = math.nan
    probs[2] = math.nan
    got = OPS.sample(probs, u)
    assert probs[1, got[1]] > 0 and got[2] == 0
    assert torch.equal(got[[0, 3]], healthy[[0, 3]])


# --- rows


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("h", [1, 1024, 1025])
def test_rows_are_gathered_through_any_stride(dtype, h):
    values = torch.randn(7, 5, h + 3, generator=generator(h)).to(DEVICE, dtype)
    index = torch.randint(-1, 5, (5, 6), generator=generator(h)).to(DEVICE)
    for source in (values[:5, :, :h], values[1:6, :, 3:], values.transpose(0, 1)[:, :5, :h]):
        assert torch.equal(OPS.gather_rows(source, index), TORCH_OPS.gather_rows(source, index))


def test_a_path_of_64_moves_in_layers_of_different_sizes_and_stops_at_the_table():
    width, g = 100, generator(2)
    table = 1 + torch.randperm(4 * width, generator=g, dtype=torch.int32).view(4, width).to(DEVICE)
    rows = torch.tensor([2, 3, 0], device=DEVICE)
    lens = torch.tensor([0, 36, 99], device=DEVICE)  # the last path runs past its row
    path = torch.full((3, 64), -1, device=DEVICE)
    path[0] = torch.arange(64, device=DEVICE)
    path[1, :33] = torch.tensor([0, *range(32, 64)], device=DEVICE)  # sources that are also targets
    path[2, :2] = torch.tensor([0, 3], device=DEVICE)
    shapes = [LayerShape(5, 128, 24), LayerShape(1, 8, 8)]
    pools = [KVPool(shapes, 4 * width + 1, torch.float32, torch.device(DEVICE)) for _ in range(2)]
    for one, other in zip((*pools[0].k, *pools[0].v), (*pools[1].k, *pools[1].v), strict=True):
        other.copy_(one.copy_(torch.randn(one.shape, generator=g)))
    OPS.committer(pools[0])(table, rows, lens, path)
    TORCH_OPS.committer(pools[1])(table, rows, lens, path)
    for got, want in zip((*pools[0].k, *pools[0].v), (*pools[1].k, *pools[1].v), strict=True):
        assert torch.equal(got, want)


def test_launchers_return_plain_tuples():
    draft = line(3, 1)
    assert type(walk.verify_greedy(torch.zeros(1, 3, 9, device=DEVICE), draft.tokens, draft.parents, 2)) is tuple
