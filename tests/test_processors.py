"""Penalties, bans and biases: the function compared with `transformers`' own processors, the kernels with the function,
and engines that speculate with `model.generate`, token for token or by chi-square."""

import copy
import random

import pytest
import torch
from scipy import stats
from torch.torch_version import TorchVersion
from transformers import __version__
from transformers.generation import logits_process as hf

import specdec
from specdec import SamplingParams, shipped
from specdec.core.functional.processors import MAX_BAD_WORDS, ProcessorState, process
from specdec.core.functional.tree import Tree, ancestor_bits
from specdec.core.text.prompts import chat_ids
from tests.tiny_models import DEVICE, VOCAB, tiny_model

EOS = [2, 7]
SHAPES = pytest.mark.parametrize(
    "shape",
    [None, {"num_steps": 3}, {"num_steps": 3, "topk": 3, "num_draft_tokens": 10}],
    ids=["plain", "chain", "tree"],
)
# One case per setting: its name in transformers, and here.
CASES = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "rewarded repetition": {"repetition_penalty": 0.5},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "no_repeat_ngram_size 1": {"no_repeat_ngram_size": 1},
    "min_new_tokens": {"min_new_tokens": 16},
    "min_length": {"min_length": 22},
    "suppress_tokens": {"suppress_tokens": list(range(3, 60))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(3, 90))},
    "bad_words_ids": {"bad_words_ids": [[2], [37, 37], [120, 115, 17]]},
    "sequence_bias": {"sequence_bias": {(11,): 6.0, (12,): -6.0, (2,): -3.5}},
    "everything": {
        "repetition_penalty": 1.1,
        "no_repeat_ngram_size": 3,
        "min_new_tokens": 12,
        "suppress_tokens": [6, 8],
        "begin_suppress_tokens": [21, 22],
        "bad_words_ids": [[13], [14, 15], [16, 17, 18]],
        "sequence_bias": [[[40], 3.0]],
    },
}
# Not in transformers' `generate`: the reference is a loop over tokens.
OPENAI = {
    "frequency_penalty": {"frequency_penalty": 0.5},
    "presence_penalty": {"presence_penalty": 1.5},
    "rewarded presence": {"presence_penalty": -0.5, "frequency_penalty": 2.0},
    "all": {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.4, "logit_bias": {9: 5}},
}


def random_case(seed, bs=3, num_nodes=7, vocab=30, num_steps=4):
    """Trees over short histories of a small vocabulary, so that n-grams and words recur."""
    rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
    parents = [[0] + [rng.randrange(i) for i in range(1, num_nodes)] for _ in range(bs)]
    depths = torch.zeros(bs, num_nodes, dtype=torch.int64)
    for b in range(bs):
        for i in range(1, num_nodes):
            if depths[b, parents[b][i]] == num_steps:
                parents[b][i] = 0
            depths[b, i] = depths[b, parents[b][i]] + 1
    table = torch.tensor(parents)
    tokens = torch.randint(0, 6, (bs, num_nodes), generator=g)
    tree = Tree(tokens, table, depths, ancestor_bits(table, num_steps))
    histories = [[rng.randrange(6) for _ in range(rng.choice([1, 2, 5, 30]))] for _ in range(bs)]
    laws = [
        SamplingParams(
            repetition_penalty=rng.choice([1.0, 1.3, 0.7]),
            frequency_penalty=rng.choice([0, 0.5, -1.25]),
            presence_penalty=rng.choice([0, 2, -0.75]),
            no_repeat_ngram_size=rng.choice([0, 1, 2, 3, 4]),
            min_new_tokens=rng.choice([0, 2, 4]),
            suppress_tokens=rng.sample(range(vocab), rng.choice([0, 2])),
            begin_suppress_tokens=rng.sample(range(vocab), rng.choice([0, 3])),
            bad_words_ids=[[rng.randrange(6) for _ in range(rng.choice([1, 2, 3]))] for _ in range(rng.choice([0, 5]))],
            logit_bias={t: rng.choice([-2.0, 1.5]) for t in rng.sample(range(vocab), rng.choice([0, 4]))},
        )
        for _ in range(bs)
    ]
    return tree, histories, laws, 5 * torch.randn(bs, num_nodes, vocab, generator=g)


def filled(histories, laws, prompt_lens, device="cpu"):
    history = torch.zeros(len(histories) + 1, 64, dtype=torch.int32, device=device)
    state = ProcessorState.empty(history)
    for row, (tokens, law, prompt_len) in enumerate(zip(histories, laws, prompt_lens, strict=True)):
        state.fill(row, tokens[:prompt_len], law, EOS)
        history[row, prompt_len : len(tokens)] = torch.tensor(tokens[prompt_len:], dtype=torch.int32, device=device)
    return state


def by_transformers(scores, ids, law, prompt_len):
    """Scores [V] after the tokens `ids`, by the processors of `generate` in its order, and OpenAI's formula."""
    chain = []
    if law.logit_bias:
        chain.append(hf.SequenceBiasLogitsProcessor({(t,): b for t, b in law.logit_bias.items()}))
    if law.repetition_penalty != 1:
        chain.append(hf.RepetitionPenaltyLogitsProcessor(law.repetition_penalty))
    chain.append(lambda ids, scores: scores - openai_penalties(ids[0, prompt_len:].tolist(), law, scores))
    if law.no_repeat_ngram_size:
        chain.append(hf.NoRepeatNGramLogitsProcessor(law.no_repeat_ngram_size))
    if law.bad_words_ids:
        chain.append(hf.NoBadWordsLogitsProcessor([list(w) for w in law.bad_words_ids], EOS))
    chain.append(hf.MinNewTokensLengthLogitsProcessor(prompt_len, law.min_new_tokens, EOS))
    chain.append(hf.SuppressTokensLogitsProcessor(law.suppress_tokens))
    chain.append(hf.SuppressTokensAtBeginLogitsProcessor(law.begin_suppress_tokens, prompt_len))
    scores = scores.unsqueeze(0)
    for processor in chain:
        scores = processor(torch.tensor([ids]), scores)
    if TorchVersion(__version__) < "5.24":  # it leaves out words that have one token more than the text
        scores[0, [w[-1] for w in law.bad_words_ids if len(w) > 1 and [*w[:-1]] == [*ids]]] = -torch.inf
    return scores[0]


def openai_penalties(emitted, law, scores):
    penalties = torch.zeros_like(scores)
    for token in set(emitted):
        penalties[0, token] = law.frequency_penalty * emitted.count(token) + law.presence_penalty
    return penalties


@pytest.mark.parametrize("seed", range(25))
def test_every_node_is_processed_as_transformers_would(seed):
    tree, histories, laws, logits = random_case(seed)
    prompt_lens = [max(1, len(h) // 2) for h in histories]
    rows, context = torch.arange(len(histories)), torch.tensor([len(h) for h in histories])
    got = process(logits, tree, rows, context, filled(histories, laws, prompt_lens))
    for b, history in enumerate(histories):
        for node in range(tree.tokens.shape[1]):
            path, at = [], node
            while at:
                path.insert(0, int(tree.tokens[b, at]))
                at = int(tree.parents[b, at])
            want = by_transformers(logits[b, node], history + path, laws[b], prompt_lens[b])
            torch.testing.assert_close(got[b, node], want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("seed", range(25 if DEVICE.type == "cuda" else 8))
def test_the_kernels_equal_the_twin(seed):
    triton = pytest.importorskip("specdec.backends.triton.sampling.processors")
    tree, histories, laws, logits = random_case(seed, num_nodes=[1, 4, 7, 16][seed % 4])
    prompt_lens = [max(1, len(h) // 2) for h in histories]
    state = filled(histories, laws, prompt_lens, device=DEVICE)
    rows = torch.arange(len(histories), device=DEVICE)
    context = torch.tensor([len(h) for h in histories], device=DEVICE)
    tree, logits = Tree(*(t.to(DEVICE) for t in tree)), logits.to(DEVICE, torch.bfloat16 if seed % 2 else torch.float32)
    got = triton.process(logits, *tree, rows, context, state)
    torch.testing.assert_close(got, process(logits, tree, rows, context, state), rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_no_request_is_waited_for():
    state = ProcessorState.empty(torch.zeros(3, 20, dtype=torch.int32, device=DEVICE))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for law in (SamplingParams(repetition_penalty=1.2, no_repeat_ngram_size=2), SamplingParams()):
            state.fill(1, [1, 2], law, EOS)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_row_is_neutral_again_after_a_request_without_rules():
    tree, histories, _, logits = random_case(3)
    law = SamplingParams(no_repeat_ngram_size=1, suppress_tokens=[3], frequency_penalty=1, presence_penalty=1)
    state = filled(histories, [law] * 3, [1, 1, 1])
    for row in range(3):
        state.fill(row, [1, 2], SamplingParams(), EOS)
    rows = torch.arange(3)
    assert torch.equal(process(logits, tree, rows, rows + 2, state), logits)


def hf_text(model, prompt, num_tokens, **settings):
    ids = torch.tensor([prompt], device=model.device)
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=num_tokens, **{"do_sample": False, **settings})
    return out[0, len(prompt) :].tolist()


def loop_text(model, prompt, num_tokens, **settings):
    """Greedy text with one plain forward per token, processed by `by_transformers`."""
    ids, law, eos = list(prompt), SamplingParams(**settings), model.generation_config.eos_token_id
    for _ in range(num_tokens):
        with torch.inference_mode():
            scores = model(torch.tensor([ids], device=model.device)).logits[0, -1].float().cpu()
        ids.append(int(by_transformers(scores, ids, law, len(prompt)).argmax()))
        if ids[-1] in (eos if isinstance(eos, list) else [eos]):
            break
    return ids[len(prompt) :]


def apt_draft(model):
    """Return a draft that is right as long as nothing is penalised: a copy of the model."""
    return copy.deepcopy(model)


PROMPTS = [[5, 9, 5, 9, 6], [3, 4], [11, 12, 13, 14, 15, 16, 17, 11, 12]]
NUM_TOKENS = 20


@pytest.fixture(scope="module")
def references():
    """A model that ends its first text early, its texts without settings, and `generate`'s texts with each."""
    model = tiny_model("llama").to(DEVICE)
    model.generation_config.eos_token_id = [2, hf_text(model, PROMPTS[0], NUM_TOKENS)[9]]
    plain = [hf_text(model, p, NUM_TOKENS) for p in PROMPTS]
    texts = {name: [hf_text(model, p, NUM_TOKENS, **s) for p in PROMPTS] for name, s in CASES.items()}
    texts |= {name: [loop_text(model, p, NUM_TOKENS, **s) for p in PROMPTS] for name, s in OPENAI.items()}
    assert all(text != plain for text in texts.values())  # else they would show nothing
    return model, plain, texts


@SHAPES
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_greedy_text_equals_generate(references, shape, graphs):
    model, plain, texts = references
    engine = specdec.attach(model, apt_draft(model) if shape else None, max_batch=4, cuda_graph=graphs, **(shape or {}))
    for name, settings in (CASES | OPENAI).items():
        assert engine.generate(PROMPTS, max_new_tokens=NUM_TOKENS, **settings).tokens == texts[name], name
    assert engine.generate(PROMPTS, max_new_tokens=NUM_TOKENS).tokens == plain
    runners = engine.report().runners
    engine.detach()
    assert not graphs or all(c["eager"] == 0 for name, c in runners.items() if "prefill" not in name)


def test_what_the_model_ships_is_honoured_and_neighbours_keep_their_laws():
    model = tiny_model("llama").to(DEVICE)
    prompts = PROMPTS[:2]
    plain, penalised = ([hf_text(model, p, 24, **s) for p in prompts] for s in ({}, {"repetition_penalty": 1.4}))
    model.generation_config.repetition_penalty = 1.4
    engine = specdec.attach(model, apt_draft(model), num_steps=2, max_batch=2)
    assert engine.generate(prompts, max_new_tokens=24).tokens == penalised
    assert engine.generate(prompts, max_new_tokens=24, repetition_penalty=None).tokens == plain
    for mixed in ({"repetition_penalty": 1.4}, {"frequency_penalty": 1.0}):
        laws = [SamplingParams(), SamplingParams(**mixed)]
        text = penalised[1] if "repetition_penalty" in mixed else loop_text(model, prompts[1], 24, **mixed)
        assert engine.generate(prompts, max_new_tokens=24, sampling=laws).tokens == [plain[0], text]
    assert "repetition_penalty=1.4" in str(engine.report())


@SHAPES
def test_sampled_text_has_the_law_of_transformers(shape):
    """Chi-square test over 600 seeds of the second token, given the first, under penalty, bans and a bias."""
    model, prompt = tiny_model("llama").to(DEVICE), [5, 9, 5, 9, 6]
    rules = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "bad_words_ids": [[5], [9]], "logit_bias": {20: 2.0}}
    draft = apt_draft(model) if shape else None
    engine = specdec.attach(model, draft, max_batch=200, max_seq_len=32, **(shape or {}))
    law = SamplingParams(temperature=1.0, top_k=6, seed=0, **rules)
    pairs = torch.tensor(engine.generate([prompt] * 600, max_new_tokens=2, sampling=law, ignore_eos=True).tokens)
    first = int(pairs[:, 0].mode().values)
    seconds = pairs[pairs[:, 0] == first, 1]
    ids = [*prompt, first]
    scores = model(torch.tensor([ids], device=DEVICE)).logits[0, -1].detach().float().cpu()
    best = by_transformers(scores, ids, SamplingParams(**rules), len(prompt)).double().topk(6)
    observed = torch.stack([(seconds == t).sum() for t in best.indices]).double()
    assert observed.sum() == len(seconds)
    expected = best.values.softmax(-1) * observed.sum()
    assert stats.chisquare(observed.numpy(), expected.numpy()).pvalue > 1e-3


NUM_SMOLLM2 = 28 if torch.cuda.is_available() else 14
SMOLLM2_CASES = [
    {"repetition_penalty": 1.1, "no_repeat_ngram_size": 3},
    {"suppress_tokens": [28, 30], "begin_suppress_tokens": [504, 1780], "bad_words_ids": [[260, 2265]]},
    {"min_new_tokens": NUM_SMOLLM2},
][: None if torch.cuda.is_available() else 2]


@pytest.fixture(scope="module")
def smollm2_texts(smollm2):
    """Prompts, and the texts of `generate` with each of the settings."""
    model, tokenizer = smollm2
    prompts = chat_ids(["What is 17 times 3? Explain.", "Name three rivers of Europe."], tokenizer)
    return prompts, [[hf_text(model, p, NUM_SMOLLM2, **settings) for p in prompts] for settings in SMOLLM2_CASES]


SMOLLM2_SHAPES = [{"num_steps": 4, "topk": 4, "num_draft_tokens": 16}, {"num_steps": 3}]


@pytest.mark.parametrize("shape", SMOLLM2_SHAPES if torch.cuda.is_available() else SMOLLM2_SHAPES[:1])
def test_smollm2_equals_generate_with_its_shipped_draft(smollm2, smollm2_texts, shape):
    (model, tokenizer), (prompts, texts) = smollm2, smollm2_texts
    engine = specdec.attach(model, shipped.path(), tokenizer=tokenizer, max_batch=2, cuda_graph=True, **shape)
    try:
        for settings, expected in zip(SMOLLM2_CASES, texts, strict=True):
            out = engine.generate(prompts, max_new_tokens=NUM_SMOLLM2, **settings)
            assert out.tokens == expected, settings
            assert out.stats.tau > 1.1
    finally:
        engine.detach()


@pytest.mark.parametrize(
    ("law", "message"),
    [
        ({"suppress_tokens": [VOCAB]}, f"hold {VOCAB}; the target's vocabulary has {VOCAB} tokens"),
        ({"logit_bias": {-1: 1.0}}, r"item -1 is -1\): expected a mapping from token ids"),
        ({"logit_bias": {1: float("nan")}}, r"item 1 is nan\)"),
        ({"logit_bias": {1: 1e39}}, r"item 1 is 1e\+39\): .*up to 1e\+10"),  # infinite in float32,
        ({"logit_bias": [1]}, "expected a mapping"),
        ({"repetition_penalty": 0.0}, "expected a number from 1e-05"),
        ({"repetition_penalty": 1e-300}, "expected a number from 1e-05"),  # 0 in float32
        ({"presence_penalty": 2.5}, "presence_penalty=2.5: expected a number from -2 to 2; pass 0 to turn it off"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty=nan: expected a number from -2 to 2"),
        ({"temperature": 1e39}, r"number from 1e-05 to 1e\+10"),
        ({"no_repeat_ngram_size": 33}, "from 0 to 32"),
        ({"bad_words_ids": [[]]}, r"item 0 is \[\]\): expected a list of words, each a list of 1 to 32 token ids"),
        ({"bad_words_ids": [[5], [1] * 33]}, r"item 1 is \[1, .*each a list of 1 to 32 token ids"),
        ({"bad_words_ids": [[i % 99, i // 99] for i in range(MAX_BAD_WORDS + 1)]}, f"at most {MAX_BAD_WORDS}"),
        ({"min_new_tokens": True}, "min_new_tokens=True: expected an integer"),
        ({"suppress_tokens": "ab"}, "expected a list of token ids"),
    ],
)
def test_mistakes_are_named(law, message):
    engine = specdec.attach(tiny_model("llama"))
    with pytest.raises(ValueError, match=message):
        engine.generate([[3]], max_new_tokens=1, sampling=SamplingParams(**law))
