"""The round's Triton kernels against the torch functions that specify them; interpreted without a GPU."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.core.cache.pool import KVPool, LayerShape
from specdec.core.functional import sampling, tree, verify
from specdec.core.functional.sampling import SamplingBatch, SamplingParams
from specdec.core.functional.torch_ops import TORCH_OPS, pick_ops
from specdec.core.functional.tree import Tree
from specdec.core.round.state import EngineState

pytest.importorskip("triton")
from specdec.backends.triton.backend import TritonBackend
from tests.early_starts import check_early_starts

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OPS = pick_ops(TritonBackend.capabilities)
FEW = settings(max_examples=25, deadline=None, derandomize=True)
SEEDS = st.integers(0, 1 << 20)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def same(got, want):
    assert type(got) is type(want)
    for name, a, b in zip(getattr(want, "_fields", range(len(want))), got, want, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), (name, a, b)


def grown_tree(seed, bs, k, num_steps, num_draft_tokens, ties=False):
    """Return a tree's candidates with random scores, as a worker makes them."""
    g = generator(seed)
    tokens = torch.stack([torch.randperm(50, generator=g)[:k] for _ in range(bs)])
    scores = -torch.rand(bs, k, generator=g)
    all_tokens, all_scores, parents, depths = [tokens], [scores], [torch.full((bs, k), -1)], [1] * k
    names = torch.arange(k).expand(bs, -1)
    for step in range(2, num_steps + 1):
        log_probs = -torch.rand(bs, k, k, generator=g)
        if ties:
            log_probs = (log_probs * 3).round()
        children = torch.stack([torch.randperm(50, generator=g)[:k] for _ in range(bs * k)]).view(bs, k * k)
        cumulative, kept = tree.expand(log_probs, scores, k)
        first = sum(t.shape[1] for t in all_tokens)
        all_tokens.append(children)
        all_scores.append(cumulative)
        parents.append(names.repeat_interleave(k, 1))
        scores, names = cumulative.gather(1, kept), first + kept
        depths += [step] * k * k
    candidates = [torch.cat(x, 1).to(DEVICE) for x in (all_tokens, all_scores, parents)]
    root = torch.randint(0, 50, (bs,), generator=g).to(DEVICE)
    shape = {"num_draft_tokens": num_draft_tokens, "num_steps": num_steps}
    return (root, *candidates, torch.tensor(depths, device=DEVICE)), shape


TREES = [(1, 1, 3, 4), (2, 2, 1, 3), (3, 4, 4, 16), (2, 8, 5, 64), (1, 11, 6, 65), (2, 10, 8, 128), (1, 16, 8, 256)]


@pytest.mark.parametrize(("bs", "k", "num_steps", "width"), TREES)
@pytest.mark.parametrize("ties", [False, True])
def test_trees_equal_the_twin(bs, k, num_steps, width, ties):
    arguments, shape = grown_tree(1, bs, k, num_steps, width, ties=ties)
    same(OPS.build(*arguments, **shape), tree.build(*arguments, **shape))


def test_a_chain_of_64_nodes_sets_the_sign_bit():
    n = 63
    scores = -torch.arange(1.0, n + 1, device=DEVICE).unsqueeze(0)
    line = torch.arange(n, device=DEVICE)
    arguments = (line[:1], line.unsqueeze(0), scores, line.unsqueeze(0) - 1, line + 1)
    got = OPS.build(*arguments, num_draft_tokens=64, num_steps=63)
    same(got, tree.build(*arguments, num_draft_tokens=64, num_steps=63))
    assert got.ancestor_bits[0, 63].tolist() == [-1]


def test_scores_of_nan_and_infinity_build_the_trees_of_the_twin():
    arguments, shape = grown_tree(3, 4, 4, 3, 12)
    arguments[2][0, 5:9] = math.nan
    arguments[2][1] = math.nan
    arguments[2][2] = -math.inf
    arguments[2][3, 0] = -0.0
    arguments[2][3, 1] = 0.0
    same(OPS.build(*arguments, **shape), tree.build(*arguments, **shape))


@FEW
@given(SEEDS, st.integers(1, 4), st.integers(1, 9), st.booleans(), st.booleans())
def test_growth_equals_the_twin(seed, bs, k, ties, keeps_first):
    g = generator(seed)
    log_probs, scores = torch.randn(bs, k, k, generator=g), -torch.rand(bs, k, generator=g)
    if ties:
        log_probs, scores = log_probs.round(), scores.round()
    log_probs[0, 0, 0] = math.nan
    scores[-1, -1] = -math.inf
    got = same_growth(log_probs, scores, k, g, words=1 + bs // 2, keeps_first=keeps_first)
    assert not keeps_first or bool((got[2].names[:, 0] == 7).all())


def same_growth(log_probs, scores, topk, g, words=1, keeps_first=False):
    """Check the next frontier, candidates and their parents against the twin's, for random tokens, names and bits."""
    bs, k, num_children = log_probs.shape

    def integers(*shape):
        return torch.randint(-(1 << 40), 1 << 40, shape, generator=g).to(DEVICE)

    frontier = tree.Frontier(integers(bs, k), scores.to(DEVICE), integers(bs, k), integers(bs, k, words))
    arguments = (log_probs.to(DEVICE), integers(bs, k * num_children), frontier, integers(topk, words), 7, keeps_first)
    got, want = OPS.grow(*arguments), tree.grow(*arguments)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    same(got[2], want[2])
    return got


@pytest.mark.parametrize("k", [1, 2, 5, 16])
@pytest.mark.parametrize("has_own", [False, True])
def test_a_drawn_token_in_front_of_candidates_equals_the_twin(k, has_own):
    """It is one of them, or not; rows are views, and memory beside them is unchanged."""
    g = generator(k)
    tokens = torch.stack([torch.randperm(40, generator=g)[: 2 * k] for _ in range(7)]).view(7, 2, k).to(DEVICE)
    log_probs = torch.randn(7, 2, k, generator=g).to(DEVICE)
    log_probs[3, 0, -1] = math.nan
    drawn = torch.cat([tokens[:4, 0, torch.arange(4) % k].diagonal(), tokens[4:, 1, 0]])
    own = torch.randn(7, generator=g).to(DEVICE) if has_own else None
    outcomes = []
    for ops in (OPS, TORCH_OPS):
        names, values = tokens.clone(), log_probs.clone()
        ops.put_first(drawn, names[:, 0], values[:, 0], own)
        assert torch.equal(names[:, 1], tokens[:, 1]) and torch.equal(values[:, 1], log_probs[:, 1])
        outcomes.append((names, values.nan_to_num(7.0)))
    same(*outcomes)
    names = outcomes[0][0][:, 0]
    assert torch.equal(names[:, 0], drawn) and all(len(set(row)) == k for row in names.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_last_rows_are_kept_where_the_twin_keeps_them(dtype):
    """For a finished request, the first row; states may have a wider dtype than the buffer."""
    states, rows = torch.randn(3, 4, 1500, generator=generator(1)).to(DEVICE), torch.tensor([4, 0, 2], device=DEVICE)
    kept = [torch.zeros(6, 1500, dtype=dtype, device=DEVICE) for _ in range(2)]
    for ops, into in zip((OPS, TORCH_OPS), kept, strict=True):
        ops.keep_last(states, torch.tensor([4, 0, 2], device=DEVICE), rows, into)
    assert torch.equal(*kept) and torch.equal(kept[0][4], states[0, 3].to(dtype)) and not kept[0][[1, 3, 5]].any()


@pytest.mark.parametrize("num_steps", [0, 1, 7, 62, 63, 64, 200])
def test_chains_equal_the_twin(num_steps):
    ids = torch.randint(0, 1 << 40, (3, num_steps + 1), generator=generator(num_steps)).to(DEVICE)
    same(OPS.chain(ids[:, 0], ids[:, 1:]), tree.chain(ids[:, 0], ids[:, 1:]))


def random_case(seed, bs, k, num_steps, width):
    arguments, shape = grown_tree(seed, bs, k, num_steps, width)
    return tree.build(*arguments, **shape), generator(seed + 1)


def likely_logits(draft: Tree, g, vocab):
    """Return logits whose argmax is often a child's token, so that accepted paths get long."""
    logits = torch.randn(*draft.tokens.shape, vocab, generator=g).to(DEVICE)
    for row in range(draft.tokens.shape[0]):
        for node in range(1, draft.tokens.shape[1]):
            if torch.rand((), generator=g) < 0.7:
                logits[row, draft.parents[row, node], draft.tokens[row, node]] += 5
    return logits


@pytest.mark.parametrize(("bs", "k", "num_steps", "width"), TREES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_walks_equal_the_twin(bs, k, num_steps, width, dtype):
    for seed in range(3):
        draft, g = random_case(seed, bs, k, num_steps, width)
        logits = likely_logits(draft, g, 50).to(dtype)
        same(OPS.verify_greedy(logits, draft, num_steps), verify.verify_greedy(logits, draft, num_steps))


@FEW
@given(SEEDS, st.sampled_from(TREES), st.sampled_from(["soft", "sharp", "one-hot"]))
def test_sampled_walks_down_trees_equal_the_twin(seed, shape, kind):
    bs, k, num_steps, width = shape
    draft, g = random_case(seed, bs, k, num_steps, width)
    scale = {"soft": 0.5, "sharp": 3.0, "one-hot": 1.0}[kind]
    probs = (likely_logits(draft, g, 50) * scale).softmax(-1)
    if kind == "one-hot":
        probs = torch.nn.functional.one_hot(probs.argmax(-1), 50).float()
    uniforms = torch.rand(bs, width, dtype=torch.float64, generator=g).to(DEVICE)
    same(OPS.verify_tree(probs, draft, num_steps, uniforms), verify.verify_tree(probs, draft, num_steps, uniforms))


@FEW
@given(SEEDS, st.integers(1, 4), st.integers(1, 6), st.sampled_from([0.1, 1.0, 30.0]))
def test_sampled_walks_down_chains_equal_the_twin(seed, bs, num_steps, apart):
    g = generator(seed)
    logits = torch.randn(bs, num_steps + 1, 60, generator=g)
    probs = logits.softmax(-1).to(DEVICE)
    laws = (logits[:, :-1] + apart * torch.randn(bs, num_steps, 60, generator=g)).softmax(-1).to(DEVICE)
    if seed % 3 == 0:
        laws[0, 0] = math.nan  # a broken draft costs only speed
    drafts = sampling.sample(laws.nan_to_num(1.0), torch.rand(bs, num_steps, generator=g).to(DEVICE))
    draft = tree.chain(torch.zeros(bs, dtype=torch.int64, device=DEVICE), drafts)
    uniforms = torch.rand(bs, num_steps + 1, dtype=torch.float64, generator=g).to(DEVICE)
    same(OPS.verify_chain(probs, laws, draft, uniforms), verify.verify_chain(probs, laws, draft, uniforms))


def test_a_residual_without_mass_draws_from_the_law():
    draft = Tree(
        torch.tensor([[0, 3, 4]], device=DEVICE), torch.zeros(1, 3, dtype=torch.int64, device=DEVICE), None, None
    )
    probs = torch.zeros(1, 3, 9, device=DEVICE)
    probs[..., 3] = probs[..., 4] = 0.5
    uniforms = torch.tensor([[0.3, 1.0, 1.0]], dtype=torch.float64, device=DEVICE)  # both rejected by the last rounding
    got = OPS.verify_tree(probs, draft, 1, uniforms)
    same(got, verify.verify_tree(probs, draft, 1, uniforms))
    assert got.tokens[0, 0] in (3, 4)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
def test_kernels_that_start_early_decide_as_those_that_wait(monkeypatch):
    draft, _ = random_case(0, 3, 3, 3, 8)

    def forward(logits):
        verified = OPS.verify_greedy(logits, draft, 3)
        _, roots = OPS.starts(verified.accept_lens, verified.tokens[:, 0].contiguous(), torch.arange(3, device=DEVICE))
        line = OPS.chain(roots, verified.tokens[:, 1:].contiguous())
        return OPS.gather_rows(logits, verified.accept_index) + line.tokens.sum()

    check_early_starts(forward, [likely_logits(draft, generator(i), 50_000) for i in range(20)], monkeypatch)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("kind", ["greedy", "tree", "chain"])
def test_a_row_that_is_not_finite_ends_alone(kind, bad):
    for node in (0, 1, 5):
        draft, g = random_case(4, 3, 3, 3, 8)
        logits = likely_logits(draft, g, 50)
        uniforms = torch.rand(3, 8, dtype=torch.float64, generator=g).to(DEVICE)
        if kind == "chain":
            draft = tree.chain(draft.tokens[:, 0], draft.tokens[:, 1:])
        laws = torch.rand(3, 7, 50, generator=g).softmax(-1).to(DEVICE)

        def decide(ops, values, draft=draft, uniforms=uniforms, laws=laws):
            if kind == "greedy":
                return ops.verify_greedy(values, draft, 3)
            probs = values.softmax(-1)
            probs[~values.amax(-1).isfinite()] = math.nan
            if kind == "tree":
                return ops.verify_tree(probs, draft, 3, uniforms)
            return ops.verify_chain(probs, laws, draft, uniforms)

        healthy = decide(OPS, logits)
        logits[1, node] = bad
        got = decide(OPS, logits)
        same(got, decide(TORCH_OPS, logits))
        assert node or bool(got.invalid[1])
        for field in range(4):
            assert torch.equal(got[field][[0, 2]], healthy[field][[0, 2]])


def test_random_numbers_equal_the_twin_bit_for_bit():
    g = generator(0)
    seeds = torch.randint(-(1 << 63), (1 << 63) - 1, (7,), generator=g).to(DEVICE)
    counters = torch.randint(0, 1 << 40, (7,), generator=g).to(DEVICE)
    for first, num in ((0, 1), (64, 5), (128, 64)):
        got = OPS.uniforms(seeds, counters, first, num)
        assert torch.equal(got, TORCH_OPS.uniforms(seeds, counters, first, num))
        assert ((got >= 0) & (got < 1)).all()


@pytest.mark.parametrize("vocab", [1, 50, 5000, 40000])
def test_draws_equal_the_twin(vocab):
    g = generator(vocab)
    probs = torch.rand(6, vocab, generator=g) * (torch.rand(6, vocab, generator=g) < 0.5)
    probs[2] = 0
    probs[3] = 0
    probs[3, vocab // 2] = 1
    u = torch.tensor([0.0, 1.0, 0.5, 0.999, 0.3, 0.7], dtype=torch.float64).repeat_interleave(2)[::2]  # as a column is
    for names in (None, torch.randperm(3 * vocab, generator=g)[:vocab]):
        got = OPS.sample(probs.to(DEVICE), u.to(DEVICE), names if names is None else names.to(DEVICE))
        assert torch.equal(got, sampling.sample(probs, u, names).to(DEVICE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathered_rows_equal_the_twin(dtype):
    values = torch.randn(3, 9, 2100, generator=generator(0)).to(DEVICE, dtype)
    index = torch.tensor([[0, 4, -1], [8, 8, 0], [-1, -1, -1]], device=DEVICE)
    for source in (values, values[:, 2:, :1030], values[:1].expand(3, -1, -1)):
        index_ = index.clamp(max=source.shape[1] - 1)
        assert torch.equal(OPS.gather_rows(source, index_), TORCH_OPS.gather_rows(source, index_))


@FEW
@given(SEEDS, st.integers(1, 4), st.integers(1, 7), st.sampled_from([torch.float32, torch.bfloat16]))
def test_committed_paths_equal_the_twin(seed, bs, num_steps, dtype):
    g = generator(seed)
    width = 40
    table = 1 + torch.randperm((bs + 2) * width, generator=g, dtype=torch.int32).view(bs + 2, width)
    rows = torch.randperm(bs + 2, generator=g)[:bs]
    lens = torch.randint(0, width - 20, (bs,), generator=g)
    path = torch.full((bs, num_steps + 1), -1)
    for row in range(bs):
        depth = int(torch.randint(0, num_steps + 1, (), generator=g))
        path[row, 0] = 0
        path[row, 1 : depth + 1] = (1 + torch.randperm(18, generator=g)[:depth]).sort().values
    pools = [KVPool([LayerShape(2, 16, 8), LayerShape(3, 8, 8)], (bs + 2) * width + 1, dtype, DEVICE) for _ in range(2)]
    for i, cache in enumerate((*pools[0].k, *pools[0].v)):
        cache.copy_(torch.randn(cache.shape, generator=g))
        (*pools[1].k, *pools[1].v)[i].copy_(cache)
    arguments = tuple(t.to(DEVICE) for t in (table, rows, lens, path))
    OPS.committer(pools[0])(*arguments)
    TORCH_OPS.committer(pools[1])(*arguments)
    for got, want in zip((*pools[0].k, *pools[0].v), (*pools[1].k, *pools[1].v), strict=True):
        assert torch.equal(got, want)


def random_output(g, bs, width):
    lens = torch.randint(1, width + 1, (bs,), generator=g)
    columns = torch.arange(width)
    tokens = torch.where(columns < lens.unsqueeze(1), torch.randint(0, 6, (bs, width), generator=g), -1)
    index = torch.where(columns < lens.unsqueeze(1), torch.randint(0, 9, (bs, width), generator=g), -1)
    invalid = torch.rand(bs, generator=g) < 0.1
    return verify.VerifyOutput(*(t.to(DEVICE) for t in (index, lens, tokens, invalid)))


@FEW
@given(SEEDS, st.integers(1, 5), st.integers(1, 6), st.integers(0, 4))
def test_imposed_acceptance_and_where_rounds_start_equal_the_twins(seed, bs, num_steps, num_more):
    g = generator(seed)
    nodes = torch.randint(0, 50, (bs, num_steps + 1 + num_more), generator=g).to(DEVICE)
    tree_ = Tree(nodes, *[torch.zeros_like(nodes)] * 3)
    rates = torch.rand(num_steps, generator=g, dtype=torch.float64).sort(descending=True).values.to(DEVICE)
    u = torch.rand(bs, generator=g, dtype=torch.float64).to(DEVICE)
    verified = random_output(g, bs, num_steps + 1)
    same(OPS.impose(verified, tree_, rates, u), TORCH_OPS.impose(verified, tree_, rates, u))
    lens, roots = (torch.randint(0, 99, (bs + 3,), generator=g).to(DEVICE) for _ in range(2))
    rows = torch.randint(0, bs + 3, (bs,), generator=g).to(DEVICE)
    same(OPS.starts(lens, roots, rows), TORCH_OPS.starts(lens, roots, rows))


@FEW
@given(SEEDS, st.integers(1, 6), st.integers(1, 7), st.integers(1, 16), st.booleans())
def test_rounds_end_as_the_twins_end_them(seed, bs, width, num_stops, moves):
    """Stops (of few tokens, so that they occur), limits, rows in any order; state is changed in place."""
    g = generator(seed)
    verified, num_rows = random_output(g, bs, width), bs + 3
    rows = torch.randperm(num_rows, generator=g)[:bs].to(DEVICE)
    is_used = torch.rand(num_rows, num_stops, generator=g) < 0.15
    stops = torch.where(is_used, torch.randint(0, 6, is_used.shape, generator=g), -1).to(DEVICE)
    remaining = torch.randint(0, 9, (num_rows,), generator=g).to(DEVICE)
    lens, roots = (torch.randint(0, 99, (num_rows,), generator=g).to(DEVICE) for _ in range(2))
    outcomes = []
    for ops in (OPS, TORCH_OPS):
        state = [t.clone() for t in (remaining, lens, roots)]
        trimmed = ops.trim(verified, rows, stops, state[0])
        history = torch.full((num_rows + 1, 100), -1, dtype=torch.int32, device=DEVICE)
        results = ops.emit(trimmed, rows, state[1], state[2], state[0], history, moves)
        outcomes.append((trimmed, results, [*state, history[:-1]]))  # the last row is never read
        host = torch.empty_like(results, device="cpu", pin_memory=results.is_cuda)
        ops.mail(results, host)
        assert torch.equal(results.cpu(), host)
    same(outcomes[0][0], outcomes[1][0])
    same([outcomes[0][1], *outcomes[0][2]], [outcomes[1][1], *outcomes[1][2]])
    trimmed, results, state = outcomes[0]
    assert torch.equal(results[:, -1] == 1, state[0][rows] == 0)
    assert torch.equal(state[1][rows], lens[rows] + (trimmed.accept_lens if moves else 0))
    for row, start, tokens in zip(rows.tolist(), (lens[rows] + int(moves)).tolist(), trimmed.tokens, strict=True):
        emitted = tokens[tokens >= 0][: 100 - start].int()
        expected = torch.full((100,), -1, dtype=torch.int32, device=DEVICE)
        expected[start : start + len(emitted)] = emitted
        assert torch.equal(state[3][row], expected)


def test_padding_may_repeat_the_dummy_row():
    verified = random_output(generator(1), 4, 3)
    rows = torch.tensor([2, 5, 5, 5], device=DEVICE)
    remaining = torch.tensor([9, 9, 9, 9, 9, 0], device=DEVICE)
    stops = torch.full((6, 2), -1, device=DEVICE)
    trimmed = OPS.trim(verified, rows, stops, remaining)
    assert trimmed.accept_lens[1:].tolist() == [0, 0, 0] and int(remaining[5]) == 0
    assert int(trimmed.accept_lens[0]) == int(verified.accept_lens[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "topk"), [(1, 1), (5, 3), (50, 8), (4096, 4), (5000, 1), (9001, 8), (300, 64)])
def test_top_tokens_equal_the_twin(vocab, topk, dtype):
    g = generator(vocab)
    logits = torch.stack([torch.randperm(vocab, generator=g) for _ in range(4)]).div(vocab / 30 + 1)
    logits = logits.to(dtype).to(DEVICE)
    names = torch.randperm(3 * vocab, generator=g)[:vocab].to(DEVICE)
    for named in (None, names):
        values, tokens = OPS.top_tokens(logits, topk, named)
        wanted, _ = TORCH_OPS.top_tokens(logits, topk, named)
        torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-5)
        # bf16 rounds logits to ties: named tokens must have the value, and no token comes twice.
        table = logits.float().log_softmax(-1)
        places = tokens if named is None else (named == tokens.unsqueeze(-1)).int().argmax(-1)
        torch.testing.assert_close(table.gather(1, places), wanted, rtol=1e-5, atol=1e-5)
        assert all(len(set(row)) == topk for row in tokens.tolist())
        assert torch.equal(OPS.best_token(logits, named), TORCH_OPS.best_token(logits, named))


def test_ties_go_to_the_lower_token_and_nothing_comes_twice():
    logits = torch.zeros(3, 9001, device=DEVICE)
    logits[1, 8999:] = 1.0
    logits[2] = -math.inf
    _, tokens = OPS.top_tokens(logits, 4, None)
    assert tokens.tolist() == [[0, 1, 2, 3], [8999, 9000, 0, 1], [0, 1, 2, 3]]
    assert OPS.best_token(logits, None).tolist() == [0, 8999, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_gives_nan_and_distinct_tokens(bad):
    logits = torch.randn(2, 6000, generator=generator(0)).to(DEVICE)
    logits[0, 5500] = bad
    values, tokens = OPS.top_tokens(logits, 8, None)
    assert bool(values[0].isnan().all()) and bool(values[1].isfinite().all())
    assert len(set(tokens[0].tolist())) == 8 and int(tokens.min()) >= 0 and int(tokens.max()) < 6000


@FEW
@given(SEEDS, st.integers(1, 5), st.sampled_from([1, 3, 16]), st.integers(0, 40))
def test_admission(seed, num, page_size, num_pages):
    """Rows that are not named are unchanged; a page may reach past the table's end."""
    num_rows, width, g = 7, 70, generator(seed)
    num_pages = min(num_pages, -(-width // page_size))
    rows = torch.randperm(num_rows, generator=g)[:num, None]
    numbers = torch.randint(-(1 << 62), 1 << 62, (num, EngineState.empty(1, 1, DEVICE).num_admitted), generator=g)
    pages = torch.randint(0, 1000, (num, num_pages), generator=g)
    packed = torch.cat([rows, numbers, pages], 1).to(DEVICE)
    outcomes = []
    for ops in (TORCH_OPS, OPS):
        state = EngineState.empty(num_rows, width, DEVICE)
        table = torch.full((num_rows, width), -7, dtype=torch.int32, device=DEVICE)
        ops.admit(packed, state.columns, table, page_size)
        outcomes.append([*state.columns, table])
    same(*outcomes)
    untouched = sorted(set(range(num_rows)) - set(rows[:, 0].tolist()))
    assert outcomes[1][-1][untouched].eq(-7).all()


LAWS = [
    SamplingParams(*values)
    for values in (
        (0.0, 0, 1.0, 0.0),
        (0.0, 3, 0.5, 0.1),
        (1.0, 0, 1.0, 0.0),
        (0.3, 1, 0.9, 0.0),
        (1.7, 5, 1.0, 0.0),
        (1.0, 40, 0.9, 0.05),
        (1.0, 0, 0.9, 0.0),
        (0.7, 0, 0.5, 1.0),
        (1.0, 1000, 0.0, 0.0),
        (2.0, 0, 0.99, 0.0),
    )
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_laws_equal_the_twin(dtype):
    """Ties at every edge, forbidden tokens, a vocabulary larger than a block."""
    batch = SamplingBatch.stack(LAWS, DEVICE)
    logits = torch.randn(len(LAWS), 3, 70, generator=generator(0)) * 4
    logits[:, 1], logits[:, 2, ::2] = logits[:, 1].round(), -math.inf
    same_laws(logits.to(DEVICE, dtype), batch)
    large = SamplingBatch.stack([LAWS[5], LAWS[9]], DEVICE)
    same_laws((torch.randn(2, 1, 5000, generator=generator(1)) * 3).to(DEVICE, dtype), large)


def same_laws(logits, batch):
    got, want = OPS.law(logits, batch), sampling.process_logits(logits, batch)
    assert got.dtype == torch.float32
    assert torch.equal(got > 0, want > 0), "the tokens that are kept"
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)


@settings(max_examples=25 if DEVICE.type == "cuda" else 8, deadline=None, derandomize=True)
@given(SEEDS, st.floats(0.1, 2.0), st.integers(0, 30), st.floats(0.05, 1.0), st.floats(0.0, 0.3))
def test_any_law_equals_the_twin_but_for_rounding_at_the_edge(seed, temperature, top_k, top_p, min_p):
    batch = SamplingBatch.stack([SamplingParams(temperature, top_k, top_p, min_p)], DEVICE)
    logits = torch.randn(1, 2, 50, generator=generator(seed)).to(DEVICE) * 3
    got, want = OPS.law(logits, batch), sampling.process_logits(logits, batch)
    parted = (got > 0) != (want > 0)
    assert parted.sum(-1).max() <= 1
    if not parted.any():
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("params", [LAWS[0], LAWS[2], LAWS[5]])
def test_rows_without_a_law_are_nan_and_alone(params):
    logits = torch.randn(2, 5, 20, generator=generator(2)).to(DEVICE)
    batch = SamplingBatch.stack([params] * 2, DEVICE)
    clean = OPS.law(logits, batch)
    logits[0, 0, 3], logits[0, 1, 4], logits[0, 2] = math.nan, math.inf, -math.inf
    got = OPS.law(logits, batch)
    assert got[0, :3].isnan().all() and torch.equal(got[0, 3:], clean[0, 3:]) and torch.equal(got[1], clean[1])
