"""Grammars: masks of every node by its own path, greedy text equal to plain constrained decoding, the distribution of
sampled text, forced tokens as drafts, dead ends and mistakes."""

import itertools
import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

import specdec
from specdec import EngineConfig, Grammar, SamplingParams
from specdec.core.functional.sampling import Guide, constrain, guided
from specdec.core.functional.tree import Tree, ancestor_bits, chain, force
from specdec.core.grammar.feed import MaskFeed
from specdec.core.grammar.grammar import MOST_DEPTH
from specdec.core.grammar.matcher import NUM_MASKED, Constraint, is_allowed
from tests.commands import run
from tests.faults import missing_pages
from tests.grammars import EOS, GRAMMARS, SCHEMA, masks_after, plain_law, plain_text, spm_tokenizer, tiny_tokenizer
from tests.heads import ALGOS, random_draft
from tests.tiny_models import DEVICE, VOCAB, tiny_model

pytest.importorskip("llguidance")
pytest.importorskip("jsonschema")
trial = pytest.importorskip("specdec.reach.grammars.trial")
compiling = pytest.importorskip("specdec.reach.grammars.compiler")
make_compiler, open_library = compiling.make_compiler, compiling.open_library

vocabularies = pytest.importorskip("specdec.reach.grammars.vocabulary")
Vocabulary, _Encoder = vocabularies.Vocabulary, vocabularies._Encoder

TOKENIZER = tiny_tokenizer()
WORDS = Vocabulary.of(TOKENIZER, VOCAB, frozenset([EOS]))
CHAIN, TREE = {"num_steps": 3}, {"num_steps": 3, "topk": 3, "num_draft_tokens": 10}
NUM_SEEDS = 1000 if DEVICE.type == "cuda" else 180
NUM_WORDS = -(-VOCAB // 32)
PROMPTS = [[5, 6, 7], [9, 8, 40, 3], [77]]
GRAPHS = {"cuda_graph": True, "prefill_graph": "off", "graph_batches": (4,), "max_batch": 4}


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama").to(DEVICE)


@pytest.fixture(scope="module")
def compiler():
    return make_compiler("llguidance", TOKENIZER, VOCAB, frozenset([EOS]))


def engine_of(model, algo, shape, grammar="llguidance", **settings):
    draft = random_draft(model, algo) if algo in ALGOS else None
    given = {**GRAPHS, "max_seq_len": 96, "graph_sampling": "greedy", **(shape if algo else {}), **settings}
    return specdec.attach(
        model, draft, algo="lookup" if algo == "lookup" else "auto", tokenizer=TOKENIZER, grammar=grammar, **given
    )


@pytest.fixture(scope="module")
def texts(model, compiler):
    """Texts of plain constrained decoding for every grammar and prompt."""
    compiled = {name: compiler.compile(grammar) for name, grammar in GRAMMARS.items()}
    return {name: {i: plain_text(model, c, PROMPTS[i], 28) for i in (0, 2)} for name, c in compiled.items()}


OTHERS = [("lookup", CHAIN), (None, CHAIN), *((a, s) for a in ALGOS if a != "eagle3" for s in (CHAIN, TREE))]
CASES = [("eagle3", CHAIN), ("eagle3", TREE), *(pytest.param(*case, marks=pytest.mark.matrix) for case in OTHERS)]


@pytest.mark.parametrize(("algo", "shape"), CASES)
def test_greedy_text_equals_plain_constrained_decoding(model, texts, algo, shape):
    engine = engine_of(model, algo, shape)
    free = engine.generate(PROMPTS[1], max_new_tokens=28).tokens[0]
    for name, grammar in GRAMMARS.items():
        out = engine.generate(PROMPTS, max_new_tokens=28, grammar=[grammar, None, grammar])
        assert out.tokens == [texts[name][0], free, texts[name][2]], name
    engine.check_integrity()
    runners = engine.report().runners
    engine.detach()
    name = "round" if algo else "decode"
    assert runners[name]["eager"] == 0 and runners["first_token"]["eager"] == 0


def test_special_tokens_are_no_text_to_xgrammar():
    pytest.importorskip("xgrammar")
    library, mask = open_library("xgrammar", WORDS), np.zeros(NUM_WORDS, np.int32)
    for grammar, first in (
        (Grammar(choice=["<bos>"]), ["<"]),
        (Grammar(regex="[<b]o"), ["<", "b"]),
        (Grammar(lark="start: <bos>"), ["<bos>"]),
        (Grammar(regex=""), ["<eos>"]),
    ):
        assert library.compile(grammar).matcher().fill(mask)
        assert [WORDS.tokens[t].decode() for t in range(VOCAB) if is_allowed(mask, t)] == first


@pytest.mark.matrix
@pytest.mark.parametrize("shape", [CHAIN, TREE])
def test_xgrammar_does_the_same(model, shape):
    pytest.importorskip("xgrammar")
    engine = engine_of(model, "eagle3", shape, grammar="xgrammar")
    for grammar in GRAMMARS.values():
        expected = [plain_text(model, engine.compile_grammar(grammar), p, 28) for p in PROMPTS]
        assert engine.generate(PROMPTS, max_new_tokens=28, grammar=grammar).tokens == expected
    engine.detach()


@pytest.mark.parametrize("shape", [CHAIN, pytest.param(TREE, marks=pytest.mark.matrix)], ids=["chain", "tree"])
def test_sampled_text_has_the_constrained_law(model, compiler, shape):
    """Chi-square test over the seeds of the second token, given the first; a chain's q is that of the draft itself."""
    grammar, prompt, params = Grammar(regex="[a-d]{2,4}[0-3]"), PROMPTS[0], SamplingParams(temperature=1.0, seed=0)
    engine = engine_of(model, "eagle3", shape, graph_sampling="sampled", cuda_graph=None, max_batch=60, max_seq_len=16)
    law = {"max_new_tokens": 2, "sampling": params, "grammar": engine.compile_grammar(grammar)}
    pairs = torch.tensor(engine.generate([prompt] * NUM_SEEDS, **law).tokens)
    engine.detach()
    first = int(pairs[:, 0].mode().values)
    *_, mask = masks_after(compiler.compile(grammar), [first])
    expected = plain_law(model, [*prompt, first], mask, params)
    seconds = pairs[pairs[:, 0] == first, 1].bincount(minlength=VOCAB)
    assert seconds[expected == 0].sum() == 0
    is_seen = expected * seconds.sum() > 3
    observed = [*seconds[is_seen].tolist(), int(seconds[~is_seen].sum())]
    shares = [*expected[is_seen].tolist(), float(expected[~is_seen].sum())]
    wanted = np.array(shares) / sum(shares) * sum(observed)
    kept = wanted > 0
    assert stats.chisquare(np.array(observed)[kept], wanted[kept]).pvalue > 1e-3


def test_penalties_bans_and_logprobs_are_of_the_constrained_law(model, compiler):
    engine = engine_of(model, "eagle3", CHAIN, cuda_graph=None, logprobs=3)
    grammar, rules = GRAMMARS["regex"], SamplingParams(repetition_penalty=1.3, logit_bias={TOKENIZER.encode("0")[0]: 9})
    out = engine.generate(PROMPTS[:2], max_new_tokens=28, grammar=grammar, sampling=[rules, SamplingParams()])
    free = engine.generate(prompt := PROMPTS[1], max_new_tokens=16, grammar=GRAMMARS["json"]).requests[0]
    engine.detach()
    text = out.tokens[1]
    assert out.texts[0].endswith("000") and text == plain_text(model, compiler.compile(grammar), prompt, 28)
    for one, rule in ((out.requests[1], grammar), (free, GRAMMARS["json"])):  # the batch of `free` is greedy, too
        masks = masks_after(compiler.compile(rule), one.tokens[:-1])
        for i, (mask, own) in enumerate(zip(masks, one.logprobs, strict=True)):
            law = plain_law(model, [*prompt, *one.tokens[:i]], mask, SamplingParams(temperature=1.0))
            assert own.logprob == pytest.approx(law[one.tokens[i]].log().item(), abs=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_graphs_of_constrained_rounds_in_bf16_say_what_plain_decoding_says(shape):
    """On CUDA: greedy and sampled batches with and without grammars, all replayed, none eager."""
    model = tiny_model("llama64", dtype=torch.bfloat16).to(DEVICE)
    texts = []
    for algo, own in ((None, CHAIN), ("eagle3", shape)):
        engine = engine_of(model, algo, own, graph_sampling=("greedy", "filtered"), cuda_graph=True, strict=True)
        out = engine.generate(PROMPTS, max_new_tokens=28, grammar=[GRAMMARS["json"], None, GRAMMARS["regex"]])
        texts.append(out.tokens)
        law = SamplingParams(temperature=0.8, top_p=0.9, seed=3)
        sampled = engine.generate(PROMPTS * 8, max_new_tokens=60, sampling=law, grammar=GRAMMARS["regex"])
        engine.check_integrity()
        engine.detach()
        assert set(sampled.finish_reasons) <= {"eos", "length"}
    assert texts[0] == texts[1]


def test_forced_tokens_are_drafted_without_a_model(model):
    """A single possible text takes one round per path of the draft, whatever the draft proposes."""
    grammar = Grammar(regex="zqxjkvbpzqxj")
    for algo, shape in (("eagle3", CHAIN), ("eagle3", TREE)):
        engine = engine_of(model, algo, shape, cuda_graph=None)
        out = engine.generate([PROMPTS[0]], max_new_tokens=28, grammar=grammar)
        engine.detach()
        assert out.texts == ["zqxjkvbpzqxj"] and len(out.requests[0].round_lens) == 3


def test_forced_tokens_of_an_earlier_batch_are_forgotten():
    class Forces:
        def __init__(self, *tokens):
            self.tokens, self.constraint, self.finish_reason = list(tokens), self, None

        def forced(self, num_steps):
            return self.tokens

        def fill_next(self, forced, mask):
            pass

    feed = MaskFeed(EngineConfig(num_steps=2, max_batch=3), VOCAB, torch.device("cpu"))
    for requests, forced in (
        ([Forces(), Forces(), Forces(7)], [[-1, -1], [-1, -1], [7, -1]]),
        ([Forces()], [[-1, -1]]),
        ([Forces(), Forces(), Forces()], [[-1, -1]] * 3),
        ([Forces(), Forces(5, 6), Forces()], [[-1, -1], [5, 6], [-1, -1]]),
    ):
        feed.begin(requests, lambda lines: None)
        feed.update(2)
        assert feed.guide(len(requests), 2)[0].tolist() == forced


def test_first_tokens_of_prompts_that_are_prefilled_ahead_have_masks(model, texts):
    """18 requests, of which 16 decode without a draft, so that a round has one mask per request."""
    engine = engine_of(model, None, {}, cuda_graph=None, max_batch=16, graph_batches=(16,))
    out = engine.generate([PROMPTS[0], PROMPTS[2]] * 9, max_new_tokens=28, grammar=GRAMMARS["json"])
    assert out.tokens == [texts["json"][0], texts["json"][2]] * 9
    engine.detach()


@pytest.mark.parametrize("lag", [0, 1])
def test_preempted_requests_go_on_within_their_grammars(model, texts, monkeypatch, lag):
    """Their prompts and texts are prefilled again; their matchers keep their state."""
    monkeypatch.setattr("specdec.core.engine.scheduler.GROWTH", 8)
    engine = engine_of(model, "eagle3", CHAIN, cuda_graph=None)
    free = engine.generate(PROMPTS[1], max_new_tokens=28).tokens[0]
    engine._core._lag = lag  # as on CUDA
    missing_pages(engine, random.Random(1))
    for name, grammar in GRAMMARS.items():
        out = engine.generate(PROMPTS, max_new_tokens=28, grammar=[grammar, None, grammar])
        assert out.tokens == [texts[name][0], free, texts[name][2]], name
    engine.check_integrity()
    assert engine.report().preemption["preemptions"] >= 3
    engine.detach()


def test_masks_of_a_tree_follow_each_path(compiler):
    """Compare fill_tree with a fresh matcher for every node."""
    compiled = compiler.compile(Grammar(regex="a(b|c)[0-9]x|d+"))
    constraint = Constraint(compiled.matcher(), {EOS}, compiler.eos_ids, NUM_WORDS)
    words, parents = ["?", "a", "d", "b", "c", "z", "7", "x", "d"], [0, 0, 0, 1, 1, 1, 4, 6, 2]
    tokens = [TOKENIZER.encode(word)[0] for word in words]
    masks = np.zeros((len(words), VOCAB // 32), np.int32)
    constraint.fill_tree(tokens, parents, masks)
    for node in range(len(words)):
        path, at = [], node
        while at:
            path.insert(0, tokens[at])
            at = parents[at]
        if words[node] != "z":
            *_, expected = masks_after(compiled, path)
            assert (masks[node] == expected.numpy()).all(), words[node]
    assert constraint.advance([*tokens[1:2], *tokens[4:5], tokens[5]]) == 2


def test_masks_for_greedy_choices_choose_what_those_of_all_nodes_do(compiler):
    compiled = compiler.compile(Grammar(regex="a(b|c)[0-9]x|d+"))
    letters = [TOKENIZER.encode(word)[0] for word in "adbcz7x"]
    parents, rng, num_left_out = [0, 0, 0, 1, 1, 1, 4, 6, 2], random.Random(0), 0
    for _ in range(200):
        siblings = {parent: iter(rng.sample(letters, 3)) for parent in parents}
        tokens = [0, *(next(siblings[parent]) for parent in parents[1:])]
        choices = [rng.choice([*letters, EOS]) for _ in parents]
        texts = []
        for is_lazy in (False, True):
            constraint = Constraint(compiled.matcher(), {EOS}, compiler.eos_ids, NUM_WORDS)
            masks = np.full((len(parents), VOCAB // 32), -1, np.int32)
            if is_lazy:
                if rng.random() < 0.5:
                    constraint.foresee(tokens, parents)
                num_left_out += not constraint.fill_choices(tokens, parents, choices, masks)
            else:
                constraint.fill_tree(tokens, parents, masks)
            assert constraint.advance([letters[0]]) == 1, "the matcher is at the beginning again"
            node, text = 0, []
            while node is not None:
                order = [choices[node], *range(VOCAB)]
                text.append(next(t for t in order if masks[node, t // 32] >> t % 32 & 1))
                node = next((n for n in range(1, len(parents)) if parents[n] == node and tokens[n] == text[-1]), None)
            texts.append(text)
        assert texts[0] == texts[1], (tokens, choices)
    assert num_left_out > 20


def test_greedy_choices_are_those_of_masks_where_text_is_forced(compiler):
    """Masks have its usual tokens; the library would accept others."""
    matcher, mask = compiler.compile(GRAMMARS["json"]).matcher(), np.zeros(VOCAB // 32, np.int32)
    spelled, usual = TOKENIZER.convert_tokens_to_ids(list('{"name')), matcher.forced()
    for tokens, allowed in ((spelled, 0), (usual, len(usual)), ([*usual[:1], *spelled[2:]], 1)):
        count = 0
        while count < len(tokens) and matcher.fill(mask) and is_allowed(mask, tokens[count]):
            assert matcher.accept(tokens[count])
            count += 1
        matcher.rollback(count)
        assert matcher.take(tokens) == count == allowed
        matcher.rollback(count)
    constraint = Constraint(matcher, {EOS}, compiler.eos_ids, NUM_WORDS)
    masks = np.full((2, VOCAB // 32), -1, np.int32)
    assert constraint.fill_choices([0, spelled[0]], [0, 0], spelled[:2], masks)
    assert is_allowed(masks[0], usual[0]) and not is_allowed(masks[0], spelled[0])


def test_tokens_that_no_mask_chose_are_checked(compiler):
    """Up to the first forbidden token, EOS included; later rounds have masks."""

    def after(regex, text, eos=()):
        constraint = Constraint(compiler.compile(Grammar(regex=regex)).matcher(), {EOS}, compiler.eos_ids, NUM_WORDS)
        return constraint, constraint.advance([*TOKENIZER.encode(text), *eos], is_masked=False)

    for regex, text, eos, count in (
        ("[a-c]{2,6}", "abca", (), 4),
        ("[a-c]{2,6}", "abdc", (), 2),
        ("[a-c]{2,6}", "abc", (EOS,), 4),
        ("[a-c]{2,6}", "a", (EOS,), 1),
        ("[a-c]{2}", "abc", (), 2),
    ):
        assert after(regex, text, eos)[1] == count, (regex, text, eos)
    constraint, _ = after("[a-c]{2,6}", "a")
    constraint.foresee([0, *TOKENIZER.encode("bc")], [0, 0, 1])  # of a round whose results were dropped
    assert constraint.advance(TOKENIZER.encode("bcabd"), is_masked=False) == 4
    constraint, _ = after("[a-c]{2}xyz|[ab]{9}", "ab")
    assert constraint.is_trusted and not after("[a-c]{2}xyz", "ab")[0].is_trusted, "xyz is forced"
    constraint, rounds = after("[a-c]{200}", "a")[0], []
    for _ in range(5):
        assert constraint.advance([EOS], is_masked=False) == 0
        rounds.append(0)
        while not constraint.is_trusted:
            assert constraint.advance(TOKENIZER.encode("b")) == 1
            rounds[-1] += 1
    assert rounds == [NUM_MASKED] * 5


def test_what_the_target_would_choose_without_masks_decides_whether_it_is_trusted(compiler):
    """A target that is wrong in a third of its rounds is not trusted repeatedly; one that no longer is wrong is."""
    compiled, a, wrong = compiler.compile(Grammar(regex="[a-c]{200}")), *TOKENIZER.encode("ad")
    rng, masks = random.Random(0), np.full((2, NUM_WORDS), -1, np.int32)
    constraint, num_undone = Constraint(compiled.matcher(), {EOS}, compiler.eos_ids, NUM_WORDS), 0
    for number in range(96 + NUM_MASKED + 1):
        chosen = wrong if number < 96 and rng.random() < 1 / 3 else a
        if constraint.is_trusted:
            num_undone += constraint.advance([chosen], is_masked=False) == 0
        else:
            constraint.fill_chain([0, a], masks, np.array([chosen, wrong]))  # the last node emits nothing
            assert constraint.advance([a]) == 1
    assert num_undone < 5 and constraint.is_trusted


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("shape", [CHAIN, pytest.param(TREE, marks=pytest.mark.matrix)], ids=["chain", "tree"])
def test_greedy_text_is_that_of_masks_where_rounds_went_without(model, compiler, shape, lag):
    """Requests are rolled back to before a forbidden token, also while the next round runs."""
    engine = engine_of(model, "eagle3", shape)
    engine._core._lag = lag
    for grammar in (GRAMMARS["json"], Grammar(regex='[a-zA-Z0-9{}:, "]+')):
        expected = [plain_text(model, compiler.compile(grammar), prompt, 60) for prompt in PROMPTS]
        assert engine.generate(PROMPTS, max_new_tokens=60, grammar=grammar).tokens == expected
    facts = engine.report().grammar
    assert facts["trusted_rounds"] > 3 and facts["undone"] > 1
    engine.check_integrity()
    engine.detach()


@pytest.mark.parametrize("ended_by", ["abandon", "deadline"])
def test_a_request_that_ends_before_it_is_taken_back_harms_no_other(model, compiler, ended_by):
    engine, grammar = engine_of(model, "eagle3", CHAIN, cuda_graph=None), Grammar(regex='[a-zA-Z0-9{}:, "]+')
    (mine,) = engine.submit(PROMPTS[:1], max_new_tokens=60, grammar=grammar, deadline=60.0)
    while not (undone := engine._core.delivery.undone):
        assert engine.step()
    assert undone == [mine]
    if ended_by == "abandon":
        engine.abandon([mine])
    mine.arrived -= 60.0
    text = engine.generate(PROMPTS[2], max_new_tokens=60, grammar=grammar).tokens[0]
    assert text == plain_text(model, compiler.compile(grammar), PROMPTS[2], 60)
    engine.check_integrity()
    engine.detach()


def test_forced_tokens_follow_what_is_emitted(compiler):
    constraint = Constraint(
        compiler.compile(Grammar(regex="[a-c]{9}777")).matcher(), {EOS}, compiler.eos_ids, NUM_WORDS
    )
    assert constraint.forced(3) == [] and constraint.advance(TOKENIZER.encode("abcabcabc")) == 9
    assert constraint.forced(3) == TOKENIZER.encode("777") and constraint.forced(2) == TOKENIZER.encode("77")


class Mark:
    """A device event that waits a ms for the host, or not at all."""

    def __init__(self, is_late):
        self.query = lambda: is_late
        self.elapsed_time = lambda other: float(is_late)

    def record(self):
        pass

    synchronize = record


def test_choices_of_a_round_are_there_until_its_results_are_read():
    """They may be read while the next round's choices are copied."""

    class Keeps:
        def __init__(self):
            self.constraint, self.finish_reason, self.kept = self, None, []

        def fill_chain(self, tokens, masks, choices):
            self.kept.append(choices)

    feed, request = MaskFeed(EngineConfig(num_steps=2), VOCAB, torch.device("cpu")), Keeps()
    feed._has_choices = Mark(False)
    for choice in (5, 6):
        feed.begin([request], lambda lines: None)
        feed.fill(1, torch.tensor([[choice]]))
    assert [own.tolist() for own in request.kept] == [[5], [6]]


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("is_late", [True, False], ids=["late", "early"])
def test_a_host_that_is_late_or_early_changes_no_text(model, texts, shape, is_late):
    """If a device waits for guides, some rounds have none; their results are read while the target verifies."""
    engine = engine_of(model, "eagle3", shape)
    feed, updated, advised = engine._core.launcher.feed, [], []
    update, advise = feed.update, feed._advise
    feed.update = lambda num_steps: updated.append(num_steps) or update(num_steps)
    feed._advise = lambda num_steps: advised.append(num_steps) or advise(num_steps)
    feed._marks = [Mark(is_late) for _ in range(4)]
    feed._has_choices, known = Mark(is_late), itertools.cycle([False, is_late])  # never, or during a batch
    feed._has_choices.query = lambda: next(known)
    for name, grammar in GRAMMARS.items():
        out = engine.generate([PROMPTS[i] for i in texts[name]], max_new_tokens=28, grammar=grammar)
        assert out.tokens == [*texts[name].values()], name
    engine.detach()
    assert 0 < len(advised) <= len(updated) and (len(advised) < len(updated)) == is_late


def test_rounds_without_a_guide_end_where_text_is_forced(model):
    engine = engine_of(model, "eagle3", CHAIN, cuda_graph=None)
    feed = engine._core.launcher.feed
    feed._marks, advise, advised = [Mark(True) for _ in range(4)], feed._advise, []
    feed._advise = lambda num_steps: advised.append(feed._num_rounds) or advise(num_steps)
    out = engine.generate([PROMPTS[0]], max_new_tokens=40, grammar=Grammar(regex="[ab]{16}zqxjkvbpzqxj"))
    engine.detach()
    lens = out.requests[0].round_lens
    num_free = next(i for i in range(len(lens)) if sum(lens[: i + 1]) >= 16)
    assert len(advised) < len(lens) and len(lens) <= num_free + 6 and lens[-3:-1] == [4, 4], (lens, advised)


@pytest.mark.parametrize("is_guided", [False, True])
@pytest.mark.parametrize("eos", [{EOS}, {EOS, 40}], ids=["own", "foreign"])
def test_masks_of_a_chain_are_those_of_a_tree_and_leave_the_matcher_ahead(compiler, eos, is_guided):
    """Texts that continue, end, and are forbidden; other EOS ids; a draft's guide that has one of the masks."""
    width = 4
    words = {
        "a": [["b", "7", "x"], ["c", "z", "x"], []],
        "d": [["d", 40, "d"], [EOS, "d", "d"]],
        "d7": [["7", "d", "d"]],
        "ab7": [["x", EOS, "d"], ["x", "d"], ["d", "x"]],
    }
    compiled = compiler.compile(Grammar(regex="a(b|c)[0-9]x|d+7?"))
    cases = [(text, draft) for text, drafts in words.items() for draft in drafts]
    masks, expected = (np.full((len(cases) + 1, width, VOCAB // 32), -1, np.int32) for _ in range(2))
    for i, (text, draft) in enumerate(cases):
        constraint = Constraint(compiled.matcher(), eos, compiler.eos_ids, NUM_WORDS)
        constraint.advance(TOKENIZER.encode(text))
        tokens = [0, *(t if isinstance(t, int) else TOKENIZER.encode(t)[0] for t in draft)]
        constraint.fill_tree(tokens, [0, *range(width - 1)][: len(tokens)], expected[i])
        if is_guided:
            constraint.fill_next(constraint.forced(3), np.zeros(NUM_WORDS, np.int32))
        constraint.fill_chain(tokens, masks[i])
        other = Constraint(compiled.matcher(), eos, compiler.eos_ids, NUM_WORDS)
        other.advance(TOKENIZER.encode(text))
        assert constraint.advance(tokens[1:]) == other.advance(tokens[1:]), (text, draft)
    assert (masks == expected).all(), [
        case for case, m, e in zip(cases, masks, expected, strict=False) if (m != e).any()
    ]


@pytest.mark.parametrize("is_forced_first", [False, True])
def test_masks_are_those_of_the_text_where_another_path_was_left(is_forced_first):
    """llguidance 1.9.1 returns the mask of the path that was left, here of "[[]", which forbids "],"."""
    tokenizer = tiny_tokenizer(("]", "]"), ("]", ","))
    row = {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}
    schema = {"type": "array", "items": row, "minItems": 1, "maxItems": 3}
    if is_forced_first:
        schema = {"type": "object", "properties": {"age": schema}, "required": ["age"], "additionalProperties": False}
    compiled = make_compiler("llguidance", tokenizer, VOCAB, frozenset([EOS])).compile(Grammar(json=schema))
    begin, left, taken = (tokenizer.encode(text) for text in ('{"age": [[' if is_forced_first else "[[", "]", "true"))
    *_, want = (mask.clone() for mask in masks_after(compiled, [*begin, *taken]))
    assert all(is_allowed(want.numpy(), tokenizer.encode(text)[0]) for text in ("]]", "],"))

    def constraint():
        made = Constraint(compiled.matcher(), {EOS}, {EOS}, NUM_WORDS)
        assert made.advance(begin) == len(begin)
        return made

    tree, masks = constraint(), np.full((3, NUM_WORDS), -1, np.int32)
    tree.fill_tree([0, *left, *taken], [0, 0, 0], masks)
    assert (masks[2] == want.numpy()).all()
    for num_drafts in (1, 2):
        chain, masks = constraint(), np.full((3, NUM_WORDS), -1, np.int32)
        chain.fill_chain([0, *left, *left][: 1 + num_drafts], masks)
        assert chain.advance(taken) == 1
        chain.fill_chain([0], masks[:1])
        assert (masks[0] == want.numpy()).all()


@pytest.mark.parametrize("kind", ["gemma", "llama2", "metaspace"])
def test_tokens_of_sentencepiece_spell_what_is_forced(kind):
    """No space before it, whatever the tokenizer prepends to a text; missing characters become bytes."""
    tokenizer = spm_tokenizer(kind)
    size = len(tokenizer) + 3  # a model may have more ids
    vocabulary = Vocabulary.of(tokenizer, size, frozenset([EOS]))
    grammar = Grammar(json={"type": "object", "properties": {"nam": {"const": "a é"}}, "required": ["nam"]})
    matcher = make_compiler("llguidance", tokenizer, size, frozenset([EOS])).compile(grammar).matcher()
    mask, text = np.zeros(-(-size // 32), np.int32), []
    while matcher.fill(mask) and (forced := matcher.forced()):
        assert matcher.accept(forced[0])
        text.append(vocabulary.tokens[forced[0]])
    assert text[:4] == [b'{"', b"nam", b'":', b' "'] and b"".join(text) == '{"nam": "a é"'.encode()


def test_forced_tokens_are_the_librarys_and_each_text_is_encoded_once(monkeypatch):
    """At every position of random texts; where the library forces no bytes, it is not asked for tokens."""
    encode, encoded, rng = _Encoder.__call__, [], random.Random(0)
    monkeypatch.setattr(_Encoder, "__call__", lambda self, text: encoded.append(text) or encode(self, text))
    compiler, mask = (
        open_library("llguidance", Vocabulary.of(TOKENIZER, VOCAB, frozenset([EOS]))),
        np.zeros(VOCAB // 32, np.int32),
    )
    num_forced = 0
    for grammar in (*GRAMMARS.values(), *GRAMMARS.values()):
        matcher = compiler.compile(grammar).matcher()
        for _ in range(20):
            assert matcher.forced() == matcher.library.compute_ff_tokens()
            num_forced += bool(matcher.forced())
            if not matcher.fill(mask):
                break
            allowed = [t for t in range(VOCAB) if mask[t // 32] >> t % 32 & 1 and t != EOS]
            if not allowed:
                break
            assert matcher.accept(rng.choice(allowed))
    assert num_forced > 20 and len(encoded) == len({*encoded}) > 5


def test_what_is_forced_at_the_beginning_is_read_once_for_all_texts(compiler):
    """Also for texts that leave it, and return to it or not; tokens that spell it otherwise leave it too."""
    library, rng = pytest.importorskip("specdec.reach.grammars.llguidance"), random.Random(0)
    compiled = compiler.compile(Grammar(json={**SCHEMA, "description": "of this test alone"}))
    lone = library.LLGMatcher(compiled.matcher().library, None)
    masks, spelled = np.zeros((2, NUM_WORDS), np.int32), TOKENIZER.convert_tokens_to_ids(list('{"'))
    for start in ([], [], spelled, []):
        pair, text = (compiled.matcher(), lone), []
        while len(text) < 20:
            assert pair[0].forced() == pair[1].forced()
            assert pair[0].fill(masks[0]) == pair[1].fill(masks[1]) and (masks[0] == masks[1]).all()
            allowed = [t for t in range(VOCAB) if is_allowed(masks[0], t) and t != EOS] or [0]
            token = start[len(text)] if len(text) < len(start) else rng.choice(allowed)
            if not all([m.accept(token) for m in pair]):
                break
            text.append(token)
            if rng.random() < 0.2:
                assert all(m.rollback(1) is None for m in pair)
                text.pop()
        lone.rollback(len(text))
        assert len(text) > 3
    assert min(compiled._beginning) == 1 < len(compiled._beginning) < 20


def test_a_request_may_have_other_eos_ids(compiler):
    constraint = Constraint(compiler.compile(Grammar(regex="a+")).matcher(), {7, 40}, compiler.eos_ids, NUM_WORDS)
    constraint.advance(TOKENIZER.encode("a"))
    masks = np.zeros((1, VOCAB // 32), np.int32)
    constraint.fill_tree([0], [0], masks)
    allowed = [t for t in range(VOCAB) if masks[0, t // 32] >> t % 32 & 1]
    assert EOS not in allowed and {7, 40} < set(allowed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [33, 5000])
def test_the_kernel_masks_as_its_twin(dtype, vocab):
    bitmask = pytest.importorskip("specdec.backends.triton.sampling.bitmask")
    logits = torch.randn(2, 3, vocab, device=DEVICE).to(dtype)
    masks = torch.randint(-(2**31), 2**31, (2, 3, -(-vocab // 32)), device=DEVICE).int()
    masks[0, 1] = -1
    expected = constrain(logits.clone(), masks)
    assert expected[0, 1].isfinite().all() and not expected[1].isfinite().all()
    assert torch.equal(bitmask.constrain(logits, masks), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dv", [33, 1500])
def test_the_kernel_guides_as_its_twin(dtype, dv):
    bitmask = pytest.importorskip("specdec.backends.triton.sampling.bitmask")
    logits = torch.randn(3, 4, dv, device=DEVICE).to(dtype)
    names = torch.randperm(2000, device=DEVICE)[:dv]
    forced = torch.tensor([[-1, -1, 9], [int(names[5]), -1, 9], [int(names[0]), int(names[7]), 9]], device=DEVICE)
    guide = Guide(forced[:, :2], torch.randint(-(2**31), 2**31, (3, 63), device=DEVICE).int())
    for step in (0, 1):
        own = logits[:, step : step + 2]
        expected = guided(own, guide, step, names)
        assert torch.equal(bitmask.guided(own, guide, step, names), expected)
    assert (
        (expected[0] > -1e4).all() and (expected[2] > -1e4).sum() == 2 and 2 < (expected[1] > -1e4).sum() < 2 * dv - 2
    )


def test_forced_tokens_take_a_path_of_distinct_siblings():
    parents = torch.tensor([[0, 0, 0, 1, 2]])
    tree = Tree(torch.tensor([[9, 5, 6, 7, 8]]), parents, torch.tensor([[0, 1, 1, 2, 2]]), ancestor_bits(parents, 2))
    force(tree, None, torch.tensor([[6, 3]]))
    assert tree.tokens.tolist() == [[9, 5, 6, 7, 3]]
    probs, line = torch.full((1, 2, 4), 0.25), chain(torch.tensor([1]), torch.tensor([[2, 3]]))
    force(line, probs, torch.tensor([[0, -1]]))
    assert line.tokens.tolist() == [[1, 0, 3]] and probs[0].tolist() == [[1, 0, 0, 0], [0.25] * 4]


def test_a_dead_end_ends_its_request_with_a_reason(model):
    """Bytes that no token of the vocabulary has."""
    engine = engine_of(model, "eagle3", CHAIN, cuda_graph=None)
    with pytest.warns(UserWarning, match=r"ended after \d tokens: its grammar allows no token after this text"):
        out = engine.generate(PROMPTS[:2], max_new_tokens=8, grammar=[Grammar(regex="zé"), None])
    engine.check_integrity()
    engine.detach()
    assert out.finish_reasons == ["dead_end", "length"] and out.texts[0] in ("", "z")


@pytest.mark.parametrize("shape", [None, CHAIN, TREE], ids=["plain", "chain", "tree"])
@pytest.mark.parametrize("law", [{}, {"do_sample": True, "seed": 1}], ids=["greedy", "sampled"])
def test_a_text_that_is_complete_before_min_new_tokens_is_whole(model, shape, law):
    engine = engine_of(model, shape and "eagle3", shape, cuda_graph=None, logprobs=1)
    given = {"grammar": {"choice": ["red", "blue"]}, "min_new_tokens": 8, "max_new_tokens": 12, **law}
    with pytest.warns(UserWarning, match=r"no token after this text \(but EOS, which min_new_tokens bans\)"):
        out = engine.generate(PROMPTS, **given)
    assert out.finish_reasons == ["dead_end"] * 3 and set(out.texts) <= {"red", "blue"}
    assert [len(r.logprobs) for r in out.requests] == list(map(len, out.tokens))
    out = engine.generate(PROMPTS, **given | {"grammar": {"regex": "[ab]*"}})
    assert all(len(tokens) > 8 and set(text) <= set("ab") for tokens, text in zip(out.tokens, out.texts, strict=True))
    engine.check_integrity()
    engine.detach()


@pytest.mark.parametrize("shape", [None, CHAIN, TREE], ids=["plain", "chain", "tree"])
@pytest.mark.parametrize("law", [{}, {"do_sample": True, "seed": 1}], ids=["greedy", "sampled"])
def test_what_comes_before_a_law_that_leaves_no_token_is_kept(model, shape, law):
    engine = engine_of(model, shape and "eagle3", shape, cuda_graph=None, logprobs=1)
    given = {"grammar": {"choice": ["blue"]}, "suppress_tokens": [EOS], "max_new_tokens": 9, **law}
    with pytest.warns(UserWarning, match="not finite after 3 tokens, or its grammar and its bans leave no token"):
        out = engine.generate(PROMPTS, **given)
    assert (out.finish_reasons, out.texts) == (["error"] * 3, ["blue"] * 3)
    assert [len(r.logprobs) for r in out.requests] == list(map(len, out.tokens))
    for more, reason, text in (({"max_new_tokens": 3}, "length", "blue"), ({"stop": "lu"}, "stop_string", "b")):
        out = engine.generate(PROMPTS, **given | more)
        assert (out.finish_reasons, out.texts) == ([reason] * 3, [text] * 3)
    engine.check_integrity()
    engine.detach()


def tags(*parts, triggers=("<",)):
    structures = [{"begin": begin, "schema": schema, "end": "!"} for begin, schema in parts]
    return {"structural_tag": {"structures": structures, "triggers": [*triggers]}}


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ({"json": {"type": "object", "properties": {"a": {"type": 3}}}}, r"json\.properties\.a\.type: 3 is not valid"),
        ({"json": "{'a'"}, "^json: it is not JSON: Expecting"),
        ({"json": 5}, "json: 5 is not of type 'object', 'boolean'"),
        ({"json": {"$schema": []}}, r"json\['\$schema'\]: \[\] is not of type 'string'"),
        ({"json": {"type": "array", "uniqueItems": True}}, 'json: Unimplemented keys: ."uniqueItems"'),
        ({"json": json.loads("[" * 80 + "]" * 80)}, f"^json: nested too deeply: expected at most {MOST_DEPTH}"),
        ({"regex": "(a["}, "(?s)regex: .*unclosed character class"),
        ({"regex": "a" * 300_000}, "regex: 30.* characters: expected at most"),
        ({"lark": "start: foo"}, "lark: .*unknown name"),
        ({"ebnf": "root ::= foo"}, "ebnf: Rule 'foo' not found"),
        ({"choice": []}, "choice: 0 strings: expected 1 to"),
        ({"choice": "ab"}, "choice='ab': expected a list of strings"),
        ({"regex": "a", "choice": ["b"]}, "expected exactly one of json, "),
        ({}, "with nothing set: expected exactly one of json, "),
        ({"regexp": "a"}, "expected a Grammar, or a dict with some of json"),
        ({"structural_tag": {"triggers": ["<"]}}, "expected an object with 'structures' and 'triggers'"),
        ({"json": False}, "json: Unsatisfiable schema: schema is false"),
        (tags(("<a>", False)), "structural_tag: .*Unsatisfiable schema: schema is false"),
    ],
)
def test_mistakes_are_named(compiler, grammar, message):
    with pytest.raises(ValueError, match=message):
        compiler.compile(Grammar.of(grammar))


def test_special_tokens_can_be_named_and_their_names_spelled(compiler):
    """By name in Lark; where JSON or a choice forces the name, it is ordinary text."""
    mask = np.zeros(NUM_WORDS, np.int32)
    matcher = compiler.compile(Grammar(lark='start: <pad> "a"')).matcher()
    assert matcher.fill(mask) and [t for t in range(VOCAB) if is_allowed(mask, t)] == [0] and matcher.accept(0)
    matcher, spelled = compiler.compile(Grammar(choice=["a<eos>b"])).matcher(), []
    while forced := matcher.forced():
        assert matcher.fill(mask) and is_allowed(mask, forced[0]) and matcher.accept(forced[0])
        spelled.append(WORDS.tokens[forced[0]])
    assert b"".join(spelled) == b"a<eos>b" and matcher.fill(mask) and is_allowed(mask, EOS)


def next_after(compiler, grammar, text):
    """Return the tokens that may follow `text`."""
    *_, mask = masks_after(compiler.compile(Grammar.of(grammar)), TOKENIZER.encode(text))
    return [TOKENIZER.decode([token]) for token in range(VOCAB) if is_allowed(mask.numpy(), token)]


def test_any_schema_may_stand_between_tags(compiler):
    assert next_after(compiler, tags(("<a>", True)), "b <a>") == next_after(compiler, {"json": True}, "")


def test_of_triggers_that_begin_alike_all_tags_can_be_reached(compiler):
    grammar = tags(("abc", {"enum": [1]}), ("a{", {"enum": [2]}), triggers=("ab", "a"))
    found = [next_after(compiler, grammar, text) for text in ("b a", "abc", "a{")]
    assert found == [["b", "{"], ["1"], ["2"]]


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (r'"\u0041b"', "A"),
        (r'"\U00000061" "b"', "a"),
        (r'"\u0022"', '"'),
        (r"[\u0041-\u0043]", "ABC"),
        (r"[^\u0000-\u007c]", "}~"),
        (r"[\u005b-\u005d]", "[\\]"),
        (r'"\\u0041"', "\\"),
        ('start | [start] "start" # start\nstart ::= "b"', "abrst"),
        ('start\nstart ::= "a" | start-rule\nstart-rule ::= "b"', "ab"),
    ],
)
def test_gbnf_is_read_as_in_llama_cpp(compiler, rule, text):
    assert next_after(compiler, {"ebnf": f"root ::= {rule}"}, "") == [*text]


def test_as_many_choices_as_there_may_be(compiler):
    matcher, mask = (
        compiler.compile(Grammar(choice=[f"{i:04d}" for i in range(4096)])).matcher(),
        np.zeros(NUM_WORDS, np.int32),
    )
    assert all(matcher.fill(mask) and matcher.accept(token) for token in TOKENIZER.encode("4095"))
    assert matcher.fill(mask) and is_allowed(mask, EOS) and not matcher.error


def test_hostile_grammars_end_a_process_of_their_own():
    """An intersection of patterns that never ends, and rules that overflow the stack."""
    trials = trial.Trials("llguidance", WORDS, seconds=0.4)
    patterns = {"allOf": [{"type": "string", "pattern": f".*a{{{i}}}.*b.*"} for i in range(20)]}
    rules = "\n".join(f'r{i}: "a{i}" r{(i + 1) % 6000}?' for i in range(6000))
    for hostile in (Grammar(json=patterns), Grammar(lark="start: r0\n" + rules)):
        with pytest.raises(ValueError, match=r"compiling it takes more than 0\.4 s, or more memory or stack"):
            trials.check(hostile)
    trials.check(GRAMMARS["json"])
    (idle,) = trials._idle
    trials.check(GRAMMARS["regex"])
    assert trials._idle == [idle]


def test_a_file_of_the_caller_is_not_taken_for_a_module_of_python(tmp_path, monkeypatch):
    (tmp_path / "types.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    trial.Trials("llguidance", WORDS).check(GRAMMARS["regex"])


@pytest.mark.parametrize("lacking", ["jsonschema", "version"])
def test_a_library_that_is_missing_or_too_old_is_named(lacking, monkeypatch):
    """Else the process that tries grammars would end silently, or its constructor raise a TypeError."""
    if lacking == "version":
        monkeypatch.setattr(
            compiling.importlib.metadata, "version", lambda name: "1.6.1" if name == "llguidance" else "9"
        )
    else:
        find = compiling.importlib.util.find_spec
        monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: None if name == lacking else find(name))
    with pytest.raises(ValueError, match=r"grammar='llguidance'.*jsonschema.*too old: pip install .*\[grammar\]"):
        make_compiler("llguidance", TOKENIZER, VOCAB, frozenset([EOS]))


def test_engines_say_what_they_need(model):
    engine = specdec.attach(model, tokenizer=TOKENIZER)
    with pytest.raises(ValueError, match=r"attach\(\.\.\., grammar='auto'\)"):
        engine.generate(PROMPTS, grammar=GRAMMARS["json"])
    engine.detach()
    for settings, message in (
        ({"grammar": "auto"}, "grammar='auto' needs a tokenizer"),
        ({"grammar": "outlines"}, "grammar='outlines': expected one of"),
        ({"grammar": "auto", "num_steps": 3, "synthetic_acceptance": (0.5, 0.5, 0.5)}, "follows no grammar"),
    ):
        with pytest.raises(ValueError, match=message):
            specdec.attach(model, random_draft(model, "eagle3"), **settings)


def test_grammars_are_compiled_once_and_texts_tell_them_apart(compiler):
    own, other = Grammar(json=SCHEMA), Grammar(json=json.dumps(SCHEMA))
    assert compiler.compile(own) is compiler.compile(other)
    assert compiler.compile(own) is not compiler.compile(Grammar(json=SCHEMA, any_whitespace=True))


def test_the_bench_checks_answers_and_compares_them_with_plain_decoding(model):
    from specdec.tools.measure import grammar
    from specdec.tools.measure.drafts import DraftShape
    from specdec.tools.measure.schemas import Case

    cases = [Case(SCHEMA, prompt, Grammar(json=SCHEMA)) for prompt in PROMPTS[:2]]
    plan = grammar.Plan([DraftShape.parse("3:1:4")], [2], [0.0], 60)
    plain, row = grammar.run(model, TOKENIZER, (random_draft(model, "eagle3"), "auto"), cases, plan, cuda_graph=None)
    assert plain["steps"] == 0 and plain["equal"] == row["equal"] == row["schemas"] == 2
    assert row["valid"] == row["finished"] and row["forced_per_token"] > 0 and row["tau"] > plain["tau"] == 1
    assert grammar.is_valid('{"a": 1}', {"type": "object"}) and not grammar.is_valid("[", True)


def test_bench_schemas_are_different_and_sound(compiler):
    from specdec.tools.measure.schemas import KEYS, make_cases

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    cases = make_cases(20, tokenizer)
    assert len({case.grammar.text for case in cases}) == 20 and make_cases(20, tokenizer) == cases
    for case in cases:
        compiler.compile(case.grammar)
        assert set(case.schema["properties"]) <= set(KEYS)


def test_texts_under_schemas_are_timed_beside_free_ones(model):
    from specdec.tools.measure import grammar_speed
    from specdec.tools.measure.drafts import DraftShape

    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content[:20] }}"
    draft, shape = (random_draft(model, "eagle3"), "auto"), DraftShape.parse("3:1:4")
    rows = list(grammar_speed.run(model, tokenizer, draft, [shape], [1], 12, cuda_graph=None))
    assert [row["speed"] for row in rows] == ["text", "free", "both", "forced"]
    assert rows[3]["tau"] > rows[0]["tau"] and rows[3]["late_ms"] > 0
    for row in rows:
        assert len(row["took"]) == 5 and row["tokens_per_s"] == pytest.approx(11e3 / row["took"][2], rel=0.05)


def test_the_bench_command_writes_what_it_checked_and_what_it_timed(tmp_path, capsys, monkeypatch):
    from specdec.tools.commands import bench_grammar

    about = {"steps": 3, "topk": 1, "draft_tokens": 4, "batch": 2, "tau": 2.0, "tokens_per_s": 9.0}
    checked = {**about, "temperature": 0.0, "valid": 1, "finished": 1, "schemas": 1, "seconds": 0.1}
    timed = {**about, "speed": "text", "took": [1.0], "round_ms": 1.0}
    model = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)
    monkeypatch.setattr(bench_grammar.BenchGrammar, "load", lambda self: (model, None))
    monkeypatch.setattr(bench_grammar, "make_cases", lambda *given: [])
    shapes, libraries = [], []
    monkeypatch.setattr(bench_grammar.grammar, "run", lambda *given: shapes.append(given[-1].shapes) or iter([checked]))
    monkeypatch.setattr(
        bench_grammar.grammar_speed, "run", lambda *given, grammar: libraries.append(grammar) or iter([timed])
    )
    code, _, _ = run(capsys, monkeypatch, "bench", "grammar", "--new-tokens", 4, "--out", tmp_path)
    (file,) = tmp_path.glob("grammar_135m_*.json")
    assert code == 0 and json.loads(file.read_text())["rows"] == [checked, timed]
    for draft in ("lookup", "none"):
        code, _, _ = run(
            capsys, monkeypatch, "bench", "grammar", "--new-tokens", 4, "--draft", draft, "--library", "xgrammar"
        )
    assert [list(map(str, own)) for own in shapes] == [["3:1:4", "4:4:16"], ["3:1:4"], ["plain"]]
    assert libraries == ["auto", "xgrammar", "xgrammar"]


def test_masks_of_strings_of_a_length_are_those_of_single_tokens():
    """Sets of tokens that the library handles at once change no mask."""
    library = open_library("llguidance", Vocabulary.of(TOKENIZER, VOCAB, frozenset([EOS])))
    grammars = [Grammar(json={"type": "string", "maxLength": most}) for most in (2, 5, 12, 40)]
    lens, text, masks = (1, 2, 3, 5), TOKENIZER.encode('"agename 12 true'), []
    for _ in range(2):
        found = (masks_after(library.compile(g), text[:n]) for g, n in zip(grammars, lens, strict=True))
        masks.append([torch.stack([*own]) for own in found])
        library._tokenizer = library._tokenizer.with_slices([])
    assert all(map(torch.equal, *masks))
